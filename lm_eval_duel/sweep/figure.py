"""The sweep as panels over NFE per token: perplexity, judge, entropy, MAUVE or distinct 2-grams. Needs matplotlib."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from lm_eval_duel.results.figures.style import GREY, against_nfe, curve, label, new, wide

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Json = Mapping[str, Any]
Read = Callable[[Json], tuple[float | None, float | None]]  # a value and its standard error
Lines = dict[str, tuple[float, Any]]  # label -> height and style
WIDTH, HEIGHT = 5.0, 3.6  # inches of a panel
NARROW = 2.6  # inches below which panels stand below each other
INTERVAL = 1.96  # standard errors
FLOOR = 0.05  # bars end above 0, for a log scale


def draw(report: Json, width: float | None = None) -> Figure:
    """The figure, one line per rule with error bars; panels about samples only if there are samples."""
    panels = _panels(report)
    columns = 1 if width is not None and width < 2 * NARROW else min(2, len(panels))
    rows = -(-len(panels) // columns)
    width = width or WIDTH * columns
    figure, every = new(width, (min(HEIGHT, 0.85 * width / columns)) * rows + 0.6, rows, columns)
    legend: dict[str, Any] = {}
    for (title, source, read, across), axes in zip(panels, every, strict=False):
        shown, lowest = [value for value, _ in across.values()], 1.0
        families = dict.fromkeys(setting["family"] for setting in report["settings"])
        for n, family in enumerate(families):
            members = [s for s in report["settings"] if s["family"] == family and read(s[source])[0] is not None]
            points = sorted((s[source]["nfe_per_token"], *_with_bar(*read(s[source]))) for s in members)
            if points:
                curve(axes, n, family, members[0]["k"] is None, points)
                shown += [value for _, value, _ in points]
                lowest = min(lowest, points[0][0])
        for name, (value, style) in across.items():
            axes.axhline(value, color=GREY, linestyle=style, linewidth=1.3, zorder=1, label=name)
        against_nfe(axes, lowest, wide(shown))
        axes.set_xlabel("NFE per token (log2)", fontsize=9)
        axes.tick_params(labelsize=8.5)
        if title.startswith("MAUVE"):
            axes.set_ylim(bottom=0)
        axes.set_title(title, loc="left", fontsize=10)
        for line, text in zip(*axes.get_legend_handles_labels(), strict=True):
            legend.setdefault(text, line)
    across = max(1, int(width / WIDTH * 1.5))
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=across, frameon=False, fontsize=8.5)
    title = f"{report['task']['name']}: {report['model']}, block {report['block'] or 'none'}; bars: 95 % intervals"
    figure.suptitle(textwrap.fill(label(title), int(11 * width)), x=0.01, ha="left", fontsize=11)
    return figure


def _with_bar(value: float, error: float | None) -> tuple[float, list[float] | None]:
    bar = None if error is None else [value - min(INTERVAL * error, (1 - FLOOR) * value), value + INTERVAL * error]
    return value, bar


def _panels(report: Json) -> list[tuple[str, str, Read, Lines]]:
    """Each panel as (title, `text` or `samples`, how to read its value from these, horizontal lines)."""
    bound, reference = report["elbo"], report["reference"]
    dashed: Lines = {}
    if bound:
        value, error = _with_error(bound)
        shown = "?" if error is None else f"{error:.2f}"
        dashed = {f"ELBO, ≤ {value:.2f} ± {shown} (Monte Carlo)": (value, (0, (5, 3)))}
    panels: list[tuple[str, str, Read, Lines]] = [
        ("DUEL perplexity of the text (lower is better)", "text", _with_error, dashed)
    ]
    if not reference:
        return panels

    def add(title: str, read: Read, own: float | None) -> None:
        panels.append((title, "samples", read, {} if own is None else {"the task's own text": (own, ":")}))

    if report["scorer"]:
        title = label(f"generative perplexity of samples, {report['scorer']}")
        add(title, lambda s: _with_error(s["generative"]), reference["generative"]["perplexity"])
    else:
        add("own nll per token of samples (nats)", lambda s: (s["own_nll_per_token"], s["own_stderr"]), None)
    add("entropy of samples (nats)", lambda s: (s["entropy"], s.get("entropy_stderr")), reference["entropy"])
    if any(setting["samples"]["mauve"] is not None for setting in report["settings"]):
        add("MAUVE of samples (higher is better)", lambda s: (s["mauve"], None), None)
    else:
        add("distinct 2-grams of samples (share)", lambda s: (s["distinct_2"], None), reference["distinct_2"])
    return panels


def _with_error(judged: Json) -> tuple[float, float | None]:
    """A perplexity and its standard error."""
    error = judged["stderr"]
    return judged["perplexity"], None if error is None else judged["perplexity"] * error
