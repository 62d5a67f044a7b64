"""The rows of a task: of each run one for each value that it computed; in order, each once, told apart by name."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

from lm_eval_duel.errors import DuelError, unknown
from lm_eval_duel.estimators import registry
from lm_eval_duel.results import stats
from lm_eval_duel.results.read import NO_CACHE, TASK_COUNTS, Run
from lm_eval_duel.results.records import Row, Values
from lm_eval_duel.results.task import Task
from lm_eval_duel.rules import RULES
from lm_eval_duel.rules.tables import is_rule, sort_key

SAME = 1e-4  # relative difference up to which two ways to one value agree
# entries of a spec that vary within one model
NON_IDENTITY_KEYS = {"estimator", "rule", "draw_seed", *registry.arguments()}
# entries of a spec that every row names if it has them
LABEL_KEYS = {"cache", *(key for entry in registry.ENTRIES if entry.named for key in entry.arguments)}
CACHES = (None, NO_CACHE, "prefix", "dual")  # in the order of tables


def of(run: Run, name: str) -> list[Row]:
    """The rows of a run's task: a lattice run has one for each of its estimators and rules."""
    task, scored = run.tasks[name], run.duel["tasks"].get(name, {})
    documents, missing = _sampled(task)
    tokens = sum(units for _, units in documents.get("token_perplexity", {}).values())
    selected = Row(run, name, run.estimator, run.rule, task.metrics, tokens=int(tokens) or None)
    selected = dataclasses.replace(selected, documents=documents, missing=missing)
    if run.partial(name):
        remark = (
            f"the figures in {run.name} are of {run.computed(name)} documents of {name}, its value of {task.size} (a "
            "response cache answered the others, or counted some of another run): only the harness's own value is shown"
        )
        return [dataclasses.replace(selected, remarks=(remark,))]
    values = scored.get("values", {})
    own = values.get(run.estimator, {}).get("log_prob")
    rows, remarks = [], []
    for key, value in values.items():
        if key not in registry.ESTIMATORS and not is_rule(key):
            raise DuelError(f"{run.name}: {unknown('estimator or rule', key, [*registry.ESTIMATORS, *RULES])}")
        fewer = [unit for unit in TASK_COUNTS if unit in value and unit in scored and value[unit] != scored[unit]]
        if fewer:  # a cache continued a lattice run with other rules
            why = f"it is of {value[fewer[0]]} {fewer[0]}, the task of {scored[fewer[0]]}"
            remarks.append(f"{key} of {name} in {run.name} is left out: {why}")
            continue
        entry = registry.ESTIMATORS.get(key)  # None: a rule that a lattice followed
        row = dataclasses.replace(
            selected,
            estimator=key if entry else "duel",
            rule=key if entry is None else run.rule if entry.follows_rule else None,
            log_prob=value.get("log_prob"),
            nats_stderr=value.get("stderr"),
            nats_window_stderr=value.get("window_stderr"),
            nfe=value.get("nfe"),
            open_blocks=value.get("open_blocks", 0),
            tokens=scored.get("tokens") or selected.tokens,
        )
        rows.append(row if key == run.estimator else _beside(row, own, key))
    rows = rows or [selected]
    return [dataclasses.replace(rows[0], remarks=(*rows[0].remarks, *remarks)), *rows[1:]]


def _sampled(task: Task) -> tuple[dict[str, Values], str]:
    """(nats, units) per document of each metric, if the samples reproduce the task's value; else the reason."""
    if task.documents is None:
        return {}, task.missing
    by_metric: dict[str, Values] = {}
    missing = ""
    for metric, known in task.metrics.items():
        if not all(metric in document.values for document in task.documents):
            continue
        values = {document.key: document.values[metric] for document in task.documents}
        value = stats.value(metric, *(sum(column) for column in zip(*values.values(), strict=True)))
        if math.isclose(value, known, rel_tol=SAME):
            by_metric[metric] = values
        else:
            missing = f"the samples of {task.name} give {metric} {value:.6g}, the results {known:.6g}: another run's"
    return by_metric, missing


def _beside(row: Row, own: float | None, key: str) -> Row:
    """Another row of a lattice run than the selected one: its values follow from the ratio of log-likelihoods."""
    if not own or row.log_prob is None or not (math.isfinite(own) and row.log_prob < math.inf):
        remark = f"{row.run.name}: {key} of {row.task} has no finite log-likelihood, so it has no value"
        row = dataclasses.replace(row, metrics={}, remarks=(*row.remarks, remark))
    else:
        ratio = row.log_prob / own
        scaled = {metric: stats.scaled(metric, known, ratio) for metric, known in row.metrics.items()}
        row = dataclasses.replace(row, metrics=scaled)
    if not row.documents:
        return row
    documents, missing = _traced(row, key)
    return dataclasses.replace(row, documents=documents, missing=missing)


def _traced(row: Row, key: str) -> tuple[dict[str, Values], str]:
    """Log-likelihood per document of a lattice value, from the trace; units from the samples."""
    nats, found = row.run.traced.get(row.task, {}).get(key), row.run.tasks[row.task].documents
    if nats is None:
        return {}, f"no trace of {key} per document (run with trace=FILE, or name it with --traces)"
    total = sum(nats.get(document.number, 0.0) for document in found)
    if row.log_prob is None or not math.isclose(total, row.log_prob, rel_tol=1e-6, abs_tol=1e-6):
        return {}, f"the trace adds up to {total:.3f} nats of {key}, the result to {row.log_prob}: another run's trace"
    return {
        metric: {document.key: (nats.get(document.number, 0.0), known[document.key][1]) for document in found}
        for metric, known in row.documents.items()
    }, ""


# ---------------------------------------------------------------- in order, each once


def in_order(rows: Iterable[Row], base: Run | None = None) -> tuple[list[Row], list[str]]:
    """The rows of a table, the baseline first, and remarks on those that are there twice.

    A rule that was scored by itself and in a lattice run has one row: its own. Rows of different specs that share a
    name get a variant. The baseline is always kept. Raises DuelError if the baseline has no row.
    """
    kept: dict[tuple, Row] = {}
    remarks = []
    of_base = None if base is None else (base.file, base.estimator)
    marked = [dataclasses.replace(row, ar=(row.run.file, row.estimator) == of_base) for row in rows]
    for row in sorted(marked, key=lambda row: (not row.ar, registry.find(row.run.estimator).lattice, -row.run.date)):
        spec = row.run.spec
        shared = tuple(sorted((k, v) for k, v in spec.items() if k not in NON_IDENTITY_KEYS))
        settings = () if row.entry.lattice else tuple(spec.get(key) for key in sorted(row.entry.arguments))
        drawn = tuple(spec.get(k) for k in sorted(NON_IDENTITY_KEYS)) if row.entry.drawn else ()
        first = kept.setdefault((*_identity(row), shared, settings, drawn), row)
        if first is not row:
            pairs = [(value, row.metrics[metric]) for metric, value in first.metrics.items() if metric in row.metrics]
            other = "" if all(math.isclose(*pair, rel_tol=SAME) for pair in pairs) else ", with ANOTHER value"
            twice = f"{first.run.short_name} is shown, {row.run.short_name} holds it too{other}"
            remarks.append(f"{row.model}, {row.name}: {twice}")
    groups: dict[tuple, list[Row]] = {}
    for row in kept.values():
        groups.setdefault(_identity(row), []).append(row)
    named = [row for group in groups.values() for row in _disambiguated(group)]
    models = list(dict.fromkeys(row.model for row in sorted(kept.values(), key=lambda row: row.run.date)))
    named.sort(key=lambda row: (not row.ar, models.index(row.model), _place(row)))
    if base is not None and not (named and named[0].ar):
        raise DuelError(f"The autoregressive baseline {base.name} has no row; name one result of one model as --ar.")
    return named, remarks


def _identity(row: Row) -> tuple:
    return row.run.key, row.estimator, row.rule, row.block


def _disambiguated(group: list[Row]) -> list[Row]:
    """Rows of one name, with what distinguishes their specs as their variant."""
    if len(group) < 2:
        return group
    fields = dict.fromkeys(key for row in group for key in row.run.spec if key not in ("estimator", "rule"))
    fields = [key for key in fields if len({row.run.spec.get(key) for row in group}) > 1]
    if fields and LABEL_KEYS.issuperset(fields):
        return group
    fields = [key for key in fields if key not in LABEL_KEYS] or ["version"]
    return [
        dataclasses.replace(row, variant=", ".join(f"{key}={row.run.spec.get(key, 'not set')}" for key in fields))
        for row in group
    ]


def _place(row: Row) -> tuple[Any, ...]:
    block = int(row.block) if (row.block or "").isdigit() else 10**9
    block = -block if row.estimator == "elbo" else block  # the whole target first
    cache = CACHES.index(row.cache) if row.cache in CACHES else len(CACHES)
    return ([*registry.ESTIMATORS].index(row.estimator), block, *sort_key(row.rule), cache, row.variant)
