"""Two scores of the same texts: the paired difference with its interval, and a verdict. In Python: `compare(a, b)`."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lm_eval_duel.core.rates import perplexity
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.registry import NO_BOUND, Kind, kind_of, of_spec
from lm_eval_duel.results import pairs, stats
from lm_eval_duel.results.table import number, pm

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


class Texts(NamedTuple):
    """The scores of some texts under one model. `stderr`: of their sum, nats; equal texts share one error."""

    scores: Sequence[Scored]
    kind: str  # of the values, as `registry.kind_of` says
    stderr: float | None = None  # Monte Carlo
    unknown: str = ""  # why values that are drawn have no `stderr`

    def doubt(self, name: str) -> str:
        """Why these values allow no verdict; empty if they do."""
        if self.kind == NO_BOUND:
            return f"{name} is neither a likelihood nor a bound"
        return f"{name} is not a likelihood" if self.kind == Kind.NOT_A_LIKELIHOOD.value else self.unknown

    def check(self, name: str) -> None:
        """Raise DuelError for a log-probability above 0: of the sum, if the values are estimates."""
        values = [(f"text {n}", score.log_prob, score.tokens) for n, score in enumerate(self.scores)]
        if self.kind == Kind.ESTIMATE.value:
            values = [("the sum", math.fsum(nats for _, nats, _ in values), sum(tokens for *_, tokens in values))]
        for what, nats, tokens in values:
            if not nats <= pairs.EQUAL * max(1, tokens):
                raise DuelError(
                    f"The log-probability of {what} of {name} is {nats:g}, and a probability is at most 1. Score the "
                    "texts again."
                )


@dataclasses.dataclass(frozen=True)
class PairedDifference:
    """First minus second in nats per unit: below 0 the first is better."""

    names: tuple[str, str]
    unit: str  # token, word or byte
    documents: int
    perplexities: tuple[float, float]  # per unit
    stderrs: tuple[float | None, float | None]  # Monte Carlo, of the perplexities; None: nothing is drawn, or not known
    kinds: tuple[str, str]  # what the values are, such as "a likelihood"
    difference: float | None  # None if a perplexity is infinite
    interval: tuple[float, float] | None  # 95 %, bootstrap over texts; None for fewer than two
    verdict: str

    def __str__(self) -> str:
        values = []
        for name, kind, value, error in zip(self.names, self.kinds, self.perplexities, self.stderrs, strict=True):
            below = "≤ " if kind == Kind.UPPER_BOUND.value else ""
            values.append(f"{name} {below}{number(value)}{pm(error)}")
        text = f"perplexity per {self.unit}: {' and '.join(values)}"
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
    if not all(isinstance(scores, Sequence) and not isinstance(scores, str) for scores in (a, b)) or len(names) != 2:
        raise DuelError("compare() takes two lists of scores, as Duel.score returns, and two names.")
    return difference(_texts(a, names[0]), _texts(b, names[1]), names, unit)


def _texts(scores: Sequence[Any], name: str) -> Texts:
    """The scores of `Duel.score`, or the estimates of `Duel.estimate`, as they are compared."""
    from lm_eval_duel.estimators.totals import Total  # imports torch, as the scores did

    for n, score in enumerate(scores):
        if not isinstance(getattr(score, "sums", None), Total):
            got = type(score).__name__
            raise DuelError(
                f"compare() takes scores, as Duel.score returns; number {n} of {name} is of the class {got}."
            )
        if score.text is None:
            raise DuelError(f"compare() takes one score for each text; number {n} of {name} is a total of several.")
        if score.spec != scores[0].spec:
            raise DuelError(f"compare() takes the scores of one model in a list; {name} has 0 and {n} of several.")
    if not scores:
        return Texts([], Kind.LIKELIHOOD.value)
    total, spec = Total.from_parts(score.sums for score in scores), scores[0].spec
    estimator, texts = str(spec["estimator"]), list(map(_scored, scores))
    kind = kind_of(estimator, spec, total.beam)
    return Texts(texts, kind, total.stderr, unknown_error(estimator, spec, total.stderr))


def unknown_error(estimator: str, spec: Mapping[str, Any], stderr: float | None) -> str:
    """Why a value of this spec has no standard error; empty if it has one, or if nothing is drawn."""
    drawn = of_spec(estimator, spec).drawn
    return "" if drawn is None or stderr is not None else drawn.unknown(spec)


def _scored(score: Any) -> Scored:
    tokens = score.tokens if isinstance(score.tokens, int) else len(score.tokens)
    text = score.text
    return Scored(key_of(text), score.log_prob, tokens, len(text.split()), len(text.encode()), score.stderr)


def key_of(text: str) -> str:
    """A digest of a text, to know it again."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def difference(first: Texts, second: Texts, names: tuple[str, str], unit: str | None = None) -> PairedDifference:
    """As `compare`, of texts known by their keys."""
    both = first.scores, second.scores
    keys, other_keys = ([score.key for score in scores] for scores in both)
    if keys != other_keys or not keys:
        apart = next((n for n, (a, b) in enumerate(zip(keys, other_keys, strict=False)) if a != b), 0)
        counts = f"there are {len(keys)} and {len(other_keys)} texts"
        what = f"text {apart} differs" if len(keys) == len(other_keys) and keys else counts
        raise DuelError(f"compare() takes two lists of scores of the same texts in the same order, but {what}.")
    if unit not in (None, *UNITS):
        raise DuelError(f"'unit' is one of {', '.join(UNITS)}; got {unit}.")
    first.check(names[0])
    second.check(names[1])
    same = all(a.tokens == b.tokens for a, b in zip(*both, strict=True))
    unit = unit or ("token" if same else "byte")
    if unit == "token" and not same:
        raise DuelError("The two lists count other tokens, so they cannot be compared per token; use unit='byte'.")
    order = sorted(range(len(keys)), key=keys.__getitem__)  # as in a report, so that the intervals are its
    columns = [[[scores[n].log_prob, getattr(scores[n], f"{unit}s")] for n in order] for scores in both]
    table = np.array(columns, dtype=np.float64).transpose(1, 0, 2)  # (texts, 2, 2)
    units = table[:, :, 1].sum(0)
    if not units.all():
        raise DuelError(f"The texts have no {unit}s, so there is no rate to compare.")
    rates = [float(rate) for rate in -table[:, :, 0].sum(0) / units]
    draws: Any = (None, None)
    if len(keys) > 1 and all(map(math.isfinite, rates)):
        draws = stats.rates(table, [first.stderr, second.stderr]).T
    sides = [
        pairs.Side(name, rate, drawn, texts.kind == Kind.UPPER_BOUND.value, texts.doubt(name))
        for name, rate, drawn, texts in zip(names, rates, draws, (first, second), strict=True)
    ]
    value, interval, verdict = pairs.difference(*sides, len(keys))
    perplexities = perplexity(rates[0]), perplexity(rates[1])
    one, other = (
        None if texts.stderr is None or not math.isfinite(known) else known * texts.stderr / float(count)
        for known, texts, count in zip(perplexities, (first, second), units, strict=True)
    )
    ends = None if interval is None else (interval[0], interval[1])
    kinds = first.kind, second.kind
    return PairedDifference(names, unit, len(keys), perplexities, (one, other), kinds, value, ends, verdict)
