"""Results over tasks: the rows of one model under one method, with means and a rank, and what runs cost."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from lm_eval_duel.estimators import registry
from lm_eval_duel.results.compare import ComparedRow, Comparison
from lm_eval_duel.results.order import identity
from lm_eval_duel.results.rows import Row, argument, differing_keys, plain_row
from lm_eval_duel.results.runs import Run
from lm_eval_duel.rules import sort_key

MEAN = "mean"  # what rows are ranked by, if not by a task
AR = "AR"
ORACLE = "oracle"
KINDS = {  # of a result, as `Value.word` has them: its meaning
    AR: "an autoregressive model, exact",
    "exact": "an exact likelihood",
    "estimate": "an estimate of a likelihood; ± is its own standard error",
    "bound": "an upper bound of the perplexity: the true value is at or below it",
    "no bound": "a Monte Carlo ELBO that leaves out small noise levels (elbo_eps above 0), so it bounds nothing",
    ORACLE: "not a likelihood: it sees the targets",
}
WHOLE_RUN = "times of whole runs, loading included: results of other models hold no other time, and no device"
CACHED = "some answers came from a response cache, so the time covers only a part of the run"
LATTICE = f"lattice: all estimators in one run (oracle is {KINDS[ORACLE]})"


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
        return "estimate" if word == "exact" and self.named.stderr is not None else word

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

    def competes_with(self, other: RankedMethod) -> bool:
        """False for one method of one model given the noise of two seeds: one of several draws is no better method."""
        return self.named.model != other.named.model or self.named.noise_seed == other.named.noise_seed

    # ------------------------------------------------------------ where its results come from

    @property
    def fingerprint(self) -> str:
        return joined(run.config.fingerprint for run in self.runs)

    @property
    def parameters(self) -> int | None:
        for run in self.runs:
            if run.config.duel.get("parameters"):
                return run.config.duel["parameters"]
        return None

    @property
    def versions(self) -> dict[str, str]:
        versions: dict[str, list[str]] = {}
        for run in self.runs:
            for name, version in run.versions.items():
                versions.setdefault(name, []).append(version)
        return {name: joined(of_runs) for name, of_runs in versions.items()}

    @property
    def date(self) -> str:
        """Of the newest result, ISO 8601."""
        return max(run.when for run in self.runs)

    @property
    def nfe_per_token(self) -> float | None:
        nfe = 0
        tokens = 0
        for each in self.rows.values():
            if each.row.nfe and each.row.tokens:
                nfe += each.row.nfe
                tokens += each.row.tokens
        return nfe / tokens if tokens else None

    @property
    def device(self) -> str:
        places = sorted({time.place for time in self.times}, key=str)
        return ", ".join(f"{device or 'unknown device'} x {ranks or 1}" for device, ranks in places)

    @property
    def seconds_per_token(self) -> float | None:
        """Over all tasks; rows of one lattice run share its time."""
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
    """Different texts, each once."""
    return ", ".join(dict.fromkeys(filter(None, texts)))


def _methods(tasks: Mapping[str, Comparison], runs: Sequence[Run], baselines: Sequence[Run]) -> list[RankedMethod]:
    """The methods of rows and of runs with other averages: one for each model and method.

    Two results of one task are always two methods.
    """
    results: dict[tuple, dict[str, ComparedRow]] = {}
    for name, task in tasks.items():
        for each in task.rows:
            key = _free_key(results, _key(each.row), name)
            results.setdefault(key, {})[name] = each
    scored: dict[tuple, dict[str, Run]] = {}
    plain: dict[tuple, Row] = {}
    for run in sorted(runs, key=lambda run: -run.header.date):  # the newest stands beside the perplexities
        for name, task in run.every_task.items():
            if task.scores:
                row = plain_row(run, name, baseline=run in baselines)
                key = _free_key(scored, _key(row), name)
                scored.setdefault(key, {})[name] = run
                plain[key] = row
    methods = []
    for key in dict.fromkeys([*results, *reversed(scored)]):
        rows = results.get(key, {})
        names = [each.row for each in rows.values()] or [plain[key]]
        named = max(names, key=lambda row: len(row.title))  # the one with the most remarks
        methods.append(RankedMethod(named, rows, scored.get(key, {})))
    return _disambiguated(methods)


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
    groups: dict[tuple[str, str], list[RankedMethod]] = {}
    for method in methods:
        groups.setdefault((method.named.model, method.label), []).append(method)
    renamed: dict[RankedMethod, RankedMethod] = {}
    for group in groups.values():
        keys = differing_keys([method.named.run.spec for method in group], ("estimator", "rule", "cache"))
        for method in group:
            row = method.named
            arguments = [argument(row.run.spec, key) for key in keys]
            variant = joined([row.variant, *arguments])
            renamed[method] = dataclasses.replace(method, named=dataclasses.replace(row, variant=variant))
    return [renamed[method] for method in methods]


# ---------------------------------------------------------------- means and ranks


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

    @property
    def mean_kind(self) -> str:
        return "mean" if self.metric == "bits_per_byte" else "geometric mean"

    def groups(self) -> list[tuple[str, list[Standing]]]:
        """The rows from the lowest value, in groups with a title: the oracle is not a likelihood, and stands apart."""
        groups: dict[str, list[Standing]] = {"": [], f"Oracle: {KINDS[ORACLE]}": []}
        others, oracles = groups.values()

        def lowest_first(row: Standing) -> float:
            return math.inf if row.main is None else row.main

        for row in sorted(self.rows, key=lowest_first):
            if row.method.named.score.is_likelihood:
                others.append(row)
            else:
                oracles.append(row)
        return [(title, members) for title, members in groups.items() if members]


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
        values = _values([*ranks], name)  # methods without a rank do not count in that of others
        ranks_on_tasks.append(_ranks(values))

    rows = []
    for method in methods:
        mean_rank = None
        if method in ranks and mean_of:
            mean_rank = statistics.fmean(on_task[method] for on_task in ranks_on_tasks)
        rows.append(Standing(method, main[method], means[method], mean_rank, ranks.get(method)))
    models = list(dict.fromkeys(method.named.model for method in methods))
    rows.sort(key=lambda row: (not row.method.named.ar, models.index(row.method.named.model)))
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
    return statistics.fmean(values) if metric == "bits_per_byte" else statistics.geometric_mean(values)


def _ranks(values: Mapping[RankedMethod, float | None]) -> dict[RankedMethod, int]:
    """The ranks of the methods that have one: one more than the number of methods with a lower value."""
    ranks = {}
    for method, value in values.items():
        score = method.named.score
        if score.is_bound or score.doubt or value is None:
            continue  # bounds, and what is neither a likelihood nor a bound, have no rank
        ranks[method] = 1
    for method in ranks:
        for other in ranks:
            if values[other] < values[method] and method.competes_with(other):
                ranks[method] += 1
    return ranks


# ---------------------------------------------------------------- what runs cost


@dataclasses.dataclass(frozen=True)
class Time:
    """The time of a run, and where it was measured."""

    run: Run

    @property
    def tasks(self) -> list[str]:
        return sorted(self.run.every_task)

    @property
    def place(self) -> tuple[str | None, int | None]:
        """Device and number of processes."""
        return self.run.config.duel.get("device"), self.run.config.duel.get("ranks")

    @property
    def tokens(self) -> int | None:
        """Of a run of another model from its samples."""
        if self.run.config.duel.get("tokens"):
            return self.run.config.duel["tokens"]
        total = 0.0
        for task in self.run.tasks.values():
            if task.tokens is None:
                return None
            total += sum(task.tokens.values())
        return int(total) or None

    @property
    def seconds(self) -> float | None:
        """Of scoring alone."""
        return self.run.config.duel.get("seconds")

    @property
    def whole_run(self) -> float | None:
        """Seconds, loading included."""
        return self.run.header.total_evaluation_time_seconds

    @property
    def seconds_per_token(self) -> float | None:
        return self.seconds / self.tokens if self.seconds and self.tokens else None


class Ratio(NamedTuple):
    """Seconds per token over another run's, and the reason: which run that is, or why there is none."""

    value: float | None = None
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class RunCost:
    """The cost of a run, beside the Monte Carlo ELBO of its model and the autoregressive baseline."""

    time: Time
    baseline: bool
    over_elbo: Ratio
    over_ar: Ratio

    @property
    def run(self) -> Run:
        return self.time.run

    @property
    def name(self) -> str:
        """Its estimator, or that it has several."""
        return LATTICE if registry.find(self.run.config.estimator).lattice else self.run.config.estimator


def costs(runs: Sequence[Run], baselines: Collection[Run], rows: Iterable[ComparedRow]) -> list[RunCost]:
    """One entry per run. Ratios are of seconds per token; they are left out if two runs cannot be compared.

    The ELBO is the Monte Carlo one with the most draws that belongs to the report's `rows` of the run.
    """
    timed: dict[Run, Time] = {}
    for run in sorted(runs, key=lambda run: run not in baselines):
        if run.tasks:
            timed[run] = Time(run)
    baseline_times = [time for run, time in timed.items() if run in baselines]
    elbos: dict[Run, Row] = {}
    for each in rows:
        if each.drawn_elbo is not None:
            elbos.setdefault(each.row.run, each.drawn_elbo)
    costs_of_runs = []
    for run, time in timed.items():
        over_elbo = Ratio()
        over_ar = Ratio()
        if run not in baselines:
            over_ar = _ratio(time, baseline_times, "AR run")
            if run.config.estimator != "elbo":
                over_elbo = _over_elbo(time, elbos.get(run), timed)
        costs_of_runs.append(RunCost(time, run in baselines, over_elbo, over_ar))

    models = [run.label for run in timed]
    estimators = [*registry.ESTIMATORS]

    def place(cost: RunCost) -> tuple:
        run = cost.run
        return (
            not cost.baseline,
            models.index(run.label),
            estimators.index(run.config.estimator),
            *sort_key(run.config.rule),
        )

    return sorted(costs_of_runs, key=place)


def _over_elbo(time: Time, elbo: Row | None, timed: Mapping[Run, Time]) -> Ratio:
    """Seconds per token over those of the ELBO of a run."""
    what = "Monte Carlo ELBO"
    if elbo is None:
        return _ratio(time, [], what)
    note = f"the ELBO of {time.run.label}: {elbo.name}, mc_samples={elbo.run.spec.get('mc_samples')}"
    return _ratio(time, [timed[elbo.run]], what, note)


def _ratio(time: Time, others: Sequence[Time], what: str, note: str = "") -> Ratio:
    """Seconds per token over another run's of the same tasks. `note`: about that run."""
    if not others:
        return Ratio(None, f"no {what} to compare with")
    same_tasks = [other for other in others if other.tasks == time.tasks]
    if not same_tasks:
        return Ratio(None, f"the {what} is of other tasks")
    if any(other.run.cached for other in (time, *same_tasks)):
        return Ratio(None, CACHED)

    timed = [other for other in same_tasks if other.seconds_per_token]
    if timed and time.seconds_per_token:
        same_place = [other for other in timed if other.place == time.place]
        if not same_place:
            device, ranks = timed[0].place
            return Ratio(None, f"the {what} ran on {device} x {ranks}")
        return Ratio(time.seconds_per_token / same_place[-1].seconds_per_token, note)

    whole_runs = [other.whole_run for other in same_tasks if other.whole_run]
    if whole_runs and time.whole_run:
        notes = "; ".join(filter(None, [note, WHOLE_RUN]))
        return Ratio(time.whole_run / whole_runs[-1], notes)
    return Ratio(None, f"no time of the {what}")
