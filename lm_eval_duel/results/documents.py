"""Documents with the orders in which their tokens were revealed, from traces, for the document view."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators import registry
from lm_eval_duel.harness import trace
from lm_eval_duel.results.rows import setting
from lm_eval_duel.results.samples import Traces
from lm_eval_duel.text.token_text import token_texts

MAX_TOKENS = 1024  # of a document
MAX_VALUES = 100_000  # tokens of all orders together: about 1 MB
Texts = Callable[[str, Sequence[int]], list[str]]  # (tokenizer, ids) -> what each id adds to the text


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
    traces: Traces, labels: Mapping[Path, str], most: int, texts: Texts
) -> tuple[list[dict[str, Any]], list[str]]:
    """The documents to show, `most` of each task, and notes. Those in the most traces come first, then the lowest.

    `labels`: the models of traces; a trace without one gets the name of its file.
    """
    orders: dict[str, dict[int, list[Order]]] = {}  # of each task and document
    for path in dict.fromkeys([*labels, *traces.named]):
        for (task, number), order in _orders(traces, path, labels.get(path, path.stem)):
            orders.setdefault(task, {}).setdefault(number, []).append(order)
    chosen = [
        (task, number)
        for task, of_task in orders.items()
        for number in sorted(of_task, key=lambda number: (-len(of_task[number]), number))[:most]
    ]
    shown, notes, values = [], [], 0
    for task, number in chosen:
        document, remarks = _document(task, number, orders[task][number], texts)
        values += sum(len(order["steps"]) for order in document["orders"])
        if values > MAX_VALUES:
            notes.append(f"The document view is full: it shows {len(shown)} of {len(chosen)} documents.")
            break
        notes += remarks
        if document["orders"]:
            shown.append(document)
    return shown, notes


def _orders(traces: Traces, path: Path, model: str) -> Iterator[tuple[tuple[str, int], Order]]:
    """The orders of every document of a trace: of its own rule, and of the rules that a lattice followed."""
    header = trace.spec(path)
    spec = header["spec"]
    orders: dict[tuple[tuple[str, int], str], Order] = {}
    for window in traces.read(path):
        task, number = window.get("task"), window.get("doc")
        if task is None or number is None or window.get("request") or window.get("repeat") or "generated" in window:
            continue  # of several answers the first
        for rule, order in ({str(spec.get("rule", "")): window} | (window.get("rules") or {})).items():
            if order.get("reveal_steps"):
                label = _label(model, spec, rule)
                found = orders.setdefault(((task, number), label), Order(label, str(header.get("tokenizer") or "")))
                found.starts += [len(found.ids) + start for start in window.get("starts") or [0]]
                found.ids += window["ids"]
                found.steps += order["reveal_steps"]
                found.nats += [-value for value in order["token_logprobs"]]
    return ((place, order) for (place, _), order in orders.items())


def _label(model: str, spec: Mapping[str, Any], rule: str) -> str:
    """The name of an order: model, rule, block and cache; without a rule, or for an estimate, also the estimator."""
    entry = registry.ESTIMATORS.get(str(spec.get("estimator")))
    if entry is not None and entry.causal:
        return f"{model}, autoregressive"
    named = entry is not None and not (entry.lattice and rule) and entry.name != "duel"
    parts = setting(rule, str(spec.get("block", "none")), spec.get("cache")).values()
    return ", ".join(filter(None, [model, entry.title if named else "", *parts]))


def _document(task: str, number: int, orders: Iterable[Order], texts: Texts) -> tuple[dict[str, Any], list[str]]:
    """A document for the page. Orders share the pieces of their text if their ids and tokenizers are the same."""
    pieces: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    shown, notes = [], []
    for order in orders:
        cut = min(len(order.ids), MAX_TOKENS)
        key = order.tokenizer, tuple(order.ids[:cut])
        try:
            pieces[key] = pieces.get(key) or texts(*key)
        except DuelError as error:
            notes.append(f"{order.label}, {task} {number} is not shown: {error}")
            continue
        if cut < len(order.ids):
            notes.append(f"The document view shows the first {cut:,} tokens of {task} {number}.")
        shown.append(
            {
                "label": order.label,
                "text": list(pieces).index(key),
                "starts": [start for start in dict.fromkeys([0, *sorted(order.starts)]) if start < cut],
                "steps": order.steps[:cut],
                "nats": [round(value, 3) for value in order.nats[:cut]],
            }
        )
    return {"task": task, "number": number, "pieces": [*pieces.values()], "orders": shown}, notes


def texts_by(instead: str | None) -> Texts:
    """The texts of ids, by tokenizers that are loaded once, when they are needed.

    `instead`: a tokenizer for all traces. The function raises DuelError if a tokenizer cannot be loaded.
    """

    @functools.cache
    def load(name: str) -> Any:
        from lm_eval_duel import denoisers

        return denoisers.load_tokenizer({"tokenizer": name})

    def texts(name: str, ids: Sequence[int]) -> list[str]:
        if not (instead or name):
            raise DuelError("its trace names no tokenizer; pass a folder or a hub name with --tokenizer.")
        return token_texts(ids, load(instead or name))

    return texts
