"""Checks of which runs may be compared: documents, windows, scored positions and tokenizers must match."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from lm_eval_duel.errors import DuelError
from lm_eval_duel.results.read import Run, Task

TWIN = "score it with --model duel-mdm --model_args pretrained=...,estimator=ar"  # windows and tokens as ours
PER_TOKEN = "token_perplexity"  # not comparable across tokenizers


class Difference(NamedTuple):
    """A field in which two runs differ, both values, and the remedy."""

    field: str
    here: str
    there: str
    remedy: str

    def between(self, here: Run, there: Run) -> str:
        """The difference as a sentence that names both files."""
        return f"{self.field}: {self.here} in {here.name}, but {self.there} in {there.name}"


def windows_of(run: Run) -> str:
    """The windows of a run as text, and whether they are derived."""
    size = "unknown length" if run.capacity is None else f"{run.capacity} target positions"
    return f"{run.windows}, {size}{'' if run.ours else ' (derived)'}"


def positions(run: Run) -> str:
    """The scored positions of a row: `the text` only, unless a benchmark's convention says otherwise."""
    bos = str(run.duel.get("bos") or run.spec.get("special_tokens", "").rpartition("bos=")[2] or "given").split(",")[0]
    return "the text" if not run.ours or bos in ("given", "none") else f"bos={bos}"


def same_tokens(here: Run, there: Run, name: str) -> bool | None:
    """True if two runs count the same tokens in a task; None if that is not known."""
    ours = [run.spec.get("tokenizer") if run.ours else None for run in (here, there)]
    if None not in ours and ours[0] == ours[1]:
        return True
    counts = [run.tasks[name].tokens for run in (here, there)]
    if None not in counts:
        return counts[0] == counts[1]
    if None not in ours:
        return False
    both = [[run.tasks[name].metrics.get(m, 0.0) for m in (PER_TOKEN, "word_perplexity")] for run in (here, there)]
    if min(map(min, both)) <= 1:
        return None
    shares = [math.log(token) / math.log(word) for token, word in both]  # words per token
    return math.isclose(*shares, rel_tol=1e-6)


def documents(here: Task, there: Task, metric: str) -> Difference | None:
    """The difference of two document sets, judged by the samples if both have them, else by the results files.

    The hash of the results files covers our token counts too, which differ between tokenizers; with counts of documents
    the limit is not needed. With samples the counts of words or bytes must be equal, too; tokens may differ.
    """
    both, remedy = (here, there), "run both on the same documents (task version, --limit, --num_fewshot)"
    sampled = here.documents is not None and there.documents is not None
    fields = ["shots", "version"]
    if not sampled:
        limit = [] if all("documents" in task.identity for task in both) else ["limit"]
        digest = [] if any(PER_TOKEN in task.metrics for task in both) else ["hash"]
        fields = ["shots", "documents", *limit, "version", *digest]
    for field in fields:
        values = [task.identity.get(field, "none" if field == "limit" else None) for task in both]
        if None not in values and values[0] != values[1]:
            return Difference("documents" if field == "documents" else f"documents ({field})", *values, remedy)
    if not sampled:
        return None
    keys = [task.documents.numbers.keys() for task in both]
    if keys[0] != keys[1]:
        shared = len(keys[0] & keys[1])
        return Difference("documents", *(f"{len(k)} ({shared} of them in both)" for k in keys), remedy)
    for name in sorted({metric, "bits_per_byte"} - {PER_TOKEN}):
        known = [task.documents.values.get(name, {}) for task in both]
        for key in known[0].keys() & known[1].keys() if all(known) else ():
            if known[0][key][1] != known[1][key][1]:
                sizes = [f"{values[key][1]:g} in document {key[:12]}" for values in known]
                return Difference(f"units of {name}", *sizes, "run both with the same version of the task")
    return None


def differences(here: Run, there: Run, name: str) -> list[Difference]:
    """The differences of two runs of a task that affect their perplexities, other than the document set."""
    result = []
    both, tokens = (here, there), same_tokens(here, there, name)
    if not tokens:
        remedy = "compare word or byte perplexity (--metric word_perplexity)"
        if tokens is None:
            logged = "run both with --log_samples, so that their token counts can be compared, or "
            remedy = _twin(here, there) + logged + remedy
        field = "tokenizer" if tokens is False else "tokenizer (unknown)"
        result.append(Difference(field, *(_tokenizer(run, name) for run in both), remedy))
    if positions(here) != positions(there):
        remedy = "run with bos=given (or none) on our side"
        result.append(Difference("scored positions", *map(positions, both), remedy))
    if here.tasks[name].rolling:
        if not _same_windows(here, there, name, bool(tokens)):
            remedy = _twin(here, there) + (
                "score both with windows=harness and a max_length that gives equal target positions, or with one that "
                "holds every document"
            )
            result.append(Difference("windows", *map(windows_of, both), remedy))
    elif any(run.duel.get("cut_contexts") for run in both):
        cuts = [f"{run.duel.get('cut_contexts', 0)} contexts cut at {run.max_length}" for run in both]
        result.append(Difference("contexts", *cuts, "raise max_length"))
    return result


def _tokenizer(run: Run, name: str) -> str:
    """A description of a run's tokenizer, for messages."""
    counts = run.tasks[name].tokens
    tokenizer = run.spec.get("tokenizer", "unknown") if run.ours else "unknown"
    return tokenizer if counts is None else f"{tokenizer} ({sum(counts.values()):.0f} tokens)"


def _same_windows(here: Run, there: Run, name: str, same_tokenizer: bool) -> bool:
    """True if documents are cut alike: the same windows, or every document is one window in both runs."""
    both = here, there
    same = (here.windows, here.capacity) == (there.windows, there.capacity)
    if None in (here.capacity, there.capacity):
        return same and here.ours == there.ours and here.spec.get("max_length") == there.spec.get("max_length")
    longest = [_longest(run, run.tasks[name]) for run in both]
    if same_tokenizer:
        longest = [max((n for n in longest if n is not None), default=None)] * 2
    return same or all(n is not None and n <= run.capacity for n, run in zip(longest, both, strict=True))


def _longest(run: Run, task: Task) -> int | None:
    """Tokens of the longest document, from the samples, else from the results of a run that scored every document."""
    if task.tokens is not None:
        return int(max(task.tokens.values(), default=0))
    if not run.ours or task.computed < (task.size or 0):
        return None
    return task.entry.get("longest_document", run.duel.get("longest_document"))


def _twin(here: Run, there: Run) -> str:
    """The simplest remedy if one of two runs is of another model: score that model with this package."""
    stock = [run for run in (here, there) if not run.ours]
    if len(stock) != 1 or not stock[0].autoregressive:
        return ""
    twin = TWIN.replace("it", stock[0].label, 1).replace("...", stock[0].pretrained)
    return f"{twin} (its windows and tokens are then the same as ours; max_length sets their length), or "


def between(name: str, metric: str, runs: Sequence[Run], other: Run) -> list[tuple[Run, Difference]]:
    """The differences of a run from the first of `runs`, and of its documents from the first with samples."""
    first = runs[0]
    sampled = next((run for run in runs if run.tasks[name].documents is not None), first)
    found = [(here, documents(here.tasks[name], other.tasks[name], metric)) for here in (first, sampled)]
    found += [(first, difference) for difference in differences(first, other, name)]
    return [(here, difference) for here, difference in found if difference is not None]


def check(name: str, metric: str, compared: Sequence[Run], as_published: bool) -> list[str]:
    """The differences to list under a task's table; raises DuelError for one that makes its numbers incomparable.

    The documents must always be the same. Values per word and byte also need the same scored positions; other
    tokenizers and windows are only listed.
    """
    listed: dict[str, None] = {}
    for other in compared[1:]:
        for here, difference in between(name, metric, compared, other):
            always = difference.field.startswith(("documents", "units"))
            across = metric != PER_TOKEN and difference.field.startswith(("tokenizer", "windows"))
            if always or not (as_published or across):
                hint = "" if always else ", or list the difference under the table with --as_published"
                what = f"{metric} of {name} cannot be compared: {difference.between(here, other)}"
                raise DuelError(f"{what}. To compare, {difference.remedy}{hint}.")
            listed[difference.between(here, other)] = None
    return list(listed)
