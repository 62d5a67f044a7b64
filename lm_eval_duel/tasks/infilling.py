"""Multiple choice and infilling from the user's own files: log p(target | prefix, suffix), scored exactly.

A masked diffusion model sees the text after a gap as well as the text before it. The row is prefix | gap | suffix, with
the suffix visible from the first step. Autoregressive models cannot do this, so their answers are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from lm_eval.api.metrics import mean

from lm_eval_duel.errors import DuelError
from lm_eval_duel.tasks import files, metadata
from lm_eval_duel.tasks.data import TOKENS, perplexity
from lm_eval_duel.tasks.guarded import GuardedTask
from lm_eval_duel.text.annotated import BLIND, Gap, count_units, split_at_borders

if TYPE_CHECKING:
    import datasets
    from lm_eval.api.instance import Instance

BINS = 10  # of the expected calibration error
ReadRow: TypeAlias = Callable[[str, dict[str, Any]], dict[str, Any]]  # (name of the row, row) -> document


class Gaps(GuardedTask):
    """`duel_infill` and `duel_choice`: continuations are followed by the document's `suffix`."""

    def construct_requests(self, doc: dict[str, Any], ctx: str, **kwargs: Any) -> list[Instance] | Instance:
        """The harness's requests, with the suffix attached to each continuation."""
        requests = super().construct_requests(doc, ctx, **kwargs)
        one_per_option = requests if isinstance(requests, list) else [requests]  # a gap has a single request
        for request in one_per_option:
            context, continuation = request.arguments
            request.arguments = (context, Gap(continuation, doc["suffix"]))
        return requests

    def process_results(self, doc: dict[str, Any], results: list[Any]) -> dict[str, Any] | None:
        """The metrics; raises DuelError if the answers come from a model that did not see the suffix.

        Models that join context and gap are refused before they score anything (see `Gap`); others are refused here.
        """
        log_probs = [log_prob for log_prob, _ in results]
        saw_suffix = all(getattr(log_prob, "sees_suffix", False) for log_prob in log_probs)
        if doc["suffix"] and not saw_suffix:
            raise DuelError(f"Task {self.config.task} {BLIND}")
        metrics = super().process_results(doc, results)
        # Bounds and estimates of the options give no probabilities of a choice. Plain floats of other models are exact.
        are_exact = all(getattr(log_prob, "is_exact", True) for log_prob in log_probs)
        if self.OUTPUT_TYPE == "multiple_choice" and are_exact:
            metrics |= calibration([float(log_prob) for log_prob in log_probs], doc["label"])
        return metrics

    def aggregation(self) -> dict[str, Any]:
        """The function that combines the items of documents into each metric of the task."""
        return {**super().aggregation(), "brier": mean, "ece": expected_calibration_error}

    def higher_is_better(self) -> dict[str, bool]:
        """The direction of each metric."""
        return {**super().higher_is_better(), "brier": False, "ece": False}


# ---------------------------------------------------------------- calibration of choices


def calibration(log_probs: Sequence[float], label: int) -> dict[str, Any]:
    """The Brier score of one question, and the item of `expected_calibration_error`; empty if no option is possible.

    The probability of an option is the softmax of the summed log-probabilities over the options. The Brier score is
    multi-class, the sum over options of (probability - 1 if it is the right one)^2: 0 is best, 2 worst.
    """
    highest = max(log_probs)
    if highest == -math.inf:
        return {}
    weights = [math.exp(log_prob - highest) for log_prob in log_probs]  # at least one is 1, so not all underflow
    total = math.fsum(weights)
    probabilities = [weight / total for weight in weights]
    brier = math.fsum((p - (n == label)) ** 2 for n, p in enumerate(probabilities))
    top = max(probabilities)
    is_right = probabilities.index(top) == label
    return {"brier": brier, "ece": (top, float(is_right))}


def expected_calibration_error(items: Sequence[tuple[float, float]]) -> float:
    """The mean of |accuracy - confidence| over ten equal bins of the top probability, weighted by their questions.

    `items`: (top probability, 1 if that option is right) of each question.
    """
    bins: dict[int, list[tuple[float, float]]] = {}
    for top, right in items:
        number = min(int(top * BINS), BINS - 1)  # a probability of 1 is in the last bin
        bins.setdefault(number, []).append((top, right))
    # |accuracy - confidence| of a bin, times its questions
    gaps = []
    for members in bins.values():
        gap = math.fsum(right - top for top, right in members)
        gaps.append(abs(gap))
    return math.fsum(gaps) / len(items)


# ---------------------------------------------------------------- documents


def gaps(**model_args: Any) -> dict[str, datasets.Dataset]:
    """Rows of `prefix`, `target` and `suffix` of the files that --metadata names."""
    return _dataset("duel_infill", model_args, _gap)


def choices(**model_args: Any) -> dict[str, datasets.Dataset]:
    """Rows of `prefix`, `options`, `suffix` and `label` of the files that --metadata names."""
    return _dataset("duel_choice", model_args, _choice)


def target_perplexity(doc: dict[str, Any], results: list[Any]) -> dict[str, Any]:
    """Perplexities of the target, and whether argmax decoding writes it.

    With one document a row, `results` holds its (log-likelihood, is_greedy). Words and bytes are counted in the text
    that was scored: spaces at the end of the prefix belong to it, spaces at the end of the target do not.
    """
    [(log_prob, is_greedy)] = results
    _, scored, _ = split_at_borders(doc["prefix"], doc["target"], doc["suffix"])
    units = count_units(scored, between=True)._asdict()
    document = {"text": scored, TOKENS: getattr(log_prob, "tokens", None), **units}
    return {**perplexity(document, [log_prob]), "acc": float(is_greedy)}


def _dataset(task: str, model_args: dict[str, Any], read: ReadRow) -> dict[str, datasets.Dataset]:
    """The rows of the files of a task, each as `read` makes a document of it."""
    patterns = metadata.files_of(metadata.read(model_args), task)
    records = [read(name, row) for name, row in files.rows(patterns)]
    if not records:
        raise DuelError(f"{', '.join(patterns)}: no row; task {task} needs at least one.")
    return metadata.test_split(records)


def _surroundings(name: str, row: dict[str, Any]) -> list[str]:
    """Prefix and suffix; a missing one is empty."""
    texts = []
    for key in ("prefix", "suffix"):
        is_missing = row.get(key) is None
        texts.append("" if is_missing else files.text_column(name, row, key))
    return texts


def _gap(name: str, row: dict[str, Any]) -> dict[str, Any]:
    target = files.text_column(name, row, "target")
    if not target:
        raise DuelError(f"{name}: column 'target' is empty, so there is nothing to score; leave this row out.")
    prefix, suffix = _surroundings(name, row)
    return {"prefix": prefix, "target": target, "suffix": suffix}


def _choice(name: str, row: dict[str, Any]) -> dict[str, Any]:
    options = files.column(name, row, "options")
    label = files.column(name, row, "label")
    are_texts = isinstance(options, list) and all(isinstance(option, str) and option for option in options)
    if not are_texts or len(options) < 2:
        raise DuelError(f"{name}: column 'options' must be a list of two or more texts, none empty; got {options!r}.")
    if isinstance(label, str) and label in options:
        label = options.index(label)
    if not isinstance(label, int) or isinstance(label, bool) or not 0 <= label < len(options):
        raise DuelError(
            f"{name}: column 'label' must be one of the options, or its number from 0 to {len(options) - 1}; "
            f"got {label!r}."
        )
    prefix, suffix = _surroundings(name, row)
    return {"prefix": prefix, "options": options, "suffix": suffix, "label": label}
