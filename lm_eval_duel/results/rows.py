"""The rows of a task's table: one for each value that a run computed, in order, each once, with its name."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from lm_eval_duel.errors import DuelError, unknown
from lm_eval_duel.estimators import registry
from lm_eval_duel.estimators.blocks import BeamBlocks
from lm_eval_duel.estimators.registry import Kind
from lm_eval_duel.results import stats
from lm_eval_duel.results.read import NO_CACHE, TASK_COUNTS, Run, Task, Values
from lm_eval_duel.results.stats import PairedDifference
from lm_eval_duel.rules import RULES
from lm_eval_duel.rules.tables import is_rule, sort_key, without_defaults

SAME = 1e-4  # relative difference up to which two ways to one value agree
# entries of a spec that vary within one model
NON_IDENTITY_KEYS = {"estimator", "rule", "draw_seed", *registry.arguments()}
# entries of a spec that every row names if it has them
LABEL_KEYS = {"cache", *(key for entry in registry.ENTRIES for key in entry.label_args)}
# entries of a spec that belong to the estimator, as NON_IDENTITY_KEYS
OF_ESTIMATOR = {"block", "grid", "rule_code", "cheap_cache"}
SAMPLING = ("dtype", "warpers")  # entries that change the law of any checkpoint
CACHES = (None, NO_CACHE, "prefix", "dual")  # in the order of tables
Interval = list[float]  # low, high


@dataclasses.dataclass(eq=False)
class Row:
    """One line of a task's table: a model under one estimator, rule, block and cache.

    `of_run` makes it; `in_order` fills in `variant` and `same`, and `compare.task` what follows, in this order.
    """

    run: Run
    task: str
    metric: str
    estimator: str
    rule: str | None
    metrics: dict[str, float]
    log_prob: float | None = None
    nats_stderr: float | None = None  # Monte Carlo
    nats_window_stderr: float | None = None  # over windows
    nfe: int | None = None
    tokens: int | None = None
    beam: BeamBlocks | None = None  # of a sum over orders by a beam
    documents: Values = dataclasses.field(default_factory=dict, repr=False)
    missing: str = ""  # why there are no documents
    variant: str = ""  # what distinguishes it from a row of the same model, rule and block
    same: tuple[Row, ...] = dataclasses.field(default=(), repr=False)  # rows of the same value that it stands for

    ar: bool = False  # the autoregressive baseline
    draws: np.ndarray | None = dataclasses.field(default=None, repr=False)  # of its nats per unit, by the bootstrap
    interval: Interval | None = None  # 95 %, over documents
    best: bool = False  # the lowest likelihood of its model
    gap: float | None = None  # to the baseline
    gap_interval: Interval | None = None
    elbo: Row | None = None
    distinguishable: bool | None = None
    gap_closed: float | None = None  # None if it is not distinguishable from 0
    gap_closed_stderr: float | None = None
    gap_closed_interval: Interval | None = None
    gap_closed_reason: str = ""  # why gap closed, or its error, is not known
    cache_cost: Pair | None = None

    def __post_init__(self) -> None:
        spec = self.run.spec
        self.entry = registry.of_spec(self.estimator, spec, self.beam)
        kind, estimator, drawn = self.entry.kind, registry.find(self.estimator), self.entry.drawn
        # a Monte Carlo ELBO, or another bound that is drawn
        self.drawn_bound = estimator.kind is Kind.UPPER_BOUND and estimator.drawn is not None
        # None for autoregressive and other models, `none` for the whole target
        self.block = spec.get("elbo_block", spec.get("canvas", "none")) if self.drawn_bound else self.run.block
        eps = spec.get("elbo_eps", "none") if self.drawn_bound else "none"
        self.eps = 0.0 if eps == "none" else float(eps)  # the least t of an ELBO; above 0 it is not a bound
        self.kind = registry.kind_of(self.estimator, {**spec, "elbo_eps": self.eps}, self.beam)
        self.likelihood = kind is not Kind.NOT_A_LIKELIHOOD  # or an estimate or bound of one
        self.bound = kind is Kind.UPPER_BOUND and not self.eps  # of the perplexity, from above
        self.proper = kind is Kind.LIKELIHOOD  # itself: no estimate, bound or oracle
        self.unknown = self.run.tasks[self.task].unknown
        self.stderr = self.error(self.nats_stderr)  # Monte Carlo, or of a sample
        # why a drawn value has no error
        self.stderr_reason = "" if drawn is None or self.stderr is not None else drawn.unknown(spec)
        # the spread over windows includes the spread of draws, so its error is a bound; infinite if neither is known
        known = [self.stderr, self.error(self.nats_window_stderr), math.inf]
        self.stderr_bound = next(error for error in known if error is not None) if drawn else None

    @property
    def duel(self) -> bool:
        """True if its value is a rule's, or an estimate of one, and not the baseline's."""
        return self.entry.follows_rule and not self.ar

    @property
    def of_draws(self) -> bool:
        """True if its value depends on random numbers, as does a bound by a beam, which has no error."""
        return self.entry.drawn is not None or (self.beam is not None and self.beam.bounded > 0)

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
        return ", ".join(filter(None, [eps, *named, self.beam.remark if self.beam else "", self.variant]))

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
        """The share of [UNK] among its tokens."""
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

    @property
    def reason(self) -> str:
        """The reason that there is no interval."""
        if self.draws is not None:
            return ""
        return self.missing or ("one document" if self.documents else "no values per document")

    @property
    def nfe_per_token(self) -> float | None:
        return self.nfe / self.tokens if self.nfe and self.tokens else None

    def error(self, nats_stderr: float | None, metric: str | None = None) -> float | None:
        """Standard error of a metric's value, from its log-likelihood's; None if not known."""
        known = self.metrics.get(metric or self.metric)
        return None if known is None else stats.stderr(metric or self.metric, known, self.log_prob, nats_stderr)

    @property
    def window_stderr(self) -> float | None:
        """Over windows, if there is no interval."""
        return self.error(self.nats_window_stderr) if self.draws is None else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair(PairedDifference):
    """The paired difference of two rows; `second` is None, with the `reason`, if there is no row to compare with."""

    first: Row
    second: Row | None
    reason: str  # why there is no difference, or no interval


def drawn_values(*compared: Row) -> list[np.ndarray]:
    """The values of rows that are compared in each draw of the bootstrap, with their Monte Carlo errors."""
    draws = stats.with_errors([row.draws for row in compared], [row.rate_stderr for row in compared])
    return [stats.value(row.metric, -drawn, 1.0) for row, drawn in zip(compared, draws, strict=True)]


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


def of_run(run: Run, name: str, metric: str, notes: list[str]) -> list[Row]:
    """The rows of a run's task: a lattice run has one for each of its estimators and rules. Adds remarks to `notes`."""
    task = run.tasks[name]
    documents, missing = _documents(task, metric)
    counted = None if task.tokens is None else int(sum(task.tokens.values())) or None
    tokens = counted if task.partial else task.entry.get("tokens") or counted
    plain = Row(
        *(run, name, metric, run.estimator, run.rule, task.metrics), tokens=tokens, documents=documents, missing=missing
    )
    if task.partial:
        notes.append(
            f"the figures in {run.name} are of {task.computed} documents of {name}, its value of {task.size} (a "
            "response cache answered the others, or counted some of another run): only the harness's own value is shown"
        )
        return [plain]
    rows, values = [], task.entry.get("values", {})
    for key, value in values.items():
        if key not in registry.ESTIMATORS and not is_rule(key):
            raise DuelError(f"{run.name}: {unknown('estimator or rule', key, [*registry.ESTIMATORS, *RULES])}")
        fewer = [
            unit for unit in TASK_COUNTS if unit in value and unit in task.entry and value[unit] != task.entry[unit]
        ]
        if fewer:  # a cache continued a lattice run with other rules
            why = f"it is of {value[fewer[0]]} {fewer[0]}, the task of {task.entry[fewer[0]]}"
            notes.append(f"{key} of {name} in {run.name} is left out: {why}")
            continue
        entry, log_prob, metrics = registry.ESTIMATORS.get(key), value.get("log_prob"), task.metrics
        documents, missing = plain.documents, plain.missing
        if key != run.estimator:
            first = values.get(run.estimator, {}).get("log_prob")
            if not first or log_prob is None or not (math.isfinite(first) and log_prob < math.inf):
                notes.append(f"{run.name}: {key} of {name} has no finite log-likelihood, so it has no value")
                continue
            rates = {each: stats.rate(each, known) * (log_prob / first) for each, known in metrics.items()}
            metrics = {each: float(stats.value(each, -rate, 1.0)) for each, rate in rates.items()}
            documents, missing = _traced(plain, key, log_prob)
        rows.append(
            dataclasses.replace(
                plain,
                estimator=key if entry else "duel",  # no estimator: a rule that a lattice followed
                rule=key if entry is None else run.rule if entry.follows_rule else None,
                metrics=metrics,
                log_prob=log_prob,
                nats_stderr=value.get("stderr"),
                nats_window_stderr=value.get("window_stderr"),
                nfe=value.get("nfe"),
                beam=value.get("beam"),
                documents=documents,
                missing=missing,
            )
        )
    return rows or [plain]


def _documents(task: Task, metric: str) -> tuple[Values, str]:
    """(nats, units) of each document, if the samples reproduce the task's value; else the reason."""
    if task.documents is None:
        return {}, task.missing
    values, known = task.documents.values.get(metric, {}), task.metrics.get(metric)
    if known is None or not values or len(values) < len(task.documents.numbers):
        return {}, ""
    found = stats.value(metric, *map(sum, zip(*values.values(), strict=True)))
    if not math.isclose(found, known, rel_tol=SAME):
        return {}, f"the samples of {task.name} give {metric} {found:.6g}, the results {known:.6g}: another run's"
    return values, ""


def _traced(row: Row, key: str, log_prob: float) -> tuple[Values, str]:
    """The documents of another value of a lattice run, from its trace, or the reason for none. `row`: its first."""
    if not row.documents:
        return {}, row.missing
    nats, numbers = row.run.traced.get((row.task, key)), row.run.tasks[row.task].documents.numbers
    if nats is None:
        return {}, f"no trace of {key} per document (run with trace=FILE, or name it with --traces)"
    if not math.isclose(total := sum(nats.get(n, 0.0) for n in numbers.values()), log_prob, rel_tol=1e-6):
        what = f"the trace adds up to {total:.3f} nats of {key}, the result to {log_prob}"
        return {}, f"{what}: another run's trace"
    return {document: (nats.get(numbers[document], 0.0), units) for document, (_, units) in row.documents.items()}, ""


# ---------------------------------------------------------------- in order, each once


def in_order(rows: Iterable[Row], base: Run | None, notes: list[str]) -> list[Row]:
    """The rows of a table, the baseline first; remarks on those that are there twice are added to `notes`.

    A value that was scored alone and in a lattice run has one row, from the run that has its values of documents. Rows
    of different specs that share a name get a variant. The baseline is always kept.

    Raises:
        DuelError: the baseline has no row.
    """
    groups: dict[tuple, dict[tuple, Row]] = {}
    for row in sorted(rows, key=lambda row: (not row.ar, row.estimator != row.run.estimator, -row.run.date)):
        spec = row.run.spec
        ignored = NON_IDENTITY_KEYS - ({*row.entry.arguments} if not row.entry.lattice else set())
        identity = tuple(sorted((k, v) for k, v in spec.items() if row.of_draws or k not in ignored))
        alike = groups.setdefault((row.run.key, row.estimator, row.rule, row.block), {})
        first = alike.setdefault(identity, row)
        if first is not row:
            first.same += (row,)
            pairs = [(value, row.metrics[metric]) for metric, value in first.metrics.items() if metric in row.metrics]
            other = "" if all(math.isclose(*pair, rel_tol=SAME) for pair in pairs) else ", with ANOTHER value"
            twice = f"{first.run.short_name} is shown, {row.run.short_name} holds it too{other}"
            notes.append(f"{row.model}, {row.name}: {twice}")
    for alike in groups.values():
        _disambiguate([*alike.values()])
    kept = [row for alike in groups.values() for row in alike.values()]
    models = list(dict.fromkeys(row.model for row in sorted(kept, key=lambda row: row.run.date)))
    kept.sort(key=lambda row: (not row.ar, models.index(row.model), _sort_key(row)))
    if base is not None and not (kept and kept[0].ar):
        raise DuelError(f"The autoregressive baseline {base.name} has no row; name one result of one model as --ar.")
    return kept


def _disambiguate(group: Sequence[Row]) -> None:
    """Give rows of one name what distinguishes their specs as their variant."""
    specs = [row.run.spec for row in group]
    keys, named = differing_keys(specs, ("estimator", "rule")), {"cache", *group[0].entry.label_args}
    if len(group) < 2 or (keys and named.issuperset(keys)):
        return
    keys = [key for key in keys if key not in named] or ["version"]
    for row in group:
        row.variant = ", ".join(argument(row.run.spec, key) for key in keys)


def _sort_key(row: Row) -> tuple[Any, ...]:
    block = int(row.block) if (row.block or "").isdigit() else 10**9
    block = -block if row.drawn_bound else block  # the whole target first
    cache = CACHES.index(row.run.cache) if row.run.cache in CACHES else len(CACHES)
    return ([*registry.ESTIMATORS].index(row.estimator), block, *sort_key(row.rule), cache, row.variant)
