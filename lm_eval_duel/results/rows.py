"""The rows that a run of a task gives, with values per document: a lattice run has one for each of its estimators."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from lm_eval_duel.errors import DuelError, unknown
from lm_eval_duel.estimators import registry
from lm_eval_duel.results import stats
from lm_eval_duel.results.read import Run, Task
from lm_eval_duel.results.records import Row
from lm_eval_duel.rules import RULES
from lm_eval_duel.rules.tables import adaptive, family, is_rule

SAME = 1e-4  # relative difference up to which two ways to one value agree
VARIES = {"estimator", "rule", "draw_seed", *registry.arguments()}  # entries of a spec that vary within one model
# entries of a spec that every row names if it has them
NAMED = {"cache", *(key for entry in registry.ENTRIES if entry.named for key in entry.arguments)}


def of(run: Run, name: str, traced: Mapping[str, Mapping[int, float]] | None = None) -> list[Row]:
    """The rows of a run's task. `traced`: {value name: {document number: nats}} from its trace, if it has one."""
    task, scored = run.tasks[name], run.duel["tasks"].get(name, {})
    documents, missing = _sampled(task)
    tokens = sum(units for _, units in documents.get("token_perplexity", {}).values())
    selected = Row(run, name, run.estimator, run.rule, task.metrics, tokens=int(tokens) or None)
    selected = dataclasses.replace(selected, documents=documents, missing=missing)
    if not scored:
        return [selected]
    if run.partial(name):
        remark = (
            f"the figures in {run.name} are of {run.computed(name)} documents of {name}, its value of {task.size} (a "
            "response cache answered the others, or counted some of another run): only the harness's own value is shown"
        )
        return [dataclasses.replace(selected, remarks=(remark,))]
    values = scored["values"]
    own = values.get(run.estimator, {}).get("log_prob")
    rows, remarks = [], []
    for key, value in values.items():
        if why := _incomplete(task, scored, key, value, traced):
            remarks.append(f"{key} of {name} in {run.name} is left out: {why}")
            continue
        if key not in registry.ESTIMATORS and not is_rule(key):
            raise DuelError(f"{run.name}: {unknown('estimator or rule', key, [*registry.ESTIMATORS, *RULES])}")
        entry = registry.ESTIMATORS.get(key)  # None: a rule that a lattice followed
        row = dataclasses.replace(
            selected,
            estimator=key if entry else "duel",
            rule=key if entry is None else run.rule if entry.follows_rule else None,
            log_prob=value.get("log_prob"),
            nats_stderr=value.get("stderr"),
            nats_window_stderr=value.get("window_stderr"),
            nfe=value.get("nfe"),
            tokens=scored.get("tokens") or selected.tokens,
        )
        if key != run.estimator:
            row = _beside(row, own, traced, key)
        rows.append(row)
    rows = rows or [selected]
    return [dataclasses.replace(rows[0], remarks=(*rows[0].remarks, *remarks)), *rows[1:]]


def _incomplete(
    task: Task,
    scored: Mapping[str, Any],
    key: str,
    value: Mapping[str, Any],
    traced: Mapping[str, Mapping[int, float]] | None,
) -> str:
    """Why a value does not cover the whole task; happens if a cache continued a lattice run with other rules."""
    for unit in ("documents", "windows", "tokens"):
        if unit in value and unit in scored and value[unit] != scored[unit]:
            return f"it is of {value[unit]} {unit}, the task of {scored[unit]}"
    _, speed = family(key)
    if key not in registry.ESTIMATORS and not adaptive(key) and None not in (value["nfe"], scored.get("tokens")):
        most = value["nfe"] * max(1.0, speed)  # a step reveals k tokens at most
        least = min(scored["tokens"], _longest(scored["values"]))
        if most < least:
            return f"its {value['nfe']} steps reveal at most {most:.0f} of {least} tokens"
    if traced and key in traced and value["log_prob"] is not None and task.documents is not None:
        nonempty = {d.number for d in task.documents if any(nats for nats, _ in d.values.values())}
        if traced[key].keys() < nonempty and math.isclose(sum(traced[key].values()), value["log_prob"], abs_tol=1e-6):
            return f"its trace is of {len(traced[key])} of {len(nonempty)} documents"
    return ""


def _longest(values: Mapping[str, Mapping[str, Any]]) -> int:
    """The most steps among rules that reveal one token per step, which equals the number of scored tokens."""
    return max((value["nfe"] or 0 for key, value in values.items() if "k=1" in key.split(":")), default=0)


def _sampled(task: Task) -> tuple[dict[str, dict[str, tuple[float, float]]], str]:
    """(nats, units) per document of each metric, if the samples reproduce the task's value; else the reason."""
    if task.documents is None:
        return {}, task.missing
    by_metric, missing = {}, ""
    for metric, known in task.metrics.items():
        if not all(metric in document.values for document in task.documents):
            continue
        values = {document.key: document.values[metric] for document in task.documents}
        nats, units = (sum(column) for column in zip(*values.values(), strict=True))
        value = stats.value(metric, nats, units)
        if math.isclose(value, known, rel_tol=SAME):
            by_metric[metric] = values
        else:
            missing = f"the samples of {task.name} give {metric} {value:.6g}, the results {known:.6g}: another run's"
    return by_metric, missing


def _beside(row: Row, own: float | None, traced: Mapping[str, Mapping[int, float]] | None, key: str) -> Row:
    """Another row of a lattice run than the selected one: its values follow from the ratio of log-likelihoods."""
    selected, remarks = row.metrics, list(row.remarks)
    known_nats = own and row.log_prob is not None and math.isfinite(own) and row.log_prob < math.inf
    values = {
        metric: stats.scaled(metric, known, row.log_prob / own) for metric, known in selected.items() if known_nats
    }
    if not known_nats:
        remarks.append(f"{row.run.name}: {key} of {row.task} has no finite log-likelihood, so it has no value")
    documents, missing = _traced(row, traced, key)
    return dataclasses.replace(row, metrics=values, documents=documents, missing=missing, remarks=tuple(remarks))


def _traced(
    row: Row, traced: Mapping[str, Mapping[int, float]] | None, key: str
) -> tuple[dict[str, dict[str, tuple[float, float]]], str]:
    """Log-likelihood per document of a lattice value, from the trace; units from the samples."""
    task = row.run.tasks[row.task]
    if not row.documents:
        return {}, row.missing
    if not traced or key not in traced:
        return {}, f"no trace of {key} per document (run with trace=FILE, or name it with --traces)"
    nats = traced[key]
    total = sum(nats.get(document.number, 0.0) for document in task.documents)
    if row.log_prob is None or not math.isclose(total, row.log_prob, rel_tol=1e-6, abs_tol=1e-6):
        return {}, f"the trace adds up to {total:.3f} nats of {key}, the result to {row.log_prob}: another run's trace"
    by_metric = {}
    for metric, known in row.documents.items():
        by_metric[metric] = {
            document.key: (nats.get(document.number, 0.0), known[document.key][1]) for document in task.documents
        }
    return by_metric, ""
