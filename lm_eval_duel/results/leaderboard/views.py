"""What a leaderboard shows: its columns, each with the cells of rows, for every form; Markdown, terminal and CSV."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter, itemgetter
from typing import Any

from lm_eval_duel.console.tables import one_line
from lm_eval_duel.results import tables
from lm_eval_duel.results.leaderboard.board import Board, BoardRow
from lm_eval_duel.results.leaderboard.columns import TaskColumn
from lm_eval_duel.results.published import UNCHECKED
from lm_eval_duel.results.records import Row
from lm_eval_duel.results.table import (
    CODE,
    MARKDOWN,
    TEXT,
    Cell,
    Column,
    Table,
    bullets,
    comma_separated,
    form_of,
    markdown,
    plain,
    spaced,
)

SHORT = {  # heads of the metric's own columns
    "token_perplexity": "ppl/token",
    "perplexity": "ppl",
    "word_perplexity": "ppl/word",
    "byte_perplexity": "ppl/byte",
    "bits_per_byte": "bits/byte",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Head(Column):
    """A column with its key, its group, what stands above it in small print, and what it is about."""

    key: str
    group: str
    small: str = ""
    about: str = ""
    task: bool = False


def _head(
    key: str, group: str, title: str, form: str = TEXT, small: str = "", about: str = "", cell: Any = None
) -> Head:
    """A column; without `cell` it shows the row's attribute `key`."""
    return Head(title, form, cell=cell or attrgetter(key), key=key, group=group, small=small, about=about)


def heads(board: Board) -> list[Head]:
    """The columns of a leaderboard."""
    form, bits = form_of(board.metric), "bits_per_byte"
    heads = [
        _head("rank", "name", "#", ",d", about=f"rank among likelihoods, by {board.ranked_by}"),
        _head("model", "name", "model", cell=lambda row: Cell(row.model, note=row.remarks)),
        _head("display", "name", "estimator", cell=lambda row: Cell(row.display, note=row.about)),
        _head("rule", "name", "rule", CODE),
        _head("block", "name", "block", ",d", cell=_block),
        _head("cache", "name", "cache"),
    ]
    if board.mean_of:
        kind, over = "mean" if board.metric == bits else "geometric mean", f"{len(board.mean_of)} tasks"
        heads += [
            _head("mean", "mean", kind, form, over, "over the tasks that all rows have", _mean),
            _head("mean_rank", "mean", "mean rank", ".2f", over, "over the tasks that all have"),
        ]
    results = [result for row in board.rows for result in row.results.values()]
    there = {
        "value": True,
        "bits": board.metric != bits and any(bits in result.metrics for result in results),
        "gap": any(result.gap is not None for result in results),
        "closed": any(result.closed.distinguishable is not None for result in results),
    }
    for group in (group for group in there if there[group]):
        heads += [task_heads(board, column)[group] for column in board.columns]
    if there["closed"] and len(board.columns) > 1:
        about = "over the tasks in which it is known"
        heads.append(_head("gap_closed", "closed", "average", ".1f", "gap closed, %", about, _average))
    return [
        *heads,
        _head("nfe_per_token", "cost", "NFE", ".3f", "per token", "rule steps per token"),
        _head(
            "seconds_per_token", "cost", "seconds", ".2g", "per token", "of scoring; depends on the device", _seconds
        ),
        _head("device", "source", "device"),
        _head("parameters", "source", "parameters", "si"),
        _head("fingerprint", "source", "fingerprint", CODE, "of the spec"),
        _head("versions", "source", "versions", cell=lambda row: ", ".join(map(" ".join, row.versions.items()))),
        _head("date", "source", "date", TEXT, "UTC", cell=lambda row: row.date[:10]),
    ]


def task_heads(board: Board, column: TaskColumn) -> dict[str, Head]:
    """The columns about a task, by group. Errors are those of Monte Carlo or sampling, intervals are over documents."""
    form = form_of(board.metric)
    parts = {
        "value": (form, SHORT[board.metric], column.about, _value),
        "bits": (".4f", "bits/byte", column.about, lambda result: tables.shown(result, "bits_per_byte")),
        "gap": (f"+{form}", "gap", f"minus {board.ar}", _gap),
        "closed": (".1f", "gap closed, %", column.about, tables.closed),
    }

    def of_row(read: Callable[[Row], Cell]) -> Callable[[BoardRow], Cell]:
        return lambda row: read(row.results[column.id]) if column.id in row.results else Cell()

    return {
        group: replace(_head(f"{column.id}_{group}", group, column.label, form, small, about, of_row(read)), task=True)
        for group, (form, small, about, read) in parts.items()
    }


def _gap(result: Row) -> Cell:
    if result.gap is None:
        return Cell()
    return replace(tables.shown(result), value=result.gap, interval=result.gap_interval, best=False)


def _value(result: Row) -> Cell:
    """A result's value. Its note says why it has no error or interval."""
    cell = tables.with_interval(result)
    reason = "" if cell.instead else cell.note
    return replace(cell, best=False, note="; ".join(filter(None, [result.stderr_reason, reason])))


def _block(row: BoardRow) -> int | str:
    return "whole" if row.block == "none" else int(row.block) if row.block.isdecimal() else row.block


def _mean(row: BoardRow) -> Cell:
    unsure = row.mean_stderr is None and any(result.stderr_reason for result in row.results.values())
    return Cell(row.mean, stderr=row.mean_stderr, bound=row.kind == "bound", unsure=unsure)


def _seconds(row: BoardRow) -> Cell:
    return Cell(row.seconds_per_token, note=row.seconds_reason)


def _average(row: BoardRow) -> Cell:
    if row.gap_closed is None:
        return Cell()
    return Cell(row.gap_closed, stderr=row.gap_closed_stderr, instead=f"{row.gap_closed_tasks} tasks")


# ---------------------------------------------------------------- forms


def page(board: Board) -> str:
    """leaderboard.md."""
    parts = [f"# {MARKDOWN.escape(board.title)}", _summary(board)]
    columns = [head for head in heads(board) if head.key not in ("versions", "device")]
    for title, rows in board.groups:
        parts += [f"## {title}" if title else "", markdown(_table(columns, rows))]
    for source in board.published:
        parts += [f"## Published: {MARKDOWN.escape(source['source'])}", UNCHECKED, markdown(published(source))]
    if several := [column for column in board.columns if column.apart]:
        parts += ["## Columns", bullets(f"{column.label}: {column.apart}" for column in several)]
    return spaced([*parts, *(["## Notes", bullets(board.notes)] if board.notes else [])])


def _summary(board: Board) -> str:
    baseline = f" Gaps are to {MARKDOWN.escape(board.ar)}." if board.ar else ""
    return (
        f"{board.unit.capitalize()}, lower is better. Rank: among likelihoods, by "
        f"{MARKDOWN.escape(board.ranked_by)}; bounds (<=) and the oracle have none.{baseline} In brackets: 95 % "
        "interval over documents. +-: standard error of a Monte Carlo or sampled estimate."
    )


def console(board: Board) -> str:
    """The text that the command prints: ranks, names, means and perplexities."""
    columns = [head for head in heads(board) if head.group in ("name", "mean", "value")]
    columns = [replace(head, cell=_estimator) if head.key == "display" else head for head in columns]
    table = _table(columns, [row for _, rows in board.groups for row in rows])
    bare = [[replace(cell, interval=None, instead="", note="") for cell in row] for row in table.rows]
    return "\n\n".join(filter(None, [plain(replace(table, rows=bare)), "\n".join(map(one_line, board.notes))]))


def _estimator(row: BoardRow) -> str:
    return f"{row.display} ({row.about})" if row.kind == "oracle" else row.display


def _table(columns: Sequence[Head], rows: Sequence[BoardRow]) -> Table:
    """Remarks stand beside the model, footnotes at values only."""

    def model(row: BoardRow) -> str:
        remarks = filter(None, ["AR" if row.autoregressive else "", row.remarks])
        return " ".join([row.model, *(f"({remark})" for remark in remarks)])

    table = Table.from_records(rows, [replace(head, cell=model) if head.key == "model" else head for head in columns])
    with_notes = [head.group in ("value", "closed") for head in columns]
    cells = [
        [cell if keep else replace(cell, note="") for keep, cell in zip(with_notes, row, strict=True)]
        for row in table.rows
    ]
    return Table(list(map(_titled, columns)), cells, inline=True)


def _titled(head: Head) -> Head:
    return replace(head, title=f"{head.title} {head.small}".strip())


def published(source: Mapping[str, Any]) -> Table:
    """A table of published figures."""

    def figure(task: str) -> Callable[[Mapping[str, Any]], Cell]:
        return lambda row: Cell(**row["cells"].get(task, {}), bound=row["kind"] == "bound")

    keys = {"model": "model", "estimator": "display", "rule": "rule", "block": "block", "cache": "cache"}
    columns = [Column(title, CODE if title == "rule" else TEXT, cell=itemgetter(key)) for title, key in keys.items()]
    columns[3] = replace(columns[3], cell=lambda row: "whole" if row["block"] == "none" else row["block"])
    form, small = form_of(source["metric"]), SHORT[source["metric"]]
    columns += [Column(f"{task} {small}", form, cell=figure(task)) for task in source["tasks"]]
    return Table.from_records(source["rows"], [*columns, Column("note", cell=itemgetter("note"))])


def csv_text(board: Board) -> str:
    """leaderboard.csv: the unrounded numbers of the measured rows, each with its error and interval."""
    columns: list[Column] = [*map(_titled, heads(board))]
    columns += [Column(key, cell=attrgetter(key)) for key in ("remarks", "autoregressive", "kind")]
    columns.append(Column("dtype", cell=attrgetter("first.run.dtype")))
    return comma_separated(
        Table.from_records(board.rows, [*columns, Column("source", cell=lambda row: "; ".join(row.files))])
    )
