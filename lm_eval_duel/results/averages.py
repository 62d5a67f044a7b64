"""Paired differences of averages other than perplexities, such as `acc`, over documents that two runs share."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from lm_eval_duel.errors import counted
from lm_eval_duel.estimators import registry
from lm_eval_duel.results import order, rows, stats
from lm_eval_duel.results.rows import plain_row
from lm_eval_duel.results.runs import Run
from lm_eval_duel.results.table import Note

NOT_DECODED = "counts whether greedy decoding would produce the text, which this estimator does not know"
FROM_BOUND = "from a bound: options are ranked by bounds of their log-likelihoods, not by these"
COUNTED = "acc"  # in a loglikelihood task, the share of texts that greedy decoding would produce
MOST_RUNS = 5  # of which all pairs are listed; of more, each is compared with the first


def remark(run: Run, name: str, metric: str) -> str:
    """A remark on what an average of a task is not, under the run's estimator; empty if it is what its name says."""
    without_filter, _, _ = metric.partition(" (")
    output_type = run.every_task[name].output_type
    entry = registry.find(run.config.estimator)
    if output_type == "loglikelihood" and without_filter == COUNTED and not entry.decodes:
        return NOT_DECODED
    if output_type == "multiple_choice" and entry.kind.is_bound:
        return FROM_BOUND
    return ""


@dataclasses.dataclass(frozen=True)
class AveragePair:
    """An average of two runs of one task: first minus second, over the same documents.

    `interval`: 95 %, by the bootstrap over documents; None with the `reason`. `verdict`: which run is better, or why
    nobody can say.
    """

    names: tuple[str, str]
    metric: str
    difference: float
    interval: tuple[float, float] | None
    verdict: str
    reason: Note


def pairs(name: str, runs: Sequence[Run], baselines: Collection[Run]) -> list[AveragePair]:
    """The paired differences of the averages of a task, of runs with logged samples."""
    in_order = order.runs_in_order([run for run in runs if run.scores(name)], name, baselines)
    if len(in_order) <= MOST_RUNS:
        chosen = list(itertools.combinations(in_order, 2))
    else:
        chosen = [(run, in_order[0]) for run in in_order[1:]]
    compared: list[AveragePair] = []
    for first, second in chosen:
        compared += _of_two(name, first, second, baselines)
    return compared


def _of_two(name: str, first: Run, second: Run, baselines: Collection[Run]) -> Iterator[AveragePair]:
    """The differences of each average that two runs share."""
    both = [plain_row(run, name, baseline=run in baselines) for run in (first, second)]
    names = _names(both)
    for metric in first.scores(name):
        if metric not in second.scores(name):
            continue
        difference = first.scores(name)[metric][0] - second.scores(name)[metric][0]
        scored = [run.every_task[name].scored.get(metric, {}) for run in (first, second)]
        reason = _no_interval(*scored)
        if reason:
            yield AveragePair(names, metric, difference, None, "", reason)
            continue
        keys = list(scored[0])
        values = np.array([[scores[key] for scores in scored] for key in keys])  # (documents, 2)
        means = stats.resample(values) / len(values)  # (draws, 2)
        low, high = stats.percentile_interval(means[:, 0] - means[:, 1])
        verdict = _verdict(name, metric, (first, second), names, (low, high), keys)
        yield AveragePair(names, metric, difference, (low, high), verdict, Note())


def _names(both: Sequence[rows.Row]) -> tuple[str, str]:
    """The names that distinguish two runs: their models if these differ, and their methods if these do."""
    first, second = rows.names(both)
    if both[0].model != both[1].model:
        first = f"{both[0].model}, {both[0].name}"
        second = f"{both[1].model}, {both[1].name}"
    return first, second


def _no_interval(first: dict[str, float], second: dict[str, float]) -> Note:
    """The reason that two runs have no paired interval; empty if they have the scores of the same documents."""
    if not (first and second):
        return Note("no interval: a run has no samples", "run lm_eval with --log_samples")
    if first.keys() != second.keys():
        return Note("no interval: the runs have other documents")
    if len(first) < 2:
        return Note("no interval from one document")
    return Note()


def _verdict(
    name: str,
    metric: str,
    runs: tuple[Run, Run],
    names: tuple[str, str],
    interval: tuple[float, float],
    keys: Sequence[str],
) -> str:
    """The better of two runs in an average, or why nobody can say. `keys`: of documents, as samples have them."""
    low, high = interval
    distinct = len({key.rpartition(":")[0] for key in keys})  # copies of a document say nothing about others
    doubts = []
    for run in runs:
        doubts += [*filter(None, [remark(run, name, metric)]), *run.doubts]
    if doubts:
        return f"no verdict: {doubts[0]}"
    if low == high == 0:
        return stats.EQUAL_VALUES
    if distinct < stats.FEW:
        return f"no verdict from {counted(distinct, 'distinct document')}"
    if low <= 0 <= high:
        return stats.UNCLEAR
    higher_is_better = _higher_is_better(runs[0], name, metric)
    if higher_is_better is None:
        return f"{names[0] if low > 0 else names[1]} is higher"
    is_first = (low > 0) == higher_is_better
    return f"{names[0] if is_first else names[1]} is better"


def _higher_is_better(run: Run, name: str, metric: str) -> Any:
    """True or False, as the harness writes it; None if it does not say."""
    without_filter, _, _ = metric.partition(" (")
    return run.content.get("higher_is_better", {}).get(name, {}).get(without_filter)
