"""The parallel rules of published samplers, as in their code; `presets.py` has the sources.

Each reveals at least one position at a step.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Literal

from lm_eval_duel.arguments import PROBABILITY, argument, choice, number, required, whole
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
    from lm_eval_duel.core.lanes import Lanes
    from lm_eval_duel.core.predictions import Predictions

Variant = Literal["a", "b", "c"]
SLACK = 1e-5  # in dInfer's threshold: how far below the largest probability still counts as the largest


@dataclasses.dataclass(frozen=True)
class EntropyThreshold(
    Rule, name="entropy_threshold", label="Entropy Thresh.", adaptive=True, speed=("tau",), state_only=True
):
    """All positions with entropy <= tau, and always the one with the least (dParallel, d3LLM)."""

    tau: float = required(
        number("an entropy in nats, at least 0", lambda x: 0 <= x < math.inf), "the largest entropy", 0.5
    )

    def __call__(self, predictions: Predictions, lanes: Lanes) -> Decision:
        entropy = predictions.entropy.double()  # (R, W)
        sure = lanes.masked & (entropy <= self.tau)  # (R, W)
        slope = 2 * entropy.clamp(min=max(self.tau, 1e-12))  # (R, W) how fast an entropy near tau can move
        distance = nearest((entropy - self.tau) / slope, lanes.masked)  # (R,)
        return Decision(*sure_or_best(predictions, lanes, sure, distance, -entropy, 2 * entropy))


@dataclasses.dataclass(frozen=True)
class Factor(Rule, name="factor", label="Factor", adaptive=True, speed=("f",), state_only=True):
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

        masked = lanes.masked
        confidence = torch.where(masked, predictions.confidence.double(), -math.inf)  # (R, W)
        descending = confidence.sort(dim=1, descending=True).values[:, 1:]  # (R, W - 1) ranks 2, 3, ...
        bound = descending.new_tensor([log_odds(1 - self.f / (r + 1)) for r in range(2, masked.shape[1] + 1)])
        some = masked.sum(1, keepdim=True)  # (R, 1) m
        ranked = torch.arange(1, masked.shape[1], device=masked.device) < some  # (R, W - 1)
        enough = descending > bound if self.variant == "c" else descending >= bound  # (R, W - 1)
        k = 1 + (enough & ranked).sum(1, keepdim=True)  # (R, 1)
        if self.variant == "a":
            k = torch.where(k == some - 1, some, k)
        elif self.variant == "c":
            k = torch.where((k == some) & (some >= 2), some - 1, k)
        pick, gap = best(predictions, lanes, predictions.confidence, k)
        if masked.shape[1] == 1:
            return Decision(pick, gap)
        return Decision(pick, gap.minimum(nearest(descending - bound, ranked) / LOG_ODDS_SLOPE))


@dataclasses.dataclass(frozen=True)
class HighOrTopk(Rule, name="high_or_topk", label="High or Top-k", adaptive=True, speed=("tau",), state_only=True):
    """All positions with P1 > tau if there are at least n of them, else the n most confident ones (LLaDA2)."""

    n: int = required(whole(1, "a number of positions"), "the least number of positions revealed at a step", 1)
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
class DinferThreshold(Thresholded, name="dinfer_threshold", label="dInfer Thresh.", state_only=True):
    """All positions with P1 >= min(mu, the largest P1 - 1e-5), as in dInfer.

    Unlike `threshold`, it reveals every position that is as confident as the best one: a whole block at an all-mask
    start, where all positions tie.
    """

    def __call__(self, predictions: Predictions, lanes: Lanes) -> Decision:
        import torch

        masked, confidence = lanes.masked, predictions.confidence.double()  # (R, W)
        p = torch.where(masked, confidence.sigmoid(), -1.0)  # (R, W)
        top, top_at = p.max(1, keepdim=True)  # (R, 1)
        bound = (top - SLACK).clamp(max=self.mu)  # (R, 1)
        pick = masked & (p >= bound)  # (R, W)

        fixed = top[:, 0] - SLACK > self.mu  # (R,) mu decides, not the largest P1
        slope = 2 * p * (1 - p)  # (R, W) the L1 norm of dP1/d(logits)
        others = torch.ones_like(masked).scatter(1, top_at, False) & masked  # (R, W)
        near_top = nearest((p - bound) / slope.maximum(slope.gather(1, top_at)), others)  # (R,)
        near_top = near_top.nan_to_num(nan=math.inf, posinf=math.inf).masked_fill(predictions.all_mask, math.inf)
        return Decision(pick, torch.where(fixed, near_probability(confidence, masked, self.mu), near_top))


@dataclasses.dataclass(frozen=True)
class Hierarchy(Rule, name="hierarchy", label="Hierarchy", adaptive=True, speed=("tau",), state_only=True):
    """The best position of each run of neighbouring masked ones, if P1 > low; all with P1 > tau; and always the best.

    This is dInfer's HierarchyDecoder: equal best positions of a run are all revealed, not the lowest alone.
    """

    low: float = argument(PROBABILITY, 0.4, "the probability above which the best of a run is revealed")
    tau: float | None = argument(PROBABILITY, None, "the probability above which every position is revealed")

    def __call__(self, predictions: Predictions, lanes: Lanes) -> Decision:
        import torch

        masked = lanes.masked
        confidence = torch.where(masked, predictions.confidence.double(), -math.inf)  # (R, W)
        begins = masked & ~torch.nn.functional.pad(masked[:, :-1], (1, 0))  # (R, W)
        run = torch.where(masked, begins.cumsum(1), 0)  # (R, W) 1, 2, ...; 0 outside
        runs = confidence.new_full((len(masked), masked.shape[1] + 1), -math.inf)  # (R, W + 1)
        peak = runs.scatter_reduce(1, run, confidence, "amax").gather(1, run)  # (R, W) the best of the position's run
        first = masked & (confidence == peak)  # (R, W)
        sure = first & (confidence > log_odds(self.low))  # (R, W)
        distance = nearest(confidence - log_odds(self.low), first)  # (R,)
        if self.tau is not None:
            sure |= masked & (confidence > log_odds(self.tau))
            distance = distance.minimum(nearest(confidence - log_odds(self.tau), masked))

        count = torch.zeros_like(runs).scatter_add(1, run, first.double()).gather(1, run)  # (R, W) best ones of the run
        second = masked & (~first | (count > 1)) & (peak > log_odds(self.low))  # (R, W)
        gap = nearest(peak - confidence, second).masked_fill(predictions.all_mask, math.inf)  # (R,)
        return Decision(*sure_or_best(predictions, lanes, sure, distance.minimum(gap) / LOG_ODDS_SLOPE))
