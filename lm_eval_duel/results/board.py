"""A leaderboard: comparable results of a task share a column, rows have ranks and means. Views compute nothing."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from lm_eval_duel.core.rates import METRICS
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators import registry
from lm_eval_duel.estimators.registry import Kind
from lm_eval_duel.results import compare, match, provenance
from lm_eval_duel.results.cost import CACHED, RunCost
from lm_eval_duel.results.match import PER_TOKEN
from lm_eval_duel.results.read import Run
from lm_eval_duel.results.rows import NON_IDENTITY_KEYS, Row, argument, differing_keys
from lm_eval_duel.results.table import WORDS
from lm_eval_duel.rules.tables import sort_key, without_defaults

KINDS = {  # of a row: what is said about it
    "exact": "an exact likelihood",
    "estimate": "an estimate of a likelihood; ± is its own standard error",
    "bound": "an upper bound of the perplexity: the true value is at or below it",
    "no bound": "a Monte Carlo ELBO that leaves out small noise levels (elbo_eps above 0), so it bounds nothing",
    "oracle": "not a likelihood: it sees the targets",
}


@dataclasses.dataclass(eq=False)
class TaskColumn:
    """Results of one task that may be compared. `apart`: how they differ from the task's first column."""

    id: str
    task: str
    runs: list[Run]
    apart: str
    compared: compare.Comparison
    label: str = ""  # the task, and what tells its columns apart

    @property
    def documents(self) -> int | None:
        """The number of documents, if it is known."""
        return next((run.tasks[self.task].size for run in self.runs if run.tasks[self.task].size is not None), None)

    @property
    def windows(self) -> list[str]:
        """The way in which its runs cut documents."""
        return [*dict.fromkeys(match.windows_of(run) for run in self.runs)]


class BoardRow:
    """One model under an estimator, rule, block and cache: its results, by the id of their column."""

    def __init__(self, results: dict[str, Row]):
        self.results = results
        self.first = first = next(iter(results.values()))
        self.run = first.run
        self.model, self.estimator, self.display = first.model, first.estimator, first.entry.display
        self.rule, self.block = without_defaults(first.rule or ""), first.block or ""
        self.cache = first.run.cache or ""
        self.autoregressive = first.run.autoregressive
        self.remarks = max(map(_qualifiers, results.values()), key=len)
        self.runs = [*{row.run.name: row.run for row in results.values()}.values()]
        self.files, self.pretrained, self.spec = [run.name for run in self.runs], first.run.pretrained, first.run.spec
        self.fingerprint = ", ".join(dict.fromkeys(run.fingerprint for run in self.runs if run.fingerprint))
        self.parameters = next(filter(None, (run.duel.get("parameters") for run in self.runs)), None)
        self.versions = provenance.versions(self.runs)
        self.date = max(map(provenance.date, self.runs))
        self.commands = [*dict.fromkeys(map(provenance.command, self.runs))]
        self._add_costs()
        self.mean: float | None = None
        self.mean_rank: float | None = None
        self.main: float | None = None  # the value that rows are ranked by
        self.rank: int | None = None

    def _add_costs(self) -> None:
        """NFE and seconds per token, over its tasks. Rows of one lattice run share its time."""
        counted = [row for row in self.results.values() if row.nfe and row.tokens]
        tokens = sum(row.tokens for row in counted)
        self.nfe_per_token = sum(row.nfe for row in counted) / tokens if counted else None
        costs = list(map(RunCost, self.runs))
        places = sorted({cost.place for cost in costs}, key=str)
        self.device = ", ".join(f"{device or 'unknown device'} x {ranks or 1}" for device, ranks in places)
        self.seconds_reason = f"its tasks ran on {self.device}" if len(places) > 1 else ""
        if any(run.cached for run in self.runs):
            self.seconds_reason = CACHED
        elif not all(cost.seconds_per_token for cost in costs):
            self.seconds_reason = "the results hold no time of the scoring alone"
        seconds = None if self.seconds_reason else sum(cost.seconds for cost in costs)
        self.seconds_per_token = None if seconds is None else seconds / sum(cost.tokens for cost in costs)

    @property
    def kind(self) -> str:
        """A key of KINDS."""
        row = self.first
        if not row.likelihood:
            return "oracle"
        if row.entry.kind is Kind.UPPER_BOUND:
            return "bound" if row.bound else "no bound"
        return "exact" if row.proper and row.stderr is None else "estimate"

    @property
    def ranked(self) -> bool:
        """True if it may have a rank: a bound may be far above its model's value, the oracle is no likelihood."""
        return self.kind in ("exact", "estimate")

    @property
    def label(self) -> str:
        """Its name without the model."""
        parts = self.first.parts
        cache = parts["cache"] if self.run.has_cache else ""
        return ", ".join(filter(None, [self.display, self.rule, parts["block"], cache, self.remarks]))

    def value(self, column: str) -> float | None:
        """The value in a column; None if there is none, or an infinite one."""
        known = self.results[column].value if column in self.results else math.inf
        return known if math.isfinite(known) else None


@dataclasses.dataclass
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


# ---------------------------------------------------------------- columns


def unit(runs: Sequence[Run], requested: str | None) -> str:
    """The metric of all columns: the requested one, or the first that most results have.

    Perplexity per token is chosen only if all results of each task are known to have the same tokens. Raises DuelError
    if no result has the metric.
    """
    results = [(run, name) for run in runs for name in run.tasks]
    counts = Counter(metric for run, name in results for metric in run.tasks[name].metrics)
    if requested is not None:
        if not counts[requested]:
            raise DuelError(f"No result has {requested}; they have {', '.join(m for m in METRICS if counts[m])}.")
        return requested
    first: dict[str, Run] = {}
    one_tokenizer = all(match.same_tokens(first.setdefault(name, run), run, name) for run, name in results)
    allowed = [metric for metric in METRICS if counts[metric] and (one_tokenizer or metric != PER_TOKEN)]
    return max(allowed or METRICS, key=lambda metric: counts[metric])  # of equal counts the first


def columns(runs: Sequence[Run], metric: str) -> list[TaskColumn]:
    """The columns of runs. A result that may not share a column gets a separate one, which says what is different."""
    ordered = sorted(runs, key=lambda run: not run.baseline)  # the baseline's documents make the first column
    found: list[TaskColumn] = []
    for name in dict.fromkeys(name for run in runs for name in run.tasks):
        groups: list[tuple[list[Run], str]] = []
        for run in (run for run in ordered if name in run.tasks and metric in run.tasks[name].metrics):
            reasons = [_apart(name, metric, members, run) for members, _ in groups]
            if "" in reasons:
                groups[reasons.index("")][0].append(run)
            else:
                groups.append(([run], next(iter(reasons), "")))
        for members, apart in groups:
            several = [run for run in members if run.baseline][1:]  # the first is the column's
            for run in several:
                run.baseline = False
            found.append(TaskColumn(f"c{len(found)}", name, members, apart, compare.task(name, members, metric)))
            for run in several:
                run.baseline = True
    for column in found:
        column.label = _label(column, found)
    return found


def _apart(name: str, metric: str, members: Sequence[Run], run: Run) -> str:
    """The reason that a run may not share the column of others, judged by the first and the first with samples; empty
    if it may.

    Per word and byte, tokenizers may differ.
    """
    sampled = [member for member in members if member.tasks[name].documents is not None]
    for here in (members[0], *sampled[:1]):
        apart = match.documents(here.tasks[name], run.tasks[name], metric)
        if apart is None:
            fields = match.differences(here, run, name)
            apart = next((d for d in fields if metric == PER_TOKEN or not d.field.startswith("tokenizer")), None)
        if apart is not None:
            return f"{apart.field}: {apart.there} here, {apart.here} in the first column of {name}"
    return ""


def _label(column: TaskColumn, columns: Sequence[TaskColumn]) -> str:
    alike = [other for other in columns if other.task == column.task]
    parts = []
    if len({other.documents for other in alike}) > 1:
        parts.append(f"{column.documents or 'unknown number of'} documents")
    if len({tuple(other.windows) for other in alike}) > 1:
        parts.append(" and ".join(column.windows))
    if sum((other.documents, other.windows) == (column.documents, column.windows) for other in alike) > 1:
        parts.append(f"column {alike.index(column) + 1}")
    return f"{column.task} ({', '.join(parts)})" if parts else column.task


def remarks(columns: Sequence[TaskColumn]) -> list[str]:
    """The notes of columns, each once; one that does not hold for all columns says for which tasks it does."""
    tasks: dict[str, list[str]] = {}
    for column in columns:
        for note in dict.fromkeys([*column.compared.differences, *column.compared.notes]):
            tasks.setdefault(note, []).append(column.task)
    return [
        note if len(names) == len(columns) else f"{', '.join(dict.fromkeys(names))}: {note}"
        for note, names in tasks.items()
    ]


# ---------------------------------------------------------------- rows


def rows(columns: Sequence[TaskColumn]) -> list[BoardRow]:
    """A row for each model under an estimator, rule, block and cache, with a result for each column that it is in."""
    merged: dict[tuple, dict[str, Row]] = {}
    for column in columns:
        for result in column.compared.rows:
            varies = {"estimator", "rule"} if result.entry.drawn else NON_IDENTITY_KEYS  # draws belong to an estimate
            spec = tuple(sorted((key, value) for key, value in result.run.spec.items() if key not in varies))
            identity = result.run.key, result.estimator, result.rule, result.block, result.bound, spec
            merged.setdefault(identity, {})[column.id] = result
    joined = [BoardRow(results) for results in merged.values()]
    alike: dict[tuple[str, str], list[BoardRow]] = {}
    for row in joined:
        alike.setdefault((row.model, row.label), []).append(row)
    for group in alike.values():  # equal names in different columns, which no report had to distinguish
        keys = differing_keys([row.spec for row in group], ("estimator", "rule", "cache"))
        for row in group:
            more = [argument(row.spec, key) for key in keys]
            row.remarks = ", ".join(filter(None, [row.remarks, *more]))
    return joined


def _qualifiers(result: Row) -> str:
    """The settings that distinguish a row beyond model, estimator, rule, block and cache."""
    parts = [part for part in result.qualifiers.split(", ") if not part.startswith("cache=")]
    return ", ".join(filter(None, [*parts, result.unknown_share]))


def rank(rows: Sequence[BoardRow], columns: Sequence[TaskColumn], metric: str) -> tuple[list[BoardRow], list[str], str]:
    """Enter means and ranks; return the rows in order, the ids of the columns that means are over, and `Board.by`.

    The mean is over the columns that all rows but the oracle have: geometric for perplexities. With fewer than two
    there is none, and rows are ranked in the column with the most rows.
    """
    needed = [row for row in rows if row.kind != "oracle"]
    common = [c.id for c in columns if needed and all(row.value(c.id) is not None for row in needed)]
    common = common if len(common) > 1 else []
    most = max(columns, key=lambda column: len(column.compared.rows)).id
    for row in rows:
        values = [row.value(column) for column in common]
        if common and None not in values:
            bits = metric == "bits_per_byte"
            mean = math.fsum(values if bits else map(math.log, values)) / len(values)
            row.mean = mean if bits else math.exp(mean)
        row.main = row.mean if common else row.value(most)
    best = [row for row in rows if row.ranked and row.main is not None]
    for row in best:
        row.rank = 1 + sum(other.main < row.main for other in best)
        if common:
            places = [1 + sum(other.value(c) < row.value(c) for other in best) for c in common]
            row.mean_rank = sum(places) / len(places)
    models, names = list(dict.fromkeys(row.model for row in rows)), [*registry.ESTIMATORS]

    def order(row: BoardRow) -> tuple:
        main = math.inf if row.main is None else row.main
        return row.kind == "oracle", main, models.index(row.model), names.index(row.estimator), sort_key(row.rule)

    return sorted(rows, key=order), common, "mean" if common else most
