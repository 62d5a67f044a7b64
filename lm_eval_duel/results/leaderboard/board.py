"""A leaderboard as one dict: its columns, its rows with ranks and means, and notes. Outputs only display it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lm_eval_duel.estimators import registry
from lm_eval_duel.results import compare, run_cost
from lm_eval_duel.results.leaderboard.columns import Column
from lm_eval_duel.results.leaderboard.provenance import Provenance
from lm_eval_duel.results.read import Run
from lm_eval_duel.results.records import Row as Result
from lm_eval_duel.results.rows import VARIES
from lm_eval_duel.rules.tables import place, short

KINDS = {  # of a row: what is said about it
    "exact": "an exact likelihood",
    "estimate": "an estimate of a likelihood; +- is its own standard error",
    "bound": "an upper bound of the perplexity: the true value is at or below it",
    "no bound": "a Monte Carlo ELBO that leaves out small noise levels (elbo_eps above 0), so it bounds nothing",
    "oracle": "not a likelihood: it sees the targets",
}
RANKED = ("exact", "estimate")
CELL = (  # the entries of a row of report.build that a cell has
    *("value", "interval", "stderr", "stderr_reason", "window_stderr", "reason"),
    *("gap", "gap_interval", "gap_closed", "gap_closed_interval", "gap_closed_stderr", "gap_closed_reason"),
    *("distinguishable", "nfe", "tokens"),
)
Entry = Mapping[str, Any]


def rows(columns: Sequence[Column], runs: Sequence[Run], provenances: Mapping[str, Provenance]) -> list[dict[str, Any]]:
    """A row for each model under an estimator, rule, block and cache, with a cell for each column that it is in."""
    by_name = {run.name: run for run in runs}
    averages = {(row.model, row.name): row for row in compare.averages({c.id: c.entries for c in columns})}
    merged: dict[tuple, dict[str, Any]] = {}
    for column in columns:
        for entry in column.entries:
            run = by_name[entry.run.name]
            row = merged.setdefault(_identity(run, entry), _row(run, entry))
            row["cells"][column.id] = _cell(entry)
            row["remarks"] = max(row["remarks"], _remarks(entry), key=len)
            row["baseline"] |= entry.ar
            if average := averages.get((entry.model, entry.name)):
                row["gap_closed"], row["gap_closed_stderr"] = average.average, average.average_stderr
                row["gap_closed_tasks"] = average.averaged
    everything = list(merged.values())
    _tell_apart(everything)
    for row in everything:
        files = list(dict.fromkeys(cell["file"] for cell in row["cells"].values()))
        row |= _sources([provenances[file] for file in files], [by_name[file] for file in files])
        row |= _cost([run_cost.Cost(by_name[file]) for file in files], row["cells"].values())
    return everything


def _identity(run: Run, entry: Result) -> tuple:
    """What rows of several tasks share. The draws of an estimate belong to it."""
    drawn = entry.stderr is not None or entry.stderr_reason or entry.entry.drawn
    varies = {"estimator", "rule"} if drawn else VARIES
    spec = tuple(sorted((key, value) for key, value in run.spec.items() if key not in varies))
    return run.key, entry.estimator, entry.rule, entry.block, spec


def _row(run: Run, entry: Result) -> dict[str, Any]:
    kind = _kind(entry)
    return {
        "model": run.label,
        "pretrained": run.pretrained,
        "estimator": entry.estimator,
        "display": entry.entry.display,
        "kind": kind,
        "about": KINDS[kind],
        "ranked": kind in RANKED,
        "rule": short(entry.rule) if entry.rule else "",
        "block": entry.block or "",
        "cache": run.spec.get("cache", "none") if run.ours and not run.autoregressive else "",
        "remarks": "",
        "autoregressive": run.autoregressive,
        "baseline": False,
        "gap_closed": None,
        "gap_closed_stderr": None,
        "gap_closed_tasks": 0,
        "dtype": run.dtype,
        "fingerprint": run.fingerprint or "",
        "spec": dict(run.spec),
        "cells": {},
    }


def _kind(entry: Result) -> str:
    kind = entry.entry.kind
    if kind is registry.Kind.NOT_A_LIKELIHOOD:
        return "oracle"
    if kind is registry.Kind.UPPER_BOUND:
        return "bound" if entry.bound else "no bound"
    return "exact" if kind is registry.Kind.LIKELIHOOD and entry.stderr is None else "estimate"


def _cell(entry: Result) -> dict[str, Any]:
    cell = {key: getattr(entry, key) for key in CELL}
    return cell | {
        "file": entry.run.name,
        "bits_per_byte": entry.metrics.get("bits_per_byte"),
        "bits_per_byte_stderr": entry.stderrs.get("bits_per_byte"),
    }


def _remarks(entry: Result) -> str:
    """What distinguishes a row beyond model, estimator, rule, block and cache."""
    parts = [part for part in entry.qualifiers.split(", ") if part and not part.startswith("cache=")]
    return ", ".join(filter(None, [*parts, entry.unknown_share]))


def label(row: Entry) -> str:
    """The name of a row, without its model."""
    block = "" if not row["block"] else "whole target" if row["block"] == "none" else f"block {row['block']}"
    cache = f"cache={row['cache']}" if row["cache"] not in ("", "none") else ""
    return ", ".join(filter(None, [row["display"], row["rule"], block, cache, row["remarks"]]))


def _tell_apart(everything: Sequence[dict[str, Any]]) -> None:
    """Add what distinguishes rows of one name: they are in different columns, so the report had no need to."""
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for row in everything:
        groups.setdefault((row["model"], label(row)), []).append(row)
    for group in groups.values():
        specs = [row["spec"] for row in group]
        keys = dict.fromkeys(key for spec in specs for key in spec if len({s.get(key) for s in specs}) > 1)
        keys = [key for key in keys if key not in ("estimator", "rule", "cache")]
        for row in group if keys else ():
            parts = [row["remarks"], *(f"{key}={row['spec'].get(key, 'not set')}" for key in keys)]
            row["remarks"] = ", ".join(filter(None, parts))


def _sources(sources: Sequence[Provenance], runs: Sequence[Run]) -> dict[str, Any]:
    """Versions, dates, files and commands of a row."""
    versions: dict[str, list[str]] = {}
    for source in sources:
        for name, version in source.versions.items():
            versions.setdefault(name, []).append(version)
    fingerprints = [run.fingerprint for run in runs if run.fingerprint]
    return {
        "fingerprint": ", ".join(dict.fromkeys(fingerprints)),
        "parameters": next((source.parameters for source in sources if source.parameters), None),
        "versions": {name: ", ".join(dict.fromkeys(releases)) for name, releases in versions.items()},
        "date": max((source.date for source in sources), default=""),
        "files": [source.file for source in sources],
        "commands": list(dict.fromkeys(source.command for source in sources)),
        "datasets": {name: dataset for source in sources for name, dataset in source.datasets.items()},
    }


def _cost(costs: Sequence[run_cost.Cost], cells: Iterable[Entry]) -> dict[str, Any]:
    """NFE and seconds per token over all tasks of a row. Rows of one lattice run share its time."""
    counted = [cell for cell in cells if cell["nfe"] and cell["tokens"]]
    devices = {f"{cost.device or 'unknown device'} x {cost.ranks or 1}" for cost in costs}
    tokens, seconds = [cost.tokens for cost in costs], [cost.seconds for cost in costs]
    why = ""
    if any(cost.cached for cost in costs):
        why = run_cost.CACHED
    elif not all(tokens) or not all(seconds):
        why = "the results hold no time of the scoring alone"
    elif len(devices) > 1:
        why = f"its tasks ran on {' and '.join(sorted(devices))}"
    return {
        "nfe_per_token": sum(c["nfe"] for c in counted) / sum(c["tokens"] for c in counted) if counted else None,
        "seconds_per_token": None if why else sum(seconds) / sum(tokens),
        "seconds_reason": why,
        "device": ", ".join(sorted(devices)),
    }


# ---------------------------------------------------------------- ranks and means


def rank(everything: Sequence[dict[str, Any]], columns: Sequence[Column], metric: str) -> dict[str, Any]:
    """Write means and ranks into rows, sort them, and return what they are ranked by.

    The mean is over the columns that all rows have (the oracle aside); with fewer than two there is none. Rows are
    ranked by it, or else in the column with the most rows. Only likelihoods, exact or estimated, have ranks: a bound
    may be far above its model's value, and the oracle is no likelihood.
    """
    needed = [row for row in everything if row["kind"] != "oracle"]
    common = [c.id for c in columns if needed and all(_finite(row, c.id) for row in needed)]
    common = common if len(common) > 1 else []
    for row in everything:
        row["mean"], row["mean_stderr"] = _mean(row, common, metric)
        row["mean_rank"] = None
    by = None if common else max(columns, key=lambda c: len(c.entries), default=None)
    for row in everything:
        row["main"] = row["mean"] if common else row["cells"].get(by.id, {}).get("value") if by else None
    ranked = [row for row in everything if row["ranked"] and _number(row["main"])]
    for row in everything:
        row["rank"] = 1 + sum(o["main"] < row["main"] for o in ranked) if any(row is r for r in ranked) else None
    if common:
        _mean_ranks(ranked, common)
    models = list(dict.fromkeys(row["model"] for row in everything))
    names = [*registry.ESTIMATORS]
    everything.sort(  # type: ignore[attr-defined]
        key=lambda r: (
            r["kind"] == "oracle",
            r["main"] if _number(r["main"]) else math.inf,
            models.index(r["model"]),
            names.index(r["estimator"]),
            place(r["rule"]),
        )
    )
    return {"mean_of": common, "by": "mean" if common else by.id if by else None}


def _mean_ranks(ranked: Sequence[dict[str, Any]], common: Sequence[str]) -> None:
    """The mean over tasks of a row's rank in each."""
    for row in ranked:
        places = [1 + sum(other["cells"][c]["value"] < row["cells"][c]["value"] for other in ranked) for c in common]
        row["mean_rank"] = sum(places) / len(places)


def _mean(row: Mapping[str, Any], common: Sequence[str], metric: str) -> tuple[float | None, float | None]:
    """The geometric mean of perplexities, or the mean of bits per byte, and its standard error if cells have one."""
    if not common or not all(_finite(row, column) for column in common):
        return None, None
    cells = [row["cells"][column] for column in common]
    values, errors = [cell["value"] for cell in cells], [cell["stderr"] for cell in cells]
    known = None not in errors
    if metric == "bits_per_byte":
        return math.fsum(values) / len(values), math.hypot(*errors) / len(values) if known else None
    mean = math.exp(math.fsum(map(math.log, values)) / len(values))
    relative = math.hypot(*(e / v for e, v in zip(errors, values, strict=True))) / len(values) if known else None
    return mean, None if relative is None else mean * relative


def _finite(row: Mapping[str, Any], column: str) -> bool:
    return column in row["cells"] and _number(row["cells"][column]["value"])


def _number(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
