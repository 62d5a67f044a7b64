"""What may be compared with what: documents, windows, scored positions, tokenizers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from lm_eval_duel.errors import DuelError
from lm_eval_duel.report.read import Run, Task

TWIN = "score it with --model duel-mdm --model_args pretrained=...,estimator=ar"  # windows and tokens as ours
TOKEN_METRICS = ("token_perplexity",)  # perplexity per token means nothing across tokenizers


@dataclasses.dataclass(frozen=True)
class Difference:
    """One field in which two runs differ, both values, and what to do about it."""

    field: str
    here: str
    there: str
    remedy: str

    def between(self, here: Run, there: Run) -> str:
        """The difference as a sentence with both files."""
        return f"{self.field}: {self.here} in {here.name}, but {self.there} in {there.name}"


@dataclasses.dataclass(frozen=True)
class Windows:
    """How a run cuts documents: the scheme, target positions of a window, whether that was said or is derived."""

    scheme: str
    capacity: int | None
    derived: bool

    def __str__(self) -> str:
        size = "unknown length" if self.capacity is None else f"{self.capacity} target positions"
        return f"{self.scheme}, {size}{' (derived)' if self.derived else ''}"


def windows(run: Run) -> Windows:
    """A run's windows; those of a stock model are the harness's rolling ones, max_length targets after a prefix."""
    if not run.ours:
        return Windows("harness", run.max_length, True)
    capacity = run.duel.get("row_capacity")
    return Windows(run.spec.get("windows", "independent"), capacity, False)


def positions(run: Run) -> str:
    """Which positions of a row are scored: `the text` and no other, unless a convention of a benchmark says so."""
    bos = str(run.duel.get("bos") or run.spec.get("special_tokens", "").rpartition("bos=")[2] or "given").split(",")[0]
    return "the text" if not run.ours or bos in ("given", "none") else f"bos={bos}"


def same_tokens(here: Run, there: Run, name: str) -> bool | None:
    """Whether two runs count the same tokens in a task; None where nothing tells."""
    ours = [run.spec.get("tokenizer") if run.ours else None for run in (here, there)]
    if None not in ours and ours[0] == ours[1]:
        return True
    counts = [_tokens(run.tasks[name]) for run in (here, there)]
    if None not in counts:
        return counts[0] == counts[1]
    if None not in ours:
        return False
    shares = [_words_per_token(run.tasks[name]) for run in (here, there)]
    return None if None in shares else math.isclose(*shares, rel_tol=1e-6)


def _tokens(task: Task) -> dict[str, float] | None:
    """Tokens of each document."""
    if task.documents is None or any("token_perplexity" not in document.values for document in task.documents):
        return None
    return {document.key: document.values["token_perplexity"][1] for document in task.documents}


def _tokenizer(run: Run, name: str) -> str:
    """What is known of a run's tokenizer, for messages."""
    counts = _tokens(run.tasks[name])
    said = run.spec.get("tokenizer", "not said") if run.ours else "not said"
    return said if counts is None else f"{said} ({sum(counts.values()):.0f} tokens)"


def _words_per_token(task: Task) -> float | None:
    """From the quotient of logarithms: word perplexity^words = token perplexity^tokens."""
    token, word = (task.metrics.get(metric) for metric in ("token_perplexity", "word_perplexity"))
    return math.log(token) / math.log(word) if token and word and token > 1 and word > 1 else None


def documents(here: Task, there: Task, metric: str) -> Difference | None:
    """How the document sets differ: told by the samples where both have them, else by the results files."""
    remedy = "run both on the same documents (task version, --limit, --num_fewshot)"
    known = here.documents is not None and there.documents is not None
    for field in ("shots", "version") if known else ("shots", "documents", "limit", "version", "hash"):
        one, other = (task.identity.get(field) for task in (here, there))
        if field == "limit":
            both = here.identity.get("documents") is not None and there.identity.get("documents") is not None
            one, other = (None, None) if both else (one or "none", other or "none")  # the counts tell
        if field == "hash" and "token_perplexity" in {**here.metrics, **there.metrics}:
            continue  # it is also of our token counts, which differ between tokenizers
        if None not in (one, other) and one != other:
            return Difference("documents" if field == "documents" else f"documents ({field})", one, other, remedy)
    if not known:
        return None
    keys = [{document.key for document in task.documents} for task in (here, there)]
    if keys[0] != keys[1]:
        shared = len(keys[0] & keys[1])
        return Difference("documents", *(f"{len(k)} ({shared} of them in both)" for k in keys), remedy)
    return _units(here, there, metric)


def _units(here: Task, there: Task, metric: str) -> Difference | None:
    """Whether words and bytes were counted alike; tokens may differ."""
    for name in {metric, "bits_per_byte"} - set(TOKEN_METRICS):
        counts = [{d.key: d.values[name][1] for d in task.documents if name in d.values} for task in (here, there)]
        for key in counts[0].keys() & counts[1].keys():
            if counts[0][key] != counts[1][key]:
                said = [f"{count[key]:g} in document {key[:12]}" for count in counts]
                return Difference(f"units of {name}", *said, "run both with the same version of the task")
    return None


def differences(here: Run, there: Run, name: str) -> list[Difference]:
    """Everything but the document set in which two runs of a task differ so that their perplexities do too."""
    found = []
    tokens = same_tokens(here, there, name)
    if not tokens:
        told = [_tokenizer(run, name) for run in (here, there)]
        remedy = "compare word or byte perplexity (--metric word_perplexity)"
        if tokens is None:
            remedy = "run both with --log_samples, so that their token counts can be compared, or " + remedy
            remedy = _twin(here, there) + remedy
        found.append(Difference("tokenizer" if tokens is False else "tokenizer (unknown)", *told, remedy))
    scored = [positions(run) for run in (here, there)]
    if scored[0] != scored[1]:
        found.append(Difference("scored positions", *scored, "run with bos=given (or none) on our side"))
    cuts = [run.duel.get("cut_contexts", 0) for run in (here, there)]
    if not here.tasks[name].rolling:
        if any(cuts):
            said = [f"{n} contexts cut at {run.max_length}" for n, run in zip(cuts, (here, there), strict=True)]
            found.append(Difference("contexts", *said, "raise max_length"))
        return found
    if (cut := _windows(here, there, name, bool(tokens))) is not None:
        found.append(cut)
    return found


def _windows(here: Run, there: Run, name: str, same_tokenizer: bool) -> Difference | None:
    cuts = [windows(run) for run in (here, there)]
    if None not in (cuts[0].capacity, cuts[1].capacity):
        if (cuts[0].scheme, cuts[0].capacity) == (cuts[1].scheme, cuts[1].capacity):
            return None  # of other tokens, where the tokenizers differ: that is said then
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
    """The way that needs no care, where one of two runs is of a stock model: the same text cut and counted by us."""
    stock = [run for run in (here, there) if not run.ours]
    if len(stock) != 1 or not stock[0].autoregressive:
        return ""
    twin = TWIN.replace("it", stock[0].label, 1).replace("...", stock[0].pretrained)
    return f"{twin} (its windows are then cut and its tokens counted as ours; max_length sets how long they are), or "


def _longest(run: Run, name: str) -> int | None:
    """Tokens of the longest document: from the samples, else what a run says that computed every document."""
    counts = _tokens(run.tasks[name])
    if counts is not None:
        return int(max(counts.values(), default=0))
    if not run.ours or run.computed(name) < (run.tasks[name].size or 0):
        return None
    said = run.duel["tasks"].get(name, {}).get("longest_document", run.duel.get("longest_document"))
    return None if said is None else int(said)


def check(name: str, metric: str, compared: Sequence[Run], as_published: bool) -> list[str]:
    """The differences to list under a task's table; raises DuelError for one that makes its numbers incomparable.

    Every run is held against the first, and its documents also against the first that has samples: they must be the
    same whatever is asked for. Values per word and byte need no more than that and the same scored positions, so
    other tokenizers and windows are listed.
    """
    listed = []
    first = compared[0]
    holder = next((run for run in compared if run.tasks[name].documents is not None), first)
    for other in compared[1:]:
        for here in (first, holder):
            if (apart := documents(here.tasks[name], other.tasks[name], metric)) is not None:
                raise _refusal(name, metric, apart, here, other, "")
        for apart in differences(first, other, name):
            across = metric not in TOKEN_METRICS and apart.field.startswith(("tokenizer", "windows"))
            if not (as_published or across):
                hint = ", or list the difference under the table with --as-published"
                raise _refusal(name, metric, apart, first, other, hint)
            listed.append(apart.between(first, other))
    return list(dict.fromkeys(listed))


def _refusal(name: str, metric: str, apart: Difference, here: Run, there: Run, hint: str) -> DuelError:
    return DuelError(
        f"{metric} of {name} cannot be compared: {apart.between(here, there)}. To compare, {apart.remedy}{hint}."
    )
