"""The ranks of a task's rows, and whether each row really differs from the next lower one and from the lowest.

Ranks are by value, and two values that are close may change places on other documents. So each row is compared with two
others by the paired difference over documents, which says more than the intervals of the two rows. That is two pairs a
row: a table of many rows stays quick.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from lm_eval_duel.core.scores import Value
from lm_eval_duel.results import gaps
from lm_eval_duel.results.gaps import Draws, Pair
from lm_eval_duel.results.rows import Row
from lm_eval_duel.results.stats import EQUAL_VALUES, UNCLEAR

TIED = "tied"  # of a row that is not distinguishable from another one, for readers


@dataclasses.dataclass(frozen=True)
class Place:
    """The rank of a row on a task, from 1, and its differences from two other rows; None for the row of rank 1.

    `next_lower`: from the row before it in the order of values. `lowest`: from the first row.
    """

    rank: int
    next_lower: Pair | None
    lowest: Pair | None

    @property
    def is_tied(self) -> bool:
        """True if it is not distinguishable from the next lower row."""
        return self.next_lower is not None and is_tied(self.next_lower)


def is_tied(pair: Pair) -> bool:
    """True if the interval of a paired difference contains 0, so that neither row is better."""
    return pair.verdict in (UNCLEAR, EQUAL_VALUES)


def may_rank(score: Value) -> bool:
    """True for a likelihood or an estimate of one: bounds, and what is neither, have no rank."""
    return not score.is_bound and not score.doubt


def compete(first: Row, second: Row) -> bool:
    """False for values of one model given the noise of two seeds: one of several draws is no better method."""
    return first.model != second.model or first.noise_seed == second.noise_seed


def places(rows: Sequence[Row], draws: Draws) -> dict[Row, Place]:
    """The places of the rows of a task that have a rank, lowest value first; equal values keep the order of `rows`.

    A single row has none.
    """
    ranked = [row for row in rows if may_rank(row.score) and math.isfinite(row.value)]
    if len(ranked) < 2:  # there is nothing to be ranked among
        return {}
    ranked.sort(key=lambda row: row.value)
    places_of_rows = {}
    for n, row in enumerate(ranked):
        before = [other for other in ranked[:n] if compete(row, other)]
        rank = 1 + sum(other.value < row.value for other in before)
        next_lower = None
        lowest = None
        if before:
            lowest = gaps.pair(row, before[0], draws)
            next_lower = lowest if len(before) == 1 else gaps.pair(row, before[-1], draws)
        places_of_rows[row] = Place(rank, next_lower, lowest)
    return places_of_rows
