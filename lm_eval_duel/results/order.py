"""The rows of a table in order, each once.

A value may be in several results files: scored alone and in a lattice run, or twice. Rows are equal if their model,
estimator, rule and the entries of their specs that define the value are.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from lm_eval_duel.estimators import registry
from lm_eval_duel.results.rows import NON_IDENTITY_KEYS, SAME, Row, argument, differing_keys
from lm_eval_duel.results.runs import NO_CACHE
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
    methods: dict[tuple, dict[tuple, list[Row]]] = {}  # of each method, the rows of each value
    for row in sorted(rows, key=_first_kept):
        values = methods.setdefault((row.run.key, row.estimator, row.rule, row.block), {})
        values.setdefault(identity(row), []).append(row)

    same: dict[Row, list[Row]] = {}
    notes = []
    for values in methods.values():
        kept = _disambiguated([copies[0] for copies in values.values()])
        for row, (_, *others) in zip(kept, values.values(), strict=True):
            same[row] = others
            for other in others:
                notes.append(_twice(row, other))

    oldest_first = sorted(same, key=lambda row: row.run.header.date)
    models = list(dict.fromkeys(row.model for row in oldest_first))
    ordered = sorted(same, key=lambda row: (not row.ar, models.index(row.model), _sort_key(row)))
    return Ordered(ordered, same, notes)


def _first_kept(row: Row) -> tuple[bool, bool, float]:
    """Of several rows of one value, sorts the one to keep first: the baseline, then a run's own value, the newest."""
    is_other_value = row.estimator != row.run.config.estimator
    return not row.ar, is_other_value, -row.run.header.date


def identity(row: Row) -> tuple:
    """The entries of its spec that define its value: rows of one model, estimator and rule are the same if equal."""
    spec = row.run.spec
    if row.is_drawn:  # the draws are part of its value
        return tuple(sorted(spec.items()))
    ignored = NON_IDENTITY_KEYS
    if not row.entry.lattice:
        ignored = ignored - {*row.entry.arguments}
    return tuple(sorted((key, spec[key]) for key in spec.keys() - ignored))


def _twice(row: Row, other: Row) -> str:
    """A note on a second result of the same value."""
    equal = True
    for metric in row.metrics.keys() & other.metrics.keys():
        equal &= math.isclose(row.metrics[metric], other.metrics[metric], rel_tol=SAME)
    twice = f"{row.run.short_name} is shown, {other.run.short_name} holds it too"
    return f"{row.model}, {row.name}: {twice}{'' if equal else ', with ANOTHER value'}"


def _disambiguated(rows: Sequence[Row]) -> list[Row]:
    """Rows of one name, with what distinguishes their specs as their variant."""
    keys = differing_keys([row.run.spec for row in rows], ("estimator", "rule"))
    named = {"cache", *rows[0].entry.label_args}
    if len(rows) < 2 or (keys and named.issuperset(keys)):
        return list(rows)
    keys = [key for key in keys if key not in named] or ["version"]
    result = []
    for row in rows:
        variant = ", ".join(argument(row.run.spec, key) for key in keys)
        result.append(dataclasses.replace(row, variant=variant, variant_keys=tuple(keys)))
    return result


def _sort_key(row: Row) -> tuple[Any, ...]:
    estimators = [*registry.ESTIMATORS]
    block = int(row.block) if (row.block or "").isdigit() else NO_BLOCK
    if row.is_drawn_bound:
        block = -block  # the whole target first
    cache = CACHES.index(row.cache) if row.cache in CACHES else len(CACHES)
    seed = float(row.noise_seed or 0)
    return estimators.index(row.estimator), block, *sort_key(row.rule), cache, seed, row.variant
