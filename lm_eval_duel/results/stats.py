"""Perplexities with their errors, the error of gap closed, and paired differences."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from lm_eval_duel.core.scores import Plain, Value, perplexity
from lm_eval_duel.errors import counted
from lm_eval_duel.results.bootstrap import percentile_interval, tail, with_errors
from lm_eval_duel.results.table import number, span

KEY = 16  # hexadecimal digits of a digest
CLEAR = 2.0  # standard errors beyond which two values are distinguishable
WHISKER = 1.96  # standard errors to either side of a 95 % interval


# ---------------------------------------------------------------- values and their errors


def value(metric: str, nats: float | np.ndarray, units: float | np.ndarray) -> float | np.ndarray:
    """A metric of a log-likelihood in nats: exp(-nats / units); for bits_per_byte -nats / units / ln 2."""
    rate = -np.asarray(nats, dtype=np.float64) / units
    with np.errstate(over="ignore"):
        result = rate / math.log(2) if metric == "bits_per_byte" else np.exp(rate)
    return result if result.ndim else float(result)


def rate(metric: str, metric_value: float) -> float:
    """The nats per unit behind a metric's value: the inverse of `value`."""
    if metric == "bits_per_byte":
        return metric_value * math.log(2)
    return math.log(metric_value) if metric_value > 0 else -math.inf


def stderr(metric: str, metric_value: float, nats: float, error: float | None) -> float | None:
    """Standard error of a metric's value from its log-likelihood's (delta method); None if not finite."""
    if error is None or not nats:
        return None
    if not (math.isfinite(metric_value) and math.isfinite(nats) and math.isfinite(error)):
        return None
    relative = abs(error / nats)  # of the rate, too: it is proportional to the nats
    if metric == "bits_per_byte":
        return metric_value * relative
    return metric_value * relative * abs(math.log(metric_value))  # d exp(rate) = exp(rate) d rate


def drawn_interval(metric: str, rate: float, error: float) -> list[float]:
    """The 95 % interval of a metric's value from the error of its rate alone.

    It is exp(rate ± 1.96 error), so it is symmetric on a logarithmic axis, and its low end is above 0.
    """
    low = value(metric, -(rate - WHISKER * error), 1.0)
    high = value(metric, -(rate + WHISKER * error), 1.0)
    return [float(low), float(high)]


def is_distinguishable(first: float, second: float, error: float | None) -> bool:
    """True if two values differ by more than two standard errors of their difference (always, without an error)."""
    return error is None or abs(first - second) > CLEAR * error


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


def gap_interval(elbo: np.ndarray, duel: np.ndarray, ar: np.ndarray, documents: int) -> tuple[list[float] | None, str]:
    """The interval of gap closed from paired draws, and a remark if the ELBO's gap is not positive in some of them.

    `documents`: how many distinct ones were drawn from. Draws without a gap lie beyond one end or the other, so there
    is no interval if they are more than one end leaves out: then the interval of the ELBO's gap contains 0.
    """
    gap = elbo - ar
    is_positive = gap > 0  # False for a draw of empty documents only, whose rate is NaN
    count = len(gap)
    undefined = count - int(is_positive.sum())
    if undefined > tail(documents) * count:
        shares = f"{undefined:,} of {count:,} draws of documents"
        return None, f"the ELBO's gap is {UNCLEAR} from 0: in {shares} it is not positive"
    closed = 100 * (elbo - duel)[is_positive]
    percent = closed / gap[is_positive]  # in each draw: a ratio of means is not a mean of ratios
    remark = ""
    if undefined:
        remark = f"{undefined:,} of {count:,} draws without a positive ELBO gap are left out"
    return percentile_interval(percent, documents), remark


# ---------------------------------------------------------------- paired differences
# Two scores of the same texts: the paired difference with its interval, and a verdict.
#
#     difference = rate(first) - rate(second),   rate = -log p / units over all texts
#
# Below 0 the first is better. The interval is from a bootstrap over texts that both share.


UNCLEAR = "not distinguishable"  # the interval contains 0
EQUAL_VALUES = "equal"  # up to float noise
FEW = 10  # distinct texts; a 95 % interval from 10 holds the mean of a normal law in 95 % of cases, from 3 in 75 %
EQUAL = 1e-6  # nats per unit that are float noise


def too_few(keys: Sequence[str]) -> str:
    """The remark on the interval of texts with these keys, equal for copies; empty if enough are different."""
    texts = len(set(keys))
    if texts >= FEW:
        return ""
    return f"from {counted(texts, 'distinct document')}: too narrow, as a bootstrap over fewer than {FEW} is"


def about_copies(keys: Sequence[str]) -> str:
    """A sentence on texts that are copies of others, with equal keys; empty if there are none."""
    texts = len(set(keys))
    if texts == len(keys):
        return ""
    return f"{counted(texts, 'distinct document')} among {len(keys)}: copies count as one in errors"


class Side(NamedTuple):
    """One of two scores of the same texts."""

    name: str
    value: Value  # per unit
    no_error: str  # why a value that is drawn has no error
    draws: np.ndarray | None = None  # of the rate, by the bootstrap
    lost: Mapping[str, str] = MappingProxyType({})  # what its tokenizer does not tell apart, see `lost_distinctions`

    @property
    def rate(self) -> float:
        """Nats per unit."""
        return -self.value.nats

    @property
    def doubt(self) -> str:
        """The reason that this value allows no verdict; empty if it does."""
        return f"{self.name} is {self.value.doubt}" if self.value.doubt else self.no_error


@dataclasses.dataclass(frozen=True, repr=False)
class PairedDifference(Plain):
    """The difference of two models, first minus second, in nats per unit: below 0 the first is better.

    `repr` and `str` are one sentence. `to_dict()` has the perplexities, their errors and kinds in place of `values`.
    """

    internal = ("values",)
    computed = ("perplexities", "stderrs", "kinds")

    names: tuple[str, str] = ("", "")
    notes: tuple[str, str] = ("", "")  # what limits each value, such as "given the noise of seed 0"
    unit: str = ""  # token, word or byte
    documents: int = 0
    values: tuple[Value, ...] = ()  # log-likelihoods per unit: the higher one is better
    difference: float | None = None  # of -log p, so below 0 the first is better; None if a perplexity is infinite
    interval: tuple[float, float] | None = None  # 95 %, bootstrap over texts; None for fewer than two
    better: str = ""  # which of the two, or what it bounds; empty if the interval does not say
    verdict: str = ""  # that it is better, or why the interval does not say which is

    @property
    def perplexities(self) -> tuple[float, ...]:
        """Per unit."""
        return tuple(perplexity(-value.nats) for value in self.values)

    @property
    def stderrs(self) -> tuple[float | None, ...]:
        """The Monte Carlo errors of the perplexities. None: nothing is drawn, or the error is not known."""
        errors: list[float | None] = []
        for value, shown in zip(self.values, self.perplexities, strict=True):
            is_known = value.error is not None and math.isfinite(shown)
            errors.append(shown * value.error if is_known else None)
        return tuple(errors)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of the values: exact, estimate, bound, no bound or oracle."""
        return tuple(value.word for value in self.values)

    def __str__(self) -> str:
        values = []
        for n, name in enumerate(self.names):
            shown = number(self.perplexities[n], error=self.stderrs[n], bound=self.values[n].is_bound)
            note = f" ({self.notes[n]})" if self.notes[n] else ""
            values.append(f"{name} {shown}{note}")
        text = f"perplexity per {self.unit}: {' and '.join(values)}"
        if self.difference is not None:
            text += f"; difference {number(self.difference, '+.4f')} nats per {self.unit}"
        if self.interval is not None:
            text += f" (95 % interval {span(self.interval, '+.4f')}, {counted(self.documents, 'document')})"
        return f"{text}: {self.verdict}" if self.verdict else text

    __repr__ = __str__


def difference(first: Side, second: Side, unit: str, keys: Sequence[str]) -> PairedDifference:
    """The difference of two scores of texts, with a verdict if both have draws. `keys`: equal for equal texts."""
    result = PairedDifference(
        names=(first.name, second.name), unit=unit, documents=len(keys), values=(first.value, second.value)
    )
    if not (math.isfinite(first.rate) and math.isfinite(second.rate)):
        return result
    result = dataclasses.replace(result, difference=first.rate - second.rate)
    if first.draws is None or second.draws is None:
        return result

    errors = [first.value.interval_error, second.value.interval_error]
    draws_of_first, draws_of_second = with_errors([first.draws, second.draws], errors)
    texts = len(set(keys))  # copies of a text say nothing about other texts
    low, high = percentile_interval(draws_of_first - draws_of_second, texts)
    result = dataclasses.replace(result, interval=(low, high))

    lower = None  # the side with fewer nats per unit, if the interval says which
    if high < 0:
        lower = first
    elif low > 0:
        lower = second
    is_equal = max(abs(low), abs(high)) < EQUAL
    if undecided := _undecided(first, second, lower, is_equal, texts):
        return dataclasses.replace(result, verdict=undecided)
    # A bound below the other value proves that what it bounds is better: that is lower still.
    better = f"what {lower.name} bounds" if lower.value.is_bound else lower.name
    return dataclasses.replace(result, better=better, verdict=f"{better} is better")


def _undecided(first: Side, second: Side, lower: Side | None, is_equal: bool, texts: int) -> str:
    """The reason that neither of two values is called better; empty if `lower` is. `texts`: how many are different."""
    doubt = first.doubt or second.doubt
    if doubt:
        return f"no verdict: {doubt}"
    # What an upper bound bounds may be anywhere below it, so a bound decides nothing unless it is the lower value.
    for side in (first, second):
        if side.value.is_bound and side is not lower:
            return "no verdict: only a bound"
    if lower is not None:
        # The lower value is that of all texts which its tokenizer does not tell apart, together.
        other = second if lower is first else first
        lost = [words for key, words in lower.lost.items() if key not in other.lost]
        if lost:
            return f"no verdict: {lower.name} {' and '.join(lost)}"
    if is_equal:
        return EQUAL_VALUES
    if texts < FEW:
        return f"no verdict from {counted(texts, 'distinct document')}"
    return UNCLEAR if lower is None else ""


def key_of(text: str) -> str:
    """A digest of a text, to know it again."""
    return hashlib.sha256(text.encode()).hexdigest()[:KEY]
