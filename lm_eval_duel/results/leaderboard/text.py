"""A leaderboard as Markdown, for the terminal, and as CSV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

from lm_eval_duel.results.leaderboard.board import Board, BoardRow
from lm_eval_duel.results.leaderboard.table import SHORT, Head, heads
from lm_eval_duel.results.published import UNCHECKED
from lm_eval_duel.results.table import (
    CODE,
    MARKDOWN,
    Cell,
    Column,
    Table,
    bullets,
    comma_separated,
    form_of,
    plain,
    spaced,
)
from lm_eval_duel.results.table import markdown as as_markdown
from lm_eval_duel.tables import one_line


def markdown(board: Board) -> str:
    """leaderboard.md."""
    parts = [f"# {MARKDOWN.escape(board.title)}", _summary(board)]
    columns = [head for head in heads(board) if head.key not in ("versions", "device")]
    for title, rows in board.groups:
        parts += [f"## {title}" if title else "", as_markdown(_table(columns, rows))]
    for source in board.published:
        parts += [f"## Published: {MARKDOWN.escape(source['source'])}", UNCHECKED, as_markdown(published(source))]
    if several := [column for column in board.columns if column.apart]:
        parts += ["## Columns", bullets(f"{column.label}: {column.apart}" for column in several)]
    parts += ["## Notes", bullets(board.notes)] if board.notes else []
    return spaced(parts)


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
    columns = [replace(head, of=_estimator) if head.key == "display" else head for head in columns]
    table = _table(columns, [row for _, rows in board.groups for row in rows])
    bare = [[replace(cell, interval=None, instead="", note="") for cell in row] for row in table.rows]
    return "\n\n".join(filter(None, [plain(replace(table, rows=bare)), "\n".join(map(one_line, board.notes))]))


def _estimator(row: BoardRow) -> Cell:
    return Cell(f"{row.display} ({row.about})" if row.kind == "oracle" else row.display)


def _table(columns: Sequence[Head], rows: Sequence[BoardRow]) -> Table:
    """Remarks stand beside the model, footnotes at values only."""

    def cell(head: Head, row: BoardRow) -> Cell:
        if head.key == "model":
            remarks = filter(None, ["AR" if row.autoregressive else "", row.remarks])
            return Cell(" ".join([row.model, *(f"({remark})" for remark in remarks)]))
        return head.cell(row) if head.group in ("value", "closed") else replace(head.cell(row), note="")

    return Table.of(rows, [replace(head.column, cell=partial(cell, head)) for head in columns], inline=True)


def published(source: Mapping[str, Any]) -> Table:
    """A table of published figures."""
    form = form_of(source["metric"])
    columns = [Column("model"), Column("estimator"), Column("rule", CODE), Column("block"), Column("cache")]
    columns += [Column(f"{task} {SHORT[source['metric']]}", form) for task in source["tasks"]]
    rows = []
    for row in source["rows"]:
        names = [row["model"], row["display"], row["rule"], "whole" if row["block"] == "none" else row["block"]]
        cells = (row["cells"].get(task, {}) for task in source["tasks"])
        figures = (Cell(cell.get("value"), stderr=cell.get("stderr"), bound=row["kind"] == "bound") for cell in cells)
        rows.append([*names, row["cache"], *figures, row["note"]])
    return Table([*columns, Column("note")], rows)


def csv_text(board: Board) -> str:
    """leaderboard.csv: the unrounded numbers of the measured rows, each with its error and interval."""
    also = [Column(key, cell=attrgetter(key)) for key in ("remarks", "autoregressive", "kind", "dtype")]
    source = Column("source", cell=lambda row: "; ".join(row.files))
    return comma_separated(Table.of(board.rows, [*(head.column for head in heads(board)), *also, source]))
