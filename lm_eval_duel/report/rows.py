"""Rows: one model under one estimator, rule and block on one task, with its values and nats per document."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping

from lm_eval_duel.report import stats
from lm_eval_duel.report.read import Run

SEES_TRUTH = "not a likelihood: it sees the truth"
LATTICE = ("elbo_exact", "mixture", "oracle")  # one run computes these and every lattice rule
BOUNDS = ("elbo", "elbo_exact")
NAMES = {
    "exact": "Exact",
    "elbo": "ELBO",
    "elbo_exact": "ELBO, all orders",
    "mixture": "Mixture of orders",
    "duel": "DUEL",
    "oracle": f"Oracle ({SEES_TRUTH})",
}
ORDER = list(NAMES)
VARIES = {"estimator", "rule", "elbo_form", "elbo_block", "mc_samples", "elbo_eps", "draw_seed"}  # within one model
ADAPTIVE = ("threshold", "klass", "entropy_bound")
BY_NAME = (*("left_to_right", "right_to_left", "random", "greedy", "margin", "log_margin", "entropy"), *ADAPTIVE)


@dataclasses.dataclass(frozen=True)
class Row:
    """`values`: metric -> value; `documents`: metric -> document -> (nats, units), or empty and `missing` says why."""

    run: Run
    task: str
    estimator: str
    rule: str | None
    values: dict[str, float]
    nats: float | None = None
    nats_stderr: float | None = None
    nfe: int | None = None
    tokens: int | None = None
    documents: Mapping[str, Mapping[str, tuple[float, float]]] = dataclasses.field(default_factory=dict)
    missing: str = ""
    remarks: tuple[str, ...] = ()
    variant: str = ""  # what sets it apart from a row of the same model, rule and block

    @property
    def model(self) -> str:
        return self.run.label

    @property
    def block(self) -> str:
        return self.run.law.get("elbo_block", "none") if self.estimator == "elbo" else self.run.block

    @property
    def name(self) -> str:
        """The row in words, without its model."""
        parts = [NAMES[self.estimator]]
        if self.rule:
            parts.append(self.rule)
        if self.run.ours and self.estimator != "exact":
            parts.append(f"block {self.block}")
        return ", ".join([*parts, *([self.variant] if self.variant else [])])

    def stderr(self, metric: str) -> float | None:
        """Monte Carlo standard error of a metric's value."""
        if None in (self.nats_stderr, self.nats) or metric not in self.values:
            return None
        return stats.stderr(metric, self.values[metric], self.nats, self.nats_stderr)


def of(run: Run, name: str, traced: Mapping[str, Mapping[int, float]] | None = None) -> list[Row]:
    """The rows of a run's task. `traced`: {NAME: {document number: nats}} of its trace, where there is one."""
    task, found = run.tasks[name], run.duel.get("tasks", {}).get(name, {})
    selected = Row(run, name, run.estimator, run.rule, task.metrics, missing=task.missing)
    if task.documents is not None:
        selected = dataclasses.replace(
            selected,
            documents={
                metric: {document.key: document.values[metric] for document in task.documents}
                for metric in task.metrics
                if all(metric in document.values for document in task.documents)
            },
        )
    tokens = sum(units for _, units in selected.documents.get("token_perplexity", {}).values()) or None
    selected = dataclasses.replace(selected, tokens=tokens and int(tokens))
    if not found:
        return [selected]
    if task.size is not None and found.get("documents", task.size) < task.size:
        said = (
            f"{found['documents']} of {task.size} documents of {name} were computed in {run.name}, the others came "
            "from a response cache: only the harness's own value is shown"
        )
        return [dataclasses.replace(selected, remarks=(said,))]
    values = found.get("values", {})
    own = values.get(run.estimator, {}).get("nats")
    rows = []
    for key, value in values.items():
        estimator = key if key in NAMES else "duel"
        row = dataclasses.replace(
            selected,
            estimator=estimator,
            rule=(run.rule if key == "duel" else key) if estimator == "duel" else None,
            nats=value.get("nats"),
            nats_stderr=value.get("stderr"),
            nfe=value.get("nfe"),
            tokens=found.get("tokens") or selected.tokens,
        )
        if key != run.estimator:
            row = _beside(row, own, traced, key)
        rows.append(row)
    return rows or [selected]


def _beside(row: Row, own: float | None, traced: Mapping[str, Mapping[int, float]] | None, key: str) -> Row:
    """A row of a lattice run that is not the selected one: its values by the quotient of nats."""
    selected, remarks = row.values, list(row.remarks)
    values = {metric: stats.scaled(metric, known, row.nats / own) for metric, known in selected.items() if own}
    if row.tokens and "token_perplexity" in selected:
        values["token_perplexity"] = math.exp(-row.nats / row.tokens)
        implied = math.exp(-own / row.tokens) if own else math.nan
        if not math.isclose(implied, selected["token_perplexity"], rel_tol=1e-4):
            remarks.append(
                f"{row.run.name}: the task counts other tokens of {row.task} than were scored "
                f"({selected['token_perplexity']:.4f} there, {implied:.4f} per scored token)"
            )
    documents, missing = _traced(row, traced, key)
    return dataclasses.replace(row, values=values, documents=documents, missing=missing, remarks=tuple(remarks))


def _traced(
    row: Row, traced: Mapping[str, Mapping[int, float]] | None, key: str
) -> tuple[dict[str, dict[str, tuple[float, float]]], str]:
    """Nats per document of a lattice value, from the trace; units from the samples."""
    task = row.run.tasks[row.task]
    if task.documents is None:
        return {}, task.missing
    if not traced or key not in traced:
        return {}, f"no trace of {key} per document (run with trace=FILE, or name it with --trace)"
    nats = traced[key]
    total = sum(nats.get(document.number, 0.0) for document in task.documents)
    if not math.isclose(total, row.nats, rel_tol=1e-6, abs_tol=1e-6):
        return {}, f"the trace adds up to {total:.3f} nats of {key}, the result to {row.nats:.3f}: another run's trace"
    found = {}
    for metric, known in row.documents.items():
        found[metric] = {
            document.key: (nats.get(document.number, 0.0), known[document.key][1]) for document in task.documents
        }
    return found, ""


def table(rows: Iterable[Row]) -> tuple[list[Row], list[str]]:
    """Rows in the order of a table, each once, and remarks about those left out.

    A rule that was scored by itself and in a lattice run is one row: its own. Rows of other laws with the same name
    say what sets them apart.
    """
    kept: dict[tuple, Row] = {}
    remarks = []
    for row in sorted(rows, key=lambda row: (row.run.estimator in LATTICE, -row.run.date)):
        law = tuple(sorted((k, v) for k, v in row.run.law.items() if k not in VARIES))
        elbo = tuple(row.run.law.get(k) for k in sorted(VARIES)) if row.estimator == "elbo" else ()
        key = (row.run.key, row.estimator, row.rule, row.block, law, elbo)
        if (first := kept.setdefault(key, row)) is not row:
            remarks.append(
                f"{row.model}, {row.name}: {first.run.name} is shown, {row.run.name} holds it too" + _apart(first, row)
            )
    found = list(kept.values())
    groups: dict[tuple, list[Row]] = {}
    for row in found:
        groups.setdefault((row.run.key, row.estimator, row.rule, row.block), []).append(row)
    named = [row for group in groups.values() for row in _told_apart(group)]
    models = list(dict.fromkeys(row.model for row in sorted(found, key=lambda row: row.run.date)))
    return sorted(named, key=lambda row: (models.index(row.model), _place(row))), remarks


def _apart(first: Row, other: Row) -> str:
    pairs = [(value, other.values[metric]) for metric, value in first.values.items() if metric in other.values]
    return "" if all(math.isclose(*pair, rel_tol=1e-4) for pair in pairs) else ", with ANOTHER value"


def _told_apart(group: list[Row]) -> list[Row]:
    if len(group) < 2:
        return group
    fields = [key for key in group[0].run.law if len({row.run.law.get(key) for row in group}) > 1]
    fields = [key for key in fields if key not in ("estimator", "rule")] or ["version"]
    return [
        dataclasses.replace(row, variant=", ".join(f"{key}={row.run.law.get(key)}" for key in fields)) for row in group
    ]


def _place(row: Row) -> tuple:
    block = int(row.block) if row.block.isdigit() else 10**9
    return (ORDER.index(row.estimator), row.estimator == "duel" and block, *rule_place(row.rule), row.variant)


def rule_place(rule: str | None) -> tuple:
    """Where a rule stands among others: in the order of the rules' table, then by family and speed."""
    name, speed = family(rule or "")
    first = name.split(":")[0]
    return (BY_NAME.index(first) if first in BY_NAME else len(BY_NAME), name, speed)


def family(rule: str) -> tuple[str, float]:
    """A rule without the parameter that sets its speed, and that parameter (k, mu or gamma)."""
    name, *parameters = rule.split(":")
    speed, kept = 1.0, [name]
    for parameter in parameters:
        key, _, value = parameter.partition("=")
        if key in ("k", "mu", "gamma"):
            speed = float(value)
        else:
            kept.append(parameter)
    return ":".join(kept), speed


def adaptive(rule: str) -> bool:
    """Whether a rule takes as many steps as the text needs."""
    return rule.split(":")[0] in ADAPTIVE
