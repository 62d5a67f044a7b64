"""Reveal a block's first cell by itself, then follow another rule: `greedy:k=1:seed_first=True`.

Fast-dLLM's sampler for Dream does this: the network predicts a token from the cell before it, and under a prefix or
dual cache the cell before a block is evaluated only at the block's start. Fast_dLLM_v2 takes a block's first token from
the clean cells before it. If a context ends inside a block, that block's first cell is known, and the rule starts at
once (v2/generation_functions.py, batch_sample).

Shapes: R lanes, W block width.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from lm_eval_duel.rules.around import Around, emptied
from lm_eval_duel.rules.base import Decision

SEED_FIRST = "seed_first"


@dataclasses.dataclass(frozen=True)
class SeedFirst(Around):
    """The first cell of a block alone, if it is hidden, then `rule`, whose steps are counted from there."""

    def __call__(self, predictions: Any, lanes: Any) -> Decision:
        import torch

        cell = torch.arange(lanes.hidden.shape[1], device=lanes.hidden.device)
        target = (cell < lanes.width[:, None]) & (lanes.columns >= lanes.origin[:, None])  # (R, W)
        seeded = target[:, 0]  # (R,) the block does not begin inside the context
        fresh = seeded & (lanes.hidden == target).all(1)  # (R,) no target is revealed yet
        decision = self.inside(predictions, lanes, step=(lanes.step - seeded.long()).clamp(min=0))
        first = lanes.hidden & (lanes.hidden.cumsum(1) == 1)  # (R, W)
        lead = decision.lead
        return Decision(
            torch.where(fresh[:, None], first, decision.pick),
            None if lead is None else lead.double().masked_fill(fresh, math.inf),
            emptied(decision.memory, fresh),
        )

    def __str__(self) -> str:
        return f"{self.rule}:{SEED_FIRST}=True"
