"""Accuracies and other averages than perplexity, with the harness's standard errors: a table for each task."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from lm_eval_duel.estimators import registry
from lm_eval_duel.results.read import Run
from lm_eval_duel.results.records import OfWholeRun
from lm_eval_duel.results.task import Score, Task

NOT_DECODED = "counts whether greedy decoding would produce the text, which this estimator does not know"
COUNTED = ("acc",)  # in a loglikelihood task, the share of texts that greedy decoding would produce
SETTING = ("documents", "version", "shots", "limit")  # equal within a table


@dataclasses.dataclass(frozen=True)
class Accuracy(OfWholeRun):
    """The averages of a run on a task, by name."""

    run: Run
    ar: bool  # the autoregressive baseline
    scores: dict[str, Score]
    reason: str  # why a score says less than it seems

    JSON: ClassVar = (
        *("model", "name", "estimator", "rule", "block", "cache", "ar", "scores", "reason", "dtype", "file"),
    )

    @classmethod
    def from_task(cls, run: Run, task: Task, ar: bool) -> Accuracy:
        counted = task.output_type == "loglikelihood" and any(score.metric in COUNTED for score in task.scores)
        reason = NOT_DECODED if counted and not registry.find(run.estimator).decodes else ""
        return cls(run, ar, {score.name: score for score in task.scores}, reason)

    @property
    def name(self) -> str:
        entry = registry.find(self.estimator)
        name = "Lattice" if entry.lattice else entry.title
        return f"{name} ({'baseline' if self.estimator == 'ar' else 'AR baseline'})" if self.ar else name


@dataclasses.dataclass(frozen=True)
class Accuracies:
    """A table: results of a task with one number of documents, version and number of shots. `apart`: these, in words,
    if they differ between the tables of a task."""

    task: str
    documents: int | None
    apart: str
    metrics: list[str]
    rows: list[Accuracy]


def tables(runs: Sequence[Run], ar: Sequence[Run]) -> list[Accuracies]:
    """A table for each task, and for each number of documents, version and number of shots it was scored with."""
    baseline = {run.file for run in ar}
    groups: dict[tuple, list[Accuracy]] = {}
    for run in [*ar, *(run for run in runs if run.file not in baseline)]:
        for name, task in {**run.tasks, **run.others}.items():
            if task.scores:
                setting = [task.identity.get(key) for key in SETTING]
                setting[-1] = setting[-1] if setting[0] is None else None  # the limit is only needed without a count
                row = Accuracy.from_task(run, task, run.file in baseline)
                groups.setdefault((name, *setting), []).append(row)
    result = []
    for (name, *setting), rows in groups.items():
        others = [other[1:] for other in groups if other[0] == name]
        apart = [
            f", {key} {value or 'not set'}"
            for key, value, *values in zip(SETTING, setting, *others, strict=True)
            if key != "documents" and len(set(values)) > 1
        ]
        documents = None if setting[0] is None else int(setting[0])
        metrics = list(dict.fromkeys(metric for row in rows for metric in row.scores))
        result.append(Accuracies(name, documents, "".join(apart), metrics, rows))
    return result
