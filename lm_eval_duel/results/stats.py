"""Perplexities with their errors, the error of gap closed, and paired differences.

Also in Python: `compare(a, b)`, the paired difference of two lists of scores of the same texts.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np

from lm_eval_duel.core.scores import Plain, Value, perplexity
from lm_eval_duel.errors import DuelError, counted
from lm_eval_duel.estimators import registry
from lm_eval_duel.keywords import known_keywords
from lm_eval_duel.results.bootstrap import bootstrap_rates, percentile_interval, tail, with_errors
from lm_eval_duel.results.spec_entries import scored_positions
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


UNITS = ("token", "word", "byte")
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
        for name, value, shown, error in zip(self.names, self.values, self.perplexities, self.stderrs, strict=True):
            values.append(f"{name} {number(shown, error=error, bound=value.is_bound)}")
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
    if is_equal:
        return EQUAL_VALUES
    if texts < FEW:
        return f"no verdict from {counted(texts, 'distinct document')}"
    return UNCLEAR if lower is None else ""


# ---------------------------------------------------------------- scores of the library


class Texts(NamedTuple):
    """The scores of some texts under one model."""

    name: str
    keys: list[str]  # equal for equal texts
    log_probs: list[float]  # nats
    counts: dict[str, list[int]]  # by unit
    positions: str  # that are scored
    max_length: int  # of a row, special tokens included
    cuts: list[list[tuple[int, int]]]  # of each text, see `_cuts`
    cut_contexts: list[int]  # of each text: the visible tokens around it, if its context or suffix was cut, else 0
    value: Value  # of their sum; equal texts share one error
    no_error: str  # why a value that is drawn has no error

    def side(self, unit: str, draws: np.ndarray | None) -> Side:
        """Their rate per unit, as one side of a difference."""
        units = sum(self.counts[unit])
        error = None if self.value.error is None else self.value.error / units
        per_unit = dataclasses.replace(self.value, nats=self.value.nats / units, error=error)
        return Side(self.name, per_unit, self.no_error, draws)


@known_keywords
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
        estimates and bounds), and a verdict: none if other positions are scored (`bos`), if long texts of the same
        tokens are cut at different places, or if contexts were cut, and not alike.

    Raises:
        DuelError: If the texts differ, there are none, or the unit is unknown.
    """
    a = _as_list(a)
    b = _as_list(b)
    if not isinstance(names, tuple | list) or len(names) != 2 or names[0] == names[1]:
        raise DuelError(f"compare() takes two different names, such as names=('greedy', 'margin'); got {names!r}.")
    wanted = "compare() takes two lists of scores of the same texts in the same order, but"
    if len(a) != len(b) or not a:
        raise DuelError(f"{wanted} there are {len(a)} and {len(b)} texts.")
    first = _texts(a, names[0])
    second = _texts(b, names[1])
    for n, (one, other) in enumerate(zip(first.keys, second.keys, strict=True)):
        if one != other:
            raise DuelError(f"{wanted} text {n}, its context or its suffix differs.")
    unit = _shared_unit(first, second, unit)

    # documents in the order of a report, so that the intervals are the same
    order = []
    for n in sorted(range(len(a)), key=lambda n: first.keys[n]):
        is_empty = True  # a text of white space has no words, but a log-probability: it counts
        for texts in (first, second):
            if texts.counts[unit][n] or texts.log_probs[n]:
                is_empty = False
        if not is_empty:  # an empty text says nothing about others
            order.append(n)
    table = np.empty((len(order), 2, 2))  # (documents, sides, nats and units)
    for side, texts in enumerate((first, second)):
        for place, n in enumerate(order):
            table[place, side] = texts.log_probs[n], texts.counts[unit][n]
    sums = table.sum(0)  # (sides, nats and units)
    if not sums[:, 1].all():
        raise DuelError(f"The texts have no {unit}s, so there is no rate to compare.")

    keys = [first.keys[n] for n in order]
    draws: Any = (None, None)
    if len(order) > 1 and np.isfinite(sums).all():
        draws = bootstrap_rates(table, keys)
    result = difference(first.side(unit, draws[0]), second.side(unit, draws[1]), unit, keys)
    other = _not_alike(first, second)
    if result.difference is None:
        other = "a perplexity is infinite"
    elif result.interval is None:
        other = "a single text has no interval"
    return dataclasses.replace(result, better="", verdict=f"no verdict: {other}") if other else result


def _not_alike(first: Texts, second: Texts) -> str:
    """The reason that two lists allow no verdict, whatever their values are; empty if they do."""
    if first.positions != second.positions:
        return "the scored positions differ"
    same_tokens = first.counts["token"] == second.counts["token"]
    if first.cut_contexts != second.cut_contexts or (any(first.cut_contexts) and not same_tokens):
        return "contexts were cut, and not alike"
    if same_tokens and first.cuts != second.cuts:  # other tokens are cut at other places in any case
        longest = {first.max_length, second.max_length}
        remedy = f" (make both with max_length={min(longest)})" if len(longest) > 1 else ""
        return f"the windows differ{remedy}"
    return ""


def _as_list(scores: Any) -> list[Any]:
    """Scores in their order, also those of a column of a table; raises DuelError for what holds none."""
    if not isinstance(scores, Iterable) or isinstance(scores, str | Mapping | Set):
        got = f"an object of the class {type(scores).__name__}"
        raise DuelError(f"compare() takes two lists of scores, as Duel.score returns; got {got}.")
    return list(scores)


def _shared_unit(first: Texts, second: Texts, unit: str | None) -> str:
    """The unit to compare in; raises DuelError for one that the two lists do not share."""
    if unit not in (None, *UNITS):
        raise DuelError(f"'unit' is one of {', '.join(UNITS)}; got {unit}.")
    same_tokens = first.counts["token"] == second.counts["token"]
    if unit == "token" and not same_tokens:
        raise DuelError("The two lists count other tokens, so they cannot be compared per token; use unit='byte'.")
    return unit or ("token" if same_tokens else "byte")


def _texts(scores: Sequence[Any], name: str) -> Texts:
    """The scores of `Duel.score`, or the estimates of `Duel.estimate`, as they are compared."""
    from lm_eval_duel.estimators.totals import Total

    _check_scores(scores, name)
    spec = scores[0].spec
    total = Total.from_parts(score.sums for score in scores).value
    entry = registry.find(str(spec["estimator"]))
    texts = Texts(
        name=name,
        keys=[key_of(_identity(score)) for score in scores],
        log_probs=[score.log_prob for score in scores],
        counts={
            "token": [score.sums.tokens for score in scores],
            "word": [score.units.words for score in scores],
            "byte": [score.units.bytes for score in scores],
        },
        positions=scored_positions(spec),
        max_length=int(spec.get("max_length", 0)),
        cuts=[_cuts(score.windows) for score in scores],
        cut_contexts=[_visible(score) if getattr(score, "cut", False) else 0 for score in scores],
        value=dataclasses.replace(total, nats=math.fsum(score.log_prob for score in scores)),
        no_error=entry.unknown_error(total.error, spec),
    )
    _check_texts(texts)
    return texts


def _cuts(windows: Sequence[Any]) -> list[tuple[int, int]]:
    """The lengths of the windows of a text, and of the text visible before each; empty for a text in one window.

    Special tokens of a model are in every context, or scored in the first window (bos=scored).
    """
    if len(windows) < 2:
        return []
    cuts = []
    for window in windows:
        visible = len(window.context) - len(windows[0].context)
        cuts.append((len(window.target), visible))
    return cuts


def _visible(score: Any) -> int:
    """The number of tokens that are visible around a text."""
    return sum(len(window.context) + len(window.suffix) for window in score.windows)


def _check_scores(scores: Sequence[Any], name: str) -> None:
    """Raise DuelError for objects that are no scores of single texts under one model."""
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


def _check_texts(texts: Texts) -> None:
    """Raise DuelError for a log-probability above 0. For estimates of texts, which may be above, the sum is checked."""
    tokens = texts.counts["token"]
    checked = [("the sum", texts.value.nats, sum(tokens))]
    if not texts.value.may_exceed_one:
        checked = []
        for n, (log_prob, count) in enumerate(zip(texts.log_probs, tokens, strict=True)):
            checked.append((f"text {n}", log_prob, count))
    for what, nats, count in checked:
        if not nats <= EQUAL * max(1, count):  # also for NaN
            raise DuelError(
                f"The log-probability of {what} of {texts.name} is {nats:g}, and a probability is at most 1. Score the "
                "texts again."
            )


def _identity(score: Any) -> str:
    """A text with its context and suffix, if it has any: the same text in another context is another one."""
    context = getattr(score, "context", "")
    suffix = getattr(score, "suffix", "")
    return repr((score.text, context, suffix)) if context or suffix else score.text


def key_of(text: str) -> str:
    """A digest of a text, to know it again."""
    return hashlib.sha256(text.encode()).hexdigest()[:KEY]
