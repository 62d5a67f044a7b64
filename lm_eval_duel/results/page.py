"""A leaderboard as one HTML file: no network, and no markup but ours (Jinja2 escapes every text).

The content security policy names our style and script by their hashes, so a browser runs and fetches nothing else, even
if a name found its way into markup.
"""

from __future__ import annotations

import base64
import hashlib
import math
from pathlib import Path
from typing import Any

from lm_eval_duel.console import strict_json
from lm_eval_duel.console.tables import one_line
from lm_eval_duel.results import published
from lm_eval_duel.results.board import KINDS, Board
from lm_eval_duel.results.columns import of_board
from lm_eval_duel.results.table import Table

ASSETS = Path(__file__).resolve().parent / "assets"
SCRIPTS = ("table.js", "documents.js")
FIRST_HIDDEN = ("source", "bits", "gap", "closed")  # groups of columns: the first, with several tasks all of them
SWITCHES = {"mean": "means", "value": "", "bits": "bits per byte", "gap": "", "closed": "gap closed"}
SWITCHES |= {"cost": "cost", "source": "provenance"}
PLAIN = ("model", "estimator", "rule", "cache", "device", "fingerprint", "versions", "date")  # columns of no numbers
WIDTH, MARGIN = 140.0, 9.0  # of a plot
MANTISSAS = ((1, 1.5, 2, 3, 4, 5, 7), (1, 2, 3, 5), (1, 3), (1,))  # of ticks: the most that fit
MOST_TICKS = 5


def html(board: Board) -> str:
    """index.html."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    style = (ASSETS / "style.css").read_text(encoding="utf-8")
    script = "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in SCRIPTS)
    rows = [row for _, of_group in board.groups for row in of_group]
    columns = {column.head: column for column in of_board(board)}
    table = Table.of(board.title, rows, {head: column.cell for head, column in columns.items()})
    shown = [columns[head] for head in table.heads]
    kinds = {row.kind for row in rows} | ({"AR"} if any(row.autoregressive for row in rows) else set())
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
        kinds={kind: about for kind, about in KINDS.items() if kind in kinds},
        switches=SWITCHES | {"value": board.unit, "gap": f"gap to {board.ar}"},
        hidden=FIRST_HIDDEN[: 1 if len(board.columns) == 1 else None],
        names=[column for column in shown if column.group == "name"],
        values=[column for column in shown if column.group != "name"],
        texts={row: dict(zip(table.heads, texts, strict=True)) for row, texts in zip(rows, table.rows, strict=True)},
        plain=PLAIN,
        remarks=table.remarks,
        plot=_plot(board),
        published=[(source["source"], published.table(source)) for source in board.published],
        unchecked=published.UNCHECKED,
        documents=strict_json.finite(board.documents),
    )


def _hash(content: str) -> str:
    digest = base64.b64encode(hashlib.sha256(content.encode("utf-8")).digest()).decode()
    return f"'sha256-{digest}'"


# ---------------------------------------------------------------- the plot of the value that rows are ranked by


def _plot(board: Board) -> dict[str, Any] | None:
    """The places of ticks, rows (value and interval) and the baseline, in pixels; None if there is nothing to show."""
    rows = {row: [row.main] for row in board.rows if row.main is not None}
    for row, values in rows.items():
        interval = row.results[board.by].interval if board.by in row.results else None
        values += interval if interval and all(map(math.isfinite, interval)) else []
    every = [value for values in rows.values() for value in values]
    if not every or min(every) == max(every):
        return None
    low, high = min(every), max(every)
    scale = math.log if board.metric != "bits_per_byte" and low > 0 else float

    def at(value: float) -> float:
        share = (scale(value) - scale(low)) / (scale(high) - scale(low))
        return round(MARGIN + share * (WIDTH - 2 * MARGIN), 1)

    baselines = [row.main for row in rows if any(result.ar for result in row.results.values())]
    return {
        "width": WIDTH,
        "ticks": [(at(tick), f"{tick:g}") for tick in _ticks(low, high)],
        "rows": {row: list(map(at, values)) for row, values in rows.items()},
        "base": at(baselines[-1]) if baselines else None,
    }


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers between two values, five at most, and two at least if they are far enough apart."""
    powers = range(math.floor(math.log10(low)) if low > 0 else -6, math.ceil(math.log10(high)) + 1)
    for mantissas in MANTISSAS:
        ticks = [m * 10.0**power for power in powers for m in mantissas if low <= m * 10.0**power <= high]
        if len(ticks) <= MOST_TICKS:
            break
    if len(ticks) > 1:
        return ticks
    step = 10.0 ** math.floor(math.log10(high - low))  # close together: even steps
    return [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)][:MOST_TICKS]
