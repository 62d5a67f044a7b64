"""Results over tasks: the rows of one model under one method, with means and a rank."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lm_eval_duel.results import order
from lm_eval_duel.results.compare import ComparedRow, Comparison
from lm_eval_duel.results.costs import CACHED, SEES_TARGETS, Time
from lm_eval_duel.results.ranks import compete, may_rank
from lm_eval_duel.results.rows import Row, plain_row
from lm_eval_duel.results.runs import Run
from lm_eval_duel.results.spec_entries import differing_keys, entries_for_names

MEAN = "mean"  # what rows are ranked by, if not by a task
AR = "AR"
ORACLE = "oracle"
KINDS = {  # of a result, as `Value.word` has them, and AR: what each means
    AR: "an autoregressive model, exact",
    "exact": "an exact likelihood",
    "estimate": "an estimate of a likelihood; ± is its own standard error",
    "bound": (
        "an upper bound: the perplexity of the sampler that it bounds is at or below it; that of another one, such as "
        "a sampler with a rule, may be above"
    ),
    "no bound": "a Monte Carlo ELBO that leaves out small noise levels (elbo_eps above 0), so it bounds nothing",
    ORACLE: SEES_TARGETS,
}
KINDS_OF_AVERAGES = {  # of a result without a perplexity: the likelihoods behind its averages
    **KINDS,
    "estimate": "from estimates of likelihoods",
    "bound": "from bounds of likelihoods, which do not say which likelihood is higher",
}


# ---------------------------------------------------------------- methods


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
        runs: dict[str, Run] = {}
        for each in self.rows.values():
            runs[each.row.run.name] = each.row.run
        for run in self.scored.values():
            runs.setdefault(run.name, run)
        return list(runs.values())

    @property
    def times(self) -> list[Time]:
        return list(map(Time, self.runs))

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
        """A key of KINDS. A likelihood with a drawn error is an estimate, whatever wrote it."""
        word = self.named.score.word
        if word == "exact" and self.named.stderr is not None:
            return "estimate"
        return word

    @property
    def is_duel(self) -> bool:
        """True if a task has a value of a rule, or an estimate of one, and not the baseline's."""
        return any(each.row.is_duel for each in self.rows.values())

    def value(self, task: str) -> float | None:
        """The value of a task; None if there is none, or an infinite one."""
        if task not in self.rows:
            return None
        value = self.rows[task].row.value
        return value if math.isfinite(value) else None

    # ------------------------------------------------------------ where its results come from

    @property
    def fingerprint(self) -> str:
        return joined(run.config.fingerprint for run in self.runs)

    @property
    def parameters(self) -> int | None:
        """The number of parameters of the network; None if no result has it."""
        for run in self.runs:
            if run.config.duel.get("parameters"):
                return run.config.duel["parameters"]
        return None

    @property
    def versions(self) -> dict[str, str]:
        """The versions of each package, all that were used."""
        versions: dict[str, list[str]] = {}
        for run in self.runs:
            for name, version in run.versions.items():
                versions.setdefault(name, []).append(version)
        return {name: joined(of_runs) for name, of_runs in versions.items()}

    @property
    def date(self) -> str:
        """The date of the newest result, in ISO 8601."""
        return max(run.when for run in self.runs)

    @property
    def nfe_per_token(self) -> float | None:
        """Rule steps over tokens, of the tasks that have both."""
        nfe = 0
        tokens = 0
        for each in self.rows.values():
            if each.row.nfe and each.row.tokens:
                nfe += each.row.nfe
                tokens += each.row.tokens
        return nfe / tokens if tokens else None

    @property
    def device(self) -> str:
        """The devices of its runs, each with the number of processes, such as `NVIDIA H100 x 2`."""
        places = {time.place for time in self.times}
        names = []
        for device, ranks in sorted(places, key=str):
            names.append(f"{device or 'unknown device'} x {ranks or 1}")
        return ", ".join(names)

    @property
    def seconds_per_token(self) -> float | None:
        """Seconds of scoring over tokens, of all tasks; rows of one lattice run share its time."""
        if self.seconds_reason:
            return None
        seconds = 0.0
        tokens = 0
        for time in self.times:
            seconds += time.seconds
            tokens += time.tokens
        return seconds / tokens

    @property
    def seconds_reason(self) -> str:
        """The reason that its time is not known."""
        if any(run.cached for run in self.runs):
            return CACHED
        if not all(time.seconds_per_token for time in self.times):
            return "the results hold no time of the scoring alone"
        places = {time.place for time in self.times}
        if len(places) > 1:
            return f"its tasks ran on {self.device}"
        return ""


def joined(texts: Iterable[str | None]) -> str:
    """The texts that are not empty, each once."""
    return ", ".join(dict.fromkeys(filter(None, texts)))


def _methods(tasks: Mapping[str, Comparison], runs: Sequence[Run], baselines: Sequence[Run]) -> list[RankedMethod]:
    """The methods of rows and of runs with other averages: one for each model and method.

    Two results of one task are always two methods.
    """
    compared: dict[tuple, dict[str, ComparedRow]] = {}  # of each method, by task
    for name, task in tasks.items():
        for each in task.rows:
            key = _free_key(compared, _key(each.row), name)
            compared.setdefault(key, {})[name] = each

    scored: dict[tuple, dict[str, Run]] = {}
    plain: dict[tuple, Row] = {}  # names a method that has no perplexity
    newest_first = sorted(runs, key=lambda run: -run.header.date)  # the newest stands beside the perplexities
    for run in newest_first:
        for name, task in run.every_task.items():
            if task.scores:
                row = plain_row(run, name, baseline=run in baselines)
                key = _free_key(scored, _key(row), name)
                scored.setdefault(key, {})[name] = run
                plain[key] = row

    methods = []
    for key in dict.fromkeys([*compared, *scored]):
        rows_of_tasks = compared.get(key, {})
        named = plain.get(key)
        if rows_of_tasks:
            rows = [each.row for each in rows_of_tasks.values()]
            named = max(rows, key=lambda row: len(row.title))  # the one with the most remarks
        methods.append(RankedMethod(named, rows_of_tasks, scored.get(key, {})))
    by_row = {method.named: method for method in methods}
    return _disambiguated([by_row[row] for row in order.sorted_rows(by_row)])


def _key(row: Row) -> tuple:
    """Equal for the results of one method, on whichever task."""
    return order.method_key(row), order.identity(row)


def _free_key(results: Mapping[tuple, Mapping[str, Any]], key: tuple, task: str) -> tuple:
    """The key with the lowest number that has no result of the task yet."""
    number = 0
    while task in results.get((*key, number), {}):
        number += 1
    return (*key, number)


def _disambiguated(methods: Sequence[RankedMethod]) -> list[RankedMethod]:
    """Methods of one name, from tasks that had no need to distinguish them, with what their specs differ in."""
    groups: dict[tuple[str, str], list[RankedMethod]] = {}
    for method in methods:
        groups.setdefault((method.named.model, method.label), []).append(method)
    renamed: dict[RankedMethod, RankedMethod] = {}
    for group in groups.values():
        specs = [method.named.run.spec for method in group]
        keys = differing_keys(specs, ("estimator", "rule", "cache"))
        for method, entries in zip(group, entries_for_names(specs, keys), strict=True):
            row = method.named
            with_variant = dataclasses.replace(row, variant=joined([row.variant, *entries]))
            renamed[method] = dataclasses.replace(method, named=with_variant)
    return [renamed[method] for method in methods]


# ---------------------------------------------------------------- means and ranks


@dataclasses.dataclass(frozen=True, eq=False)
class Standing:
    """A method among the others. `main`: the value that they are ranked by. None: it has no such value."""

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

    @property
    def mean_kind(self) -> str:
        return "mean" if self.metric == "bits_per_byte" else "geometric mean"

    def groups(self) -> list[tuple[str, list[Standing]]]:
        """The rows from the lowest value, in groups with a title: the oracle is not a likelihood, and stands apart."""

        def lowest_first(row: Standing) -> float:
            return math.inf if row.main is None else row.main

        likelihoods = []
        oracles = []
        for row in sorted(self.rows, key=lowest_first):
            if row.method.named.score.is_likelihood:
                likelihoods.append(row)
            else:
                oracles.append(row)

        groups = []
        if likelihoods:
            groups.append(("", likelihoods))
        if oracles:
            groups.append((f"Oracle: {KINDS[ORACLE]}", oracles))
        return groups


def standings(tasks: Mapping[str, Comparison], runs: Sequence[Run], baselines: Sequence[Run]) -> Standings:
    """The methods of a report, with means and ranks.

    The mean is over the tasks of one metric that every method but the oracle has: geometric for perplexities, and of
    several metrics that of the most tasks. With fewer than two such tasks there is none, and methods are ranked in the
    task with the most rows.
    """
    methods = _methods(tasks, runs, baselines)
    metric, mean_of = _tasks_of_means(tasks, methods)
    largest = max(tasks, key=lambda name: len(tasks[name].rows), default="")
    means = {method: _mean(method, mean_of, metric) for method in methods}
    main = means if mean_of else _values(methods, largest)
    ranks = _ranks(main)
    ranks_on_tasks = []
    for name in mean_of:
        values = _values([*ranks], name)  # methods without a rank do not count in the ranks of others
        ranks_on_tasks.append(_ranks(values))

    rows = []
    for method in methods:
        mean_rank = None
        if method in ranks and mean_of:
            mean_rank = statistics.fmean(on_task[method] for on_task in ranks_on_tasks)
        rows.append(Standing(method, main[method], means[method], mean_rank, ranks.get(method)))

    return Standings(rows, mean_of, metric, MEAN if mean_of else largest)


def _tasks_of_means(tasks: Mapping[str, Comparison], methods: Sequence[RankedMethod]) -> tuple[str, list[str]]:
    """The metric of means, and the tasks that they are over: none if there are fewer than two."""
    needed = []  # methods that a task must have a value of
    for method in methods:
        if method.rows and method.named.score.is_likelihood:
            needed.append(method)
    common: dict[str, list[str]] = {}  # by metric
    for name, task in tasks.items():
        if needed and all(method.value(name) is not None for method in needed):
            common.setdefault(task.metric, []).append(name)
    if not common:
        return "", []
    metric = max(common, key=lambda metric: len(common[metric]))
    if len(common[metric]) < 2:
        return metric, []
    return metric, common[metric]


def _values(methods: Sequence[RankedMethod], task: str) -> dict[RankedMethod, float | None]:
    return {method: method.value(task) for method in methods}


def _mean(method: RankedMethod, tasks: Sequence[str], metric: str) -> float | None:
    """The mean of a method's values over tasks; None if one of them is not known."""
    values = [method.value(name) for name in tasks]
    if not values or None in values:
        return None
    if metric == "bits_per_byte":
        return statistics.fmean(values)
    return statistics.geometric_mean(values)  # so that the mean of rates decides, as for bits per byte


def _ranks(values: Mapping[RankedMethod, float | None]) -> dict[RankedMethod, int]:
    """The ranks of the methods that have one: one more than the number of methods with a lower value.

    A single method has none.
    """
    ranks = {}
    for method, value in values.items():
        if value is not None and may_rank(method.named.score):
            ranks[method] = 1
    if len(ranks) < 2:  # there is nothing to be ranked among
        return {}
    for method in ranks:
        for other in ranks:
            if values[other] < values[method] and compete(method.named, other.named):
                ranks[method] += 1
    return ranks
