"""Which runs may be compared: documents, windows, scored positions and tokenizers must match."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from lm_eval_duel.errors import DuelError
from lm_eval_duel.results.read import Run, Task

TWIN = "score it with --model duel-mdm --model_args pretrained=...,estimator=ar"  # windows and tokens as ours
TOKEN_METRICS = ("token_perplexity",)  # not comparable across tokenizers


class Difference(NamedTuple):
    """A field in which two runs differ, both values, and the remedy."""

    field: str
    here: str
    there: str
    remedy: str

    def between(self, here: Run, there: Run) -> str:
        """The difference as a sentence that names both files."""
        return f"{self.field}: {self.here} in {here.name}, but {self.there} in {there.name}"


class Windows(NamedTuple):
    """How a run cuts documents: scheme, target positions per window, and whether they are recorded or derived."""

    scheme: str
    capacity: int | None
    derived: bool

    def __str__(self) -> str:
        size = "unknown length" if self.capacity is None else f"{self.capacity} target positions"
        return f"{self.scheme}, {size}{' (derived)' if self.derived else ''}"


def windows(run: Run) -> Windows:
    """A run's windows; other models use the harness's rolling ones, with max_length targets after a prefix."""
    if not run.ours:
        return Windows("harness", run.max_length, True)
    capacity = run.duel.get("row_capacity")
    return Windows(run.spec.get("windows", "independent"), capacity, False)


def positions(run: Run) -> str:
    """Which positions of a row are scored: `the text` only, unless a benchmark's convention says otherwise."""
    bos = str(run.duel.get("bos") or run.spec.get("special_tokens", "").rpartition("bos=")[2] or "given").split(",")[0]
    return "the text" if not run.ours or bos in ("given", "none") else f"bos={bos}"


def same_tokens(here: Run, there: Run, name: str) -> bool | None:
    """Whether two runs count the same tokens in a task; None if that is not known."""
    ours = [run.spec.get("tokenizer") if run.ours else None for run in (here, there)]
    if None not in ours and ours[0] == ours[1]:
        return True
    counts = [run.tasks[name].tokens for run in (here, there)]
    if None not in counts:
        return counts[0] == counts[1]
    if None not in ours:
        return False
    shares = [_words_per_token(run.tasks[name]) for run in (here, there)]
    return None if None in shares else math.isclose(*shares, rel_tol=1e-6)


def _words_per_token(task: Task) -> float | None:
    """Words per token, from the ratio of logarithms: word perplexity^words = token perplexity^tokens."""
    token, word = (task.metrics.get(metric) for metric in ("token_perplexity", "word_perplexity"))
    return math.log(token) / math.log(word) if token and word and token > 1 and word > 1 else None


def _tokenizer(run: Run, name: str) -> str:
    """What is known about a run's tokenizer, for messages."""
    counts = run.tasks[name].tokens
    tokenizer = run.spec.get("tokenizer", "unknown") if run.ours else "unknown"
    return tokenizer if counts is None else f"{tokenizer} ({sum(counts.values()):.0f} tokens)"


def documents(here: Task, there: Task, metric: str) -> Difference | None:
    """How two document sets differ, judged by the samples if both have them, else by the results files.

    The hash of the results files covers our token counts too, which differ between tokenizers; with counts of documents
    the limit is not needed. With samples the counts of words or bytes must be equal, too; tokens may differ.
    """
    both = here, there
    remedy = "run both on the same documents (task version, --limit, --num_fewshot)"
    known = None not in (here.documents, there.documents)
    fields = ["shots", "version"]
    if not known:
        limit = [] if all("documents" in task.identity for task in both) else ["limit"]
        digest = [] if any("token_perplexity" in task.metrics for task in both) else ["hash"]
        fields = ["shots", "documents", *limit, "version", *digest]
    for field in fields:
        values = [task.identity.get(field, "none" if field == "limit" else None) for task in both]
        if None not in values and values[0] != values[1]:
            return Difference("documents" if field == "documents" else f"documents ({field})", *values, remedy)
    if not known:
        return None
    keys = [{document.key for document in task.documents} for task in both]
    if keys[0] != keys[1]:
        shared = len(keys[0] & keys[1])
        return Difference("documents", *(f"{len(k)} ({shared} of them in both)" for k in keys), remedy)
    for name in sorted({metric, "bits_per_byte"} - set(TOKEN_METRICS)):
        counts = [{d.key: d.values[name][1] for d in task.documents if name in d.values} for task in both]
        for key in sorted(counts[0].keys() & counts[1].keys()):
            if counts[0][key] != counts[1][key]:
                sizes = [f"{count[key]:g} in document {key[:12]}" for count in counts]
                return Difference(f"units of {name}", *sizes, "run both with the same version of the task")
    return None


def differences(here: Run, there: Run, name: str) -> list[Difference]:
    """The differences of two runs of a task that affect their perplexities, other than the document set."""
    result = []
    tokens = same_tokens(here, there, name)
    if not tokens:
        tokenizers = [_tokenizer(run, name) for run in (here, there)]
        remedy = "compare word or byte perplexity (--metric word_perplexity)"
        if tokens is None:
            remedy = "run both with --log_samples, so that their token counts can be compared, or " + remedy
            remedy = _twin(here, there) + remedy
        result.append(Difference("tokenizer" if tokens is False else "tokenizer (unknown)", *tokenizers, remedy))
    scored = [positions(run) for run in (here, there)]
    if scored[0] != scored[1]:
        result.append(Difference("scored positions", *scored, "run with bos=given (or none) on our side"))
    if here.tasks[name].rolling:
        if (cut := _windows(here, there, name, bool(tokens))) is not None:
            result.append(cut)
    else:
        cuts = [f"{run.duel.get('cut_contexts', 0)} contexts cut at {run.max_length}" for run in (here, there)]
        if any(run.duel.get("cut_contexts") for run in (here, there)):
            result.append(Difference("contexts", *cuts, "raise max_length"))
    return result


def _windows(here: Run, there: Run, name: str, same_tokenizer: bool) -> Difference | None:
    cuts = [windows(run) for run in (here, there)]
    if None not in (cuts[0].capacity, cuts[1].capacity):
        if (cuts[0].scheme, cuts[0].capacity) == (cuts[1].scheme, cuts[1].capacity):
            return None  # if the tokenizers differ, that is a difference of its own
        longest = [_longest(run, name) for run in (here, there)]
        if same_tokenizer:
            longest = [max(filter(None, longest), default=None)] * 2
        if all(n is not None and n <= cut.capacity for n, cut in zip(longest, cuts, strict=True)):
            return None  # every document is one window on both sides
    elif cuts[0] == cuts[1] and here.spec.get("max_length") == there.spec.get("max_length"):
        return None
    remedy = _twin(here, there) + (
        "score both with windows=harness and a max_length that gives equal target positions, or with one that holds "
        "every document"
    )
    return Difference("windows", str(cuts[0]), str(cuts[1]), remedy)


def _twin(here: Run, there: Run) -> str:
    """The simplest remedy if one of two runs is of another model: score that model with this package."""
    stock = [run for run in (here, there) if not run.ours]
    if len(stock) != 1 or not stock[0].autoregressive:
        return ""
    twin = TWIN.replace("it", stock[0].label, 1).replace("...", stock[0].pretrained)
    return f"{twin} (its windows and tokens are then the same as ours; max_length sets their length), or "


def _longest(run: Run, name: str) -> int | None:
    """Tokens of the longest document, from the samples, else from the results of a run that scored every document."""
    counts = run.tasks[name].tokens
    if counts is not None:
        return int(max(counts.values(), default=0))
    if not run.ours or run.computed(name) < (run.tasks[name].size or 0):
        return None
    longest = run.duel["tasks"].get(name, {}).get("longest_document", run.duel.get("longest_document"))
    return None if longest is None else int(longest)


def check(name: str, metric: str, compared: Sequence[Run], as_published: bool) -> list[str]:
    """The differences to list under a task's table; raises DuelError for one that makes its numbers incomparable.

    Every run is compared with the first, and its documents also with the first run that has samples: the documents
    must always be the same. Values per word and byte also need the same scored positions; other tokenizers and windows
    are only listed.
    """
    listed: dict[str, None] = {}
    first = compared[0]
    with_samples = next((run for run in compared if run.tasks[name].documents is not None), first)
    for other in compared[1:]:
        for here in (first, with_samples):
            if (apart := documents(here.tasks[name], other.tasks[name], metric)) is not None:
                raise _refused(f"{metric} of {name}", apart, here, other)
        for apart in differences(first, other, name):
            across = metric not in TOKEN_METRICS and apart.field.startswith(("tokenizer", "windows"))
            if not (as_published or across):
                hint = ", or list the difference under the table with --as_published"
                raise _refused(f"{metric} of {name}", apart, first, other, hint)
            listed[apart.between(first, other)] = None
    return list(listed)


def _refused(what: str, apart: Difference, here: Run, there: Run, hint: str = "") -> DuelError:
    difference = apart.between(here, there)
    return DuelError(f"{what} cannot be compared: {difference}. To compare, {apart.remedy}{hint}.")
