"""The tokens that a pick reveals when sampling: a draw, or the argmax. When scoring they are the targets.

Shapes: N prompts, R lanes, W block width.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Protocol

import torch

from lm_eval_duel.core.hashing import uniform
from lm_eval_duel.core.lanes import Lanes
from lm_eval_duel.core.predictions import Predictions
from lm_eval_duel.errors import DuelError


class Draw(Protocol):
    """A source of tokens."""

    def __call__(self, predictions: Predictions, lanes: Lanes, pick: torch.Tensor) -> torch.Tensor:
        """The tokens to reveal at `pick` (R, W), (R, W); -1 elsewhere."""


class Draws:
    """Samples (Algorithm 1). A draw is a function of the row's key, the position in the target and the seed."""

    def __init__(self, keys: Sequence[int], seed: int, device: torch.device):
        self.keys = torch.tensor(keys, device=device)  # (N,)
        try:
            self.seed = operator.index(seed)
        except TypeError:
            raise DuelError(f"'seed' is a whole number; got {seed!r}. Leave it out for 0.") from None

    def __call__(self, predictions: Predictions, lanes: Lanes, pick: torch.Tensor) -> torch.Tensor:
        position = lanes.columns - lanes.origin[:, None]  # (R, W)
        u = uniform(self.keys[lanes.row][:, None], position, self.seed)  # (R, W)
        return predictions.draw(torch.where(pick, u, math.nan))


class Argmax:
    """The most probable tokens: what `is_greedy` promises."""

    def __call__(self, predictions: Predictions, lanes: Lanes, pick: torch.Tensor) -> torch.Tensor:
        return torch.where(pick, predictions.argmax, -1)
