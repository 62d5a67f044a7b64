"""KLASS: positions that are confident and whose distributions no longer change (Kim et al. 2025)."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, Literal

from lm_eval_duel.arguments import TRUTH, argument, choice, number, required, whole
from lm_eval_duel.errors import DuelError
from lm_eval_duel.rules.base import Decision, Thresholded, kl, log_odds, near_probability, nearest, sure_or_best

if TYPE_CHECKING:
    import torch

    from lm_eval_duel.core.lanes import Lanes
    from lm_eval_duel.core.predictions import Predictions

Divergence = Literal["paper", "authors"]
EPS = 1e-12  # inside the authors' logarithms


@dataclasses.dataclass(frozen=True)
class Klass(Thresholded, name="klass", reads_step=True, dense_memory=True):
    """All positions with P1 >= mu and KL <= nu in each of the last `history` steps, or else the single most confident
    one (Kim et al. 2025).

    `kl=paper`: KL(previous, current); `kl=authors`: KL(current, previous), as in the authors' code. The first step of
    a block has no previous predictions and counts as unstable.

    `across`: the history outlives the block, as the authors run it. The first steps of a block compare with the last
    ones of the block before, so the blocks of a window are one chain. As in their code, both comparisons are then
    strict, the logarithms have 1e-12 added, and in its first `history - 1` steps a block has no stable position.
    """

    nu: float = required(
        number("a divergence in nats, at least 0", lambda x: x >= 0),
        "the largest divergence; 0.01 to 0.1 is usual",
        0.1,
    )
    history: int = argument(whole(1, "a number of steps"), 1, "steps for which the divergence must have been small")
    kl: Divergence = argument(
        choice(Divergence),
        "paper",
        "`paper`: KL(previous, current); `authors`: KL(current, previous), as in their code",
    )
    across: bool = argument(
        TRUTH,
        False,
        "the history outlives the block, as in the authors' code; needs `kl=authors`",
        optional=True,
        only_with=("kl", "authors"),
    )

    @property
    def spans_blocks(self) -> bool:
        return self.across

    def check_network(self, denoiser: Any) -> None:
        if not self.across:
            return
        if denoiser.attention != "bidirectional" or denoiser.cache:
            kind = f"under cache={denoiser.cache}" if denoiser.cache else denoiser.attention
            raise DuelError(
                "klass with across=true compares each block's predictions with those that were made while the block "
                f"before was revealed, which needs a bidirectional network without a cache; this one is {kind}. Leave "
                "across out."
            )

    def __call__(self, predictions: Predictions, lanes: Lanes) -> Decision:
        masked = lanes.masked
        confidence = predictions.confidence  # (R, W)
        bound = log_odds(self.mu)
        if self.across:
            divergence, stable, memory = self._across(predictions, lanes)
            sure = confidence > bound  # (R, W)
        else:
            divergence, stable, memory = self._inside(predictions, lanes)
            sure = confidence >= bound  # (R, W)
        ready = masked & sure & (stable >= self.history)  # (R, W)

        distance = near_probability(confidence, masked, self.mu)  # (R,)
        # Near KL = nu a divergence moves by at most about 2 sqrt(2 KL) for each unit of logits. An infinite one, of a
        # position without a previous step, cannot reach nu.
        at_least_nu = divergence.clamp(min=max(self.nu, EPS))  # (R, W)
        slope = 2 * (2 * at_least_nu).sqrt()
        away = ((divergence - self.nu) / slope).nan_to_num(nan=math.inf, posinf=math.inf)
        distance = distance.minimum(nearest(away, masked))
        pick, margin = sure_or_best(predictions, lanes, ready, distance)
        return Decision(pick, margin, memory)

    def _inside(
        self,
        predictions: Predictions,
        lanes: Lanes,
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
        """The divergence (R, W), the steps in a row with KL <= nu (R, W), and the memory, within a block."""
        import torch

        positions = lanes.masked  # (R, W)
        dense = predictions.dense()  # (C, V)
        current = dense.new_zeros(*positions.shape, dense.shape[1])  # (R, W, V) log-probabilities
        current[positions] = dense
        divergence = dense.new_full(positions.shape, math.inf)  # (R, W)
        stable = torch.zeros_like(positions, dtype=torch.int64)  # (R, W)
        if lanes.memory:
            previous, stable_before = lanes.memory
            predicted = positions & (lanes.step > 0)[:, None]  # (R, W) in the step before, too
            before = previous[predicted]  # (positions, V)
            now = current[predicted]  # (positions, V)
            divergence[predicted] = kl(before, now) if self.kl == "paper" else kl(now, before)
            stable = torch.where(predicted & (divergence <= self.nu), stable_before + 1, 0)
        return divergence, stable, (current, stable)

    def _across(
        self,
        predictions: Predictions,
        lanes: Lanes,
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
        """Like `_inside`, with the history of the whole window. Before its first step, probabilities are zeros."""
        import torch

        whole = predictions.whole  # of all masked positions of the window, not of the block alone
        positions = whole.masked  # (R, W)
        dense = whole.dense().exp()  # (C, V)
        current = dense.new_zeros(*positions.shape, dense.shape[1])  # (R, W, V) probabilities
        current[positions] = dense
        if lanes.memory:
            previous, streak = lanes.memory
        else:
            previous = torch.zeros_like(current)
            streak = torch.zeros_like(positions, dtype=torch.int64)  # (R, W)
        before = previous[positions].double()  # (C, V)
        now = dense.double()  # (C, V)
        log_ratio = (now + EPS).log() - (before + EPS).log()  # (C, V)
        divergence = torch.full_like(positions, math.inf, dtype=torch.float64)  # (R, W)
        divergence[positions] = (now * log_ratio).sum(1)
        streak = torch.where(positions & (divergence < self.nu), streak + 1, 0)  # (R, W)
        # as in the authors' code, no position is stable in a block's first `history - 1` steps
        is_late = (lanes.step >= self.history - 1)[:, None]  # (R, 1)
        return divergence, torch.where(is_late, streak, 0), (current, streak)
