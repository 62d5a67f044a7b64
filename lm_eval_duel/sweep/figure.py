"""The sweep as panels over NFE per token: perplexity, judge, entropy, MAUVE or distinct 2-grams. Needs matplotlib."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from lm_eval_duel.results.figures.style import GREY, against_nfe, label, new
from lm_eval_duel.results.table import Cell
from lm_eval_duel.sweep.tables import entry, generative, judged

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Json = Mapping[str, Any]
Read = Callable[[Json], Cell]  # what a panel shows of a setting
Lines = dict[str, tuple[float, Any]]  # label -> height and style
WIDTH, HEIGHT = 5.0, 3.6  # inches of a panel
NARROW = 2.6  # inches below which panels stand below each other
INTERVAL = 1.96  # standard errors
FLOOR = 0.05  # bars end above 0, for a log scale


def draw(report: Json, width: float | None = None) -> Figure:
    """The figure, one line per rule with error bars; panels about samples only if there are samples."""
    panels = _panels(report)
    columns = 1 if width is not None and width < 2 * NARROW else min(2, len(panels))
    rows = -(-len(panels) // columns)
    width = width or WIDTH * columns
    figure, every = new(width, (min(HEIGHT, 0.85 * width / columns)) * rows + 0.6, rows, columns)
    legend: dict[str, Any] = {}
    for (title, source, read, across), axes in zip(panels, every, strict=False):
        curves = {}
        for family in dict.fromkeys(setting["family"] for setting in report["settings"]):
            members = [s for s in report["settings"] if s["family"] == family and read(s).value is not None]
            points = sorted(_point(member[source]["nfe_per_token"], read(member)) for member in members)
            curves[family] = bool(members) and members[0]["k"] is None, points
        shown = [value for value, _ in across.values()]
        against_nfe(axes, curves, [*shown, *(value for _, points in curves.values() for _, value, _ in points)])
        for name, (value, style) in across.items():
            axes.axhline(value, color=GREY, linestyle=style, linewidth=1.3, zorder=1, label=name)
        axes.set_xlabel("NFE per token (log2)", fontsize=9)
        axes.tick_params(labelsize=8.5)
        if title.startswith("MAUVE"):
            axes.set_ylim(bottom=0)
        axes.set_title(title, loc="left", fontsize=10)
        for line, text in zip(*axes.get_legend_handles_labels(), strict=True):
            legend.setdefault(text, line)
    across = max(1, int(width / WIDTH * 1.5))
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=across, frameon=False, fontsize=8.5)
    title = f"{report['task']['name']}: {report['model']}, block {report['block'] or 'none'}; bars: 95 % intervals"
    figure.suptitle(textwrap.fill(label(title), int(11 * width)), x=0.01, ha="left", fontsize=11)
    return figure


def _point(nfe: float, cell: Cell) -> tuple[float, float, list[float] | None]:
    """A value with its 95 % interval."""
    value, error = cell.value, cell.stderr
    bar = None if error is None else [value - min(INTERVAL * error, (1 - FLOOR) * value), value + INTERVAL * error]
    return nfe, value, bar


def _panels(report: Json) -> list[tuple[str, str, Read, Lines]]:
    """Each panel as (title, `text` or `samples`, the cell of a setting that it shows, horizontal lines)."""
    bound, reference = report["elbo"], report["reference"]
    dashed: Lines = {}
    if bound:
        cell = judged(bound)
        error = "?" if cell.stderr is None else f"{cell.stderr:.2f}"
        dashed = {f"ELBO, ≤ {cell.value:.2f} ± {error} (Monte Carlo)": (cell.value, (0, (5, 3)))}
    panels: list[tuple[str, str, Read, Lines]] = [
        ("DUEL perplexity of the text (lower is better)", "text", lambda row: judged(row["text"]), dashed)
    ]
    if not reference:
        return panels
    own = {"samples": reference}

    def add(title: str, read: Read, own: Json | None = own) -> None:
        lines = {} if own is None else {"the task's own text": (read(own).value, ":")}
        panels.append((title, "samples", read, lines))

    if report["scorer"]:
        add(label(f"generative perplexity of samples, {report['scorer']}"), generative)
    else:
        add("own nll per token of samples (nats)", entry("samples", "own_nll_per_token", "own_stderr"), None)
    add("entropy of samples (nats)", entry("samples", "entropy", "entropy_stderr"))
    if any(setting["samples"]["mauve"] is not None for setting in report["settings"]):
        add("MAUVE of samples (higher is better)", entry("samples", "mauve"), None)
    else:
        add("distinct 2-grams of samples (share)", entry("samples", "distinct_2"))
    return panels
