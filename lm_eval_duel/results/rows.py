"""The rows of a task: of each run one for each value that it computed; in order, each once, told apart by name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
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


def from_run(run: Run, name: str) -> list[Row]:
    """The rows of a run's task: a lattice run has one for each of its estimators and rules."""
    task, scored = run.tasks[name], run.duel["tasks"].get(name, {})
    documents, missing = _sampled(task)
    counted = int(sum(units for _, units in documents.get("token_perplexity", {}).values())) or None
    if run.partial(name):
        why = (
            f"the figures in {run.name} are of {run.computed(name)} documents of {name}, its value of {task.size} "
            "(a response cache answered the others, or counted some of another run): only the harness's own value is "
            "shown"
        )
        own = Row(run, name, run.estimator, run.rule, task.metrics, tokens=counted)
        return [replace(own, documents=documents, missing=missing, remarks=(why,))]
    own = Row(run, name, run.estimator, run.rule, task.metrics, tokens=scored.get("tokens") or counted)
    own = replace(own, documents=documents, missing=missing)
    values = scored.get("values", {})
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
        row = replace(
            own,
            estimator=key if entry else "duel",
            rule=key if entry is None else run.rule if entry.follows_rule else None,
            log_prob=value.get("log_prob"),
            nats_stderr=value.get("stderr"),
            nats_window_stderr=value.get("window_stderr"),
            nfe=value.get("nfe"),
            beam=value.get("beam"),
        )
        rows.append(row if key == run.estimator else _of_lattice(row, values.get(run.estimator, {}), key))
    first, *others = rows or [own]
    return [replace(first, remarks=(*first.remarks, *remarks)), *others]


def _sampled(task: Task) -> tuple[dict[str, Values], str]:
    """(nats, units) per document of each metric, if the samples reproduce the task's value; else the reason."""
    if task.documents is None:
        return {}, task.missing
    by_metric: dict[str, Values] = {}
    missing = ""
    for metric, known in task.metrics.items():
        if all(metric in document.values for document in task.documents):
            values = {document.key: document.values[metric] for document in task.documents}
            value = stats.value(metric, *(sum(column) for column in zip(*values.values(), strict=True)))
            if math.isclose(value, known, rel_tol=SAME):
                by_metric[metric] = values
            else:
                missing = f"the samples of {task.name} give {metric} {value:.6g}, the results {known:.6g}"
                missing += ": another run's"
    return by_metric, missing


def _of_lattice(row: Row, selected: Mapping[str, Any], key: str) -> Row:
    """Another row of a lattice run with its values, by the ratio of log-likelihoods, and its documents, by the trace.

    `selected`: what the run says of its own estimator.
    """
    own, name = selected.get("log_prob"), row.task
    if not own or row.log_prob is None or not (math.isfinite(own) and row.log_prob < math.inf):
        why = f"{row.run.name}: {key} of {name} has no finite log-likelihood, so it has no value"
        row = replace(row, metrics={}, remarks=(why,))
    else:
        metrics = {m: stats.scaled(m, known, row.log_prob / own) for m, known in row.metrics.items()}
        row = replace(row, metrics=metrics)
    if not row.documents:
        return row
    nats, documents = row.run.traced.get(name, {}).get(key), row.run.tasks[name].documents
    if nats is None:
        missing = f"no trace of {key} per document (run with trace=FILE, or name it with --traces)"
        return replace(row, documents={}, missing=missing)
    total = sum(nats.get(document.number, 0.0) for document in documents)
    if row.log_prob is None or not math.isclose(total, row.log_prob, rel_tol=1e-6, abs_tol=1e-6):
        what = f"the trace adds up to {total:.3f} nats of {key}, the result to {row.log_prob}"
        return replace(row, documents={}, missing=f"{what}: another run's trace")
    traced = {
        metric: {document.key: (nats.get(document.number, 0.0), known[document.key][1]) for document in documents}
        for metric, known in row.documents.items()
    }
    return replace(row, documents=traced, missing="")


# ---------------------------------------------------------------- in order, each once


def in_order(rows: Iterable[Row], base: Run | None = None) -> tuple[list[Row], list[str]]:
    """The rows of a table, the baseline first, and remarks on those that are there twice.

    A rule that was scored by itself and in a lattice run has one row: its own. Rows of different specs that share a
    name get a variant. The baseline is always kept. Raises DuelError if the baseline has no row.
    """
    groups: dict[tuple, dict[tuple, Row]] = {}
    remarks = []
    own = None if base is None else (base.file, base.estimator)
    rows = [replace(row, ar=(row.run.file, row.estimator) == own) for row in rows]
    for row in sorted(rows, key=lambda row: (not row.ar, registry.find(row.run.estimator).lattice, -row.run.date)):
        spec = row.run.spec
        ignored = NON_IDENTITY_KEYS - ({*row.entry.arguments} if not row.entry.lattice else set())
        apart = tuple(sorted((k, v) for k, v in spec.items() if row.entry.drawn or k not in ignored))
        alike = groups.setdefault((row.run.key, row.estimator, row.rule, row.block), {})
        first = alike.setdefault(apart, row)
        if first is not row:
            pairs = [(value, row.metrics[metric]) for metric, value in first.metrics.items() if metric in row.metrics]
            other = "" if all(math.isclose(*pair, rel_tol=SAME) for pair in pairs) else ", with ANOTHER value"
            twice = f"{first.run.short_name} is shown, {row.run.short_name} holds it too{other}"
            remarks.append(f"{row.model}, {row.name}: {twice}")
    kept = [row for alike in groups.values() for row in _disambiguate([*alike.values()])]
    models = list(dict.fromkeys(row.model for row in sorted(kept, key=lambda row: row.run.date)))
    kept.sort(key=lambda row: (not row.ar, models.index(row.model), _sort_key(row)))
    if base is not None and not (kept and kept[0].ar):
        raise DuelError(f"The autoregressive baseline {base.name} has no row; name one result of one model as --ar.")
    return kept, remarks


def _disambiguate(group: list[Row]) -> list[Row]:
    """Rows of one name, with what distinguishes their specs as their variant."""
    keys = dict.fromkeys(key for row in group for key in row.run.spec if key not in ("estimator", "rule"))
    keys = [key for key in keys if len({row.run.spec.get(key) for row in group}) > 1]
    if len(group) < 2 or (keys and LABEL_KEYS.issuperset(keys)):
        return group
    keys = [key for key in keys if key not in LABEL_KEYS] or ["version"]
    return [replace(r, variant=", ".join(f"{key}={r.run.spec.get(key, 'not set')}" for key in keys)) for r in group]


def _sort_key(row: Row) -> tuple[Any, ...]:
    block = int(row.block) if (row.block or "").isdigit() else 10**9
    block = -block if row.estimator == "elbo" else block  # the whole target first
    cache = CACHES.index(row.run.cache) if row.run.cache in CACHES else len(CACHES)
    return ([*registry.ESTIMATORS].index(row.estimator), block, *sort_key(row.rule), cache, row.variant)
