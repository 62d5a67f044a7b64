"""Checks of which runs may be compared: documents, windows, scored positions and tokenizers must match."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lm_eval_duel.errors import DuelError
from lm_eval_duel.results.runs import Run, Task
from lm_eval_duel.results.table import number

TWIN = "score it with --model duel-mdm --model_args pretrained=...,estimator=ar"  # windows and tokens as ours
PER_TOKEN = "token_perplexity"  # not comparable across tokenizers


def check(name: str, metric: str, compared: Sequence[Run], as_published: bool) -> list[str]:
    """The differences to list under a task's table; raises DuelError for one that makes its numbers incomparable.

    Every run is compared with the first, and its documents also with the first run that has samples: the documents
    must always be the same. Values per word and byte also need the same scored positions; other tokenizers and windows
    are only listed.
    """
    listed: dict[str, None] = {}
    first = compared[0]
    sampled = _first_with_samples(compared, name) or first
    for other in compared[1:]:
        for before in (first, sampled):
            for difference in documents(before.tasks[name], other.tasks[name], metric):
                raise _refusal(name, metric, difference, before, other)
        for difference in differences(first, other, name):
            if as_published or difference.is_allowed(metric):
                listed[difference.between(first, other)] = None
            else:
                raise _refusal(name, metric, difference, first, other)
    return list(listed)


def groups(name: str, metric: str, runs: Sequence[Run]) -> list[tuple[list[Run], str]]:
    """The runs of a task in groups that may be compared, each with its difference from the first one."""
    apart: list[tuple[list[Run], str]] = []
    for run in runs:
        reasons = [_reason_apart(name, metric, members, run) for members, _ in apart]
        if "" in reasons:
            members, _ = apart[reasons.index("")]
            members.append(run)
        else:
            apart.append(([run], reasons[0] if reasons else ""))
    return apart


def _reason_apart(name: str, metric: str, members: Sequence[Run], run: Run) -> str:
    """The reason that a run may not be compared with `members`; empty if it may.

    It is compared with the first of them and the first with samples.
    """
    for member in (members[0], _first_with_samples(members, name)):
        if member is None:
            continue
        found = documents(member.tasks[name], run.tasks[name], metric) + differences(member, run, name)
        for difference in found:
            is_of_tokenizers = difference.field.startswith("tokenizer")
            if metric == PER_TOKEN or not is_of_tokenizers:  # per word and byte tokenizers may differ
                there = f"{difference.second} here, {difference.first} in the first table of {name}"
                return f"{difference.field}: {there}"
    return ""


def _first_with_samples(runs: Sequence[Run], name: str) -> Run | None:
    for run in runs:
        if run.tasks[name].documents is not None:
            return run
    return None


def _refusal(name: str, metric: str, difference: Difference, first: Run, second: Run) -> DuelError:
    """The error that two runs cannot be compared, and the ways to compare them."""
    hint = ""
    if not difference.is_of_documents:
        hint += ", or list the difference under the table with --as_published"
    hint += ", or give each its own table with --apart"
    return DuelError(
        f"{metric} of {name} cannot be compared: {difference.between(first, second)}. "
        f"To compare, {difference.remedy}{hint}."
    )


# ---------------------------------------------------------------- differences of two runs


class Difference(NamedTuple):
    """A field in which two runs differ, both values, and the remedy."""

    field: str
    first: str
    second: str
    remedy: str

    @property
    def is_of_documents(self) -> bool:
        return self.field.startswith(("documents", "units"))

    def is_allowed(self, metric: str) -> bool:
        """True if values of this metric may be compared in spite of it."""
        return metric != PER_TOKEN and self.field.startswith(("tokenizer", "windows"))

    def between(self, first: Run, second: Run) -> str:
        return f"{self.field}: {self.first} in {first.name}, but {self.second} in {second.name}"


def documents(first: Task, second: Task, metric: str) -> list[Difference]:
    """The first difference of two document sets, or none: by the results files, then by the samples if both have them.

    One is enough for an error, and the others mostly follow from it.
    """
    for difference in _identity_differences(first, second):
        return [difference]
    if first.documents is not None and second.documents is not None:
        for difference in _sample_differences(first, second, metric):
            return [difference]
    return []


def _identity_differences(first: Task, second: Task) -> Iterator[Difference]:
    """Differences of what the results files say of the documents.

    Their hash covers our token counts too, which differ between tokenizers; with counts of documents the limit is not
    needed. Samples say more than the counts, the limit and the hash.
    """
    remedy = "run both on the same documents (task version, --limit, --num_fewshot)"
    one = {"limit": "none", **first.identity}
    other = {"limit": "none", **second.identity}
    fields = ["shots", "version"]
    if first.documents is None or second.documents is None:
        counted = "documents" in one and "documents" in other
        fields.insert(1, "documents" if counted else "limit")
        if PER_TOKEN not in first.metrics and PER_TOKEN not in second.metrics:
            fields.append("hash")
    for field in fields:
        if field in one and field in other and one[field] != other[field]:
            shown = field if field == "documents" else f"documents ({field})"
            yield Difference(shown, one[field], other[field], remedy)


def _sample_differences(first: Task, second: Task, metric: str) -> Iterator[Difference]:
    """Differences of sampled documents. Their words and bytes must be equally many, too; tokens may differ."""
    keys = first.documents.numbers.keys()
    other_keys = second.documents.numbers.keys()
    if keys != other_keys:
        shared = f"({len(keys & other_keys)} of them in both)"
        remedy = "run both on the same documents (task version, --limit, --num_fewshot)"
        yield Difference("documents", f"{len(keys)} {shared}", f"{len(other_keys)} {shared}", remedy)
        return
    for name in sorted({metric, "bits_per_byte"} - {PER_TOKEN}):
        others = second.documents.values.get(name, {})
        for key, (_, units) in first.documents.values.get(name, {}).items():
            if key in others and others[key][1] != units:
                place = f"in document {key[:12]}"
                sizes = [f"{number(size, 'g')} {place}" for size in (units, others[key][1])]
                yield Difference(f"units of {name}", *sizes, "run both with the same version of the task")


def differences(first: Run, second: Run, name: str) -> list[Difference]:
    """The differences of two runs of a task that affect their perplexities, other than the document set."""
    result = []
    twin = _twin(first, second)
    tokens = same_tokens(first, second, name)
    if not tokens:
        field = "tokenizer"
        remedy = "compare word or byte perplexity (--metric word_perplexity)"
        if tokens is None:
            field = "tokenizer (unknown)"
            remedy = f"{twin}run both with --log_samples, so that their token counts can be compared, or {remedy}"
        result.append(Difference(field, _tokenizer(first, name), _tokenizer(second, name), remedy))
    if positions(first) != positions(second):
        remedy = "run with bos=given (or none) on our side"
        result.append(Difference("scored positions", positions(first), positions(second), remedy))
    if first.tasks[name].rolling:
        if not _same_windows(first, second, name, bool(tokens)):
            remedy = "score both with windows=harness and a max_length that gives equal target positions, or with one "
            remedy = f"{twin}{remedy}that holds every document"
            result.append(Difference("windows", windows_of(first), windows_of(second), remedy))
    elif first.config.duel.get("cut_contexts") or second.config.duel.get("cut_contexts"):
        cuts = [f"{run.config.duel.get('cut_contexts', 0)} contexts cut at {run.max_length}" for run in (first, second)]
        result.append(Difference("contexts", *cuts, "raise max_length"))
    return result


def _twin(first: Run, second: Run) -> str:
    """The simplest remedy for a model of the harness beside one of ours: score it with this package, too."""
    stock = [run for run in (first, second) if not run.config.ours]
    if len(stock) != 1 or not stock[0].config.autoregressive:
        return ""
    twin = TWIN.replace("it", stock[0].label, 1).replace("...", stock[0].pretrained)
    return f"{twin} (its windows and tokens are then the same as ours; max_length sets their length), or "


# ---------------------------------------------------------------- tokens, positions, windows


def same_tokens(first: Run, second: Run, name: str) -> bool | None:
    """True if two runs count the same tokens in a task; None if that is not known."""
    both = (first, second)
    tokenizers = [run.spec.get("tokenizer") if run.config.ours else None for run in both]
    if None not in tokenizers and tokenizers[0] == tokenizers[1]:
        return True
    counts = [run.tasks[name].tokens for run in both]
    if None not in counts:
        return counts[0] == counts[1]
    if None not in tokenizers:
        return False
    # Words are the same in both, so equal ratios of words to tokens mean equally many tokens.
    words_per_token = [_words_per_token(run.tasks[name]) for run in both]
    if None in words_per_token:
        return None
    return math.isclose(*words_per_token, rel_tol=1e-6)


def _words_per_token(task: Task) -> float | None:
    """Words over tokens: the ratio of nats per token to nats per word. None if a perplexity is not above 1."""
    per_token = task.metrics.get(PER_TOKEN, 0.0)
    per_word = task.metrics.get("word_perplexity", 0.0)
    if min(per_token, per_word) <= 1:
        return None
    return math.log(per_token) / math.log(per_word)


def _tokenizer(run: Run, name: str) -> str:
    """A description of a run's tokenizer, for messages."""
    counts = run.tasks[name].tokens
    tokenizer = run.spec.get("tokenizer", "unknown") if run.config.ours else "unknown"
    return tokenizer if counts is None else f"{tokenizer} ({number(sum(counts.values()), '.0f')} tokens)"


def positions(run: Run) -> str:
    """The scored positions of a row: `the text` only, unless a benchmark's convention says otherwise."""
    bos = run.config.duel.get("bos") or run.spec.get("special_tokens", "").rpartition("bos=")[2] or "given"
    bos = str(bos).split(",")[0]
    return "the text" if not run.config.ours or bos in ("given", "none") else f"bos={bos}"


def windows_of(run: Run) -> str:
    """The windows of a run as text; those of other models are derived."""
    size = "unknown length" if run.capacity is None else f"{run.capacity} target positions"
    return f"{run.windows}, {size}{'' if run.config.ours else ' (derived)'}"


def _same_windows(first: Run, second: Run, name: str, same_tokenizer: bool) -> bool:
    """True if documents are cut alike: the same windows, or every document is one window in both runs."""
    same = (first.windows, first.capacity) == (second.windows, second.capacity)
    if first.capacity is None or second.capacity is None:
        return (
            same
            and first.config.ours == second.config.ours
            and first.spec.get("max_length") == second.spec.get("max_length")
        )
    if same:
        return True
    one = first.longest(name)
    other = second.longest(name)
    if same_tokenizer:  # what is known of one run holds for both
        known = [tokens for tokens in (one, other) if tokens is not None]
        longest = max(known, default=None)
        one = longest
        other = longest
    if one is None or other is None:
        return False
    return one <= first.capacity and other <= second.capacity
