"""Accuracies and other averages than perplexity, with the harness's standard errors: a table for each task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval_duel.estimators import registry
from lm_eval_duel.results.read import Run
from lm_eval_duel.results.task import Score, Task

NOT_DECODED = "counts whether greedy decoding would produce the text, which this estimator does not know"
COUNTED = ("acc",)  # in a loglikelihood task, the share of texts that greedy decoding would produce
SETTING = ("documents", "version", "shots", "limit")  # equal within a table


def tables(runs: Sequence[Run], ar: Sequence[Run]) -> list[dict[str, Any]]:
    """A table for each task, and for each number of documents, version and number of shots it was scored with."""
    baseline = {run.file for run in ar}
    groups: dict[tuple, list[tuple[Run, Task]]] = {}
    for run in [*ar, *(run for run in runs if run.file not in baseline)]:
        for name, task in {**run.tasks, **run.others}.items():
            if task.scores:
                setting = tuple(task.identity.get(key) for key in SETTING[:3])
                limit = task.identity.get("limit") if setting[0] is None else None  # only needed without a count
                groups.setdefault((name, (*setting, limit)), []).append((run, task))
    return [_table(name, setting, scored, baseline, groups) for (name, setting), scored in groups.items()]


def _table(
    name: str, setting: tuple, scored: Sequence[tuple[Run, Task]], baseline: set, groups: Mapping[tuple, Any]
) -> dict[str, Any]:
    others = [other for task, other in groups if task == name]
    apart = [
        f", {key} {value or 'not set'}"
        for key, value, *values in zip(SETTING, setting, *others, strict=True)
        if key != "documents" and len(set(values)) > 1
    ]
    metrics = dict.fromkeys(_name(score) for _, task in scored for score in task.scores)
    return {
        "task": name,
        "documents": None if setting[0] is None else int(setting[0]),
        "apart": "".join(apart),
        "metrics": list(metrics),
        "rows": [_row(run, task, run.file in baseline) for run, task in scored],
    }


def _row(run: Run, task: Task, ar: bool) -> dict[str, Any]:
    estimator = registry.find(run.estimator)
    counted = task.output_type == "loglikelihood" and any(score.metric in COUNTED for score in task.scores)
    name = "Lattice" if estimator.lattice else estimator.title
    return {
        "model": run.label,
        "name": f"{name} ({'baseline' if run.estimator == 'ar' else 'AR baseline'})" if ar else name,
        "estimator": run.estimator,
        "rule": run.rule,
        "block": run.block if run.ours and run.estimator != "ar" else None,
        "cache": run.cache if run.estimator != "ar" else None,
        "ar": ar,
        "scores": {_name(score): {"value": score.value, "stderr": score.stderr} for score in task.scores},
        "reason": NOT_DECODED if counted and not estimator.decodes else "",
        "dtype": run.dtype,
        "file": run.name,
    }


def _name(score: Score) -> str:
    return f"{score.metric} ({score.filter})" if score.filter else score.metric
