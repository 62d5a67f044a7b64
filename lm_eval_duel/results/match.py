"""Checks of which runs may be compared: documents, windows, scored positions and tokenizers must match."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from lm_eval_duel.errors import DuelError
from lm_eval_duel.results.runs import Run, Task

TWIN = "score it with --model duel-mdm --model_args pretrained=...,estimator=ar"  # windows and tokens as ours
PER_TOKEN = "token_perplexity"  # not comparable across tokenizers


class Difference(NamedTuple):
    """A field in which two runs differ, both values, and the remedy."""

    field: str
    here: str
    there: str
    remedy: str


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


def documents(here: Task, there: Task, metric: str) -> list[Difference]:
    """The first difference of two document sets, judged by the samples if both have them, else by the results files.

    The hash of the results files covers our token counts too, which differ between tokenizers; with counts of documents
    the limit is not needed. With samples the counts of words or bytes must be equal, too; tokens may differ.
    """
    both, remedy = (here, there), "run both on the same documents (task version, --limit, --num_fewshot)"
    sampled = here.documents is not None and there.documents is not None
    identities = [{"limit": "none", **task.identity} for task in both]
    fields = ["shots", "version"]
    if not sampled:
        counted = all("documents" in identity for identity in identities)
        hashed = not any(PER_TOKEN in task.metrics for task in both)
        fields = ["shots", "documents" if counted else "limit", "version", *(["hash"] if hashed else [])]
    for field in fields:
        values = [identity.get(field) for identity in identities]
        if None not in values and values[0] != values[1]:
            return [Difference("documents" if field == "documents" else f"documents ({field})", *values, remedy)]
    if not sampled:
        return []
    keys = [task.documents.numbers.keys() for task in both]
    if keys[0] != keys[1]:
        shared = len(keys[0] & keys[1])
        return [Difference("documents", *(f"{len(k)} ({shared} of them in both)" for k in keys), remedy)]
    for name in sorted({metric, "bits_per_byte"} - {PER_TOKEN}):
        known, other = (task.documents.values.get(name, {}) for task in both)
        for key, (_, size) in known.items():
            if key in other and other[key][1] != size:
                sizes = [f"{units:g} in document {key[:12]}" for units in (size, other[key][1])]
                return [Difference(f"units of {name}", *sizes, "run both with the same version of the task")]
    return []


def differences(here: Run, there: Run, name: str) -> list[Difference]:
    """The differences of two runs of a task that affect their perplexities, other than the document set."""
    result, twin = [], ""
    both, tokens = (here, there), same_tokens(here, there, name)
    stock = [run for run in both if not run.ours]
    if len(stock) == 1 and stock[0].autoregressive:  # the simplest remedy: score that model with this package
        twin = TWIN.replace("it", stock[0].label, 1).replace("...", stock[0].pretrained)
        twin += " (its windows and tokens are then the same as ours; max_length sets their length), or "
    if not tokens:
        field, remedy = "tokenizer", "compare word or byte perplexity (--metric word_perplexity)"
        if tokens is None:
            field = "tokenizer (unknown)"
            remedy = f"{twin}run both with --log_samples, so that their token counts can be compared, or {remedy}"
        result.append(Difference(field, *(_tokenizer(run, name) for run in both), remedy))
    if positions(here) != positions(there):
        remedy = "run with bos=given (or none) on our side"
        result.append(Difference("scored positions", *map(positions, both), remedy))
    if here.tasks[name].rolling:
        if not _same_windows(here, there, name, bool(tokens)):
            remedy = "score both with windows=harness and a max_length that gives equal target positions, or with one "
            result.append(Difference("windows", *map(windows_of, both), f"{twin}{remedy}that holds every document"))
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
    longest = [run.longest(name) for run in both]
    if same_tokenizer:
        longest = [max((n for n in longest if n is not None), default=None)] * 2
    return same or all(n is not None and n <= run.capacity for n, run in zip(longest, both, strict=True))


def check(name: str, metric: str, compared: Sequence[Run], as_published: bool) -> list[str]:
    """The differences to list under a task's table; raises DuelError for one that makes its numbers incomparable.

    Every run is compared with the first, and its documents also with the first run that has samples: the documents
    must always be the same. Values per word and byte also need the same scored positions; other tokenizers and windows
    are only listed.
    """
    listed: dict[str, None] = {}
    first = compared[0]
    sampled = next((run for run in compared if run.tasks[name].documents is not None), first)
    for other in compared[1:]:
        task = other.tasks[name]
        every = [(run, each) for run in (first, sampled) for each in documents(run.tasks[name], task, metric)]
        for here, found in [*every, *((first, each) for each in differences(first, other, name))]:
            always = found.field.startswith(("documents", "units"))
            across = metric != PER_TOKEN and found.field.startswith(("tokenizer", "windows"))
            text = f"{found.field}: {found.here} in {here.name}, but {found.there} in {other.name}"
            if always or not (as_published or across):
                ways = [] if always else ["list the difference under the table with --as_published"]
                ways.append("give each its own table with --apart")
                hint = "".join(f", or {way}" for way in ways)
                raise DuelError(f"{metric} of {name} cannot be compared: {text}. To compare, {found.remedy}{hint}.")
            listed[text] = None
    return list(listed)


def groups(name: str, metric: str, runs: Sequence[Run]) -> list[tuple[list[Run], str]]:
    """The runs of a task in groups that may be compared, each with its difference from the first one."""
    found: list[tuple[list[Run], str]] = []
    for run in runs:
        reasons = [_why_apart(name, metric, members, run) for members, _ in found]
        if "" in reasons:
            found[reasons.index("")][0].append(run)
        else:
            found.append(([run], next(iter(reasons), "")))
    return found


def _why_apart(name: str, metric: str, members: Sequence[Run], run: Run) -> str:
    """The reason that a run may not be compared with `members`; empty if it may.

    It is compared with the first of them and the first with samples.
    """
    sampled = [member for member in members if member.tasks[name].documents is not None]
    for here in (members[0], *sampled[:1]):
        every = [*documents(here.tasks[name], run.tasks[name], metric), *differences(here, run, name)]
        for found in every:
            if metric == PER_TOKEN or not found.field.startswith("tokenizer"):  # per word and byte they may differ
                return f"{found.field}: {found.there} here, {found.here} in the first table of {name}"
    return ""
