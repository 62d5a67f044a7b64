"""The cost of runs: the time of each, over that of its model's Monte Carlo ELBO and of the autoregressive baseline."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from lm_eval_duel.estimators import registry
from lm_eval_duel.results.compare import Comparison
from lm_eval_duel.results.rows import Row
from lm_eval_duel.results.runs import Run
from lm_eval_duel.rules import sort_key

WHOLE_RUN = "times of whole runs, loading included: results of other models hold no other time, and no device"
CACHED = "some answers came from a response cache, so time and network calls cover only a part of the run"
SEES_TARGETS = "not a likelihood: it sees the targets"  # the oracle
LATTICE = f"lattice: all estimators in one run (oracle is {SEES_TARGETS})"


@dataclasses.dataclass(frozen=True)
class Time:
    """The time of a run, and where it was measured."""

    run: Run

    @property
    def tasks(self) -> list[str]:
        return sorted(self.run.every_task)

    @property
    def place(self) -> tuple[str | None, int | None]:
        """Device and number of processes."""
        return self.run.config.duel.get("device"), self.run.config.duel.get("ranks")

    @property
    def tokens(self) -> int | None:
        """The number of tokens of the run; of another model, it is counted in the samples."""
        if self.run.config.duel.get("tokens"):
            return self.run.config.duel["tokens"]
        total = 0.0
        for task in self.run.tasks.values():
            if task.tokens is None:
                return None
            total += sum(task.tokens.values())
        return int(total) or None

    @property
    def seconds(self) -> float | None:
        """Seconds of scoring alone."""
        return self.run.config.duel.get("seconds")

    @property
    def whole_run(self) -> float | None:
        """Seconds, loading included."""
        return self.run.header.total_evaluation_time_seconds

    @property
    def remark(self) -> str:
        """That time and counts are not those of the whole run; empty if they are."""
        return CACHED if self.run.cached else ""

    @property
    def seconds_per_token(self) -> float | None:
        """None if it is not known: a part of the seconds over all tokens is no cost of a token."""
        if self.run.cached or not (self.seconds and self.tokens):
            return None
        return self.seconds / self.tokens


class Ratio(NamedTuple):
    """Seconds per token over another run's, and the reason: which run that is, or why there is none."""

    value: float | None = None
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class RunCost:
    """The cost of a run, beside the Monte Carlo ELBO of its model and the autoregressive baseline."""

    time: Time
    baseline: bool
    over_elbo: Ratio
    over_ar: Ratio

    @property
    def run(self) -> Run:
        return self.time.run

    @property
    def name(self) -> str:
        """Its estimator, or that it has several."""
        return LATTICE if registry.find(self.run.config.estimator).lattice else self.run.config.estimator


def of_runs(runs: Sequence[Run], baselines: Collection[Run], tasks: Iterable[Comparison]) -> list[RunCost]:
    """One entry per run. Ratios are of seconds per token; they are left out if two runs cannot be compared.

    The ELBO is the Monte Carlo one with the most draws that belongs to the rows of the run in the report's `tasks`.
    """
    timed: dict[Run, Time] = {}
    for run in sorted(runs, key=lambda run: run not in baselines):
        if run.tasks:
            timed[run] = Time(run)
    baseline_times = [time for run, time in timed.items() if run in baselines]
    elbos = _elbos(tasks)
    costs_of_runs = []
    for run, time in timed.items():
        over_elbo = Ratio()
        over_ar = Ratio()
        if run not in baselines:
            over_ar = _ratio(time, baseline_times, "AR run")
            if run.config.estimator != "elbo":
                over_elbo = _over_elbo(time, elbos.get(run), timed)
        costs_of_runs.append(RunCost(time, run in baselines, over_elbo, over_ar))

    models = [run.label for run in timed]
    estimators = [*registry.ESTIMATORS]

    def place(cost: RunCost) -> tuple:
        model = models.index(cost.run.label)
        estimator = estimators.index(cost.run.config.estimator)
        return not cost.baseline, model, estimator, *sort_key(cost.run.config.rule)

    return sorted(costs_of_runs, key=place)


def _elbos(tasks: Iterable[Comparison]) -> dict[Run, Row]:
    """The Monte Carlo ELBO of each run, also of a run whose value is shown in another run's row."""
    elbos: dict[Run, Row] = {}
    for task in tasks:
        for each in task.rows:
            if each.drawn_elbo is None:
                continue
            for row in (each.row, *task.same[each.row]):
                elbos.setdefault(row.run, each.drawn_elbo)
    return elbos


def _over_elbo(time: Time, elbo: Row | None, timed: Mapping[Run, Time]) -> Ratio:
    """Seconds per token over those of the ELBO of a run."""
    what = "Monte Carlo ELBO"
    if elbo is None:
        return _ratio(time, [], what)
    note = f"the ELBO of {time.run.label}: {elbo.name}, mc_samples={elbo.run.spec.get('mc_samples')}"
    return _ratio(time, [timed[elbo.run]], what, note)


def _ratio(time: Time, others: Sequence[Time], what: str, note: str = "") -> Ratio:
    """Seconds per token over another run's of the same tasks, or why there is no such ratio. `note`: about that run.

    If both runs hold the time of scoring alone, it is of that, and they must have run on the same device. If not, it is
    of whole runs.
    """
    if not others:
        return Ratio(None, f"no {what} to compare with")
    same_tasks = [other for other in others if other.tasks == time.tasks]
    if not same_tasks:
        return Ratio(None, f"the {what} is of other tasks")
    if any(other.run.cached for other in (time, *same_tasks)):
        return Ratio(None, CACHED)

    timed = [other for other in same_tasks if other.seconds_per_token]
    if timed and time.seconds_per_token:
        same_place = [other for other in timed if other.place == time.place]
        if not same_place:
            device, ranks = timed[-1].place  # of the newest
            return Ratio(None, f"the {what} ran on {device} x {ranks}")
        newest = same_place[-1]
        return Ratio(time.seconds_per_token / newest.seconds_per_token, note)

    whole_runs = [other.whole_run for other in same_tasks if other.whole_run]
    if whole_runs and time.whole_run:
        notes = "; ".join(filter(None, [note, WHOLE_RUN]))
        return Ratio(time.whole_run / whole_runs[-1], notes)
    return Ratio(None, f"no time of the {what}")
