"""The rule that follows recorded orders.

Shapes: N windows, T target positions, R lanes, W block width.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import ClassVar

import torch

from lm_eval_duel import rules
from lm_eval_duel.core.lanes import Lanes
from lm_eval_duel.core.predictions import Predictions


@dataclasses.dataclass(frozen=True)
class Replay(rules.Rule):
    """The recorded orders of a group of windows, as in `WindowScore.reveal_steps`."""

    name: ClassVar[str] = "replay"
    fixed: ClassVar[bool] = True
    reads_step: ClassVar[bool] = True
    may_pick_none: ClassVar[bool] = True
    reveal_steps: tuple[tuple[int, ...], ...]  # of each row of the group

    @cached_property
    def _plane(self) -> torch.Tensor:
        """The step of each target position, -1 behind the end of a target, (N, T)."""
        orders = [torch.tensor(order) for order in self.reveal_steps]
        return torch.nn.utils.rnn.pad_sequence(orders, batch_first=True, padding_value=-1)

    def __call__(self, predictions: Predictions, lanes: Lanes) -> rules.Decision:
        steps = self._plane.to(lanes.row.device)  # (N, T)
        index = (lanes.columns - lanes.origin[:, None]).clamp(0, steps.shape[1] - 1)  # (R, W)
        return rules.Decision.certain(lanes.masked & (steps[lanes.row[:, None], index] == lanes.step[:, None]))
