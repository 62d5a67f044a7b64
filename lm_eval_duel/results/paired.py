"""Two scores of the same texts: the paired difference with its interval, and a verdict. In Python: `compare(a, b)`."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from lm_eval_duel.core.rates import perplexity
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.registry import NO_BOUND, Kind, is_bound, kind_of, of_spec
from lm_eval_duel.results import pairs, stats
from lm_eval_duel.results.table import number, pm, span

UNITS = ("token", "word", "byte")


class Texts(NamedTuple):
    """The scores of some texts under one model. `stderr`: of their sum, nats; equal texts share one error."""

    keys: list[str]  # equal for equal texts
    log_probs: list[float]  # nats
    counts: dict[str, list[int]]  # by unit
    kind: str  # of the values, as `registry.kind_of` says
    stderr: float | None = None  # Monte Carlo
    unknown: str = ""  # why values that are drawn have no `stderr`

    def doubt(self, name: str) -> str:
        """The reason that these values allow no verdict; empty if they do."""
        if self.kind == NO_BOUND:
            return f"{name} is neither a likelihood nor a bound"
        return f"{name} is not a likelihood" if self.kind == Kind.NOT_A_LIKELIHOOD.value else self.unknown

    def check(self, name: str) -> None:
        """Raise DuelError for a log-probability above 0: of the sum, if the values are estimates."""
        tokens = self.counts["token"]
        values = [(f"text {n}", *value) for n, value in enumerate(zip(self.log_probs, tokens, strict=True))]
        if self.kind == Kind.ESTIMATE.value:
            values = [("the sum", math.fsum(self.log_probs), sum(tokens))]
        for what, nats, count in values:
            if not nats <= pairs.EQUAL * max(1, count):
                raise DuelError(
                    f"The log-probability of {what} of {name} is {nats:g}, and a probability is at most 1. Score the "
                    "texts again."
                )


@dataclasses.dataclass(frozen=True)
class PairedDifference:
    """The difference of two models, first minus second, in nats per unit: below 0 the first is better."""

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
            below = "≤ " if is_bound(kind) else ""
            values.append(f"{name} {below}{number(value)}{pm(error)}")
        text = f"perplexity per {self.unit}: {' and '.join(values)}"
        if self.difference is not None:
            text += f"; difference {number(self.difference, '+.4f')} nats per {self.unit}"
        if self.interval is not None:
            text += f" (95 % interval {span(self.interval, '+.4f')}, {self.documents} documents)"
        return f"{text}: {self.verdict}" if self.verdict else text


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
    both = first, second = _texts(a, names[0]), _texts(b, names[1])
    if first.keys != second.keys or not a:
        apart = next((n for n, (x, y) in enumerate(zip(first.keys, second.keys, strict=False)) if x != y), 0)
        what = f"text {apart} differs" if len(a) == len(b) and a else f"there are {len(a)} and {len(b)} texts"
        raise DuelError(f"compare() takes two lists of scores of the same texts in the same order, but {what}.")
    if unit not in (None, *UNITS):
        raise DuelError(f"'unit' is one of {', '.join(UNITS)}; got {unit}.")
    for texts, name in zip(both, names, strict=True):
        texts.check(name)
    same = first.counts["token"] == second.counts["token"]
    unit = unit or ("token" if same else "byte")
    if unit == "token" and not same:
        raise DuelError("The two lists count other tokens, so they cannot be compared per token; use unit='byte'.")
    order = sorted(range(len(a)), key=first.keys.__getitem__)  # as in a report, so that the intervals are its
    table = np.array([[(texts.log_probs[n], texts.counts[unit][n]) for texts in both] for n in order], dtype=float)
    units = table[:, :, 1].sum(0)  # (2,)
    if not units.all():
        raise DuelError(f"The texts have no {unit}s, so there is no rate to compare.")
    rates = [float(rate) for rate in -table[:, :, 0].sum(0) / units]
    draws: Any = (None, None)
    if len(a) > 1 and all(map(math.isfinite, rates)):
        draws = stats.rates(table, [first.stderr, second.stderr]).T
    sides = [
        pairs.Side(name, rate, drawn, is_bound(texts.kind), texts.doubt(name))
        for name, rate, drawn, texts in zip(names, rates, draws, both, strict=True)
    ]
    value, interval, verdict = pairs.difference(*sides, len(set(first.keys)))
    values = perplexity(rates[0]), perplexity(rates[1])
    one, other = (
        None if texts.stderr is None or not math.isfinite(known) else known * texts.stderr / float(count)
        for known, texts, count in zip(values, both, units, strict=True)
    )
    ends, kinds = None if interval is None else (interval[0], interval[1]), (first.kind, second.kind)
    return PairedDifference(names, unit, len(a), values, (one, other), kinds, value, ends, verdict)


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
        return Texts([], [], {}, Kind.LIKELIHOOD.value)
    total, spec = Total.from_parts(score.sums for score in scores), scores[0].spec
    estimator, stderr = str(spec["estimator"]), total.stderr
    drawn = of_spec(estimator, spec, total.beam).drawn
    unknown = "" if drawn is None or stderr is not None else drawn.unknown(spec)
    counts = {
        "token": [score.tokens if isinstance(score.tokens, int) else len(score.tokens) for score in scores],
        "word": [len(score.text.split()) for score in scores],
        "byte": [len(score.text.encode()) for score in scores],
    }
    keys, log_probs = [key_of(_identity(score)) for score in scores], [score.log_prob for score in scores]
    return Texts(keys, log_probs, counts, kind_of(estimator, spec, total.beam), stderr, unknown)


def _identity(score: Any) -> str:
    """A text with its context and suffix, if it has any: the same text in another context is another one."""
    context, suffix = getattr(score, "context", ""), getattr(score, "suffix", "")
    return repr((score.text, context, suffix)) if context or suffix else score.text


def key_of(text: str) -> str:
    """A digest of a text, to know it again."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
