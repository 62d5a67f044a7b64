"""The tables of a report, as columns that say what they show of a record. Their forms are in `table`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lm_eval_duel.results import pairs
from lm_eval_duel.results.accuracy import Accuracy
from lm_eval_duel.results.records import UNCLEAR, Average, Pair, Row, Speeds, TaskComparison, block_name
from lm_eval_duel.results.run_cost import Cost
from lm_eval_duel.results.table import CODE, RULE, WORDS, Cell, Column, Table, form_of
from lm_eval_duel.rules.tables import adaptive

SPEC = (  # the entries of a spec that are listed
    *("estimator", "rule", "block", "cache", "cheap_cache", "sample"),
    *("elbo_form", "elbo_block", "elbo_eps", "mc_samples"),
    *("pretrained", "revision", "dtype", "windows", "max_length", "special_tokens"),
)
AVERAGED = "the average includes tasks whose gap closed is not distinguishable from 0; without them it is too high"
TRACES = (
    "nll: negative log-likelihood, in nats. position x step: correlation of a token's position in its block with its "
    "step; +1 is left to right, -1 right to left."
)
MODEL = Column("model", cell=lambda record: record.run.label)
ESTIMATOR = Column("estimator", cell=lambda row: row.title)
UNMASKING = Column("rule", RULE, cell=lambda row: row.rule)
BLOCK = Column("block", cell=lambda row: block_name(row.block))
NAME = Column("estimator", cell=lambda record: record.name)
OF_RUN = (  # of records of a whole run
    *(MODEL, NAME, Column("rule", RULE, cell=lambda record: record.run.rule)),
    Column("block", cell=lambda record: block_name(record.run.block)),
)


def cache(records: Iterable[Any]) -> Column:
    """The cache of each record; nothing if none is under a cache."""
    used = any(record.run.has_cache for record in records)
    return Column("cache", cell=lambda record: record.run.cache if used else None)


def task_tables(task: TaskComparison) -> Iterator[tuple[str, str, Table]]:
    """The tables of a task, each with the stem of its file and its title."""
    unit = pairs.unit(task.metric)
    if duels := [row for row in task.rows if row.duel]:
        yield "gap", "Gap to the autoregressive model", gaps(duels)
    yield "methods", WORDS[task.metric], values(task)
    if cached := [row for row in task.rows if row.cache_cost]:
        yield "cache", f"Cost of the cache, nats per {unit}", cache_costs(cached)
    if task.pairs:
        yield "pairs", f"Paired differences, nats per {unit}", differences(task)
    for of_model in task.rules:
        yield "rules", f"Rules against NFE: {of_model.title}", speeds(of_model)


# ---------------------------------------------------------------- of a task


def shown(row: Row | None, metric: str | None = None) -> Cell:
    """A row's value, or that of another metric of it, with its Monte Carlo error."""
    if row is None or (metric or row.metric) not in row.metrics:
        return Cell()
    error = row.stderrs[metric or row.metric]
    unsure = bool(row.stderr_reason) and error is None
    best = row.best and metric is None
    return Cell(row.metrics[metric or row.metric], stderr=error, bound=row.bound, best=best, unsure=unsure)


def with_interval(row: Row) -> Cell:
    """A row's value with its interval, or its error over windows, or why it has neither."""
    windows = "" if row.window_stderr is None else f"s.e. {row.window_stderr:.2g} over windows"
    return replace(shown(row), interval=row.interval, instead=windows, note=row.reason)


def closed(row: Row) -> Cell:
    """Gap closed, or that it is not distinguishable from 0."""
    value = UNCLEAR if row.closed.distinguishable is False else row.closed.value
    return Cell(value, row.closed.interval, row.closed.stderr, note=row.closed.reason)


def values(task: TaskComparison) -> Table:
    """Perplexity of every row with its interval or standard error, or a remark that says why it has neither."""
    columns = [MODEL, ESTIMATOR, UNMASKING, BLOCK, cache(task.rows)]
    columns.append(Column(WORDS[task.metric], form_of(task.metric), cell=with_interval))
    columns.append(Column("s.e. (Monte Carlo)", ".2g", cell=lambda row: Cell(row.stderr, note=row.stderr_reason)))
    if task.metric != "bits_per_byte":
        bits = "bits_per_byte"
        columns.append(Column(WORDS[bits], form_of(bits), cell=lambda row: shown(row, bits)))
    return Table.from_records(task.rows, columns, WORDS[task.metric])


def gaps(duels: Sequence[Row]) -> Table:
    """For each DUEL row: ELBO, DUEL, their gaps to the AR model, and gap closed."""
    metric = duels[0].metric
    form = form_of(metric)

    def gap(row: Row | None) -> Cell:
        """The gap to the autoregressive model, with the error of the row's value."""
        return Cell() if row is None or row.gap is None else replace(shown(row), value=row.gap, bound=False, best=False)

    columns = [
        *(MODEL, UNMASKING, Column("remarks", cell=lambda row: row.qualifiers), BLOCK, cache(duels)),
        Column("ELBO", form, cell=lambda row: shown(row.elbo)),
        Column("DUEL", form, cell=lambda row: replace(shown(row), interval=row.interval)),
        Column("ELBO's gap", f"+{form}", cell=lambda row: gap(row.elbo)),
        Column("DUEL's gap", f"+{form}", cell=lambda row: replace(gap(row), interval=row.gap_interval)),
        Column("gap closed", ".1f", " %", cell=closed),
    ]
    return Table.from_records(duels, columns, WORDS[metric])


def _difference(pair: Pair) -> Cell:
    return Cell(pair.difference, pair.interval, note=pair.reason)


def cache_costs(rows: Sequence[Row]) -> Table:
    """Each row under a cache next to the one without, and their paired difference: above 0, the cache costs."""
    metric = rows[0].metric
    columns = [
        *(MODEL, ESTIMATOR, UNMASKING, BLOCK, Column("cache", cell=lambda row: row.run.cache)),
        Column("cache=none", form_of(metric), cell=lambda row: shown(row.cache_cost.second, metric)),
        Column("with the cache", form_of(metric), cell=lambda row: shown(row, metric)),
        Column(f"cost, nats per {pairs.unit(metric)}", "+.4f", cell=lambda row: _difference(row.cache_cost)),
        Column("verdict", cell=lambda row: row.cache_cost.verdict),
    ]
    return Table.from_records(rows, columns, WORDS[metric])


def differences(task: TaskComparison) -> Table:
    """The task's pairs: what both rows share, their names, the paired difference, and which is better."""

    def shared(column: Column) -> Column:
        def cell(pair: Pair) -> Any:
            first, second = column.cell(pair.first), column.cell(pair.second)
            return first if first == second else ""

        return replace(column, cell=cell)

    columns = [
        *map(shared, (MODEL, BLOCK, cache(task.rows))),
        Column("first - second", cell=lambda pair: " - ".join(pair.names)),
        Column(f"difference, nats per {pairs.unit(task.metric)}", "+.4f", cell=_difference),
        Column("verdict", cell=lambda pair: pair.verdict),
    ]
    return Table.from_records(task.pairs, columns)


def speeds(of: Speeds) -> Table:
    """The perplexity and NFE of each rule, its interval with it."""
    metric = of.rows[0].metric
    columns = [
        *(UNMASKING, Column("steps", cell=lambda row: "adaptive" if adaptive(row.rule) else "")),
        Column("NFE per token", ".3f", cell=lambda row: row.nfe_per_token),
        Column(f"DUEL, {WORDS[metric]}", form_of(metric), cell=lambda row: Cell(row.value, row.interval)),
    ]
    return Table.from_records(of.rows, columns, of.title)


# ---------------------------------------------------------------- over tasks


def perplexities(tasks: Mapping[str, TaskComparison]) -> Table:
    """Every row on every task."""
    methods: dict[str, dict[str, dict[str, Row]]] = {}  # model -> method -> task -> row
    for name, task in tasks.items():
        for row in task.rows:
            methods.setdefault(row.model, {}).setdefault(row.name, {})[name] = row

    def value(row: Row | None) -> Cell:
        return Cell() if row is None else replace(shown(row), interval=row.interval)

    columns = [Column("model"), Column("method")]
    columns += [Column(f"{name}, {WORDS[task.metric]}", form_of(task.metric)) for name, task in tasks.items()]
    rows = [
        [model, method, *(value(by_task.get(name)) for name in tasks)]
        for model, of_model in methods.items()
        for method, by_task in of_model.items()
    ]
    return Table(columns, rows, inline=True)


def averages(names: Iterable[str], averages: Sequence[Average]) -> Table | None:
    """Gap closed, one column per task, and the average; None if no task has any."""
    if not any(value is not None for row in averages for value in row.tasks.values()):
        return None

    def closed(row: Average, name: str) -> Cell:
        return Cell(UNCLEAR) if name in row.unclear else Cell(row.tasks.get(name), stderr=row.stderrs.get(name))

    def average(row: Average) -> Cell:
        return Cell(UNCLEAR) if row.average_unclear else Cell(row.average, stderr=row.average_stderr)

    def count(row: Average) -> Cell:
        known = average(row).value is not None
        return Cell(row.averaged if known else None, note=AVERAGED if row.unclear and known else "")

    columns = [Column("model", cell=lambda row: row.model), NAME]
    columns += [Column(name, ".1f", cell=lambda row, name=name: closed(row, name)) for name in names]
    columns += [Column("average", ".1f", cell=average), Column("of", ",d", cell=count)]
    return Table.from_records(averages, columns, "gap closed, %")


def accuracies(task: str, rows: Sequence[Accuracy]) -> Table:
    """Metrics other than perplexity, with the harness's standard errors."""

    def score(row: Accuracy, metric: str) -> Cell:
        known = row.scores.get(metric)
        value, error = (None, None) if known is None else (known.value, known.stderr)
        return Cell(value, stderr=error, unsure=error is None, note=row.reason)

    metrics = dict.fromkeys(metric for row in rows for metric in row.scores)
    columns = [*OF_RUN, cache(rows)]
    columns += [Column(metric, ".4f", cell=lambda row, metric=metric: score(row, metric)) for metric in metrics]
    columns += [
        Column(key, cell=lambda row, key=key: row.task.identity.get(key)) for key in ("documents", "version", "shots")
    ]
    return Table.from_records(rows, columns, f"{task}: {', '.join(metrics)}, +- standard error")


# ---------------------------------------------------------------- of runs and traces


def cost(costs: Sequence[Cost]) -> Table:
    """Time, network calls and memory of each run."""

    def peak(cost: Cost) -> float | None:
        return None if cost.peak_memory_bytes is None else cost.peak_memory_bytes / 2**20

    columns = [
        *(*OF_RUN, cache(costs), Column("s per token", ".3g", cell=lambda cost: cost.seconds_per_token)),
        Column("forwards", ",d", cell=lambda cost: cost.forwards),
        Column("rows", ",d", cell=lambda cost: cost.rows),
        Column("peak MiB", ",.0f", cell=peak),
        Column("x ELBO", ".3g", cell=lambda cost: Cell(cost.times_elbo, note=cost.times_elbo_reason)),
        Column("x AR", ".3g", cell=lambda cost: Cell(cost.times_ar, note=cost.times_ar_reason)),
        Column("whole run, s", ".1f", cell=lambda cost: cost.run.whole_run_seconds),
    ]
    return Table.from_records(costs, columns)


def traces(summaries: Sequence[Mapping[str, Any]]) -> Table:
    """Each trace in a few numbers; report.json has the arrays."""

    def at(end: int) -> Any:
        return lambda trace: trace["by_step"]["mean_nll"][end] if trace["by_step"] else None

    columns = [
        Column("trace", cell=lambda trace: trace["label"]),
        Column("windows", ",d", cell=lambda trace: trace["windows"]),
        Column("tokens", ",d", cell=lambda trace: trace["tokens"]),
        Column("nll per token", ".3f", cell=lambda trace: trace["mean_nll"]),
        *(Column("first step", ".3f", cell=at(0)), Column("last step", ".3f", cell=at(-1))),
        Column("position x step", "+.2f", cell=lambda t: t["left_to_right"] if t["ordered"] else "no order"),
        Column(" ", cell=lambda trace: trace["flag"]),
    ]
    return Table.from_records(summaries, columns)


def files(results: Sequence[Mapping[str, Any]]) -> Table:
    """The results files and the spec of each."""
    folder = os.path.commonpath([os.path.dirname(result["file"]) for result in results])

    def spec(result: Mapping[str, Any]) -> str:
        return ", ".join(f"{key}={result['spec'][key]}" for key in SPEC if result["spec"].get(key, "none") != "none")

    columns = [
        Column("file", cell=lambda result: os.path.relpath(result["file"], folder)),
        Column("model", cell=lambda result: f"{result['model']}{' (AR baseline)' if result['ar'] else ''}"),
        Column("fingerprint", CODE, cell=lambda result: result["fingerprint"]),
        Column("spec", cell=spec),
    ]
    return Table.from_records(results, columns, f"Below {folder}:")
