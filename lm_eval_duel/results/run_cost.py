"""The cost of runs: seconds, network calls and memory, compared with the ELBO and the AR model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from lm_eval_duel.estimators import registry
from lm_eval_duel.results.read import Run
from lm_eval_duel.results.records import SEES_TRUTH, OfWholeRun, Row
from lm_eval_duel.rules.tables import sort_key

WHOLE = "times of whole runs, loading included: results of other models hold no other time, and no device"
COUNTED = ("device", "ranks", "seconds", "forwards", "rows", "nfe", "peak_memory_bytes")  # entries of config.duel
CACHED = "some answers came from a response cache, so the time covers only a part of the run"


@dataclasses.dataclass(frozen=True)
class Cost(OfWholeRun):
    """What a run cost. `times_elbo`, `times_ar`: its seconds per token over those of another run; if there is none, the
    reason says why."""

    run: Run
    ar: bool = False
    times_elbo: float | None = None
    times_elbo_reason: str = ""
    times_ar: float | None = None
    times_ar_reason: str = ""

    JSON: ClassVar = (
        *("model", "estimator", "name", "flag", "rule", "block", "cache", "ar", "tasks", "cached", "device", "ranks"),
        *("tokens", "seconds", "whole_run_seconds", "forwards", "rows", "nfe", "peak_memory_bytes", "file"),
        *("seconds_per_token", "times_elbo", "times_elbo_reason", "times_ar", "times_ar_reason"),
    )

    def __getattr__(self, key: str) -> Any:
        """Seconds, device, forwards and the like: entries of `config.duel`, None if the results have none."""
        if key in COUNTED:
            return self.run.duel.get(key)
        raise AttributeError(key)

    @property
    def name(self) -> str:
        return "lattice: all estimators in one run" if registry.find(self.estimator).lattice else self.estimator

    @property
    def flag(self) -> str:
        return f"oracle is {SEES_TRUTH}" if registry.find(self.estimator).lattice else ""

    @property
    def tasks(self) -> list[str]:
        return sorted([*self.run.tasks, *self.run.others])

    @property
    def cached(self) -> bool:
        """Whether answers may have come from a response cache."""
        return self.run.cached

    @property
    def whole_run_seconds(self) -> float | None:
        return self.run.whole_run_seconds

    @property
    def tokens(self) -> int | None:
        """Of a run of another model, from its samples."""
        counts = [task.tokens for task in self.run.tasks.values()]
        known = None if None in counts else int(sum(sum(of_task.values()) for of_task in counts))
        return self.run.duel.get("tokens") or known or None

    @property
    def seconds_per_token(self) -> float | None:
        return self.seconds / self.tokens if self.seconds and self.tokens else None


def table(runs: Sequence[Run], ar: Sequence[Run], tasks: Mapping[str, Sequence[Row]]) -> list[Cost]:
    """One entry per run. Ratios are of seconds per token; they are left out if two runs cannot be compared.

    The ELBO is the one that gap closed uses in the report's `tasks`.
    """
    baseline = {run.file for run in ar}
    everything = [*ar, *(run for run in runs if run.file not in baseline)]
    costs = {run.name: Cost(run, run.file in baseline) for run in everything if run.tasks}
    elbos: dict[str, Row] = {}  # file of a run -> the Monte Carlo ELBO that its gap closed uses
    for rows in tasks.values():
        for row in rows:
            if row.elbo is not None and rows[row.elbo].estimator == "elbo":
                elbos.setdefault(row.file, rows[row.elbo])
    models, order = [cost.model for cost in costs.values()], [*registry.ESTIMATORS]
    return sorted(
        (_compared(cost, elbos.get(name), costs) for name, cost in costs.items()),
        key=lambda cost: (not cost.ar, models.index(cost.model), order.index(cost.estimator), *sort_key(cost.rule)),
    )


def _compared(cost: Cost, elbo: Row | None, costs: Mapping[str, Cost]) -> Cost:
    if cost.ar:
        return cost
    ratio, reason = _ratio(cost, [other for other in costs.values() if other.ar], "AR run", "")
    cost = dataclasses.replace(cost, times_ar=ratio, times_ar_reason=reason)
    if cost.estimator == "elbo":
        return cost
    note = f"the ELBO of {cost.model}: {elbo.name}, mc_samples={elbo.mc_samples}" if elbo else ""
    ratio, reason = _ratio(cost, [costs[elbo.file]] if elbo else [], "Monte Carlo ELBO", note)
    return dataclasses.replace(cost, times_elbo=ratio, times_elbo_reason=reason)


def _ratio(cost: Cost, others: Sequence[Cost], what: str, note: str) -> tuple[float | None, str]:
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
    whole = [other for other in same if other.whole_run_seconds]
    if whole and cost.whole_run_seconds:
        return cost.whole_run_seconds / whole[-1].whole_run_seconds, "; ".join(filter(None, [note, WHOLE]))
    return None, f"no time of the {what}"
