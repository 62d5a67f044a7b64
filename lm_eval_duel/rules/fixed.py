"""Orders that do not depend on the network."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from lm_eval_duel.hashing import hashed
from lm_eval_duel.rules.base import Counted, Decision, certain, rank


@dataclasses.dataclass(frozen=True)
class LeftToRight(Counted):
    """The k first hidden positions."""

    name: ClassVar[str] = "left_to_right"
    state_only: ClassVar[bool] = True
    fixed: ClassVar[bool] = True

    def __call__(self, predictions: Any, lanes: Any) -> Decision:
        return certain(lanes.hidden & (lanes.hidden.cumsum(1) <= self.k))


@dataclasses.dataclass(frozen=True)
class RightToLeft(Counted):
    """The k last hidden positions."""

    name: ClassVar[str] = "right_to_left"
    state_only: ClassVar[bool] = True
    fixed: ClassVar[bool] = True

    def __call__(self, predictions: Any, lanes: Any) -> Decision:
        return certain(lanes.hidden & (lanes.hidden.flip(1).cumsum(1).flip(1) <= self.k))


@dataclasses.dataclass(frozen=True)
class Random(Counted):
    """The k hidden positions with the smallest hash(seed, target index): random to the eye, deterministic, so exact."""

    name: ClassVar[str] = "random"
    state_only: ClassVar[bool] = True
    fixed: ClassVar[bool] = True
    seed: int = 0

    def __call__(self, predictions: Any, lanes: Any) -> Decision:
        import torch

        index = lanes.columns - lanes.origin[:, None]  # (R, W)
        key = torch.where(lanes.hidden, hashed(index, self.seed), torch.iinfo(torch.int64).max)  # (R, W)
        return certain(lanes.hidden & (rank(key) < self.k))
