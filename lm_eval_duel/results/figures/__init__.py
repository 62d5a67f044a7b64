"""Figures as PNG, SVG or PDF: perplexities with intervals, rules against NFE, reveal orders. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_eval_duel.results.figures.orders import orders
from lm_eval_duel.results.figures.speed import rules
from lm_eval_duel.results.figures.style import images
from lm_eval_duel.results.figures.values import legend, perplexity
from lm_eval_duel.results.report_files import free, safe_name, subject

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["MISSING", "available", "draw", "legend", "orders", "perplexity", "rules"]

MISSING = "No figures: matplotlib is not installed (pip install 'lm-eval-duel[plots]')."


def available() -> bool:
    """Whether figures can be drawn."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return False
    return True


def draw(
    report: Mapping[str, Any], formats: Sequence[str] = ("png",), width: float | None = None
) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """Every figure of a report, `width` inches wide: the files, subject, kind and title of each, and all files by name.

    `file` is the one that Markdown can show, if there is one.
    """
    drawn: list[dict[str, Any]] = []
    contents: dict[str, bytes] = {}

    def add(figure: Figure, kind: str, stem: str, about: str, title: str) -> None:
        stem = free(stem, "", [Path(entry["file"]).stem for entry in drawn])
        written = images(figure, formats, exact=width is not None)
        files = [f"{stem}.{suffix}" for suffix in written]
        contents.update(zip(files, written.values(), strict=True))
        shown = next((file for file in files if not file.endswith(".pdf")), files[0])
        drawn.append({"file": shown, "files": files, "about": about, "kind": kind, "title": title})

    for name, task in report["tasks"].items():
        safe = safe_name(name)
        add(perplexity(name, task, width), "perplexity", f"perplexity_{safe}", name, f"perplexities on {name}")
        for sweep in task.rules:
            end = "" if len(task.rules) == 1 else f"_{subject(sweep.title)}"
            title = f"rules against NFE on {name}, {sweep.title}"
            add(rules(name, task, sweep, width), "rules", f"rules_{safe}{end}", name, title)
    for trace in report["traces"]:
        if trace["tokens"]:
            stem, title = f"reveal_order_{subject(trace['label'])}", f"reveal order of {trace['label']}"
            add(orders(trace, width), "trace", stem, "traces", title)
    return drawn, contents
