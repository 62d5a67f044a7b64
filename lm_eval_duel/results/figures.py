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
from lm_eval_duel.results.columns import value
from lm_eval_duel.results.compare import ComparedRow, Comparison, Speeds, by_model
from lm_eval_duel.results.files import stems
from lm_eval_duel.results.rows import Row
from lm_eval_duel.results.table import WORDS, escape
from lm_eval_duel.rules import adaptive, without_defaults

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MISSING = "No figures: matplotlib is not installed (pip install 'lm-eval-duel[plots]')."
GREY = "#555555"
LIGHT = "#bbbbbb"
DARK = "#222222"
GRID = "#e5e5e5"
# Okabe and Ito's colours, and Tol's for the others: both colour-blind safe
COLOURS = {
    "left_to_right": "#000000",
    "right_to_left": "#882255",
    "random": "#999933",
    "greedy": "#D55E00",
    "margin": "#009E73",
    "log_margin": "#44AA99",
    "entropy": "#0072B2",
    "threshold": "#CC79A7",
    "klass": "#E69F00",
    "entropy_bound": "#56B4E9",
    "entropy_threshold": "#332288",
    "factor": "#117733",
    "high_or_topk": "#AA4499",
    "hierarchy": "#661100",
    "dinfer_threshold": "#6699CC",
    "quota": "#DDCC77",
    "dream": "#888888",
    "cumulative_quota": "#CCBB44",
    "threshold_until": "#66CCEE",
    "threshold_fixed": "#44BB99",
    "threshold_ref": "#BB5566",
    "threshold_bound": "#004488",
    "cumulative_error": "#7F3C8D",
    "falling_threshold": "#A5AA99",
}
OTHER_RULES = ("#33BBEE", "#EE3377", "#CC3311", "#225522", "#BBCC33")  # a user's rule has one by the hash of its name
MODELS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#882255", "#332288", "#117733", "#661100", "#0077BB", "#AA4499")
LINE_MARKERS = ("o", "s", "^", "D", "v", "P", "X")  # of the lines of rules, in turn
MARKERS = {"ar": "D", "elbo": "<", "elbo_exact": "v", "mixture": "s", "duel": "o", "two_phase": "o"}
TITLES = {"perplexity": "perplexities", "rules": "rules against NFE"}  # of figures, by kind
WIDTH = 7.5  # inches: the figure of values
LINE = 0.25  # inches: a row of it
RULES_WIDTH = 6.8  # inches: the figure of rules
RULES_HEIGHT = 4.6
FONT = 8.5  # points
DIGIT = 0.62  # the width of a digit, in font sizes
CHARACTERS = 12  # of a title in an inch
LOG_FROM = 2.5  # an axis is logarithmic if the largest value is more than this times the smallest
DPI = 110  # of PNG files
PRINT_DPI = 200  # of PNG files with a stated width


@dataclasses.dataclass(frozen=True)
class Image:
    """A figure of a task: its files by name, one for each format."""

    task: str
    kind: str
    title: str
    files: dict[str, bytes]

    def markdown(self, quote: Callable[[str], str]) -> str:
        """A picture; a link if there is a PDF file only."""
        pictures = [file for file in self.files if not file.endswith(".pdf")]
        if pictures:
            return f"![{escape(self.title)}]({quote(pictures[0])})"
        return f"[{escape(self.title)}]({quote(next(iter(self.files)))})"


def available() -> bool:
    """True if figures can be drawn."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(tasks: Mapping[str, Comparison], formats: Sequence[str], width: float | None) -> list[Image]:
    """Every figure of a report, `width` inches wide."""
    subjects = []
    drawn = []
    for name, task in tasks.items():
        subjects.append((name, "perplexity", ""))
        drawn.append(perplexity(name, task, width))
        for speeds in task.rules:
            subjects.append((name, "rules", speeds.title))
            drawn.append(rules(name, task, speeds, width))

    images = []
    for stem, (name, kind, about), figure in zip(stems(subjects), subjects, drawn, strict=True):
        title = f"{TITLES[kind]} on {name}"
        if about:
            title += f": {about}"
        contents = {}
        for form in formats:
            contents[f"{stem}.{form}"] = _file(figure, form, exact=width is not None)
        images.append(Image(name, kind, title, contents))
    return images


def _file(figure: Figure, form: str, exact: bool) -> bytes:
    """A figure as a file. `exact`: keep its width, else cut empty margins. Equal figures give equal bytes."""
    import matplotlib

    size: dict[str, Any] = {"dpi": PRINT_DPI} if exact else {"dpi": DPI, "bbox_inches": "tight"}
    # without the time of writing and with a fixed salt of ids; fonttype 42 embeds the font, so that text stays text
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(form)
    out = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "lm-eval-duel", "pdf.fonttype": 42}):
        figure.savefig(out, format=form, metadata=undated, **size)
    return out.getvalue()


# ---------------------------------------------------------------- how figures look


def model_colour(model: str) -> str:
    return _by_name(model, MODELS)


def rule_colour(rule: str) -> str:
    name = rule.split(":")[0]
    return COLOURS.get(name) or _by_name(name, OTHER_RULES)


def _by_name(name: str, colours: Sequence[str]) -> str:
    """The colour of a name: the same in every figure and report, whatever else is in it."""
    return colours[zlib.crc32(name.encode()) % len(colours)]


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


def _in_legend(row: Row) -> str:
    """An estimator in a legend."""
    if row.eps:
        return "ELBO, eps > 0 (no bound)"
    return f"{row.entry.title} (upper bound)" if row.score.is_bound else row.entry.title


def _marker(row: Row) -> str:
    if row.estimator in MARKERS:
        return MARKERS[row.estimator]
    if not row.score.is_likelihood:
        return "x"
    return ">" if row.score.is_bound or row.is_drawn_bound else "P"


def _neutral_colour(row: Row) -> str:
    """The colour of an estimator in a legend, where it stands for all models."""
    if row.estimator == "ar":
        return GREY
    return DARK if row.score.is_likelihood and not row.eps else LIGHT


# ---------------------------------------------------------------- the values of a task


def perplexity(name: str, task: Comparison, width: float | None = None) -> Figure:
    """One line per row, with its value and interval; the AR baseline as a dotted line. `width`: in inches."""
    width = width or WIDTH
    models = by_model(task.rows)
    figure, axes = _new(width, 1.3 + LINE * (len(task.rows) + len(models)))

    edge = axes.get_yaxis_transform()  # x in shares of the width, y in rows
    values = [value(each.row) for each in task.rows]
    column = FONT * DIGIT * max(map(len, values))  # points: the width of the column of values beside the axes
    at_the_end = {"xytext": (column, 0), "textcoords": "offset points", "ha": "right", "va": "center"}
    height = 0.4
    names: dict[float, str] = {}  # by height
    for model, of_model in models.items():
        height -= 1.4
        axes.text(0.0, height, f"{_label(model)} ", weight="bold", transform=edge, ha="right", va="center")
        for each in of_model:
            height -= 1
            names[height] = _name(each.row)
            _draw_row(axes, each, height)
            weight = "bold" if each.best else "normal"
            place = (1, height)
            axes.annotate(value(each.row), place, xycoords=edge, weight=weight, fontsize=FONT, **at_the_end)

    axes.set_yticks([*names], [*names.values()], fontsize=FONT)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(height - 0.7, -0.4)
    logarithmic = _set_scale(axes, "x", task.metric, [each.row.value for each in task.rows])
    scale = "log scale; " if logarithmic else ""
    axes.set_xlabel(f"{WORDS[task.metric]} ({scale}lower is better)")
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    title = f"{name}: {WORDS[task.metric]}{_bars(task)}"
    figure.suptitle(_title(title, width), x=0.01, ha="left", fontsize=10.5)
    _add_legend(figure, 2 if width >= WIDTH else 1)
    return figure


def _bars(task: Comparison) -> str:
    """A description of the bars of rows, for a title."""
    text = ""
    if any(each.interval for each in task.rows):
        text += ", with 95 % bootstrap intervals over documents"
    if any(each.row.drawn_interval for each in task.rows):
        text += "; wide bars: 95 % intervals of the Monte Carlo error alone"
    return text


def _name(row: Row) -> str:
    if not row.score.is_likelihood:
        return row.entry.title
    name = _label(row.name.removeprefix("DUEL, "))
    in_doubt = "in doubt" if row.run.in_doubt else ""
    remarks = ", ".join(filter(None, [row.baseline_remark, row.unknown_share, in_doubt]))
    return f"{name} ({remarks})" if remarks else name


def _draw_row(axes: Axes, each: ComparedRow, height: float) -> None:
    """A row's interval, Monte Carlo error and value. The legend has each kind once, in grey: colours are of models."""
    row = each.row
    neutral = _neutral_colour(row)
    colour = neutral if row.ar or not row.score.is_likelihood else model_colour(row.model)
    line = [height, height]
    if each.interval is not None:
        axes.plot(each.interval, line, "|-", color=colour, linewidth=1.4, markersize=7, zorder=2)
    if row.drawn_interval is not None:
        axes.plot(row.drawn_interval, line, "-", color=colour, linewidth=4, alpha=0.35, zorder=2)
    shape = {"marker": _marker(row), "markersize": 5, "markeredgewidth": 1.4, "linestyle": "none"}
    filled = row.score.is_exact  # estimates and bounds are hollow
    axes.plot(row.value, height, color=colour, markerfacecolor=colour if filled else "white", zorder=3, **shape)
    label = _in_legend(row)
    if row.ar:
        label += " (dotted line: the autoregressive baseline)"
        axes.axvline(row.value, color=GREY, linestyle=":", linewidth=1.2, zorder=1)
    _, labels = axes.get_legend_handles_labels()
    if label not in labels:
        axes.plot([], [], color=neutral, markerfacecolor=neutral if filled else "white", label=label, **shape)


# ---------------------------------------------------------------- rules against NFE


def rules(name: str, task: Comparison, speeds: Speeds, width: float | None = None) -> Figure:
    """Perplexity against NFE per token (log2), one line per rule family; ELBO and AR as grey lines."""
    width = width or RULES_WIDTH
    height = RULES_HEIGHT * width / RULES_WIDTH
    figure, axes = _new(width, max(0.6 * RULES_HEIGHT, height))
    axes.set_xscale("log", base=2, subs=[])
    axes.xaxis.set_major_formatter("{x:g}")
    logarithmic = _set_scale(axes, "y", task.metric, [each.row.value for each in speeds.rows])
    for (family, members), marker in zip(speeds.families.items(), itertools.cycle(LINE_MARKERS), strict=False):
        _draw_family(axes, family, members, marker)
    fewest = min(each.row.nfe_per_token for each in speeds.rows)
    axes.set_xlim(0.9 * min(1.0, fewest), 1.12)  # one step for each token is the most
    axes.grid(axis="both", color=GRID, linewidth=0.8)
    if speeds.elbo is not None:
        _draw_level(axes, speeds.elbo, _in_legend(speeds.elbo), (0, (5, 3)))
    if speeds.ar is not None:
        _draw_level(axes, speeds.ar, "autoregressive model", ":")
    if speeds.oracle is not None:
        text = f"oracle, {value(speeds.oracle)} ({speeds.oracle.score.label})"
        axes.plot([1.0], [speeds.oracle.value], "x", color=LIGHT, markeredgewidth=2, label=text)
    axes.set_xlabel("NFE per token (network evaluations of the rule; log2)")
    scale = " (log)" if logarithmic else ""
    axes.set_ylabel(f"DUEL, {WORDS[task.metric]}{scale}")
    axes.set_title(_title(f"{name}: {speeds.title}", width), loc="left", fontsize=11)
    _add_legend(figure, 2 if width >= RULES_WIDTH else 1)
    return figure


def _draw_family(axes: Axes, family: str, members: Sequence[ComparedRow], marker: str) -> None:
    """One rule at several speeds, with the intervals of its values."""
    colour = rule_colour(family)
    label = _label(without_defaults(family))
    style = "-"
    if adaptive(family):
        label += " (adaptive: measured NFE)"
        style = "--"
    nfe = [each.row.nfe_per_token for each in members]
    values = [each.row.value for each in members]
    shape = {"marker": marker, "markersize": 4.5, "markerfacecolor": "none", "linewidth": 1.1}
    axes.plot(nfe, values, style, color=colour, label=label, **shape)
    for each in members:
        if each.interval is not None:
            axes.vlines(each.row.nfe_per_token, *each.interval, color=colour, linewidth=1, alpha=0.5, zorder=1)


def _draw_level(axes: Axes, row: Row, label: str, style: Any) -> None:
    """The value of a row that has no NFE, as a line across the figure."""
    if not math.isfinite(row.value):
        return
    if row.drawn_interval is not None:
        axes.axhspan(*row.drawn_interval, color=GREY, alpha=0.12, linewidth=0, zorder=0)
    text = f"{label}, {value(row).removeprefix('≤ ')}"
    axes.axhline(row.value, color=GREY, linestyle=style, linewidth=1.3, zorder=1, label=text)
