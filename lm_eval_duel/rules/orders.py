"""Orders that do not depend on the network."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, ClassVar

from lm_eval_duel.hashing import hashed
from lm_eval_duel.rules.base import Decision, Rule, check, rank

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True)
class _FixedOrder(Rule):
    k: int = 1

    def __post_init__(self) -> None:
        check(self, "k", self.k >= 1, "a count of positions, at least 1")

    def _decide(self, pick: torch.Tensor) -> Decision:
        import torch

        return Decision(pick, torch.full((len(pick),), math.inf, dtype=torch.float64, device=pick.device))


@dataclasses.dataclass(frozen=True)
class LeftToRight(_FixedOrder):
    """The k first hidden positions."""

    name: ClassVar[str] = "left_to_right"

    def __call__(self, predictions: Any, lanes: Any) -> Decision:
        return self._decide(lanes.hidden & (lanes.hidden.cumsum(1) <= self.k))


@dataclasses.dataclass(frozen=True)
class RightToLeft(_FixedOrder):
    """The k last hidden positions."""

    name: ClassVar[str] = "right_to_left"

    def __call__(self, predictions: Any, lanes: Any) -> Decision:
        return self._decide(lanes.hidden & (lanes.hidden.flip(1).cumsum(1).flip(1) <= self.k))


@dataclasses.dataclass(frozen=True)
class Random(_FixedOrder):
    """The k hidden positions with the smallest hash(seed, target index): random to the eye, deterministic, so exact."""

    name: ClassVar[str] = "random"
    seed: int = 0

    def __call__(self, predictions: Any, lanes: Any) -> Decision:
        import torch

        index = lanes.columns - lanes.origin[:, None]  # (R, W)
        key = torch.where(lanes.hidden, hashed(index, self.seed), torch.iinfo(torch.int64).max)  # (R, W)
        return self._decide(lanes.hidden & (rank(key) < self.k))
