"""Rules that reveal as many positions as are safe, at least one, so that the number of steps depends on the text."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from lm_eval_duel.errors import unknown
from lm_eval_duel.rules.base import INTEGERS, LOG_ODDS_SLOPE, Decision, Rule, best, check, kl, log_odds, nearest

if TYPE_CHECKING:
    import torch

    from lm_eval_duel.denoisers.predictions import Predictions
    from lm_eval_duel.engine.lanes import Lanes

Divergence = Literal["paper", "authors"]


@dataclasses.dataclass(frozen=True)
class Threshold(Rule):
    """All positions with P1 >= mu, or else the single most confident one (Wu et al. 2025)."""

    name: ClassVar[str] = "threshold"
    label: ClassVar[str] = "Conf. Thresh."
    adaptive: ClassVar[bool] = True
    speed: ClassVar[tuple[str, ...]] = ("mu",)
    state_only: ClassVar[bool] = True
    mu: float

    def __post_init__(self) -> None:
        check(self, "mu", 0 <= self.mu <= 1, "a probability from 0 to 1")

    def __call__(self, predictions: Predictions, lanes: Lanes) -> Decision:
        sure = lanes.hidden & (predictions.confidence >= log_odds(self.mu))  # (R, W)
        distance = nearest(predictions.confidence - log_odds(self.mu), lanes.hidden) / LOG_ODDS_SLOPE  # (R,)
        return Decision(*_else_single(predictions, lanes, sure, distance))


@dataclasses.dataclass(frozen=True)
class Klass(Rule):
    """All positions with P1 >= mu now and KL <= nu in each of the last `history` steps (Kim et al. 2025).

    If there is none: the single most confident one.

    `kl=paper`: KL(previous, current); `kl=authors`: KL(current, previous), as in the authors' code. The first step of
    a block has no previous predictions and counts as unstable.
    """

    name: ClassVar[str] = "klass"
    label: ClassVar[str] = "KLASS"
    adaptive: ClassVar[bool] = True
    speed: ClassVar[tuple[str, ...]] = ("mu",)
    dense_memory: ClassVar[bool] = True
    mu: float
    nu: float
    history: int = 1
    kl: Divergence = "paper"

    def __post_init__(self) -> None:
        check(self, "mu", 0 <= self.mu <= 1, "a probability from 0 to 1")
        check(self, "nu", self.nu >= 0, "a divergence in nats, at least 0")
        whole = 1 <= self.history < INTEGERS and self.history == int(self.history)
        check(self, "history", whole, "a count of steps, at least 1")
        if self.kl not in get_args(Divergence):
            raise unknown("value of kl for rule klass", self.kl, get_args(Divergence))

    def __call__(self, predictions: Predictions, lanes: Lanes) -> Decision:
        import torch

        hidden = lanes.hidden
        dense = predictions.dense()  # (C, V)
        current = dense.new_zeros(*hidden.shape, dense.shape[1])  # (R, W, V)
        current[hidden] = dense
        divergence = dense.new_full(hidden.shape, math.inf)  # (R, W)
        stable = torch.zeros_like(hidden, dtype=torch.int64)  # (R, W) steps in a row with KL <= nu
        if lanes.memory:
            previous, stable_before = lanes.memory
            predicted = hidden & (lanes.step > 0)[:, None]  # (R, W) in the step before, too
            before, now = previous[predicted], current[predicted]  # (cells, V)
            divergence[predicted] = kl(before, now) if self.kl == "paper" else kl(now, before)
            stable = torch.where(predicted & (divergence <= self.nu), stable_before + 1, 0)
        ready = hidden & (predictions.confidence >= log_odds(self.mu)) & (stable >= self.history)  # (R, W)
        distance = nearest(predictions.confidence - log_odds(self.mu), hidden) / LOG_ODDS_SLOPE  # (R,)
        # near KL = nu a divergence moves by at most about 2 sqrt(2 KL) for each unit of logits
        slope = 2 * (2 * divergence.clamp(min=max(self.nu, 1e-12))).sqrt()
        near_nu = ((divergence - self.nu) / slope).nan_to_num(nan=math.inf, posinf=math.inf)
        distance = distance.minimum(nearest(near_nu, hidden))
        return Decision(*_else_single(predictions, lanes, ready, distance), (current, stable))


def _else_single(
    predictions: Predictions, lanes: Lanes, sure: torch.Tensor, distance: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sure cells (R, W), or the single most confident one of a lane that has none; and the margin (R,).

    `distance` (R,): how far the nearest cell is from becoming, or ceasing to be, sure.
    """
    import torch

    single, gap = best(predictions, lanes, predictions.confidence, 1)
    some = sure.any(1)  # (R,)
    return torch.where(some[:, None], sure, single), torch.where(some, distance, distance.minimum(gap))


@dataclasses.dataclass(frozen=True)
class EntropyBound(Rule):
    """Positions by ascending entropy, while the sum of the entropies before is at most gamma (Ben-Hamu et al. 2025)."""

    name: ClassVar[str] = "entropy_bound"
    label: ClassVar[str] = "Entropy Bound"
    adaptive: ClassVar[bool] = True
    speed: ClassVar[tuple[str, ...]] = ("gamma",)
    state_only: ClassVar[bool] = True
    gamma: float

    def __post_init__(self) -> None:
        check(self, "gamma", self.gamma >= 0, "a sum of entropies in nats, at least 0")

    def __call__(self, predictions: Predictions, lanes: Lanes) -> Decision:
        import torch

        hidden = lanes.hidden
        entropy = torch.where(hidden, predictions.entropy.double(), math.inf)  # (R, W)
        ascending, order = entropy.sort(dim=1, stable=True)
        spent = ascending.cumsum(1).roll(1, 1)  # (R, W) the sum of those before
        spent[:, 0] = 0
        inside = hidden.gather(1, order) & (spent <= self.gamma)  # (R, W) a prefix
        pick = torch.zeros_like(hidden).scatter(1, order, inside)  # (R, W)

        count = inside.sum(1, keepdim=True)  # (R, 1)
        last, following = count - 1, count.clamp(max=hidden.shape[1] - 1)
        more = count[:, 0] < hidden.sum(1)  # (R,) some stay hidden
        below = (self.gamma - spent.gather(1, last)) / (2 * spent.gather(1, last))
        above = (spent.gather(1, following) - self.gamma) / (2 * spent.gather(1, following))
        gap = (ascending.gather(1, following) - ascending.gather(1, last)) / (2 * ascending.gather(1, following))
        gap = torch.where(predictions.all_mask[:, None], math.inf, gap)
        below = torch.where(count > 1, below, math.inf)[:, 0]  # the first is always taken
        rest = torch.where(more, above.minimum(gap)[:, 0], math.inf)
        return Decision(pick, below.minimum(rest).nan_to_num(nan=0.0, posinf=math.inf))
