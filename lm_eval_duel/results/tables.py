"""The columns of results, by name: the heads and the cells of every table, picked by `pick`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lm_eval_duel.estimators import registry
from lm_eval_duel.results import compare as pairs
from lm_eval_duel.results.board import Board, BoardRow
from lm_eval_duel.results.compare import Comparison, Speeds
from lm_eval_duel.results.cost import RunCost
from lm_eval_duel.results.read import Run
from lm_eval_duel.results.rows import Pair, Row
from lm_eval_duel.results.stats import UNCLEAR
from lm_eval_duel.results.table import LEVEL, WORDS, Bold, Cell, Table, form_of, number, span
from lm_eval_duel.rules.tables import adaptive, without_defaults

SHORT = {  # heads of values after the name of a task
    "token_perplexity": "ppl/token",
    "perplexity": "ppl",
    "word_perplexity": "ppl/word",
    "byte_perplexity": "ppl/byte",
    "bits_per_byte": "bits/byte",
}


Columns = dict[str, Callable[[Any], Cell]]  # the cells of a table by their heads, as `Table.of` takes them


class Column(NamedTuple):
    """A head, and the cell of a record below it.

    `short`: the head after the name of a task, if it has another one. On a leaderboard also `group`, of columns that
    the page can hide together, and `below`, the interval that stands below a cell.
    """

    head: str
    cell: Callable[[Any], Cell]
    short: str = ""
    group: str = "name"
    below: Callable[[Any], str] = lambda record: ""


def pick(columns: Mapping[str, Column], *names: str) -> Columns:
    """Pick the columns of a table by name."""
    return {columns[name].head: columns[name].cell for name in names}


def name_columns(records: Sequence[Row | Run]) -> dict[str, Column]:
    """The columns that name rows, or whole runs. The cache is named if any of them is under one."""

    def run(record: Row | Run) -> Run:
        return record if isinstance(record, Run) else record.run

    cached = any(run(record).has_cache for record in records)
    return {
        "model": Column("model", lambda record: run(record).label),
        "estimator": Column("estimator", lambda record: record.title),
        "rule": Column("rule", lambda record: without_defaults(record.rule or "")),
        "block": Column("block", lambda record: "whole target" if record.block == "none" else record.block),
        "cache": Column("cache", lambda record: run(record).cache if cached else ""),
    }


def of_rows(metric: str, rows: Sequence[Row]) -> dict[str, Column]:
    """The columns of rows in a table of this metric."""
    form, bits = form_of(metric), "bits_per_byte"
    return {
        **name_columns(rows),
        "remarks": Column("remarks", lambda row: row.qualifiers),
        "value": Column(WORDS[metric], value, SHORT[metric]),
        "interval": Column(LEVEL, lambda row: (interval(row), row.reason)),
        "stderr": Column("s.e. (Monte Carlo)", lambda row: (number(row.stderr, ".2g"), row.stderr_reason)),
        "bits": Column("bits per byte", lambda row: value(row, bits), "bits/byte"),
        "elbo": Column("ELBO", lambda row: value(row.elbo)),
        "elbo_gap": Column("ELBO's gap", lambda row: gap(row.elbo)),
        "gap": Column("DUEL's gap", gap, "gap"),
        "gap_interval": Column("its 95 % interval", lambda row: span(row.gap_interval, f"+{form}")),
        "closed": Column("gap closed", lambda row: (closed(row, " %"), row.gap_closed_reason)),
        "share": Column("gap closed, %", lambda row: (closed(row), row.gap_closed_reason)),
        "closed_interval": Column("95 % interval of it", lambda row: span(row.gap_closed_interval, ".1f")),
        "nfe": Column("NFE per token", lambda row: number(row.nfe_per_token, ".3f")),
    }


def of_board(board: Board) -> list[Column]:
    """The columns of a leaderboard, empty ones included; those of results stand once for each column of the board."""
    bits, results = "bits_per_byte", [result for row in board.rows for result in row.results.values()]
    every, form = of_rows(board.metric, results), form_of(board.metric)
    found = [Column("#", lambda row: str(row.rank or ""))]
    for name in ("model", "estimator", "rule", "block", "cache"):
        found.append(Column(name, lambda row, cell=every[name].cell: cell(row.named)))
    if board.mean_of:
        title = f"{'mean' if board.metric == bits else 'geometric mean'}, {len(board.mean_of)} tasks"
        found.append(Column(title, lambda row: number(row.mean, form, bound=row.named.bound), group="mean"))
        found.append(Column("mean rank", lambda row: number(row.mean_rank, ".2f"), group="mean"))
    groups = {"value": Column("", _plain_value, SHORT[board.metric], below=interval)}
    if board.metric != bits:
        groups["bits"] = every["bits"]
    groups["gap"] = every["gap"]._replace(below=every["gap_interval"].cell)
    if any(result.distinguishable is not None for result in results):
        groups["closed"] = every["share"]._replace(below=every["closed_interval"].cell)
    for group, column in groups.items():
        for task in board.columns:
            cell, below = (_of_task(task.id, shown) for shown in (column.cell, column.below))
            found.append(Column(f"{task.label} {column.short or column.head}", cell, group=group, below=below))
    return [
        *found,
        Column("NFE per token", lambda row: number(row.nfe_per_token, ".3f"), group="cost"),
        Column("seconds per token", lambda row: number(row.seconds_per_token, ".2g"), group="cost"),
        Column("device", lambda row: row.device, group="source"),
        Column("parameters", lambda row: number(row.parameters, ",d"), group="source"),
        Column("fingerprint", lambda row: row.fingerprint, group="source"),
        Column("versions", lambda row: ", ".join(map(" ".join, row.versions.items())), group="source"),
        Column("date", lambda row: row.date[:10], group="source"),
    ]


def _plain_value(result: Row) -> Cell:
    """A result's value, never bold. Its remark says why it has no error or interval."""
    return str(value(result)), "; ".join(filter(None, [result.stderr_reason, result.reason]))


def _of_task(column: str, cell: Callable[[Row], Any]) -> Callable[[BoardRow], Any]:
    """A cell of the result in a column, empty if there is none."""
    return lambda row: cell(row.results[column]) if column in row.results else ""


# ---------------------------------------------------------------- cells


def value(row: Row | None, metric: str | None = None) -> str:
    """A row's value, or its value in another metric, with its bound and its Monte Carlo error."""
    if row is None:
        return ""
    best, metric = row.best and metric is None, metric or row.metric
    stderr, unsure = row.error(row.nats_stderr, metric), bool(row.stderr_reason)
    text = number(row.metrics.get(metric), form_of(metric), stderr, row.bound, unsure)
    return Bold(text) if best else text


def interval(row: Row) -> str:
    """The interval over documents of a row's value, or else its error over windows."""
    windows = "" if row.window_stderr is None else f"s.e. {number(row.window_stderr, '.2g')} over windows"
    return span(row.interval, form_of(row.metric)) or windows


def with_interval(row: Row) -> str:
    """A row's value with its interval in brackets."""
    text = value(row)
    return type(text)(f"{text} ({span(row.interval, form_of(row.metric))})") if row.interval else text


def gap(row: Row | None) -> str:
    """The gap to the autoregressive model, with the bound and the error of the row's value."""
    if row is None:
        return ""
    return number(row.gap, f"+{form_of(row.metric)}", row.stderr, row.bound, bool(row.stderr_reason))


def closed(row: Row, unit: str = "") -> str:
    """Gap closed, or that it is not distinguishable from 0."""
    if row.gap_closed is None:
        return UNCLEAR if row.distinguishable is False else ""
    return number(row.gap_closed, ".1f", row.gap_closed_stderr) + unit


# ---------------------------------------------------------------- tables
# The tables of a report: what their rows are, and which columns they have.


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
    shown = pick(of_rows(task.metric, task.rows), *NAMES, "value", "interval", "stderr", *bits)
    return Table.of(WORDS[task.metric], task.rows, shown)


def gaps(duels: Sequence[Row]) -> Table:
    """ELBO, DUEL, their gaps to the AR model, and gap closed, of each DUEL row."""
    every = of_rows(duels[0].metric, duels)
    names = pick(every, "model", "remarks", "rule", "block", "cache", "elbo")
    names |= {"DUEL": value, LEVEL: interval}
    shown = pick(every, "elbo_gap", "gap", "gap_interval", "closed", "closed_interval")
    return Table.of("Gap to the autoregressive model", duels, names | shown)


def cache_costs(rows: Sequence[Row]) -> Table:
    """Each row under a cache, the row without one, and their paired difference: above 0, the cache costs."""
    metric, unit = rows[0].metric, pairs.unit(rows[0].metric)
    shown: Columns = {
        **pick(of_rows(metric, rows), *NAMES),
        "cache=none": lambda row: value(row.cache_cost.second, metric),
        "with the cache": lambda row: value(row, metric),
        f"cost, nats per {unit}": lambda row: _difference(row.cache_cost),
        LEVEL: lambda row: span(row.cache_cost.interval, "+.4f"),
        "verdict": lambda row: row.cache_cost.verdict,
    }
    return Table.of(f"Cost of the cache, nats per {unit}", rows, shown)


def differences(task: Comparison) -> Table:
    """The task's pairs: what both rows share, their names, the paired difference, and which is better."""

    def shared(cell: Callable[[Any], Cell]) -> Callable[[Pair], Cell]:
        return lambda pair: cell(pair.first) if cell(pair.first) == cell(pair.second) else ""

    every, unit = of_rows(task.metric, task.rows), pairs.unit(task.metric)
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
        **pick(of_rows(metric, of.rows), "rule"),
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
    return _over_tasks("Perplexities", tasks, rows, with_interval)


def gaps_closed(tasks: Mapping[str, Comparison]) -> Table:
    """Gap closed of every DUEL row on every task."""
    rows = [row for task in tasks.values() for row in task.rows if row.duel]
    return _over_tasks("Gap closed over tasks, %", tasks, rows, closed)


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
    shown = pick(name_columns(runs), *NAMES) | {metric: _score(name, metric) for metric in metrics}
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

    names = name_columns([of.run for of in costs])
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
