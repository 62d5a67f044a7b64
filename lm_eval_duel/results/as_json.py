"""report.json: the entries of records under their names in the file."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from lm_eval_duel.results import provenance
from lm_eval_duel.results.compare import ComparedRow, Comparison, Pair, Speeds
from lm_eval_duel.results.cost import RunCost
from lm_eval_duel.results.rows import Row
from lm_eval_duel.results.runs import Run
from lm_eval_duel.results.standings import Standings
from lm_eval_duel.results.table import Note

VALUE = (  # of a row alone
    *("model", "name", "estimator", "rule", "block", "cache=run.cache", "qualifiers", "unknown", "eps"),
    *("likelihood", "bound", "value", "stderr", "stderr_bound", "stderr_reason", "metrics", "nfe_per_token"),
    *("dtype=run.dtype", "fingerprint=run.fingerprint", "ar", "nfe", "tokens", "file=run.name"),
)
COMPARED = (  # of a row among others
    *("interval", "window_stderr", "reason=no_interval", "best", "gap", "gap_interval"),
    *("gap_closed=closed.percent", "gap_closed_stderr=closed.stderr", "gap_closed_interval=closed.interval"),
    *("distinguishable=closed.distinguishable", "gap_closed_reason=closed.reason", "gap_closed_of=closed.of"),
)
PAIR = ("names", "difference", "interval", "reason", "verdict")
COST = (
    *("model=run.label", "estimator=run.estimator", "name", "rule=run.rule", "block=run.block", "cache=run.cache"),
    *("ar=baseline", "tasks=time.tasks", "cached=run.cached", "tokens=time.tokens"),
    *("seconds_per_token=time.seconds_per_token", "whole_run_seconds=run.whole_run_seconds", "file=run.name"),
    *("times_elbo=over_elbo.value", "times_elbo_reason=over_elbo.reason"),
    *("times_ar=over_ar.value", "times_ar_reason=over_ar.reason"),
)
COUNTS = ("device", "ranks", "seconds", "forwards", "rows", "nfe", "peak_memory_bytes")  # entries of config.duel
METHOD = (
    *("label", "kind", "remarks", "fingerprint", "parameters", "versions", "date", "device"),
    *("nfe_per_token", "seconds_per_token", "seconds_reason"),
)
RUN = ("model=label", "estimator", "rule", "block", "cache", "dtype", "file=name")


def entries(record: Any, names: Iterable[str]) -> dict[str, Any]:
    """Entries of a record, as `name` or `name=attributes`."""
    found = {name: attrgetter(path or name)(record) for name, _, path in (name.partition("=") for name in names)}
    return {name: str(value) if isinstance(value, Note) else value for name, value in found.items()}


def row(of: ComparedRow) -> dict[str, Any]:
    """A row of report.json, but for its references to other rows."""
    stderrs = {metric: of.row.error(of.row.nats_stderr, metric) for metric in of.row.metrics}
    return entries(of.row, VALUE) | entries(of, COMPARED) | {"stderrs": stderrs}


def comparison(task: Comparison) -> dict[str, Any]:
    """A task of report.json; rows refer to each other by their numbers."""
    numbers: dict[Row | None, int | None] = {each.row: n for n, each in enumerate(task.rows)} | {None: None}

    def pair(of: Pair | None) -> dict[str, Any] | None:
        return of and {"first": numbers[of.first], "second": numbers[of.second]} | entries(of, PAIR)

    def speeds(of: Speeds) -> dict[str, Any]:
        lines = {key: numbers[getattr(of, key)] for key in ("elbo", "ar", "oracle")}
        families = {name: [numbers[each.row] for each in points] for name, points in of.families.items()}
        return {"title": of.title, **lines, "families": families}

    return {
        "metric": task.metric,
        "documents": task.documents,
        "rows": [
            row(each) | {"elbo": numbers[each.closed.elbo], "cache_cost": pair(each.cache_cost)} for each in task.rows
        ],
        "rules": list(map(speeds, task.rules)),
        "pairs": list(map(pair, task.pairs)),
        "differences": task.differences,
        "as_published": task.as_published,
        "notes": task.notes,
    }


def accuracies(runs: Sequence[Run], name: str, baselines: Collection[Run]) -> list[dict[str, Any]]:
    """The averages of a task other than perplexities, of each run that has any."""
    found = []
    for run in runs:
        scores = {metric: {"value": value, "stderr": error} for metric, (value, error) in run.scores(name).items()}
        if scores:
            identity = run.every_task[name].identity
            found.append(entries(run, RUN) | {"ar": run in baselines, "identity": identity, "scores": scores})
    return found


def cost(of: RunCost) -> dict[str, Any]:
    return entries(of, COST) | {key: of.run.duel.get(key) for key in COUNTS}


def ranking(found: Standings, tasks: Mapping[str, Comparison]) -> dict[str, Any]:
    """The methods over tasks. `rows`: the number of the row that a task has of a method."""
    numbers = {name: {each: n for n, each in enumerate(task.rows)} for name, task in tasks.items()}
    rows = []
    for standing in found.rows:
        method = standing.method
        rows.append(
            entries(method.named, ("model", "estimator", "rule", "block", "cache=run.cache"))
            | entries(method, METHOD)
            | entries(standing, ("main", "mean", "mean_rank", "rank"))
            | {"rows": {name: numbers[name][each] for name, each in method.rows.items()}}
            | {"commands": list(dict.fromkeys(map(provenance.command, method.runs)))}
        )
    return entries(found, ("mean_of", "metric", "by")) | {"rows": rows}
