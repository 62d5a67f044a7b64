"""Rules that reveal as many positions as a criterion allows, as in published samplers.

All reveal at least one position at a step; `presets.py` names the sources. The rules of mlx-vlm, for
Nemotron-Labs-Diffusion, come last. They sort the masked positions of a lane by P1, c_0 >= c_1 >= ..., equal ones by
position, and reveal the first of them as long as c_r is above a bound that may depend on the rank r.

Shapes: R lanes, W block width.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Literal

from lm_eval_duel.arguments import PROBABILITY, argument, choice, declared, number, required, whole
from lm_eval_duel.errors import DuelError
from lm_eval_duel.rules.base import (
    LOG_ODDS_SLOPE,
    Decision,
    Rule,
    Thresholded,
    best,
    log_odds,
    near_probability,
    nearest,
    sure_or_best,
)

if TYPE_CHECKING:
    import torch

    from lm_eval_duel.core.lanes import Lanes
    from lm_eval_duel.core.predictions import Predictions

SLACK = 1e-5  # in dInfer's threshold: how far below the largest probability still counts as the largest
LEAST = 1e-12  # the least product that `cumulative_error` asks for

POSITIONS = whole(1, "a number of positions")
Variant = Literal["a", "b", "c"]


def descending(predictions: Predictions, lanes: Lanes) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-odds of c_0 >= c_1 >= ..., float64, and which ranks a lane has, (R, W) each; -inf at all others."""
    import torch

    confidence = torch.where(lanes.masked, predictions.confidence.double(), -math.inf)  # (R, W)
    ordered = confidence.sort(dim=1, descending=True).values  # (R, W)
    ranks = torch.arange(ordered.shape[1], device=ordered.device)  # (W,)
    ranked = ranks < lanes.masked.sum(1, keepdim=True)  # (R, W)
    return ordered, ranked


def rank_bounds(factor: float, ordered: torch.Tensor) -> torch.Tensor:
    """The log-odds of 1 - f / (r + 2) for the ranks r = 0, 1, ..., (W,)."""
    bounds = [log_odds(1 - factor / (r + 2)) for r in range(ordered.shape[1])]
    return ordered.new_tensor(bounds)


@dataclasses.dataclass(frozen=True)
class EntropyThreshold(Rule, name="entropy_threshold", adaptive=True, speed=("tau",), state_only=True):
    """All positions with entropy <= tau, and always the one with the least (dParallel, d3LLM)."""

    tau: float = required(
        number("an entropy in nats, at least 0", lambda x: 0 <= x < math.inf),
        "the largest entropy",
        0.5,
    )

    def __call__(self, predictions: Predictions, lanes: Lanes) -> Decision:
        entropy = predictions.entropy.double()  # (R, W)
        sure = lanes.masked & (entropy <= self.tau)  # (R, W)
        # an entropy H moves by at most 2 H for each unit of logits
        slope_near_tau = 2 * entropy.clamp(min=max(self.tau, 1e-12))  # (R, W)
        distance = nearest((entropy - self.tau) / slope_near_tau, lanes.masked)  # (R,)
        pick, margin = sure_or_best(predictions, lanes, sure, distance, -entropy, 2 * entropy)
        return Decision(pick, margin)


@dataclasses.dataclass(frozen=True)
class Factor(Rule, name="factor", adaptive=True, speed=("f",), state_only=True):
    """The most confident positions, c_1 >= c_2 >= ..., as many as 1 + the number of ranks r >= 2 with
    c_r >= 1 - f / (r + 1) (Fast-dLLM's factor: Wu et al. 2025, section 3.3).

    The published codes differ at the end of a block. With k the count and m masked positions, `variant` is "a"
    (Fast-dLLM, dInfer, PC-Sampler): m if k = m - 1; "b" (dllm): k; "c" (d2Cache): with > for >=, m - 1 if k = m >= 2.
    """

    f: float = required(number("a number above 0", lambda x: x > 0), "the factor f of the rule", 1.0)
    variant: Variant = argument(
        choice(Variant), "a", "borders as in `a`: Fast-dLLM, dInfer, PC-Sampler; `b`: dllm; `c`: d2Cache"
    )

    def __call__(self, predictions: Predictions, lanes: Lanes) -> Decision:
        import torch

        ordered, ranked = descending(predictions, lanes)  # (R, W)
        # the best position is always revealed, so the others decide
        later = ordered[:, 1:]  # (R, W - 1) ranks 2, 3, ..., counted from 1 here
        ranked = ranked[:, 1:]  # (R, W - 1)
        bound = rank_bounds(self.f, ordered)[1:]  # (W - 1,)
        m = lanes.masked.sum(1, keepdim=True)  # (R, 1)
        enough = later > bound if self.variant == "c" else later >= bound  # (R, W - 1)
        k = 1 + (enough & ranked).sum(1, keepdim=True)  # (R, 1)
        if self.variant == "a":
            k = torch.where(k == m - 1, m, k)
        elif self.variant == "c":
            k = torch.where((k == m) & (m >= 2), m - 1, k)
        pick, gap = best(predictions, lanes, predictions.confidence, k)
        if ordered.shape[1] == 1:  # there is no rank 2
            return Decision(pick, gap)
        distance = nearest(later - bound, ranked) / LOG_ODDS_SLOPE  # (R,)
        return Decision(pick, gap.minimum(distance))


@dataclasses.dataclass(frozen=True)
class HighOrTopk(Rule, name="high_or_topk", adaptive=True, speed=("tau",), state_only=True):
    """All positions with P1 > tau if there are at least n of them, else the n most confident ones (LLaDA2)."""

    n: int = required(POSITIONS, "the least number of positions revealed at a step", 1)
    tau: float = required(PROBABILITY, "the probability above which positions are revealed", 0.9)

    def __call__(self, predictions: Predictions, lanes: Lanes) -> Decision:
        import torch

        high = lanes.masked & (predictions.confidence > log_odds(self.tau))  # (R, W)
        distance = near_probability(predictions.confidence, lanes.masked, self.tau)  # (R,)
        top, gap = best(predictions, lanes, predictions.confidence, self.n)
        enough = high.sum(1) >= self.n  # (R,)
        pick = torch.where(enough[:, None], high, top)  # (R, W)
        return Decision(pick, torch.where(enough, distance, distance.minimum(gap)))


@dataclasses.dataclass(frozen=True)
class DinferThreshold(Thresholded, name="dinfer_threshold", state_only=True):
    """All positions with P1 >= min(mu, the largest P1 - 1e-5), as in dInfer.

    Unlike `threshold`, it reveals every position that is as confident as the best one: a whole block at an all-mask
    start, where all positions tie.
    """

    def __call__(self, predictions: Predictions, lanes: Lanes) -> Decision:
        import torch

        masked = lanes.masked
        confidence = predictions.confidence.double()  # (R, W)
        p = torch.where(masked, confidence.sigmoid(), -1.0)  # (R, W)
        top, top_at = p.max(1, keepdim=True)  # (R, 1)
        bound = (top - SLACK).clamp(max=self.mu)  # (R, 1)
        pick = masked & (p >= bound)  # (R, W)

        # mu decides where it is below the largest P1: then a P1 has to cross mu
        mu_decides = top[:, 0] - SLACK > self.mu  # (R,)
        near_mu = near_probability(confidence, masked, self.mu)  # (R,)

        # elsewhere a P1 has to cross a bound that moves with the largest one
        slope = 2 * p * (1 - p)  # (R, W) the L1 norm of dP1/d(logits)
        steepest = slope.maximum(slope.gather(1, top_at))  # (R, W)
        is_other = torch.ones_like(masked).scatter(1, top_at, False) & masked  # (R, W)
        near_top = nearest((p - bound) / steepest, is_other)  # (R,)
        near_top = near_top.nan_to_num(nan=math.inf, posinf=math.inf)
        near_top = near_top.masked_fill(predictions.all_mask, math.inf)  # an exact tie by definition
        return Decision(pick, torch.where(mu_decides, near_mu, near_top))


@dataclasses.dataclass(frozen=True)
class Hierarchy(Rule, name="hierarchy", adaptive=True, speed=("tau",), state_only=True):
    """The best position of each run of neighbouring masked ones, if P1 > low; all with P1 > tau; and always the best.

    As in dInfer's HierarchyDecoder, equal best positions of a run are all revealed, not the lowest alone.
    """

    low: float = argument(PROBABILITY, 0.4, "the probability above which the best of a run is revealed")
    tau: float | None = argument(PROBABILITY, None, "the probability above which every position is revealed")

    def __call__(self, predictions: Predictions, lanes: Lanes) -> Decision:
        import torch

        masked = lanes.masked
        confidence = torch.where(masked, predictions.confidence.double(), -math.inf)  # (R, W)
        low = log_odds(self.low)

        # runs of neighbouring masked positions, numbered from 1; 0 is outside
        begins = masked & ~torch.nn.functional.pad(masked[:, :-1], (1, 0))  # (R, W)
        run = torch.where(masked, begins.cumsum(1), 0)  # (R, W)
        count, width = masked.shape
        peaks = confidence.new_full((count, width + 1), -math.inf)  # (R, W + 1) by the number of the run
        peaks = peaks.scatter_reduce(1, run, confidence, "amax")
        peak = peaks.gather(1, run)  # (R, W) of each position's run

        is_peak = masked & (confidence == peak)  # (R, W)
        sure = is_peak & (confidence > low)  # (R, W)
        distance = nearest(confidence - low, is_peak)  # (R,)
        if self.tau is not None:
            tau = log_odds(self.tau)
            sure |= masked & (confidence > tau)
            distance = distance.minimum(nearest(confidence - tau, masked))

        # a position that is not the peak of its run becomes one if it gains what it lacks; of two equal peaks, one may
        # cease to be one
        peak_counts = torch.zeros_like(peaks).scatter_add(1, run, is_peak.double())  # (R, W + 1)
        has_equal = peak_counts.gather(1, run) > 1  # (R, W)
        may_change = masked & (~is_peak | has_equal) & (peak > low)  # (R, W)
        gap = nearest(peak - confidence, may_change)  # (R,)
        gap = gap.masked_fill(predictions.all_mask, math.inf)  # an exact tie by definition
        margin = distance.minimum(gap) / LOG_ODDS_SLOPE  # (R,)
        return Decision(*sure_or_best(predictions, lanes, sure, margin))


# ---------------------------------------------------------------- by rank (mlx-vlm)


FACTOR = number("a number of at least 0", lambda x: 0 <= x < math.inf)


def first_ranks(
    predictions: Predictions,
    lanes: Lanes,
    enough: torch.Tensor,
    distance: torch.Tensor,
    ranked: torch.Tensor,
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
    distance = distance.nan_to_num(nan=math.inf)  # -inf less -inf, beyond the masked positions
    return Decision(pick, gap.minimum(nearest(distance, decides)))


@dataclasses.dataclass(frozen=True)
class ThresholdFixed(Thresholded, name="threshold_fixed", state_only=True):
    """Of the n most confident positions those with P1 >= mu, and always the best (mlx-vlm's `fixed`)."""

    n: int = argument(POSITIONS, 1, "the most positions that a step reveals")

    def __call__(self, predictions: Predictions, lanes: Lanes) -> Decision:
        import torch

        ordered, ranked = descending(predictions, lanes)  # (R, W)
        away = ordered - log_odds(self.mu)  # (R, W)
        ranks = torch.arange(ordered.shape[1], device=ordered.device)  # (W,)
        inside = ranks < self.n  # (W,)
        distance = torch.where(inside, away / LOG_ODDS_SLOPE, math.inf)
        return first_ranks(predictions, lanes, (away >= 0) & inside, distance, ranked)


@dataclasses.dataclass(frozen=True)
class ThresholdRef(Thresholded, name="threshold_ref", state_only=True):
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
class ThresholdBound(Thresholded, name="threshold_bound", state_only=True):
    """All with c_r >= mu, or with c_r >= floor and c_r >= 1 - f / (r + 2), and always the best (mlx-vlm's
    `confidence_threshold_bound`).
    """

    floor: float = argument(PROBABILITY, 0.45, "the least P1 at which the bound by rank can reveal a position")
    f: float = argument(FACTOR, 2.0, "the factor f of the bound by rank")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.floor > self.mu and self.floor != declared(self)["floor"].default:
            raise DuelError(
                f"'floor' of threshold_bound is at most its mu, above which every position is revealed anyway; got "
                f"floor={self.floor:g} and mu={self.mu:g}. Lower floor, or leave it out."
            )

    def __call__(self, predictions: Predictions, lanes: Lanes) -> Decision:
        ordered, ranked = descending(predictions, lanes)  # (R, W)
        # c_r falls with r and the bound by rank rises, so the positions revealed are the first ones, as for a prefix
        bound = rank_bounds(self.f, ordered)  # (W,)
        bound = bound.clamp(min=log_odds(self.floor)).clamp(max=log_odds(self.mu))
        distance = (ordered - bound) / LOG_ODDS_SLOPE
        return first_ranks(predictions, lanes, ordered >= bound, distance, ranked)


@dataclasses.dataclass(frozen=True)
class CumulativeError(Thresholded, name="cumulative_error", state_only=True):
    """The longest prefix of c_0 >= c_1 >= ... with c_0 c_1 ... c_r >= mu, and always the best (mlx-vlm's
    `cumulative_error`).
    """

    def __call__(self, predictions: Predictions, lanes: Lanes) -> Decision:
        import torch

        ordered, ranked = descending(predictions, lanes)  # (R, W)
        log_p = torch.where(ranked, torch.nn.functional.logsigmoid(ordered), 0.0)  # (R, W) log c_r
        product = log_p.cumsum(1)  # (R, W)
        # the L1 norm of d(log c_r)/d(logits) is 2 (1 - c_r)
        slope = (2 * ordered.neg().sigmoid()).cumsum(1)  # (R, W)
        away = product - math.log(max(self.mu, LEAST))  # (R, W)
        return first_ranks(predictions, lanes, away >= 0, away / slope, ranked)
