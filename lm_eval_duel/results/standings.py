"""Results over tasks: the rows of one model under one method, its means and its rank among the others."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lm_eval_duel.estimators.registry import Kind
from lm_eval_duel.results.compare import ComparedRow, Comparison
from lm_eval_duel.results.cost import CACHED, Time
from lm_eval_duel.results.rows import Row, argument, differing_keys, identity, plain_row
from lm_eval_duel.results.runs import Run

MEAN = "mean"  # what rows are ranked by, if not by a task
KINDS = {  # of a result: its meaning
    "AR": "an autoregressive model, exact",
    "exact": "an exact likelihood",
    "estimate": "an estimate of a likelihood; ± is its own standard error",
    "bound": "an upper bound of the perplexity: the true value is at or below it",
    "no bound": "a Monte Carlo ELBO that leaves out small noise levels (elbo_eps above 0), so it bounds nothing",
    "oracle": "not a likelihood: it sees the targets",
}


@dataclasses.dataclass(frozen=True, eq=False)
class RankedMethod:
    """One model under an estimator, rule, block, cache and further settings, with its results on every task.

    `named`: the row that it is named by. `rows`: by task. `scored`: the runs with other averages than perplexities, by
    task.
    """

    named: Row
    rows: dict[str, ComparedRow]
    scored: dict[str, Run]

    @property
    def runs(self) -> list[Run]:
        """The runs of its results, each once."""
        runs = [*(each.row.run for each in self.rows.values()), *self.scored.values()]
        return list({run.name: run for run in runs}.values())

    @property
    def label(self) -> str:
        """Its name without the model."""
        return joined([self.named.name, self.named.unknown_share])

    @property
    def remarks(self) -> str:
        """The settings that distinguish it beyond model, estimator, rule, block and cache."""
        return joined([self.named.qualifiers, self.named.unknown_share])

    @property
    def kind(self) -> str:
        """A key of KINDS."""
        if not self.named.likelihood:
            return "oracle"
        if self.named.worth.kind in (Kind.UPPER_BOUND, Kind.NO_BOUND):
            return "bound" if self.named.bound else "no bound"
        return "exact" if self.named.proper and self.named.stderr is None else "estimate"

    def value(self, task: str) -> float | None:
        """The value of a task; None if there is none, or an infinite one."""
        known = self.rows[task].row.value if task in self.rows else math.inf
        return known if math.isfinite(known) else None

    # ------------------------------------------------------------ where its results come from

    @property
    def fingerprint(self) -> str:
        return joined(run.fingerprint for run in self.runs)

    @property
    def parameters(self) -> int | None:
        return next(filter(None, (run.duel.get("parameters") for run in self.runs)), None)

    @property
    def versions(self) -> dict[str, str]:
        names = dict.fromkeys(name for run in self.runs for name in run.versions)
        return {name: joined(run.versions.get(name) for run in self.runs) for name in names}

    @property
    def date(self) -> str:
        """Of the newest result, ISO 8601."""
        return max(run.when for run in self.runs)

    @property
    def nfe_per_token(self) -> float | None:
        counted = [each.row for each in self.rows.values() if each.row.nfe and each.row.tokens]
        return sum(row.nfe for row in counted) / sum(row.tokens for row in counted) if counted else None

    @property
    def device(self) -> str:
        places = sorted({Time(run).place for run in self.runs}, key=str)
        return ", ".join(f"{device or 'unknown device'} x {ranks or 1}" for device, ranks in places)

    @property
    def seconds_per_token(self) -> float | None:
        """Over all tasks; rows of one lattice run share its time."""
        times = [] if self.seconds_reason else list(map(Time, self.runs))
        return sum(time.seconds for time in times) / sum(time.tokens for time in times) if times else None

    @property
    def seconds_reason(self) -> str:
        """The reason that its time is not known."""
        times = list(map(Time, self.runs))
        if any(run.cached for run in self.runs):
            return CACHED
        if not all(time.seconds_per_token for time in times):
            return "the results hold no time of the scoring alone"
        return f"its tasks ran on {self.device}" if len({time.place for time in times}) > 1 else ""


@dataclasses.dataclass(frozen=True, eq=False)
class Standing:
    """A method among the others. `main`: the value that they are ranked by."""

    method: RankedMethod
    main: float | None
    mean: float | None
    mean_rank: float | None
    rank: int | None


@dataclasses.dataclass(frozen=True)
class Standings:
    """The methods of all tasks, in the order of the report's tables.

    `mean_of`: the tasks that means are over, all in one `metric`; empty with fewer than two. `by`: `MEAN`, the task
    that methods are ranked in, or empty without any perplexity.
    """

    rows: list[Standing]
    mean_of: list[str]
    metric: str
    by: str

    def groups(self) -> list[tuple[str, list[Standing]]]:
        """The rows from the lowest value, in groups with a title: the oracle is not a likelihood, and stands apart."""
        ordered = sorted(self.rows, key=lambda row: math.inf if row.main is None else row.main)
        oracles = [row for row in ordered if row.method.kind == "oracle"]
        others = [row for row in ordered if row.method.kind != "oracle"]
        return [group for group in (("", others), (f"Oracle: {KINDS['oracle']}", oracles)) if group[1]]


def joined(texts: Iterable[str | None]) -> str:
    """Different texts, each once."""
    return ", ".join(dict.fromkeys(filter(None, texts)))


def standings(tasks: Mapping[str, Comparison], runs: Sequence[Run], baselines: Sequence[Run]) -> Standings:
    """The methods of a report, with means and ranks.

    The mean is over the tasks of one metric that every method but the oracle has: geometric for perplexities, and of
    several metrics that of the most tasks. With fewer than two such tasks there is none, and methods are ranked in the
    task with the most rows.
    """
    found = _methods(tasks, runs, baselines)
    needed = [method for method in found if method.rows and method.kind != "oracle"]
    common = [name for name in tasks if needed and all(method.value(name) is not None for method in needed)]
    counts = Counter(tasks[name].metric for name in common)
    metric = max(counts, key=counts.__getitem__, default="")
    mean_of = [name for name in common if tasks[name].metric == metric] if counts[metric] > 1 else []
    most = max(tasks, key=lambda name: len(tasks[name].rows), default="")
    mean = statistics.fmean if metric == "bits_per_byte" else statistics.geometric_mean
    means: dict[RankedMethod, float | None] = {}
    for method in found:
        values = [method.value(name) for name in mean_of]
        means[method] = mean(values) if values and None not in values else None
    main = means if mean_of else {method: method.value(most) for method in found}
    ranked = [method for method in found if method.kind in ("exact", "estimate") and main[method] is not None]
    rows = [
        Standing(
            method=method,
            main=main[method],
            mean=means[method],
            mean_rank=_mean_rank(method, ranked, mean_of) if method in ranked else None,
            rank=1 + sum(main[other] < main[method] for other in ranked) if method in ranked else None,
        )
        for method in found
    ]
    models = list(dict.fromkeys(method.named.model for method in found))
    rows.sort(key=lambda row: (not row.method.named.ar, models.index(row.method.named.model)))
    return Standings(rows, mean_of, metric, MEAN if mean_of else most)


def _mean_rank(method: RankedMethod, ranked: Sequence[RankedMethod], tasks: Sequence[str]) -> float | None:
    """The mean over tasks of a method's rank."""
    places = [1 + sum(other.value(name) < method.value(name) for other in ranked) for name in tasks]
    return statistics.fmean(places) if places else None


def _methods(tasks: Mapping[str, Comparison], runs: Sequence[Run], baselines: Sequence[Run]) -> list[RankedMethod]:
    """Rows of one model and method belong together; two of one task never do."""
    results: dict[tuple, dict[str, ComparedRow]] = {}
    for name, task in tasks.items():
        for each in task.rows:
            key = _free_key(results, _key(each.row), name)
            results.setdefault(key, {})[name] = each
    scored: dict[tuple, dict[str, Run]] = {}
    plain: dict[tuple, Row] = {}
    for run in sorted(runs, key=lambda run: -run.date):  # the newest stands beside the perplexities
        for name, task in run.every_task.items():
            if task.scores:
                row = plain_row(run, name, baseline=run in baselines)
                key = _free_key(scored, _key(row), name)
                scored.setdefault(key, {})[name] = run
                plain[key] = row
    found = []
    for key in dict.fromkeys([*results, *reversed(scored)]):
        rows = results.get(key, {})
        names = [each.row for each in rows.values()] or [plain[key]]
        named = max(names, key=lambda row: len(row.title))  # the one with the most remarks
        found.append(RankedMethod(named, rows, scored.get(key, {})))
    return _disambiguated(found)


def _key(row: Row) -> tuple:
    return row.run.key, row.estimator, row.rule, row.block, identity(row)


def _free_key(results: Mapping[tuple, Mapping[str, Any]], key: tuple, task: str) -> tuple:
    """The key with the lowest number that has no result of the task yet."""
    number = 0
    while task in results.get((*key, number), {}):
        number += 1
    return (*key, number)


def _disambiguated(methods: Sequence[RankedMethod]) -> list[RankedMethod]:
    """Methods of one name, from tasks that had no need to distinguish them, with what their specs differ in."""
    alike: dict[tuple[str, str], list[RankedMethod]] = {}
    for method in methods:
        alike.setdefault((method.named.model, method.label), []).append(method)
    renamed: dict[RankedMethod, RankedMethod] = {}
    for group in alike.values():
        keys = differing_keys([method.named.run.spec for method in group], ("estimator", "rule", "cache"))
        for method in group:
            named = method.named
            variant = joined([named.variant, *(argument(named.run.spec, key) for key in keys)])
            renamed[method] = dataclasses.replace(method, named=dataclasses.replace(named, variant=variant))
    return [renamed[method] for method in methods]
