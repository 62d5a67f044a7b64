"""The parallel rules of mlx-vlm, for Nemotron-Labs-Diffusion and LLaDA2.

Let c_0 >= c_1 >= ... be the confidences P1 of a lane's masked positions, equal ones in the order of positions. The
rules for Nemotron reveal these positions as long as c_r is above a bound that may depend on the rank r, and the best
position always. `presets.py` names the source.

Shapes: R lanes, W block width.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from lm_eval_duel.arguments import PROBABILITY, argument, number, required, whole
from lm_eval_duel.errors import DuelError
from lm_eval_duel.rules.base import (
    LOG_ODDS_SLOPE,
    Decision,
    Rule,
    Thresholded,
    best,
    log_odds,
    nearest,
    sure_or_best,
)

if TYPE_CHECKING:
    import torch

    from lm_eval_duel.core.lanes import Lanes
    from lm_eval_duel.core.predictions import Predictions

LEAST = 1e-12  # the least product that `cumulative_error` asks for
FACTOR = number("a number of at least 0", lambda x: 0 <= x < math.inf)


def descending(predictions: Predictions, lanes: Lanes) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-odds of c_0 >= c_1 >= ... (R, W) float64, -inf behind the masked positions, and where there are any."""
    import torch

    confidence = torch.where(lanes.masked, predictions.confidence.double(), -math.inf)  # (R, W)
    ordered = confidence.sort(dim=1, descending=True).values  # (R, W)
    ranks = torch.arange(ordered.shape[1], device=ordered.device)  # (W,)
    return ordered, ranks < lanes.masked.sum(1, keepdim=True)


def rank_bounds(factor: float, ordered: torch.Tensor) -> torch.Tensor:
    """The log-odds of 1 - f / (r + 2) for the ranks r = 0, 1, ..., (W,)."""
    bounds = [log_odds(1 - factor / (r + 2)) for r in range(ordered.shape[1])]
    return ordered.new_tensor(bounds)


def first_ranks(
    predictions: Predictions, lanes: Lanes, enough: torch.Tensor, distance: torch.Tensor, ranked: torch.Tensor
) -> Decision:
    """Reveal the positions of rank 0 and of the ranks before the first that is not `enough` (R, W).

    `distance` (R, W): the change of logits after which a rank becomes, or ceases to be, enough.
    """
    import torch

    enough = enough & ranked
    enough[:, 0] = True  # the best position, always
    count = enough.long().cumprod(1).sum(1, keepdim=True)  # (R, 1)
    pick, gap = best(predictions, lanes, predictions.confidence, count)

    # The ranks up to the first that is not enough decide; rank 0 decides nothing.
    ranks = torch.arange(enough.shape[1], device=enough.device)  # (W,)
    decides = ranked & (ranks > 0) & (ranks <= count)  # (R, W)
    return Decision(pick, gap.minimum(nearest(distance.nan_to_num(nan=math.inf), decides)))


@dataclasses.dataclass(frozen=True)
class ThresholdFixed(Thresholded, name="threshold_fixed", label="Conf. Thresh. (at most n)", state_only=True):
    """Of the n most confident positions those with P1 >= mu, and always the best (mlx-vlm's `fixed`)."""

    n: int = argument(whole(1, "a number of positions"), 1, "the most positions that a step reveals")

    def __call__(self, predictions: Predictions, lanes: Lanes) -> Decision:
        import torch

        ordered, ranked = descending(predictions, lanes)  # (R, W)
        away = ordered - log_odds(self.mu)  # (R, W)
        ranks = torch.arange(ordered.shape[1], device=ordered.device)  # (W,)
        inside = ranks < self.n  # (W,)
        distance = torch.where(inside, away / LOG_ODDS_SLOPE, math.inf)
        return first_ranks(predictions, lanes, (away >= 0) & inside, distance, ranked)


@dataclasses.dataclass(frozen=True)
class ThresholdRef(Thresholded, name="threshold_ref", label="Conf. Thresh. and Factor", state_only=True):
    """The longest prefix of c_0 >= c_1 >= ... with c_r >= mu and c_r >= 1 - f / (r + 2), and always the best
    (mlx-vlm's `confidence_threshold_ref`).
    """

    f: float = argument(FACTOR, 1.0, "the factor f of the bound by rank")

    def __call__(self, predictions: Predictions, lanes: Lanes) -> Decision:
        ordered, ranked = descending(predictions, lanes)  # (R, W)
        bound = rank_bounds(self.f, ordered).clamp(min=log_odds(self.mu))  # (W,)
        distance = (ordered - bound) / LOG_ODDS_SLOPE
        return first_ranks(predictions, lanes, ordered >= bound, distance, ranked)


@dataclasses.dataclass(frozen=True)
class ThresholdBound(Thresholded, name="threshold_bound", label="Conf. Thresh. or Factor", state_only=True):
    """All with c_r >= mu, or with c_r >= floor and c_r >= 1 - f / (r + 2), and always the best (mlx-vlm's
    `confidence_threshold_bound`).
    """

    floor: float = argument(PROBABILITY, 0.45, "the least P1 at which the bound by rank can reveal a position")
    f: float = argument(FACTOR, 2.0, "the factor f of the bound by rank")

    def __call__(self, predictions: Predictions, lanes: Lanes) -> Decision:
        ordered, ranked = descending(predictions, lanes)  # (R, W)
        # c_r falls with r and the bound by rank rises, so the positions revealed are the first ones, as for a prefix
        bound = rank_bounds(self.f, ordered).clamp(min=log_odds(self.floor)).clamp(max=log_odds(self.mu))  # (W,)
        distance = (ordered - bound) / LOG_ODDS_SLOPE
        return first_ranks(predictions, lanes, ordered >= bound, distance, ranked)


@dataclasses.dataclass(frozen=True)
class CumulativeError(Thresholded, name="cumulative_error", label="Cumulative Error", state_only=True):
    """The longest prefix of c_0 >= c_1 >= ... with c_0 c_1 ... c_r >= mu, and always the best (mlx-vlm's
    `cumulative_error`).
    """

    def __call__(self, predictions: Predictions, lanes: Lanes) -> Decision:
        import torch

        ordered, ranked = descending(predictions, lanes)  # (R, W)
        log_p = torch.where(ranked, torch.nn.functional.logsigmoid(ordered), 0.0)  # (R, W) log c_r
        product = log_p.cumsum(1)  # (R, W)
        slope = (2 * ordered.neg().sigmoid()).cumsum(1)  # (R, W) the L1 norm of d(log c_r)/d(logits) is 2 (1 - c_r)
        away = product - math.log(max(self.mu, LEAST))  # (R, W)
        return first_ranks(predictions, lanes, away >= 0, away / slope, ranked)


@dataclasses.dataclass(frozen=True)
class FallingThreshold(
    Rule, name="falling_threshold", label="Falling Thresh.", adaptive=True, speed=("mu",), reads_step=True
):
    """All positions with P1 > mu_i at step i of a block, or else the single most confident one, where
    mu_i = mu - (mu - low) i / (steps - 1) falls to `low` and stays there (mlx-vlm's LLaDA2 with `min_threshold`).
    """

    mu: float = required(PROBABILITY, "the bound of P1 at a block's first step", 0.95)
    low: float = required(PROBABILITY, "the bound of P1 at step `steps`, at most mu", 0.5)
    steps: int = argument(whole(1, "a number of steps"), 32, "the steps over which the bound falls")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low > self.mu:
            raise DuelError(f"Rule '{self.name}' needs low of at most mu={self.mu}; it is {self.low}.")

    def __call__(self, predictions: Predictions, lanes: Lanes) -> Decision:
        progress = (lanes.step.double() / max(1, self.steps - 1)).clamp(max=1)  # (R,)
        bound = (self.mu - (self.mu - self.low) * progress).logit()[:, None]  # (R, 1) log-odds
        away = predictions.confidence.double() - bound  # (R, W)
        distance = nearest(away, lanes.masked) / LOG_ODDS_SLOPE  # (R,)
        return Decision(*sure_or_best(predictions, lanes, lanes.masked & (away > 0), distance))
