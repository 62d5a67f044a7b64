"""The rows of a task's table: one for each value that a run computed, with its name.

Their order is `order`'s, and what depends on the other rows of a table (intervals, gaps, the best) is `compare`'s.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval_duel.core.scores import Value
from lm_eval_duel.errors import DuelError, unknown
from lm_eval_duel.estimators import registry
from lm_eval_duel.estimators.registry import OtherValue
from lm_eval_duel.results import stats
from lm_eval_duel.results.bootstrap import text_of
from lm_eval_duel.results.runs import Run, Task, Values, sums
from lm_eval_duel.results.schema import TASK_COUNTS
from lm_eval_duel.results.spec_entries import (
    ESTIMATOR_KEYS,
    LABEL_KEYS,
    NON_IDENTITY_KEYS,
    SAMPLING,
    differing_keys,
    entries_for_names,
    lost_distinctions,
)
from lm_eval_duel.results.table import Note, number, percent
from lm_eval_duel.rules import RULES, is_rule, without_defaults

SAME = 1e-4  # relative difference up to which two ways to one value agree


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Row:
    """One value of a run's task: a model under one estimator, rule, block and cache.

    It knows nothing of other rows but its `variant`: what its name needs to be different from theirs. What kind of
    number it is, `score` says.
    """

    run: Run
    task: str
    metric: str
    estimator: str
    rule: str | None
    metrics: dict[str, float]
    score: Value  # of the whole task; its nats are NaN for other models of the harness, which write none
    nats_window_stderr: float | None = None  # over windows
    nfe: int | None = None
    tokens: int | None = None
    documents: Values = dataclasses.field(repr=False)
    missing: Note  # why there are no documents
    ar: bool  # True for the autoregressive baseline
    variant: str = ""
    variant_keys: tuple[str, ...] = ()  # the entries of the spec that `variant` tells

    # ------------------------------------------------------------ how it was computed

    @functools.cached_property
    def entry(self) -> registry.Entry:
        return registry.find(self.estimator)

    @property
    def is_drawn(self) -> bool:
        """True if its value depends on random numbers."""
        return self.entry.is_drawn

    @property
    def is_drawn_bound(self) -> bool:
        """True for a Monte Carlo ELBO, also one that `elbo_eps` keeps from being a bound, and for other such bounds."""
        return self.is_drawn and self.entry.kind.is_bound

    @property
    def is_duel(self) -> bool:
        """True if its value is a rule's, or an estimate of one, and not the baseline's."""
        return self.entry.follows_rule and not self.ar

    @property
    def block(self) -> str | None:
        """None for autoregressive and other models, `none` for the whole target."""
        if not self.is_drawn_bound:
            return self.run.config.block
        return self.run.spec.get("elbo_block", self.run.spec.get("canvas", "none"))

    @property
    def cache(self) -> str | None:
        return self.run.config.cache

    @property
    def eps(self) -> float:
        """The least t of an ELBO; above 0 it is not a bound."""
        return registry.least_level(self.run.spec) if self.is_drawn_bound else 0.0

    @property
    def noise_seed(self) -> str | None:
        """The seed of the noise that its value is given: another seed is another distribution."""
        return self.run.spec.get("noise_seed") if self.score.is_exact else None

    @property
    def unknown(self) -> float:
        """The share of [UNK] among its tokens."""
        return self.run.every_task[self.task].unknown

    @property
    def lost(self) -> dict[str, str]:
        """The distinctions that its tokenizer does not make, see `lost_distinctions`."""
        return lost_distinctions(self.run.spec, self.unknown)

    # ------------------------------------------------------------ names

    @property
    def model(self) -> str:
        return self.run.label

    @property
    def qualifiers(self) -> str:
        """The settings that distinguish it beyond estimator, rule, block and cache."""
        return ", ".join(filter(None, [*self.entry.qualifiers(self.run.spec), self.variant]))

    @property
    def parts(self) -> dict[str, str]:
        """The parts of names, in their order; empty if a part does not apply."""
        return {
            "model": self.model,
            "estimator": self.entry.title,
            **setting(self.rule, self.block, self.cache),
            "qualifiers": self.qualifiers,
        }

    @property
    def name(self) -> str:
        """Its name without the model."""
        parts = self.parts
        del parts["model"]
        if not self.run.has_cache:
            del parts["cache"]
        return ", ".join(filter(None, parts.values()))

    @property
    def title(self) -> str:
        """The estimator with remarks: the baseline, a bound that does not hold, another spec, unknown tokens."""
        remarks = ", ".join(filter(None, [self.baseline_remark, self.qualifiers, self.unknown_share]))
        return f"{self.entry.title} ({remarks})" if remarks else self.entry.title

    @property
    def baseline_remark(self) -> str:
        """A remark that it is the baseline; one of another estimator than `ar` says that it is autoregressive."""
        if not self.ar:
            return ""
        return "baseline" if self.estimator == "ar" else "AR baseline"

    @property
    def unknown_share(self) -> str:
        return f"{percent(self.unknown)} [UNK]" if self.unknown else ""

    # ------------------------------------------------------------ values and their errors

    @property
    def value(self) -> float:
        return self.metrics[self.metric]

    @property
    def rate(self) -> float:
        """Nats per unit."""
        return stats.rate(self.metric, self.value)

    @property
    def per_unit(self) -> Value:
        """Its log-likelihood per unit, and the error of that. Its seeds are those of the score."""
        error = self.score.error
        if error and self.score.nats:
            error *= self.rate / -self.score.nats  # over the units
        return dataclasses.replace(self.score, nats=-self.rate, error=error)

    def error(self, nats_stderr: float | None, metric: str | None = None) -> float | None:
        """Standard error of a metric's value, from its log-likelihood's; None if not known."""
        metric = metric or self.metric
        if metric not in self.metrics:
            return None
        return stats.stderr(metric, self.metrics[metric], self.score.nats, nats_stderr)

    @property
    def stderr(self) -> float | None:
        """Monte Carlo, or of a sample."""
        return self.error(self.score.error)

    @property
    def stderr_reason(self) -> str:
        """The reason that a drawn value has no error."""
        return self.entry.unknown_error(self.stderr, self.run.spec)

    @property
    def about_value(self) -> Note:
        """The reasons to doubt its value, and the reason that it has no error."""
        notes = list(map(Note, self.run.doubts))
        return Note.joined([*notes, Note(self.run.about_scored_bos(self.task)), Note(self.stderr_reason)])

    @property
    def window_stderr(self) -> float | None:
        """The standard error over windows of a value per token; None if it is not known.

        It says how much other windows would vary, each with its own tokens. A value per word, byte or document varies
        with how many of these a window has, too, which results do not hold: it needs the samples of documents.
        """
        return self.error(self.nats_window_stderr) if self.metric == "token_perplexity" else None

    @property
    def stderr_bound(self) -> float | None:
        """A bound of the error of a drawn value: the spread over windows includes the spread of draws.

        Infinite if neither is known; None for a value that is not drawn.
        """
        if not self.is_drawn:
            return None
        for error in (self.stderr, self.error(self.nats_window_stderr)):
            if error is not None:
                return error
        return math.inf

    @property
    def drawn_interval(self) -> list[float] | None:
        """The 95 % interval of its value by its Monte Carlo error alone; None without one."""
        if self.stderr is None:
            return None
        return stats.drawn_interval(self.metric, self.rate, self.per_unit.interval_error)

    @property
    def texts(self) -> list[str]:
        """A digest of each document, equal for copies of a text, which its key numbers."""
        return [text_of(key) for key in self.documents]

    @property
    def distinct(self) -> int:
        """The number of different documents."""
        return len(set(self.texts))

    @property
    def no_interval(self) -> Note:
        """The reason that a row without bootstrap draws has no interval."""
        if self.missing:
            return self.missing
        if not self.documents:
            return Note("no values per document")
        return Note("an infinite value" if math.isinf(self.value) else "one document")

    @property
    def nfe_per_token(self) -> float | None:
        return self.nfe / self.tokens if self.nfe and self.tokens else None


# ---------------------------------------------------------------- names


def setting(rule: str | None, block: str | None, cache: str | None) -> dict[str, str]:
    """Rule, block and cache as parts of a name; empty if one does not apply."""
    return {
        "rule": without_defaults(rule or ""),
        "block": {"none": "whole target", None: ""}.get(block, f"block {block}"),
        "cache": "" if cache is None else f"cache={cache}",
    }


def names(rows: Sequence[Row]) -> list[str]:
    """The shortest names that distinguish rows: the arguments that differ."""
    any_cache = any(row.run.has_cache for row in rows)
    labels = []
    for row in rows:
        label = row.parts
        if label["rule"]:
            label["estimator"] = ""
        if not any_cache:
            label["cache"] = ""
        labels.append(label)
    parts = differing_keys(labels, ())

    specs = [row.run.spec for row in rows]
    keys = differing_keys(specs, {*NON_IDENTITY_KEYS, *ESTIMATOR_KEYS, *LABEL_KEYS, "version"})
    models = {row.run.key for row in rows}
    if len(models) > 1:  # checkpoints differ in much more
        keys = [key for key in keys if key in SAMPLING]

    shortest = []
    for row, label, entries in zip(rows, labels, entries_for_names(specs, keys), strict=True):
        name = []
        for part in parts:
            if label[part]:
                name.append(label[part])
        for text in entries:
            if text not in row.variant:  # which is a part of the name already
                name.append(text)
        shortest.append(", ".join(name) or row.name)
    return shortest


# ---------------------------------------------------------------- from results


def from_run(run: Run, name: str, metric: str, baseline: bool) -> tuple[list[Row], list[str]]:
    """The rows of a run's task, and notes on what is left out.

    A lattice run has a row for each of its estimators and rules. `baseline`: the run is the autoregressive one of the
    gaps.
    """
    task = run.tasks[name]
    harness_row = plain_row(run, name, baseline, metric)
    if task.partial:
        note = (
            f"the figures in {run.name} are of {task.computed} documents of {name}, its value of {task.size} (a "
            "response cache answered the others, or counted some of another run): only the harness's own value is shown"
        )
        return [harness_row], [note]

    without_row = {other.name: other for other in registry.find(run.config.estimator).others}
    rows = []
    notes = []
    for key, written in task.entry.get("values", {}).items():
        if key in without_row:
            notes.append(_other_value(harness_row, without_row[key], written))
            continue
        if key not in registry.ESTIMATORS and not is_rule(key):
            raise DuelError(f"{run.name}: {unknown('estimator or rule', key, [*registry.ESTIMATORS, *RULES])}")
        why = _left_out(harness_row, key, written)
        if why:
            notes.append(why)
        else:
            rows.append(_row_of_value(harness_row, key, written))
    return rows or [harness_row], notes


def plain_row(run: Run, name: str, baseline: bool, metric: str = "") -> Row:
    """The row of a task's value as the harness writes it, without its log-likelihood.

    Of a task without a perplexity (and so without a `metric`) it has the names only.
    """
    task = run.every_task[name]
    documents, missing = _documents(task, metric)
    tokens = None
    if task.tokens is not None:
        tokens = int(sum(task.tokens.values())) or None
    if not task.partial:  # the run's own count, which needs no samples; a partial run's is of other documents
        tokens = task.entry.get("tokens") or tokens
    return Row(
        run=run,
        task=name,
        metric=metric,
        estimator=run.config.estimator,
        rule=run.config.rule,
        metrics=task.metrics,
        score=registry.value_template(run.config.estimator, run.spec),
        tokens=tokens,
        documents=documents,
        missing=missing,
        ar=baseline,
    )


def _other_value(row: Row, other: OtherValue, written: Mapping[str, Any]) -> str:
    """A note on a value that is in the results file and has no row."""
    nats = written.get("log_prob")
    amount = "not finite"
    if nats is not None:
        amount = f"{number(nats, error=written.get('stderr'))} nats"
    return f"{other.title} of {row.task} in {row.run.name} is {amount}, {other.what}"


def _left_out(row: Row, key: str, written: Mapping[str, Any]) -> str:
    """The reason that a value of a task has no row; empty if it has one. `row`: of the harness's own value."""
    run = row.run
    entry = run.tasks[row.task].entry
    for unit in TASK_COUNTS:
        if unit in written and unit in entry and written[unit] != entry[unit]:  # a cache continued it with other rules
            why = f"it is of {written[unit]} {unit}, the task of {entry[unit]}"
            return f"{key} of {row.task} in {run.name} is left out: {why}"
    if key == run.config.estimator:
        return ""

    # Its perplexities follow from the ratio of its log-likelihood to the harness's, see `_row_of_value`.
    harness_nats = entry["values"].get(run.config.estimator, {}).get("log_prob")
    nats = written.get("log_prob")
    has_ratio = bool(harness_nats) and math.isfinite(harness_nats) and nats is not None and nats < math.inf
    if not has_ratio:
        return f"{run.name}: {key} of {row.task} has no finite log-likelihood, so it has no value"
    return ""


def _row_of_value(row: Row, key: str, written: Mapping[str, Any]) -> Row:
    """The row of one value of a run. `row`: of the harness's own value; `key`: an estimator or a rule."""
    run = row.run
    entry = registry.ESTIMATORS.get(key)
    if entry is None:  # a rule that a lattice followed
        estimator = "duel"
        rule = key
    else:
        estimator = key
        rule = run.config.rule if entry.follows_rule else None

    value_template = registry.value_template(estimator, run.spec)
    row = dataclasses.replace(
        row,
        estimator=estimator,
        rule=rule,
        score=Value.read(written, value_template) or value_template,
        nats_window_stderr=written.get("window_stderr"),
        nfe=written.get("nfe"),
    )
    if key == run.config.estimator:
        return row

    # The harness wrote perplexities of its own value alone. Those of another follow: both are sums over the same units.
    harness_nats = run.tasks[row.task].entry["values"][run.config.estimator]["log_prob"]
    ratio = written["log_prob"] / harness_nats
    metrics = {}
    for metric, harness_value in row.metrics.items():
        rate = stats.rate(metric, harness_value) * ratio
        metrics[metric] = float(stats.value(metric, -rate, 1.0))
    documents, missing = _traced(row, key, written["log_prob"])
    return dataclasses.replace(row, metrics=metrics, documents=documents, missing=missing, ar=False)


def _documents(task: Task, metric: str) -> tuple[Values, Note]:
    """(nats, units) of each document that is not empty, if the samples reproduce the task's value; else the reason."""
    if task.documents is None:
        return {}, task.missing
    values = task.documents.values.get(metric, {})
    written = task.metrics.get(metric)
    if written is None or not values or len(values) < len(task.documents.numbers):
        return {}, Note()
    sampled = stats.value(metric, *sums(values))
    if not math.isclose(sampled, written, rel_tol=SAME):
        both = f"the samples of {task.name} give {metric} {sampled:.6g}, the results {written:.6g}"
        return {}, Note(f"{both}: another run's")
    return _without_empty(values), Note()


def _without_empty(values: Values) -> Values:
    """The documents that are not empty: those without a unit say nothing about others, and are no draws of them."""
    kept = {}
    for document, (nats, units) in values.items():
        is_empty = nats == 0 and units == 0
        if not is_empty:
            kept[document] = (nats, units)
    return kept


def _traced(row: Row, key: str, log_prob: float) -> tuple[Values, Note]:
    """The documents of another value of a lattice run, from its trace, or the reason for none.

    `row` has the documents of the harness's own value.
    """
    if not row.documents:
        return {}, row.missing
    nats = row.run.traced.get((row.task, key))
    if nats is None:
        return {}, Note(f"no trace of {key} per document", row.run.trace_advice)
    indices = row.run.tasks[row.task].documents.numbers
    values = {}
    for document, (_, units) in row.documents.items():
        of_document = nats.get(indices[document], 0.0)  # a document that the trace does not hold
        values[document] = (of_document, units)
    total, _ = sums(values)
    if not math.isclose(total, log_prob, rel_tol=1e-6):
        both = f"the trace adds up to {total:.3f} nats of {key}, the result to {log_prob:.3f}"
        return {}, Note(f"{both}: another run's trace")
    return values, Note()
