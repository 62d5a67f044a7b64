"""The tables of a report. Their forms (Markdown, LaTeX, ...) are those of `table`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from lm_eval_duel.results import pairs
from lm_eval_duel.results.accuracy import Accuracies
from lm_eval_duel.results.records import UNCLEAR, WHOLE, Average, Pair, Row, Speeds, TaskComparison
from lm_eval_duel.results.run_cost import Cost
from lm_eval_duel.results.table import CODE, RULE, WORDS, Cell, Column, Table, Value, form_of

SPEC = (  # the entries of a spec that are listed
    *("estimator", "rule", "block", "cache", "cheap_cache", "sample"),
    *("elbo_form", "elbo_block", "elbo_eps", "mc_samples"),
    *("pretrained", "revision", "dtype", "windows", "max_length", "special_tokens"),
)
AVERAGED = "the average includes tasks whose gap closed is not distinguishable from 0; without them it is too high"
MODEL, ESTIMATOR, UNMASKING = Column("model"), Column("estimator"), Column("rule", RULE)
BLOCK, CACHE, VERDICT = Column("block"), Column("cache"), Column("verdict")


def shown(row: Row, metric: str | None = None, with_interval: bool = False) -> Cell:
    """A row's value, or that of another metric of it."""
    if metric is not None:
        if metric not in row.metrics:
            return Cell()
        error = row.stderrs.get(metric)
        return Cell(
            row.metrics[metric], stderr=error, bound=row.bound, unsure=bool(row.stderr_reason) and error is None
        )
    unsure = row.stderr is None and bool(row.stderr_reason)
    cell = {"stderr": row.stderr, "bound": row.bound, "best": row.best, "unsure": unsure}
    if not with_interval:
        return Cell(row.value, **cell)
    if row.interval is not None:
        return Cell(row.value, row.interval, **cell)
    error = "" if row.window_stderr is None else f"s.e. {row.window_stderr:.2g} over windows"
    return Cell(row.value, instead=error, note=row.reason, **cell)


def of_task(task: TaskComparison) -> Iterator[tuple[str, str, Table]]:
    """The tables of a task, each with the stem of its file and its title."""
    unit = pairs.unit(task.metric)
    if any(row.duel for row in task.rows):
        yield "gap", "Gap to the autoregressive model", gaps(task)
    yield "methods", WORDS[task.metric], values(task)
    if any(row.cache_cost for row in task.rows):
        yield "cache", f"Cost of the cache, nats per {unit}", cache_costs(task)
    if task.pairs:
        yield "pairs", f"Paired differences, nats per {unit}", differences(task)
    for of_model in task.rules:
        yield "rules", f"Rules against NFE: {of_model.title}", speeds(task, of_model)


def caches(rows: Iterable[Row]) -> Callable[[Row], str]:
    """The column `cache` of a table: empty if no row is under a cache."""
    used = any(row.cached for row in rows)
    return lambda row: (row.cache or "") if used else ""


def values(task: TaskComparison) -> Table:
    """Perplexity of every row with its interval or standard error, or a remark that says why it has neither."""
    metric, cache = task.metric, caches(task.rows)
    columns = [MODEL, ESTIMATOR, UNMASKING, BLOCK, CACHE, Column(WORDS[metric], form_of(metric))]
    columns.append(Column("s.e. (Monte Carlo)", ".2g"))
    other = [] if metric == "bits_per_byte" else ["bits_per_byte"]
    columns += [Column(WORDS[name], form_of(name)) for name in other]
    rows = []
    for row in task.rows:
        error = Cell(row.stderr, note="" if row.stderr is not None else row.stderr_reason)
        labels = [row.model, row.title, row.rule, row.block_name, cache(row)]
        rows.append([*labels, shown(row, with_interval=True), error, *(shown(row, name) for name in other)])
    return Table(columns, rows, WORDS[metric])


def gaps(task: TaskComparison) -> Table:
    """For each DUEL row: ELBO, DUEL, their gaps to the AR model, and gap closed."""
    form = form_of(task.metric)
    duels = [row for row in task.rows if row.duel]
    cache = caches(duels)
    columns = [MODEL, UNMASKING, Column("remarks"), BLOCK, CACHE, Column("ELBO", form), Column("DUEL", form)]
    columns += [Column("ELBO's gap", f"+{form}"), Column("DUEL's gap", f"+{form}"), Column("gap closed", ".1f", " %")]
    rows = []
    for row in duels:
        elbo = None if row.elbo is None else task.rows[row.elbo]
        labels = [row.model, row.rule, row.qualifiers, row.block_name, cache(row)]
        own = [
            shown(elbo) if elbo else None,
            dataclasses.replace(shown(row), interval=row.interval),
            _gap(elbo, False) if elbo else None,
            _gap(row, True),
        ]
        rows.append([*labels, *own, _closed(row)])
    return Table(columns, rows, WORDS[task.metric])


def _gap(row: Row, with_interval: bool) -> Cell:
    """The gap to the autoregressive model, with the error of the row's value."""
    if row.gap is None:
        return Cell()
    unsure = row.stderr is None and bool(row.stderr_reason)
    return Cell(row.gap, row.gap_interval if with_interval else None, row.stderr, unsure=unsure)


def _closed(row: Row) -> Cell:
    value: Value = UNCLEAR if row.distinguishable is False else row.gap_closed
    return Cell(value, row.gap_closed_interval, row.gap_closed_stderr, note=row.gap_closed_reason)


def cache_costs(task: TaskComparison) -> Table:
    """Each row under a cache next to the one without, and their paired difference: above 0, the cache costs."""
    form, unit = form_of(task.metric), pairs.unit(task.metric)
    columns = [MODEL, ESTIMATOR, UNMASKING, BLOCK, CACHE, Column("cache=none", form), Column("with the cache", form)]
    columns += [Column(f"cost, nats per {unit}", "+.4f"), VERDICT]
    rows: list[list[Any]] = []
    for row in task.rows:
        if row.cache_cost is not None:
            cost = row.cache_cost
            without = None if cost.second is None else shown(task.rows[cost.second], task.metric)
            labels = [row.model, row.title, row.rule, row.block_name, row.cache]
            rows.append([*labels, without, shown(row, task.metric), _difference(cost), cost.verdict])
    return Table(columns, rows, WORDS[task.metric])


def differences(task: TaskComparison) -> Table:
    """The task's pairs: what both rows share, their names, the paired difference, and which is better."""
    cache = caches(task.rows)
    columns = [MODEL, BLOCK, CACHE, Column("first - second")]
    columns += [Column(f"difference, nats per {pairs.unit(task.metric)}", "+.4f"), VERDICT]
    rows = []
    for pair in task.pairs:
        first, second = task.rows[pair.first], task.rows[pair.second]
        labels = [
            first.model if first.model == second.model else "",
            first.block_name if first.block == second.block else "",
            cache(first) if first.cache == second.cache else "",
        ]
        rows.append([*labels, " - ".join(pair.names), _difference(pair), pair.verdict])
    return Table(columns, rows)


def _difference(pair: Pair) -> Cell:
    return Cell(pair.difference, pair.interval, note=pair.reason)


def speeds(task: TaskComparison, of: Speeds) -> Table:
    """The perplexity and NFE of each rule, its interval with it."""
    columns = [UNMASKING, Column("steps"), Column("NFE per token", ".3f")]
    columns += [Column(f"DUEL, {WORDS[task.metric]}", form_of(task.metric))]
    rows = []
    for family in of.families:
        for point in family.points:
            row = task.rows[point.index]
            adaptive = "adaptive" if family.adaptive else ""
            rows.append([row.rule, adaptive, row.nfe_per_token, Cell(row.value, row.interval)])
    return Table(columns, rows, of.title)


def perplexities(tasks: Mapping[str, TaskComparison]) -> Table:
    """Every row on every task."""
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for name, task in tasks.items():
        for row in task.rows:
            found.setdefault((row.model, row.name), {})[name] = row
    models = list(dict.fromkeys(model for model, _ in found))
    columns = [MODEL, Column("method")]
    columns += [Column(f"{name}, {WORDS[task.metric]}", form_of(task.metric)) for name, task in tasks.items()]
    rows = []
    for (model, method), of in sorted(found.items(), key=lambda item: models.index(item[0][0])):
        cells = [shown(of[name]) if name in of else Cell() for name in tasks]
        limits = [of[name].interval if name in of else None for name in tasks]
        both = zip(cells, limits, strict=True)
        rows.append([model, method, *(dataclasses.replace(cell, interval=interval) for cell, interval in both)])
    return Table(columns, rows, inline=True)


def averages(names: Sequence[str], found: Sequence[Average]) -> Table | None:
    """Gap closed, one column per task, and the average; None if no task has any."""
    if not any(value is not None for row in found for value in row.tasks.values()):
        return None
    columns = [MODEL, ESTIMATOR, *(Column(name, ".1f") for name in names), Column("average", ".1f"), Column("of", ",d")]
    rows = []
    for row in found:
        cells = [
            Cell(UNCLEAR) if name in row.unclear else Cell(row.tasks.get(name), stderr=row.stderrs.get(name))
            for name in names
        ]
        mean = Cell(UNCLEAR) if row.average_unclear else Cell(row.average, stderr=row.average_stderr)
        note = AVERAGED if row.unclear and mean.value is not None else ""
        count = row.averaged if mean.value is not None else None
        rows.append([row.model, row.name, *cells, mean, Cell(count, note=note)])
    return Table(columns, rows, "gap closed, %")


def accuracies(table: Accuracies) -> Table:
    """Metrics other than perplexity, with the harness's standard errors."""
    columns = [MODEL, ESTIMATOR, UNMASKING, BLOCK, CACHE, *(Column(metric, ".4f") for metric in table.metrics)]
    cached = any(row.cache not in (None, "none") for row in table.rows)
    rows: list[list[Any]] = []
    for row in table.rows:
        rows.append([row.model, row.name, row.rule, row.block, row.cache if cached else None])
        for score in map(row.scores.get, table.metrics):
            error = None if score is None else score.stderr
            value = None if score is None else score.value
            rows[-1].append(Cell(value, stderr=error, unsure=error is None, note=row.reason))
    documents = "" if table.documents is None else f", {table.documents} documents"
    title = f"{table.task}: {', '.join(table.metrics)}, +- standard error{documents}{table.apart}"
    return Table(columns, rows, title)


def cost(costs: Sequence[Cost]) -> Table:
    """Time, network calls and memory of each run."""
    columns = [MODEL, ESTIMATOR, UNMASKING, BLOCK, CACHE, Column("s per token", ".3g"), Column("forwards", ",d")]
    columns += [Column("rows", ",d"), Column("peak MiB", ",.0f"), Column("x ELBO", ".3g"), Column("x AR", ".3g")]
    columns.append(Column("whole run, s", ".1f"))
    cached = any(cost.cache not in (None, "none") for cost in costs)
    rows = []
    for cost in costs:
        peak = None if cost.peak_memory_bytes is None else cost.peak_memory_bytes / 2**20
        block = WHOLE if cost.block == "none" else cost.block
        name = f"{cost.name} ({cost.flag})" if cost.flag else cost.name
        labels = [cost.model, name, cost.rule, block, cost.cache if cached else None]
        ratios = [Cell(cost.times_elbo, note=cost.times_elbo_reason), Cell(cost.times_ar, note=cost.times_ar_reason)]
        work = [cost.seconds_per_token, cost.forwards, cost.rows, peak]
        rows.append([*labels, *work, *ratios, cost.whole_run_seconds])
    return Table(columns, rows)


TRACES = (
    "nll: negative log-likelihood, in nats. position x step: correlation of a token's position in its block with its "
    "step; +1 is left to right, -1 right to left."
)


def traces(summaries: Sequence[Mapping[str, Any]]) -> Table:
    """Each trace in a few numbers; report.json has the arrays."""
    columns = [Column("trace"), Column("windows", ",d"), Column("tokens", ",d"), Column("nll per token", ".3f")]
    columns += [Column("first step", ".3f"), Column("last step", ".3f"), Column("position x step", "+.2f"), Column(" ")]
    rows = []
    for trace in summaries:
        means = trace["by_step"]["mean_nll"] if trace["by_step"] else (None,)
        order = trace.get("left_to_right") if trace["ordered"] else "no order"
        counts = [trace["label"], trace["windows"], trace["tokens"], trace["mean_nll"]]
        rows.append([*counts, means[0], means[-1], order, trace["flag"]])
    return Table(columns, rows)


def files(results: Sequence[Mapping[str, Any]]) -> Table:
    """The results files and the spec of each."""
    folder = os.path.commonpath([os.path.dirname(result["file"]) for result in results])
    rows = []
    for result in results:
        spec = ", ".join(f"{key}={result['spec'][key]}" for key in SPEC if result["spec"].get(key, "none") != "none")
        name = f"{result['model']} (AR baseline)" if result["ar"] else result["model"]
        rows.append([os.path.relpath(result["file"], folder), name, result["fingerprint"] or "", spec])
    return Table([Column("file"), MODEL, Column("fingerprint", CODE), Column("spec")], rows, f"Below {folder}:")
