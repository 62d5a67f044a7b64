"""The rows of a table in order, each once.

A value may be in several results files: scored alone and in a lattice run, or twice. Rows are equal if their model,
estimator, rule and the entries of their specs that define the value are.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lm_eval_duel.estimators import registry
from lm_eval_duel.results import match, read
from lm_eval_duel.results.rows import SAME, Row, plain_row
from lm_eval_duel.results.runs import NO_CACHE, Run, common_folder
from lm_eval_duel.results.spec_entries import NON_IDENTITY_KEYS, differing_keys, entries_for_names
from lm_eval_duel.rules import sort_key

CACHES = (None, NO_CACHE, "prefix", "dual")  # in the order of tables
NO_BLOCK = 10**9  # sorts the whole target behind every block


class Ordered(NamedTuple):
    """The rows of a table, in order, each once. `same`: the rows of the same value that one stands for."""

    rows: list[Row]
    same: dict[Row, list[Row]]
    notes: list[str]


def in_order(rows: Iterable[Row]) -> Ordered:
    """The rows of a table, the baseline first.

    A value that was scored alone and in a lattice run has one row, from the run that has its values of documents. Rows
    of different specs that share a name get a variant. The baseline is always kept.
    """
    same: dict[Row, list[Row]] = {}
    for values in _values_of_methods(sorted(rows, key=_first_kept)):
        every_value = list(map(_with_documents_first, values))
        first_rows = [rows_of_value[0] for rows_of_value in every_value]
        shown = _disambiguated(first_rows)
        for row, rows_of_value in zip(shown, every_value, strict=True):
            same[row] = rows_of_value[1:]

    return Ordered(sorted_rows(same), same, notes_on_others(same))


def rows_of_averages(runs: Iterable[Run], name: str, baselines: Collection[Run]) -> list[Row]:
    """A row, of names only, for each run that has other averages of a task than perplexities: in the same order.

    Two results of one value have two rows if their documents or their averages are others (see `once`).
    """
    rows = []
    for run in runs:
        if run.scores(name):
            rows.append(plain_row(run, name, baseline=run in baselines))
    named = []
    for values in _values_of_methods(rows):
        shown = _disambiguated([rows_of_value[0] for rows_of_value in values])
        for first, rows_of_value in zip(shown, values, strict=True):
            for row in rows_of_value:
                named.append(dataclasses.replace(row, variant=first.variant, variant_keys=first.variant_keys))
    return sorted_rows(named)


class Once(NamedTuple):
    """Runs, of which one holds each average. `same`: of each task, the rows of the others, without them now."""

    runs: list[Run]
    same: dict[str, dict[Row, list[Row]]]


def once(runs: Sequence[Run], baselines: Collection[str]) -> Once:
    """The runs, without averages that another one holds, too: of the same spec, documents and values.

    A baseline keeps its averages, then a run with samples, then the newest. `baselines`: names of runs.
    """
    names: dict[str, None] = {}
    for run in runs:
        names |= dict.fromkeys(run.every_task)
    same: dict[str, dict[Row, list[Row]]] = {}
    repeated: dict[str, set[str]] = {run.name: set() for run in runs}  # the tasks that another run stands for
    for name in names:
        rows = [plain_row(run, name, baseline=run.name in baselines) for run in runs if run.scores(name)]
        rows.sort(key=lambda row: (not row.ar, not read.has_samples(row.run.file, name), -row.run.header.date))
        same[name] = {}
        for values in _values_of_methods(rows):
            for rows_of_value in values:
                same[name] |= _with_same_averages(rows_of_value)
        for other in itertools.chain(*same[name].values()):
            repeated[other.run.name].add(name)
    return Once([_without_averages(run, repeated[run.name]) for run in runs], same)


def _with_same_averages(rows: Iterable[Row]) -> dict[Row, list[Row]]:
    """The first of each group of rows of one value that have the same averages, with the others."""
    same: dict[Row, list[Row]] = {}
    for row in rows:
        first = next((other for other in same if _have_same_averages(other, row)), None)
        if first is None:
            same[row] = []
        else:
            same[first].append(row)
    return same


def _have_same_averages(first: Row, second: Row) -> bool:
    tasks = [row.run.every_task[row.task] for row in (first, second)]
    if any(match.identity_differences(*tasks, sampled=False)):
        return False
    values, others = ({metric: value for metric, (value, _) in task.scores.items()} for task in tasks)
    return values.keys() == others.keys() and are_equal(values, others)


def _without_averages(run: Run, names: Collection[str]) -> Run:
    if not names:
        return run
    tasks = dict(run.every_task)
    for name in names:
        tasks[name] = dataclasses.replace(tasks[name], scores={})
    return dataclasses.replace(run, every_task=tasks)


def _values_of_methods(rows: Iterable[Row]) -> Iterator[list[list[Row]]]:
    """For each method, the rows of each of its values."""
    methods: dict[tuple, dict[tuple, list[Row]]] = {}
    for row in rows:
        values = methods.setdefault(method_key(row), {})
        values.setdefault(identity(row), []).append(row)
    for values in methods.values():
        yield list(values.values())


def sorted_rows(rows: Iterable[Row]) -> list[Row]:
    """The baseline, then models in the order of their first results, each as `_sort_key` has it."""
    oldest_first = sorted(rows, key=lambda row: row.run.header.date)
    models = list(dict.fromkeys(row.model for row in oldest_first))
    return sorted(oldest_first, key=lambda row: (not row.ar, models.index(row.model), _sort_key(row)))


def _first_kept(row: Row) -> tuple[bool, bool, float]:
    """Of several rows of one value, sorts the one to keep first: the baseline, then a run's own value, the newest."""
    is_other_value = row.estimator != row.run.config.estimator
    return not row.ar, is_other_value, -row.run.header.date


def _with_documents_first(rows: list[Row]) -> list[Row]:
    """The rows of one value, first one that has the values of documents: without them a row has no interval.

    A cached run that is repeated without --log_samples has none. The row at the front stays there if it is the
    baseline, or if the value of the others is not the same.
    """
    first = rows[0]
    if first.documents or first.ar:
        return rows
    for row in rows:
        if row.documents and are_equal(row.metrics, first.metrics):
            others = [other for other in rows if other is not row]
            return [row, *others]
    return rows


def are_equal(metrics: Mapping[str, float], others: Mapping[str, float]) -> bool:
    """True if two results have the same value in every metric that both have."""
    in_both = metrics.keys() & others.keys()
    return all(math.isclose(metrics[metric], others[metric], rel_tol=SAME) for metric in in_both)


def method_key(row: Row) -> tuple:
    """Equal for values that tables name by the same model, estimator, rule and block."""
    return row.run.key, row.estimator, row.rule, row.block


def identity(row: Row) -> tuple:
    """The entries of its spec that define its value: rows of one model, estimator and rule are the same if equal."""
    spec = row.run.spec
    if row.is_drawn:  # the draws are part of its value
        return tuple(sorted(spec.items()))
    ignored = NON_IDENTITY_KEYS
    if not row.entry.lattice:  # the arguments of other estimators say nothing about it; its own do
        ignored = ignored - {*row.entry.arguments}
    entries = []
    for key in sorted(spec.keys() - ignored):
        entries.append((key, spec[key]))
    return tuple(entries)


def notes_on_others(same: Mapping[Row, Iterable[Row]]) -> list[str]:
    """A note on each row that another one stands for."""
    notes = []
    for row, others in same.items():
        for other in others:
            notes.append(_twice(row, other))
    return notes


def _twice(row: Row, other: Row) -> str:
    """A note on a second result of the same value."""
    equal = are_equal(row.metrics, other.metrics)
    runs = [row.run, other.run]
    names = [run.short_name for run in runs]
    if row.run.file.parent != other.run.file.parent:  # folders of one name, and perhaps copies of a file
        folder = common_folder(runs)
        names = [os.path.relpath(run.name, folder) for run in runs]
    twice = f"{names[0]} is shown, {names[1]} holds it too"
    return f"{row.model}, {row.name}: {twice}{'' if equal else ', with ANOTHER value'}"


def _disambiguated(rows: Sequence[Row]) -> list[Row]:
    """Rows of one name, with what distinguishes their specs as their variant."""
    if len(rows) < 2:
        return list(rows)
    specs = [row.run.spec for row in rows]
    keys = differing_keys(specs, ("estimator", "rule"))
    named = {"cache", *rows[0].entry.label_args}
    unnamed = [key for key in keys if key not in named]
    if keys and not unnamed:  # their names differ already
        return list(rows)
    variant_keys = tuple(unnamed) or ("version",)
    result = []
    for row, entries in zip(rows, entries_for_names(specs, variant_keys), strict=True):
        variant = ", ".join(entries)
        result.append(dataclasses.replace(row, variant=variant, variant_keys=variant_keys))
    return result


def _sort_key(row: Row) -> tuple[Any, ...]:
    """Sorts the rows of a model: by estimator, block, rule, cache and noise seed."""
    estimators = [*registry.ESTIMATORS]
    block = int(row.block) if (row.block or "").isdigit() else NO_BLOCK
    if row.is_drawn_bound:
        block = -block  # the whole target first
    cache = len(CACHES)  # that of a later version comes last
    if row.cache in CACHES:
        cache = CACHES.index(row.cache)
    seed = float(row.noise_seed or 0)
    return estimators.index(row.estimator), block, *sort_key(row.rule), cache, seed, row.variant
