"""Cells of the Markdown tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lm_eval_duel.estimators.registry import find
from lm_eval_duel.report.headline import fixed, number, plus_minus
from lm_eval_duel.report.markdown import Footnotes, code, plain
from lm_eval_duel.report.read import NO_CACHE
from lm_eval_duel.report.rows import WHOLE
from lm_eval_duel.rules.tables import short

Entry = Mapping[str, Any]


def shown(entry: Entry, metric: str) -> str:
    """A value with its Monte Carlo error; `<=` before bounds, the best of a model in bold."""
    text = f"{_bound(entry)}{number(entry['value'], metric)}{_error(entry, entry['stderr'], metric)}"
    return f"**{text}**" if entry["best"] else text


def percent(value: float | None) -> str:
    """A percentage with its sign."""
    return "" if value is None else f"{fixed(value, 1)} %"


def value(entry: Entry, metric: str) -> str:
    error = _error(entry, entry["stderrs"].get(metric), metric)
    return f"{_bound(entry)}{number(entry['metrics'][metric], metric)}{error}"


def _error(entry: Entry, error: float | None, metric: str) -> str:
    """The error of a Monte Carlo value; `?` if it is not known."""
    return " +- ?" if error is None and entry["stderr_reason"] else plus_minus(error, metric)


def _bound(entry: Entry) -> str:
    return "<= " if entry["bound"] else ""


def baseline(entry: Entry) -> str:
    """What is said beside the name of the AR baseline's row; empty for other rows."""
    return ("baseline" if entry["estimator"] == "ar" else "AR baseline") if entry["ar"] else ""


def unknown(entry: Entry) -> str:
    """The share of [UNK] among a row's tokens, in words; empty if there are none."""
    return f"{entry['unknown']:.1%} [UNK]" if entry["unknown"] else ""


def method(entry: Entry) -> str:
    """The estimator, with remarks: the baseline, a bound that does not hold, another spec."""
    remarks = ", ".join(filter(None, [baseline(entry), plain(entry["aside"]), unknown(entry)]))
    return f"{find(entry['estimator']).title}{f' ({remarks})' if remarks else ''}"


def rule(entry: Entry) -> str:
    return code(short(entry["rule"])) if entry["rule"] else ""


def block(entry: Entry) -> str:
    return WHOLE if entry["block"] == "none" else plain(entry["block"] or "")


def caches(entries: Sequence[Entry]) -> list[str]:
    """The column `cache` of a table: empty if no row is under a cache."""
    used = any(entry["cache"] not in (None, NO_CACHE) for entry in entries)
    return [plain(entry["cache"] or "") if used else "" for entry in entries]


def gap(entry: Entry, metric: str) -> str:
    """The gap to the autoregressive model, with the error of the entry's value."""
    if entry["gap"] is None:
        return ""
    return f"{'+' if entry['gap'] > 0 else ''}{number(entry['gap'], metric)}{_error(entry, entry['stderr'], metric)}"


def between(interval: Sequence[float] | None, form: Callable[[float], str], unit: str = "") -> str:
    return "" if interval is None else f"{form(interval[0])} to {form(interval[1])}{unit}"


def interval(entry: Entry, metric: str, notes: Footnotes) -> str:
    if entry["interval"] is not None:
        return between(entry["interval"], lambda value: number(value, metric))
    error = "" if entry["window_stderr"] is None else f"s.e. {entry['window_stderr']:.2g} over windows"
    return f"{error} {notes.mark(entry['reason'])}".strip()


def nats(difference: float | None) -> str:
    """A difference in nats per unit, with its sign."""
    return "" if difference is None else fixed(difference, 4, "+")


def nats_between(pair: Mapping[str, Any]) -> str:
    """The interval of a paired difference."""
    return between(pair["interval"], nats)
