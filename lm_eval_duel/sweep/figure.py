"""The sweep as panels over NFE per token: perplexity, judge, entropy, MAUVE or distinct 2-grams. Needs matplotlib."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from lm_eval_duel.results.figures.style import GREY, LOG_FROM, MARKERS, bare, label, new, plain_log, rule_colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Setting = Mapping[str, Any]
Point = tuple[float | None, float | None]  # a value and its standard error
Read = Callable[[Setting], Point]
WIDTH, HEIGHT = 5.0, 3.6  # inches of a panel
NARROW = 2.6  # inches below which panels stand below each other
INTERVAL = 1.96  # standard errors
FLOOR = 0.05  # bars end above 0, for a log scale
LEFT_MARGIN = 0.9  # the axis starts at this fraction of the lowest NFE


def draw(report: Mapping[str, Any], width: float | None = None) -> Figure:
    """The figure, one line per rule with error bars; panels about samples only if there are samples."""
    panels = _panels(report)
    columns = 1 if width is not None and width < 2 * NARROW else min(2, len(panels))
    rows = -(-len(panels) // columns)
    width = width or WIDTH * columns
    figure, axes = new(width, (min(HEIGHT, 0.85 * width / columns)) * rows + 0.6, rows, columns)
    for (title, source, read, lines), panel in zip(panels, axes, strict=False):
        _panel(panel, report["settings"], source, read, lines)
        if title.startswith("MAUVE"):
            panel.set_ylim(bottom=0)
        panel.set_title(title, loc="left", fontsize=10)
    legend: dict[str, Any] = {}
    for panel in axes:
        for line, text in zip(*panel.get_legend_handles_labels(), strict=True):
            legend.setdefault(text, line)
    across = max(1, int(width / WIDTH * 1.5))
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=across, frameon=False, fontsize=8.5)
    title = f"{report['task']['name']}: {report['model']}, block {report['block'] or 'none'}; bars: 95 % intervals"
    figure.suptitle(textwrap.fill(label(title), int(11 * width)), x=0.01, ha="left", fontsize=11)
    return figure


def _panels(report: Mapping[str, Any]) -> list[tuple[str, str, Read, dict[str, tuple[float, Any]]]]:
    """Each panel as (title, `text` or `samples`, how to read its value from a setting, horizontal lines)."""
    bound, reference = report["elbo"], report["reference"]
    dashed = _bound(bound) if bound else {}
    panels = [("DUEL perplexity of the text (lower is better)", "text", lambda s: _with_error(s["text"]), dashed)]
    if not reference:
        return panels

    def own(value: float | None) -> dict[str, tuple[float, Any]]:
        return {} if value is None else {"the task's own text": (value, ":")}

    if report["scorer"]:
        panels.append(
            (
                label(f"generative perplexity of samples, {report['scorer']}"),
                "samples",
                lambda s: _with_error(s["samples"]["generative"]),
                own(reference["generative"]["perplexity"]),
            )
        )
    else:
        panels.append(
            (
                "own nll per token of samples (nats)",
                "samples",
                lambda s: (s["samples"]["own_nll_per_token"], s["samples"]["own_stderr"]),
                {},
            )
        )
    across = own(reference["entropy"])
    panels.append(
        (
            "entropy of samples (nats)",
            "samples",
            lambda s: (s["samples"]["entropy"], s["samples"].get("entropy_stderr")),
            across,
        )
    )
    if any(setting["samples"]["mauve"] is not None for setting in report["settings"]):
        panels.append(("MAUVE of samples (higher is better)", "samples", lambda s: (s["samples"]["mauve"], None), {}))
    else:
        title, across = "distinct 2-grams of samples (share)", own(reference["distinct_2"])
        panels.append((title, "samples", lambda s: (s["samples"]["distinct_2"], None), across))
    return panels


def _with_error(judged: Mapping[str, Any]) -> Point:
    """A perplexity and its standard error."""
    error = judged["stderr"]
    return judged["perplexity"], None if error is None else judged["perplexity"] * error


def _bound(bound: Mapping[str, Any]) -> dict[str, tuple[float, Any]]:
    """The ELBO's line, with its Monte Carlo error in its label."""
    value, error = _with_error(bound)
    shown = "?" if error is None else f"{error:.2f}"
    return {f"ELBO, ≤ {value:.2f} ± {shown} (Monte Carlo)": (value, (0, (5, 3)))}


def _panel(
    axes: Axes, settings: list[Setting], source: str, read: Read, across: Mapping[str, tuple[float, Any]]
) -> None:
    families = list(dict.fromkeys(setting["family"] for setting in settings))
    shown, lowest = [value for value, _ in across.values()], 1.0
    for n, family in enumerate(families):
        members = [setting for setting in settings if setting["family"] == family and read(setting)[0] is not None]
        points = sorted((setting[source]["nfe_per_token"], *read(setting)) for setting in members)
        if not points:
            continue
        adaptive = members[0]["k"] is None
        name = label(f"{family}{' (adaptive: measured NFE)' if adaptive else ''}")
        colour = rule_colour(family)
        axes.plot(
            [x for x, _, _ in points],
            [value for _, value, _ in points],
            "--" if adaptive else "-",
            color=colour,
            marker=MARKERS[n % len(MARKERS)],
            linewidth=1.1,
            markersize=4.5,
            markerfacecolor="none",
            label=name,
        )
        known = [point for point in points if point[2] is not None]
        if known:
            x, value, error = zip(*known, strict=True)
            low = [min(INTERVAL * e, (1 - FLOOR) * v) for v, e in zip(value, error, strict=True)]
            bars = [low, [INTERVAL * e for e in error]]
            axes.errorbar(x, value, bars, fmt="none", ecolor=colour, elinewidth=1, capsize=2.5, alpha=0.6, zorder=1)
        shown += [value for _, value, _ in points]
        lowest = min(lowest, points[0][0])
    for name, (value, style) in across.items():
        axes.axhline(value, color=GREY, linestyle=style, linewidth=1.3, zorder=1, label=name)
    axes.set_xscale("log", base=2)
    if shown and min(shown) > 0 and max(shown) / min(shown) > LOG_FROM:
        axes.set_yscale("log")
        plain_log(axes.yaxis)
    axes.set_xlim(lowest * LEFT_MARGIN, 1.12)
    plain_log(axes.xaxis, 2)
    axes.set_xlabel("NFE per token (log2)", fontsize=9)
    axes.tick_params(labelsize=8.5)
    axes.grid(color="#e5e5e5", linewidth=0.8)
    axes.set_axisbelow(True)
    bare(axes)
