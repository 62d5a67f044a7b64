"""The rules of the paper: fixed orders, the k best positions by one score, and as many positions as are safe.

Rules of the last kind reveal at least one position, and their number of steps depends on the text.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from lm_eval_duel.arguments import INTEGER, TRUTH, argument, number, required
from lm_eval_duel.core.hashing import hashed
from lm_eval_duel.rules.base import (
    LOG_ODDS_SLOPE,
    Counted,
    Decision,
    Rule,
    Thresholded,
    best,
    log_odds,
    near_probability,
    rank,
    sure_or_best,
)

if TYPE_CHECKING:
    import torch

    from lm_eval_duel.core.lanes import Lanes
    from lm_eval_duel.core.predictions import Predictions

    Score = tuple[torch.Tensor, torch.Tensor | float]  # of each position (R, W), and its steepest slope in logits


@dataclasses.dataclass(frozen=True)
class LeftToRight(Counted, name="left_to_right", state_only=True, fixed=True):
    """The first k masked positions."""

    def __call__(self, predictions: Predictions | None, lanes: Lanes) -> Decision:
        return Decision.certain(lanes.masked & (lanes.masked.cumsum(1) <= self.k))


@dataclasses.dataclass(frozen=True)
class RightToLeft(Counted, name="right_to_left", state_only=True, fixed=True):
    """The last k masked positions."""

    def __call__(self, predictions: Predictions | None, lanes: Lanes) -> Decision:
        from_right = lanes.masked.flip(1).cumsum(1).flip(1)  # (R, W) masked positions up to each one
        return Decision.certain(lanes.masked & (from_right <= self.k))


@dataclasses.dataclass(frozen=True)
class Random(Counted, name="random", state_only=True, fixed=True):
    """The k masked positions with the smallest hash(seed, target index).

    The order looks random and is fixed by the seed, so the likelihood is exact.
    """

    seed: int = argument(INTEGER, 0, "seed of the order")

    def __call__(self, predictions: Predictions | None, lanes: Lanes) -> Decision:
        import torch

        index = lanes.columns - lanes.origin[:, None]  # (R, W)
        key = torch.where(lanes.masked, hashed(index, self.seed), torch.iinfo(torch.int64).max)  # (R, W)
        return Decision.certain(lanes.masked & (rank(key) < self.k))


@dataclasses.dataclass(frozen=True)
class Scored(Counted, state_only=True):
    """The base class of rules that reveal the k masked positions with the largest `score`."""

    @staticmethod
    def score(predictions: Predictions) -> Score:
        raise NotImplementedError

    def __call__(self, predictions: Predictions, lanes: Lanes) -> Decision:
        score, slope = self.score(predictions)
        return Decision(*best(predictions, lanes, score, self.k, slope))


@dataclasses.dataclass(frozen=True)
class Greedy(Scored, name="greedy"):
    """The k positions with the largest P1 (the top token's probability), as log-odds, which do not saturate."""

    @staticmethod
    def score(predictions: Predictions) -> Score:
        return predictions.confidence, LOG_ODDS_SLOPE


@dataclasses.dataclass(frozen=True)
class Margin(Scored, name="margin"):
    """The k positions with the largest P1 - P2, a difference of probabilities, as in the paper."""

    @staticmethod
    def score(predictions: Predictions) -> Score:
        rest = predictions.confidence.double().neg().sigmoid()  # (R, W) 1 - P1
        p1 = 1 - rest  # (R, W)
        p2 = p1 * predictions.log_margin.double().neg().exp()  # (R, W)
        # 1 - (P1 - P2): its negative orders like the margin, and keeps its digits where the margin rounds to 1
        below = rest + p2  # (R, W)

        # the L1 norm of d(P1 - P2)/d(logits): the logits of the first, of the second, and of all other tokens
        slope_of_first = p1 * below
        slope_of_second = p2 * (1 - p2 + p1)
        slope_of_others = (1 - below) * (rest - p2).clamp(min=0)
        return -below, slope_of_first + slope_of_second + slope_of_others


@dataclasses.dataclass(frozen=True)
class LogMargin(Scored, name="log_margin"):
    """The k positions with the largest log P1 - log P2, which the authors' code for 8B models calls margin."""

    @staticmethod
    def score(predictions: Predictions) -> Score:
        return predictions.log_margin, LOG_ODDS_SLOPE


@dataclasses.dataclass(frozen=True)
class Entropy(Scored, name="entropy"):
    """The k positions with the smallest entropy."""

    @staticmethod
    def score(predictions: Predictions) -> Score:
        entropy = predictions.entropy  # (R, W)
        return -entropy, 2 * entropy


@dataclasses.dataclass(frozen=True)
class Threshold(Thresholded, name="threshold", state_only=True):
    """All positions with P1 >= mu (`strict`: P1 > mu), or else the single most confident one (Wu et al. 2025)."""

    strict: bool = argument(TRUTH, False, "positions with P1 = mu are not revealed", optional=True)

    def __call__(self, predictions: Predictions, lanes: Lanes) -> Decision:
        confidence = predictions.confidence  # (R, W)
        bound = log_odds(self.mu)
        sure = lanes.masked & (confidence > bound if self.strict else confidence >= bound)  # (R, W)
        distance = near_probability(confidence, lanes.masked, self.mu)  # (R,)
        return Decision(*sure_or_best(predictions, lanes, sure, distance))


@dataclasses.dataclass(frozen=True)
class EntropyBound(Rule, name="entropy_bound", adaptive=True, speed=("gamma",), state_only=True):
    """Positions by ascending entropy, while the sum of the entropies before is at most gamma (Ben-Hamu et al. 2025).

    `inclusive`: while the sum with the position's own entropy is below gamma, and always the first, as in JetEngine.
    """

    gamma: float = required(
        number("a sum of entropies in nats, at least 0", lambda x: x >= 0), "the largest sum of entropies", 0.1
    )
    inclusive: bool = argument(
        TRUTH,
        False,
        "the sum includes the position's own entropy, and is below gamma, as in JetEngine",
        optional=True,
    )

    def __call__(self, predictions: Predictions, lanes: Lanes) -> Decision:
        import torch

        masked = lanes.masked
        entropy = torch.where(masked, predictions.entropy.double(), math.inf)  # (R, W)
        ascending, order = entropy.sort(dim=1, stable=True)
        # the sum that is compared with gamma: with the position's own entropy, or without
        spent = ascending.cumsum(1)  # (R, W)
        if not self.inclusive:
            spent = spent.roll(1, 1)
            spent[:, 0] = 0
        inside = spent < self.gamma if self.inclusive else spent <= self.gamma  # (R, W) the first ranks
        inside[:, 0] = True
        inside &= masked.gather(1, order)
        pick = torch.zeros_like(masked).scatter(1, order, inside)  # (R, W)

        # the rank of the last position that is revealed, and of the first that is not
        count = inside.sum(1, keepdim=True)  # (R, 1)
        last = count - 1  # (R, 1)
        following = count.clamp(max=masked.shape[1] - 1)  # (R, 1)
        some_stay = count[:, 0] < masked.sum(1)  # (R,)

        # The pick changes if the last position passes gamma, if the following one no longer does, or if the two change
        # places. An entropy H moves by at most 2 H for each unit of logits.
        spent_last = spent.gather(1, last)  # (R, 1)
        spent_following = spent.gather(1, following)
        entropy_last = ascending.gather(1, last)
        entropy_following = ascending.gather(1, following)
        below = (self.gamma - spent_last) / (2 * spent_last)
        above = (spent_following - self.gamma) / (2 * spent_following)
        gap = (entropy_following - entropy_last) / (2 * entropy_following)
        gap = torch.where(predictions.all_mask[:, None], math.inf, gap)  # an exact tie by definition
        margin_of_last = torch.where(count > 1, below, math.inf)[:, 0]  # (R,) the first rank is always revealed
        margin_of_following = torch.where(some_stay, above.minimum(gap)[:, 0], math.inf)  # (R,)
        margin = margin_of_last.minimum(margin_of_following)  # (R,)
        return Decision(pick, margin.nan_to_num(nan=0.0, posinf=math.inf))
