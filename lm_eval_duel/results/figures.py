"""Figures of a report as PNG, SVG or PDF: perplexities with intervals, rules against NFE. Needs matplotlib to draw.

A model and a rule have one colour in every figure.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import itertools
import math
import textwrap
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lm_eval_duel.console.command_line import one_line
from lm_eval_duel.estimators import registry
from lm_eval_duel.estimators.registry import Kind
from lm_eval_duel.results.compare import ComparedRow, Comparison, Speeds
from lm_eval_duel.results.own_files import stems
from lm_eval_duel.results.rows import Row
from lm_eval_duel.results.stats import CLEAR
from lm_eval_duel.results.table import WORDS, escape
from lm_eval_duel.results.tables import value
from lm_eval_duel.rules.tables import adaptive, without_defaults

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MISSING = "No figures: matplotlib is not installed (pip install 'lm-eval-duel[plots]')."
GREY, LIGHT, DARK = "#555555", "#bbbbbb", "#222222"
# Okabe and Ito's colours, and Tol's for the others: both colour-blind safe
COLOURS = {
    **{"left_to_right": "#000000", "right_to_left": "#882255", "random": "#999933", "greedy": "#D55E00"},
    **{"margin": "#009E73", "log_margin": "#44AA99", "entropy": "#0072B2", "threshold": "#CC79A7"},
    **{"klass": "#E69F00", "entropy_bound": "#56B4E9", "entropy_threshold": "#332288", "factor": "#117733"},
    **{"high_or_topk": "#AA4499", "hierarchy": "#661100", "dinfer_threshold": "#6699CC", "quota": "#DDCC77"},
    **{"dream": "#888888", "cumulative_quota": "#CCBB44", "threshold_until": "#66CCEE"},
    **{
        "threshold_fixed": "#44BB99",
        "threshold_ref": "#BB5566",
        "threshold_bound": "#004488",
        "cumulative_error": "#7F3C8D",
        "falling_threshold": "#A5AA99",
    },
}
OTHER_RULES = ("#33BBEE", "#EE3377", "#CC3311", "#225522", "#BBCC33")  # a user's rule: chosen by its name
MODELS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#882255", "#332288", "#117733", "#661100", "#0077BB", "#AA4499")
LINE_MARKERS = ("o", "s", "^", "D", "v", "P", "X")  # of rules against NFE, in turn
MARKERS = {"ar": "D", "elbo": "<", "elbo_exact": "v", "mixture": "s", "duel": "o", "two_phase": "o"}
OTHER_MARKERS = {Kind.UPPER_BOUND: ">", Kind.NOT_A_LIKELIHOOD: "x"}
WIDTH, LINE = 7.5, 0.25  # inches: the figure of values, and a row of it
RULES_WIDTH, RULES_HEIGHT = 6.8, 4.6  # inches
FONT, DIGIT = 8.5, 0.62  # points, and the width of a character in it
CHARACTERS = 12  # of a title in an inch
LOG_FROM = 2.5  # an axis is logarithmic if the largest value is more than this times the smallest
DPI, PRINT_DPI = 110, 200  # of PNG files; the second at a stated width


@dataclasses.dataclass(frozen=True)
class Image:
    """A figure of a task: its files by name, one for each format."""

    task: str
    kind: str
    title: str
    files: dict[str, bytes]

    def markdown(self, quote: Callable[[str], str]) -> str:
        """A picture; a link if there is a PDF file only."""
        file = next((file for file in self.files if not file.endswith(".pdf")), next(iter(self.files)))
        return f"{'' if file.endswith('.pdf') else '!'}[{escape(self.title)}]({quote(file)})"


def available() -> bool:
    """True if figures can be drawn."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(tasks: Mapping[str, Comparison], formats: Sequence[str], width: float | None) -> list[Image]:
    """Every figure of a report, `width` inches wide."""
    drawn = []
    for name, task in tasks.items():
        drawn.append((name, "perplexity", f"perplexities on {name}", perplexity(name, task, width)))
        for of in task.rules:
            title = f"rules against NFE on {name}: {of.title}"
            drawn.append((name, "rules", title, rules(name, task, of, width)))
    named = stems(about for *about, _ in drawn)
    return [
        Image(*about, {f"{stem}.{form}": _file(figure, form, width is not None) for form in formats})
        for stem, (*about, figure) in zip(named, drawn, strict=True)
    ]


def _file(figure: Figure, form: str, exact: bool) -> bytes:
    """A figure in a format. `exact`: keep its width, else cut empty margins. The time of writing is not in the file."""
    import matplotlib

    size: dict[str, Any] = {"dpi": PRINT_DPI} if exact else {"dpi": DPI, "bbox_inches": "tight"}
    out = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "lm-eval-duel", "pdf.fonttype": 42}):
        undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(form)
        figure.savefig(out, format=form, metadata=undated, **size)
    return out.getvalue()


# ---------------------------------------------------------------- how figures look


def model_colour(model: str) -> str:
    return MODELS[zlib.crc32(model.encode()) % len(MODELS)]


def rule_colour(rule: str) -> str:
    name = rule.split(":")[0]
    return COLOURS.get(name) or OTHER_RULES[zlib.crc32(name.encode()) % len(OTHER_RULES)]


def _new(width: float, height: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    return figure, axes


def _label(text: str) -> str:
    """Escape text for matplotlib, which would read a pair of $ as a formula."""
    return one_line(text).replace("$", r"\$")


def _title(text: str, width: float) -> str:
    return textwrap.fill(_label(text), int(CHARACTERS * width))


def _set_scale(axes: Axes, which: str, metric: str, values: Sequence[float]) -> bool:
    """Make an axis of values logarithmic, with plain numbers, if they need it (never with infinite ones)."""
    from matplotlib import ticker

    if metric == "bits_per_byte" or not values or min(values) <= 0:
        return False
    if not LOG_FROM * min(values) < max(values) < math.inf:
        return False
    axes.set(**{f"{which}scale": "log"})
    axis = getattr(axes, f"{which}axis")
    axis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 3.0, 5.0), numticks=12))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter("")
    return True


def _add_legend(figure: Figure, columns: int) -> None:
    figure.legend(loc="outside lower center", ncols=columns, frameon=False, fontsize=FONT)


def _whisker(row: Row) -> list[float]:
    """Two Monte Carlo standard errors to either side, above 0 for a logarithmic axis."""
    return [max(row.value - CLEAR * row.stderr, row.value / 10), row.value + CLEAR * row.stderr]


def _kind(row: Row) -> str:
    """An estimator in a legend."""
    return "ELBO, eps > 0 (no bound)" if row.eps else f"{row.entry.title}{' (upper bound)' if row.bound else ''}"


# ---------------------------------------------------------------- the values of a task


def perplexity(name: str, task: Comparison, width: float | None = None) -> Figure:
    """One line per row, with its value and interval; the AR baseline as a dotted line. `width`: in inches."""
    rows, metric, width = task.rows, task.metric, width or WIDTH
    models = [(model, list(of_model)) for model, of_model in itertools.groupby(rows, lambda each: each.row.model)]
    figure, axes = _new(width, 1.3 + LINE * (len(rows) + len(models)))
    edge = axes.get_yaxis_transform()
    shift = {"xytext": (FONT * DIGIT * max(len(value(each.row)) for each in rows), 0), "textcoords": "offset points"}
    at, names = 0.4, {}
    for model, of_model in models:
        at -= 1.4
        axes.text(0.0, at, f"{_label(model)} ", weight="bold", transform=edge, ha="right", va="center")
        for each in of_model:
            at -= 1
            names[at] = _name(each.row)
            _draw_row(axes, each, at)
            look = {"weight": "bold" if each.best else "normal", "ha": "right", "va": "center", "fontsize": FONT}
            axes.annotate(value(each.row), (1, at), xycoords=edge, **look, **shift)
    axes.set_yticks([*names], [*names.values()], fontsize=FONT)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(at - 0.7, -0.4)
    logarithmic = _set_scale(axes, "x", metric, [each.row.value for each in rows])
    axes.set_xlabel(f"{WORDS[metric]} ({'log scale; ' if logarithmic else ''}lower is better)")
    axes.grid(axis="x", color="#e5e5e5", linewidth=0.8)
    about = ", with 95 % bootstrap intervals over documents" if any(each.interval for each in rows) else ""
    about += "; wide bars: two Monte Carlo standard errors" if any(each.row.stderr is not None for each in rows) else ""
    figure.suptitle(_title(f"{name}: {WORDS[metric]}{about}", width), x=0.01, ha="left", fontsize=10.5)
    _add_legend(figure, 2 if width >= WIDTH else 1)
    return figure


def _name(row: Row) -> str:
    if not row.likelihood:
        return registry.find(row.estimator).title
    remarks = ", ".join(filter(None, [row.baseline_remark, row.unknown_share]))
    return _label(row.name.removeprefix("DUEL, ")) + (f" ({remarks})" if remarks else "")


def _draw_row(axes: Axes, each: ComparedRow, at: float) -> None:
    """A row's interval, Monte Carlo error and value at height `at`; in the legend the first of each kind, in grey."""
    row = each.row
    marker = MARKERS.get(row.estimator) or OTHER_MARKERS.get(row.entry.kind, "P")
    neutral = GREY if row.estimator == "ar" else DARK if row.likelihood and not row.eps else LIGHT
    colour = neutral if row.ar or not row.likelihood else model_colour(row.model)
    if each.interval is not None:
        axes.plot(each.interval, [at, at], "|-", color=colour, linewidth=1.4, markersize=7, zorder=2)
    if row.stderr is not None:
        axes.plot(_whisker(row), [at, at], "-", color=colour, linewidth=4, alpha=0.35, zorder=2)
    shape = {"marker": marker, "markersize": 5, "markeredgewidth": 1.4, "linestyle": "none"}
    axes.plot(row.value, at, color=colour, markerfacecolor=colour if row.proper else "white", zorder=3, **shape)
    kind = _kind(row) + (" (dotted line: the autoregressive baseline)" if row.ar else "")
    if kind not in axes.get_legend_handles_labels()[1]:
        axes.plot([], [], color=neutral, markerfacecolor=neutral if row.proper else "white", label=kind, **shape)
    if row.ar:
        axes.axvline(row.value, color=GREY, linestyle=":", linewidth=1.2, zorder=1)


# ---------------------------------------------------------------- rules against NFE


def rules(name: str, task: Comparison, of: Speeds, width: float | None = None) -> Figure:
    """Perplexity against NFE per token (log2), one line per rule family; ELBO and AR as grey lines."""
    width = width or RULES_WIDTH
    figure, axes = _new(width, max(0.6 * RULES_HEIGHT, RULES_HEIGHT * width / RULES_WIDTH))
    axes.set_xscale("log", base=2, subs=[])
    axes.xaxis.set_major_formatter("{x:g}")
    logarithmic = _set_scale(axes, "y", task.metric, [each.row.value for each in of.rows])
    for (family, rows), marker in zip(of.families.items(), itertools.cycle(LINE_MARKERS), strict=False):
        shape = {"marker": marker, "markersize": 4.5, "markerfacecolor": "none", "linewidth": 1.1}
        steps, style = (" (adaptive: measured NFE)", "--") if adaptive(family) else ("", "-")
        values = [each.row.nfe_per_token for each in rows], [each.row.value for each in rows]
        colour = rule_colour(family)
        axes.plot(*values, style, color=colour, label=f"{_label(without_defaults(family))}{steps}", **shape)
        if known := [(each.row.nfe_per_token, *each.interval) for each in rows if each.interval is not None]:
            axes.vlines(*zip(*known, strict=True), color=colour, linewidth=1, alpha=0.5, zorder=1)
    axes.set_xlim(min([1.0, *(each.row.nfe_per_token for each in of.rows)]) * 0.9, 1.12)
    axes.grid(axis="both", color="#e5e5e5", linewidth=0.8)
    for row, style in ((of.elbo, (0, (5, 3))), (of.ar, ":")):
        if row is not None and math.isfinite(row.value):
            kind = "autoregressive model" if row is of.ar else _kind(row)
            if row.stderr is not None:
                axes.axhspan(*_whisker(row), color=GREY, alpha=0.12, linewidth=0, zorder=0)
            text = f"{kind}, {value(row).removeprefix('≤ ')}"
            axes.axhline(row.value, color=GREY, linestyle=style, linewidth=1.3, zorder=1, label=text)
    if of.oracle is not None:
        text = f"oracle, {value(of.oracle)} ({Kind.NOT_A_LIKELIHOOD.value})"
        axes.plot([1.0], [of.oracle.value], "x", color=LIGHT, markeredgewidth=2, label=text)
    axes.set_xlabel("NFE per token (network evaluations of the rule; log2)")
    axes.set_ylabel(f"DUEL, {WORDS[task.metric]}{' (log)' if logarithmic else ''}")
    axes.set_title(_title(f"{name}: {of.title}", width), loc="left", fontsize=11)
    _add_legend(figure, 2 if width >= RULES_WIDTH else 1)
    return figure
