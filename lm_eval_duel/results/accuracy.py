"""Accuracies and other averages than perplexity, with the harness's standard errors: a table for each task."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from lm_eval_duel.estimators import registry
from lm_eval_duel.results.read import Run
from lm_eval_duel.results.task import Score, Task

NOT_DECODED = "counts whether greedy decoding would produce the text, which this estimator does not know"
COUNTED = ("acc",)  # in a loglikelihood task, the share of texts that greedy decoding would produce


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """The averages of a run on a task."""

    run: Run
    task: Task

    JSON: ClassVar = (
        *("model=run.label", "name", "estimator=run.estimator", "rule=run.rule", "block=run.block", "cache=run.cache"),
        *("ar=run.baseline", "identity=task.identity", "scores", "reason", "dtype=run.dtype", "file=run.name"),
    )

    @property
    def scores(self) -> dict[str, Score]:
        return {score.name: score for score in self.task.scores}

    @property
    def reason(self) -> str:
        """Why a score says less than it seems."""
        counted = any(score.metric in COUNTED for score in self.task.scores)
        known = self.task.output_type != "loglikelihood" or registry.find(self.run.estimator).decodes
        return NOT_DECODED if counted and not known else ""

    @property
    def name(self) -> str:
        entry = registry.find(self.run.estimator)
        name = "Lattice" if entry.lattice else entry.title
        return f"{name} ({'baseline' if entry.name == 'ar' else 'AR baseline'})" if self.run.baseline else name


def by_task(runs: Sequence[Run]) -> dict[str, list[Accuracy]]:
    """Each task's results, the autoregressive baseline first."""
    tasks: dict[str, list[Accuracy]] = {}
    for run in sorted(runs, key=lambda run: not run.baseline):
        for name, task in {**run.tasks, **run.others}.items():
            if task.scores:
                tasks.setdefault(name, []).append(Accuracy(run, task))
    return tasks
