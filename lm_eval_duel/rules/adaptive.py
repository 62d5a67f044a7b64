"""Rules that reveal as many positions as are safe, at least one, so that the number of steps depends on the text."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from lm_eval_duel.arguments import TRUTH, argument, number, required
from lm_eval_duel.rules.base import (
    Decision,
    Rule,
    Thresholded,
    log_odds,
    near_probability,
    sure_or_best,
)

if TYPE_CHECKING:
    from lm_eval_duel.core.lanes import Lanes
    from lm_eval_duel.core.predictions import Predictions


@dataclasses.dataclass(frozen=True)
class Threshold(Thresholded, name="threshold", label="Conf. Thresh.", state_only=True):
    """All positions with P1 >= mu (`strict`: P1 > mu), or else the single most confident one (Wu et al. 2025)."""

    strict: bool = argument(TRUTH, False, "positions with P1 = mu are not revealed", optional=True)

    def __call__(self, predictions: Predictions, lanes: Lanes) -> Decision:
        confidence, bound = predictions.confidence, log_odds(self.mu)  # (R, W)
        sure = lanes.masked & (confidence > bound if self.strict else confidence >= bound)  # (R, W)
        distance = near_probability(confidence, lanes.masked, self.mu)  # (R,)
        return Decision(*sure_or_best(predictions, lanes, sure, distance))


@dataclasses.dataclass(frozen=True)
class EntropyBound(Rule, name="entropy_bound", label="Entropy Bound", adaptive=True, speed=("gamma",), state_only=True):
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
        spent = ascending.cumsum(1)  # (R, W) the sum that is compared with gamma: of those before, or with its own
        if not self.inclusive:
            spent = spent.roll(1, 1)
            spent[:, 0] = 0
        inside = spent < self.gamma if self.inclusive else spent <= self.gamma  # (R, W) a prefix
        inside[:, 0] = True
        inside &= masked.gather(1, order)
        pick = torch.zeros_like(masked).scatter(1, order, inside)  # (R, W)

        count = inside.sum(1, keepdim=True)  # (R, 1)
        last, following = count - 1, count.clamp(max=masked.shape[1] - 1)
        more = count[:, 0] < masked.sum(1)  # (R,) some stay masked
        below = (self.gamma - spent.gather(1, last)) / (2 * spent.gather(1, last))
        above = (spent.gather(1, following) - self.gamma) / (2 * spent.gather(1, following))
        gap = (ascending.gather(1, following) - ascending.gather(1, last)) / (2 * ascending.gather(1, following))
        gap = torch.where(predictions.all_mask[:, None], math.inf, gap)
        below = torch.where(count > 1, below, math.inf)[:, 0]  # the first is always taken
        rest = torch.where(more, above.minimum(gap)[:, 0], math.inf)
        return Decision(pick, below.minimum(rest).nan_to_num(nan=0.0, posinf=math.inf))
