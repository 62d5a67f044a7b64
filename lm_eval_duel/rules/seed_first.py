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

from lm_eval_duel.rules.base import Decision, Rule
from lm_eval_duel.rules.sub_block import SubBlock, as_decision, copy_attributes, emptied

SEED_FIRST = "seed_first"


@dataclasses.dataclass(frozen=True)
class SeedFirst(Rule):
    """The first cell of a block alone, if it is hidden, then `rule`, whose steps are counted from there."""

    rule: Rule

    def __post_init__(self) -> None:
        copy_attributes(self, self.rule)

    @property
    def code_class(self) -> type[Rule]:
        return self.rule.code_class

    @property
    def files(self) -> tuple[str, ...]:
        return self.rule.files

    def with_tokenizer(self, tokenizer: Any) -> Rule:
        return SeedFirst(self.rule.with_tokenizer(tokenizer))

    def check_network(self, denoiser: Any) -> None:
        self.rule.check_network(denoiser)

    def __call__(self, predictions: Any, lanes: Any) -> Decision:
        import torch

        cell = torch.arange(lanes.hidden.shape[1], device=lanes.hidden.device)
        target = (cell < lanes.width[:, None]) & (lanes.columns >= lanes.origin[:, None])  # (R, W)
        seeded = target[:, 0]  # (R,) the block does not begin inside the context
        fresh = seeded & (lanes.hidden == target).all(1)  # (R,) no target is revealed yet
        later = dataclasses.replace(lanes, step=(lanes.step - seeded.long()).clamp(min=0))
        decision = as_decision(self.rule(predictions, later))
        first = lanes.hidden & (lanes.hidden.cumsum(1) == 1)  # (R, W)
        lead = decision.lead
        return Decision(
            torch.where(fresh[:, None], first, decision.pick),
            None if lead is None else lead.double().masked_fill(fresh, math.inf),
            emptied(decision.memory, fresh),
        )

    def __str__(self) -> str:
        return f"{self.rule}:{SEED_FIRST}=True"


def inner(rule: Rule) -> Rule:
    """The rule inside `SeedFirst` and `SubBlock`, or the rule itself."""
    return inner(rule.rule) if isinstance(rule, SeedFirst | SubBlock) else rule


def sub_block_of(rule: Rule) -> int | None:
    """The size of the rule's sub-blocks; None if it has none."""
    if isinstance(rule, SeedFirst):
        return sub_block_of(rule.rule)
    return rule.sub_block if isinstance(rule, SubBlock) else None


def replaced(rule: Rule, **values: Any) -> Rule:
    """The rule with other parameters, inside what is around it."""
    if isinstance(rule, SeedFirst | SubBlock):
        return dataclasses.replace(rule, rule=replaced(rule.rule, **values))
    return dataclasses.replace(rule, **values)
