"""The tables of a report: what their rows are, and which columns they have."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from lm_eval_duel.estimators import registry
from lm_eval_duel.results import compare
from lm_eval_duel.results.compare import ComparedRow, Comparison, Pair, Speeds
from lm_eval_duel.results.cost import RunCost
from lm_eval_duel.results.rows import Row
from lm_eval_duel.results.runs import Run
from lm_eval_duel.results.standings import Standings
from lm_eval_duel.results.stats import UNCLEAR
from lm_eval_duel.results.table import LEVEL, WORDS, Bold, Cell, Head, Table, form_of, number, span
from lm_eval_duel.rules.tables import adaptive, without_defaults

SHORT = {  # heads of values after the name of a task
    "token_perplexity": "ppl/token",
    "perplexity": "ppl",
    "word_perplexity": "ppl/word",
    "byte_perplexity": "ppl/byte",
    "bits_per_byte": "bits/byte",
}


Columns = dict[str, Callable[[Any], Cell]]  # the cells of a table by their heads, as `Table.of` takes them


def named(records: Sequence[Row | Run], baselines: Collection[Run] = ()) -> Columns:
    """The columns that name rows, or whole runs. The cache is named if any of them is under one."""

    def run(record: Row | Run) -> Run:
        return record if isinstance(record, Run) else record.run

    def estimator(record: Row | Run) -> str:
        return record.title if isinstance(record, Row) else run_title(record, record in baselines)

    cached = any(run(record).has_cache for record in records)
    return {
        "model": lambda record: run(record).label,
        "estimator": estimator,
        "rule": lambda record: without_defaults(record.rule or ""),
        "block": lambda record: "whole target" if record.block == "none" else record.block,
        "cache": lambda record: run(record).cache if cached else "",
    }


def names_of(compared: Sequence[ComparedRow]) -> Columns:
    """The columns that name rows of a table."""
    columns = named([each.row for each in compared])
    return {head: lambda each, cell=cell: cell(each.row) for head, cell in columns.items()}


def run_title(run: Run, baseline: bool) -> str:
    """The estimator of a run, or that it was a lattice run, and whether it is the baseline."""
    entry = registry.find(run.estimator)
    name = "Lattice" if entry.lattice else entry.title
    return f"{name} ({'baseline' if entry.name == 'ar' else 'AR baseline'})" if baseline else name


# ---------------------------------------------------------------- cells


def value(row: Row | None, metric: str | None = None) -> str:
    """A row's value, or its value in another metric, with its bound and its Monte Carlo error."""
    if row is None:
        return ""
    metric = metric or row.metric
    stderr, unsure = row.error(row.nats_stderr, metric), bool(row.stderr_reason)
    return number(row.metrics.get(metric), form_of(metric), stderr, row.bound, unsure)


def marked(each: ComparedRow) -> str:
    """A row's value, in bold if it is the best of its model."""
    text = value(each.row)
    return Bold(text) if each.best else text


def interval(each: ComparedRow) -> str:
    """The interval over documents of a row's value, or else its error over windows."""
    windows = "" if each.window_stderr is None else f"s.e. {number(each.window_stderr, '.2g')} over windows"
    return span(each.interval, form_of(each.row.metric)) or windows


def with_interval(each: ComparedRow) -> str:
    """A row's value with its interval in brackets."""
    text = marked(each)
    return type(text)(f"{text} ({span(each.interval, form_of(each.row.metric))})") if each.interval else text


def gap(row: Row | None, known: float | None) -> str:
    """A gap to the autoregressive model, with the bound and the error of the row's value."""
    if row is None:
        return ""
    return number(known, f"+{form_of(row.metric)}", row.stderr, row.bound, bool(row.stderr_reason))


def gap_interval(each: ComparedRow) -> str:
    return span(each.gap_interval, f"+{form_of(each.row.metric)}")


def closed(each: ComparedRow, unit: str = "") -> str:
    """Gap closed, or that it is not distinguishable from 0."""
    if each.closed.percent is None:
        return UNCLEAR if each.closed.distinguishable is False else ""
    return number(each.closed.percent, ".1f", each.closed.stderr) + unit


# ---------------------------------------------------------------- of a task


SPEC = (  # the entries of a spec that are listed
    *("estimator", "rule", "block", "cache", "cheap_cache", "sample"),
    *("elbo_form", "elbo_block", "elbo_eps", "mc_samples"),
    *("pretrained", "revision", "dtype", "windows", "max_length", "special_tokens"),
)
NOT_DECODED = "counts whether greedy decoding would produce the text, which this estimator does not know"
COUNTED = "acc"  # in a loglikelihood task, the share of texts that greedy decoding would produce


def task_tables(task: Comparison) -> Iterator[tuple[str, Table]]:
    """The tables of a task, each with the stem of its file."""
    if duels := [each for each in task.rows if each.row.duel]:
        yield "gap", gaps(duels)
    yield "methods", values(task)
    if cached := [each for each in task.rows if each.cache_cost]:
        yield "cache", cache_costs(cached)
    if task.pairs:
        yield "pairs", differences(task)
    for of_model in task.rules:
        yield "rules", speeds(of_model)


def values(task: Comparison) -> Table:
    """Perplexity of every row with its interval or standard error, or a remark that says why it has neither."""
    shown: Columns = {
        **names_of(task.rows),
        WORDS[task.metric]: marked,
        LEVEL: lambda each: (interval(each), each.no_interval),
        "s.e. (Monte Carlo)": lambda each: (number(each.row.stderr, ".2g"), each.row.stderr_reason),
    }
    if task.metric != "bits_per_byte":
        shown["bits per byte"] = lambda each: value(each.row, "bits_per_byte")
    return Table.of(WORDS[task.metric], task.rows, shown)


def gaps(duels: Sequence[ComparedRow]) -> Table:
    """ELBO, DUEL, their gaps to the AR model, and gap closed, of each DUEL row."""
    names = names_of(duels)
    shown: Columns = {
        "model": names["model"],
        "remarks": lambda each: each.row.qualifiers,
        **{head: names[head] for head in ("rule", "block", "cache")},
        Head("ELBO", "ELBO", "value"): lambda each: value(each.closed.elbo),
        Head("which ELBO", "ELBO", "which"): lambda each: each.closed.of,
        Head("DUEL", "DUEL", "value"): marked,
        Head(LEVEL, "DUEL", LEVEL): interval,
        "ELBO's gap": lambda each: gap(each.closed.elbo, each.closed.elbo_gap),
        Head("DUEL's gap", "DUEL's gap", "value"): lambda each: gap(each.row, each.gap),
        Head("its 95 % interval", "DUEL's gap", LEVEL): gap_interval,
        Head("gap closed", "gap closed", "share"): lambda each: (closed(each, " %"), each.closed.reason),
        Head("95 % interval of it", "gap closed", LEVEL): lambda each: span(each.closed.interval, ".1f"),
    }
    return Table.of("Gap to the autoregressive model", duels, shown)


def cache_costs(cached: Sequence[ComparedRow]) -> Table:
    """Each row under a cache, the row without one, and their paired difference: above 0, the cache costs."""
    unit = compare.unit(cached[0].row.metric)
    shown: Columns = {
        **names_of(cached),
        "cache=none": lambda each: value(each.cache_cost.second),
        "with the cache": lambda each: value(each.row),
        f"cost, nats per {unit}": lambda each: _difference(each.cache_cost),
        LEVEL: lambda each: span(each.cache_cost.interval, "+.4f"),
        "verdict": lambda each: each.cache_cost.verdict,
    }
    return Table.of(f"Cost of the cache, nats per {unit}", cached, shown)


def differences(task: Comparison) -> Table:
    """The task's pairs: what both rows share, their names, the paired difference, and which is better."""

    def shared(cell: Callable[[Row], Cell]) -> Callable[[Pair], Cell]:
        return lambda pair: cell(pair.first) if cell(pair.first) == cell(pair.second) else ""

    names, unit = named([each.row for each in task.rows]), compare.unit(task.metric)
    shown: Columns = {
        **{head: shared(cell) for head, cell in names.items()},
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
    metric = of.rows[0].row.metric
    form = form_of(metric)
    shown: Columns = {
        "rule": names_of(of.rows)["rule"],
        "steps": lambda each: "adaptive" if adaptive(each.row.rule) else "",
        "NFE per token": lambda each: number(each.row.nfe_per_token, ".3f"),
        f"DUEL, {WORDS[metric]}": lambda each: number(each.row.value, form),
        LEVEL: lambda each: span(each.interval, form),
    }
    return Table.of(f"Rules against NFE: {of.title}", of.rows, shown)


# ---------------------------------------------------------------- over tasks


def perplexities(found: Standings, tasks: Mapping[str, Comparison]) -> Table:
    """The value of every method on every task, with ranks and means."""
    shown = _over_tasks(tasks, with_interval)
    form = form_of(found.metric)
    if found.mean_of:
        shown[mean_title(found)] = lambda row: number(row.mean, form, bound=row.method.named.bound)
        shown["mean rank"] = lambda row: number(row.mean_rank, ".2f")
    shown["rank"] = lambda row: str(row.rank or "")
    return Table.of("Perplexities", [row for row in found.rows if row.method.rows], shown)


def gaps_closed(found: Standings, tasks: Mapping[str, Comparison]) -> Table:
    """Gap closed of every DUEL row on every task."""
    duels = [row for row in found.rows if any(each.row.duel for each in row.method.rows.values())]
    return Table.of("Gap closed over tasks, %", duels, _over_tasks(tasks, closed))


def _over_tasks(tasks: Mapping[str, Comparison], cell: Callable[[ComparedRow], Cell]) -> Columns:
    """The names of a method, and a column for each task."""
    shown: Columns = {"model": lambda row: row.method.named.model, "method": lambda row: row.method.named.name}
    for name, task in tasks.items():
        shown[f"{name}, {WORDS[task.metric]}"] = lambda row, name=name: (
            cell(row.method.rows[name]) if name in row.method.rows else ""
        )
    return shown


def mean_title(found: Standings) -> str:
    return f"{mean_kind(found)}, {len(found.mean_of)} tasks"


def mean_kind(found: Standings) -> str:
    return "mean" if found.metric == "bits_per_byte" else "geometric mean"


# ---------------------------------------------------------------- of runs


def summary(rows: Sequence[Row]) -> Table:
    """The values of one run, with the kind and the error of each."""
    shown: Columns = {
        "task": lambda row: row.task,
        **named(rows),
        "value": value,
        "unit": lambda row: WORDS[row.metric],
        "bits per byte": lambda row: "" if row.metric == "bits_per_byte" else value(row, "bits_per_byte"),
        "kind": lambda row: row.kind,
        "error (±)": _error,
        "s.e. over windows": lambda row: number(row.error(row.nats_window_stderr), ".2g"),
    }
    return Table.of("", rows, shown)


def _error(row: Row) -> str:
    """The error that stands behind ±, or the reason that there is none."""
    if row.entry.drawn is None:
        return "nothing is drawn"
    return row.stderr_reason or row.entry.drawn.error


def accuracies(name: str, runs: Sequence[Run], baselines: Collection[Run]) -> Table:
    """Averages of a task other than perplexities, with the harness's standard errors."""
    runs = [run for run in runs if run.scores(name)]
    metrics = dict.fromkeys(metric for run in runs for metric in run.scores(name))
    shown = named(runs, baselines)
    for metric in metrics:
        shown[metric] = lambda run, metric=metric: average(run, name, metric)
    for key in ("documents", "version", "shots"):
        shown[key] = lambda run, key=key: run.every_task[name].identity.get(key)
    return Table.of(f"{name}: {', '.join(metrics)}, ± standard error", runs, shown)


def average(run: Run, name: str, metric: str) -> Cell:
    """An average other than a perplexity, with the harness's standard error."""
    if metric not in run.scores(name):
        return ""
    known, error = run.scores(name)[metric]
    decodes = run.every_task[name].output_type != "loglikelihood" or registry.find(run.estimator).decodes
    text = number(known, ".4f", error or None, unsure=True)  # 0 of equal documents: their spread is not known
    return text, "" if decodes or metric.split(" (")[0] != COUNTED else NOT_DECODED


def cost(costs: Sequence[RunCost]) -> Table:
    """Time, network calls and memory of each run."""

    def entry(key: str, scale: float = 1) -> Callable[[RunCost], Cell]:
        return lambda of: "" if of.run.duel.get(key) is None else number(of.run.duel[key] / scale, ",.0f")

    names = named([of.run for of in costs])
    shown: Columns = {head: lambda of, cell=cell: cell(of.run) for head, cell in names.items()}
    shown |= {
        "estimator": lambda of: of.name,
        "s per token": lambda of: number(of.time.seconds_per_token, ".3g"),
        "forwards": entry("forwards"),
        "rows": entry("rows"),
        "peak MiB": entry("peak_memory_bytes", 2**20),
        "x ELBO": lambda of: (number(of.over_elbo.value, ".3g"), of.over_elbo.reason),
        "x AR": lambda of: (number(of.over_ar.value, ".3g"), of.over_ar.reason),
        "whole run, s": lambda of: number(of.run.whole_run_seconds, ".1f"),
    }
    return Table.of("Cost", costs, shown)


def files(runs: Sequence[Run], baselines: Collection[Run]) -> Table:
    """The results files and the spec of each."""
    folder = os.path.commonpath([os.path.dirname(run.name) for run in runs])

    def spec(run: Run) -> str:
        return ", ".join(f"{key}={run.spec[key]}" for key in SPEC if run.spec.get(key, "none") != "none")

    shown: Columns = {
        "file": lambda run: os.path.relpath(run.name, folder),
        "model": lambda run: f"{run.label}{' (AR baseline)' if run in baselines else ''}",
        "fingerprint": lambda run: run.fingerprint,
        "spec": spec,
    }
    return Table.of(f"Below {folder}:", runs, shown)
