"""The tables of whole runs: the values of one, averages, costs, and the results files."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Sequence

from lm_eval_duel.results import averages, order
from lm_eval_duel.results.averages import AveragePair
from lm_eval_duel.results.columns import (
    NAMES_OF_PAIR,
    NO_VERDICT,
    SINGLE,
    WHOLE_TARGET,
    about_shared,
    joined_names,
    names_of_pairs,
    names_of_rows,
    through,
    value,
)
from lm_eval_duel.results.costs import RunCost
from lm_eval_duel.results.rows import Row
from lm_eval_duel.results.runs import Run, common_folder, documents_scored
from lm_eval_duel.results.table import LEVEL, MINUS, WORDS, Cell, Columns, Note, Table, number, span, split
from lm_eval_duel.rules import without_defaults

SPEC = (  # the entries of a spec that are listed
    *("estimator", "rule", "block", "cache", "cheap_cache", "sample"),
    *("elbo_form", "elbo_block", "elbo_eps", "mc_samples"),
    *("pretrained", "revision", "dtype", "windows", "max_length", "special_tokens"),
)
NO_SECONDS = "its result holds no time of the scoring alone"
WALL_TIME = "wall time of single runs: other programs on the machine change it"


def summary(rows: Sequence[Row]) -> Table:
    """The values of one run, with the kind and the error of each."""
    shown: Columns = {
        "task": lambda row: row.task,
        **names_of_rows(rows),
        "value": value,
        "unit": lambda row: WORDS[row.metric],
        "bits per byte": lambda row: "" if row.metric == "bits_per_byte" else value(row, "bits_per_byte"),
        "kind": _kind,
        "error (±)": _error,
        "s.e. over windows": lambda row: number(row.window_stderr, ".2g"),
    }
    return Table.from_records("", rows, shown)


def _kind(row: Row) -> str:
    in_doubt = ", in doubt" if row.run.in_doubt else ""
    return f"{row.score.short_label}{in_doubt}"


def _error(row: Row) -> str:
    """The error that stands behind ±, or the reason that it is not known; empty if nothing is drawn."""
    if row.entry.monte_carlo is None:
        return ""
    return row.stderr_reason or row.entry.monte_carlo.error


def accuracies(name: str, runs: Sequence[Run], baselines: Collection[Run]) -> Table:
    """Averages of a task other than perplexities, with the harness's standard errors."""
    rows = order.rows_of_averages(runs, name, baselines)
    metrics = metrics_of(name, [row.run for row in rows])
    shown: Columns = {}
    for metric in metrics:
        shown[metric] = lambda run, metric=metric: average_with_doubts(run, name, metric, runs)
    shown["documents"] = lambda run: documents_scored(run.every_task[name].size, run.every_task[name].available)
    for key in ("version", "shots"):
        shown[key] = lambda run, key=key: run.every_task[name].identity.get(key)
    shown = names_of_rows(rows) | through(lambda row: row.run, shown)
    about = "± is the standard error over documents."
    return Table.from_records(f"{name}: {', '.join(metrics)}", rows, shown, about)


def average_differences(name: str, pairs: Sequence[AveragePair]) -> Table:
    """Paired differences of averages other than perplexities: what both rows share, their names, and the difference."""
    rows = []
    for pair in pairs:
        rows += [pair.first, pair.second]
    names = names_of_pairs(rows)
    shown: Columns = {
        **names,
        NAMES_OF_PAIR: joined_names,
        "metric": lambda pair: pair.metric,
        "documents": _documents,
        "difference": lambda pair: (number(pair.difference, "+.4f"), _no_difference(pair)),
        LEVEL: lambda pair: (span(pair.interval, "+.4f"), _no_interval(pair)),
        "verdict": lambda pair: (pair.verdict, pair.verdict_reason) if pair.verdict else (NO_VERDICT, pair.reason),
    }
    sign = f"Differences are first {MINUS} second: above 0 the first average is higher."
    about = f"{sign} {about_shared(names, pairs)}".strip()
    if any(pair.interval for pair in pairs):
        about = f"{about} Intervals are from a bootstrap over the documents. {SINGLE}"
    return Table.from_records(f"{name}: paired differences of averages", pairs, shown, about)


def _documents(pair: AveragePair) -> str:
    """The number of documents of a pair; empty if its rows have different ones."""
    if pair.difference is None:
        return ""
    task = pair.first.run.every_task[pair.first.task]
    return documents_scored(task.size, task.available)


def _no_difference(pair: AveragePair) -> Note:
    """The reason that a pair has no difference; empty if it has one."""
    return pair.reason if pair.difference is None else Note()


def _no_interval(pair: AveragePair) -> Note:
    """The reason that a pair with a difference has no interval; empty if it has one."""
    return Note() if pair.difference is None else pair.reason


def metrics_of(name: str, runs: Sequence[Run]) -> list[str]:
    """The averages of a task other than perplexities that any run has."""
    metrics: dict[str, None] = {}
    for run in runs:
        metrics |= dict.fromkeys(run.scores(name))
    return list(metrics)


def average(run: Run, name: str, metric: str) -> Cell:
    """An average other than a perplexity, with the harness's standard error."""
    if metric not in run.scores(name):
        return ""
    score, error = run.scores(name)[metric]
    text = number(score, ".4f", error or None, unsure=True)  # 0 of equal documents: their spread is not known
    remark = averages.remark(run, name, metric)
    return (text, remark) if remark else text


def average_with_doubts(run: Run, name: str, metric: str, shown: Sequence[Run]) -> Cell:
    """The same, with what puts the run in doubt, the contexts it cut, and what sets it apart from those `shown`."""
    text, remark = split(average(run, name, metric))
    if not text:
        return ""
    apart = [averages.about_bos(run, shown), averages.about_contexts(run, name)]
    return text, Note.joined([remark, *map(Note, apart), *map(Note, run.doubts)])


def cost(costs: Sequence[RunCost]) -> Table:
    """Time, network calls and memory of each run; those of a part of a run have a remark that says so.

    Runs of different tasks have a column of these, and runs that share all else the names of their files.
    """
    any_cache = any(cost.run.has_cache for cost in costs)
    several_tasks = len({tuple(cost.time.tasks) for cost in costs}) > 1
    names = Counter(map(_name_of_cost, costs))
    folder = common_folder([cost.run for cost in costs])

    def file(cost: RunCost) -> str:
        return os.path.relpath(cost.run.name, folder) if names[_name_of_cost(cost)] > 1 else ""

    shown: Columns = {
        "model": lambda cost: cost.run.label,
        "estimator": lambda cost: cost.name,
        "rule": lambda cost: without_defaults(cost.run.config.rule or ""),
        "block": lambda cost: WHOLE_TARGET if cost.run.config.block == "none" else cost.run.config.block,
        "cache": lambda cost: cost.run.config.cache if any_cache else "",
        "tasks": lambda cost: ", ".join(cost.time.tasks) if several_tasks else "",
        "file": file,
        "s per token": lambda cost: (number(cost.time.seconds_per_token, ".3g"), _remark_on_seconds(cost)),
        "forwards": _count("forwards"),
        "rows": _count("rows"),
        "peak MiB": _count("peak_memory_bytes", 2**20),
        "x ELBO": lambda cost: (number(cost.over_elbo.value, ".3g"), cost.over_elbo.reason),
        "x AR": lambda cost: (number(cost.over_ar.value, ".3g"), cost.over_ar.reason),
        "whole run, s": lambda cost: (number(cost.time.whole_run, ".1f"), cost.time.remark),
    }
    return Table.from_records("Cost", costs, shown, f"Times are {WALL_TIME}.")


def _name_of_cost(cost: RunCost) -> tuple:
    """The cells that name a run in the table of costs."""
    config = cost.run.config
    return cost.run.label, cost.name, config.rule, config.block, config.cache, tuple(cost.time.tasks)


def _remark_on_seconds(cost: RunCost) -> str:
    if cost.time.remark or cost.time.seconds_per_token is not None:
        return cost.time.remark
    return NO_SECONDS


def _count(key: str, scale: float = 1) -> Callable[[RunCost], Cell]:
    """The cells of a count in config.duel; empty where there is none."""

    def cell(cost: RunCost) -> Cell:
        count = cost.run.config.duel.get(key)
        return None if count is None else (number(count / scale, ",.0f"), cost.time.remark)

    return cell


def files(runs: Sequence[Run], baselines: Collection[Run]) -> Table:
    """The results files and the spec of each."""
    folder = common_folder(runs)
    shown: Columns = {
        "file": lambda run: os.path.relpath(run.name, folder),
        "model": lambda run: f"{run.label} (AR baseline)" if run in baselines else run.label,
        "fingerprint": lambda run: run.config.fingerprint,
        "spec": _spec,
    }
    return Table.from_records(f"Below {folder}:", runs, shown)


def _spec(run: Run) -> str:
    """The entries of a run's spec that are listed, without those that are `none`."""
    entries = []
    for key in SPEC:
        if run.spec.get(key, "none") != "none":
            entries.append(f"{key}={run.spec[key]}")
    return ", ".join(entries)
