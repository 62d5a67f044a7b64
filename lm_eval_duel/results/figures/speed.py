"""The figure of rules against their number of network evaluations."""

from __future__ import annotations

import math
import textwrap
from dataclasses import replace
from typing import TYPE_CHECKING

from lm_eval_duel.results.figures.style import GREY, LIGHT, against_nfe, curve, label, new, wide
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
    entries, width = task.rows, width or WIDTH
    figure, (axes,) = new(width, max(0.6 * HEIGHT, HEIGHT * width / WIDTH))
    for n, (family, points) in enumerate(sweep.families.items()):
        rows = [entries[point] for point in points]
        curve(axes, n, family, adaptive(family), [(row.nfe_per_token, row.value, row.interval) for row in rows])
    _across(axes, task, sweep)
    shown = [entries[point] for points in sweep.families.values() for point in points]
    logarithmic = task.metric != "bits_per_byte" and wide([row.value for row in shown])
    against_nfe(axes, min(1.0, *(row.nfe_per_token for row in shown)), logarithmic)
    axes.set_xlabel("NFE per token (network evaluations of the rule; log2)")
    axes.set_ylabel(f"DUEL, {WORDS[task.metric]}{' (log)' if logarithmic else ''}")
    axes.set_title(textwrap.fill(label(f"{name}: {sweep.title}"), int(12 * width)), loc="left", fontsize=11)
    columns = 2 if width >= WIDTH else 1
    figure.legend(loc="outside lower center", ncols=columns, frameon=False, fontsize=8.5)
    return figure


def _across(axes: Axes, task: TaskComparison, sweep: Speeds) -> None:
    """The ELBO and the autoregressive model as lines, the oracle as a cross."""
    entries, metric = task.rows, task.metric
    for key, style in (("elbo", (0, (5, 3))), ("ar", ":")):
        entry = None if getattr(sweep, key) is None else entries[getattr(sweep, key)]
        if entry is None or not math.isfinite(entry.value):
            continue
        name = "autoregressive model" if key == "ar" else legend(kind_of(entry))
        if entry.stderr is not None:
            axes.axhspan(*whisker(entry), color=GREY, alpha=0.12, linewidth=0, zorder=0)
        text = f"{name}, {HTML.value(replace(shown(entry), bound=False), Column('', form_of(metric)))}"
        axes.axhline(entry.value, color=GREY, linestyle=style, linewidth=1.3, zorder=1, label=text)
    if sweep.oracle is not None:
        value = entries[sweep.oracle].value
        text = f"oracle, {number(value, form_of(metric))} ({SEES_TRUTH})"
        axes.plot([1.0], [value], "x", color=LIGHT, markeredgewidth=2, label=text)
