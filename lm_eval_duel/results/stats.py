"""Perplexities with their errors, the error of gap closed, and bootstrap draws over documents that all rows share."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from lm_eval_duel.core.scores import perplexity
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.registry import Kind, find, is_bound, kind_of
from lm_eval_duel.results.table import number, span

DRAWS, SEED = 10_000, 0
CLEAR = 2.0  # standard errors beyond which two values are distinguishable
LEVEL = (2.5, 97.5)  # percentiles of a 95 % interval
MAX_UNDEFINED = 0.025  # share of draws without a positive gap above which there is no interval


def value(metric: str, nats: float | np.ndarray, units: float | np.ndarray) -> float | np.ndarray:
    """A metric of a log-likelihood in nats: exp(-nats / units); for bits_per_byte -nats / units / ln 2."""
    rate = -np.asarray(nats, dtype=np.float64) / units
    with np.errstate(over="ignore"):
        result = rate / math.log(2) if metric == "bits_per_byte" else np.exp(rate)
    return result if result.ndim else float(result)


def rate(metric: str, known: float) -> float:
    """The nats per unit behind a metric's value: the inverse of `value`."""
    if metric == "bits_per_byte":
        return known * math.log(2)
    return math.log(known) if known > 0 else -math.inf


def stderr(metric: str, known: float, nats: float | None, error: float | None) -> float | None:
    """Standard error of a metric's value from its log-likelihood's (delta method); None if not finite."""
    if not nats or error is None or not all(map(math.isfinite, (known, nats, error))):
        return None
    relative = abs(error / nats)  # the rate is proportional to the nats
    return known * relative * (1.0 if metric == "bits_per_byte" else abs(math.log(known)))


def is_distinguishable(here: float, there: float, error: float | None) -> bool:
    """True if two values differ by more than two standard errors of their difference (always, without an error)."""
    return error is None or abs(here - there) > CLEAR * error


def stats_interval(values: np.ndarray) -> list[float]:
    """The 95 % percentile interval of draws. A draw of empty documents only has no rate and is left out."""
    low, high = np.percentile(values[np.isfinite(values)], LEVEL)
    return [float(low), float(high)]


# ---------------------------------------------------------------- gap closed


def gap_closed_stderr(
    elbo: float, duel: float, ar: float, elbo_error: float | None, duel_error: float | None
) -> float | None:
    """Standard error of (ELBO - DUEL) / (ELBO - AR) in percentage points, from the ELBO's and DUEL's.

    The two are drawn independently (delta method). None if one of them is not known.
    """
    if elbo_error is None or duel_error is None:
        return None
    return 100 * math.hypot((duel - ar) / (elbo - ar) ** 2 * elbo_error, duel_error / (elbo - ar))


def gap_interval(elbo: np.ndarray, duel: np.ndarray, ar: np.ndarray) -> tuple[list[float] | None, str]:
    """The interval of gap closed from paired draws, and a remark if the ELBO's gap is not positive in some of them."""
    gap, count = elbo - ar, len(elbo)
    undefined = int((~(gap > 0)).sum())
    if undefined > MAX_UNDEFINED * count:
        return None, f"no interval: {undefined:,} of {count:,} draws have no positive ELBO gap"
    remark = f"{undefined:,} of {count:,} draws without a positive ELBO gap are left out" if undefined else ""
    return stats_interval(100 * (elbo - duel)[gap > 0] / gap[gap > 0]), remark


# ---------------------------------------------------------------- the bootstrap


def resample(columns: np.ndarray, seed: int = SEED) -> np.ndarray:
    """Sums of each column over documents drawn with replacement: (documents, K) -> (draws, K).

    All columns use the same documents in a draw, so their ratios and differences are paired.
    """
    size, random = len(columns), np.random.default_rng(seed)
    return np.array([np.bincount(random.integers(size, size=size), minlength=size) @ columns for _ in range(DRAWS)])


def stats_rates(table: np.ndarray) -> np.ndarray:
    """Bootstrap draws of nats per unit: (documents, K, 2) nats and units -> (K, draws)."""
    documents, count, _ = table.shape
    sums = resample(table.reshape(documents, -1)).reshape(-1, count, 2)
    with np.errstate(divide="ignore", invalid="ignore"):
        return -(sums[..., 0] / sums[..., 1]).T


def with_errors(draws: Sequence[np.ndarray], errors: Sequence[float | None]) -> list[np.ndarray]:
    """The draws of rates that are compared, each with its Monte Carlo error in nats per unit.

    Resampled documents carry their Monte Carlo errors along, so the spread over documents already includes them, unless
    there are few documents. Only the part that is missing in the difference to the nearest of the others is added. So
    the interval of a difference depends on what is compared alone, not on other rows of its table.
    """
    result = []
    for k, (drawn, error) in enumerate(zip(draws, errors, strict=True)):
        if error and math.isfinite(error):
            others = [drawn - other for n, other in enumerate(draws) if n != k] or [drawn]
            present = min(float(np.var(other[np.isfinite(other)])) for other in others)
            missing = math.sqrt(max(0.0, error**2 - present))
            drawn = drawn + missing * np.random.default_rng([SEED, k]).standard_normal(len(drawn))
        result.append(drawn)
    return result


# ---------------------------------------------------------------- paired
# Two scores of the same texts: the paired difference with its interval, and a verdict. In Python: `compare(a, b)`.
#
#     difference = rate(first) - rate(second),   rate = -log p / units over all texts
#
# Below 0 the first is better. The interval is from a bootstrap over texts that both share.


UNITS = ("token", "word", "byte")
UNCLEAR = "not distinguishable"  # the interval holds 0
FEW = 10  # distinct texts below which a bootstrap interval is too narrow for a verdict
EQUAL = 1e-6  # nats per unit that are float noise


class Side(NamedTuple):
    """One of two scores of the same texts."""

    name: str
    kind: str  # of the value, as `registry.kind_of` names it
    rate: float  # nats per unit
    stderr: float | None  # of the rate, Monte Carlo
    unknown: str  # why a value that is drawn has no `stderr`
    draws: np.ndarray | None = None  # of the rate, by the bootstrap

    @property
    def doubt(self) -> str:
        """The reason that this value allows no verdict; empty if it does."""
        if self.kind == Kind.NO_BOUND.value:
            return f"{self.name} is neither a likelihood nor a bound"
        return f"{self.name} is not a likelihood" if self.kind == Kind.NOT_A_LIKELIHOOD.value else self.unknown


@dataclasses.dataclass(frozen=True)
class PairedDifference:
    """The difference of two models, first minus second, in nats per unit: below 0 the first is better."""

    names: tuple[str, str] = ("", "")
    unit: str = ""  # token, word or byte
    documents: int = 0
    perplexities: tuple[float, ...] = ()  # per unit
    stderrs: tuple[float | None, ...] = ()  # Monte Carlo, of the perplexities; None: nothing is drawn, or not known
    kinds: tuple[str, ...] = ()  # what the values are, such as "a likelihood"
    difference: float | None = None  # None if a perplexity is infinite
    interval: tuple[float, float] | None = None  # 95 %, bootstrap over texts; None for fewer than two
    verdict: str = ""

    def __str__(self) -> str:
        values = []
        for name, kind, value, error in zip(self.names, self.kinds, self.perplexities, self.stderrs, strict=True):
            values.append(f"{name} {number(value, error=error, bound=is_bound(kind))}")
        text = f"perplexity per {self.unit}: {' and '.join(values)}"
        if self.difference is not None:
            text += f"; difference {number(self.difference, '+.4f')} nats per {self.unit}"
        if self.interval is not None:
            text += f" (95 % interval {span(self.interval, '+.4f')}, {self.documents} documents)"
        return f"{text}: {self.verdict}" if self.verdict else text


def difference(first: Side, second: Side, unit: str, keys: Sequence[str]) -> PairedDifference:
    """The difference of two scores of texts, with a verdict if both have draws. `keys`: equal for equal texts."""
    both, value, interval, verdict = (first, second), None, None, ""
    if math.isfinite(first.rate) and math.isfinite(second.rate):
        value = first.rate - second.rate
        if first.draws is not None and second.draws is not None:
            draws = with_errors([first.draws, second.draws], [first.stderr, second.stderr])
            low, high = stats_interval(draws[0] - draws[1])
            interval, verdict = (low, high), _verdict(first, second, low, high, len(set(keys)))
    perplexities = tuple(perplexity(side.rate) for side in both)
    stderrs = tuple(
        None if side.stderr is None or not math.isfinite(known) else known * side.stderr
        for side, known in zip(both, perplexities, strict=True)
    )
    names, kinds = (first.name, second.name), (first.kind, second.kind)
    return PairedDifference(names, unit, len(keys), perplexities, stderrs, kinds, value, interval, verdict)


def _verdict(first: Side, second: Side, low: float, high: float, texts: int) -> str:
    """The better of two by the interval of their difference. Copies of a text say nothing about other `texts`."""
    better, worse = (first, second) if high < 0 else (second, first)
    if doubt := first.doubt or second.doubt:
        return f"no verdict: {doubt}"
    if max(abs(low), abs(high)) < EQUAL:
        return "equal"
    if texts < FEW:
        return f"no verdict from {texts} distinct documents"
    if low <= 0 <= high:
        return UNCLEAR
    if is_bound(worse.kind):  # its value may be lower than the bound
        return f"no verdict: {worse.name} is an upper bound"
    return f"{better.name} is better"


# ---------------------------------------------------------------- scores of the library


class Texts(NamedTuple):
    """The scores of some texts under one model."""

    keys: list[str]  # equal for equal texts
    log_probs: list[float]  # nats
    counts: dict[str, list[int]]  # by unit
    side: Side  # its rate and error are of the sum, in nats; equal texts share one error


def compare(
    a: Sequence[Any], b: Sequence[Any], names: tuple[str, str] = ("first", "second"), unit: str | None = None
) -> PairedDifference:
    """Compare two models on the same texts: difference = rate(a) - rate(b), with rate = -log p / units over all texts.

    Args:
        a, b: Scores of the same texts in the same order, from `Duel.score`, or estimates, from `Duel.estimate`.
        names: The names of the two models, for printing.
        unit: "token", "word" or "byte". None: "token" if both count the same tokens of every text, else "byte".

    Returns:
        The difference in nats per unit, its 95 % interval (bootstrap over texts, including the Monte Carlo error of
        estimates and bounds), and a verdict.

    Raises:
        DuelError: If the texts differ, there are none, or the unit is unknown.
    """
    if not all(isinstance(scores, Sequence) and not isinstance(scores, str) for scores in (a, b)) or len(names) != 2:
        raise DuelError("compare() takes two lists of scores, as Duel.score returns, and two names.")
    wanted = "compare() takes two lists of scores of the same texts in the same order, but"
    if len(a) != len(b) or not a:
        raise DuelError(f"{wanted} there are {len(a)} and {len(b)} texts.")
    both = first, second = _texts(a, names[0]), _texts(b, names[1])
    if first.keys != second.keys:
        same = [x == y for x, y in zip(first.keys, second.keys, strict=True)]
        raise DuelError(f"{wanted} text {same.index(False)} differs.")
    if unit not in (None, *UNITS):
        raise DuelError(f"'unit' is one of {', '.join(UNITS)}; got {unit}.")
    same = first.counts["token"] == second.counts["token"]
    unit = unit or ("token" if same else "byte")
    if unit == "token" and not same:
        raise DuelError("The two lists count other tokens, so they cannot be compared per token; use unit='byte'.")
    order = sorted(range(len(a)), key=first.keys.__getitem__)  # as in a report, so that the intervals are its
    table = np.array([[(texts.log_probs[n], texts.counts[unit][n]) for texts in both] for n in order], dtype=float)
    units = table[:, :, 1].sum(0)  # (2,)
    if not units.all():
        raise DuelError(f"The texts have no {unit}s, so there is no rate to compare.")
    rates = -table[:, :, 0].sum(0) / units
    draws: Any = (None, None)
    if len(a) > 1 and np.isfinite(rates).all():
        draws = stats_rates(table)
    sides = []
    for texts, rate, count, drawn in zip(both, rates, units, draws, strict=True):
        error = texts.side.stderr
        sides.append(texts.side._replace(rate=float(rate), stderr=error and error / float(count), draws=drawn))
    return difference(*sides, unit, first.keys)


def _texts(scores: Sequence[Any], name: str) -> Texts:
    """The scores of `Duel.score`, or the estimates of `Duel.estimate`, as they are compared."""
    from lm_eval_duel.estimators.totals import Total

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
    total, spec = Total.from_parts(score.sums for score in scores), scores[0].spec
    estimator, stderr = str(spec["estimator"]), total.stderr
    drawn = find(estimator).drawn
    unknown = "" if drawn is None or stderr is not None else drawn.unknown(spec)
    kind, log_probs = kind_of(estimator, spec), [score.log_prob for score in scores]
    counts = {
        "token": [score.tokens if isinstance(score.tokens, int) else len(score.tokens) for score in scores],
        "word": [score.units.words for score in scores],
        "byte": [score.units.bytes for score in scores],
    }
    sums = [(f"text {n}", *value) for n, value in enumerate(zip(log_probs, counts["token"], strict=True))]
    if kind == Kind.ESTIMATE.value:  # of which a single one may be above 0
        sums = [("the sum", math.fsum(log_probs), sum(counts["token"]))]
    for what, nats, tokens in sums:
        if not nats <= EQUAL * max(1, tokens):
            raise DuelError(
                f"The log-probability of {what} of {name} is {nats:g}, and a probability is at most 1. Score the texts "
                "again."
            )
    side = Side(name, kind, -math.fsum(log_probs), stderr, unknown)
    return Texts([key_of(_identity(score)) for score in scores], log_probs, counts, side)


def _identity(score: Any) -> str:
    """A text with its context and suffix, if it has any: the same text in another context is another one."""
    context, suffix = getattr(score, "context", ""), getattr(score, "suffix", "")
    return repr((score.text, context, suffix)) if context or suffix else score.text


def key_of(text: str) -> str:
    """A digest of a text, to know it again."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
