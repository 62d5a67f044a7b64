"""What a comparison of results consists of. Every view shows these records, and computes nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

from lm_eval_duel.estimators import registry
from lm_eval_duel.estimators.registry import Kind

NO_CACHE = "none"
WHOLE = "whole target"  # block=none
UNCLEAR = "not distinguishable"  # within two standard errors
Interval = list[float]  # low, high; a list, as in JSON


@dataclasses.dataclass(frozen=True)
class Pair:
    """The paired difference of two rows in nats per unit, first minus second: below 0 the first is better.

    `second` is None, with the `reason`, if there is no row to compare with.
    """

    first: int
    second: int | None
    names: list[str]
    difference: float | None
    interval: Interval | None
    reason: str
    verdict: str


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A result beside the others of its task: one model under one estimator, rule, block and cache."""

    model: str
    name: str  # without the model
    estimator: str
    rule: str | None
    block: str | None
    cache: str | None
    qualifiers: str  # what distinguishes it beyond estimator, rule, block and cache
    unknown: float  # the share of [UNK] among its tokens
    eps: float  # of an ELBO; above 0 it is not a bound
    mc_samples: str | None
    likelihood: bool  # not the oracle
    bound: bool
    flag: str  # what it is, if it is not a likelihood
    value: float
    interval: Interval | None  # 95 %, over documents
    stderr: float | None  # Monte Carlo, or of a sample
    stderrs: dict[str, float | None]  # of each of `metrics`
    stderr_bound: float | None  # None for values without such an error; infinite if nothing is known
    stderr_reason: str  # why a value that is drawn has no error
    window_stderr: float | None  # over windows, if there is no interval
    reason: str  # why there is no interval
    metrics: dict[str, float]
    tokens: int | None
    nfe: int | None
    nfe_per_token: float | None
    dtype: str
    fingerprint: str | None
    file: str
    ar: bool = False  # the autoregressive baseline
    best: bool = False  # the lowest likelihood of its model
    gap: float | None = None  # to the baseline
    gap_interval: Interval | None = None
    elbo: int | None = None  # the number of its ELBO's row
    gap_closed: float | None = None
    gap_closed_stderr: float | None = None
    gap_closed_interval: Interval | None = None
    distinguishable: bool | None = None
    gap_closed_reason: str = ""
    cache_cost: Pair | None = None

    @property
    def entry(self) -> registry.Entry:
        return registry.find(self.estimator)

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

    @property
    def duel(self) -> bool:
        """Whether its value is that of a rule, or an estimate of it, and not the baseline's."""
        return self.entry.follows_rule and not self.ar

    @property
    def proper(self) -> bool:
        """Whether it is the likelihood itself: no estimate, bound or oracle."""
        return self.entry.kind is Kind.LIKELIHOOD

    @property
    def block_name(self) -> str:
        return WHOLE if self.block == "none" else self.block or ""

    @property
    def cached(self) -> bool:
        return self.cache not in (None, NO_CACHE)


@dataclasses.dataclass(frozen=True)
class Point:
    """A rule in a comparison of speeds. `index`: its row."""

    rule: str
    speed: float
    index: int


@dataclasses.dataclass(frozen=True)
class Family:
    """A rule at several speeds, the fastest first."""

    family: str
    adaptive: bool
    points: list[Point]


@dataclasses.dataclass(frozen=True)
class Speeds:
    """The rules of one model, block and cache against NFE. `elbo`, `ar` and `oracle` are numbers of rows."""

    model: str
    block: str
    cache: str | None
    variant: str
    title: str
    elbo: int | None
    ar: int | None
    oracle: int | None
    families: list[Family]


@dataclasses.dataclass(frozen=True)
class TaskComparison:
    """The results of one task side by side."""

    metric: str
    documents: int | None
    rows: list[Comparison]
    rules: list[Speeds]
    pairs: list[Pair]
    elbo: list[str]
    differences: list[str]
    as_published: bool
    notes: list[str]
    headlines: list[str] = dataclasses.field(default_factory=list)

    @property
    def baseline(self) -> Comparison | None:
        return next((row for row in self.rows if row.ar), None)


@dataclasses.dataclass(frozen=True)
class Average:
    """Gap closed of a DUEL row on each task, and its average."""

    model: str
    name: str
    tasks: dict[str, float | None]
    stderrs: dict[str, float | None]
    unclear: list[str]
    average: float | None
    average_stderr: float | None
    average_unclear: bool
    averaged: int


def plain(value: Any) -> Any:
    """Records as what JSON has."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, list | tuple) else value
