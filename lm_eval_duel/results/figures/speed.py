"""The figure of rules against their number of network evaluations."""

from __future__ import annotations

import math
import textwrap
from dataclasses import replace
from typing import TYPE_CHECKING

from lm_eval_duel.results.figures.style import GREY, LIGHT, against_nfe, label, new
from lm_eval_duel.results.figures.values import kind_of, legend, whisker
from lm_eval_duel.results.records import SEES_TRUTH, Speeds, TaskComparison
from lm_eval_duel.results.table import HTML, WORDS, Column, form_of, number
from lm_eval_duel.results.tables import shown
from lm_eval_duel.rules.tables import adaptive

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 6.8, 4.6  # inches


def rules(name: str, task: TaskComparison, sweep: Speeds, width: float | None = None) -> Figure:
    """Perplexity (log) against NFE per token (log2), one line per rule family; ELBO and AR as grey lines."""
    width = width or WIDTH
    figure, (axes,) = new(width, max(0.6 * HEIGHT, HEIGHT * width / WIDTH))
    curves = {
        family: (adaptive(family), [(row.nfe_per_token, row.value, row.interval) for row in rows])
        for family, rows in sweep.families.items()
    }
    values = [] if task.metric == "bits_per_byte" else [row.value for row in sweep.rows]
    logarithmic = against_nfe(axes, curves, values)
    _across(axes, task, sweep)
    axes.set_xlabel("NFE per token (network evaluations of the rule; log2)")
    axes.set_ylabel(f"DUEL, {WORDS[task.metric]}{' (log)' if logarithmic else ''}")
    axes.set_title(textwrap.fill(label(f"{name}: {sweep.title}"), int(12 * width)), loc="left", fontsize=11)
    columns = 2 if width >= WIDTH else 1
    figure.legend(loc="outside lower center", ncols=columns, frameon=False, fontsize=8.5)
    return figure


def _across(axes: Axes, task: TaskComparison, sweep: Speeds) -> None:
    """The ELBO and the autoregressive model as lines, the oracle as a cross."""
    form = form_of(task.metric)
    for row, style in ((sweep.elbo, (0, (5, 3))), (sweep.ar, ":")):
        if row is not None and math.isfinite(row.value):
            name = "autoregressive model" if row is sweep.ar else legend(kind_of(row))
            if row.stderr is not None:
                axes.axhspan(*whisker(row), color=GREY, alpha=0.12, linewidth=0, zorder=0)
            text = f"{name}, {HTML.value(replace(shown(row), bound=False), Column('', form))}"
            axes.axhline(row.value, color=GREY, linestyle=style, linewidth=1.3, zorder=1, label=text)
    if sweep.oracle is not None:
        text = f"oracle, {number(sweep.oracle.value, form)} ({SEES_TRUTH})"
        axes.plot([1.0], [sweep.oracle.value], "x", color=LIGHT, markeredgewidth=2, label=text)
