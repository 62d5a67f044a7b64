"""The columns of results, by name: the heads and the cells of every table, picked by `pick`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from lm_eval_duel.results.board import Board, BoardRow
from lm_eval_duel.results.paired import UNCLEAR
from lm_eval_duel.results.read import Run
from lm_eval_duel.results.rows import Row
from lm_eval_duel.results.table import LEVEL, WORDS, Bold, Cell, form_of, number, span
from lm_eval_duel.rules.tables import without_defaults

SHORT = {  # heads of values after the name of a task
    "token_perplexity": "ppl/token",
    "perplexity": "ppl",
    "word_perplexity": "ppl/word",
    "byte_perplexity": "ppl/byte",
    "bits_per_byte": "bits/byte",
}


Columns = dict[str, Callable[[Any], Cell]]  # the cells of a table by their heads, as `Table.of` takes them


class Column(NamedTuple):
    """A head, and the cell of a record below it.

    `short`: the head after the name of a task, if it has another one. On a leaderboard also `group`, of columns that
    the page can hide together, and `below`, the interval that stands below a cell.
    """

    head: str
    cell: Callable[[Any], Cell]
    short: str = ""
    group: str = "name"
    below: Callable[[Any], str] = lambda record: ""


def pick(columns: Mapping[str, Column], *names: str) -> Columns:
    """Pick the columns of a table by name."""
    return {columns[name].head: columns[name].cell for name in names}


def name_columns(records: Sequence[Row | Run]) -> dict[str, Column]:
    """The columns that name rows, or whole runs. The cache is named if any of them is under one."""

    def run(record: Row | Run) -> Run:
        return record if isinstance(record, Run) else record.run

    cached = any(run(record).has_cache for record in records)
    return {
        "model": Column("model", lambda record: run(record).label),
        "estimator": Column("estimator", lambda record: record.title),
        "rule": Column("rule", lambda record: without_defaults(record.rule or "")),
        "block": Column("block", lambda record: "whole target" if record.block == "none" else record.block),
        "cache": Column("cache", lambda record: run(record).cache if cached else ""),
    }


def of_rows(metric: str, rows: Sequence[Row]) -> dict[str, Column]:
    """The columns of rows in a table of this metric."""
    form, bits = form_of(metric), "bits_per_byte"
    return {
        **name_columns(rows),
        "remarks": Column("remarks", lambda row: row.qualifiers),
        "value": Column(WORDS[metric], value, SHORT[metric]),
        "interval": Column(LEVEL, lambda row: (interval(row), row.reason)),
        "stderr": Column("s.e. (Monte Carlo)", lambda row: (number(row.stderr, ".2g"), row.stderr_reason)),
        "bits": Column("bits per byte", lambda row: value(row, bits), "bits/byte"),
        "elbo": Column("ELBO", lambda row: value(row.elbo)),
        "elbo_gap": Column("ELBO's gap", lambda row: gap(row.elbo)),
        "gap": Column("DUEL's gap", gap, "gap"),
        "gap_interval": Column("its 95 % interval", lambda row: span(row.gap_interval, f"+{form}")),
        "closed": Column("gap closed", lambda row: (closed(row, " %"), row.gap_closed_reason)),
        "share": Column("gap closed, %", lambda row: (closed(row), row.gap_closed_reason)),
        "closed_interval": Column("95 % interval of it", lambda row: span(row.gap_closed_interval, ".1f")),
        "nfe": Column("NFE per token", lambda row: number(row.nfe_per_token, ".3f")),
    }


def of_board(board: Board) -> list[Column]:
    """The columns of a leaderboard, empty ones included; those of results stand once for each column of the board."""
    bits, results = "bits_per_byte", [result for row in board.rows for result in row.results.values()]
    every, form = of_rows(board.metric, results), form_of(board.metric)
    found = [Column("#", lambda row: str(row.rank or ""))]
    for name in ("model", "estimator", "rule", "block", "cache"):
        found.append(Column(name, lambda row, cell=every[name].cell: cell(row.named)))
    if board.mean_of:
        title = f"{'mean' if board.metric == bits else 'geometric mean'}, {len(board.mean_of)} tasks"
        found.append(Column(title, lambda row: number(row.mean, form, bound=row.named.bound), group="mean"))
        found.append(Column("mean rank", lambda row: number(row.mean_rank, ".2f"), group="mean"))
    groups = {"value": Column("", _plain_value, SHORT[board.metric], below=interval)}
    if board.metric != bits:
        groups["bits"] = every["bits"]
    groups["gap"] = every["gap"]._replace(below=every["gap_interval"].cell)
    if any(result.distinguishable is not None for result in results):
        groups["closed"] = every["share"]._replace(below=every["closed_interval"].cell)
    for group, column in groups.items():
        for task in board.columns:
            cell, below = (_of_task(task.id, shown) for shown in (column.cell, column.below))
            found.append(Column(f"{task.label} {column.short or column.head}", cell, group=group, below=below))
    return [
        *found,
        Column("NFE per token", lambda row: number(row.nfe_per_token, ".3f"), group="cost"),
        Column("seconds per token", lambda row: number(row.seconds_per_token, ".2g"), group="cost"),
        Column("device", lambda row: row.device, group="source"),
        Column("parameters", lambda row: number(row.parameters, ",d"), group="source"),
        Column("fingerprint", lambda row: row.fingerprint, group="source"),
        Column("versions", lambda row: ", ".join(map(" ".join, row.versions.items())), group="source"),
        Column("date", lambda row: row.date[:10], group="source"),
    ]


def _plain_value(result: Row) -> Cell:
    """A result's value, never bold. Its remark says why it has no error or interval."""
    return str(value(result)), "; ".join(filter(None, [result.stderr_reason, result.reason]))


def _of_task(column: str, cell: Callable[[Row], Any]) -> Callable[[BoardRow], Any]:
    """A cell of the result in a column, empty if there is none."""
    return lambda row: cell(row.results[column]) if column in row.results else ""


# ---------------------------------------------------------------- cells


def value(row: Row | None, metric: str | None = None) -> str:
    """A row's value, or its value in another metric, with its bound and its Monte Carlo error."""
    if row is None:
        return ""
    best, metric = row.best and metric is None, metric or row.metric
    stderr, unsure = row.error(row.nats_stderr, metric), bool(row.stderr_reason)
    text = number(row.metrics.get(metric), form_of(metric), stderr, row.bound, unsure)
    return Bold(text) if best else text


def interval(row: Row) -> str:
    """The interval over documents of a row's value, or else its error over windows."""
    windows = "" if row.window_stderr is None else f"s.e. {number(row.window_stderr, '.2g')} over windows"
    return span(row.interval, form_of(row.metric)) or windows


def with_interval(row: Row) -> str:
    """A row's value with its interval in brackets."""
    text = value(row)
    return type(text)(f"{text} ({span(row.interval, form_of(row.metric))})") if row.interval else text


def gap(row: Row | None) -> str:
    """The gap to the autoregressive model, with the bound and the error of the row's value."""
    if row is None:
        return ""
    return number(row.gap, f"+{form_of(row.metric)}", row.stderr, row.bound, bool(row.stderr_reason))


def closed(row: Row, unit: str = "") -> str:
    """Gap closed, or that it is not distinguishable from 0."""
    if row.gap_closed is None:
        return UNCLEAR if row.distinguishable is False else ""
    return number(row.gap_closed, ".1f", row.gap_closed_stderr) + unit
