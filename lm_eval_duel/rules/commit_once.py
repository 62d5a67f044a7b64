"""The rules of the commit-once samplers of DiffusionGemma: diffusers' default scheduler, and mlx-vlm's default.

Both have a number of steps in which a block is finished. `presets.py` names the sources.

Shapes: R lanes, W block width.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from lm_eval_duel.arguments import PROBABILITY, required, whole
from lm_eval_duel.rules.base import Decision, Rule, Thresholded, best, log_odds, near_probability, sure_or_best
from lm_eval_duel.rules.deployed import STEPS, first_count

if TYPE_CHECKING:
    from lm_eval_duel.core.lanes import Lanes
    from lm_eval_duel.core.predictions import Predictions

# Every step is a network call, and with more steps than positions most of them reveal nothing.
WAITING_STEPS = whole(1, "a number of steps", most=4096)


@dataclasses.dataclass(frozen=True)
class CumulativeQuota(
    Rule,
    name="cumulative_quota",
    label="Cum. Quota",
    adaptive=True,
    speed=("steps", "tau"),
    reads_step=True,
    may_pick_none=True,
):
    """The most confident positions, until ceil((i + 1) m / S) of a block's m are revealed after step i of S; and all
    with P1 > tau (diffusers' BlockRefinementScheduler on DiffusionGemma).

    A step reveals nothing if earlier ones were ahead of the quota and no position passes tau. Where the noise is random
    tokens the next step shows other noise. m counts the positions of the block, no tail.
    """

    steps: int = required(WAITING_STEPS, "steps of a block", 48)
    tau: float = required(PROBABILITY, "the probability above which positions are revealed", 0.95)

    def __call__(self, predictions: Predictions, lanes: Lanes) -> Decision:
        m = first_count(lanes)  # (R, W)
        total = m[:, :1]  # (R, 1)
        left = lanes.masked.sum(1, keepdim=True)  # (R, 1)
        due = -(-(lanes.step[:, None] + 1) * total // self.steps)  # (R, 1) rounded up
        needed = (due.minimum(total) - (total - left)).clamp(min=0)  # (R, 1)
        top, gap = best(predictions, lanes, predictions.confidence, needed)
        high = lanes.masked & (predictions.confidence > log_odds(self.tau))  # (R, W)
        distance = near_probability(predictions.confidence, lanes.masked & ~top, self.tau)  # (R,)
        # where more positions pass tau than are needed, the order of those does not count
        ahead = high.sum(1) >= needed[:, 0]  # (R,)
        near = near_probability(predictions.confidence, lanes.masked, self.tau)  # (R,)
        return Decision(top | high, near.where(ahead, gap.minimum(distance)), (m,))


@dataclasses.dataclass(frozen=True)
class ThresholdUntil(
    Thresholded, name="threshold_until", label="Thresh. until", speed=("mu", "steps"), reads_step=True
):
    """All positions with P1 >= mu, or else the most confident one; at the last of `steps` steps all that are left
    (mlx-vlm on DiffusionGemma)."""

    steps: int = required(STEPS, "steps of a block", 48)

    def __call__(self, predictions: Predictions, lanes: Lanes) -> Decision:
        confidence = predictions.confidence  # (R, W)
        sure = lanes.masked & (confidence >= log_odds(self.mu))  # (R, W)
        distance = near_probability(confidence, lanes.masked, self.mu)  # (R,)
        pick, margin = sure_or_best(predictions, lanes, sure, distance)
        last = lanes.step >= self.steps - 1  # (R,)
        return Decision(pick | (lanes.masked & last[:, None]), margin.masked_fill(last, math.inf))
