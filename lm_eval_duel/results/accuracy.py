"""Accuracies and other averages than perplexity, with the harness's standard errors: a table for each task."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lm_eval_duel.estimators import registry
from lm_eval_duel.results.read import Run
from lm_eval_duel.results.task import Score, Task

NOT_DECODED = "counts whether greedy decoding would produce the text, which this estimator does not know"
COUNTED = ("acc",)  # in a loglikelihood task, the share of texts that greedy decoding would produce
SETTING = ("documents", "version", "shots", "limit")  # equal within a table


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """The averages of a run on a task, by name. `reason`: why a score says less than it seems."""

    model: str
    name: str
    estimator: str
    rule: str | None
    block: str | None
    cache: str | None
    ar: bool
    scores: dict[str, Score]
    reason: str
    dtype: str
    file: str


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
    groups: dict[tuple, list[tuple[Run, Task]]] = {}
    for run in [*ar, *(run for run in runs if run.file not in baseline)]:
        for name, task in {**run.tasks, **run.others}.items():
            if task.scores:
                setting = [task.identity.get(key) for key in SETTING]
                setting[-1] = setting[-1] if setting[0] is None else None  # the limit is only needed without a count
                groups.setdefault((name, *setting), []).append((run, task))
    result = []
    for (name, *setting), scored in groups.items():
        others = [other[1:] for other in groups if other[0] == name]
        apart = [
            f", {key} {value or 'not set'}"
            for key, value, *values in zip(SETTING, setting, *others, strict=True)
            if key != "documents" and len(set(values)) > 1
        ]
        metrics = dict.fromkeys(score.name for _, task in scored for score in task.scores)
        documents = None if setting[0] is None else int(setting[0])
        rows = [_row(run, task, run.file in baseline) for run, task in scored]
        result.append(Accuracies(name, documents, "".join(apart), list(metrics), rows))
    return result


def _row(run: Run, task: Task, ar: bool) -> Accuracy:
    estimator = registry.find(run.estimator)
    counted = task.output_type == "loglikelihood" and any(score.metric in COUNTED for score in task.scores)
    name = "Lattice" if estimator.lattice else estimator.title
    return Accuracy(
        model=run.label,
        name=f"{name} ({'baseline' if run.estimator == 'ar' else 'AR baseline'})" if ar else name,
        estimator=run.estimator,
        rule=run.rule,
        block=run.block if run.ours and run.estimator != "ar" else None,
        cache=run.cache if run.estimator != "ar" else None,
        ar=ar,
        scores={score.name: score for score in task.scores},
        reason=NOT_DECODED if counted and not estimator.decodes else "",
        dtype=run.dtype,
        file=run.name,
    )
