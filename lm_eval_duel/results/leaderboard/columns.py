"""The columns of a leaderboard: results of one task with the same documents, windows and scored positions.

Which results may be compared is decided by `match`. Here nothing is refused: what may not share a column gets a column
of its own, and the column says what is different.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

from lm_eval_duel.core.rates import METRICS
from lm_eval_duel.errors import DuelError
from lm_eval_duel.results import compare, match
from lm_eval_duel.results.match import TOKEN_METRICS
from lm_eval_duel.results.read import Run
from lm_eval_duel.results.records import TaskComparison


@dataclasses.dataclass(frozen=True)
class TaskColumn:
    """Results of one task that may be compared. `apart`: how they differ from the task's first column."""

    id: str
    task: str
    runs: list[Run]
    apart: str
    compared: TaskComparison
    label: str = ""  # the task, and what tells its columns apart

    JSON: ClassVar = ("id", "task", "label", "documents", "windows", "apart", "about")

    @property
    def documents(self) -> int | None:
        """The number of documents, if it is known."""
        return next((run.tasks[self.task].size for run in self.runs if run.tasks[self.task].size is not None), None)

    @property
    def windows(self) -> list[str]:
        """How its runs cut documents."""
        return [*dict.fromkeys(str(match.windows(run)) for run in self.runs)]

    @property
    def about(self) -> str:
        count = "" if self.documents is None else f"{self.documents} documents"
        return "; ".join(filter(None, [count, f"windows: {' and '.join(self.windows)}", self.apart]))


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
    first: dict[str, Run] = {}
    one_tokenizer = all(match.same_tokens(first.setdefault(name, run), run, name) for run, name in results)
    allowed = [metric for metric in METRICS if counts[metric] and (one_tokenizer or metric not in TOKEN_METRICS)]
    return max(allowed or METRICS, key=lambda metric: counts[metric])  # of equal counts the first


def from_runs(runs: Sequence[Run], metric: str, baseline: Sequence[Run]) -> list[TaskColumn]:
    """The columns of runs, with the rows of each. `baseline`: runs of the autoregressive model of the gaps."""
    files = {run.file for run in baseline}
    baseline_first = sorted(runs, key=lambda run: run.file not in files)  # its documents are those of the first column
    columns: list[TaskColumn] = []
    for name in dict.fromkeys(name for run in runs for name in run.tasks):
        for members, apart in _groups([run for run in baseline_first if run.has(name, metric)], name, metric):
            base = next((run for run in members if run.file in files), None)
            compared = compare.task(name, [dataclasses.replace(run, baseline=run is base) for run in members], metric)
            columns.append(TaskColumn(f"c{len(columns)}", name, members, apart, compared))
    return [dataclasses.replace(column, label=_label(column, columns)) for column in columns]


def _groups(runs: Sequence[Run], name: str, metric: str) -> list[tuple[list[Run], str]]:
    """Runs that may share a column, and how they differ from the first column.

    As in a report, a run is compared with a column's first run, and with its first one that has samples.
    """
    groups: list[tuple[list[Run], str]] = []
    for run in runs:
        reasons = []
        for members, _ in groups:
            sampled = [member for member in members if member.tasks[name].documents is not None]
            reasons.append(next(filter(None, (_apart(name, metric, m, run) for m in (members[0], *sampled[:1]))), ""))
            if not reasons[-1]:
                members.append(run)
                break
        else:
            groups.append(([run], next(iter(reasons), "")))
    return groups


def _apart(name: str, metric: str, here: Run, there: Run) -> str:
    """Why two results may not share a column; empty if they may. Per word and byte, tokenizers may differ."""
    apart = match.documents(here.tasks[name], there.tasks[name], metric)
    if apart is None:
        fields = match.differences(here, there, name)
        apart = next((d for d in fields if metric in TOKEN_METRICS or not d.field.startswith("tokenizer")), None)
    return "" if apart is None else f"{apart.field}: {apart.there} here, {apart.here} in the first column of {name}"


def _label(column: TaskColumn, columns: Sequence[TaskColumn]) -> str:
    alike = [other for other in columns if other.task == column.task]
    parts = []
    if len({other.documents for other in alike}) > 1:
        parts.append(f"{column.documents or 'unknown number of'} documents")
    if len({tuple(other.windows) for other in alike}) > 1:
        parts.append(" and ".join(column.windows))
    if sum((other.documents, other.windows) == (column.documents, column.windows) for other in alike) > 1:
        parts.append(f"column {alike.index(column) + 1}")
    return f"{column.task} ({', '.join(parts)})" if parts else column.task


def remarks(columns: Sequence[TaskColumn]) -> list[str]:
    """The notes of columns, each once; one that does not hold for all columns says for which tasks it does."""
    tasks: dict[str, list[str]] = {}
    for column in columns:
        for note in dict.fromkeys([*column.compared.differences, *column.compared.notes]):
            tasks.setdefault(note, []).append(column.task)
    return [
        note if len(names) == len(columns) else f"{', '.join(dict.fromkeys(names))}: {note}"
        for note, names in tasks.items()
    ]
