"""Windows that were scored twice: their differences, and a summary of these for logs and results."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from lm_eval_duel.core.float_noise import nats_tolerance
from lm_eval_duel.core.scores import Score
from lm_eval_duel.core.windows import Window

# routes of the second score; recompute.py explains them
REFERENCE, RUNS_RULE, ALONE = "reference", "reference with the run's rule", "run alone"


@dataclasses.dataclass(frozen=True)
class Recomputed:
    """A window's log-probability in nats, along the run's order if it has one, and what else was compared."""

    log_prob: float
    route: str = REFERENCE
    other_picks: int | None = None  # states at which the rule picks otherwise; None: there is no order to compare
    ties: int | None = None  # states at which it does so within a tie of the reference's numbers
    own_order: float | None = None  # the log-probability along the reference's order, where that is another one
    problems: tuple[str, ...] = ()  # what else differs
    why_alone: str = ""


@dataclasses.dataclass(frozen=True)
class CheckedWindow:
    """One window of a run, and its second score."""

    where: str
    window: Window
    log_prob: float  # in the run, nats
    again: Recomputed
    request: int = 0  # the index of its request among all of one kind
    score: Score | None = None  # of the run

    @property
    def tokens(self) -> int:
        """The number of target tokens."""
        return len(self.window.target)

    @property
    def difference(self) -> float:
        """The absolute difference in nats, along the run's order; infinite if one value is no number."""
        return distance(self.log_prob, self.again.log_prob)

    @property
    def tolerance(self) -> float:
        """The largest difference that is noise, in nats."""
        return nats_tolerance(self.tokens)

    @property
    def order_difference(self) -> float:
        """The absolute difference in nats from the value along the reference's own order."""
        along = self.again.own_order
        return self.difference if along is None else distance(self.log_prob, along)

    @property
    def independent(self) -> bool:
        """True if the second score is not that of the run's own code."""
        return self.again.route != ALONE

    @property
    def problems(self) -> list[str]:
        """The differences beyond float32 noise, as text. Nothing that the run reports excuses one."""
        found = []
        if self.difference > self.tolerance:
            found.append(f"{self.log_prob:.6f} nats, not {self.again.log_prob:.6f}")
        if self.again.other_picks:
            found.append(f"{self.again.other_picks} picks that are not the rule's")
        return [*found, *self.again.problems]

    @property
    def differs(self) -> bool:
        """True if anything differs by more than float32 noise."""
        return bool(self.problems)


def describe(checked: Sequence[CheckedWindow]) -> dict[str, Any]:
    """The comparison of at least one window, for the results JSON; null for a largest difference that is infinite."""
    largest, order = (
        max(checked, key=key) for key in (lambda each: each.difference, lambda each: each.order_difference)
    )
    values = f"{largest.log_prob:.6f} in the run, {largest.again.log_prob:.6f} by {largest.again.route}"
    return {
        "windows": len(checked),
        "tokens": sum(each.tokens for each in checked),
        "routes": dict(Counter(each.again.route for each in checked)),
        "not_checked_independently": sum(not each.independent for each in checked),
        "largest_difference": largest.difference if math.isfinite(largest.difference) else None,
        "largest_order_difference": order.order_difference if math.isfinite(order.order_difference) else None,
        "where": f"{largest.where}: {values}",
        "changed_picks": sum(each.again.other_picks or 0 for each in checked),
        "ties": sum(each.again.ties or 0 for each in checked),
        "differing_windows": sum(each.differs for each in checked),
    }


def summary(checked: Sequence[CheckedWindow]) -> str:
    """A summary of the comparison of at least one window, for the log."""
    of, order = describe(checked), max(checked, key=lambda each: each.order_difference)
    routes = ", ".join(f"{count} by {route}" for route, count in of["routes"].items())
    alone = of["not_checked_independently"]
    return (
        f"verify: {of['windows']} windows scored again in float32 ({routes}): largest difference "
        f"{order.order_difference:.3g} nats along the rule's order in float32 ({order.where}), "
        f"{max(each.difference for each in checked):.3g} nats along the run's order ({of['where']}); "
        f"{of['changed_picks']} picks are not the rule's and {of['ties']} are its ties; "
        f"{of['differing_windows']} windows differ by more than float32 noise"
        + (f"; {alone} not checked independently" if alone else "")
    )


def distance(one: float, other: float) -> float:
    """The absolute difference; 0 if both are -infinity, and infinite if one is not a number."""
    difference = 0.0 if one == other else abs(one - other)
    return math.inf if math.isnan(difference) else difference
