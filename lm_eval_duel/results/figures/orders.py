"""The figure of a trace: when positions of a block are revealed, and negative log-likelihoods."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lm_eval_duel.results.figures.style import DARK, bare, label, new, rule_colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANEL, HEIGHT = 3.9, 3.6  # inches
NARROW = 2.6  # inches below which panels stand below each other


def orders(trace: Mapping[str, Any], width: float | None = None) -> Figure:
    """When each position of a block was revealed, and negative log-likelihood by position and by step."""
    colour = rule_colour(trace["rule"]) if trace["rule"] and trace["estimator"] == "duel" else DARK
    by_position, by_step = ("by_position", "target position in the window"), ("by_step", "step in the block")
    panels = [("nll by position", lambda axes: _curve(axes, trace[by_position[0]], by_position[1], colour))]
    if trace["reveals"] and trace["steps"] > 1:  # one step has no order
        panels = [
            ("order within a block", lambda axes: _heat(axes, figure, trace["reveals"])),
            *panels,
            ("nll by step", lambda axes: _curve(axes, trace[by_step[0]], by_step[1], colour)),
        ]
    width = width or 0.9 + PANEL * len(panels)
    columns = len(panels) if width >= NARROW * len(panels) else 1
    rows = len(panels) // columns
    figure, every = new(width, min(HEIGHT, width / columns) * rows, rows, columns)
    for (title, paint), panel in zip(panels, every, strict=True):
        paint(panel)
        panel.set_title(title, loc="left", fontsize=10)
    flag = f"; oracle: {trace['flag']}" if trace["flag"] else ""
    order = "" if trace["ordered"] else "; no order"
    title = f"{trace['label']}: {trace['windows']:,} windows, {trace['tokens']:,} tokens{order}{flag}"
    figure.suptitle(textwrap.fill(label(title), int(11 * width) + 10), x=0.01, ha="left", fontsize=10.5)
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


def _curve(axes: Axes, curve: Mapping[str, Any], position: str, colour: str) -> None:
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
    axes.plot(*zip(*known, strict=True), color=colour, marker="o", markersize=3, linewidth=1.2)
    axes.set_ylim(0, 1.08 * max(mean for _, mean in known))
    axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, nbins=8))
    axes.set_xlabel(f"{position}{f' ({width} per point)' if width > 1 else ''}")
    axes.set_ylabel("mean nll per token (nats)")
    bare(axes)
