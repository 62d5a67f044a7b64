"""A leaderboard as one HTML file: no network, and no markup but ours (Jinja2 escapes every text).

The content security policy names our style and script by their hashes, so a browser runs and fetches nothing else, even
if a name found its way into markup.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval_duel.console import strict_json
from lm_eval_duel.console.tables import one_line
from lm_eval_duel.results.leaderboard import views
from lm_eval_duel.results.leaderboard.board import KINDS, Board, BoardRow
from lm_eval_duel.results.leaderboard.views import Head
from lm_eval_duel.results.published import UNCHECKED
from lm_eval_duel.results.table import HTML, WORDS, Cell, Table

ASSETS = Path(__file__).resolve().parent / "assets"
SCRIPTS = ("table.js", "documents.js")
GROUPS = {  # of columns, which the page can hide
    "mean": "means",
    "value": "perplexity",
    "bits": "bits per byte",
    "gap": "gap",
    "closed": "gap closed",
    "cost": "cost",
    "source": "provenance",
}
MANY = 2  # tasks beyond which the page first shows names, means, perplexities and cost only
FIRST_HIDDEN = ("bits", "gap", "closed", "source")
WIDTH, MARGIN = 150.0, 9.0  # of a plot
ROUND = ((1, 1.5, 2, 3, 4, 5, 7), (1, 2, 3, 5), (1, 3), (1,))  # mantissas of ticks, the most that fit
MOST_TICKS = 5


def html(board: Board) -> str:
    """index.html."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    style = (ASSETS / "style.css").read_text(encoding="utf-8")
    script = "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in SCRIPTS)
    heads, axis = views.heads(board), _axis(board)
    environment = Environment(
        autoescape=True,
        loader=FileSystemLoader(ASSETS),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: one_line(value) if type(value) is str else value,
    )
    environment.filters["one_line"] = one_line
    return environment.get_template("page.html").render(
        board=board,
        style=Markup(style),
        script=Markup(script),
        breakable=Markup("_<wbr>"),  # long names of tasks
        policy=f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {_hash(script)}",
        heads=heads,
        groups=_column_groups(board, heads),
        lines=lambda rows: zip(rows, Table.from_records(rows, heads).rows, strict=True),
        tasks={column.id: views.task_heads(board, column) for column in board.columns},
        value=HTML.value,
        interval=HTML.interval,
        sort_key=_sort_key,
        axis=axis,
        place=lambda row: axis.at(row.main) if _finite(row) else None,
        ends=lambda row: _ends(board, row),
        choices={key: sorted({getattr(row, key) for row in board.rows} - {""}) for key in ("display", "cache")},
        kinds={kind: KINDS[kind] for kind in KINDS if any(row.kind == kind for row in board.rows)},
        published=[_published(source) for source in board.published],
        unchecked=UNCHECKED,
        documents=strict_json.finite(board.documents),
    )


def _hash(content: str) -> str:
    digest = base64.b64encode(hashlib.sha256(content.encode("utf-8")).digest()).decode()
    return f"'sha256-{digest}'"


def _column_groups(board: Board, heads: Sequence[Head]) -> list[dict[str, Any]]:
    """The groups of columns that can be hidden; if there are many tasks, only a few groups are shown at first."""
    hidden = FIRST_HIDDEN if len(board.columns) > MANY else ("source",)
    names = {**GROUPS, "value": board.unit, "gap": f"gap to {board.ar}"}
    there = {head.group for head in heads}
    return [{"id": key, "name": names[key], "shown": key not in hidden} for key in GROUPS if key in there]


def _sort_key(cell: Cell, head: Head) -> float | str | None:
    """What the page sorts a cell by: a number, a text, or None (last)."""
    if head.numeric and isinstance(cell.value, str):
        return math.inf if cell.value == "whole" else None
    return None if cell.value == "" else cell.value


def _published(source: Mapping[str, Any]) -> dict[str, Any]:
    """A table of published figures without empty columns, as texts."""
    table = views.published(source)
    kept = [n for n in range(len(table.columns)) if any(row[n].value not in (None, "") for row in table.rows)]
    lines = [
        (row, [(table.columns[n], cells[n], HTML.value(cells[n], table.columns[n])) for n in kept])
        for row, cells in zip(source["rows"], table.rows, strict=True)
    ]
    about = {"source": source["source"], "unit": WORDS[source["metric"]]}
    return about | {"lines": lines, "columns": [table.columns[n] for n in kept]}


# ---------------------------------------------------------------- the plot of the value that rows are ranked by


def _finite(row: BoardRow) -> bool:
    return row.main is not None and math.isfinite(row.main)


def _ends(board: Board, row: BoardRow) -> list[float] | None:
    """The interval over documents of a row's value, if it is that of one task."""
    interval = row.results[board.by].interval if board.by in row.results and _finite(row) else None
    return interval if interval and all(map(math.isfinite, interval)) else None


@dataclasses.dataclass(frozen=True)
class Axis:
    """Where values stand, on a logarithmic scale for perplexities. `base`: the place of the baseline."""

    low: float
    high: float
    log: bool
    width: float = WIDTH
    base: float | None = None

    def at(self, value: float) -> float:
        low, high, value = (math.log(x) if self.log else x for x in (self.low, self.high, value))
        return round(MARGIN + (value - low) / (high - low) * (WIDTH - 2 * MARGIN), 1)

    @property
    def ticks(self) -> list[tuple[float, str]]:
        return [(self.at(tick), f"{tick:g}") for tick in _ticks(self.low, self.high)]


def _axis(board: Board) -> Axis | None:
    """The axis of all rows; None if there is nothing to plot."""
    rows = [row for row in board.rows if _finite(row)]
    points = [value for row in rows for value in [row.main, *(_ends(board, row) or [])]]
    if not points or min(points) == max(points):
        return None
    axis = Axis(min(points), max(points), log=board.metric != "bits_per_byte" and min(points) > 0)
    base = next((row.main for row in reversed(rows) if row.baseline), None)
    return axis if base is None else dataclasses.replace(axis, base=axis.at(base))


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers between two values, five at most, and two at least if they are far enough apart."""
    powers = range(math.floor(math.log10(low)) if low > 0 else -6, math.ceil(math.log10(high)) + 1)
    ticks = []
    for mantissas in ROUND:
        ticks = [m * 10.0**power for power in powers for m in mantissas if low <= m * 10.0**power <= high]
        if len(ticks) <= MOST_TICKS:
            break
    if len(ticks) > 1:
        return ticks
    step = 10.0 ** math.floor(math.log10(high - low))  # close together: even steps
    return [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)][:MOST_TICKS]
