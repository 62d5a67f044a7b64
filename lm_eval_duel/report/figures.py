"""Figures as PNG: perplexities with their intervals, rules against NFE, orders of a trace. Needs matplotlib."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_eval_duel.report.latex import safe_name
from lm_eval_duel.report.rows import SEES_TRUTH
from lm_eval_duel.report.tables import WORDS

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
    "exact": ("D", GREY, True),
    "elbo": ("<", "#0072B2", False),
    "elbo_exact": ("<", "#56B4E9", False),
    "mixture": ("s", "#009E73", True),
    "duel": ("o", "#D55E00", True),
    "oracle": ("x", LIGHT, True),
}
LEGEND = {
    "exact": "exact",
    "elbo": "ELBO (upper bound)",
    "elbo_exact": "ELBO over all orders (upper bound)",
    "mixture": "mixture of orders",
    "duel": "DUEL",
    "oracle": f"oracle ({SEES_TRUTH})",
}
AR = " (dotted line: the autoregressive baseline)"
LOG_FROM = 2.5  # largest over smallest perplexity, from which an axis is logarithmic
DPI = 150


def available() -> bool:
    """Whether figures can be drawn."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return False
    return True


def draw(report: Mapping[str, Any], folder: Path) -> list[dict[str, str]]:
    """Write every figure of a report; what was drawn, about which task, in which file."""
    drawn = []

    def save(figure: Figure, name: str, about: str, what: str) -> None:
        figure.savefig(folder / f"{name}.png", dpi=DPI, bbox_inches="tight", facecolor="white")
        drawn.append({"file": f"{name}.png", "about": about, "what": what})

    for name, task in report["tasks"].items():
        safe = safe_name(name)
        save(perplexity(name, task), f"perplexity_{safe}", name, f"perplexities on {name}")
        for number, sweep in enumerate(task["rules"], 1):
            end = "" if len(task["rules"]) == 1 else f"_{number}"
            save(rules(name, task, sweep), f"rules_{safe}{end}", name, f"rules against NFE on {name}, {sweep['model']}")
    for number, trace in enumerate(report["traces"], 1):
        save(orders(trace), f"trace_{number}", "traces", f"orders of {trace['label']}")
    return drawn


def _figure(width: float, height: float, **columns: Any) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(1, **columns)


def _plain_log(axis: Any, base: int = 10) -> None:
    """A logarithmic axis labelled with plain numbers."""
    from matplotlib import ticker

    axis.set_major_locator(ticker.LogLocator(base=base, subs=(1.0,) if base == 2 else (1.0, 2.0, 5.0), numticks=12))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(ticker.NullFormatter())
    if base == 2:
        axis.set_minor_locator(ticker.NullLocator())


def _bare(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)


# ---------------------------------------------------------------- perplexities


def perplexity(name: str, task: Mapping[str, Any]) -> Figure:
    """A line for each row: its value, and its interval where there is one; the AR model as a grey line."""
    entries = task["rows"]
    figure, axes = _figure(7.5, 1.3 + 0.27 * (len(entries) + len({e["model"] for e in entries})))
    at, ticks, last = 0, [], None
    seen: dict[str, Any] = {}
    for entry in entries:
        if entry["model"] != last:
            at -= 1 if last is None else 1.4
            last = entry["model"]
            axes.text(0.0, at, f"{last} ", transform=axes.get_yaxis_transform(), ha="right", va="center", weight="bold")
        at -= 1
        ticks.append((at, _line_label(entry)))
        marker, colour, filled = LOOKS[entry["estimator"]]
        if entry["interval"] is not None:
            axes.plot(entry["interval"], [at, at], "|-", color=colour, linewidth=1.6, markersize=8, zorder=2)
        drawn = axes.plot(
            entry["value"],
            at,
            marker=marker,
            color=colour,
            markerfacecolor=colour if filled else "white",
            markersize=5.5,
            markeredgewidth=1.5,
            linestyle="none",
            zorder=3,
        )
        seen.setdefault(entry["estimator"], drawn[0])
        if entry["ar"]:
            axes.axvline(entry["value"], color=GREY, linestyle=":", linewidth=1.2, zorder=1)
    axes.set_yticks([place for place, _ in ticks], [text for _, text in ticks], fontsize=8.5)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(at - 0.7, -0.4)
    marked = any(entry["ar"] for entry in entries)
    low, high = min(e["value"] for e in entries), max(e["value"] for e in entries)
    if task["metric"] != "bits_per_byte" and high / low > LOG_FROM:
        axes.set_xscale("log")
        _plain_log(axes.xaxis)
    scale = " (log scale)" if axes.get_xscale() == "log" else ""
    between = ", bars: 95 % bootstrap over documents" if any(e["interval"] for e in entries) else ""
    axes.set_xlabel(f"{WORDS[task['metric']]}{scale}, lower is better{between}")
    axes.grid(axis="x", color="#e5e5e5", linewidth=0.8)
    axes.set_axisbelow(True)
    _bare(axes)
    axes.set_title(name, loc="left", fontsize=11)
    figure.legend(
        seen.values(),
        [LEGEND[e] + (AR if e == "exact" and marked else "") for e in seen],
        loc="outside lower center",
        ncols=2,
        frameon=False,
        fontsize=8.5,
    )
    return figure


def _line_label(entry: Mapping[str, Any]) -> str:
    if entry["estimator"] == "duel":
        return ", ".join(entry["name"].split(", ")[1:])
    return {"oracle": "oracle", "elbo_exact": "ELBO, all orders"}.get(entry["estimator"]) or entry["name"]


# ---------------------------------------------------------------- rules against NFE


def rules(name: str, task: Mapping[str, Any], sweep: Mapping[str, Any]) -> Figure:
    """Perplexity (log) against NFE per token (log2), a line for each rule family; ELBO and AR as grey lines."""
    entries = task["rows"]
    figure, axes = _figure(6.8, 4.4)
    lowest = 1.0
    for number, family in enumerate(sweep["families"]):
        points = [entries[point["index"]] for point in family["points"]]
        nfe = [point["nfe_per_token"] for point in points]
        lowest = min(lowest, *nfe)
        colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
        said = f"{family['family']}{' (adaptive: measured NFE)' if family['adaptive'] else ''}"
        style = "--" if family["adaptive"] else "-"
        axes.plot(nfe, [p["value"] for p in points], style, color=colour, marker=marker, markersize=6, label=said)
        for x, point in zip(nfe, points, strict=True):
            if point["interval"] is not None:
                axes.plot([x, x], point["interval"], color=colour, linewidth=1, alpha=0.5, zorder=1)
    for key, style, said in (("elbo", (0, (5, 3)), "ELBO (upper bound)"), ("ar", ":", "autoregressive model")):
        if sweep[key] is not None:
            value = entries[sweep[key]]["value"]
            axes.axhline(value, color=GREY, linestyle=style, linewidth=1.3, zorder=1, label=f"{said}, {value:.2f}")
    if sweep["oracle"] is not None:
        value = entries[sweep["oracle"]]["value"]
        label = f"oracle, {value:.2f} ({SEES_TRUTH})"
        axes.plot([1.0], [value], "x", color=LIGHT, markeredgewidth=2, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlim(lowest * 0.9, 1.12)
    _plain_log(axes.xaxis, 2)
    _plain_log(axes.yaxis)
    axes.set_xlabel("NFE per token (network evaluations of the rule; log2)")
    axes.set_ylabel(f"DUEL {WORDS[task['metric']]} (log)")
    axes.grid(color="#e5e5e5", linewidth=0.8)
    _bare(axes)
    axes.set_title(f"{name}: {sweep['model']}, block {sweep['block']}", loc="left", fontsize=11)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8.5)
    return figure


# ---------------------------------------------------------------- orders


def orders(trace: Mapping[str, Any]) -> Figure:
    """Three panels: when each position of a block was revealed; nats by position in the window; nats by step."""
    figure, (heat, place, time) = _figure(12.5, 3.9, ncols=3)
    _heat(heat, figure, trace["reveals"])
    _curve(place, trace["by_position"], "target position in the window")
    if trace["by_step"]:
        _curve(time, trace["by_step"], "step in the block")
    else:
        _nothing(time, "no steps: this estimator has no order")
    for axes, title in ((heat, "order within a block"), (place, "nats by position"), (time, "nats by step")):
        axes.set_title(title, loc="left", fontsize=10)
    flag = f"; oracle: {trace['flag']}" if trace["flag"] else ""
    said = f"{trace['label']}: {trace['windows']:,} windows, {trace['tokens']:,} tokens{flag}"
    figure.suptitle(textwrap.fill(said, 120), x=0.01, ha="left", fontsize=11)
    return figure


def _heat(axes: Axes, figure: Figure, reveals: Mapping[str, Any] | None) -> None:
    import numpy as np
    from matplotlib import ticker

    if reveals is None:
        _nothing(axes, "no steps: this estimator has no order")
        return
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


def _curve(axes: Axes, curve: Mapping[str, Any], label: str) -> None:
    """Mean nats, and grey bars for how many tokens each mean has."""
    from matplotlib import ticker

    width = curve["width"]
    at = [n * width + (width - 1) / 2 for n in range(len(curve["tokens"]))]
    if not at:
        _nothing(axes, "no nats per token in this trace")
        return
    count = axes.twinx()
    count.bar(at, curve["tokens"], width=width, color="#e9e9e9", zorder=0)
    most = max(curve["tokens"])
    count.set_ylim(0, 5 * most)
    count.set_axis_off()
    axes.set_title(f"grey bars: tokens, at most {most:,}", loc="right", fontsize=8, color="#777777")
    axes.set_zorder(count.get_zorder() + 1)
    axes.patch.set_visible(False)
    known = [(x, y) for x, y in zip(at, curve["mean_nats"], strict=True) if y is not None]
    axes.plot(*zip(*known, strict=True), color=COLOURS[0], marker="o", markersize=3, linewidth=1.2)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, nbins=8))
    axes.set_xlabel(f"{label}{f' ({width} together)' if width > 1 else ''}")
    axes.set_ylabel("mean nats per token (-log p)")
    _bare(axes)


def _nothing(axes: Axes, why: str) -> None:
    axes.text(0.5, 0.5, why, ha="center", va="center", transform=axes.transAxes, color=GREY)
    axes.set_axis_off()


def names(drawn: Sequence[Mapping[str, str]]) -> list[str]:
    """The files of figures."""
    return [figure["file"] for figure in drawn]
