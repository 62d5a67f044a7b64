"""What a leaderboard shows: its columns, each with the cells of rows, for every form."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import replace

from lm_eval_duel.results import tables
from lm_eval_duel.results.leaderboard.board import Board, BoardRow
from lm_eval_duel.results.leaderboard.columns import TaskColumn
from lm_eval_duel.results.records import Row
from lm_eval_duel.results.table import CODE, TEXT, Cell, Column, form_of

GROUPS = {  # of columns, which the page can hide
    "name": "names",
    "mean": "means",
    "value": "perplexity",
    "bits": "bits per byte",
    "gap": "gap",
    "closed": "gap closed",
    "cost": "cost",
    "source": "provenance",
}
SHORT = {  # heads of the metric's own columns
    "token_perplexity": "ppl/token",
    "perplexity": "ppl",
    "word_perplexity": "ppl/word",
    "byte_perplexity": "ppl/byte",
    "bits_per_byte": "bits/byte",
}


@dataclasses.dataclass(frozen=True)
class Head:
    """A column: its key, its group, what stands above it (`unit` in small print), and its cell of a row.

    Without `of` the cell is the row's attribute `key`.
    """

    key: str
    group: str
    title: str
    form: str = ".2f"
    unit: str = ""
    about: str = ""
    of: Callable[[BoardRow], Cell] | None = None
    task: str = ""  # the id of the task's column that it is of

    @property
    def column(self) -> Column:
        return Column(" ".join(filter(None, [self.title, self.unit])), self.form, cell=self.cell)

    def cell(self, row: BoardRow) -> Cell:
        return Cell(getattr(row, self.key)) if self.of is None else self.of(row)


def heads(board: Board) -> list[Head]:
    """The columns of a leaderboard."""
    form = form_of(board.metric)
    heads = [
        Head("rank", "name", "#", ",d", about=f"rank among likelihoods, by {board.ranked_by}"),
        Head("model", "name", "model", TEXT, of=lambda row: Cell(row.model, note=row.remarks)),
        Head("display", "name", "estimator", TEXT, of=lambda row: Cell(row.display, note=row.about)),
        Head("rule", "name", "rule", CODE),
        Head("block", "name", "block", ",d", of=_block),
        Head("cache", "name", "cache", TEXT),
    ]
    if board.mean_of:
        kind, over = "mean" if board.metric == "bits_per_byte" else "geometric mean", f"{len(board.mean_of)} tasks"
        heads += [
            Head("mean", "mean", kind, form, over, "over the tasks that all rows have", _mean),
            Head("mean_rank", "mean", "mean rank", ".2f", over, "over the tasks that all have"),
        ]
    results = [result for row in board.rows for result in row.results.values()]
    there = {
        "value": True,
        "bits": board.metric != "bits_per_byte" and any("bits_per_byte" in result.metrics for result in results),
        "gap": any(result.gap is not None for result in results),
        "closed": any(result.distinguishable is not None for result in results),
    }
    for group in (group for group in there if there[group]):
        heads += [of_task(board, column)[group] for column in board.columns]
        if group == "closed" and len(board.columns) > 1:
            about = "over the tasks in which it is known"
            heads.append(Head("gap_closed", group, "average", ".1f", "gap closed, %", about, _average))
    seconds = Head("seconds_per_token", "cost", "seconds", ".2g", "per token", "of scoring; depends on the device")
    return [
        *heads,
        Head("nfe_per_token", "cost", "NFE", ".3f", "per token", "rule steps per token"),
        replace(seconds, of=lambda row: Cell(row.seconds_per_token, note=row.seconds_reason)),
        Head("device", "source", "device", TEXT),
        Head("parameters", "source", "parameters", "si"),
        Head("fingerprint", "source", "fingerprint", CODE, "of the spec"),
        Head(
            "versions", "source", "versions", TEXT, of=lambda row: Cell(", ".join(map(" ".join, row.versions.items())))
        ),
        Head("date", "source", "date", TEXT, "UTC", of=lambda row: Cell(row.date[:10])),
    ]


def of_task(board: Board, column: TaskColumn) -> dict[str, Head]:
    """The columns about a task, by group. Errors are those of Monte Carlo or sampling, intervals are over documents."""
    form = form_of(board.metric)
    parts = {
        "value": (form, SHORT[board.metric], column.about, value),
        "bits": (".4f", "bits/byte", column.about, lambda result: tables.shown(result, "bits_per_byte")),
        "gap": (f"+{form}", "gap", f"minus {board.ar}", gap),
        "closed": (".1f", "gap closed, %", column.about, tables.closed),
    }

    def reading(read: Callable[[Row], Cell]) -> Callable[[BoardRow], Cell]:
        return lambda row: read(row.results[column.id]) if column.id in row.results else Cell()

    return {
        group: Head(f"{column.id}_{group}", group, column.label, form, unit, about, reading(read), column.id)
        for group, (form, unit, about, read) in parts.items()
    }


def gap(result: Row) -> Cell:
    if result.gap is None:
        return Cell()
    return replace(tables.shown(result), value=result.gap, interval=result.gap_interval, best=False)


def value(result: Row) -> Cell:
    """A result's value. Its note says why it has no error or interval."""
    cell = tables.with_interval(result)
    reason = "" if cell.instead else cell.note
    return replace(cell, best=False, note="; ".join(filter(None, [result.stderr_reason, reason])))


def _block(row: BoardRow) -> Cell:
    return Cell("whole" if row.block == "none" else int(row.block) if row.block.isdecimal() else row.block)


def _versions(row: BoardRow) -> Cell:
    return Cell(", ".join(f"{name} {version}" for name, version in row.versions.items()))


def _mean(row: BoardRow) -> Cell:
    unsure = row.mean_stderr is None and any(result.stderr_reason for result in row.results.values())
    return Cell(row.mean, stderr=row.mean_stderr, bound=row.kind == "bound", unsure=unsure)


def _average(row: BoardRow) -> Cell:
    if row.gap_closed is None:
        return Cell()
    return Cell(row.gap_closed, stderr=row.gap_closed_stderr, instead=f"{row.gap_closed_tasks} tasks")
