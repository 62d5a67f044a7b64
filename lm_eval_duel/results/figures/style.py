"""How every figure looks: colours of models and rules, axes, and files of a stated width. Needs matplotlib to draw."""

from __future__ import annotations

import io
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lm_eval_duel.console.tables import one_line
from lm_eval_duel.rules.tables import without_defaults

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GREY, LIGHT, DARK = "#555555", "#bbbbbb", "#222222"
RULES = {  # Okabe and Ito's colours, and Tol's for the others: both colour-blind safe
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
}
OTHER_RULES = ("#33BBEE", "#EE3377", "#CC3311", "#225522", "#BBCC33")  # a user's rule: chosen by its name
MODELS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#882255", "#332288", "#117733", "#661100", "#0077BB", "#AA4499")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LOG_FROM = 2.5  # an axis is logarithmic if the largest value is more than this times the smallest
DPI, PRINT_DPI = 110, 200  # of PNG files; the second at a stated width


def model_colour(model: str) -> str:
    """The colour of a model, which is the same in every figure: chosen by its name."""
    return MODELS[zlib.crc32(model.encode()) % len(MODELS)]


def rule_colour(rule: str) -> str:
    """The colour of a rule, which is the same in every figure and report."""
    name = rule.split(":")[0]
    return RULES.get(name) or OTHER_RULES[zlib.crc32(name.encode()) % len(OTHER_RULES)]


def new(width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure of `width` x `height` inches and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flatten())


def images(figure: Figure, formats: Sequence[str], exact: bool = False) -> dict[str, bytes]:
    """A figure as a file of each format. `exact`: keep its width, else cut empty margins.

    Files do not depend on the time they are written; PDF files embed their fonts as TrueType.
    """
    import matplotlib

    dpi = PRINT_DPI if exact else DPI
    options = {"png": {"dpi": dpi}, "svg": {"metadata": {"Date": None}}, "pdf": {"metadata": {"CreationDate": None}}}
    margins: dict[str, Any] = {} if exact else {"bbox_inches": "tight"}
    written = {}
    for kind in formats:
        out = io.BytesIO()
        with matplotlib.rc_context({"svg.hashsalt": "lm-eval-duel", "pdf.fonttype": 42}):
            figure.savefig(out, format=kind, facecolor="white", **options[kind], **margins)
        written[kind] = out.getvalue()
    return written


def plain_log(axis: Any, base: int = 10) -> None:
    """Label a logarithmic axis with plain numbers."""
    from matplotlib import ticker

    axis.set_major_locator(
        ticker.LogLocator(base=base, subs=(1.0,) if base == 2 else (1.0, 2.0, 3.0, 5.0), numticks=12)
    )
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(ticker.NullFormatter())
    if base == 2:
        axis.set_minor_locator(ticker.NullLocator())


def wide(values: Sequence[float]) -> bool:
    """Whether values need a logarithmic axis (never with infinite ones)."""
    known = [value for value in values if 0 < value < math.inf]
    return len(known) == len(values) > 0 and max(known) / min(known) > LOG_FROM


Point = tuple[float, float, Sequence[float] | None]  # NFE per token, value, interval


def against_nfe(axes: Axes, curves: Mapping[str, tuple[bool, Sequence[Point]]], values: Sequence[float]) -> bool:
    """Values against NFE per token: a line for each rule (adaptive or not, points) with its intervals.

    The axis is logarithmic if `values` need it, which is returned.
    """
    axes.set_xscale("log", base=2)
    if logarithmic := wide(values):
        axes.set_yscale("log")
        plain_log(axes.yaxis)
    for n, (family, (adaptive, points)) in enumerate(curves.items()):
        if not points:
            continue
        shape = {"marker": MARKERS[n % len(MARKERS)], "markersize": 4.5, "markerfacecolor": "none", "linewidth": 1.1}
        name = f"{label(without_defaults(family))}{' (adaptive: measured NFE)' if adaptive else ''}"
        at, shown, _ = zip(*points, strict=True)
        axes.plot(at, shown, "--" if adaptive else "-", color=rule_colour(family), label=name, **shape)
        known = [(x, *ends) for x, _, ends in points if ends is not None]
        if known:
            axes.vlines(*zip(*known, strict=True), color=rule_colour(family), linewidth=1, alpha=0.5, zorder=1)
    lowest = min([1.0, *(x for _, points in curves.values() for x, _, _ in points)])
    axes.set_xlim(lowest * 0.9, 1.12)
    plain_log(axes.xaxis, 2)
    grid(axes, "both")
    return logarithmic


def label(text: str) -> str:
    """Escape text for matplotlib, which would read a pair of $ as a formula."""
    return one_line(text).replace("$", r"\$")


def grid(axes: Axes, axis: str) -> None:
    axes.grid(axis=axis, color="#e5e5e5", linewidth=0.8)
    axes.set_axisbelow(True)
    bare(axes)


def bare(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
