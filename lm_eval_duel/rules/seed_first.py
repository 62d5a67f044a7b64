"""Reveal a block's first cell by itself, then follow another rule: `greedy:k=1:seed_first=True`.

Fast-dLLM's sampler for Dream does this: the network predicts a token from the cell before it, and under a prefix or
dual cache the cell before a block is evaluated only at the block's start.

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
    """The first hidden cell of a fresh block alone, then `rule`, whose steps are counted from there."""

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
        fresh = (lanes.hidden == target).all(1)  # (R,) no target is revealed yet
        later = dataclasses.replace(lanes, step=(lanes.step - 1).clamp(min=0))
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


def replaced(rule: Rule, **values: Any) -> Rule:
    """The rule with other parameters, inside what is around it."""
    if isinstance(rule, SeedFirst | SubBlock):
        return dataclasses.replace(rule, rule=replaced(rule.rule, **values))
    return dataclasses.replace(rule, **values)
