"""Traces as a report takes them: the values of documents, for intervals, and the orders of texts, for the page."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators import registry
from lm_eval_duel.results import trace
from lm_eval_duel.results.rows import setting
from lm_eval_duel.results.runs import Run, file_of, model_label
from lm_eval_duel.results.table import Note
from lm_eval_duel.text.annotated import token_texts

MAX_TOKENS = 1024  # of a document on the page
MAX_VALUES = 100_000  # tokens of all orders together: about 1 MB
SAME = 5e-4  # nats of a token that the page, which shows three digits, cannot tell apart


class Traces:
    """The trace files that the command line or results name, each read once."""

    def __init__(self, named: Iterable[str | Path]):
        self.named = [Path(place).resolve() for place in named]
        self.read = functools.cache(trace.read)  # the windows of a file
        self.fingerprint = functools.cache(_fingerprint)

    def attach(self, runs: Iterable[Run]) -> tuple[list[Run], list[Note]]:
        """The runs with the values of each document in their traces, and notes on traces that are gone or foreign.

        The trace of a run is a named one with its spec, else the one that it wrote, also if moved to its results.
        """
        attached = []
        notes = []
        for run in runs:
            path, windows = self._of_run(run)
            if path is not None:
                if self.read(path) and not windows:
                    others = f"The trace {path} has other texts than those of {run.name}; name a trace of these"
                    notes.append(Note(advice=f"{others} with --traces."))
                run = dataclasses.replace(run, trace=path, traced=_values(windows))
            elif run.config.duel.get("trace"):
                gone = f"The trace of {run.name} is no longer at {run.config.duel['trace']}; name it with --traces."
                notes.append(Note(advice=gone))
            attached.append(run)

        for path in dict.fromkeys(self.named):
            if not self.runs_of(path, attached):
                foreign = f"The trace {path} (fingerprint {self.fingerprint(path)}) belongs to none of the results."
                notes.append(Note(advice=foreign))
        return attached, notes

    def runs_of(self, path: Path, runs: Iterable[Run]) -> list[Run]:
        """The runs that have scored texts of a trace under its spec."""
        of_trace = []
        for run in runs:
            if run.config.fingerprint == self.fingerprint(path) and self.windows(path, run):
                of_trace.append(run)
        return of_trace

    def _of_run(self, run: Run) -> tuple[Path | None, list[dict[str, Any]]]:
        """The trace of a run, None if there is none, and its windows that are of the run's texts."""
        places = list(self.named)
        written = run.config.duel.get("trace")
        if written:
            places.append(Path(written))
            places.append(run.file.parent / Path(written).name)
        of_spec = [place for place in places if self.fingerprint(place) == run.config.fingerprint]
        for place in of_spec:
            windows = self.windows(place, run)
            if windows:
                return place, windows
        return (of_spec[0] if of_spec else None), []

    def windows(self, path: Path, run: Run | None) -> list[dict[str, Any]]:
        """The windows of a trace that are of the texts of a run, or of no run.

        Where the run does not say which text it scored, they are of the last one of the trace.
        """
        windows = self.read(path)
        last = {}  # the digest of each request's last text
        for window in windows:
            last[trace.request_of(window)] = window.get("sha256")

        kept = []
        for window in windows:
            if run is not None and not run.has_document(window.get("task"), window.get("doc")):
                continue
            text = window.get("sha256")
            wanted = last[trace.request_of(window)]
            if run is not None and text is not None:
                wanted = run.text_of(window["task"], window["doc"]) or wanted
            if text == wanted:
                kept.append(window)
        return kept


def _values(windows: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], Counter[int]]:
    """The nats of each document of a trace, by (task, value)."""
    nats: dict[tuple[str, str], Counter[int]] = defaultdict(Counter)
    for window in windows:
        for name, value in (window.get("values") or {}).items():
            nats[str(window["task"]), str(name)][int(window["doc"])] += float(value)
    return nats


def _fingerprint(path: Path) -> str:
    """The fingerprint of a trace; empty if there is none, or if the path is not a valid file name (ValueError)."""
    with contextlib.suppress(DuelError, OSError, ValueError):
        return trace.spec(path).get("fingerprint", "")
    return ""


# ---------------------------------------------------------------- documents of the page


@dataclasses.dataclass
class Order:
    """One order of one document. `starts`: token indices of its blocks; `steps` count from 0 in every block.

    `is_oracle`: it was chosen by someone who sees the text.
    """

    label: str
    tokenizer: str
    is_oracle: bool = False
    ids: list[int] = dataclasses.field(default_factory=list)
    starts: list[int] = dataclasses.field(default_factory=list)
    steps: list[int] = dataclasses.field(default_factory=list)
    nats: list[float] = dataclasses.field(default_factory=list)

    def add(self, window: Mapping[str, Any], order: Mapping[str, Any]) -> None:
        """Add the next window of the document, revealed in this order."""
        before = len(self.ids)
        for start in window.get("starts") or [0]:
            self.starts.append(before + start)
        self.ids += window["ids"]
        self.steps += order["reveal_steps"]
        for log_prob in order["token_logprobs"]:
            self.nats.append(-log_prob)

    def repeats(self, other: Order) -> bool:
        """True for the same order under the same label, as a run and a lattice of its rule both have it.

        The two may score in other batches, so their nats may differ by float noise.
        """
        mine = self.label, self.tokenizer, self.ids, self.starts, self.steps
        if mine != (other.label, other.tokenizer, other.ids, other.starts, other.steps):
            return False
        return all(map(_is_close, self.nats, other.nats))


def _is_close(nats: float, others: float) -> bool:
    return math.isclose(nats, others, abs_tol=SAME)


@dataclasses.dataclass(frozen=True)
class DocumentKey:
    """A document among those of a report, known by its task, its number and its text.

    `text`: a digest, since results of other texts may have the same task and number. `name`: of one of the user's
    texts, by its file; else empty. `label`: the name of its task in tables.
    """

    task: str
    number: int
    text: str = ""
    name: str = dataclasses.field(default="", compare=False)
    label: str = dataclasses.field(default="", compare=False)

    @property
    def title(self) -> str:
        """Its name on the page: that of one's own text, with its line, as `score` prints it, else task and number."""
        return Path(self.name).name or f"{self.label}, document {self.number}"


def documents(
    traces: Traces, runs: Sequence[Run], labels: Mapping[tuple[str, str], str], most: int, tokenizer: str | None = None
) -> tuple[list[dict[str, Any]], list[Note]]:
    """The documents to show, `most` of each task, and notes. Those in the most traces come first, then the lowest.

    `runs` name the models of their traces; a trace of none has the model that its first line names, else the name of
    its file. `labels`: the name in tables of each (run, task). `tokenizer`: for all traces, instead of their own.
    """
    orders = _orders_of_documents(traces, runs, labels, tokenizer)
    keys: dict[str, list[DocumentKey]] = {}  # of each task
    for key in orders:
        keys.setdefault(key.label, []).append(key)
    chosen = []
    for of_task in keys.values():
        most_orders_first = sorted(of_task, key=lambda key: (-len(orders[key]), key.number))
        chosen += most_orders_first[:most]

    shown: list[dict[str, Any]] = []
    notes: list[Note] = []
    advice = "--shown N shows more"
    values = 0  # tokens of all orders together
    for key in chosen:
        document, remarks = _document(key, orders[key])
        values += sum(len(order["steps"]) for order in document["orders"])
        if values > MAX_VALUES:
            advice = "it is full"
            break
        notes += remarks
        if document["orders"]:
            shown.append(document)
    if len(shown) < len(orders):
        notes.append(Note(f"The document view has {len(shown)} of {len(orders)} documents.", advice))
    return shown, notes


def _orders_of_documents(
    traces: Traces, runs: Sequence[Run], labels: Mapping[tuple[str, str], str], tokenizer: str | None
) -> dict[DocumentKey, list[Order]]:
    """The orders of each document that a trace holds, its windows joined."""
    models: dict[str | None, str] = {}  # by fingerprint
    paths: dict[Path, None] = {}
    for run in runs:
        models.setdefault(run.config.fingerprint, run.label)  # several runs may have one spec
        if run.trace is not None:
            paths[run.trace] = None
    paths |= dict.fromkeys(traces.named)

    orders: dict[DocumentKey, dict[tuple[Path, str], Order]] = {}
    for path in paths:
        header = trace.spec(path)
        spec = header["spec"]
        entry = registry.ESTIMATORS.get(str(spec.get("estimator")))
        tokenizer_of_trace = tokenizer or str(header.get("tokenizer") or "")
        model = models.get(header.get("fingerprint")) or model_label(str(header.get("pretrained") or path.stem))
        for window, run in _with_runs(traces, path, runs):
            for rule, order in _orders(window, spec):
                label = _label(model, spec, rule)
                key = _key(window, run, labels)
                of_document = orders.setdefault(key, {})
                is_oracle = not rule and entry is not None and not entry.kind.is_likelihood
                joined = of_document.setdefault((path, label), Order(label, tokenizer_of_trace, is_oracle))
                joined.add(window, order)
    return {key: _each_once(of_document.values()) for key, of_document in orders.items()}


def _each_once(orders: Iterable[Order]) -> list[Order]:
    """Orders without repetitions. Those of the oracle are the last: the page opens on the first ones."""
    kept: list[Order] = []
    for order in sorted(orders, key=lambda order: order.is_oracle):
        if not any(map(order.repeats, kept)):
            kept.append(order)
    return kept


def _with_runs(traces: Traces, path: Path, runs: Iterable[Run]) -> Iterable[tuple[Mapping[str, Any], Run | None]]:
    """The windows of a trace whose texts its runs have scored, each with one such run.

    None stands for the run of a trace that belongs to none of the results.
    """
    of_trace: list[Run | None] = [*traces.runs_of(path, runs)]
    windows: dict[int, tuple[Mapping[str, Any], Run | None]] = {}  # by their identity: runs may share one
    for run in of_trace or [None]:
        for window in traces.windows(path, run):
            windows.setdefault(id(window), (window, run))
    return windows.values()


def _key(window: Mapping[str, Any], run: Run | None, labels: Mapping[tuple[str, str], str]) -> DocumentKey:
    """The document of a window that a run scored."""
    task = window["task"]
    name = str(window.get("document", "")) if task == "score" else ""
    label = file_of(name).name if name else task
    if run is not None:
        label = labels.get((run.name, task)) or run.label_of(task)
    return DocumentKey(task, window["doc"], window.get("sha256") or "", name, label)


def _orders(window: Mapping[str, Any], spec: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The orders of a window of a document: of its own rule, and of the rules that a lattice followed."""
    if window.get("task") is None or window.get("doc") is None or "generated" in window:
        return
    if window.get("request") or window.get("repeat"):  # of several answers the first
        return
    # The line of a window holds the order of the run's own rule, under the same names as the orders in "rules".
    orders = {str(spec.get("rule", "")): window, **(window.get("rules") or {})}
    for rule, order in orders.items():
        if order.get("reveal_steps"):
            yield rule, order


def _label(model: str, spec: Mapping[str, Any], rule: str) -> str:
    """The name of an order: model, rule, block and cache; without a rule, or for an estimate, also the estimator."""
    entry = registry.ESTIMATORS.get(str(spec.get("estimator")))
    if entry is not None and entry.causal:
        return f"{model}, autoregressive"
    parts = [model]
    if entry is not None and not (entry.lattice and rule) and entry.name != "duel":
        parts.append(entry.title)
    parts += setting(rule, str(spec.get("block", "none")), spec.get("cache")).values()
    return ", ".join(filter(None, parts))


def _document(key: DocumentKey, orders: Iterable[Order]) -> tuple[dict[str, Any], list[Note]]:
    """A document for the page. Orders share the pieces of their text if their ids and tokenizers are the same."""
    pieces: dict[tuple[str, tuple[int, ...]], list[str]] = {}  # of each text, by its tokenizer and ids
    shown = []
    notes = []
    for order in orders:
        ids = tuple(order.ids[:MAX_TOKENS])
        text = order.tokenizer, ids
        try:
            if text not in pieces:
                pieces[text] = token_texts(ids, _load(order.tokenizer))
        except DuelError as error:
            notes.append(Note(advice=f"{order.label}, {key.title} is not shown: {error}"))
            continue
        if len(order.ids) > MAX_TOKENS:
            notes.append(Note(f"The document view shows the first {MAX_TOKENS:,} tokens of {key.title}."))
        starts = {0, *order.starts}
        shown.append(
            {
                "label": order.label,
                "text": list(pieces).index(text),
                "starts": [start for start in sorted(starts) if start < MAX_TOKENS],
                "steps": order.steps[:MAX_TOKENS],
                "nats": [round(nats, 3) for nats in order.nats[:MAX_TOKENS]],
            }
        )
    document = {"task": key.label, "number": key.number, "title": key.title, "pieces": list(pieces.values())}
    return {**document, "orders": shown}, notes


@functools.cache
def _load(tokenizer: str) -> Any:
    """A tokenizer, loaded when it is needed; raises DuelError if it cannot be."""
    if not tokenizer:
        raise DuelError("its trace names no tokenizer; pass a folder or a hub name with --tokenizer.")
    from lm_eval_duel.denoisers.loading import load_tokenizer

    return load_tokenizer({"tokenizer": tokenizer}, "--tokenizer ")
