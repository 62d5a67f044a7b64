"""Two scores of the same texts: the paired difference with its interval, and a verdict. In Python: `compare(a, b)`."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.registry import NO_BOUND, Kind
from lm_eval_duel.rates import perplexity
from lm_eval_duel.results import pairs, stats
from lm_eval_duel.results.table import number

UNITS = ("token", "word", "byte")


@dataclasses.dataclass(frozen=True)
class Scored:
    """A text as it was scored. `key`: equal for equal texts."""

    key: str
    log_prob: float  # nats
    tokens: int
    words: int
    bytes: int
    stderr: float | None = None  # Monte Carlo, nats


@dataclasses.dataclass(frozen=True)
class PairedDifference:
    """First minus second in nats per unit: below 0 the first is better."""

    names: tuple[str, str]
    unit: str  # token, word or byte
    documents: int
    perplexities: tuple[float, float]  # per unit
    difference: float | None  # None if a perplexity is infinite
    interval: tuple[float, float] | None  # 95 %, bootstrap over texts; None for fewer than two
    verdict: str

    def __str__(self) -> str:
        values = " and ".join(f"{name} {number(p)}" for name, p in zip(self.names, self.perplexities, strict=True))
        text = f"perplexity per {self.unit}: {values}"
        if self.difference is not None:
            text += f"; difference {number(self.difference, '+.4f')} nats per {self.unit}"
        if self.interval is not None:
            low, high = (number(end, "+.4f") for end in self.interval)
            text += f" (95 % interval {low} to {high}, {self.documents} documents)"
        return f"{text}: {self.verdict}" if self.verdict else text


def compare(
    a: Sequence[Any], b: Sequence[Any], names: tuple[str, str] = ("first", "second"), unit: str | None = None
) -> PairedDifference:
    """Two lists of scores of the same texts, in the same order, as `Duel.score` returns. `unit`: token, word or byte.

    The default is `token` if both count the same tokens of every text, else `byte`. The interval includes the Monte
    Carlo error of estimates and bounds. Raises DuelError for other texts, an unknown unit, and no text at all.
    """
    if not all(isinstance(scores, Sequence) for scores in (a, b)) or len(names) != 2:
        raise DuelError("compare() takes two lists of scores, as Duel.score returns, and two names.")
    first, second = (scores[0].kind if scores else Kind.LIKELIHOOD.value for scores in (a, b))
    return difference(list(map(_scored, a)), list(map(_scored, b)), names, (first, second), unit)


def _scored(score: Any) -> Scored:
    tokens = score.tokens if isinstance(score.tokens, int) else len(score.tokens)
    text = score.text
    return Scored(key_of(text), score.log_prob, tokens, len(text.split()), len(text.encode()), score.stderr)


def key_of(text: str) -> str:
    """A digest of a text, to know it again."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def difference(
    first: Sequence[Scored],
    second: Sequence[Scored],
    names: tuple[str, str],
    kinds: tuple[str, str],
    unit: str | None = None,
) -> PairedDifference:
    """As `compare`, of texts known by their keys. `kinds`: what the values are, as `registry.kind_of` says."""
    both = first, second
    keys, other_keys = ([score.key for score in scores] for scores in both)
    if keys != other_keys or not first:
        apart = next((n for n, (a, b) in enumerate(zip(keys, other_keys, strict=False)) if a != b), 0)
        counts = f"there are {len(first)} and {len(second)} texts"
        what = f"text {apart} differs" if len(first) == len(second) and first else counts
        raise DuelError(f"compare() takes two lists of scores of the same texts in the same order, but {what}.")
    if unit not in (None, *UNITS):
        raise DuelError(f"'unit' is one of {', '.join(UNITS)}; got {unit}.")
    same = all(a.tokens == b.tokens for a, b in zip(*both, strict=True))
    unit = unit or ("token" if same else "byte")
    if unit == "token" and not same:
        raise DuelError("The two lists count other tokens, so they cannot be compared per token; use unit='byte'.")
    order = sorted(range(len(first)), key=keys.__getitem__)  # as in a report, so that the intervals are its
    columns = [[[scores[n].log_prob, getattr(scores[n], f"{unit}s")] for n in order] for scores in both]
    table = np.array(columns, dtype=np.float64).transpose(1, 0, 2)  # (texts, 2, 2)
    units = table[:, :, 1].sum(0)
    if not units.all():
        raise DuelError(f"The texts have no {unit}s, so there is no rate to compare.")
    rates = [float(rate) for rate in -table[:, :, 0].sum(0) / units]
    draws: Any = (None, None)
    if len(first) > 1 and all(map(math.isfinite, rates)):
        draws = stats.rates(table, [math.hypot(*(score.stderr or 0.0 for score in scores)) for scores in both]).T
    sides = [
        pairs.Side(name, rate, drawn, kind == Kind.UPPER_BOUND.value, _doubt(name, kind, scores))
        for name, rate, drawn, kind, scores in zip(names, rates, draws, kinds, both, strict=True)
    ]
    value, interval, verdict = pairs.difference(*sides, len(first))
    perplexities = perplexity(rates[0]), perplexity(rates[1])
    ends = None if interval is None else (interval[0], interval[1])
    return PairedDifference(names, unit, len(first), perplexities, value, ends, verdict)


def _doubt(name: str, kind: str, scores: Sequence[Scored]) -> str:
    """Why a value allows no verdict; empty if it does."""
    if kind == NO_BOUND:
        return f"{name} is neither a likelihood nor a bound"
    if kind == Kind.NOT_A_LIKELIHOOD.value:
        return f"{name} is not a likelihood"
    unknown = kind == Kind.ESTIMATE.value and any(score.stderr is None for score in scores)
    return f"the error of {name} is not known" if unknown else ""
