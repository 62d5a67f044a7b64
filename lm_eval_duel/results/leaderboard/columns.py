"""The columns of a leaderboard: results of one task with the same documents, windows and scored positions.

Which results may be compared is decided by `report.match`. Here nothing is refused: what may not share a column gets a
column of its own, and the column says what is different.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from lm_eval_duel.errors import DuelError
from lm_eval_duel.rates import METRICS
from lm_eval_duel.results import compare, match
from lm_eval_duel.results.match import TOKEN_METRICS
from lm_eval_duel.results.read import Run
from lm_eval_duel.results.records import Row


@dataclasses.dataclass
class Column:
    """Results of one task that may be compared. `apart`: how they differ from the task's first column."""

    id: str
    task: str
    runs: list[Run]
    apart: str = ""
    entries: list[Row] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def documents(self) -> int | None:
        """The number of documents, if it is known."""
        return next((run.tasks[self.task].size for run in self.runs if run.tasks[self.task].size is not None), None)

    @property
    def windows(self) -> list[str]:
        """How its runs cut documents."""
        return [*dict.fromkeys(str(match.windows(run)) for run in self.runs)]


def unit(runs: Sequence[Run], requested: str | None) -> str:
    """The metric of all columns: the requested one, or the first that most results have.

    Perplexity per token is chosen only if all results of each task are known to have the same tokens. Raises DuelError
    if no result has the metric.
    """
    results = [(run, name) for run in runs for name in run.tasks]
    counts = Counter(metric for run, name in results for metric in run.tasks[name].metrics)
    if requested is not None:
        if not counts[requested]:
            raise DuelError(f"No result has {requested}; they have {', '.join(m for m in METRICS if counts[m])}.")
        return requested
    allowed = [metric for metric in METRICS if metric not in TOKEN_METRICS or _one_tokenizer(results)]
    if not any(counts[metric] for metric in allowed):
        allowed = list(METRICS)  # tokens of several tokenizers: their results get columns of their own
    return max(allowed, key=lambda metric: counts[metric])  # of equal counts the first


def _one_tokenizer(results: Sequence[tuple[Run, str]]) -> bool:
    first: dict[str, Run] = {}
    return all(match.same_tokens(first.setdefault(name, run), run, name) for run, name in results)


def of(runs: Sequence[Run], metric: str, baseline: Sequence[Run]) -> list[Column]:
    """The columns of runs, with the rows of each. `baseline`: runs of the autoregressive model of the gaps."""
    columns: list[Column] = []
    files = {run.file for run in baseline}
    for name in dict.fromkeys(name for run in runs for name in run.tasks):
        of_task: list[Column] = []
        for run in sorted(runs, key=lambda run: run.file not in files):  # the baseline's documents come first
            if run.has(name, metric):
                _place(run, name, metric, of_task, len(columns))
        columns += of_task
    for column in columns:
        _fill(column, metric, files)
    return columns


def remarks(columns: Sequence[Column]) -> list[str]:
    """The notes of columns, each once; one that does not hold for all columns says for which tasks it does."""
    tasks: dict[str, list[Column]] = {}
    for column in columns:
        for note in dict.fromkeys(column.notes):
            tasks.setdefault(note, []).append(column)
    return [
        note if len(alike) == len(columns) else f"{', '.join(dict.fromkeys(c.task for c in alike))}: {note}"
        for note, alike in tasks.items()
    ]


def _place(run: Run, name: str, metric: str, columns: list[Column], number: int) -> None:
    """Add a run to the first column whose results it may be compared with, or to a new one.

    As in a report, it is compared with the column's first run, and with its first one that has samples.
    """
    reasons = []
    for column in columns:
        with_samples = [other for other in column.runs if other.tasks[name].documents is not None]
        first = [column.runs[0], *(other for other in with_samples[:1] if other is not column.runs[0])]
        apart = next(filter(None, (_apart(name, metric, other, run) for other in first)), "")
        if not apart:
            column.runs.append(run)
            return
        reasons.append(apart)
    columns.append(Column(f"c{number + len(columns)}", name, [run], reasons[0] if reasons else ""))


def _apart(name: str, metric: str, here: Run, there: Run) -> str:
    """Why two results may not share a column; empty if they may. Per word and byte, tokenizers may differ."""
    apart = match.documents(here.tasks[name], there.tasks[name], metric)
    if apart is None:
        others = match.differences(here, there, name)
        others = [d for d in others if metric in TOKEN_METRICS or not d.field.startswith("tokenizer")]
        apart = others[0] if others else None
    return "" if apart is None else f"{apart.field}: {apart.there} here, {apart.here} in the first column of {name}"


def _fill(column: Column, metric: str, baseline: set[Path]) -> None:
    ar = [run for run in column.runs if run.file in baseline]
    task = compare.task(column.task, column.runs, ar[:1], compare.Choice(metric))
    column.entries, column.notes = task.rows, [*task.differences, *task.notes]
