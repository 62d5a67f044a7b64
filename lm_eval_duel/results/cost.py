"""The cost of runs: seconds, network calls and memory, compared with the ELBO and the AR model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lm_eval_duel.estimators import registry
from lm_eval_duel.estimators.registry import Kind
from lm_eval_duel.results.read import Run
from lm_eval_duel.results.rows import Row
from lm_eval_duel.rules.tables import sort_key

WHOLE = "times of whole runs, loading included: results of other models hold no other time, and no device"
CACHED = "some answers came from a response cache, so the time covers only a part of the run"
LATTICE = f"lattice: all estimators in one run (oracle is {Kind.NOT_A_LIKELIHOOD.value})"


class RunCost:
    """The cost of a run. `times_elbo` and `times_ar` are its seconds per token over another run's.

    Each of these has a reason: which run that is, or why there is none.
    """

    times_elbo: float | None = None
    times_ar: float | None = None
    times_elbo_reason = times_ar_reason = ""

    def __init__(self, run: Run):
        self.run, self.tasks = run, sorted(run.every_task)
        self.name = LATTICE if registry.find(run.estimator).lattice else run.estimator
        self.place = run.duel.get("device"), run.duel.get("ranks")
        counts = [task.tokens for task in run.tasks.values()]  # of a run of another model, from its samples
        known = None if None in counts else int(sum(sum(of_task.values()) for of_task in counts))
        self.tokens: int | None = run.duel.get("tokens") or known or None
        self.seconds: float | None = run.duel.get("seconds")
        self.seconds_per_token = self.seconds / self.tokens if self.seconds and self.tokens else None


def table(runs: Sequence[Run], rows: Iterable[Row]) -> list[RunCost]:
    """One entry per run. Ratios are of seconds per token; they are left out if two runs cannot be compared.

    The ELBO is the one that gap closed uses in the report's `rows`.
    """
    costs = {run: RunCost(run) for run in sorted(runs, key=lambda run: not run.baseline) if run.tasks}
    baselines = [costs[run] for run in costs if run.baseline]
    elbos: dict[Run, Row] = {}  # the Monte Carlo ELBO that the gap closed of a run uses
    for row in rows:
        if row.elbo is not None and row.elbo.drawn_bound:
            elbos.setdefault(row.run, row.elbo)
    for run, cost in costs.items():
        if not run.baseline:
            cost.times_ar, cost.times_ar_reason = _ratio(cost, baselines, "AR run")
        if not run.baseline and run.estimator != "elbo":
            known, note = [], ""
            if elbo := elbos.get(run):
                known, samples = [costs[elbo.run]], elbo.run.spec.get("mc_samples")
                note = f"the ELBO of {run.label}: {elbo.name}, mc_samples={samples}"
            cost.times_elbo, cost.times_elbo_reason = _ratio(cost, known, "Monte Carlo ELBO", note)
    models, estimators = [run.label for run in costs], [*registry.ESTIMATORS]

    def place(run: Run) -> tuple:
        return not run.baseline, models.index(run.label), estimators.index(run.estimator), *sort_key(run.rule)

    return [costs[run] for run in sorted(costs, key=place)]


def _ratio(cost: RunCost, others: Sequence[RunCost], what: str, note: str = "") -> tuple[float | None, str]:
    """Seconds per token over another run's of the same tasks, and a note: which run, or why there is none."""
    same = [other for other in others if other.tasks == cost.tasks]
    if not same:
        return None, f"the {what} is of other tasks" if others else f"no {what} to compare with"
    if any(other.run.cached for other in (cost, *same)):
        return None, CACHED
    timed = [other for other in same if other.seconds_per_token]
    if timed and cost.seconds_per_token:
        alike = [other for other in timed if other.place == cost.place]
        if not alike:
            return None, f"the {what} ran on {timed[0].place[0]} x {timed[0].place[1]}"
        return cost.seconds_per_token / alike[-1].seconds_per_token, note
    whole = [other.run.whole_run_seconds for other in same if other.run.whole_run_seconds]
    if whole and cost.run.whole_run_seconds:
        return cost.run.whole_run_seconds / whole[-1], "; ".join(filter(None, [note, WHOLE]))
    return None, f"no time of the {what}"
