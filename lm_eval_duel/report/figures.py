"""Figures as PNG: perplexities with intervals, rules against NFE, reveal orders of a trace. Needs matplotlib."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_eval_duel.estimators import registry
from lm_eval_duel.report.headline import WORDS, number, plus_minus
from lm_eval_duel.report.names import free, safe_name
from lm_eval_duel.report.rows import SEES_TRUTH
from lm_eval_duel.report.stats import CLEAR
from lm_eval_duel.rules.tables import short
from lm_eval_duel.tables import one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MISSING = "No figures: matplotlib is not installed (pip install 'lm-eval-duel[plots]')."
GREY, LIGHT = "#555555", "#bbbbbb"
COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
)  # Okabe and Ito, colour-blind safe
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LOOKS = {  # estimator: marker, colour, filled
    "ar": ("D", GREY, True),
    "elbo": ("<", "#0072B2", False),
    "elbo_eps": ("<", "#CC79A7", False),
    "elbo_exact": ("<", "#56B4E9", False),
    "mixture": ("s", "#009E73", True),
    "duel": ("o", "#D55E00", True),
    "two_phase": ("o", "#D55E00", False),
    "oracle": ("x", LIGHT, True),
}
OTHER_LOOKS = {  # of any other estimator
    registry.Kind.LIKELIHOOD: ("P", "#E69F00", True),
    registry.Kind.ESTIMATE: ("P", "#E69F00", False),
    registry.Kind.UPPER_BOUND: ("<", "#E69F00", False),
    registry.Kind.NOT_A_LIKELIHOOD: ("x", LIGHT, True),
}
EPS = "elbo_eps"  # looks of an ELBO that is not a bound
AR = " (dotted line: the autoregressive baseline)"
LOG_FROM = 2.5  # an axis is logarithmic if the largest perplexity is more than this times the smallest
DPI = 110
PALETTE = 96  # colours per file


def available() -> bool:
    """Whether figures can be drawn."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return False
    return True


def draw(report: Mapping[str, Any], folder: Path) -> list[dict[str, str]]:
    """Write every figure of a report. Returns the file, subject, kind and title of each."""
    drawn: list[dict[str, str]] = []

    def save(figure: Figure, stem: str, about: str, title: str) -> None:
        name = free(stem, ".png", [entry["file"] for entry in drawn])
        save_png(figure, folder / name)
        drawn.append({"file": name, "about": about, "kind": stem.split("_")[0], "title": title})

    for name, task in report["tasks"].items():
        safe = safe_name(name)
        save(perplexity(name, task), f"perplexity_{safe}", name, f"perplexities on {name}")
        for count, sweep in enumerate(task["rules"], 1):
            end = "" if len(task["rules"]) == 1 else f"_{count}"
            save(rules(name, task, sweep), f"rules_{safe}{end}", name, f"rules against NFE on {name}, {sweep['model']}")
    for count, trace in enumerate(report["traces"], 1):
        if trace["tokens"]:
            save(orders(trace), f"trace_{count}", "traces", f"reveal order of {trace['label']}")
    return drawn


def save_png(figure: Figure, file: Path) -> None:
    """Write a figure as a small PNG file."""
    from PIL import Image  # matplotlib needs it too

    drawing = io.BytesIO()
    figure.savefig(drawing, format="png", dpi=DPI, bbox_inches="tight", facecolor="white")
    with Image.open(drawing) as image:
        small = image.convert("RGB").quantize(PALETTE, Image.Quantize.MAXCOVERAGE)
        small.save(file, optimize=True)


def _figure(width: float, height: float, **columns: Any) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(1, **columns)


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


def label(text: str) -> str:
    """Escape text for matplotlib, which would read a pair of $ as a formula."""
    return one_line(text).replace("$", r"\$")


def bare(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)


# ---------------------------------------------------------------- perplexities


def perplexity(name: str, task: Mapping[str, Any]) -> Figure:
    """One line per row, with its value and interval; the AR baseline as a dotted line."""
    entries, metric = task["rows"], task["metric"]
    figure, axes = _figure(7.5, 1.3 + 0.25 * (len(entries) + len({e["model"] for e in entries})))
    at, ticks, last = 0, [], None
    right = 1.11 if not any(_error(entry, metric) for entry in entries) else 1.2
    seen: dict[str, Any] = {}
    for entry in entries:
        if entry["model"] != last:
            at -= 1 if last is None else 1.4
            last = entry["model"]
            axes.text(
                0.0, at, f"{label(last)} ", transform=axes.get_yaxis_transform(), ha="right", va="center", weight="bold"
            )
        at -= 1
        ticks.append((at, _line_label(entry)))
        marker, colour, filled = _look(entry)
        if entry["interval"] is not None:
            axes.plot(entry["interval"], [at, at], "|-", color=colour, linewidth=1.4, markersize=7, zorder=2)
        if entry["stderr"] is not None:
            axes.plot(_whisker(entry), [at, at], "-", color=colour, linewidth=4, alpha=0.35, zorder=2)
        drawn = axes.plot(
            entry["value"],
            at,
            marker=marker,
            color=colour,
            markerfacecolor=colour if filled else "white",
            markersize=5,
            markeredgewidth=1.4,
            linestyle="none",
            zorder=3,
        )
        seen.setdefault(_kind(entry), drawn[0])
        value = f"{'≤ ' if entry['bound'] else ''}{number(entry['value'], metric)}{_error(entry, metric)}"
        weight = "bold" if entry["best"] else "normal"
        axes.text(
            right, at, value, transform=axes.get_yaxis_transform(), ha="right", va="center", fontsize=8.5, weight=weight
        )
        if entry["ar"]:
            axes.axvline(entry["value"], color=GREY, linestyle=":", linewidth=1.2, zorder=1)
    axes.set_yticks([place for place, _ in ticks], [text for _, text in ticks], fontsize=8.5)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(at - 0.7, -0.4)
    marked = any(entry["ar"] for entry in entries)
    if metric != "bits_per_byte" and _wide([entry["value"] for entry in entries]):
        axes.set_xscale("log")
        plain_log(axes.xaxis)
    scale = "log scale; " if axes.get_xscale() == "log" else ""
    axes.set_xlabel(f"{WORDS[metric]} ({scale}lower is better)")
    axes.grid(axis="x", color="#e5e5e5", linewidth=0.8)
    axes.set_axisbelow(True)
    bare(axes)
    between = ", with 95 % bootstrap intervals over documents" if any(e["interval"] for e in entries) else ""
    between += "; wide bars: two Monte Carlo standard errors" if any(e["stderr"] is not None for e in entries) else ""
    title = textwrap.fill(f"{label(name)}: {WORDS[metric]}{between}", 110)
    figure.suptitle(title, x=0.01, ha="left", fontsize=10.5)
    figure.legend(
        seen.values(),
        [legend(name) + (AR if name == "ar" and marked else "") for name in seen],
        loc="outside lower center",
        ncols=2,
        frameon=False,
        fontsize=8.5,
    )
    return figure


def _whisker(entry: Mapping[str, Any]) -> list[float]:
    """Two Monte Carlo standard errors to either side."""
    low = entry["value"] - CLEAR * entry["stderr"]
    return [max(low, entry["value"] / 10), entry["value"] + CLEAR * entry["stderr"]]  # above 0, for a log scale


def _error(entry: Mapping[str, Any], metric: str) -> str:
    error = " +- ?" if entry["stderr_reason"] else plus_minus(entry["stderr"], metric)
    return error.replace("+-", "±")


def _wide(values: Sequence[float]) -> bool:
    """Whether values need a logarithmic axis (never with infinite ones)."""
    known = [value for value in values if 0 < value < math.inf]
    return len(known) == len(values) > 0 and max(known) / min(known) > LOG_FROM


def _kind(entry: Mapping[str, Any]) -> str:
    return EPS if entry["eps"] else entry["estimator"]


def _look(entry: Mapping[str, Any]) -> tuple[str, str, bool]:
    return LOOKS.get(_kind(entry)) or OTHER_LOOKS[registry.find(entry["estimator"]).kind]


def legend(name: str) -> str:
    if name == EPS:
        return "ELBO, eps > 0 (no bound)"
    estimator = registry.find(name)
    return f"{estimator.title}{' (upper bound)' if estimator.kind is registry.Kind.UPPER_BOUND else ''}"


def _line_label(entry: Mapping[str, Any]) -> str:
    if not entry["likelihood"]:
        return registry.find(entry["estimator"]).title
    return label(entry["name"].removeprefix("DUEL, ")) + (" (AR baseline)" if entry["ar"] else "")


# ---------------------------------------------------------------- rules against NFE


def rules(name: str, task: Mapping[str, Any], sweep: Mapping[str, Any]) -> Figure:
    """Perplexity (log) against NFE per token (log2), one line per rule family; ELBO and AR as grey lines."""
    entries = task["rows"]
    figure, axes = _figure(6.8, 4.6)
    lowest = 1.0
    for count, family in enumerate(sweep["families"]):
        points = [entries[point["index"]] for point in family["points"]]
        nfe = [point["nfe_per_token"] for point in points]
        lowest = min(lowest, *nfe)
        colour, marker = COLOURS[count % len(COLOURS)], MARKERS[count % len(MARKERS)]
        said = f"{label(short(family['family']))}{' (adaptive: measured NFE)' if family['adaptive'] else ''}"
        style, look = ("--" if family["adaptive"] else "-"), {"markersize": 4.5, "markerfacecolor": "none"}
        axes.plot(
            nfe, [p["value"] for p in points], style, color=colour, marker=marker, linewidth=1.1, label=said, **look
        )
        for x, point in zip(nfe, points, strict=True):
            if point["interval"] is not None:
                axes.plot([x, x], point["interval"], color=colour, linewidth=1, alpha=0.5, zorder=1)
    for key, style in (("elbo", (0, (5, 3))), ("ar", ":")):
        if sweep[key] is not None:
            entry = entries[sweep[key]]
            said = "autoregressive model" if key == "ar" else legend(_kind(entry))
            text = f"{said}, {number(entry['value'], task['metric'])}{_error(entry, task['metric'])}"
            if not math.isfinite(entry["value"]):
                continue
            if entry["stderr"] is not None:
                axes.axhspan(*_whisker(entry), color=GREY, alpha=0.12, linewidth=0, zorder=0)
            axes.axhline(entry["value"], color=GREY, linestyle=style, linewidth=1.3, zorder=1, label=text)
    if sweep["oracle"] is not None:
        value = entries[sweep["oracle"]]["value"]
        text = f"oracle, {number(value, task['metric'])} ({SEES_TRUTH})"
        axes.plot([1.0], [value], "x", color=LIGHT, markeredgewidth=2, label=text)
    axes.set_xscale("log", base=2)
    values = [entries[point["index"]]["value"] for family in sweep["families"] for point in family["points"]]
    if task["metric"] != "bits_per_byte" and _wide(values):
        axes.set_yscale("log")
        plain_log(axes.yaxis)
    axes.set_xlim(lowest * 0.9, 1.12)
    plain_log(axes.xaxis, 2)
    axes.set_xlabel("NFE per token (network evaluations of the rule; log2)")
    scale = " (log)" if axes.get_yscale() == "log" else ""
    axes.set_ylabel(f"DUEL, {WORDS[task['metric']]}{scale}")
    axes.grid(color="#e5e5e5", linewidth=0.8)
    bare(axes)
    subject = ", ".join(filter(None, [sweep["model"], f"block {sweep['block']}", sweep["variant"]]))
    axes.set_title(label(f"{name}: {subject}"), loc="left", fontsize=11)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8.5)
    return figure


# ---------------------------------------------------------------- reveal orders


def orders(trace: Mapping[str, Any]) -> Figure:
    """When each position of a block was revealed, and negative log-likelihood by position and by step."""
    panels = [("nll by position", lambda axes: _curve(axes, trace["by_position"], "target position in the window"))]
    if trace["reveals"] and trace["steps"] > 1:  # one step has no order
        panels = [
            ("order within a block", lambda axes: _heat(axes, figure, trace["reveals"])),
            *panels,
            ("nll by step", lambda axes: _curve(axes, trace["by_step"], "step in the block")),
        ]
    figure, axes = _figure(0.9 + 3.9 * len(panels), 3.6, ncols=len(panels), squeeze=False)
    for (title, paint), panel in zip(panels, axes[0], strict=True):
        paint(panel)
        panel.set_title(title, loc="left", fontsize=10)
    flag = f"; oracle: {trace['flag']}" if trace["flag"] else ""
    order = "" if trace["ordered"] else "; no order"
    title = f"{trace['label']}: {trace['windows']:,} windows, {trace['tokens']:,} tokens{order}{flag}"
    figure.suptitle(textwrap.fill(label(title), 40 * len(panels) + 20), x=0.01, ha="left", fontsize=10.5)
    return figure


def _heat(axes: Axes, figure: Figure, reveals: Mapping[str, Any]) -> None:
    import numpy as np
    from matplotlib import ticker

    counts = np.array(reveals["counts"], dtype=float)  # (positions, steps)
    share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    width = reveals["width"]
    edges = [-0.5, counts.shape[0] * width - 0.5, -0.5, counts.shape[1] * width - 0.5]
    image = axes.imshow(
        100 * share.T, origin="lower", aspect="auto", extent=edges, cmap="cividis", interpolation="nearest", vmin=0
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(ticker.MaxNLocator(integer=True, nbins=8))
    axes.set_xlabel("target position in the block")
    axes.set_ylabel("step in the block")
    figure.colorbar(image, ax=axes, label="% of the tokens at this position")


def _curve(axes: Axes, curve: Mapping[str, Any], position: str) -> None:
    """Mean negative log-likelihood; grey bars show the number of tokens behind each mean."""
    from matplotlib import ticker

    width = curve["width"]
    at = [n * width + (width - 1) / 2 for n in range(len(curve["tokens"]))]
    count = axes.twinx()
    count.bar(at, curve["tokens"], width=width, color="#e9e9e9", zorder=0)
    most = max(curve["tokens"])
    count.set_ylim(0, 5 * most)
    count.set_axis_off()
    axes.set_title(f"grey bars: tokens, at most {most:,}", loc="right", fontsize=8, color="#777777")
    axes.set_zorder(count.get_zorder() + 1)
    axes.patch.set_visible(False)
    known = [(x, y) for x, y in zip(at, curve["mean_nll"], strict=True) if y is not None]
    axes.plot(*zip(*known, strict=True), color=COLOURS[0], marker="o", markersize=3, linewidth=1.2)
    axes.set_ylim(0, 1.08 * max(mean for _, mean in known))
    axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, nbins=8))
    axes.set_xlabel(f"{position}{f' ({width} per point)' if width > 1 else ''}")
    axes.set_ylabel("mean nll per token (nats)")
    bare(axes)
