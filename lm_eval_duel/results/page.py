"""A leaderboard as one HTML file: no network, and no markup but ours (Jinja2 escapes every text).

The content security policy names our style and script by their hashes, so a browser runs and fetches nothing else, even
if a name found its way into markup.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval_duel.console import strict_json
from lm_eval_duel.console.tables import one_line
from lm_eval_duel.results import board_views, published
from lm_eval_duel.results.board import KINDS, Board, BoardRow
from lm_eval_duel.results.board_views import Head

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
MANY = 1  # tasks beyond which the page first shows names, means, perplexities and cost only
FIRST_HIDDEN = ("bits", "gap", "closed", "source")
NUMBER = re.compile(r"[+-]?[\d,]*\.?\d+(e[+-]?\d+)?|inf")
WIDTH, MARGIN = 140.0, 9.0  # of a plot
ROUND = ((1, 1.5, 2, 3, 4, 5, 7), (1, 2, 3, 5), (1, 3), (1,))  # mantissas of ticks, the most that fit
MOST_TICKS = 5


def html(board: Board) -> str:
    """index.html."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    style = (ASSETS / "style.css").read_text(encoding="utf-8")
    script = "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in SCRIPTS)
    heads, axis = board_views.heads(board), _axis(board)
    table = board_views.table(board, heads, [row for _, rows in board.groups for row in rows])
    heads = [head for head in heads if head.title in table.heads]
    lines = iter(table.rows)
    environment = Environment(
        autoescape=True,
        loader=FileSystemLoader(ASSETS),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: one_line(value) if type(value) is str else value,
    )
    return environment.get_template("page.html").render(
        board=board,
        style=Markup(style),
        script=Markup(script),
        policy=f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {_hash(script)}",
        heads=heads,
        column_groups=_column_groups(board, heads),
        lines=[(title, [(row, _cells(heads, next(lines))) for row in rows]) for title, rows in board.groups],
        remarks=table.remarks,
        axis=axis,
        place=lambda row: None if axis is None or row.main is None else axis.at(row.main),
        ends=lambda row: None if (ends := _ends(board, row)) is None else list(map(axis.at, ends)),
        choices={key: sorted({getattr(row, key) for row in board.rows} - {""}) for key in ("display", "cache")},
        kinds={kind: KINDS[kind] for kind in KINDS if any(row.kind == kind for row in board.rows)},
        published=[(source["source"], published.table(source)) for source in board.published],
        unchecked=published.UNCHECKED,
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


def _cells(heads: Sequence[Head], texts: Sequence[str]) -> list[dict[str, Any]]:
    """The cells of a row: the text, the interval that stands below it, and the number that it is sorted by."""
    cells = []
    for head, text in zip(heads, texts, strict=True):
        shown, small, number = text, "", None
        if head.numeric:
            shown, bracket, rest = text.partition(" (")
            interval, _, mark = rest.partition(")")
            shown, small = f"{shown}{mark}" if bracket else shown, interval
            found = NUMBER.search(text)
            number = found[0].replace(",", "") if found and not text.startswith("[") else ""
            number = "inf" if text == "whole" else number
        cells.append({"head": head, "text": shown, "small": small, "number": number})
    return cells


# ---------------------------------------------------------------- the plot of the value that rows are ranked by


def _ends(board: Board, row: BoardRow) -> list[float] | None:
    """The interval over documents of a row's value, if it is that of one task."""
    interval = row.results[board.by].interval if board.by in row.results and row.main is not None else None
    return interval if interval and all(map(math.isfinite, interval)) else None


@dataclasses.dataclass(frozen=True)
class Axis:
    """The scale of an axis, logarithmic for perplexities. `base`: the place of the baseline."""

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
    rows = [row for row in board.rows if row.main is not None]
    points = [value for row in rows for value in [row.main, *(_ends(board, row) or [])]]
    if not points or min(points) == max(points):
        return None
    axis = Axis(min(points), max(points), log=board.metric != "bits_per_byte" and min(points) > 0)
    base = next((row.main for row in reversed(rows) if any(result.ar for result in row.results.values())), None)
    return axis if base is None else dataclasses.replace(axis, base=axis.at(base))


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers between two values, five at most, and two at least if they are far enough apart."""
    powers = range(math.floor(math.log10(low)) if low > 0 else -6, math.ceil(math.log10(high)) + 1)
    every = ([m * 10.0**power for power in powers for m in mantissas] for mantissas in ROUND)
    inside = [[tick for tick in ticks if low <= tick <= high] for ticks in every]
    ticks = next((ticks for ticks in inside if len(ticks) <= MOST_TICKS), inside[-1])
    if len(ticks) > 1:
        return ticks
    step = 10.0 ** math.floor(math.log10(high - low))  # close together: even steps
    return [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)][:MOST_TICKS]
