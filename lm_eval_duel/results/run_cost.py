"""The cost of runs: seconds, network calls and memory, compared with the ELBO and the AR model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from lm_eval_duel.estimators import registry
from lm_eval_duel.results.read import Run
from lm_eval_duel.results.records import SEES_TRUTH, Row
from lm_eval_duel.rules.tables import place

WHOLE = "times of whole runs, loading included: results of other models hold no other time, and no device"
CACHED = "some answers came from a response cache, so the time covers only a part of the run"


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a run cost. `times_elbo`, `times_ar`: its seconds per token over those of another run; if there is none, the
    reason says why."""

    model: str
    estimator: str
    name: str
    flag: str
    rule: str | None
    block: str | None
    cache: str | None
    ar: bool
    tasks: list[str]
    cached: bool
    device: str | None
    ranks: int | None
    tokens: int | None
    seconds: float | None
    whole_run_seconds: float | None
    forwards: int | None
    rows: int | None
    nfe: int | None
    peak_memory_bytes: int | None
    file: str
    seconds_per_token: float | None
    times_elbo: float | None = None
    times_elbo_reason: str = ""
    times_ar: float | None = None
    times_ar_reason: str = ""


def table(runs: Sequence[Run], ar: Sequence[Run], tasks: Mapping[str, Sequence[Row]]) -> list[Cost]:
    """One entry per run. Ratios are of seconds per token; they are left out if two runs cannot be compared.

    The ELBO is the one that gap closed uses in the report's `tasks`.
    """
    autoregressive = {run.file for run in ar}
    everything = [*ar, *(run for run in runs if run.file not in autoregressive)]
    costs = [of(run, run.file in autoregressive) for run in everything if run.tasks]
    files = {cost.file: cost for cost in costs}
    elbos: dict[str, Row] = {}  # file of a run -> the Monte Carlo ELBO that its gap closed uses
    for rows in tasks.values():
        for row in rows:
            if row.elbo is not None and rows[row.elbo].estimator == "elbo":
                elbos.setdefault(row.run.name, rows[row.elbo])
    models, order = [cost.model for cost in costs], [*registry.ESTIMATORS]
    return sorted(
        (_compared(cost, elbos.get(cost.file), files) for cost in costs),
        key=lambda cost: (not cost.ar, models.index(cost.model), order.index(cost.estimator), *place(cost.rule)),
    )


def of(run: Run, ar: bool = False) -> Cost:
    """The cost of a run, without ratios."""
    duel, lattice = run.duel, registry.find(run.estimator).lattice
    tokens = duel.get("tokens") or _counted(run)
    seconds = duel.get("seconds")
    return Cost(
        model=run.label,
        estimator=run.estimator,
        name="lattice: all estimators in one run" if lattice else run.estimator,
        flag=f"oracle is {SEES_TRUTH}" if lattice else "",
        rule=run.rule,
        block=run.block if run.ours and run.estimator != "ar" else None,
        cache=run.cache if run.estimator != "ar" else None,
        ar=ar,
        tasks=sorted([*run.tasks, *run.others]),
        cached=run.cached,
        tokens=tokens,
        whole_run_seconds=run.whole_run_seconds,
        file=run.name,
        seconds_per_token=seconds / tokens if seconds and tokens else None,
        **{
            key: duel.get(key) for key in ("device", "ranks", "seconds", "forwards", "rows", "nfe", "peak_memory_bytes")
        },
    )


def _counted(run: Run) -> int | None:
    """Tokens of a run of another model, from its samples."""
    total = 0.0
    for task in run.tasks.values():
        if task.documents is None or any("token_perplexity" not in d.values for d in task.documents):
            return None
        total += sum(document.values["token_perplexity"][1] for document in task.documents)
    return int(total) or None


def _compared(cost: Cost, elbo: Row | None, files: Mapping[str, Cost]) -> Cost:
    if cost.ar:
        return cost
    times_ar, ar_reason = _ratio(cost, [other for other in files.values() if other.ar], "AR run", "")
    cost = dataclasses.replace(cost, times_ar=times_ar, times_ar_reason=ar_reason)
    if cost.estimator == "elbo":
        return cost
    note = f"the ELBO of {cost.model}: {elbo.name}, mc_samples={elbo.run.spec['mc_samples']}" if elbo else ""
    ratio, reason = _ratio(cost, [files[elbo.run.name]] if elbo else [], "Monte Carlo ELBO", note)
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
