"""The values of one run, as a table to paste below lm-eval's own, which has no place for kinds and errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lm_eval_duel.console.command_line import infinities
from lm_eval_duel.core.scores import METRICS
from lm_eval_duel.errors import counted
from lm_eval_duel.results import read, rows, run_tables
from lm_eval_duel.results.notes import LOWEST_FIRST
from lm_eval_duel.results.rows import Row
from lm_eval_duel.results.runs import Documents, Run, documents_scored, is_limited

WARPERS = ("temperature=", "top_k=", "top_p=")  # settings of generated texts that change distributions
LISTED = 4  # tasks whose documents are counted one by one


def summary(content: Mapping[str, Any]) -> str:
    """The perplexities of a run, each with its kind and error, the limits of its accuracies, and what it scored.

    What puts its values in doubt stands there, too.

    `content`: that of its results file. Raises DuelError for entries that lm_eval does not write.
    """
    file = Path("results")
    with read.reading(file, read.RESULTS):
        run = read.run_of(file, content, Documents({}, {}))
    every_row: list[Row] = []
    for name, task in run.tasks.items():
        metric = next(metric for metric in METRICS if metric in task.metrics)
        of_task, _ = rows.from_run(run, name, metric, baseline=False)
        every_row += of_task
    parts = []
    if every_row:
        parts.append(run_tables.summary(every_row).markdown())
    remarks = [*_infinities(content), *_remarks(run), *_generated(run), *run.doubts, *_verified(run)]
    if run.config.duel.get("all_mask_starts"):
        remarks.append(LOWEST_FIRST)
    if remarks:
        parts.append("\n".join(remarks))
    parts.append(", ".join([*_documents(run), f"fingerprint {run.config.fingerprint}"]))
    return "\n\n".join(parts)


def _infinities(content: Mapping[str, Any]) -> Iterator[str]:
    """A sentence on each infinity that the table shows, or lm-eval's, once for all tasks."""
    nulls = {}
    for place, reason in content.get("nulls", {}).items():
        if place.startswith("results."):
            nulls[place] = reason
    for value, reason in infinities(nulls).items():
        sign = "-" if value < 0 else ""
        yield f"{value} ({sign}Infinity in lm-eval's table) is {reason}"


def _remarks(run: Run) -> Iterator[str]:
    """The limits of the averages of each task, which stand in lm-eval's table without a word."""
    for name in run.every_task:
        metrics: dict[str, list[str]] = {}
        for metric in run.scores(name):
            cell = run_tables.average(run, name, metric)
            if isinstance(cell, tuple):
                _, remark = cell
                metrics.setdefault(remark, []).append(metric)
        for remark, limited in metrics.items():
            yield f"{', '.join(limited)} of {name}: {remark}"


def _generated(run: Run) -> Iterator[str]:
    """A sentence on each way in which texts were sampled, if it changes the distributions of the network."""
    for description in run.config.duel.get("generated", []):
        changes = []
        for setting in description.split(", "):
            if setting.startswith(WARPERS) and setting != "temperature=1":
                changes.append(setting)
        if changes:
            yield f"texts were sampled with {', '.join(changes)}: from another distribution than the one that is scored"


def _verified(run: Run) -> Iterator[str]:
    """A sentence on the windows that `verify` scored again; a difference is among the doubts of the run."""
    verified = run.config.duel.get("verify") or {}
    if not verified or verified.get("differing_windows"):
        return
    windows = verified.get("windows", 0)
    agree = windows - verified.get("not_checked_independently", 0)
    if not agree:
        yield f"verify checked nothing: the reference has no value for any of {counted(windows, 'window')}"
    elif agree < windows:
        yield f"verify: {agree} of {counted(windows, 'window')} agree with the reference, which has none for the others"
    else:
        yield f"verify: {counted(windows, 'window')} agree with the reference"


def _documents(run: Run) -> Iterator[str]:
    """The number of documents of each task, or of many tasks together, and whether --limit left some out."""
    sizes = {}
    for name, task in run.every_task.items():
        if task.size is not None:
            sizes[name] = (task.size, task.available)
    if len(sizes) > LISTED:
        size = sum(size for size, _ in sizes.values())
        available = sum(size if available is None else available for size, available in sizes.values())
        sizes = {f"{len(sizes)} tasks": (size, available)}
    for name, (size, available) in sizes.items():
        limited = " (--limit)" if is_limited(size, available) else ""
        noun = "document" if (size, available) == (1, 1) else "documents"
        yield f"{documents_scored(size, available)} {noun} of {name}{limited}"
