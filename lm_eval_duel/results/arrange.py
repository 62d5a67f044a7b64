"""The rows of a table: in order, each once, with names that tell them apart."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators import registry
from lm_eval_duel.results.read import NO_CACHE, Run
from lm_eval_duel.results.records import Row
from lm_eval_duel.results.rows import NAMED, SAME, VARIES
from lm_eval_duel.rules.tables import place

CACHES = (None, NO_CACHE, "prefix", "dual")  # in the order of tables


def table(rows: Iterable[Row], base: Run | None = None) -> tuple[list[Row], int | None, list[str]]:
    """The rows of a table in order, without duplicates; the baseline's row number; and remarks.

    A rule that was scored by itself and in a lattice run has one row: its own. Rows of different specs that share a
    name get a variant. The baseline is always kept. Raises DuelError if the baseline has no row.
    """
    kept: dict[tuple, Row] = {}
    remarks = []

    def baseline(row: Row) -> bool:
        return base is not None and row.run.file == base.file and row.estimator == base.estimator

    for row in sorted(
        rows, key=lambda row: (not baseline(row), registry.find(row.run.estimator).lattice, -row.run.date)
    ):
        spec = tuple(sorted((k, v) for k, v in row.run.spec.items() if k not in VARIES))
        entry = registry.find(row.estimator)
        settings = () if entry.lattice else tuple(row.run.spec.get(key) for key in sorted(entry.arguments))
        drawn = tuple(row.run.spec.get(k) for k in sorted(VARIES)) if entry.drawn else ()
        key = (row.run.key, row.estimator, row.rule, row.block, spec, settings, drawn)
        if (first := kept.setdefault(key, row)) is not row:
            remarks.append(
                f"{row.model}, {row.name}: {first.run.short_name} is shown, {row.run.short_name} holds it too"
                + _apart(first, row)
            )
    unique = list(kept.values())
    groups: dict[tuple, list[Row]] = {}
    for row in unique:
        groups.setdefault((row.run.key, row.estimator, row.rule, row.block), []).append(row)
    named = [row for group in groups.values() for row in _told_apart(group)]
    models = list(dict.fromkeys(row.model for row in sorted(unique, key=lambda row: row.run.date)))
    named.sort(key=lambda row: (not baseline(row), models.index(row.model), _place(row)))
    if base is not None and not (named and baseline(named[0])):
        raise DuelError(f"The autoregressive baseline {base.name} has no row; name one result of one model as --ar.")
    return named, None if base is None else 0, remarks


def _apart(first: Row, other: Row) -> str:
    pairs = [(value, other.metrics[metric]) for metric, value in first.metrics.items() if metric in other.metrics]
    return "" if all(math.isclose(*pair, rel_tol=SAME) for pair in pairs) else ", with ANOTHER value"


def _told_apart(group: list[Row]) -> list[Row]:
    if len(group) < 2:
        return group
    fields = dict.fromkeys(key for row in group for key in row.run.spec if key not in ("estimator", "rule"))
    fields = [key for key in fields if len({row.run.spec.get(key) for row in group}) > 1]
    if fields and NAMED.issuperset(fields):
        return group
    fields = [key for key in fields if key not in NAMED] or ["version"]
    return [
        dataclasses.replace(row, variant=", ".join(f"{key}={row.run.spec.get(key, 'not set')}" for key in fields))
        for row in group
    ]


def _place(row: Row) -> tuple:
    block = int(row.block) if (row.block or "").isdigit() else 10**9
    block = -block if row.estimator == "elbo" else block  # the whole target first
    cache = CACHES.index(row.cache) if row.cache in CACHES else len(CACHES)
    return ([*registry.ESTIMATORS].index(row.estimator), block, *place(row.rule), cache, row.variant)
