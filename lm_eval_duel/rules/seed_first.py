"""Reveal a block's first position alone, then follow another rule: `greedy:k=1:seed_first=True`.

Fast-dLLM's sampler for Dream does this: the network predicts a token from the position before it, and under a prefix or
dual cache the position before a block is evaluated only at the block's start. Fast_dLLM_v2 takes a block's first token
from the clean positions before it. If a context ends inside a block, that block's first position is known, and the rule
starts at once (v2/generation_functions.py, batch_sample).

Shapes: R lanes, W block width.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

from lm_eval_duel.arguments import KEY, TRUTH, Argument
from lm_eval_duel.rules.around import Around, emptied
from lm_eval_duel.rules.base import Decision, Rule

SEED_FIRST = Argument(TRUTH, False, "the first position of a block is revealed alone, at the block's first step")


@dataclasses.dataclass(frozen=True)
class SeedFirst(Around):
    """The first position of a block alone, if it is masked, then `rule`, whose steps are counted from there."""

    parameter: ClassVar[str] = "seed_first"
    seed_first: bool = dataclasses.field(default=True, metadata={KEY: SEED_FIRST})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rule.after_first()  # raises DuelError for a rule that cannot go on

    @property
    def followed(self) -> Rule:
        return self.rule.after_first()

    def __call__(self, predictions: Any, lanes: Any) -> Decision:
        import torch

        target = lanes.in_target  # (R, W)
        seeded = target[:, 0]  # (R,) the block does not begin inside the context
        fresh = seeded & (lanes.masked == target).all(1)  # (R,) no target is revealed yet
        decision = self.inside(predictions, lanes, step=(lanes.step - seeded.long()).clamp(min=0))
        first = lanes.masked & (lanes.masked.cumsum(1) == 1)  # (R, W)
        decision_margin = decision.decision_margin
        return Decision(
            torch.where(fresh[:, None], first, decision.pick),
            None if decision_margin is None else decision_margin.double().masked_fill(fresh, math.inf),
            emptied(decision.memory, fresh),
        )
