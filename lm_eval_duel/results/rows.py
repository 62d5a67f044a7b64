"""The rows of a task's table: one for each value that a run computed, in order, each once, with its name.

What depends on the other rows of a table (intervals, gaps, the best) is `compare`'s.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from lm_eval_duel.core.scores import Value
from lm_eval_duel.errors import DuelError, unknown
from lm_eval_duel.estimators import registry
from lm_eval_duel.estimators.registry import Kind
from lm_eval_duel.results import stats
from lm_eval_duel.results.read import TASK_COUNTS
from lm_eval_duel.results.runs import NO_CACHE, Run, Task, Values
from lm_eval_duel.results.table import Note
from lm_eval_duel.rules import RULES
from lm_eval_duel.rules.tables import is_rule, sort_key, without_defaults

NOISE_SEED, LOG_MEAN = "noise_seed", "log_mean_exp"  # an entry of a spec; the other value of a mean over noise seeds
SAME = 1e-4  # relative difference up to which two ways to one value agree
# entries of a spec that vary within one model
NON_IDENTITY_KEYS = {"estimator", "rule", "draw_seed", *registry.arguments()}
# entries of a spec that every row names if it has them
LABEL_KEYS = {"cache", NOISE_SEED, *(key for entry in registry.ENTRIES for key in entry.label_args)}
# entries of a spec that belong to the estimator, as NON_IDENTITY_KEYS; the last two say what commit-once noise is
OF_ESTIMATOR = {"block", "grid", "rule_code", "cheap_cache", "masked_share", "ties"}
SAMPLING = ("dtype", "warpers")  # entries that change the law of any checkpoint
CACHES = (None, NO_CACHE, "prefix", "dual")  # in the order of tables


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Row:
    """One value of a run's task: a model under one estimator, rule, block and cache.

    It knows nothing of other rows but its `variant`: what its name needs to be different from theirs.
    """

    run: Run
    task: str
    metric: str
    estimator: str
    rule: str | None
    metrics: dict[str, float]
    score: Value | None = None  # as the run wrote it; other models of the harness write none
    nats_window_stderr: float | None = None  # over windows
    nfe: int | None = None
    tokens: int | None = None
    documents: Values = dataclasses.field(repr=False)
    missing: Note  # why there are no documents
    ar: bool  # True for the autoregressive baseline
    variant: str = ""

    # ------------------------------------------------------------ what kind of value it is

    @functools.cached_property
    def entry(self) -> registry.Entry:
        return registry.find(self.estimator)

    @property
    def drawn_bound(self) -> bool:
        """True for a Monte Carlo ELBO, or another bound that is drawn."""
        estimator = registry.find(self.estimator)
        return estimator.kind is Kind.UPPER_BOUND and estimator.drawn is not None

    @property
    def block(self) -> str | None:
        """None for autoregressive and other models, `none` for the whole target."""
        if not self.drawn_bound:
            return self.run.block
        return self.run.spec.get("elbo_block", self.run.spec.get("canvas", "none"))

    @property
    def eps(self) -> float:
        """The least t of an ELBO; above 0 it is not a bound."""
        eps = self.run.spec.get("elbo_eps", "none") if self.drawn_bound else "none"
        return 0.0 if eps == "none" else float(eps)

    @functools.cached_property
    def worth(self) -> Value:
        """Its score, or of a run that wrote none a value of the kind that its estimator has."""
        if self.score is not None:
            return self.score
        kind, note = registry.worth(self.estimator, self.run.spec)
        return Value(math.nan, kind=kind, note=note)

    @property
    def kind(self) -> str:
        return self.worth.label

    @property
    def likelihood(self) -> bool:
        """True for a likelihood, and for an estimate or bound of one."""
        return self.worth.is_likelihood

    @property
    def bound(self) -> bool:
        """True if its perplexity is an upper bound."""
        return self.worth.is_bound

    @property
    def proper(self) -> bool:
        """True for a likelihood itself: no estimate, bound or oracle."""
        return self.worth.is_exact

    @property
    def log_prob(self) -> float | None:
        """Nats."""
        return None if self.score is None else self.score.nats

    @property
    def nats_stderr(self) -> float | None:
        """Its Monte Carlo error."""
        return None if self.score is None else self.score.error

    @property
    def duel(self) -> bool:
        """True if its value is a rule's, or an estimate of one, and not the baseline's."""
        return self.entry.follows_rule and not self.ar

    @property
    def of_draws(self) -> bool:
        """True if its value depends on random numbers."""
        return self.entry.drawn is not None

    @property
    def unknown(self) -> float:
        """The share of [UNK] among its tokens."""
        return self.run.every_task[self.task].unknown

    # ------------------------------------------------------------ names

    @property
    def model(self) -> str:
        return self.run.label

    @property
    def qualifiers(self) -> str:
        """The settings that distinguish it beyond estimator, rule, block and cache."""
        spec = self.run.spec
        named = [self.entry.named.format(f"{key}={spec[key]}") for key in self.entry.label_args if key in spec]
        eps = f"eps={self.eps:g}: no bound" if self.eps else ""
        of_noise = NOISE_SEED in spec and NOISE_SEED not in self.entry.label_args
        seed = f"{NOISE_SEED}={spec[NOISE_SEED]}" if of_noise else ""  # another seed is another distribution
        return ", ".join(filter(None, [eps, seed, *named, self.variant]))

    @property
    def parts(self) -> dict[str, str]:
        """The parts of names, in their order; empty if a part does not apply."""
        return {
            "model": self.model,
            "estimator": self.entry.title,
            **setting(self.rule, self.block, self.run.cache),
            "qualifiers": self.qualifiers,
        }

    @property
    def name(self) -> str:
        """Its name without the model."""
        parts = self.parts | ({} if self.run.has_cache else {"cache": ""})
        return ", ".join(part for key, part in parts.items() if part and key != "model")

    @property
    def title(self) -> str:
        """The estimator with remarks: the baseline, a bound that does not hold, another spec, unknown tokens."""
        remarks = ", ".join(filter(None, [self.baseline_remark, self.qualifiers, self.unknown_share]))
        return f"{self.entry.title}{f' ({remarks})' if remarks else ''}"

    @property
    def baseline_remark(self) -> str:
        return ("baseline" if self.estimator == "ar" else "AR baseline") if self.ar else ""

    @property
    def unknown_share(self) -> str:
        return f"{self.unknown:.1%} [UNK]" if self.unknown else ""

    # ------------------------------------------------------------ values and their errors

    @property
    def value(self) -> float:
        return self.metrics[self.metric]

    @property
    def rate(self) -> float:
        """Nats per unit."""
        return stats.rate(self.metric, self.value)

    @property
    def rate_stderr(self) -> float | None:
        """Its Monte Carlo error."""
        return self.nats_stderr * self.rate / -self.log_prob if self.nats_stderr and self.log_prob else self.nats_stderr

    def error(self, nats_stderr: float | None, metric: str | None = None) -> float | None:
        """Standard error of a metric's value, from its log-likelihood's; None if not known."""
        known = self.metrics.get(metric or self.metric)
        return None if known is None else stats.stderr(metric or self.metric, known, self.log_prob, nats_stderr)

    @property
    def stderr(self) -> float | None:
        """Monte Carlo, or of a sample."""
        return self.error(self.nats_stderr)

    @property
    def stderr_reason(self) -> str:
        """The reason that a drawn value has no error."""
        drawn = self.entry.drawn
        return "" if drawn is None or self.stderr is not None else drawn.unknown(self.run.spec)

    @property
    def stderr_bound(self) -> float | None:
        """A bound of the error of a drawn value: the spread over windows includes the spread of draws.

        Infinite if neither is known; None for a value that is not drawn.
        """
        known = [self.stderr, self.error(self.nats_window_stderr), math.inf]
        return next(error for error in known if error is not None) if self.entry.drawn else None

    @property
    def no_interval(self) -> Note:
        """The reason that a row without bootstrap draws has no interval."""
        return self.missing or Note("one document" if self.documents else "no values per document")

    @property
    def nfe_per_token(self) -> float | None:
        return self.nfe / self.tokens if self.nfe and self.tokens else None


# ---------------------------------------------------------------- labels


def setting(rule: str | None, block: str | None, cache: str | None) -> dict[str, str]:
    """Rule, block and cache as parts of a name; empty if one does not apply."""
    return {
        "rule": without_defaults(rule or ""),
        "block": {"none": "whole target", None: ""}.get(block, f"block {block}"),
        "cache": "" if cache is None else f"cache={cache}",
    }


def names(rows: Sequence[Row]) -> list[str]:
    """The shortest names that distinguish rows: the arguments that differ."""
    labels = [row.parts for row in rows]
    for label in labels:
        label["estimator"] = "" if label["rule"] else label["estimator"]
        label["cache"] = label["cache"] if any(row.run.has_cache for row in rows) else ""
    differing = [key for key in labels[0] if len({label[key] for label in labels}) > 1]
    specs = [row.run.spec for row in rows]
    keys = differing_keys(specs, {*NON_IDENTITY_KEYS, *OF_ESTIMATOR, *LABEL_KEYS, "version"})
    if len({row.run.key for row in rows}) > 1:  # checkpoints differ in much more
        keys = [key for key in keys if key in SAMPLING]
    named = []
    for row, label in zip(rows, labels, strict=True):
        more = [argument(row.run.spec, key) for key in keys if argument(row.run.spec, key) not in row.variant]
        named.append(", ".join([*(label[key] for key in differing if label[key]), *more]))
    return [name or row.name for name, row in zip(named, rows, strict=True)]


def differing_keys(specs: Sequence[Mapping[str, str]], named: Iterable[str]) -> list[str]:
    """The entries in which specs differ, without those that names hold anyway."""
    keys = dict.fromkeys(key for spec in specs for key in spec if len({other.get(key) for other in specs}) > 1)
    return [key for key in keys if key not in named]


def argument(spec: Mapping[str, str], key: str) -> str:
    """An entry of a spec in a name. The warpers are model args, such as `temperature=0.7`."""
    return spec.get(key, f"no {key}") if key == "warpers" else f"{key}={spec.get(key, 'not set')}"


# ---------------------------------------------------------------- from results


def plain_row(run: Run, name: str, baseline: bool) -> Row:
    """A run's own value of a task, without its documents. Of a task without a perplexity it has the names only."""
    task = run.every_task[name]
    return Row(
        run=run,
        task=name,
        metric="",
        estimator=run.estimator,
        rule=run.rule,
        metrics=task.metrics,
        documents={},
        missing=Note(),
        ar=baseline,
    )


def of_run(run: Run, name: str, metric: str, baseline: bool) -> tuple[list[Row], list[str]]:
    """The rows of a run's task, and notes on what is left out.

    A lattice run has a row for each of its estimators and rules. `baseline`: the run is the autoregressive one of the
    gaps.
    """
    task = run.tasks[name]
    documents, missing = _documents(task, metric)
    counted = None if task.tokens is None else int(sum(task.tokens.values())) or None
    plain = dataclasses.replace(
        plain_row(run, name, baseline),
        metric=metric,
        tokens=counted if task.partial else task.entry.get("tokens") or counted,
        documents=documents,
        missing=missing,
    )
    if task.partial:
        note = (
            f"the figures in {run.name} are of {task.computed} documents of {name}, its value of {task.size} (a "
            "response cache answered the others, or counted some of another run): only the harness's own value is shown"
        )
        return [plain], [note]
    rows, notes = [], []
    for key, value in task.entry.get("values", {}).items():
        if key == LOG_MEAN:
            notes.append(_log_mean(plain, value))
            continue
        if key not in registry.ESTIMATORS and not is_rule(key):
            raise DuelError(f"{run.name}: {unknown('estimator or rule', key, [*registry.ESTIMATORS, *RULES])}")
        if why := _left_out(plain, key, value):
            notes.append(why)
        else:
            rows.append(_row_of_value(plain, key, value))
    return rows or [plain], notes


def _log_mean(plain: Row, value: Mapping[str, Any]) -> str:
    """A note on the other value of a mean over noise seeds, which is in the results file."""
    nats = value.get("log_prob")
    amount = "not finite" if nats is None else f"{nats:.2f} nats"
    if value.get("stderr") is not None:
        amount += f" ± {value['stderr']:.2f}"
    return (
        f"the log of the mean probability of {plain.task} over the noise seeds of {plain.run.name} is {amount}, a "
        "lower bound of the log-likelihood in expectation over noise"
    )


def _left_out(plain: Row, key: str, value: Mapping[str, Any]) -> str:
    """The reason that a value of a task has no row; empty if it has one."""
    run, entry = plain.run, plain.run.tasks[plain.task].entry
    for unit in TASK_COUNTS:
        if unit in value and unit in entry and value[unit] != entry[unit]:  # a cache continued it with other rules
            why = f"it is of {value[unit]} {unit}, the task of {entry[unit]}"
            return f"{key} of {plain.task} in {run.name} is left out: {why}"
    if key != run.estimator:
        first, log_prob = entry["values"].get(run.estimator, {}).get("log_prob"), value.get("log_prob")
        if not first or log_prob is None or not (math.isfinite(first) and log_prob < math.inf):
            return f"{run.name}: {key} of {plain.task} has no finite log-likelihood, so it has no value"
    return ""


def _row_of_value(plain: Row, key: str, value: Mapping[str, Any]) -> Row:
    """The row of one value of a run. `plain`: that of the harness's own value; `key`: an estimator or a rule."""
    run, entry, log_prob = plain.run, registry.ESTIMATORS.get(key), value.get("log_prob")
    estimator = key if entry else "duel"  # no estimator: a rule that a lattice followed
    rule, metrics, documents, missing = key, plain.metrics, plain.documents, plain.missing
    if entry is not None:
        rule = run.rule if entry.follows_rule else None
    if key != run.estimator:
        first = run.tasks[plain.task].entry["values"][run.estimator]["log_prob"]
        rates = {each: stats.rate(each, known) * (log_prob / first) for each, known in metrics.items()}
        metrics = {each: float(stats.value(each, -rate, 1.0)) for each, rate in rates.items()}
        documents, missing = _traced(plain, key, log_prob)
    return dataclasses.replace(
        plain,
        estimator=estimator,
        rule=rule,
        metrics=metrics,
        score=Value.read(value, *registry.worth(estimator, run.spec)),
        nats_window_stderr=value.get("window_stderr"),
        nfe=value.get("nfe"),
        documents=documents,
        missing=missing,
        ar=plain.ar and key == run.estimator,
    )


def _documents(task: Task, metric: str) -> tuple[Values, Note]:
    """(nats, units) of each document, if the samples reproduce the task's value; else the reason."""
    if task.documents is None:
        return {}, task.missing
    values, known = task.documents.values.get(metric, {}), task.metrics.get(metric)
    if known is None or not values or len(values) < len(task.documents.numbers):
        return {}, Note()
    found = stats.value(metric, *map(sum, zip(*values.values(), strict=True)))
    if not math.isclose(found, known, rel_tol=SAME):
        return {}, Note(f"the samples of {task.name} give {metric} {found:.6g}, the results {known:.6g}: another run's")
    return values, Note()


def _traced(row: Row, key: str, log_prob: float) -> tuple[Values, Note]:
    """The documents of another value of a lattice run, from its trace, or the reason for none. `row`: its first."""
    if not row.documents:
        return {}, row.missing
    nats, numbers = row.run.traced.get((row.task, key)), row.run.tasks[row.task].documents.numbers
    if nats is None:
        return {}, Note(f"no trace of {key} per document", "run with trace=FILE, or name it with --traces")
    if not math.isclose(total := sum(nats.get(n, 0.0) for n in numbers.values()), log_prob, rel_tol=1e-6):
        what = f"the trace adds up to {total:.3f} nats of {key}, the result to {log_prob}"
        return {}, Note(f"{what}: another run's trace")
    values = {document: (nats.get(numbers[document], 0.0), units) for document, (_, units) in row.documents.items()}
    return values, Note()


# ---------------------------------------------------------------- in order, each once


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
    groups: dict[tuple, dict[tuple, list[Row]]] = {}
    for row in sorted(rows, key=lambda row: (not row.ar, row.estimator != row.run.estimator, -row.run.date)):
        alike = groups.setdefault((row.run.key, row.estimator, row.rule, row.block), {})
        alike.setdefault(identity(row), []).append(row)
    same: dict[Row, list[Row]] = {}
    notes = []
    for alike in groups.values():
        named = _disambiguated([first for first, *_ in alike.values()])
        for row, (_, *others) in zip(named, alike.values(), strict=True):
            same[row] = others
            notes += [_twice(row, other) for other in others]
    models = list(dict.fromkeys(row.model for row in sorted(same, key=lambda row: row.run.date)))
    kept = sorted(same, key=lambda row: (not row.ar, models.index(row.model), _sort_key(row)))
    return Ordered(kept, same, notes)


def identity(row: Row) -> tuple:
    """The entries of its spec that define its value: rows of one model, estimator and rule are the same if equal."""
    ignored = NON_IDENTITY_KEYS - ({*row.entry.arguments} if not row.entry.lattice else set())
    return tuple(sorted((k, v) for k, v in row.run.spec.items() if row.of_draws or k not in ignored))


def _twice(row: Row, other: Row) -> str:
    """A note on a second result of the same value."""
    shared = [metric for metric in row.metrics if metric in other.metrics]
    equal = all(math.isclose(row.metrics[metric], other.metrics[metric], rel_tol=SAME) for metric in shared)
    twice = f"{row.run.short_name} is shown, {other.run.short_name} holds it too"
    return f"{row.model}, {row.name}: {twice}{'' if equal else ', with ANOTHER value'}"


def _disambiguated(group: Sequence[Row]) -> list[Row]:
    """Rows of one name, with what distinguishes their specs as their variant."""
    keys = differing_keys([row.run.spec for row in group], ("estimator", "rule"))
    named = {"cache", NOISE_SEED, *group[0].entry.label_args}
    if len(group) < 2 or (keys and named.issuperset(keys)):
        return list(group)
    keys = [key for key in keys if key not in named] or ["version"]
    return [dataclasses.replace(row, variant=", ".join(argument(row.run.spec, key) for key in keys)) for row in group]


def _sort_key(row: Row) -> tuple[Any, ...]:
    block = int(row.block) if (row.block or "").isdigit() else 10**9
    block = -block if row.drawn_bound else block  # the whole target first
    cache = CACHES.index(row.run.cache) if row.run.cache in CACHES else len(CACHES)
    return ([*registry.ESTIMATORS].index(row.estimator), block, *sort_key(row.rule), cache, row.variant)
