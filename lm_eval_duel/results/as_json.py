"""report.json and leaderboard.json: the entries of records under their names in the file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

from lm_eval_duel.results.board import Board
from lm_eval_duel.results.compare import Comparison, Speeds
from lm_eval_duel.results.cost import RunCost
from lm_eval_duel.results.read import Run
from lm_eval_duel.results.rows import Pair, Row

GAP = (
    *("gap_closed", "gap_closed_stderr", "gap_closed_interval", "distinguishable", "gap_closed_reason"),
    *("nfe", "tokens", "file=run.name"),
)
ROW = (
    *("model", "name", "estimator", "rule", "block", "cache=run.cache", "qualifiers", "unknown", "eps"),
    *("likelihood", "bound", "value", "interval", "stderr", "stderr_bound", "stderr_reason"),
    *("window_stderr", "reason", "metrics", "nfe_per_token", "dtype=run.dtype", "fingerprint=run.fingerprint"),
    *("ar", "best", "gap", "gap_interval", *GAP),
)
PAIR = ("names", "difference", "interval", "reason", "verdict")
CELL = ("value", "interval", "stderr", "stderr_reason", "window_stderr", "reason", "gap", "gap_interval", *GAP)
COST = (
    *("model=run.label", "estimator=run.estimator", "name", "rule=run.rule", "block=run.block", "cache=run.cache"),
    *("ar=run.baseline", "tasks", "cached=run.cached", "tokens", "seconds_per_token"),
    *("whole_run_seconds=run.whole_run_seconds", "file=run.name"),
    *("times_elbo", "times_elbo_reason", "times_ar", "times_ar_reason"),
)
COUNTS = ("device", "ranks", "seconds", "forwards", "rows", "nfe", "peak_memory_bytes")  # entries of config.duel
RUN = ("model=label", "estimator", "rule", "block", "cache", "ar=baseline", "dtype", "file=name")
BOARD = ("title", "metric", "unit", "ar", "mean_of", "by", "published", "documents", "notes", "date")
COLUMN = ("id", "task", "label", "documents=compared.documents", "windows", "apart=difference")
BOARD_ROW = (
    *("model=named.model", "pretrained=named.run.pretrained", "estimator=named.estimator"),
    *("display=named.entry.display", "kind", "ranked", "rule", "block", "cache", "remarks"),
    *("autoregressive", "dtype=named.run.dtype", "fingerprint", "spec=named.run.spec"),
    *("parameters", "versions", "date", "files", "commands"),
    *("nfe_per_token", "seconds_per_token", "seconds_reason", "device", "mean", "mean_rank", "main", "rank"),
)


def entries(record: Any, names: Iterable[str]) -> dict[str, Any]:
    """Entries of a record, as `name` or `name=attributes`."""
    return {name: attrgetter(path or name)(record) for name, _, path in (name.partition("=") for name in names)}


def comparison(task: Comparison) -> dict[str, Any]:
    """A task of report.json; rows refer to each other by their numbers."""
    numbers: dict[Row | None, int | None] = {row: n for n, row in enumerate(task.rows)} | {None: None}

    def pair(of: Pair | None) -> dict[str, Any] | None:
        return of and {"first": numbers[of.first], "second": numbers[of.second]} | entries(of, PAIR)

    def speeds(of: Speeds) -> dict[str, Any]:
        lines = {key: numbers[getattr(of, key)] for key in ("elbo", "ar", "oracle")}
        families = {name: [numbers[row] for row in rows] for name, rows in of.families.items()}
        return {"title": of.title, **lines, "families": families}

    def row(of: Row) -> dict[str, Any]:
        stderrs = {metric: of.error(of.nats_stderr, metric) for metric in of.metrics}
        return entries(of, ROW) | {"stderrs": stderrs, "elbo": numbers[of.elbo], "cache_cost": pair(of.cache_cost)}

    rows = list(map(row, task.rows))
    return vars(task) | {"rows": rows, "rules": list(map(speeds, task.rules)), "pairs": list(map(pair, task.pairs))}


def accuracies(runs: Sequence[Run], name: str) -> list[dict[str, Any]]:
    """The averages of a task other than perplexities, of each run that has any."""
    found = []
    for run in sorted(runs, key=lambda run: not run.baseline):
        scores = {metric: {"value": value, "stderr": error} for metric, (value, error) in run.scores(name).items()}
        if scores:
            found.append(entries(run, RUN) | {"identity": run.every_task[name].identity, "scores": scores})
    return found


def cost(of: RunCost) -> dict[str, Any]:
    return entries(of, COST) | {key: of.run.duel.get(key) for key in COUNTS}


def cell(of: Row) -> dict[str, Any]:
    """A result of a leaderboard."""
    bits = "bits_per_byte"
    return entries(of, CELL) | {bits: of.metrics.get(bits), f"{bits}_stderr": of.error(of.nats_stderr, bits)}


def board(of: Board) -> dict[str, Any]:
    """leaderboard.json."""
    columns = [entries(column, COLUMN) for column in of.columns]
    rows = [entries(row, BOARD_ROW) | {"cells": {c: cell(r) for c, r in row.results.items()}} for row in of.rows]
    return entries(of, BOARD) | {"columns": columns, "rows": rows}
