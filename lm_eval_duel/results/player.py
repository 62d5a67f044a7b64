"""Documents with the orders in which their tokens were revealed, from traces, for the document view."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators import registry
from lm_eval_duel.results import trace
from lm_eval_duel.results.read import Traces
from lm_eval_duel.results.rows import setting
from lm_eval_duel.results.runs import Run
from lm_eval_duel.results.table import Note
from lm_eval_duel.text.annotated import token_texts

MAX_TOKENS = 1024  # of a document
MAX_VALUES = 100_000  # tokens of all orders together: about 1 MB


@dataclasses.dataclass
class Order:
    """One order of one document. `starts`: token indices of its blocks; `steps` count from 0 in every block."""

    label: str
    tokenizer: str
    ids: list[int] = dataclasses.field(default_factory=list)
    starts: list[int] = dataclasses.field(default_factory=list)
    steps: list[int] = dataclasses.field(default_factory=list)
    nats: list[float] = dataclasses.field(default_factory=list)


def collect(
    traces: Traces, runs: Sequence[Run], most: int, tokenizer: str | None = None
) -> tuple[list[dict[str, Any]], list[Note]]:
    """The documents to show, `most` of each task, and notes. Those in the most traces come first, then the lowest.

    `runs` name the models of their traces; a trace of none gets the name of its file. `tokenizer`: for all traces,
    instead of their own.
    """
    labels = {run.trace: run.label for run in reversed(runs)}  # several runs may have written one trace
    orders: dict[str, dict[int, dict[tuple[Path, str], Order]]] = {}  # of each task and document
    for path in dict.fromkeys([*(run.trace for run in runs if run.trace), *traces.named]):
        header = trace.spec(path)
        name = tokenizer or str(header.get("tokenizer") or "")
        for window in traces.read(path):
            for rule, found in _orders(window, header["spec"]):
                label = _label(labels.get(path, path.stem), header["spec"], rule)
                of_document = orders.setdefault(window["task"], {}).setdefault(window["doc"], {})
                order = of_document.setdefault((path, label), Order(label, name))
                order.starts += [len(order.ids) + start for start in window.get("starts") or [0]]
                order.ids += window["ids"]
                order.steps += found["reveal_steps"]
                order.nats += [-value for value in found["token_logprobs"]]
    chosen = [
        (task, number)
        for task, of_task in orders.items()
        for number in sorted(of_task, key=lambda number: (-len(of_task[number]), number))[:most]
    ]
    shown, notes, values = [], [], 0
    for task, number in chosen:
        document, remarks = _document(task, number, orders[task][number].values())
        values += sum(len(order["steps"]) for order in document["orders"])
        if values > MAX_VALUES:
            notes.append(Note(f"The document view is full: it shows {len(shown)} of {len(chosen)} documents."))
            break
        notes += remarks
        if document["orders"]:
            shown.append(document)
    return shown, notes


def _orders(window: Mapping[str, Any], spec: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The orders of a window of a document: of its own rule, and of the rules that a lattice followed."""
    if None in (window.get("task"), window.get("doc")) or window.get("request") or window.get("repeat"):
        return  # of several answers the first
    for rule, order in ({str(spec.get("rule", "")): window} | (window.get("rules") or {})).items():
        if order.get("reveal_steps") and "generated" not in window:
            yield rule, order


def _label(model: str, spec: Mapping[str, Any], rule: str) -> str:
    """The name of an order: model, rule, block and cache; without a rule, or for an estimate, also the estimator."""
    entry = registry.ESTIMATORS.get(str(spec.get("estimator")))
    if entry is not None and entry.causal:
        return f"{model}, autoregressive"
    named = entry is not None and not (entry.lattice and rule) and entry.name != "duel"
    parts = setting(rule, str(spec.get("block", "none")), spec.get("cache")).values()
    return ", ".join(filter(None, [model, entry.title if named else "", *parts]))


def _document(task: str, number: int, orders: Iterable[Order]) -> tuple[dict[str, Any], list[Note]]:
    """A document for the page. Orders share the pieces of their text if their ids and tokenizers are the same."""
    pieces: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    shown, notes = [], []
    for order in orders:
        key = order.tokenizer, tuple(order.ids[:MAX_TOKENS])
        try:
            pieces[key] = pieces.get(key) or token_texts(key[1], _load(order.tokenizer))
        except DuelError as error:
            notes.append(Note(advice=f"{order.label}, {task} {number} is not shown: {error}"))
            continue
        if len(order.ids) > MAX_TOKENS:
            notes.append(Note(f"The document view shows the first {MAX_TOKENS:,} tokens of {task} {number}."))
        shown.append(
            {
                "label": order.label,
                "text": list(pieces).index(key),
                "starts": [start for start in dict.fromkeys([0, *sorted(order.starts)]) if start < MAX_TOKENS],
                "steps": order.steps[:MAX_TOKENS],
                "nats": [round(value, 3) for value in order.nats[:MAX_TOKENS]],
            }
        )
    return {"task": task, "number": number, "pieces": [*pieces.values()], "orders": shown}, notes


@functools.cache
def _load(tokenizer: str) -> Any:
    """A tokenizer, loaded when it is needed; raises DuelError if it cannot be."""
    if not tokenizer:
        raise DuelError("its trace names no tokenizer; pass a folder or a hub name with --tokenizer.")
    from lm_eval_duel import denoisers

    return denoisers.load_tokenizer({"tokenizer": tokenizer})
