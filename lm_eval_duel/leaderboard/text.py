"""A leaderboard as Markdown and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval_duel.leaderboard import table
from lm_eval_duel.leaderboard.board import KINDS
from lm_eval_duel.report.headline import WORDS, number
from lm_eval_duel.report.markdown import Footnotes, bullets, code, plain, spaced
from lm_eval_duel.report.published import UNCHECKED
from lm_eval_duel.tables import csv_cell, markdown_table, one_line, plain_table

ASCII = {"≤": "<=", "±": "+-"}
Board = Mapping[str, Any]


def markdown(board: Board) -> str:
    """leaderboard.md."""
    parts = [f"# {plain(board['title'])}", _summary(board)]
    for title, rows in groups(board):
        parts += [f"## {title}" if title else "", _table(board, rows)]
    for published in board["published"]:
        parts += [f"## Published: {plain(published['source'])}", UNCHECKED, _published(published)]
    if several := [column for column in board["columns"] if column["apart"]]:
        parts += ["## Columns", bullets([f"{column['label']}: {column['apart']}" for column in several])]
    parts += ["## Notes", bullets(board["notes"])] if board["notes"] else []
    return spaced(parts)


def groups(board: Board) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """The rows of a board that stand together: the oracle's are apart from those that say something about a model."""
    oracles = [row for row in board["rows"] if row["kind"] == "oracle"]
    others = [row for row in board["rows"] if row["kind"] != "oracle"]
    titled = [("", others), (f"Oracle: {KINDS['oracle']}", oracles)]
    return [(title, rows) for title, rows in titled if rows]


def _summary(board: Board) -> str:
    baseline = f" Gaps are to {plain(board['ar'])}." if board["ar"] else ""
    return (
        f"{WORDS[board['metric']].capitalize()}, lower is better. Rank: among likelihoods, by "
        f"{plain(table.ranked_by(board))}; bounds (<=) and the oracle have none.{baseline} In brackets: 95 % interval "
        "over documents. +-: standard error of a Monte Carlo or sampled estimate."
    )


def _table(board: Board, rows: Sequence[Mapping[str, Any]]) -> str:
    heads, notes = table.heads(board), Footnotes()
    kept = [n for n, head in enumerate(heads) if head.key not in ("versions", "device")]
    lines = []
    for row in rows:
        cells = list(table.cells(board, row))
        lines.append([_cell(heads[n], cells[n], row, notes) for n in kept])
    names = [plain(" ".join(filter(None, [heads[n].title, heads[n].unit]))) for n in kept]
    return notes.under(markdown_table(names, lines))


def _cell(head: table.Head, cell: table.Cell, row: Mapping[str, Any], notes: Footnotes) -> str:
    if head.key == "rule":
        return code(cell.text) if cell.text else ""
    if head.key == "model":
        name = plain(cell.text) + (" (AR)" if row["autoregressive"] else "")
        return f"{name} ({plain(row['remarks'])})" if row["remarks"] else name
    if not head.numeric:
        return plain(cell.text)
    small = f"({ascii_signs(cell.small)})" if cell.small else ""
    mark = notes.mark(cell.about) if head.group in ("value", "closed") else ""
    return " ".join(filter(None, [ascii_signs(cell.text), small, mark]))


def ascii_signs(text: str) -> str:
    """Text with the signs that a terminal and LaTeX know."""
    return "".join(ASCII.get(character, character) for character in text)


def _published(published: Mapping[str, Any]) -> str:
    lines = []
    for row in published["rows"]:
        names = [plain(row["model"]), plain(row["display"]), code(row["rule"]) if row["rule"] else ""]
        names += [plain("whole" if row["block"] == "none" else row["block"]), plain(row["cache"])]
        figures = [ascii_signs(published_figure(row, task, published["metric"])) for task in published["tasks"]]
        lines.append([*names, *figures, plain(row["note"])])
    unit = table.SHORT[published["metric"]]
    tasks = [f"{plain(task)} {unit}" for task in published["tasks"]]
    return markdown_table(["model", "estimator", "rule", "block", "cache", *tasks, "note"], lines)


def published_figure(row: Mapping[str, Any], task: str, metric: str) -> str:
    """A published figure as text; empty if there is none."""
    cell = row["cells"].get(task)
    if cell is None:
        return ""
    return f"{table.bounded(row)}{number(cell['value'], metric)}{table.error(cell['stderr'], metric)}"


def console(board: Board) -> str:
    """The text that the command prints: ranks, names and perplexities."""
    heads = table.heads(board)
    kept = [n for n, head in enumerate(heads) if head.group in ("name", "mean", "value")]
    names = [one_line(" ".join(filter(None, [heads[n].title, heads[n].unit]))) for n in kept]
    lines = []
    for _, rows in groups(board):
        for row in rows:
            cells = list(table.cells(board, row))
            lines.append([_console_cell(heads[n], cells[n], row) for n in kept])
    return "\n\n".join(filter(None, [plain_table(names, lines), "\n".join(board["notes"])]))


def _console_cell(head: table.Head, cell: table.Cell, row: Mapping[str, Any]) -> str:
    oracle = head.key == "estimator" and row["kind"] == "oracle"
    return f"{cell.text} ({row['about']})" if oracle else ascii_signs(cell.text)


# ---------------------------------------------------------------- CSV


def comma_separated(board: Board) -> str:
    """leaderboard.csv: the unrounded numbers; a line for each row, and for each published figure's row."""
    names = ["measured", "model", "remarks", "autoregressive", "estimator", "kind", "rule", "block", "cache", "rank"]
    numbers = ["mean", "mean_stderr", "mean_rank", "gap_closed", "gap_closed_stderr"]
    numbers += ["nfe_per_token", "seconds_per_token", "parameters"]
    sources = ["device", "fingerprint", "dtype", "versions", "date", "source"]
    columns = {f"{column['label']} {name}": (column["id"], key) for column in board["columns"] for name, key in KEYS}
    tasks = dict.fromkeys((t, p["metric"]) for p in board["published"] for t in p["tasks"])
    printed = {f"published {task} {metric}{end}": (task, metric, key) for task, metric in tasks for end, key in FIGURE}
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(map(csv_cell, [*names, *numbers, *columns, *printed, *sources]))
    for row in board["rows"]:
        about = row | {"measured": "yes", "versions": _versions(row), "source": "; ".join(row["files"])}
        cells = [_part(row["cells"].get(column), key) for column, key in columns.values()]
        writer.writerow(
            [csv_cell(about[key]) for key in [*names, *numbers]]
            + [csv_cell(cell) for cell in cells]
            + [""] * len(printed)
            + [csv_cell(about[key]) for key in sources]
        )
    for published in board["published"]:
        for row in published["rows"]:
            about = row | {"measured": "no", "remarks": row["note"], "source": published["source"]}
            figures = [
                row["cells"].get(task, {}).get(key) if metric == published["metric"] else None
                for task, metric, key in printed.values()
            ]
            writer.writerow(
                [csv_cell(about.get(key)) for key in [*names, *numbers]]
                + [""] * len(columns)
                + [csv_cell(figure) for figure in figures]
                + [csv_cell(about.get(key)) for key in sources]
            )
    return out.getvalue()


KEYS = (  # of a cell, in CSV
    ("value", "value"),
    ("95 % low", ("interval", 0)),
    ("95 % high", ("interval", 1)),
    ("standard error", "stderr"),
    ("bits per byte", "bits_per_byte"),
    ("bits per byte standard error", "bits_per_byte_stderr"),
    ("gap", "gap"),
    ("gap 95 % low", ("gap_interval", 0)),
    ("gap 95 % high", ("gap_interval", 1)),
    ("gap closed %", "gap_closed"),
    ("gap closed 95 % low", ("gap_closed_interval", 0)),
    ("gap closed 95 % high", ("gap_closed_interval", 1)),
)
FIGURE = (("", "value"), (" standard error", "stderr"))


def _part(cell: Mapping[str, Any] | None, key: Any) -> Any:
    if cell is None:
        return None
    name, index = (key, None) if isinstance(key, str) else key
    return cell[name] if index is None or cell[name] is None else cell[name][index]


def _versions(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in row["versions"].items())
