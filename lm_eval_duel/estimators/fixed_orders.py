"""Orders that are known before any network call: recorded ones, and all their states.

Shapes: N windows, T target positions, R lanes, W block width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import ClassVar

import torch

from lm_eval_duel import rules
from lm_eval_duel.core.decision import require_pick
from lm_eval_duel.core.lanes import Lanes
from lm_eval_duel.core.predictions import Predictions
from lm_eval_duel.core.reveal import BlockSpan, WindowGroup, naming_window
from lm_eval_duel.estimators.base import Estimator


@dataclasses.dataclass(frozen=True)
class Replay(rules.Rule):
    """The recorded orders of a group of windows, as in `Score.reveal_steps`."""

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


def fixed_states(
    estimator: Estimator, group: WindowGroup, rule: rules.Rule, spans: Sequence[BlockSpan]
) -> Iterator[Lanes]:
    """Every state of a fixed order, one batch of blocks after the other.

    Only the picks are masked in a state; positions that are neither masked nor revealed show [MASK]. Under cache=prefix
    a batch is one block: its states are evaluated from the same position on, so a call of them wastes none.
    """
    by_block = estimator.denoiser.cache == "prefix"
    for lanes, _ in estimator.batches(group, spans, lambda room: 1 if by_block else room, rule):
        while len(lanes):
            with naming_window(lanes, group.window_indices):
                decision = rule(None, lanes)  # type: ignore[arg-type]  # it reads no predictions
                require_pick(rule, decision)
            pick = decision.pick  # (R, W)
            states = dataclasses.replace(lanes, masked=pick, memory=())
            if rule.may_pick_none:
                states = states.select(pick.any(1))
            if len(states):
                yield states
            lanes = lanes.reveal(pick, group.rows.targets(lanes), decision.memory)
            lanes = lanes.select(lanes.masked.any(1))
