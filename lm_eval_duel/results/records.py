"""What a comparison of results consists of. Every view shows these records, and computes nothing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from lm_eval_duel.estimators import registry
from lm_eval_duel.estimators.registry import Kind
from lm_eval_duel.estimators.subsets.sums import BeamSums
from lm_eval_duel.results import stats
from lm_eval_duel.results.read import Run
from lm_eval_duel.rules.tables import without_defaults

SEES_TRUTH = Kind.NOT_A_LIKELIHOOD.value
UNCLEAR = "not distinguishable"  # within two standard errors
Interval = list[float]  # low, high; a list, as in JSON
Values = Mapping[str, tuple[float, float]]  # document -> (nats, units)


@dataclasses.dataclass(frozen=True)
class GapClosed:
    """The share of the ELBO's gap that a DUEL row closes, in per cent. `reason`: why it, or its error, is not known.

    `share` is also that of a row that is not distinguishable from its ELBO; `value` is not.
    """

    reason: str = ""
    share: float | None = None
    error: float | None = None
    distinguishable: bool | None = None
    interval: Interval | None = None

    @property
    def value(self) -> float | None:
        return self.share if self.distinguishable else None

    @property
    def stderr(self) -> float | None:
        return self.error if self.distinguishable else None


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    """A result of a task: one model under one estimator, rule, block and cache.

    `documents`: metric -> document -> (nats, units); if empty, `missing` says why. `compare` adds what follows
    `number`.
    """

    run: Run
    task: str
    estimator: str
    rule: str | None
    metrics: dict[str, float]
    log_prob: float | None = None
    nats_stderr: float | None = None  # Monte Carlo
    nats_window_stderr: float | None = None  # over windows
    nfe: int | None = None
    tokens: int | None = None
    beam: BeamSums | None = None  # of a sum over orders by a beam
    documents: Mapping[str, Values] = dataclasses.field(default_factory=dict)
    missing: str = ""
    remarks: tuple[str, ...] = ()

    number: int = 0  # in its table
    metric: str = ""
    variant: str = ""  # what distinguishes it from a row of the same model, rule and block
    ar: bool = False  # the autoregressive baseline
    best: bool = False  # the lowest likelihood of its model
    draws: np.ndarray | None = dataclasses.field(default=None, repr=False)  # of its nats per unit, by the bootstrap
    baseline: Row | None = None  # the row of the autoregressive model; None for itself
    elbo: Row | None = None
    closed: GapClosed = GapClosed()
    cache_cost: Pair | None = None

    JSON: ClassVar = (
        *("model", "name", "estimator", "rule", "block", "cache=run.cache", "qualifiers", "unknown", "eps"),
        *("likelihood", "bound", "value", "interval", "stderr", "stderrs", "stderr_bound", "stderr_reason"),
        *("window_stderr", "reason", "metrics", "tokens", "nfe", "nfe_per_token", "dtype=run.dtype"),
        *("fingerprint=run.fingerprint", "file=run.name", "ar", "best", "gap", "gap_interval", "elbo=elbo.number"),
        *("gap_closed=closed.value", "gap_closed_stderr=closed.stderr", "gap_closed_interval=closed.interval"),
        *("distinguishable=closed.distinguishable", "gap_closed_reason=closed.reason", "cache_cost"),
    )

    # ------------------------------------------------------------ what it is

    @property
    def entry(self) -> registry.Entry:
        return registry.of_spec(self.estimator, self.run.spec, self.beam)

    @property
    def block(self) -> str | None:
        """None for autoregressive and other models, `none` for the whole target."""
        return self.run.spec.get("elbo_block", "none") if self.estimator == "elbo" else self.run.block

    @property
    def eps(self) -> float:
        """The least t of a Monte Carlo ELBO; above 0 it is not a bound."""
        eps = self.run.spec.get("elbo_eps", "none")
        return float(eps) if self.estimator == "elbo" and eps != "none" else 0.0

    @property
    def likelihood(self) -> bool:
        """Whether it is a likelihood, or an estimate or bound of one: not the oracle."""
        return self.entry.kind is not Kind.NOT_A_LIKELIHOOD

    @property
    def bound(self) -> bool:
        """Whether the perplexity is an upper bound."""
        return self.entry.kind is Kind.UPPER_BOUND and not self.eps

    @property
    def proper(self) -> bool:
        """Whether it is the likelihood itself: no estimate, bound or oracle."""
        return self.entry.kind is Kind.LIKELIHOOD

    @property
    def duel(self) -> bool:
        """Whether its value is that of a rule, or an estimate of it, and not the baseline's."""
        return self.entry.follows_rule and not self.ar

    # ------------------------------------------------------------ names

    @property
    def model(self) -> str:
        return self.run.label

    @property
    def qualifiers(self) -> str:
        """What distinguishes it beyond estimator, rule, block and cache."""
        spec = self.run.spec
        named = [self.entry.named.format(f"{key}={spec[key]}") for key in self.entry.arguments if key in spec]
        eps = f"eps={self.eps:g}: no bound" if self.eps else ""
        return ", ".join(filter(None, [eps, *named, self.beam.remark if self.beam else "", self.variant]))

    @property
    def setting(self) -> list[str]:
        """Descriptions of the block and the cache, if any."""
        block = block_name(self.block) if self.block in (None, "none") else f"block {self.block}"
        return [block, f"cache={self.run.cache}" if self.run.has_cache else ""]

    @property
    def name(self) -> str:
        """Its name without the model."""
        return ", ".join(
            filter(None, [self.entry.title, without_defaults(self.rule or ""), *self.setting, self.qualifiers])
        )

    @property
    def title(self) -> str:
        """The estimator with remarks: the baseline, a bound that does not hold, another spec, unknown tokens."""
        remarks = ", ".join(filter(None, [self.baseline_remark, self.qualifiers, self.unknown_share]))
        return f"{self.entry.title}{f' ({remarks})' if remarks else ''}"

    @property
    def baseline_remark(self) -> str:
        return ("baseline" if self.estimator == "ar" else "AR baseline") if self.ar else ""

    @property
    def unknown(self) -> float:
        """The share of [UNK] among its tokens."""
        return self.run.unknown(self.task)

    @property
    def unknown_share(self) -> str:
        return f"{self.unknown:.1%} [UNK]" if self.unknown else ""

    # ------------------------------------------------------------ values and their errors

    @property
    def value(self) -> float:
        return self.metrics[self.metric]

    @property
    def drawn(self) -> np.ndarray:
        """The value in each draw of the bootstrap."""
        return stats.value(self.metric, -self.draws, 1.0)

    @property
    def interval(self) -> Interval | None:
        """95 %, over documents."""
        return None if self.draws is None else stats.interval(self.drawn)

    @property
    def gap(self) -> float | None:
        """The difference from the baseline's value."""
        return None if self.baseline is None else self.value - self.baseline.value

    @property
    def gap_interval(self) -> Interval | None:
        if self.baseline is None or self.draws is None or self.baseline.draws is None:
            return None
        return stats.interval(self.drawn - self.baseline.drawn)

    @property
    def reason(self) -> str:
        """Why there is no interval."""
        if self.draws is not None:
            return ""
        return self.missing or ("one document" if self.documents.get(self.metric) else "no values per document")

    @property
    def nfe_per_token(self) -> float | None:
        return self.nfe / self.tokens if self.nfe and self.tokens else None

    def error(self, metric: str, nats_stderr: float | None) -> float | None:
        """Standard error of a metric's value from that of its log-likelihood; None if not known."""
        if nats_stderr is None or self.log_prob is None or metric not in self.metrics:
            return None
        return stats.stderr(metric, self.metrics[metric], self.log_prob, nats_stderr)

    @property
    def stderr(self) -> float | None:
        """Monte Carlo, or of a sample."""
        return self.error(self.metric, self.nats_stderr)

    @property
    def stderrs(self) -> dict[str, float | None]:
        return {metric: self.error(metric, self.nats_stderr) for metric in self.metrics}

    @property
    def window_stderr(self) -> float | None:
        """Over windows, if there is no interval."""
        return self.error(self.metric, self.nats_window_stderr) if self.draws is None else None

    @property
    def stderr_bound(self) -> float | None:
        """An upper bound of the error of a value that is drawn, such as a Monte Carlo ELBO; None for other values.

        If the error itself is not known, the error over windows bounds it, since their spread contains that of the
        draws. Infinite if neither is known.
        """
        if self.entry.drawn is None:
            return None
        known = [self.stderr, self.error(self.metric, self.nats_window_stderr), math.inf]
        return next(error for error in known if error is not None)

    @property
    def stderr_reason(self) -> str:
        """Why a value that is drawn has no error; empty if it has one, and for other rows."""
        drawn = self.entry.drawn
        return "" if drawn is None or self.stderr is not None else drawn.unknown(self.run.spec)


@dataclasses.dataclass(frozen=True)
class Pair:
    """The paired difference of two rows in nats per unit, first minus second: below 0 the first is better.

    `second` is None, with the `reason`, if there is no row to compare with.
    """

    first: Row
    second: Row | None
    names: list[str] = dataclasses.field(default_factory=list)
    difference: float | None = None
    interval: Interval | None = None
    reason: str = ""
    verdict: str = ""

    JSON: ClassVar = (
        *("first=first.number", "second=second.number", "names", "difference", "interval", "reason", "verdict"),
    )


@dataclasses.dataclass(frozen=True)
class Speeds:
    """The rules of one model, block and cache against NFE. `families`: each rule at several speeds, the fastest
    first."""

    title: str
    elbo: Row | None
    ar: Row | None
    oracle: Row | None
    families: dict[str, list[Row]]

    JSON: ClassVar = ("title", "elbo=elbo.number", "ar=ar.number", "oracle=oracle.number", "families=numbers")

    @property
    def rows(self) -> list[Row]:
        return [row for points in self.families.values() for row in points]

    @property
    def numbers(self) -> dict[str, list[int]]:
        return {name: [row.number for row in points] for name, points in self.families.items()}


@dataclasses.dataclass(frozen=True)
class TaskComparison:
    """The results of one task side by side. `documents`: their number; `elbo`: which ELBOs gap closed uses."""

    metric: str
    documents: int | None
    rows: list[Row]
    rules: list[Speeds]
    pairs: list[Pair]
    elbo: list[str]
    differences: list[str]
    as_published: bool
    notes: list[str]
    headlines: list[str]


@dataclasses.dataclass(frozen=True)
class Average:
    """Gap closed of a DUEL row on each task, and its average over `averaged` tasks."""

    model: str
    name: str
    tasks: dict[str, float | None]
    stderrs: dict[str, float | None]
    unclear: list[str]
    average: float | None
    average_stderr: float | None
    average_unclear: bool
    averaged: int


def block_name(block: str | None) -> str:
    return "whole target" if block == "none" else block or ""


def plain(value: Any) -> Any:
    """Records as what JSON has: their fields, or the entries that `JSON` lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return entries(value, getattr(value, "JSON", None) or [field.name for field in dataclasses.fields(value)])
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, list | tuple) else value


def entries(record: Any, names: Iterable[str]) -> dict[str, Any]:
    """Entries of a record, as `name` or `name=attributes`: None if one of the attributes on the way is None."""
    result = {}
    for name, _, path in (name.partition("=") for name in names):
        value = record
        for attribute in (path or name).split("."):
            value = None if value is None else getattr(value, attribute)
        result[name] = plain(value)
    return result
