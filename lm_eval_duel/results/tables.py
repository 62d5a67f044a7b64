"""The tables of a report: what their rows are, and which columns they have."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from lm_eval_duel.estimators import registry
from lm_eval_duel.results import columns, pairs
from lm_eval_duel.results.columns import Columns, pick
from lm_eval_duel.results.compare import Comparison, Speeds
from lm_eval_duel.results.cost import RunCost
from lm_eval_duel.results.read import Run
from lm_eval_duel.results.rows import Pair, Row
from lm_eval_duel.results.table import LEVEL, WORDS, Cell, Table, form_of, number, span
from lm_eval_duel.rules.tables import adaptive

SPEC = (  # the entries of a spec that are listed
    *("estimator", "rule", "block", "cache", "cheap_cache", "sample"),
    *("elbo_form", "elbo_block", "elbo_eps", "mc_samples"),
    *("pretrained", "revision", "dtype", "windows", "max_length", "special_tokens"),
)
NOT_DECODED = "counts whether greedy decoding would produce the text, which this estimator does not know"
COUNTED = "acc"  # in a loglikelihood task, the share of texts that greedy decoding would produce
NAMES = ("model", "estimator", "rule", "block", "cache")


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
    bits = [] if task.metric == "bits_per_byte" else ["bits"]
    shown = pick(columns.of_rows(task.metric, task.rows), *NAMES, "value", "interval", "stderr", *bits)
    return Table.of(WORDS[task.metric], task.rows, shown)


def gaps(duels: Sequence[Row]) -> Table:
    """ELBO, DUEL, their gaps to the AR model, and gap closed, of each DUEL row."""
    every = columns.of_rows(duels[0].metric, duels)
    names = pick(every, "model", "remarks", "rule", "block", "cache", "elbo")
    names |= {"DUEL": columns.value, LEVEL: columns.interval}
    shown = pick(every, "elbo_gap", "gap", "gap_interval", "closed", "closed_interval")
    return Table.of("Gap to the autoregressive model", duels, names | shown)


def cache_costs(rows: Sequence[Row]) -> Table:
    """Each row under a cache, the row without one, and their paired difference: above 0, the cache costs."""
    metric, unit = rows[0].metric, pairs.unit(rows[0].metric)
    shown: Columns = {
        **pick(columns.of_rows(metric, rows), *NAMES),
        "cache=none": lambda row: columns.value(row.cache_cost.second, metric),
        "with the cache": lambda row: columns.value(row, metric),
        f"cost, nats per {unit}": lambda row: _difference(row.cache_cost),
        LEVEL: lambda row: span(row.cache_cost.interval, "+.4f"),
        "verdict": lambda row: row.cache_cost.verdict,
    }
    return Table.of(f"Cost of the cache, nats per {unit}", rows, shown)


def differences(task: Comparison) -> Table:
    """The task's pairs: what both rows share, their names, the paired difference, and which is better."""

    def shared(cell: Callable[[Any], Cell]) -> Callable[[Pair], Cell]:
        return lambda pair: cell(pair.first) if cell(pair.first) == cell(pair.second) else ""

    every, unit = columns.of_rows(task.metric, task.rows), pairs.unit(task.metric)
    shown: Columns = {
        **{name: shared(every[name].cell) for name in ("model", "estimator", "rule", "block", "cache")},
        "first - second": lambda pair: " - ".join(pair.names),
        f"difference, nats per {unit}": _difference,
        LEVEL: lambda pair: span(pair.interval, "+.4f"),
        "verdict": lambda pair: pair.verdict,
    }
    return Table.of(f"Paired differences, nats per {unit}", task.pairs, shown)


def _difference(pair: Pair) -> Cell:
    return number(pair.difference, "+.4f"), pair.reason


def speeds(of: Speeds) -> Table:
    """The perplexity and NFE of each rule, its interval with it."""
    metric, form = of.rows[0].metric, form_of(of.rows[0].metric)
    shown: Columns = {
        **pick(columns.of_rows(metric, of.rows), "rule"),
        "steps": lambda row: "adaptive" if adaptive(row.rule) else "",
        "NFE per token": lambda row: number(row.nfe_per_token, ".3f"),
        f"DUEL, {WORDS[metric]}": lambda row: number(row.value, form),
        LEVEL: lambda row: span(row.interval, form),
    }
    return Table.of(f"Rules against NFE: {of.title}", of.rows, shown)


# ---------------------------------------------------------------- over tasks


def perplexities(tasks: Mapping[str, Comparison]) -> Table:
    """The value of every row on every task."""
    rows = [row for task in tasks.values() for row in task.rows]
    return _over_tasks("Perplexities", tasks, rows, columns.with_interval)


def gaps_closed(tasks: Mapping[str, Comparison]) -> Table:
    """Gap closed of every DUEL row on every task."""
    rows = [row for task in tasks.values() for row in task.rows if row.duel]
    return _over_tasks("Gap closed over tasks, %", tasks, rows, columns.closed)


def _over_tasks(title: str, tasks: Mapping[str, Comparison], rows: Iterable[Row], cell: Callable[[Row], Cell]) -> Table:
    """A line for each model and method, and a column for each task."""
    methods: dict[str, dict[str, dict[str, Row]]] = {}  # model -> method -> task -> row
    for row in rows:
        methods.setdefault(row.model, {}).setdefault(row.name, {})[row.task] = row
    records = [(model, name, of_name) for model, of_model in methods.items() for name, of_name in of_model.items()]
    shown: Columns = {"model": lambda record: record[0], "method": lambda record: record[1]}
    for name, task in tasks.items():
        shown[f"{name}, {WORDS[task.metric]}"] = lambda record, name=name: (
            cell(record[2][name]) if name in record[2] else ""
        )
    return Table.of(title, records, shown)


# ---------------------------------------------------------------- of runs


def accuracies(name: str, runs: Sequence[Run]) -> Table:
    """Averages of a task other than perplexities, with the harness's standard errors."""
    runs = [run for run in sorted(runs, key=lambda run: not run.baseline) if run.scores(name)]
    metrics = dict.fromkeys(metric for run in runs for metric in run.scores(name))
    shown = pick(columns.name_columns(runs), *NAMES) | {metric: _score(name, metric) for metric in metrics}
    for key in ("documents", "version", "shots"):
        shown[key] = lambda run, key=key: run.every_task[name].identity.get(key)
    return Table.of(f"{name}: {', '.join(metrics)}, ± standard error", runs, shown)


def _score(name: str, metric: str) -> Callable[[Run], Cell]:
    def cell(run: Run) -> Cell:
        if metric not in run.scores(name):
            return ""
        known, error = run.scores(name)[metric]
        decodes = run.every_task[name].output_type != "loglikelihood" or registry.find(run.estimator).decodes
        text = number(known, ".4f", error, unsure=True)
        return text, "" if decodes or metric.split(" (")[0] != COUNTED else NOT_DECODED

    return cell


def cost(costs: Sequence[RunCost]) -> Table:
    """Time, network calls and memory of each run."""

    def entry(key: str, scale: float = 1) -> Callable[[RunCost], Cell]:
        return lambda of: "" if of.run.duel.get(key) is None else number(of.run.duel[key] / scale, ",.0f")

    names = columns.name_columns([of.run for of in costs])
    shown: Columns = {name: lambda of, cell=names[name].cell: cell(of.run) for name in NAMES}
    shown |= {
        "estimator": lambda of: of.name,
        "s per token": lambda of: number(of.seconds_per_token, ".3g"),
        "forwards": entry("forwards"),
        "rows": entry("rows"),
        "peak MiB": entry("peak_memory_bytes", 2**20),
        "x ELBO": lambda of: (number(of.times_elbo, ".3g"), of.times_elbo_reason),
        "x AR": lambda of: (number(of.times_ar, ".3g"), of.times_ar_reason),
        "whole run, s": lambda of: number(of.run.whole_run_seconds, ".1f"),
    }
    return Table.of("Cost", costs, shown)


def files(runs: Sequence[Run]) -> Table:
    """The results files and the spec of each."""
    folder = os.path.commonpath([os.path.dirname(run.name) for run in runs])

    def spec(run: Run) -> str:
        return ", ".join(f"{key}={run.spec[key]}" for key in SPEC if run.spec.get(key, "none") != "none")

    shown: Columns = {
        "file": lambda run: os.path.relpath(run.name, folder),
        "model": lambda run: f"{run.label}{' (AR baseline)' if run.baseline else ''}",
        "fingerprint": lambda run: run.fingerprint,
        "spec": spec,
    }
    return Table.of(f"Below {folder}:", runs, shown)
