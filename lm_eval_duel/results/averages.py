"""Paired differences of averages other than perplexities, such as `acc`, over documents that two runs share."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from lm_eval_duel.errors import counted
from lm_eval_duel.estimators import registry
from lm_eval_duel.results import order, rows, stats
from lm_eval_duel.results.compare import MOST_ROWS
from lm_eval_duel.results.rows import plain_row
from lm_eval_duel.results.runs import Run, parts_of_average
from lm_eval_duel.results.table import Note

NOT_DECODED = "counts whether greedy decoding would produce the text, which this estimator does not know"
FROM_BOUND = "from a bound: options are ranked by bounds of their log-likelihoods, not by these"
COUNTED = "acc"  # in a loglikelihood task, the share of texts that greedy decoding would produce

Draws: TypeAlias = dict[str, np.ndarray]  # of a run, by average


def remark(run: Run, name: str, metric: str) -> str:
    """A remark on what an average of a task is not, under the run's estimator; empty if it is what its name says."""
    without_filter, _ = parts_of_average(metric)
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
    """The paired differences of the averages of a task. Of more than five runs, each is compared with the first."""
    in_order = order.runs_in_order([run for run in runs if run.scores(name)], name, baselines)
    if len(in_order) <= MOST_ROWS:
        chosen = list(itertools.combinations(in_order, 2))
    else:
        chosen = [(run, in_order[0]) for run in in_order[1:]]
    draws: dict[Run, Draws] = {}
    if chosen:
        draws = {run: _draws(run, name) for run in in_order}
    compared: list[AveragePair] = []
    for first, second in chosen:
        compared += _of_two(name, (first, second), draws, baselines)
    return compared


def _draws(run: Run, name: str) -> Draws:
    """The averages of a run in each draw of the bootstrap over its documents.

    Runs with the same documents draw the same ones, since these are in one order and the seed is fixed.
    """
    draws = {}
    for metric, scores in run.every_task[name].document_scores.items():
        column = np.array(list(scores.values()))[:, None]  # (documents, 1)
        draws[metric] = stats.resample(column)[:, 0] / len(scores)  # (draws,)
    return draws


def _of_two(
    name: str, runs: tuple[Run, Run], draws: Mapping[Run, Draws], baselines: Collection[Run]
) -> Iterator[AveragePair]:
    """The differences of each average that two runs share."""
    first, second = runs
    first_name, second_name = rows.names([plain_row(run, name, baseline=run in baselines) for run in runs])
    names = (first_name, second_name)
    for metric in first.scores(name):
        if metric not in second.scores(name):
            continue
        difference = first.scores(name)[metric][0] - second.scores(name)[metric][0]
        scores_of_first, scores_of_second = (run.every_task[name].document_scores.get(metric, {}) for run in runs)
        reason = _no_interval(scores_of_first, scores_of_second)
        if reason:
            yield AveragePair(names, metric, difference, None, "", reason)
            continue
        low, high = stats.percentile_interval(draws[first][metric] - draws[second][metric])
        verdict = _verdict(name, metric, runs, names, (low, high), list(scores_of_first))
        yield AveragePair(names, metric, difference, (low, high), verdict, Note())


def _no_interval(first: dict[str, float], second: dict[str, float]) -> Note:
    """The reason that two runs have no paired interval; empty if they have the scores of the same documents."""
    if not (first and second):
        return Note("no interval: a run has no samples with this mean", "run lm_eval with --log_samples")
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
        remark_on_average = remark(run, name, metric)
        if remark_on_average:
            doubts.append(remark_on_average)
        doubts += run.doubts
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
    without_filter, _ = parts_of_average(metric)
    return run.content.get("higher_is_better", {}).get(name, {}).get(without_filter)
