"""The figure of a task's values: one line for each row, with its interval."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lm_eval_duel.estimators import registry
from lm_eval_duel.results.figures.style import DARK, GREY, LIGHT, grid, label, model_colour, new, plain_log, wide
from lm_eval_duel.results.records import Row, TaskComparison
from lm_eval_duel.results.stats import CLEAR
from lm_eval_duel.results.table import HTML, WORDS, Column, form_of
from lm_eval_duel.results.tables import shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOOKS = {  # estimator: marker, colour in the legend, whether it is filled; rows have the colours of their models
    "ar": ("D", GREY, True),
    "elbo": ("<", DARK, False),
    "elbo_eps": ("<", LIGHT, False),
    "elbo_exact": ("v", DARK, False),
    "mixture": ("s", DARK, True),
    "duel": ("o", DARK, True),
    "two_phase": ("o", DARK, False),
    "oracle": ("x", LIGHT, True),
}
OTHER_LOOKS = {  # of any other estimator
    registry.Kind.LIKELIHOOD: ("P", DARK, True),
    registry.Kind.ESTIMATE: ("P", DARK, False),
    registry.Kind.UPPER_BOUND: (">", DARK, False),
    registry.Kind.NOT_A_LIKELIHOOD: ("x", LIGHT, True),
}
EPS = "elbo_eps"  # looks of an ELBO that is not a bound
AR = " (dotted line: the autoregressive baseline)"
WIDTH, LINE = 7.5, 0.25  # inches: of the figure, and of a row
FONT = 8.5
CHARACTERS = 12  # of a title in an inch
DIGIT = 0.62  # of the font's size: the width of a character


def perplexity(name: str, task: TaskComparison, width: float | None = None) -> Figure:
    """One line per row, with its value and interval; the AR baseline as a dotted line. `width`: in inches."""
    rows, metric, width = task.rows, task.metric, width or WIDTH
    figure, (axes,) = new(width, 1.3 + LINE * (len(rows) + len({row.model for row in rows})))
    texts = [HTML.value(shown(row), Column("", form_of(metric))) for row in rows]
    edge = axes.get_yaxis_transform()
    shift = {"xytext": (FONT * DIGIT * max(map(len, texts)), 0), "textcoords": "offset points"}
    at, last, names, seen = 0.0, None, {}, {}
    for row, text in zip(rows, texts, strict=True):
        if row.model != last:
            at -= 1 if last is None else 1.4
            last = row.model
            axes.text(0.0, at, f"{label(last)} ", weight="bold", transform=edge, ha="right", va="center")
        at -= 1
        names[at] = _line_label(row)
        _line(axes, row, at, seen)
        weight = "bold" if row.best else "normal"
        axes.annotate(text, (1, at), xycoords=edge, ha="right", va="center", fontsize=FONT, weight=weight, **shift)
    axes.set_yticks([*names], [*names.values()], fontsize=FONT)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(at - 0.7, -0.4)
    logarithmic = metric != "bits_per_byte" and wide([row.value for row in rows])
    if logarithmic:
        axes.set_xscale("log")
        plain_log(axes.xaxis)
    axes.set_xlabel(f"{WORDS[metric]} ({'log scale; ' if logarithmic else ''}lower is better)")
    grid(axes, "x")
    title = textwrap.fill(f"{label(name)}: {WORDS[metric]}{_intervals(rows)}", int(CHARACTERS * width))
    figure.suptitle(title, x=0.01, ha="left", fontsize=10.5)
    remark = {"ar": AR} if any(row.ar for row in rows) else {}
    legends = [legend(kind) + remark.get(kind, "") for kind in seen]
    columns = 2 if width >= WIDTH else 1
    figure.legend(seen.values(), legends, loc="outside lower center", ncols=columns, frameon=False, fontsize=FONT)
    return figure


def _line(axes: Axes, row: Row, at: float, seen: dict[str, Any]) -> None:
    """A row's interval, Monte Carlo error and value at height `at`; the first marker of each kind is put in `seen`."""
    from matplotlib.lines import Line2D

    marker, neutral, filled = LOOKS.get(kind_of(row)) or OTHER_LOOKS[row.entry.kind]
    colour = neutral if row.ar or not row.likelihood else model_colour(row.model)
    if row.interval is not None:
        axes.plot(row.interval, [at, at], "|-", color=colour, linewidth=1.4, markersize=7, zorder=2)
    if row.stderr is not None:
        axes.plot(whisker(row), [at, at], "-", color=colour, linewidth=4, alpha=0.35, zorder=2)
    shape = {"marker": marker, "markersize": 5, "markeredgewidth": 1.4, "linestyle": "none"}
    axes.plot(row.value, at, color=colour, markerfacecolor=colour if filled else "white", zorder=3, **shape)
    seen.setdefault(kind_of(row), Line2D([], [], color=neutral, fillstyle="full" if filled else "none", **shape))
    if row.ar:
        axes.axvline(row.value, color=GREY, linestyle=":", linewidth=1.2, zorder=1)


def _intervals(entries: Sequence[Row]) -> str:
    """What the lines and wide bars of the figure are."""
    text = ", with 95 % bootstrap intervals over documents" if any(entry.interval for entry in entries) else ""
    errors = any(entry.stderr is not None for entry in entries)
    return text + ("; wide bars: two Monte Carlo standard errors" if errors else "")


def whisker(entry: Row) -> list[float]:
    """Two Monte Carlo standard errors to either side."""
    low = entry.value - CLEAR * entry.stderr
    return [max(low, entry.value / 10), entry.value + CLEAR * entry.stderr]  # above 0, for a log scale


def kind_of(entry: Row) -> str:
    return EPS if entry.eps else entry.estimator


def legend(name: str) -> str:
    """An estimator in a legend."""
    if name == EPS:
        return "ELBO, eps > 0 (no bound)"
    estimator = registry.find(name)
    return f"{estimator.title}{' (upper bound)' if estimator.kind is registry.Kind.UPPER_BOUND else ''}"


def _line_label(entry: Row) -> str:
    if not entry.likelihood:
        return registry.find(entry.estimator).title
    named = label(entry.name.removeprefix("DUEL, "))
    remarks = ", ".join(filter(None, [entry.baseline_remark, entry.unknown_share]))
    return f"{named} ({remarks})" if remarks else named
