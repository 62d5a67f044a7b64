"""A leaderboard as one HTML file: no network, and no markup but ours (Jinja2 escapes every text).

The content security policy names our style and script by their hashes, so a browser runs and fetches nothing else, even
if a name found its way into markup.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_eval_duel import strict_json
from lm_eval_duel.results.leaderboard import table, text
from lm_eval_duel.results.leaderboard.board import KINDS, label
from lm_eval_duel.results.published import UNCHECKED
from lm_eval_duel.results.table import HTML, WORDS, Column, form_of

if TYPE_CHECKING:
    from jinja2 import Template

ASSETS = Path(__file__).resolve().parent / "assets"
SCRIPTS = ("table.js", "documents.js")
PLOT_WIDTH, PLOT_HEIGHT, MARGIN = 150.0, 22.0, 9.0
ROUND = ((1, 1.5, 2, 3, 4, 5, 7), (1, 2, 3, 5), (1, 3), (1,))  # mantissas of ticks, the most that fit
MOST_TICKS = 5


def html(board: Mapping[str, Any]) -> str:
    """index.html."""
    from markupsafe import Markup

    style = (ASSETS / "style.css").read_text(encoding="utf-8")
    script = "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in SCRIPTS)
    heads = table.heads(board)
    many = len(board["columns"]) > table.MANY
    return _template().render(
        board=board,
        style=Markup(style),
        script=Markup(script),
        breakable=Markup("_<wbr>"),  # long names of tasks
        policy=f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {_hash(script)}",
        heads=heads,
        groups=_column_groups(board, heads, many),
        bodies=_bodies(board, heads),
        plot=_axis(board),
        ranked_by=table.ranked_by(board),
        choices={key: sorted({row[key] for row in board["rows"] if row[key]}) for key in ("display", "cache")},
        kinds={kind: KINDS[kind] for kind in KINDS if any(row["kind"] == kind for row in board["rows"])},
        published=[_published(source) for source in board["published"]],
        unchecked=UNCHECKED,
        documents=strict_json.finite(board["documents"]),
        words=WORDS,
    )


@functools.cache
def _template() -> Template:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(ASSETS)
    options = {"undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    return Environment(autoescape=True, loader=loader, **options).get_template("page.html")


def _hash(content: str) -> str:
    digest = base64.b64encode(hashlib.sha256(content.encode("utf-8")).digest()).decode()
    return f"'sha256-{digest}'"


def _column_groups(board: Mapping[str, Any], heads: Sequence[table.Head], many: bool) -> list[dict[str, Any]]:
    """The groups of columns that can be hidden; if there are many tasks, only a few groups are shown at first."""
    there = [group for group in table.GROUPS if any(head.group == group for head in heads) and group != "name"]
    names = {**table.GROUPS, "value": WORDS[board["metric"]], "gap": f"gap to {board['ar']}"}
    return [
        {"id": group, "name": names[group], "shown": group != "source" and not (many and group in table.FIRST_HIDDEN)}
        for group in there
    ]


def _bodies(board: Mapping[str, Any], heads: Sequence[table.Head]) -> list[dict[str, Any]]:
    """The groups of rows, each row with its cells, its plot and its details."""
    axis = _axis(board)
    return [
        {
            "title": title,
            "rows": [
                {
                    "row": row,
                    "cells": [(head, table.shown(head, cell)) for head, cell in table.cells(board, row)],
                    "plot": _plot(axis, board, row),
                    "tasks": [_task(board, column, row) for column in board["columns"] if column["id"] in row["cells"]],
                    "label": label(row),
                    "name": f"{row['model']}, {label(row)}",
                }
                for row in rows
            ],
        }
        for title, rows in text.groups(board)
    ]


def _task(board: Mapping[str, Any], column: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """A line of a row's details."""
    cell = row["cells"][column["id"]]
    forms = {"value": form_of(board["metric"]), "bits": ".4f", "gap": f"+{form_of(board['metric'])}", "closed": ".1f"}
    heads = [table.Head(group, group, group, form) for group, form in forms.items()]
    values = {head.group: table.shown(head, table.of_task(head.group, cell, row)) for head in heads}
    return {"label": column["label"], "documents": column["documents"], "tokens": cell["tokens"], **values}


def _published(source: Mapping[str, Any]) -> dict[str, Any]:
    """A table of published figures, as texts."""
    shown = text.published(source)
    names = [name for name in ("rule", "block", "cache", "note") if any(row[name] for row in source["rows"])]
    column = Column("", form_of(source["metric"]))
    lines = []
    for row, cells in zip(source["rows"], shown.cells(), strict=True):
        by_title = {head.title: cell for head, cell in zip(shown.columns, cells, strict=True)}
        figures = [cell for head, cell in zip(shown.columns, cells, strict=True) if head.numeric]
        texts = [(HTML.value(cell, column), cell.value) for cell in figures]
        lines.append({"row": row, "names": [(name, by_title[name].value) for name in names], "figures": texts})
    return {**source, "names": names, "lines": lines, "unit": WORDS[source["metric"]]}


# ---------------------------------------------------------------- the plot of the first column


def _points(board: Mapping[str, Any], row: Mapping[str, Any]) -> tuple[float | None, list[float] | None]:
    """The value that rows are ranked by, and its interval over documents if it is that of one task."""
    value = row["main"]
    if value is None or not math.isfinite(value):
        return None, None
    interval = None if board["by"] == "mean" else row["cells"][board["by"]]["interval"]
    return value, interval if interval and all(map(math.isfinite, interval)) else None


def _axis(board: Mapping[str, Any]) -> dict[str, Any] | None:
    """Where values stand, on a logarithmic scale for perplexities; None if there is nothing to plot."""
    ends: list[float] = []
    baseline = None
    for row in board["rows"]:
        value, interval = _points(board, row)
        if value is not None:
            ends += [value, *(interval or [])]
            baseline = value if row["baseline"] else baseline
    logarithmic = board["metric"] != "bits_per_byte" and bool(ends) and min(ends) > 0
    if not ends or min(ends) == max(ends):
        return None
    low, high = (math.log(end) if logarithmic else end for end in (min(ends), max(ends)))
    axis: dict[str, Any] = {"low": low, "high": high, "log": logarithmic, "width": PLOT_WIDTH, "height": PLOT_HEIGHT}
    axis["baseline"] = None if baseline is None else _at(axis, baseline)
    axis["ticks"] = [(_at(axis, tick), f"{tick:g}") for tick in _ticks(min(ends), max(ends))]
    return axis


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


def _at(axis: Mapping[str, Any], value: float) -> float:
    place = math.log(value) if axis["log"] else value
    share = (place - axis["low"]) / (axis["high"] - axis["low"])
    return round(MARGIN + share * (PLOT_WIDTH - 2 * MARGIN), 1)


def _plot(axis: Mapping[str, Any] | None, board: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any] | None:
    """Places of a row's value and of the ends of its interval."""
    value, interval = _points(board, row)
    if axis is None or value is None:
        return None
    return {"at": _at(axis, value), "ends": [_at(axis, end) for end in interval] if interval else None}
