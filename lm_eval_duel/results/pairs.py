"""Paired differences: nats per unit on the same documents, with an interval and a verdict in words.

    difference = rate(first) - rate(second),   rate = -log p / units over all documents

Below 0 the first is better. The interval is from the bootstrap over documents that both share.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from lm_eval_duel.results import headline, partners, stats
from lm_eval_duel.results.records import UNCLEAR, Interval, Pair, Row
from lm_eval_duel.rules.tables import without_defaults

UNITS = {"token_perplexity": "token", "perplexity": "document", "word_perplexity": "word"}  # of others: byte
BOTH, RULES, MODELS, ALL, NONE = "both", "rules", "models", "all", "none"
CHOICES = (BOTH, RULES, MODELS, ALL, NONE)  # of --pairs
MOST_ROWS = 5  # of which all pairs are listed; of more, each is compared with the lowest
FEW = 10  # documents below which a bootstrap interval is too narrow for a verdict
EQUAL = 1e-6  # nats per unit that are float noise
Rates = Mapping[int, np.ndarray]  # row number -> bootstrap draws of its rate


def unit(metric: str) -> str:
    """What a metric counts: `token`, `word`, ..."""
    return UNITS.get(metric, "byte")


@dataclasses.dataclass(frozen=True)
class Side:
    """One of two that are compared. `draws`: bootstrap draws of its rate; `doubt`: why it allows no verdict."""

    name: str
    rate: float  # nats per unit
    draws: np.ndarray | None
    bound: bool  # of its perplexity, from above
    doubt: str = ""


def difference(first: Side, second: Side, documents: int) -> tuple[float | None, Interval | None, str]:
    """First minus second (None if a rate is infinite), its interval, and which is better by that interval."""
    if not (math.isfinite(first.rate) and math.isfinite(second.rate)):
        return None, None, ""
    value = first.rate - second.rate
    if first.draws is None or second.draws is None:
        return value, None, ""
    drawn = first.draws - second.draws
    low, high = interval = stats.interval(drawn[np.isfinite(drawn)])  # a draw of empty documents only has no rate
    if doubt := first.doubt or second.doubt:
        verdict = f"no verdict: {doubt}"
    elif max(abs(low), abs(high)) < EQUAL:
        verdict = "equal"
    elif documents < FEW:
        verdict = f"no verdict from {documents} documents"
    elif low <= 0 <= high:
        verdict = UNCLEAR
    else:
        better, worse = (first, second) if high < 0 else (second, first)
        bound = worse.bound  # its own value may be lower than its bound
        verdict = f"no verdict: {worse.name} is an upper bound" if bound else f"{better.name} is better"
    return value, interval, verdict


# ---------------------------------------------------------------- of rows


def pair(rows: Sequence[Row], rates: Rates, documents: int, first: int, second: int) -> Pair:
    """The difference of two rows with its interval (or the reason why there is none) and verdict."""
    names = _names(rows[first], rows[second])
    sides = []
    for n, name in zip((first, second), names, strict=True):
        row = rows[n]
        doubt = f"{name} is neither a likelihood nor a bound" if row.eps else row.stderr_reason
        sides.append(Side(name, stats.rate(row.metric, row.value), rates.get(n), row.bound, doubt))
    value, interval, verdict = difference(*sides, documents)
    reason = ""
    if value is None:
        reason = "no difference of an infinite perplexity"
    elif interval is None:
        lacking = next(rows[n] for n in (first, second) if n not in rates)
        reason = f"no interval: {lacking.model}, {lacking.name}: {lacking.reason}"
    return Pair(first, second, names, value, interval, reason, verdict)


def _names(*both: Row) -> list[str]:
    """The shortest names that tell two rows apart."""
    labels = []
    for row in both:
        method = without_defaults(row.rule) if row.rule else row.entry.title
        cache = "" if row.cache is None else f"cache={row.cache}"
        labels.append([row.model, method, row.block_words, cache, row.qualifiers])
    differing = [parts for parts in zip(*labels, strict=True) if len(set(parts)) > 1]
    names = [", ".join(filter(None, parts)) for parts in zip(*differing, strict=True)] or ["", ""]
    return [name or row.name for name, row in zip(names, both, strict=True)]


def of(choice: str, rows: Sequence[Row], rates: Rates, documents: int) -> list[Pair]:
    """The pairs of `--pairs`.

    `rules`: the DUEL rows of a network with one block and one cache against each other; of more than five, each against
    the lowest. `models`: the row of each model that its headline is about, in the same way; `both`: these two. `all`:
    every two rows. The oracle, which is not a likelihood, is in no pair.
    """
    if choice == ALL:
        numbers = list(itertools.combinations([n for n, row in enumerate(rows) if row.likelihood], 2))
    else:
        groups = [_of_models(rows)] if choice in (BOTH, MODELS) else []
        groups += _of_rules(rows) if choice in (BOTH, RULES) else []
        numbers = [two for group in groups for two in _within(group, rows)]
    return [pair(rows, rates, documents, *two) for two in numbers]


def _of_models(rows: Sequence[Row]) -> list[int]:
    """The number of each model's row: that of its headline, the AR row, or else its lowest likelihood or bound."""
    chosen = []
    for model in dict.fromkeys(row.model for row in rows):
        mine = [row for row in rows if row.model == model and row.likelihood]
        best = next((row for row in mine if row.ar), None) or headline.chosen_row(mine)
        best = best or min(mine, key=lambda row: (row.bound, row.value), default=None)
        chosen += [n for n, row in enumerate(rows) if row is best]
    return chosen


def _of_rules(rows: Sequence[Row]) -> list[list[int]]:
    """The numbers of the DUEL rows that differ in the rule only."""
    groups: dict[tuple, list[int]] = {}
    for n, row in enumerate(rows):
        if row.estimator == "duel" and not row.ar:
            groups.setdefault((row.model, row.block, row.cache, row.qualifiers), []).append(n)
    return list(groups.values())


def _within(group: Sequence[int], rows: Sequence[Row]) -> list[tuple[int, int]]:
    if len(group) <= MOST_ROWS:
        return list(itertools.combinations(group, 2))
    lowest = min(group, key=lambda n: rows[n].value)
    return [(n, lowest) for n in group if n != lowest]


def cache_cost(rows: Sequence[Row], rates: Rates, documents: int, number: int) -> Pair | None:
    """Cached minus uncached, everything else in the spec the same; None for a row without a cache."""
    if not rows[number].has_cache:
        return None
    partner, reason = partners.uncached(rows[number], rows)
    return Pair(number, None, reason=reason) if partner is None else pair(rows, rates, documents, number, partner)
