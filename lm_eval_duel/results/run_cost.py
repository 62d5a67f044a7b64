"""The cost of runs: seconds, network calls and memory, compared with the ELBO and the AR model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from lm_eval_duel.estimators import registry
from lm_eval_duel.results.read import Run
from lm_eval_duel.results.records import SEES_TRUTH, Row
from lm_eval_duel.rules.tables import sort_key

WHOLE = "times of whole runs, loading included: results of other models hold no other time, and no device"
COUNTED = ("device", "ranks", "seconds", "forwards", "rows", "nfe", "peak_memory_bytes")  # entries of config.duel
CACHED = "some answers came from a response cache, so the time covers only a part of the run"
LATTICE = f"lattice: all estimators in one run (oracle is {SEES_TRUTH})"


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a run cost. `times_elbo`, `times_ar`: its seconds per token over those of another run, with a note: which
    run, or why there is none."""

    run: Run
    times_elbo: float | None = None
    times_elbo_reason: str = ""
    times_ar: float | None = None
    times_ar_reason: str = ""

    JSON: ClassVar = (
        *("model=run.label", "estimator=run.estimator", "name", "rule=run.rule", "block=run.block", "cache=run.cache"),
        *("ar=run.baseline", "tasks", "cached", "device", "ranks", "tokens", "seconds", "seconds_per_token"),
        *("whole_run_seconds=run.whole_run_seconds", "forwards", "rows", "nfe", "peak_memory_bytes", "file=run.name"),
        *("times_elbo", "times_elbo_reason", "times_ar", "times_ar_reason"),
    )

    def __getattr__(self, key: str) -> Any:
        """Seconds, device, forwards and the like: entries of `config.duel`, None if the results have none."""
        if key in COUNTED:
            return self.run.duel.get(key)
        raise AttributeError(key)

    @property
    def name(self) -> str:
        return LATTICE if registry.find(self.run.estimator).lattice else self.run.estimator

    @property
    def tasks(self) -> list[str]:
        return sorted([*self.run.tasks, *self.run.others])

    @property
    def cached(self) -> bool:
        """Whether answers may have come from a response cache."""
        return self.run.cached

    @property
    def tokens(self) -> int | None:
        """Of a run of another model, from its samples."""
        counts = [task.tokens for task in self.run.tasks.values()]
        known = None if None in counts else int(sum(sum(of_task.values()) for of_task in counts))
        return self.run.duel.get("tokens") or known or None

    @property
    def seconds_per_token(self) -> float | None:
        return self.seconds / self.tokens if self.seconds and self.tokens else None


def table(runs: Sequence[Run], rows: Iterable[Row]) -> list[Cost]:
    """One entry per run. Ratios are of seconds per token; they are left out if two runs cannot be compared.

    The ELBO is the one that gap closed uses in the report's `rows`.
    """
    costs = {run.file: Cost(run) for run in runs if run.tasks}
    baselines = [cost for cost in costs.values() if cost.run.baseline]
    elbos: dict[Any, Row] = {}  # file of a run -> the Monte Carlo ELBO that its gap closed uses
    for row in rows:
        if row.elbo is not None and row.elbo.estimator == "elbo":
            elbos.setdefault(row.run.file, row.elbo)

    def compared(cost: Cost) -> Cost:
        if cost.run.baseline:
            return cost
        ratio, reason = _ratio(cost, baselines, "AR run")
        cost = dataclasses.replace(cost, times_ar=ratio, times_ar_reason=reason)
        if cost.run.estimator == "elbo":
            return cost
        known, note = [], ""
        if elbo := elbos.get(cost.run.file):
            known, note = [costs[elbo.run.file]], f"the ELBO of {cost.run.label}: {elbo.name}"
            note += f", mc_samples={elbo.run.spec.get('mc_samples')}"
        ratio, reason = _ratio(cost, known, "Monte Carlo ELBO", note)
        return dataclasses.replace(cost, times_elbo=ratio, times_elbo_reason=reason)

    every = sorted(costs.values(), key=lambda cost: not cost.run.baseline)
    models, order = [cost.run.label for cost in every], [*registry.ESTIMATORS]

    def place(cost: Cost) -> tuple:
        run = cost.run
        return not run.baseline, models.index(run.label), order.index(run.estimator), *sort_key(run.rule)

    return sorted(map(compared, every), key=place)


def _ratio(cost: Cost, others: Sequence[Cost], what: str, note: str = "") -> tuple[float | None, str]:
    """Seconds per token over those of another run of the same tasks, and a note: which run, or why there is none."""
    if not others:
        return None, f"no {what} to compare with"
    same = [other for other in others if other.tasks == cost.tasks]
    if not same:
        return None, f"the {what} is of other tasks"
    if cost.cached or any(other.cached for other in same):
        return None, CACHED
    timed = [other for other in same if other.seconds_per_token]
    if timed and cost.seconds_per_token:
        alike = [other for other in timed if (other.device, other.ranks) == (cost.device, cost.ranks)]
        if not alike:
            return None, f"the {what} ran on {timed[0].device} x {timed[0].ranks}"
        return cost.seconds_per_token / alike[-1].seconds_per_token, note
    whole = [other for other in same if other.run.whole_run_seconds]
    if whole and cost.run.whole_run_seconds:
        ratio = cost.run.whole_run_seconds / whole[-1].run.whole_run_seconds
        return ratio, "; ".join(filter(None, [note, WHOLE]))
    return None, f"no time of the {what}"
