"""A leaderboard as Markdown, for the terminal, and as CSV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lm_eval_duel.results.leaderboard import table
from lm_eval_duel.results.leaderboard.board import KINDS
from lm_eval_duel.results.published import UNCHECKED
from lm_eval_duel.results.table import (
    CODE,
    MARKDOWN,
    WORDS,
    Cell,
    Column,
    Table,
    bullets,
    comma_separated,
    form_of,
    spaced,
)
from lm_eval_duel.results.table import markdown as as_markdown
from lm_eval_duel.results.table import plain as as_text

Board = Mapping[str, Any]
Row = Mapping[str, Any]
ALSO = ("remarks", "autoregressive", "kind", "dtype", "source")  # of a row, in CSV only


def markdown(board: Board) -> str:
    """leaderboard.md."""
    parts = [f"# {MARKDOWN.escape(board['title'])}", _summary(board)]
    for title, rows in groups(board):
        parts += [f"## {title}" if title else "", as_markdown(_table(board, rows))]
    for source in board["published"]:
        parts += [f"## Published: {MARKDOWN.escape(source['source'])}", UNCHECKED, as_markdown(published(source))]
    if several := [column for column in board["columns"] if column["apart"]]:
        parts += ["## Columns", bullets(f"{column['label']}: {column['apart']}" for column in several)]
    parts += ["## Notes", bullets(board["notes"])] if board["notes"] else []
    return spaced(parts)


def groups(board: Board) -> list[tuple[str, list[Row]]]:
    """The rows of a board that stand together: the oracle's are apart from those that say something about a model."""
    oracles = [row for row in board["rows"] if row["kind"] == "oracle"]
    others = [row for row in board["rows"] if row["kind"] != "oracle"]
    titled = [("", others), (f"Oracle: {KINDS['oracle']}", oracles)]
    return [(title, rows) for title, rows in titled if rows]


def _summary(board: Board) -> str:
    baseline = f" Gaps are to {MARKDOWN.escape(board['ar'])}." if board["ar"] else ""
    return (
        f"{WORDS[board['metric']].capitalize()}, lower is better. Rank: among likelihoods, by "
        f"{MARKDOWN.escape(table.ranked_by(board))}; bounds (<=) and the oracle have none.{baseline} In brackets: 95 % "
        "interval over documents. +-: standard error of a Monte Carlo or sampled estimate."
    )


def _table(board: Board, rows: Sequence[Row], named: bool = False) -> Table:
    """Rows with the columns of Markdown, or with names, means and perplexities only (`named`)."""
    lines, columns = [], []
    for row in rows:
        cells = dict(table.cells(board, row))
        cells = {
            head: _marked(head, cell, row, named)
            for head, cell in cells.items()
            if (head.group in ("name", "mean", "value") if named else head.key not in ("versions", "device"))
        }
        columns = [head.shown for head in cells]
        lines.append([*cells.values()])
    return Table(columns, lines, inline=True)


def _marked(head: table.Head, cell: Cell, row: Row, named: bool) -> Cell:
    """A cell of the text forms: remarks stand beside the model, footnotes at values only."""
    if head.key == "model":
        remarks = ["AR" if row["autoregressive"] else "", row["remarks"]]
        return Cell(" ".join([row["model"], *(f"({remark})" for remark in remarks if remark)]))
    if named:
        oracle = head.key == "display" and row["kind"] == "oracle"
        return (
            Cell(f"{row['display']} ({row['about']})") if oracle else replace(cell, interval=None, instead="", note="")
        )
    return cell if head.group in ("value", "closed") else replace(cell, note="")


def published(source: Mapping[str, Any]) -> Table:
    """A table of published figures."""
    form = form_of(source["metric"])
    columns = [Column("model"), Column("estimator"), Column("rule", CODE), Column("block"), Column("cache")]
    columns += [Column(f"{task} {table.SHORT[source['metric']]}", form) for task in source["tasks"]]
    rows = []
    for row in source["rows"]:
        names = [row["model"], row["display"], row["rule"], "whole" if row["block"] == "none" else row["block"]]
        cells = (row["cells"].get(task, {}) for task in source["tasks"])
        figures = (Cell(cell.get("value"), stderr=cell.get("stderr"), bound=row["kind"] == "bound") for cell in cells)
        rows.append([*names, row["cache"], *figures, row["note"]])
    return Table([*columns, Column("note")], rows)


def console(board: Board) -> str:
    """The text that the command prints: ranks, names and perplexities."""
    rows = [row for _, members in groups(board) for row in members]
    return "\n\n".join(filter(None, [as_text(_table(board, rows, named=True)), "\n".join(board["notes"])]))


def csv_text(board: Board) -> str:
    """leaderboard.csv: the unrounded numbers of the measured rows, each with its error and interval."""
    lines = []
    for row in board["rows"]:
        about = row | {"source": "; ".join(row["files"])}
        lines.append([*(cell for _, cell in table.cells(board, row)), *(about[key] for key in ALSO)])
    return comma_separated(Table([*(head.shown for head in table.heads(board)), *map(Column, ALSO)], lines))
