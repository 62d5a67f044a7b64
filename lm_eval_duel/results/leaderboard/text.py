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
NAMES = ("model", "remarks", "autoregressive", "estimator", "kind", "rule", "block", "cache", "rank")
NUMBERS = ("mean", "mean_stderr", "mean_rank", "gap_closed", "gap_closed_stderr")
NUMBERS += ("nfe_per_token", "seconds_per_token", "parameters")
SOURCES = ("device", "fingerprint", "dtype", "versions", "date", "source")
KEYS = {  # of a cell, in CSV
    "value": "value",
    "95 % low": ("interval", 0),
    "95 % high": ("interval", 1),
    "standard error": "stderr",
    "bits per byte": "bits_per_byte",
    "bits per byte standard error": "bits_per_byte_stderr",
    "gap": "gap",
    "gap 95 % low": ("gap_interval", 0),
    "gap 95 % high": ("gap_interval", 1),
    "gap closed %": "gap_closed",
    "gap closed 95 % low": ("gap_closed_interval", 0),
    "gap closed 95 % high": ("gap_closed_interval", 1),
}


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
        rows.append([*names, row["cache"], *(figure(row, task) for task in source["tasks"]), row["note"]])
    return Table([*columns, Column("note")], rows)


def figure(row: Row, task: str) -> Cell:
    """A published figure."""
    cell = row["cells"].get(task)
    return Cell() if cell is None else Cell(cell["value"], stderr=cell["stderr"], bound=row["kind"] == "bound")


def console(board: Board) -> str:
    """The text that the command prints: ranks, names and perplexities."""
    rows = [row for _, members in groups(board) for row in members]
    return "\n\n".join(filter(None, [as_text(_table(board, rows, named=True)), "\n".join(board["notes"])]))


def csv_text(board: Board) -> str:
    """leaderboard.csv: the unrounded numbers; a line for each row, and for each published figure's row."""
    columns = {
        f"{column['label']} {name}": (column["id"], key) for column in board["columns"] for name, key in KEYS.items()
    }
    tasks = dict.fromkeys((task, source["metric"]) for source in board["published"] for task in source["tasks"])
    ends = {"": "value", " standard error": "stderr"}
    printed = {f"published {task} {metric}{end}": (task, metric, ends[end]) for task, metric in tasks for end in ends}
    lines = []
    for row in board["rows"]:
        versions = ", ".join(f"{name} {version}" for name, version in row["versions"].items())
        about = row | {"versions": versions, "source": "; ".join(row["files"])}
        own = [_part(row["cells"].get(column), key) for column, key in columns.values()]
        values = [about[key] for key in (*NAMES, *NUMBERS)]
        lines.append(["yes", *values, *own, *[None] * len(printed), *(about[key] for key in SOURCES)])
    for source in board["published"]:
        for row in source["rows"]:
            about = row | {"remarks": row["note"], "source": source["source"]}
            figures = [
                row["cells"].get(task, {}).get(key) if metric == source["metric"] else None
                for task, metric, key in printed.values()
            ]
            values = [about.get(key) for key in (*NAMES, *NUMBERS)]
            lines.append(["no", *values, *[None] * len(columns), *figures, *(about.get(key) for key in SOURCES)])
    heads = ["measured", *NAMES, *NUMBERS, *columns, *printed, *SOURCES]
    return comma_separated(Table([Column(head) for head in heads], lines))


def _part(cell: Row | None, key: str | tuple[str, int]) -> Any:
    if cell is None:
        return None
    name, index = (key, None) if isinstance(key, str) else key
    return cell[name] if index is None or cell[name] is None else cell[name][index]
