"""Orders that do not depend on the network."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from lm_eval_duel.arguments import INTEGER, argument
from lm_eval_duel.core.hashing import hashed
from lm_eval_duel.rules.base import Counted, Decision, rank

if TYPE_CHECKING:
    from lm_eval_duel.core.lanes import Lanes
    from lm_eval_duel.core.predictions import Predictions


@dataclasses.dataclass(frozen=True)
class LeftToRight(Counted, name="left_to_right", label="Left-to-Right", state_only=True, fixed=True):
    """The first k masked positions."""

    def __call__(self, predictions: Predictions | None, lanes: Lanes) -> Decision:
        return Decision.certain(lanes.masked & (lanes.masked.cumsum(1) <= self.k))


@dataclasses.dataclass(frozen=True)
class RightToLeft(Counted, name="right_to_left", label="Right-to-Left", state_only=True, fixed=True):
    """The last k masked positions."""

    def __call__(self, predictions: Predictions | None, lanes: Lanes) -> Decision:
        return Decision.certain(lanes.masked & (lanes.masked.flip(1).cumsum(1).flip(1) <= self.k))


@dataclasses.dataclass(frozen=True)
class Random(Counted, name="random", label="Random", state_only=True, fixed=True):
    """The k masked positions with the smallest hash(seed, target index).

    The order looks random and is fixed by the seed, so the likelihood is exact.
    """

    seed: int = argument(INTEGER, 0, "seed of the order")

    def __call__(self, predictions: Predictions | None, lanes: Lanes) -> Decision:
        import torch

        index = lanes.columns - lanes.origin[:, None]  # (R, W)
        key = torch.where(lanes.masked, hashed(index, self.seed), torch.iinfo(torch.int64).max)  # (R, W)
        return Decision.certain(lanes.masked & (rank(key) < self.k))
