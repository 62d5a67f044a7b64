"""The tables of results: columns by name, each with what it shows of a record."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from lm_eval_duel.estimators import registry
from lm_eval_duel.results import pairs
from lm_eval_duel.results.compare import Average, Comparison, Speeds
from lm_eval_duel.results.cost import RunCost
from lm_eval_duel.results.pairs import UNCLEAR
from lm_eval_duel.results.read import Run, Task
from lm_eval_duel.results.rows import Pair, Row
from lm_eval_duel.results.table import LEVEL, WORDS, Bold, Cell, Table, form_of, number, pm, span
from lm_eval_duel.rules.tables import adaptive, without_defaults

SPEC = (  # the entries of a spec that are listed
    *("estimator", "rule", "block", "cache", "cheap_cache", "sample"),
    *("elbo_form", "elbo_block", "elbo_eps", "mc_samples"),
    *("pretrained", "revision", "dtype", "windows", "max_length", "special_tokens"),
)
AVERAGED = "the average includes tasks whose gap closed is not distinguishable from 0; without them it is too high"
NOT_DECODED = "counts whether greedy decoding would produce the text, which this estimator does not know"
COUNTED = "acc"  # in a loglikelihood task, the share of texts that greedy decoding would produce
Columns = dict[str, Callable[[Any], Cell]]


# ---------------------------------------------------------------- columns


def names(records: Iterable[Row | Run]) -> Columns:
    """The columns that say what a row, or a whole run, is; with the cache if any is under one."""

    def run(record: Row | Run) -> Run:
        return record if isinstance(record, Run) else record.run

    cached = any(run(record).has_cache for record in records)
    return {
        "model": lambda record: run(record).label,
        "estimator": lambda record: _title(record) if isinstance(record, Run) else record.title,
        "rule": lambda record: without_defaults(record.rule or ""),
        "block": lambda record: "whole target" if record.block == "none" else record.block,
        "cache": lambda record: run(record).cache if cached else "",
    }


def _title(run: Run) -> str:
    entry = registry.find(run.estimator)
    name = "Lattice" if entry.lattice else entry.title
    return f"{name} ({'baseline' if entry.name == 'ar' else 'AR baseline'})" if run.baseline else name


def value(row: Row | None, metric: str | None = None) -> str:
    """A row's value, or that of another metric of it, with its bound and its Monte Carlo error."""
    if row is None or (known := row.metrics.get(metric or row.metric)) is None:
        return ""
    form, error = form_of(metric or row.metric), row.error(row.nats_stderr, metric)
    unsure = " ± ?" if row.stderr_reason and error is None else ""
    text = f"{'≤ ' if row.bound else ''}{number(known, form)}{pm(error, form)}{unsure}"
    return Bold(text) if row.best and metric is None else text


def gap(row: Row | None) -> str:
    """The gap to the autoregressive model, with the error of the row's value."""
    if row is None or row.gap is None:
        return ""
    form = f"+{form_of(row.metric)}"
    return f"{number(row.gap, form)}{pm(row.stderr, form)}{' ± ?' if row.stderr_reason else ''}"


def closed(row: Row, unit: str = "") -> str:
    """Gap closed, or that it is not distinguishable from 0."""
    if row.gap_closed is None:
        return UNCLEAR if row.distinguishable is False else ""
    return f"{number(row.gap_closed, '.1f')}{pm(row.gap_closed_stderr, '.1f')}{unit}"


def interval(row: Row) -> str:
    """The interval over documents of a row's value, or else its error over windows."""
    windows = "" if row.window_stderr is None else f"s.e. {row.window_stderr:.2g} over windows"
    return span(row.interval, form_of(row.metric)) or windows


# ---------------------------------------------------------------- of a task


def task_tables(task: Comparison) -> Iterator[tuple[str, Table]]:
    """The tables of a task, each with the stem of its file."""
    if duels := [row for row in task.rows if row.duel]:
        yield "gap", gaps(duels)
    yield "methods", values(task)
    if cached := [row for row in task.rows if row.cache_cost]:
        yield "cache", cache_costs(cached)
    if task.pairs:
        yield "pairs", differences(task)
    for of_model in task.rules:
        yield "rules", speeds(of_model)


def values(task: Comparison) -> Table:
    """Perplexity of every row with its interval or standard error, or a remark that says why it has neither."""
    columns: Columns = {
        **names(task.rows),
        WORDS[task.metric]: value,
        LEVEL: lambda row: (interval(row), row.reason),
        "s.e. (Monte Carlo)": lambda row: (pm(row.stderr, ".2g").removeprefix(" ± "), row.stderr_reason),
    }
    if task.metric != "bits_per_byte":
        columns["bits per byte"] = lambda row: value(row, "bits_per_byte")
    return Table.of(WORDS[task.metric], task.rows, columns)


def gaps(duels: Sequence[Row]) -> Table:
    """For each DUEL row: ELBO, DUEL, their gaps to the AR model, and gap closed."""
    form, named = form_of(duels[0].metric), names(duels)
    named["estimator"] = lambda row: row.qualifiers
    columns: Columns = {
        **{"remarks" if key == "estimator" else key: column for key, column in named.items()},
        "ELBO": lambda row: value(row.elbo),
        "DUEL": value,
        LEVEL: interval,
        "ELBO's gap": lambda row: gap(row.elbo),
        "DUEL's gap": gap,
        "its 95 % interval": lambda row: span(row.gap_interval, f"+{form}"),
        "gap closed": lambda row: (closed(row, " %"), row.gap_closed_reason),
        "95 % interval of it": lambda row: span(row.gap_closed_interval, ".1f"),
    }
    return Table.of("Gap to the autoregressive model", duels, columns)


def cache_costs(rows: Sequence[Row]) -> Table:
    """Each row under a cache next to the one without, and their paired difference: above 0, the cache costs."""
    metric, unit = rows[0].metric, pairs.unit(rows[0].metric)
    columns: Columns = {
        **names(rows),
        "cache=none": lambda row: value(row.cache_cost.second, metric),
        "with the cache": lambda row: value(row, metric),
        f"cost, nats per {unit}": lambda row: _difference(row.cache_cost),
        LEVEL: lambda row: span(row.cache_cost.interval, "+.4f"),
        "verdict": lambda row: row.cache_cost.verdict,
    }
    return Table.of(f"Cost of the cache, nats per {unit}", rows, columns)


def differences(task: Comparison) -> Table:
    """The task's pairs: what both rows share, their names, the paired difference, and which is better."""

    def shared(column: Callable[[Any], Cell]) -> Callable[[Pair], Cell]:
        return lambda pair: column(pair.first) if column(pair.first) == column(pair.second) else ""

    named, unit = names(task.rows), pairs.unit(task.metric)
    columns: Columns = {
        **{key: shared(named[key]) for key in ("model", "block", "cache")},
        "first - second": lambda pair: " - ".join(pair.names),
        f"difference, nats per {unit}": _difference,
        LEVEL: lambda pair: span(pair.interval, "+.4f"),
        "verdict": lambda pair: pair.verdict,
    }
    return Table.of(f"Paired differences, nats per {unit}", task.pairs, columns)


def _difference(pair: Pair) -> Cell:
    return "" if pair.difference is None else number(pair.difference, "+.4f"), pair.reason


def speeds(of: Speeds) -> Table:
    """The perplexity and NFE of each rule, its interval with it."""
    metric = of.rows[0].metric
    columns: Columns = {
        "rule": lambda row: without_defaults(row.rule),
        "steps": lambda row: "adaptive" if adaptive(row.rule) else "",
        "NFE per token": lambda row: number(row.nfe_per_token, ".3f"),
        f"DUEL, {WORDS[metric]}": lambda row: number(row.value, form_of(metric)),
        LEVEL: lambda row: span(row.interval, form_of(metric)),
    }
    return Table.of(f"Rules against NFE: {of.title}", of.rows, columns)


# ---------------------------------------------------------------- over tasks


def perplexities(tasks: Mapping[str, Comparison]) -> Table:
    """Every row on every task."""
    methods: dict[str, dict[str, dict[str, Row]]] = {}  # model -> method -> task -> row
    for name, task in tasks.items():
        for row in task.rows:
            methods.setdefault(row.model, {}).setdefault(row.name, {})[name] = row

    def shown(name: str) -> Callable[[tuple[str, str, dict[str, Row]]], str]:
        return lambda record: with_interval(record[2].get(name))

    columns: Columns = {"model": lambda record: record[0], "method": lambda record: record[1]}
    columns |= {f"{name}, {WORDS[task.metric]}": shown(name) for name, task in tasks.items()}
    records = [(model, name, rows) for model, of_model in methods.items() for name, rows in of_model.items()]
    return Table.of("Perplexities", records, columns)


def with_interval(row: Row | None) -> str:
    """A row's value with its interval in brackets."""
    text = value(row)
    return type(text)(f"{text} ({span(row.interval, form_of(row.metric))})") if row and row.interval else text


def averages(tasks: Iterable[str], averages: Sequence[Average]) -> Table | None:
    """Gap closed, one column per task, and the average; None if no task has any."""
    if not any(row.gap_closed is not None for average in averages for row in average.rows.values()):
        return None

    def of_task(name: str) -> Callable[[Average], str]:
        return lambda of: closed(of.rows[name]) if name in of.rows else ""

    def average(of: Average) -> str:
        known = "" if of.average is None else f"{number(of.average, '.1f')}{pm(of.stderr, '.1f')}"
        return UNCLEAR if of.unclear else known

    def count(of: Average) -> Cell:
        unclear = any(row.distinguishable is False for row in of.rows.values())
        shown = average(of)
        return str(of.averaged) if shown else "", AVERAGED if unclear and shown else ""

    columns: Columns = {"model": lambda of: of.model, "estimator": lambda of: of.name}
    columns |= {name: of_task(name) for name in tasks} | {"average": average, "of": count}
    return Table.of("Gap closed over tasks, %", averages, columns)


def accuracies(runs: Sequence[Run]) -> Iterator[tuple[str, Table]]:
    """Metrics other than perplexity, with the harness's standard errors: a table for each task."""
    of_task: dict[str, list[tuple[Run, Task]]] = {}
    for run in sorted(runs, key=lambda run: not run.baseline):
        for name, task in {**run.tasks, **run.others}.items():
            if task.scores:
                of_task.setdefault(name, []).append((run, task))
    for name, found in of_task.items():
        metrics = dict.fromkeys(metric for _, task in found for metric in task.scores)
        columns: Columns = {key: _first(column) for key, column in names([run for run, _ in found]).items()}
        columns |= {metric: _score(metric) for metric in metrics}
        columns |= {key: _identity(key) for key in ("documents", "version", "shots")}
        yield name, Table.of(f"{name}: {', '.join(metrics)}, ± standard error", found, columns)


def _first(column: Callable[[Any], Cell]) -> Callable[[tuple[Run, Task]], Cell]:
    return lambda record: column(record[0])


def _identity(key: str) -> Callable[[tuple[Run, Task]], Cell]:
    return lambda record: record[1].identity.get(key)


def _score(metric: str) -> Callable[[tuple[Run, Task]], Cell]:
    def shown(record: tuple[Run, Task]) -> Cell:
        run, task = record
        if metric not in task.scores:
            return ""
        known, error = task.scores[metric]
        decodes = task.output_type != "loglikelihood" or registry.find(run.estimator).decodes
        text = f"{number(known, '.4f')}{' ± ?' if error is None else pm(error, '.4f')}"
        return text, "" if decodes or metric.split(" (")[0] != COUNTED else NOT_DECODED

    return shown


# ---------------------------------------------------------------- of runs


def cost(costs: Sequence[RunCost]) -> Table:
    """Time, network calls and memory of each run."""

    def shown(form: str, read: Callable[[RunCost], float | None]) -> Callable[[RunCost], str]:
        return lambda of: "" if read(of) is None else number(read(of), form)

    def entry(key: str, scale: float = 1) -> Callable[[RunCost], float | None]:
        return lambda of: None if of.run.duel.get(key) is None else of.run.duel[key] / scale

    named = names([of.run for of in costs])
    columns: Columns = {key: lambda of, column=column: column(of.run) for key, column in named.items()}
    columns |= {
        "estimator": lambda of: of.name,
        "s per token": shown(".3g", lambda of: of.seconds_per_token),
        "forwards": shown(",.0f", entry("forwards")),
        "rows": shown(",.0f", entry("rows")),
        "peak MiB": shown(",.0f", entry("peak_memory_bytes", 2**20)),
        "x ELBO": lambda of: (shown(".3g", lambda of: of.times_elbo)(of), of.times_elbo_reason),
        "x AR": lambda of: (shown(".3g", lambda of: of.times_ar)(of), of.times_ar_reason),
        "whole run, s": shown(".1f", lambda of: of.run.whole_run_seconds),
    }
    return Table.of("Cost", costs, columns)


def files(runs: Sequence[Run]) -> Table:
    """The results files and the spec of each."""
    folder = os.path.commonpath([os.path.dirname(run.name) for run in runs])

    def spec(run: Run) -> str:
        return ", ".join(f"{key}={run.spec[key]}" for key in SPEC if run.spec.get(key, "none") != "none")

    columns: Columns = {
        "file": lambda run: os.path.relpath(run.name, folder),
        "model": lambda run: f"{run.label}{' (AR baseline)' if run.baseline else ''}",
        "fingerprint": lambda run: run.fingerprint,
        "spec": spec,
    }
    return Table.of(f"Below {folder}:", runs, columns)
