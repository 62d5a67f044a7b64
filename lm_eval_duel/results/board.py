"""A leaderboard: comparable results of a task share a column, rows have ranks and means. Views compute nothing."""

from __future__ import annotations

import dataclasses
import datetime
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from lm_eval_duel.core.scores import METRICS
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

KINDS = {  # of a row: its meaning
    "AR": "an autoregressive model, exact",
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
        runs = [*{row.run.name: row.run for row in results.values()}.values()]
        self.files = [run.name for run in runs]
        self.fingerprint = _joined(run.fingerprint for run in runs)
        self.parameters = next(filter(None, (run.duel.get("parameters") for run in runs)), None)
        names = dict.fromkeys(name for run in runs for name in run.versions)
        self.versions = {name: _joined(run.versions.get(name) for run in runs) for name in names}
        self.date = max(run.when for run in runs)
        self.commands = [*dict.fromkeys(map(provenance.command, runs))]
        counted = [row for row in results.values() if row.nfe and row.tokens]
        self.nfe_per_token = sum(row.nfe for row in counted) / sum(row.tokens for row in counted) if counted else None
        self._add_seconds([RunCost(run) for run in runs])  # rows of one lattice run share its time
        self.mean: float | None = None
        self.mean_rank: float | None = None
        self.main: float | None = None  # the value that rows are ranked by
        self.rank: int | None = None

    def _add_seconds(self, costs: Sequence[RunCost]) -> None:
        """Enter the device, and seconds per token over all tasks, or the reason why they are not known."""
        places = sorted({cost.place for cost in costs}, key=str)
        self.device = ", ".join(f"{device or 'unknown device'} x {ranks or 1}" for device, ranks in places)
        self.seconds_per_token, self.seconds_reason = None, ""
        if any(cost.run.cached for cost in costs):
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
        return _joined([self.named.qualifiers, self.named.unknown_share])

    @property
    def label(self) -> str:
        """Its name without the model."""
        return _joined([self.named.name, self.named.unknown_share])

    def value(self, column: str) -> float | None:
        """The value in a column; None if there is none, or an infinite one."""
        known = self.results[column].value if column in self.results else math.inf
        return known if math.isfinite(known) else None


def _joined(texts: Iterable[str | None]) -> str:
    return ", ".join(dict.fromkeys(filter(None, texts)))


class Board:
    """A leaderboard of runs, one of which may be their baseline.

    `ar`: the model of the gaps. `mean_of`: the ids of the columns that means are over. `by`: `mean`, or the id of the
    column that rows are ranked in.

    Raises:
        DuelError: no result has the requested metric.
    """

    published: list[dict[str, Any]]
    documents: list[dict[str, Any]]

    def __init__(self, runs: Sequence[Run], metric: str | None, title: str):
        self.title, self.metric = title, _metric(runs, metric)
        self.unit = WORDS[self.metric]
        self.ar = next((run.label for run in runs if run.baseline), None)
        self.columns = _columns(runs, self.metric)
        self.rows = _rows(self.columns)
        self._rank()
        self.notes = _notes(self.columns)
        self.date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()

    def _rank(self) -> None:
        """Enter means and ranks, and sort the rows.

        The mean is over the columns that all rows but the oracle have: geometric for perplexities. With fewer than two
        there is none, and rows are ranked in the column with the most rows.
        """
        needed = [row for row in self.rows if row.kind != "oracle"]
        common = [c.id for c in self.columns if needed and all(row.value(c.id) is not None for row in needed)]
        self.mean_of = common if len(common) > 1 else []
        most = max(self.columns, key=lambda column: len(column.compared.rows)).id
        self.by = "mean" if self.mean_of else most
        mean = statistics.fmean if self.metric == "bits_per_byte" else statistics.geometric_mean
        for row in self.rows:
            values = [row.value(column) for column in self.mean_of]
            row.mean = mean(values) if values and None not in values else None
            row.main = row.mean if self.mean_of else row.value(most)
        best = [row for row in self.rows if row.ranked and row.main is not None]
        for row in best:
            row.rank = 1 + sum(other.main < row.main for other in best)
            places = [1 + sum(other.value(c) < row.value(c) for other in best) for c in self.mean_of]
            row.mean_rank = statistics.fmean(places) if places else None
        models, names = list(dict.fromkeys(row.named.model for row in self.rows)), [*registry.ESTIMATORS]

        def order(row: BoardRow) -> tuple:
            main = math.inf if row.main is None else row.main
            kind = models.index(row.named.model), names.index(row.named.estimator), *sort_key(row.named.rule)
            return row.kind == "oracle", main, *kind

        self.rows.sort(key=order)

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


def _metric(runs: Sequence[Run], requested: str | None) -> str:
    """The metric of all columns: the requested one, or the first that most results have.

    Perplexity per token is chosen only if all results of each task are known to have the same tokens.
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


def _columns(runs: Sequence[Run], metric: str) -> list[TaskColumn]:
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

    The run is compared with the first of them and the first with samples.
    """
    sampled = [member for member in members if member.tasks[name].documents is not None]
    for here in (members[0], *sampled[:1]):
        every = [*match.documents(here.tasks[name], run.tasks[name], metric), *match.differences(here, run, name)]
        for found in every:
            if metric == PER_TOKEN or not found.field.startswith("tokenizer"):  # per word and byte they may differ
                return f"{found.field}: {found.there} here, {found.here} in the first column of {name}"
    return ""


def _notes(columns: Sequence[TaskColumn]) -> list[str]:
    """The notes of columns, each once; one that does not hold for all columns says for which tasks it does."""
    tasks: dict[str, list[str]] = {}
    for column in columns:
        for note in dict.fromkeys([*column.compared.differences, *column.compared.notes]):
            tasks.setdefault(note, []).append(column.task)
    separate = [f"{column.label}: {column.difference}" for column in columns if column.difference]
    return separate + [
        note if len(names) == len(columns) else f"{_joined(names)}: {note}" for note, names in tasks.items()
    ]


# ---------------------------------------------------------------- rows


def _rows(columns: Sequence[TaskColumn]) -> list[BoardRow]:
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
                result.variant = _joined([result.variant, argument(result.run.spec, key)])
    return joined
