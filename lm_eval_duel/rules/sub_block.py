"""Follow a rule inside the first unfinished sub-block of each block: `threshold:mu=0.9:sub_block=8`.

Fast_dLLM_v2 does this: blocks of 32, in sub-blocks of 8 from left to right.

Shapes: R lanes, W block width.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from lm_eval_duel.arguments import COUNT, argument
from lm_eval_duel.rules.around import Around, emptied
from lm_eval_duel.rules.base import Decision


@dataclasses.dataclass(frozen=True)
class SubBlock(Around):
    """`rule` among the positions of the first sub-block that has masked ones. Sub-blocks count from the block's start.

    The rule starts again in each sub-block: its steps are counted from there, and its memory is empty. `carries`: the
    memory stays, and only the steps start again.
    """

    parameter: ClassVar[str] = "sub_block"
    sub_block: int = argument(
        COUNT,
        None,
        "finish sub-blocks of this size from left to right, counted from the block's start",
    )
    carries: bool = False

    def __call__(self, predictions: Any, lanes: Any) -> Decision:
        import torch

        masked = lanes.masked
        part = torch.arange(masked.shape[1], device=masked.device) // self.sub_block  # (W,)
        present = torch.where(masked, part, masked.shape[1]).amin(1, keepdim=True)  # (R, 1)
        inside = masked & (part == present)  # (R, W)
        if self.rule.state_only:
            return self.inside(predictions, lanes, masked=inside)
        taken, *memory = lanes.memory or (torch.zeros_like(masked, dtype=torch.int64),)  # (R, W) steps in the sub-block
        step = taken[:, 0]  # (R,)
        decision = self.inside(predictions, lanes, masked=inside, step=step, memory=tuple(memory))
        done = ~(inside & ~decision.pick).any(1)  # (R,)
        taken = (step + 1).masked_fill(done, 0)[:, None].expand_as(masked)  # (R, W)
        if not self.carries:
            decision = decision._replace(memory=emptied(decision.memory, done))
        return decision._replace(memory=(taken, *decision.memory))
