"""A leaderboard: its columns, and its rows with ranks and means. Views display it and compute nothing."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from lm_eval_duel.estimators import registry
from lm_eval_duel.results import compare, run_cost
from lm_eval_duel.results.leaderboard.columns import TaskColumn
from lm_eval_duel.results.leaderboard.provenance import Provenance
from lm_eval_duel.results.read import Run
from lm_eval_duel.results.records import Average, Row, entries
from lm_eval_duel.results.rows import NON_IDENTITY_KEYS
from lm_eval_duel.results.table import WORDS
from lm_eval_duel.rules.tables import sort_key, without_defaults

KINDS = {  # of a row: what is said about it
    "exact": "an exact likelihood",
    "estimate": "an estimate of a likelihood; +- is its own standard error",
    "bound": "an upper bound of the perplexity: the true value is at or below it",
    "no bound": "a Monte Carlo ELBO that leaves out small noise levels (elbo_eps above 0), so it bounds nothing",
    "oracle": "not a likelihood: it sees the targets",
}
CELL = (  # the entries of a result in leaderboard.json, as in those of a report
    *("value", "interval", "stderr", "stderr_reason", "window_stderr", "reason", "gap", "gap_interval"),
    *(name for name in Row.JSON if name.startswith(("gap_closed", "distinguishable"))),
    *("nfe", "tokens", "file=run.name"),
)


@dataclasses.dataclass(frozen=True)
class BoardRow:
    """One model under an estimator, rule, block and cache: its results, by the id of their column.

    `average`: its gap closed over tasks. `main`: the value that rows are ranked by.
    """

    results: dict[str, Row]
    average: Average | None
    remarks: str
    mean: float | None = None
    mean_stderr: float | None = None
    mean_rank: float | None = None
    main: float | None = None
    rank: int | None = None

    JSON: ClassVar = (
        *("model", "pretrained", "estimator", "display", "kind", "about", "ranked", "rule", "block", "cache"),
        *(
            "remarks",
            "autoregressive",
            "baseline",
            "gap_closed",
            "gap_closed_stderr",
            "gap_closed_tasks",
            "dtype=first.run.dtype",
        ),
        *("fingerprint", "spec", "cells", "parameters", "versions", "date", "files", "commands", "datasets"),
        *("nfe_per_token", "seconds_per_token", "seconds_reason", "device"),
        *("mean", "mean_stderr", "mean_rank", "main", "rank"),
    )

    # ------------------------------------------------------------ what it is

    @property
    def first(self) -> Row:
        return next(iter(self.results.values()))

    @property
    def runs(self) -> list[Run]:
        return [*{result.run.file: result.run for result in self.results.values()}.values()]

    model = property(lambda self: self.first.model)
    pretrained = property(lambda self: self.first.run.pretrained)
    estimator = property(lambda self: self.first.estimator)
    display = property(lambda self: self.first.entry.display)
    rule = property(lambda self: without_defaults(self.first.rule or ""))
    block = property(lambda self: self.first.block or "")
    autoregressive = property(lambda self: self.first.run.autoregressive)
    baseline = property(lambda self: any(result.ar for result in self.results.values()))
    spec = property(lambda self: self.first.run.spec)

    @property
    def cache(self) -> str:
        return self.spec.get("cache", "none") if self.first.run.ours and not self.autoregressive else ""

    @property
    def kind(self) -> str:
        """A key of KINDS."""
        result = self.first
        if not result.likelihood:
            return "oracle"
        if result.entry.kind is registry.Kind.UPPER_BOUND:
            return "bound" if result.bound else "no bound"
        return "exact" if result.proper and result.stderr is None else "estimate"

    @property
    def about(self) -> str:
        return KINDS[self.kind]

    @property
    def ranked(self) -> bool:
        """Whether it may have a rank: a bound may be far above its model's value, the oracle is no likelihood."""
        return self.kind in ("exact", "estimate")

    @property
    def label(self) -> str:
        """Its name without the model."""
        return ", ".join(filter(None, [self.display, self.rule, *self.first.setting, self.remarks]))

    # ------------------------------------------------------------ gap closed and cost, over its tasks

    gap_closed = property(lambda self: self.average and self.average.average)
    gap_closed_stderr = property(lambda self: self.average and self.average.average_stderr)
    gap_closed_tasks = property(lambda self: self.average.averaged if self.average else 0)

    @property
    def nfe_per_token(self) -> float | None:
        counted = [result for result in self.results.values() if result.nfe and result.tokens]
        return sum(r.nfe for r in counted) / sum(r.tokens for r in counted) if counted else None

    @functools.cached_property
    def costs(self) -> list[run_cost.Cost]:
        return [run_cost.Cost(run) for run in self.runs]

    @property
    def devices(self) -> list[str]:
        return sorted({f"{cost.device or 'unknown device'} x {cost.ranks or 1}" for cost in self.costs})

    device = property(lambda self: ", ".join(self.devices))

    @property
    def seconds_reason(self) -> str:
        """Why `seconds_per_token` is not known."""
        if any(cost.cached for cost in self.costs):
            return run_cost.CACHED
        if not all(cost.tokens and cost.seconds for cost in self.costs):
            return "the results hold no time of the scoring alone"
        return f"its tasks ran on {' and '.join(self.devices)}" if len(self.devices) > 1 else ""

    @property
    def seconds_per_token(self) -> float | None:
        """Of scoring. Rows of one lattice run share its time."""
        if self.seconds_reason:
            return None
        return sum(cost.seconds for cost in self.costs) / sum(cost.tokens for cost in self.costs)

    # ------------------------------------------------------------ where it comes from

    fingerprint = property(
        lambda self: ", ".join(dict.fromkeys(run.fingerprint for run in self.runs if run.fingerprint))
    )
    files = property(lambda self: [run.name for run in self.runs])
    parameters = property(lambda self: next(filter(None, (origin.parameters for origin in self.provenance)), None))
    date = property(lambda self: max(origin.date for origin in self.provenance))
    commands = property(lambda self: [*dict.fromkeys(origin.command for origin in self.provenance)])
    datasets = property(lambda self: {k: v for origin in self.provenance for k, v in origin.datasets.items()})

    @functools.cached_property
    def provenance(self) -> list[Provenance]:
        return [*map(Provenance.from_run, self.runs)]

    @property
    def versions(self) -> dict[str, str]:
        every: dict[str, dict[str, None]] = {}
        for name, version in (item for origin in self.provenance for item in origin.versions.items()):
            every.setdefault(name, {})[version] = None
        return {name: ", ".join(versions) for name, versions in every.items()}

    @property
    def cells(self) -> dict[str, dict[str, Any]]:
        bits = "bits_per_byte"
        return {
            column: entries(result, CELL) | {bits: result.metrics.get(bits), f"{bits}_stderr": result.stderrs.get(bits)}
            for column, result in self.results.items()
        }


@dataclasses.dataclass(frozen=True)
class Board:
    """A leaderboard. `ar`: the model of the gaps. `mean_of`: the ids of the columns that means are over. `by`: `mean`,
    or the id of the column that rows are ranked in.
    """

    title: str
    metric: str
    ar: str | None
    mean_of: list[str]
    by: str
    columns: list[TaskColumn]
    rows: list[BoardRow]
    published: list[dict[str, Any]]
    documents: list[dict[str, Any]]
    notes: list[str]
    date: str

    JSON: ClassVar = (
        *(
            "title",
            "metric",
            "unit",
            "ar",
            "mean_of",
            "by",
            "columns",
            "rows",
            "published",
            "documents",
            "notes",
            "date",
        ),
    )

    @property
    def unit(self) -> str:
        return WORDS[self.metric]

    @property
    def ranked_by(self) -> str:
        """A description of what rows are ranked by."""
        labels = {column.id: column.label for column in self.columns}
        return "the mean over tasks" if self.by == "mean" else f"{self.unit} of {labels[self.by]}"

    @property
    def groups(self) -> list[tuple[str, list[BoardRow]]]:
        """The rows that stand together, with a title: the oracle's are apart from those that say something."""
        oracles = [row for row in self.rows if row.kind == "oracle"]
        others = [row for row in self.rows if row.kind != "oracle"]
        return [group for group in (("", others), (f"Oracle: {KINDS['oracle']}", oracles)) if group[1]]


# ---------------------------------------------------------------- rows


def rows(columns: Sequence[TaskColumn]) -> list[BoardRow]:
    """A row for each model under an estimator, rule, block and cache, with a result for each column that it is in."""
    averages = {(a.model, a.name): a for a in compare.averages({c.id: c.compared.rows for c in columns})}
    merged: dict[tuple, dict[str, Row]] = {}
    for column in columns:
        for result in column.compared.rows:
            merged.setdefault(_identity(result), {})[column.id] = result
    joined = []
    for results in merged.values():
        names = [(result.model, result.name) for result in results.values()]
        average = next((averages[name] for name in reversed(names) if name in averages), None)
        joined.append(BoardRow(results, average, max(map(_qualifiers, results.values()), key=len)))
    return [replace(row, remarks=", ".join(filter(None, [row.remarks, *_specifics(row, joined)]))) for row in joined]


def _identity(result: Row) -> tuple:
    """What rows of several tasks share. The draws of an estimate belong to it."""
    drawn = result.stderr is not None or result.entry.drawn
    varies = {"estimator", "rule"} if drawn else NON_IDENTITY_KEYS
    spec = tuple(sorted((key, value) for key, value in result.run.spec.items() if key not in varies))
    return result.run.key, result.estimator, result.rule, result.block, result.bound, spec


def _qualifiers(result: Row) -> str:
    """What distinguishes a row beyond model, estimator, rule, block and cache."""
    parts = [part for part in result.qualifiers.split(", ") if not part.startswith("cache=")]
    return ", ".join(filter(None, [*parts, result.unknown_share]))


def _specifics(row: BoardRow, rows: Sequence[BoardRow]) -> list[str]:
    """What distinguishes rows of one name: they are in different columns, so the report had no need to say it."""
    specs = [other.spec for other in rows if (other.model, other.label) == (row.model, row.label)]
    keys = dict.fromkeys(key for spec in specs for key in spec if len({s.get(key) for s in specs}) > 1)
    return [f"{k}={row.spec.get(k, 'not set')}" for k in keys if k not in ("estimator", "rule", "cache")]


# ---------------------------------------------------------------- ranks and means


def ranked(rows: Sequence[BoardRow], columns: Sequence[TaskColumn], metric: str) -> tuple[list[BoardRow], list[str]]:
    """The rows with means and ranks, in order, and the ids of the columns that means are over.

    The mean is over the columns that all rows have (the oracle aside); with fewer than two there is none. Rows are
    ranked by it, or else in the column with the most rows.
    """
    needed = [row for row in rows if row.kind != "oracle"]
    common = [c.id for c in columns if needed and all(_finite(_value(row, c.id)) for row in needed)]
    common, by = common if len(common) > 1 else [], most_rows(columns)
    valued = []
    for row in rows:
        mean, error = _mean(row, common, metric)
        valued.append(replace(row, mean=mean, mean_stderr=error, main=mean if common else _value(row, by)))
    best = [row for row in valued if row.ranked and _finite(row.main)]

    def placed(row: BoardRow) -> BoardRow:
        if not (row.ranked and _finite(row.main)):
            return row
        places = [1 + sum(_value(other, c) < _value(row, c) for other in best) for c in common]
        mean_rank = sum(places) / len(places) if places else None
        return replace(row, rank=1 + sum(other.main < row.main for other in best), mean_rank=mean_rank)

    models, names = list(dict.fromkeys(row.model for row in rows)), [*registry.ESTIMATORS]

    def order(row: BoardRow) -> tuple:
        main = row.main if _finite(row.main) else math.inf
        return row.kind == "oracle", main, models.index(row.model), names.index(row.estimator), sort_key(row.rule)

    return sorted(map(placed, valued), key=order), common


def most_rows(columns: Sequence[TaskColumn]) -> str:
    """The id of the column that rows are ranked in if there is no mean."""
    return max(columns, key=lambda column: len(column.compared.rows)).id


def _mean(row: BoardRow, common: Sequence[str], metric: str) -> tuple[float | None, float | None]:
    """The geometric mean of perplexities, or the mean of bits per byte, and its standard error if results have one."""
    if not common or not all(_finite(_value(row, column)) for column in common):
        return None, None
    results = [row.results[column] for column in common]
    values, errors = [result.value for result in results], [result.stderr for result in results]
    known = None not in errors
    if metric == "bits_per_byte":
        return math.fsum(values) / len(values), math.hypot(*errors) / len(values) if known else None
    mean = math.exp(math.fsum(map(math.log, values)) / len(values))
    relative = math.hypot(*(e / v for e, v in zip(errors, values, strict=True))) / len(values) if known else None
    return mean, None if relative is None else mean * relative


def _value(row: BoardRow, column: str) -> float | None:
    return row.results[column].value if column in row.results else None


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
