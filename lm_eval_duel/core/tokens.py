"""The tokens revealed at a pick: the targets, a draw, or the argmax. Algorithms 1 and 2 of the paper differ only here.

Shapes: N windows, L row length, R lanes, W block width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch

from lm_eval_duel.core.lanes import Lanes, Rows
from lm_eval_duel.hashing import uniform

if TYPE_CHECKING:
    from lm_eval_duel.core.predictions import Predictions


class Choose(Protocol):
    """A source of tokens."""

    teacher_forced: ClassVar[bool]  # the tokens do not depend on the predictions

    def __call__(self, predictions: Predictions, lanes: Lanes, pick: torch.Tensor) -> torch.Tensor:
        """The tokens to reveal at `pick` (R, W), (R, W); -1 elsewhere."""


class Targets:
    """The tokens of the text that is scored (Algorithm 2)."""

    teacher_forced: ClassVar[bool] = True

    def __init__(self, rows: Rows):
        self.rows = rows

    def of(self, lanes: Lanes) -> torch.Tensor:
        """The token of each position, (R, W)."""
        ids = self.rows.ids
        return ids[lanes.row[:, None], lanes.columns.clamp(max=ids.shape[1] - 1)]  # (R, W)

    def __call__(self, predictions: Predictions, lanes: Lanes, pick: torch.Tensor) -> torch.Tensor:
        return torch.where(pick, self.of(lanes), -1)

    def hide(self, lanes: Lanes, masked: torch.Tensor) -> Lanes:
        """Fresh lanes with `masked` (R, W) of their positions still masked and the targets at the others."""
        return lanes.show(self.of(lanes), masked)


class Draws:
    """Samples (Algorithm 1). A draw is a function of the row's key, the position in the target and the seed."""

    teacher_forced: ClassVar[bool] = False

    def __init__(self, keys: Sequence[int], seed: int, device: torch.device):
        self.keys, self.seed = torch.tensor(keys, device=device), seed  # (N,)

    def __call__(self, predictions: Predictions, lanes: Lanes, pick: torch.Tensor) -> torch.Tensor:
        position = lanes.columns - lanes.origin[:, None]  # (R, W)
        u = uniform(self.keys[lanes.row][:, None], position, self.seed)  # (R, W)
        return predictions.draw(torch.where(pick, u, math.nan))


class Argmax:
    """The most probable tokens: what `is_greedy` promises."""

    teacher_forced: ClassVar[bool] = False

    def __call__(self, predictions: Predictions, lanes: Lanes, pick: torch.Tensor) -> torch.Tensor:
        return torch.where(pick, predictions.argmax, -1)
