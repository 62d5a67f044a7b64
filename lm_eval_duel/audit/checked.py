"""A window that was scored twice: both values, and what differs between them.

`problems` is the judgement that everything else counts: a window differs if it has any. Nothing that the run says of
itself, such as a near tie, takes a problem away.
"""

from __future__ import annotations

import dataclasses
import math

from lm_eval_duel.core.float_noise import nats_tolerance
from lm_eval_duel.core.scores import Score
from lm_eval_duel.core.windows import Window
from lm_eval_duel.errors import counted, told_apart

# How the second score was computed; recompute.py chooses.
REFERENCE = "reference"
RUNS_RULE = "reference with the run's rule"
ALONE = "run alone"


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
    first_other_pick: str = ""  # the state at which it first does so, in words


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
        own_order = self.again.own_order
        return self.difference if own_order is None else distance(self.log_prob, own_order)

    @property
    def right_log_prob(self) -> float:
        """The value by the second score: where the rule picks otherwise than the run, along its own order."""
        own_order = self.again.own_order
        if self.again.other_picks and own_order is not None:
            return own_order
        return self.again.log_prob

    @property
    def independent(self) -> bool:
        """True if the second score is not that of the run's own code."""
        return self.again.route != ALONE

    @property
    def all_zero(self) -> bool:
        """True if the run has no finite value here, of the window or of a token: equal zeros say nothing."""
        tokens = self.score.token_logprobs if self.score is not None else ()
        return not any(map(math.isfinite, (self.log_prob, *tokens)))

    @property
    def problems(self) -> list[str]:
        """The differences beyond float32 noise, as text."""
        problems = []
        if self.difference > self.tolerance:
            run, again = told_apart(self.log_prob, self.again.log_prob)
            problems.append(f"{run} nats, not {again}")
        if self.again.other_picks:
            first = f" (first {self.again.first_other_pick})" if self.again.first_other_pick else ""
            problems.append(f"{counted(self.again.other_picks, 'pick')} other than the rule's{first}")
        return [*problems, *self.again.problems]

    @property
    def differs(self) -> bool:
        """True if anything differs by more than float32 noise."""
        return bool(self.problems)


def distance(one: float, other: float) -> float:
    """The absolute difference; 0 if both are the same infinity, and infinite if one is not a number."""
    if one == other:
        return 0.0
    difference = abs(one - other)
    return math.inf if math.isnan(difference) else difference


def unequal(pairs: dict[str, tuple[float, float]], noise: float) -> list[str]:
    """The values, in the run and by the reference, that differ by more than `noise`, as text."""
    problems = []
    for name, (run, again) in pairs.items():
        if distance(run, again) > noise:
            of_run, expected = told_apart(run, again)
            problems.append(f"{name} is {of_run}, not {expected}")
    return problems
