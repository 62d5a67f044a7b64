"""The cost of runs: seconds, network calls and memory, compared with the ELBO and the AR model."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from lm_eval_duel.estimators import registry
from lm_eval_duel.estimators.registry import Kind
from lm_eval_duel.results.compare import ComparedRow
from lm_eval_duel.results.rows import Row
from lm_eval_duel.results.runs import Run
from lm_eval_duel.rules.tables import sort_key

WHOLE = "times of whole runs, loading included: results of other models hold no other time, and no device"
CACHED = "some answers came from a response cache, so the time covers only a part of the run"
LATTICE = f"lattice: all estimators in one run (oracle is {Kind.NOT_A_LIKELIHOOD.value})"


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
        return self.run.duel.get("device"), self.run.duel.get("ranks")

    @property
    def tokens(self) -> int | None:
        """Of a run of another model from its samples."""
        counts = [task.tokens for task in self.run.tasks.values()]
        known = None if None in counts else int(sum(sum(of_task.values()) for of_task in counts))
        return self.run.duel.get("tokens") or known or None

    @property
    def seconds(self) -> float | None:
        """Of scoring alone."""
        return self.run.duel.get("seconds")

    @property
    def seconds_per_token(self) -> float | None:
        return self.seconds / self.tokens if self.seconds and self.tokens else None


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
        return LATTICE if registry.find(self.run.estimator).lattice else self.run.estimator


def table(runs: Sequence[Run], baselines: Collection[Run], rows: Iterable[ComparedRow]) -> list[RunCost]:
    """One entry per run. Ratios are of seconds per token; they are left out if two runs cannot be compared.

    The ELBO is the Monte Carlo one with the most draws that belongs to the report's `rows` of the run.
    """
    timed = {run: Time(run) for run in sorted(runs, key=lambda run: run not in baselines) if run.tasks}
    elbos: dict[Run, Row] = {}
    for each in rows:
        if each.drawn_elbo is not None:
            elbos.setdefault(each.row.run, each.drawn_elbo)
    costs = []
    for run, time in timed.items():
        over_elbo = over_ar = Ratio()
        if run not in baselines:
            over_ar = _ratio(time, [timed[other] for other in timed if other in baselines], "AR run")
        if run not in baselines and run.estimator != "elbo":
            known, note = [], ""
            if elbo := elbos.get(run):
                known, samples = [timed[elbo.run]], elbo.run.spec.get("mc_samples")
                note = f"the ELBO of {run.label}: {elbo.name}, mc_samples={samples}"
            over_elbo = _ratio(time, known, "Monte Carlo ELBO", note)
        costs.append(RunCost(time, run in baselines, over_elbo, over_ar))
    models, estimators = [run.label for run in timed], [*registry.ESTIMATORS]

    def place(cost: RunCost) -> tuple:
        run = cost.run
        return not cost.baseline, models.index(run.label), estimators.index(run.estimator), *sort_key(run.rule)

    return sorted(costs, key=place)


def _ratio(time: Time, others: Sequence[Time], what: str, note: str = "") -> Ratio:
    """Seconds per token over another run's of the same tasks. `note`: about that run."""
    same = [other for other in others if other.tasks == time.tasks]
    if not same:
        return Ratio(None, f"the {what} is of other tasks" if others else f"no {what} to compare with")
    if any(other.run.cached for other in (time, *same)):
        return Ratio(None, CACHED)
    timed = [other for other in same if other.seconds_per_token]
    if timed and time.seconds_per_token:
        alike = [other for other in timed if other.place == time.place]
        if not alike:
            return Ratio(None, f"the {what} ran on {timed[0].place[0]} x {timed[0].place[1]}")
        return Ratio(time.seconds_per_token / alike[-1].seconds_per_token, note)
    whole = [other.run.whole_run_seconds for other in same if other.run.whole_run_seconds]
    if whole and time.run.whole_run_seconds:
        return Ratio(time.run.whole_run_seconds / whole[-1], "; ".join(filter(None, [note, WHOLE])))
    return Ratio(None, f"no time of the {what}")
