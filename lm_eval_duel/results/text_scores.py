"""Lists of scores of the library: `compare(a, b)`, the paired difference of two, and `pool(scores)`, their perplexity.

difference = rate(a) - rate(b),   rate = -log p / units over all texts,   perplexity = exp(rate)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from lm_eval_duel.arguments import has_order
from lm_eval_duel.core.scores import Plain, Value, perplexity
from lm_eval_duel.errors import DuelError, counted
from lm_eval_duel.estimators import registry
from lm_eval_duel.keywords import known_keywords
from lm_eval_duel.results.bootstrap import bootstrap_rates, percentile_interval, with_errors
from lm_eval_duel.results.spec_entries import lost_distinctions, scored_positions
from lm_eval_duel.results.stats import EQUAL, PairedDifference, Side, difference, key_of, too_few, value
from lm_eval_duel.results.table import number

UNITS = ("token", "word", "byte")


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
    lost: dict[str, str]  # what the tokenizer does not tell apart, see `lost_distinctions`
    notes: str  # of all scores
    windows: str  # how long texts are cut
    capacity: int  # target positions of a row

    def side(self, unit: str, draws: np.ndarray | None) -> Side:
        """Their rate per unit, as one side of a difference."""
        units = sum(self.counts[unit])
        error = None if self.value.error is None else self.value.error / units
        per_unit = dataclasses.replace(self.value, nats=self.value.nats / units, error=error)
        return Side(self.name, per_unit, self.no_error, draws, self.lost)


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
        tokens are cut at different places, if contexts were cut, and not alike, or if the tokenizer of the better one
        replaces words by [UNK], drops upper case or accents, and that of the other does not.

    Raises:
        DuelError: If the texts differ, there are none, or the unit is unknown.
    """
    a = _as_list("compare", a)
    b = _as_list("compare", b)
    if not isinstance(names, tuple | list) or len(names) != 2 or names[0] == names[1]:
        raise DuelError(f"compare() takes two different names, such as names=('greedy', 'margin'); got {names!r}.")
    wanted = "compare() takes two lists of scores of the same texts in the same order, but"
    if len(a) != len(b) or not a:
        raise DuelError(f"{wanted} there are {len(a)} and {len(b)} texts.")
    first = _texts("compare", a, names[0])
    second = _texts("compare", b, names[1])
    for n, (one, other) in enumerate(zip(first.keys, second.keys, strict=True)):
        if one != other:
            raise DuelError(f"{wanted} text {n}, its context or its suffix differs.")
    unit = _shared_unit(first, second, unit)

    draws, keys = _draws([first, second], unit)
    result = difference(first.side(unit, draws[0]), second.side(unit, draws[1]), unit, keys)
    result = dataclasses.replace(result, notes=(first.notes, second.notes))
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
        return f"the windows differ{_equal_windows(first, second)}"
    return ""


def _equal_windows(first: Texts, second: Texts) -> str:
    """The arguments with which two models cut texts of the same tokens alike."""
    if first.windows != second.windows:
        return " (make both with the same windows)"
    capacity = min(first.capacity, second.capacity)
    lengths = []  # they differ by special tokens
    for texts in (first, second):
        lengths.append(texts.max_length - (texts.capacity - capacity))
    if lengths == [first.max_length, second.max_length]:
        return ""  # equally long already
    if lengths[0] == lengths[1]:
        return f" (make both with max_length={lengths[0]})"
    return f" (make {first.name} with max_length={lengths[0]} and {second.name} with max_length={lengths[1]})"


# ---------------------------------------------------------------- one list


@dataclasses.dataclass(frozen=True, repr=False)
class Pooled(Plain):
    """The perplexity of texts together: exp(-log_prob / count). `repr` is one sentence."""

    unit: str  # token, word or byte
    count: int  # of units
    documents: int
    log_prob: float  # nats, summed over texts
    stderr: float | None  # nats, the Monte Carlo or sampling error of log_prob; None: not drawn, or not known
    perplexity: float
    # 95 %, of perplexity, bootstrap over texts; None for fewer than two texts, or an infinite value
    interval: tuple[float, float] | None
    kind: str  # exact, estimate, bound, no bound or oracle
    bound: bool  # log_prob is a lower bound, so perplexity is an upper one
    note: str = ""  # what limits the value
    remark: str = ""  # what limits the interval
    is_drawn: bool = False  # it has an error, known or not

    def __repr__(self) -> str:
        error = None if self.stderr is None else self.perplexity * self.stderr / self.count
        shown = number(self.perplexity, error=error, bound=self.bound, unsure=self.is_drawn)
        text = f"perplexity per {self.unit} {shown}"
        documents = counted(self.documents, "document")
        if self.interval is not None:
            low, high = self.interval
            documents = f"95 % interval {number(low)} to {number(high)}, {documents}"
        parts = [f"{text} ({documents})", f"{self.kind} {self.note}".rstrip(), self.remark]
        return ", ".join(filter(None, parts))


@known_keywords
def pool(scores: Sequence[Any], unit: str = "token") -> Pooled:
    """The perplexity of texts together, exp(-sum log p / sum of units), with its 95 % interval, as a report has it.

    Args:
        scores: Scores of texts by one model, from `Duel.score`, or estimates, from `Duel.estimate`.
        unit: "token", "word" or "byte". Bits per byte are math.log2 of the perplexity per byte, and of its interval.

    Raises:
        DuelError: If there are no scores, they are of several models, or the texts have no units.
    """
    _require_unit(unit)
    scores = _as_list("pool", scores)
    if not scores:
        raise DuelError("pool() takes scores, as Duel.score returns; got none.")
    texts = _texts("pool", scores, "the list")
    [draws], keys = _draws([texts], unit)
    side = texts.side(unit, draws)
    interval = None
    if draws is not None:
        [with_error] = with_errors([draws], [side.value.interval_error])
        low, high = percentile_interval(value("perplexity", -with_error, 1.0), len(set(keys)))
        interval = (low, high)
    remarks = [too_few(keys)] if interval else []
    if texts.no_error:
        remarks.append(f"{texts.no_error}; the interval does not include it" if interval else texts.no_error)
    return Pooled(
        unit=unit,
        count=sum(texts.counts[unit]),
        documents=len(keys),
        log_prob=texts.value.nats,
        stderr=texts.value.error,
        perplexity=perplexity(side.rate),
        interval=interval,
        kind=texts.value.word,
        bound=texts.value.is_bound,
        note=texts.notes,
        remark="; ".join(filter(None, remarks)),
        is_drawn=texts.value.error is not None or bool(texts.no_error),
    )


# ---------------------------------------------------------------- scores as they are compared


def _draws(lists: Sequence[Texts], unit: str) -> tuple[list[np.ndarray | None], list[str]]:
    """Bootstrap draws of the rate of each list, None if there are none, and the keys of the texts.

    The texts are in the order of a report, so that the intervals are the same.
    """
    order = []
    for n in sorted(range(len(lists[0].keys)), key=lambda n: lists[0].keys[n]):
        is_empty = True  # a text of white space has no words, but a log-probability: it counts
        for texts in lists:
            if texts.counts[unit][n] or texts.log_probs[n]:
                is_empty = False
        if not is_empty:  # an empty text says nothing about others
            order.append(n)
    table = np.empty((len(order), len(lists), 2))  # (documents, lists, nats and units)
    for side, texts in enumerate(lists):
        for place, n in enumerate(order):
            table[place, side] = texts.log_probs[n], texts.counts[unit][n]
    sums = table.sum(0)  # (lists, nats and units)
    if not sums[:, 1].all():
        raise DuelError(f"The texts have no {unit}s, so there is no rate.")
    keys = [lists[0].keys[n] for n in order]
    if len(order) > 1 and np.isfinite(sums).all():
        return list(bootstrap_rates(table, keys)), keys
    return [None] * len(lists), keys


def _as_list(function: str, scores: Any) -> list[Any]:
    """Scores in their order, also those of a column of a table; raises DuelError for what holds none."""
    if not has_order(scores):
        got = f"an object of the class {type(scores).__name__}"
        raise DuelError(f"{function}() takes lists of scores, as Duel.score returns; got {got}.")
    return list(scores)


def _shared_unit(first: Texts, second: Texts, unit: str | None) -> str:
    """The unit to compare in; raises DuelError for one that the two lists do not share."""
    if unit is not None:
        _require_unit(unit)
    same_tokens = first.counts["token"] == second.counts["token"]
    if unit == "token" and not same_tokens:
        raise DuelError("The two lists count other tokens, so they cannot be compared per token; use unit='byte'.")
    return unit or ("token" if same_tokens else "byte")


def _require_unit(unit: Any) -> None:
    """Raise DuelError unless this is one of `UNITS`."""
    if not isinstance(unit, str) or unit not in UNITS:
        raise DuelError(f"'unit' is one of {', '.join(UNITS)}; got {unit!r:.80}.")


def _texts(function: str, scores: Sequence[Any], name: str) -> Texts:
    """The scores of `Duel.score`, or the estimates of `Duel.estimate`, as they are compared."""
    from lm_eval_duel.estimators.totals import Total

    _check_scores(function, scores, name)
    spec = scores[0].spec
    total = Total.from_parts(score.sums for score in scores).value
    entry = registry.find(str(spec["estimator"]))
    unknown = sum(score.unk_tokens for score in scores)
    tokens = sum(score.sums.tokens for score in scores)
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
        lost=lost_distinctions(spec, unknown / tokens if unknown else 0.0),
        notes="; ".join(filter(None, dict.fromkeys(score.note for score in scores))),
        windows=str(spec.get("windows")),
        capacity=_capacity(scores),
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


def _capacity(scores: Sequence[Any]) -> int:
    """The target positions of a row: those that are left by the special tokens of a text without a context."""
    length = int(scores[0].spec.get("max_length", 0))
    for score in scores:
        if score.windows:
            first = score.windows[0]
            return length - len(first.context) - len(first.suffix)
    return length


def _visible(score: Any) -> int:
    """The number of tokens that are visible around a text."""
    return sum(len(window.context) + len(window.suffix) for window in score.windows)


def _check_scores(function: str, scores: Sequence[Any], name: str) -> None:
    """Raise DuelError for objects that are no scores of single texts under one model."""
    from lm_eval_duel.estimators.totals import Total

    for n, score in enumerate(scores):
        if not isinstance(getattr(score, "sums", None), Total):
            got = type(score).__name__
            raise DuelError(
                f"{function}() takes scores, as Duel.score returns; number {n} of {name} is of the class {got}."
            )
        if score.text is None:
            raise DuelError(f"{function}() takes one score for each text; number {n} of {name} is a total of several.")
        if score.spec != scores[0].spec:
            raise DuelError(f"{function}() takes the scores of one model in a list; {name} has 0 and {n} of several.")


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
