"""Checks of which runs may be compared: documents, windows, scored positions and tokenizers must match."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from lm_eval_duel.errors import DuelError, counted
from lm_eval_duel.results.runs import Run, Task
from lm_eval_duel.results.spec_entries import scored_positions
from lm_eval_duel.results.table import number

TWIN = "score it with lm-eval-duel run --model_args pretrained=...,estimator=ar"  # windows and tokens as ours
TWIN_IN_SCORE = "name one to lm-eval-duel score: --compare pretrained=...,estimator=ar"
UNKNOWN_TOKENIZER = "tokenizer (unknown)"
WINDOWS = "windows"
NAMED = 2  # runs of a difference that are named
PER_TOKEN = "token_perplexity"  # not comparable across tokenizers
SAME_TEXTS = "score the same texts (the same files, --lines, --field and --limit)"
SAME_DOCUMENTS = "run both on the same documents (task version, --limit, --num_fewshot)"
SAME_WINDOWS = (
    "score both with windows=harness and a max_length that gives equal target positions, or with one that holds every "
    "document"
)


def check(name: str, metric: str, compared: Sequence[Run], as_published: bool) -> list[str]:
    """The differences to list under a task's table; raises DuelError for one that makes its numbers incomparable.

    Every run is compared with the first, and its documents also with the first run that has samples: the documents
    must always be the same. Values per word and byte also need the same scored positions; other tokenizers and windows
    are only listed, each once with the runs that differ in it.
    """
    listed: dict[Difference, list[Run]] = {}
    first = compared[0]
    sampled = _first_with_samples(compared, name) or first
    for other in compared[1:]:
        for before in (first, sampled):
            for difference in documents(before.tasks[name], other.tasks[name], metric):
                raise _refusal(name, metric, difference, before, other)
        for difference in differences(first, other, name):
            if as_published or difference.is_allowed(metric):
                listed.setdefault(difference, []).append(other)
            else:
                if difference.field == WINDOWS:  # its remedy is for two runs; this one does for all
                    difference = difference._replace(remedy=_same_windows_remedy(compared) or difference.remedy)
                raise _refusal(name, metric, difference, first, other)
    return [difference.between(first, *others) for difference, others in listed.items()]


def groups(name: str, metric: str, runs: Sequence[Run]) -> list[tuple[list[Run], str]]:
    """The runs of a task in groups that may be compared, each with its difference from the first one."""
    apart: list[tuple[list[Run], str]] = []
    for run in runs:
        from_first = ""  # the difference from the first group
        for members, _ in apart:
            reason = _reason_apart(name, metric, members, run)
            if not reason:
                members.append(run)
                break
            from_first = from_first or reason
        else:  # no group takes it
            apart.append(([run], from_first))
    return apart


def _reason_apart(name: str, metric: str, members: Sequence[Run], run: Run) -> str:
    """The reason that a run may not be compared with `members`; empty if it may.

    It is compared with the first of them and the first with samples.
    """
    for member in (members[0], _first_with_samples(members, name)):
        if member is None:
            continue
        of_documents = documents(member.tasks[name], run.tasks[name], metric)
        for difference in [*of_documents, *differences(member, run, name)]:
            if metric != PER_TOKEN and difference.is_of_tokenizers:
                continue  # words and bytes are the same for every tokenizer
            there = f"{difference.second} here, {difference.first} in {member.name}"
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
    remedy = difference.remedy
    if remedy == SAME_DOCUMENTS and first.is_of_score:
        remedy = SAME_TEXTS
    return DuelError(
        f"{metric} of {first.label_of(name)} cannot be compared: {difference.between(first, second)}. "
        f"To compare, {remedy}{hint}."
    )


# ---------------------------------------------------------------- differences of two runs


class Difference(NamedTuple):
    """A field in which two runs differ, both values, and the remedy.

    `of_tokens`: it comes of other tokenizers, so values per word or byte may be compared in spite of it.
    """

    field: str
    first: str
    second: str
    remedy: str
    of_tokens: bool = False

    @property
    def is_of_documents(self) -> bool:
        return self.field.startswith(("documents", "units"))

    @property
    def is_of_tokenizers(self) -> bool:
        return self.field.startswith("tokenizer")

    @property
    def sentence(self) -> str:
        """The difference as a reason against a verdict."""
        if self.field == UNKNOWN_TOKENIZER:
            return "the tokenizers may differ"
        return "the tokenizers differ" if self.is_of_tokenizers else f"the {self.field} differ"

    def is_allowed(self, metric: str) -> bool:
        """True if values of this metric may be compared in spite of it."""
        return metric != PER_TOKEN and self.of_tokens

    def between(self, first: Run, *others: Run) -> str:
        """A line on the first run and the others, which share the second value. Of many, some are named."""
        names = ", ".join(run.name for run in others[:NAMED])
        if len(others) > NAMED:
            names += f" and {len(others) - NAMED} more"
        return f"{self.field}: {self.first} in {first.name}, but {self.second} in {names}"


def documents(first: Task, second: Task, metric: str) -> list[Difference]:
    """The first difference of two document sets, or none: by the results files, then by the samples if both have them.

    One is enough for an error, and the others mostly follow from it.
    """
    sampled = first.documents is not None and second.documents is not None
    difference = next(identity_differences(first, second, sampled), None)
    if difference is None and sampled:
        difference = next(_sample_differences(first, second, metric), None)
    return [] if difference is None else [difference]


def identity_differences(first: Task, second: Task, sampled: bool) -> Iterator[Difference]:
    """Differences of what the results files say of the documents. `sampled`: both have samples.

    Their hash covers our token counts too, which differ between tokenizers; with counts of documents the limit is not
    needed. Samples say more than the counts, the limit and the hash.
    """
    of_first = {"limit": "none", **first.identity}
    of_second = {"limit": "none", **second.identity}
    fields = ["shots", "version"]
    if not sampled:
        are_counted = "documents" in of_first and "documents" in of_second
        fields = ["shots", "documents" if are_counted else "limit", "version"]
        if PER_TOKEN not in first.metrics and PER_TOKEN not in second.metrics:
            fields.append("hash")
    for field in fields:
        if field in of_first and field in of_second and of_first[field] != of_second[field]:
            shown = field if field == "documents" else f"documents ({field})"
            yield Difference(shown, of_first[field], of_second[field], SAME_DOCUMENTS)


def _sample_differences(first: Task, second: Task, metric: str) -> Iterator[Difference]:
    """Differences of sampled documents. Their words and bytes must be equally many, too; tokens may differ."""
    keys = first.documents.numbers.keys()
    other_keys = second.documents.numbers.keys()
    if keys != other_keys:
        shared = f"({len(keys & other_keys)} of them in both)"
        yield Difference("documents", f"{len(keys)} {shared}", f"{len(other_keys)} {shared}", SAME_DOCUMENTS)
        return
    for name in sorted({metric, "bits_per_byte"} - {PER_TOKEN}):
        values = first.documents.values.get(name, {})
        other_values = second.documents.values.get(name, {})
        for key, (_, units) in values.items():
            if key not in other_values:
                continue
            _, other_units = other_values[key]
            if units == other_units:
                continue
            document = f"in document {key[:12]}"
            yield Difference(
                field=f"units of {name}",
                first=f"{number(units, 'g')} {document}",
                second=f"{number(other_units, 'g')} {document}",
                remedy="run both with the same version of the task",
            )


def differences(first: Run, second: Run, name: str) -> list[Difference]:
    """The differences of two runs of a task that affect their perplexities, other than the document set."""
    result = []
    twin = _twin(first, second)
    tokens = same_tokens(first, second, name)
    if not tokens:
        field = "tokenizer"
        remedy = "compare word or byte perplexity (--metric word_perplexity)"
        if tokens is None:
            field = UNKNOWN_TOKENIZER
            remedy = f"{twin}run both with --log_samples, so that their token counts can be compared, or {remedy}"
        described = _described_tokenizer(first, name)
        other_described = _described_tokenizer(second, name)
        result.append(Difference(field, described, other_described, remedy, of_tokens=True))
    rolling = first.tasks[name].rolling
    described, other_described = (positions(run, rolling) for run in (first, second))
    if described != other_described:
        remedy = "run with bos=given (or none) on our side"
        if first.scores_bos or second.scores_bos:
            remedy = "run --model hf with add_bos_token=False"
        result.append(Difference("scored positions", described, other_described, remedy))
    if rolling:
        if not _same_windows(first, second, name, bool(tokens)):
            remedy = _same_windows_remedy([first, second]) or f"{twin}{SAME_WINDOWS}"
            # Other tokens fill windows with other texts; of the same tokens, windows can be equal.
            result.append(Difference(WINDOWS, windows_of(first), windows_of(second), remedy, of_tokens=not tokens))
    elif not are_contexts_alike(first, second, name):
        cuts = [_described_contexts(run, name) for run in (first, second)]
        result.append(Difference("contexts", *cuts, "raise max_length until none is cut"))
    return result


def _same_windows_remedy(runs: Sequence[Run]) -> str:
    """The remedy for other windows if all runs are ours and their sizes are known; else empty."""
    for run in runs:
        if not run.config.ours or run.capacity is None or run.max_length is None:
            return ""
    return _remedy_of_few(runs) or f"score them again, {equal_windows(runs)}, and name the new results only"


def _remedy_of_few(runs: Sequence[Run]) -> str:
    """The remedy to make again only the results whose windows are not those of most; empty if these may not fit.

    A shorter row always fits; a longer one is known to if the same model has a result with it. A result that shares its
    file with others cannot be left out.
    """
    in_files = Counter(run.written for run in runs)
    of_sizes: dict[tuple[str, int], list[Run]] = {}
    for run in runs:
        of_sizes.setdefault((run.windows, run.capacity), []).append(run)
    most = max(of_sizes.values(), key=len)
    if 2 * len(most) <= len(runs):
        return ""
    longest: dict[Any, int] = {}  # of each model
    for run in runs:
        longest[run.key] = max(run.max_length, longest.get(run.key, 0))
    arguments = []
    for run in runs:
        if run in most:
            continue
        length = run.max_length - (run.capacity - most[0].capacity)  # they differ by special tokens
        if run.windows != most[0].windows or length > longest[run.key] or in_files[run.written] > 1:
            return ""
        arguments.append(f"{run.name} again with max_length={length}")
    return f"make {' and '.join(arguments)}, and name the new results instead"


def are_contexts_alike(first: Run, second: Run, name: str) -> bool:
    """True if no context of a task was cut, or equally many, at the same length and with the same tokenizer."""
    count = first.cut_contexts(name)
    other_count = second.cut_contexts(name)
    if not count and not other_count:
        return True
    same_tokenizer = _tokenizer(first) == _tokenizer(second)
    return same_tokenizer and (count, first.capacity) == (other_count, second.capacity)


def cut_contexts(run: Run, name: str) -> str:
    """The contexts of a task that a run of ours has cut, for messages."""
    return f"{counted(run.cut_contexts(name), 'context')} cut at {run.max_length}"


def _described_contexts(run: Run, name: str) -> str:
    """The contexts that a run has cut, and what decides where; the harness does not count those of other models."""
    if not run.config.ours:
        return "an unknown number cut"
    return f"{run.cut_contexts(name)} cut at {run.max_length} ({run.capacity} positions, tokenizer {_tokenizer(run)})"


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
    tokenizer = _tokenizer(first)
    other_tokenizer = _tokenizer(second)
    are_named = tokenizer is not None and other_tokenizer is not None
    if are_named and tokenizer == other_tokenizer:
        return True

    counts = first.tasks[name].tokens
    other_counts = second.tasks[name].tokens
    if counts is not None and other_counts is not None:
        return counts == other_counts
    if are_named:
        return False

    # Words are the same in both, so equal ratios of words to tokens mean equally many tokens.
    ratio = _words_per_token(first.tasks[name])
    other_ratio = _words_per_token(second.tasks[name])
    if ratio is None or other_ratio is None:
        return None
    return math.isclose(ratio, other_ratio, rel_tol=1e-6)


def _tokenizer(run: Run) -> str | None:
    """The tokenizer of a run by its digest in the spec; None for other models of the harness, which name none."""
    return run.spec.get("tokenizer") if run.config.ours else None


def _words_per_token(task: Task) -> float | None:
    """Words over tokens: the ratio of nats per token to nats per word. None if a perplexity is not above 1."""
    per_token = task.metrics.get(PER_TOKEN, 0.0)
    per_word = task.metrics.get("word_perplexity", 0.0)
    if min(per_token, per_word) <= 1:
        return None
    return math.log(per_token) / math.log(per_word)


def _described_tokenizer(run: Run, name: str) -> str:
    """A description of a run's tokenizer, for messages."""
    tokenizer = _tokenizer(run) or "unknown"
    counts = run.tasks[name].tokens
    if counts is None:
        return tokenizer
    return f"{tokenizer} ({number(sum(counts.values()), '.0f')} tokens)"


def positions(run: Run, rolling: bool) -> str:
    """The scored positions of a row: `the text` only, unless a benchmark's convention says otherwise.

    `rolling`: of whole texts, at whose start --model hf may score a BOS.
    """
    if not run.config.ours:
        return "a BOS and the text (add_bos_token=True)" if rolling and run.scores_bos else "the text"
    return scored_positions(run.spec)


def windows_of(run: Run) -> str:
    """The windows of a run as text; those of other models are derived."""
    derived = "" if run.config.ours else " (derived)"
    return f"{size_of_windows(run)}{derived}"


def size_of_windows(run: Run) -> str:
    size = "unknown length" if run.capacity is None else f"{run.capacity} target positions"
    return f"{run.windows}, {size}"


def equal_windows(runs: Sequence[Run]) -> str:
    """The model args with which all runs of ours cut documents alike.

    Runs are named by their files, or by their models if there are fewer of these and each needs one length.
    """
    if len({run.windows for run in runs}) > 1:
        return "pass the same windows=... to all models"
    smallest = min(run.capacity for run in runs)
    runs_of_length: dict[int, list[Run]] = {}
    lengths_of_model: dict[str, set[int]] = {}
    for run in runs:
        length = run.max_length - (run.capacity - smallest)  # they differ by special tokens
        runs_of_length.setdefault(length, []).append(run)
        lengths_of_model.setdefault(run.label, set()).add(length)
    if len(runs_of_length) == 1:
        return f"pass max_length={min(runs_of_length)} to all models"
    each_needs_one = all(len(lengths) == 1 for lengths in lengths_of_model.values())
    by_model = each_needs_one and len(lengths_of_model) < len(runs)
    arguments = []
    for length, of_length in runs_of_length.items():
        names = dict.fromkeys(run.label if by_model else run.name for run in of_length)
        arguments.append(f"max_length={length} to {', '.join(names)}")
    return f"pass {' and '.join(arguments)}"


def is_cut(run: Run, name: str) -> bool:
    """False if every document of a task is known to fit into one window of a run."""
    longest = run.longest(name)
    return longest is None or run.capacity is None or longest > run.capacity


def are_cut_alike(first: Run, second: Run, name: str) -> bool:
    """True if the documents of a task are known to be cut alike."""
    return _same_windows(first, second, name, bool(same_tokens(first, second, name)))


def _same_windows(first: Run, second: Run, name: str, same_tokenizer: bool) -> bool:
    """True if documents are cut alike: the same windows, or every document is one window in both runs."""
    equal = first.windows == second.windows and first.capacity == second.capacity
    if first.capacity is None or second.capacity is None:
        equal_lengths = first.spec.get("max_length") == second.spec.get("max_length")
        return equal and equal_lengths and first.config.ours == second.config.ours
    if equal:
        return True

    longest = first.longest(name)
    other_longest = second.longest(name)
    if same_tokenizer:  # what is known of one run holds for both: their documents are the same
        known = [tokens for tokens in (longest, other_longest) if tokens is not None]
        longest = max(known, default=None)
        other_longest = longest
    if longest is None or other_longest is None:
        return False
    return longest <= first.capacity and other_longest <= second.capacity
