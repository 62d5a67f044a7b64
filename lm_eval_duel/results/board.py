"""A leaderboard: comparable results of a task share a column, rows have ranks and means. Views compute nothing."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from lm_eval_duel.core.rates import METRICS
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators import registry
from lm_eval_duel.estimators.registry import Kind
from lm_eval_duel.results import columns as cells
from lm_eval_duel.results import compare, match, provenance
from lm_eval_duel.results.cost import CACHED, RunCost
from lm_eval_duel.results.match import PER_TOKEN
from lm_eval_duel.results.read import Run
from lm_eval_duel.results.rows import NON_IDENTITY_KEYS, Row, argument, differing_keys
from lm_eval_duel.results.table import WORDS, Cell, form_of, number
from lm_eval_duel.rules.tables import sort_key, without_defaults

KINDS = {  # of a row: its meaning
    "exact": "an exact likelihood",
    "estimate": "an estimate of a likelihood; ± is its own standard error",
    "bound": "an upper bound of the perplexity: the true value is at or below it",
    "no bound": "a Monte Carlo ELBO that leaves out small noise levels (elbo_eps above 0), so it bounds nothing",
    "oracle": "not a likelihood: it sees the targets",
}


@dataclasses.dataclass
class TaskColumn:
    """Results of one task that may be compared. `difference`: from the task's first column, as text."""

    id: str
    label: str
    task: str
    windows: list[str]  # the ways in which its runs cut documents
    difference: str  # empty for the first column
    compared: compare.Comparison


class BoardRow:
    """One model under an estimator, rule, block and cache: its results, by the id of their column."""

    def __init__(self, results: dict[str, Row]):
        self.results = results
        self.named = max(results.values(), key=lambda row: len(row.title))  # the most remarks
        self.rule, self.block = without_defaults(self.named.rule or ""), self.named.block or ""
        self.cache, self.autoregressive = self.named.run.cache or "", self.named.run.autoregressive
        self.runs = [*{row.run.name: row.run for row in results.values()}.values()]
        self.files = [run.name for run in self.runs]
        self.fingerprint = ", ".join(dict.fromkeys(run.fingerprint for run in self.runs if run.fingerprint))
        self.parameters = next(filter(None, (run.duel.get("parameters") for run in self.runs)), None)
        versions: dict[str, dict[str, None]] = {}
        for name, version in (entry for run in self.runs for entry in run.versions.items()):
            versions.setdefault(name, {})[version] = None
        self.versions = {name: ", ".join(of_name) for name, of_name in versions.items()}
        self.date = max(run.when for run in self.runs)
        self.commands = [*dict.fromkeys(map(provenance.command, self.runs))]
        self.mean: float | None = None
        self.mean_rank: float | None = None
        self.main: float | None = None  # the value that rows are ranked by
        self.rank: int | None = None
        self._add_costs()

    def _add_costs(self) -> None:
        """NFE and seconds per token, over its tasks. Rows of one lattice run share its time."""
        counted = [row for row in self.results.values() if row.nfe and row.tokens]
        tokens = sum(row.tokens for row in counted)
        self.nfe_per_token = sum(row.nfe for row in counted) / tokens if counted else None
        costs = list(map(RunCost, self.runs))
        places = sorted({cost.place for cost in costs}, key=str)
        self.device = ", ".join(f"{device or 'unknown device'} x {ranks or 1}" for device, ranks in places)
        self.seconds_per_token, self.seconds_reason = None, ""
        if any(run.cached for run in self.runs):
            self.seconds_reason = CACHED
        elif not all(cost.seconds_per_token for cost in costs):
            self.seconds_reason = "the results hold no time of the scoring alone"
        elif len(places) > 1:
            self.seconds_reason = f"its tasks ran on {self.device}"
        else:
            self.seconds_per_token = sum(cost.seconds for cost in costs) / sum(cost.tokens for cost in costs)

    @property
    def kind(self) -> str:
        """A key of KINDS."""
        if not self.named.likelihood:
            return "oracle"
        if self.named.entry.kind is Kind.UPPER_BOUND:
            return "bound" if self.named.bound else "no bound"
        return "exact" if self.named.proper and self.named.stderr is None else "estimate"

    @property
    def ranked(self) -> bool:
        """True if it may have a rank: a bound may be far above its model's value, the oracle is no likelihood."""
        return self.kind in ("exact", "estimate")

    @property
    def remarks(self) -> str:
        """The settings that distinguish it beyond model, estimator, rule, block and cache."""
        return ", ".join(filter(None, [self.named.qualifiers, self.named.unknown_share]))

    @property
    def label(self) -> str:
        """Its name without the model."""
        return ", ".join(filter(None, [self.named.name, self.named.unknown_share]))

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
    def about(self) -> str:
        """A description of the numbers."""
        labels = {column.id: column.label for column in self.columns}
        by = "the mean over tasks" if self.by == "mean" else f"{self.unit} of {labels[self.by]}"
        baseline = f" Gaps are to {self.ar}." if self.ar else ""
        return (
            f"{self.unit.capitalize()}, lower is better. Rank: among likelihoods, by {by}; bounds (≤) and the oracle "
            f"have none.{baseline} 95 % intervals are over documents. ±: standard error of a Monte Carlo or sampled "
            "estimate."
        )

    @property
    def groups(self) -> list[tuple[str, list[BoardRow]]]:
        """The rows in groups, each with a title: the oracle's separately, since it is not a likelihood."""
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
            reasons = [_why_separate(name, metric, members, run) for members, _ in groups]
            if "" in reasons:
                groups[reasons.index("")][0].append(run)
            else:
                groups.append(([run], next(iter(reasons), "")))
        for n, (members, difference) in enumerate(groups, 1):
            label, windows = name if len(groups) == 1 else f"{name} ({n})", map(match.windows_of, members)
            compared = compare.task(name, members, metric)
            found.append(TaskColumn(f"c{len(found)}", label, name, [*dict.fromkeys(windows)], difference, compared))
    return found


def _why_separate(name: str, metric: str, members: Sequence[Run], run: Run) -> str:
    """The reason that a run needs a separate column from `members`; empty if it may share theirs.

    The run is compared with the first of them and the first with samples. Per word and byte, tokenizers may differ.
    """
    sampled = [member for member in members if member.tasks[name].documents is not None]
    for here in (members[0], *sampled[:1]):
        every = [match.documents(here.tasks[name], run.tasks[name], metric), *match.differences(here, run, name)]
        for found in filter(None, every):
            if metric == PER_TOKEN or not found.field.startswith("tokenizer"):
                return f"{found.field}: {found.there} here, {found.here} in the first column of {name}"
    return ""


def notes(columns: Sequence[TaskColumn]) -> list[str]:
    """The notes of columns, each once; one that does not hold for all columns says for which tasks it does."""
    tasks: dict[str, list[str]] = {}
    for column in columns:
        for note in dict.fromkeys([*column.compared.differences, *column.compared.notes]):
            tasks.setdefault(note, []).append(column.task)
    separate = [f"{column.label}: {column.difference}" for column in columns if column.difference]
    return separate + [
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
    joined = list(map(BoardRow, merged.values()))
    alike: dict[tuple[str, str], list[BoardRow]] = {}
    for row in joined:
        alike.setdefault((row.named.model, row.label), []).append(row)
    for group in alike.values():  # equal names in different columns, which no comparison had to distinguish
        for key in differing_keys([row.named.run.spec for row in group], ("estimator", "rule", "cache")):
            for result in (result for row in group for result in row.results.values()):
                result.variant = ", ".join(filter(None, [result.variant, argument(result.run.spec, key)]))
    return joined


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
    models, names = list(dict.fromkeys(row.named.model for row in rows)), [*registry.ESTIMATORS]

    def order(row: BoardRow) -> tuple:
        main = math.inf if row.main is None else row.main
        kind = models.index(row.named.model), names.index(row.named.estimator), *sort_key(row.named.rule)
        return row.kind == "oracle", main, *kind

    return sorted(rows, key=order), common, "mean" if common else most


# ---------------------------------------------------------------- heads


class Head(NamedTuple):
    """A column: its title, the group that the page can hide, its cells, and the intervals that stand below them."""

    title: str
    group: str
    cell: Callable[[BoardRow], Cell]
    below: Callable[[BoardRow], str] = lambda row: ""

    @property
    def numeric(self) -> bool:
        return self.group not in ("name", "source") or self.title in ("#", "block", "parameters")


def heads(board: Board) -> list[Head]:
    """The columns of a leaderboard, empty ones included."""
    form, results = form_of(board.metric), [result for row in board.rows for result in row.results.values()]
    every = cells.of_rows(board.metric, results)
    found = [Head("#", "name", lambda row: str(row.rank or ""))]
    for name in ("model", "estimator", "rule", "block", "cache"):
        found.append(Head(name, "name", lambda row, name=name: every[name].cell(row.named)))
    if board.mean_of:
        kind = "mean" if board.metric == "bits_per_byte" else "geometric mean"
        found += [
            Head(
                f"{kind}, {len(board.mean_of)} tasks", "mean", lambda row: number(row.mean, form, bound=row.named.bound)
            ),
            Head("mean rank", "mean", lambda row: number(row.mean_rank, ".2f")),
        ]
    of_task = {
        "value": (every["value"].short, _value, cells.interval),
        "bits": (every["bits"].short, every["bits"].cell, lambda result: ""),
        "gap": (every["gap"].short, every["gap"].cell, every["gap_interval"].cell),
        "closed": (every["share"].head, every["share"].cell, every["closed_interval"].cell),
    }
    if board.metric == "bits_per_byte":
        del of_task["bits"]
    if all(result.distinguishable is None for result in results):
        del of_task["closed"]
    for group, (short, *both) in of_task.items():
        for column in board.columns:
            found.append(Head(f"{column.label} {short}", group, *(_of(column.id, cell) for cell in both)))
    return [
        *found,
        Head("NFE per token", "cost", lambda row: number(row.nfe_per_token, ".3f")),
        Head("seconds per token", "cost", lambda row: number(row.seconds_per_token, ".2g")),
        Head("device", "source", lambda row: row.device),
        Head("parameters", "source", lambda row: number(row.parameters, ",d")),
        Head("fingerprint", "source", lambda row: row.fingerprint),
        Head("versions", "source", lambda row: ", ".join(map(" ".join, row.versions.items()))),
        Head("date", "source", lambda row: row.date[:10]),
    ]


def _value(result: Row) -> Cell:
    """A result's value. Its remark says why it has no error or interval."""
    return str(cells.value(result)), "; ".join(filter(None, [result.stderr_reason, result.reason]))


def _of(column: str, cell: Callable[[Row], Any]) -> Callable[[BoardRow], Any]:
    """A cell of the result in a column, empty if there is none."""
    return lambda row: cell(row.results[column]) if column in row.results else ""
