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

SEED_FIRST = "seed_first"
COPIED = ("name", "label", "adaptive", "speed", "fixed", "state_only", "dense_memory")  # from the rule that follows


@dataclasses.dataclass(frozen=True)
class SeedFirst(Rule):
    """The first hidden cell of a fresh block alone, then `rule`, whose steps are counted from there."""

    rule: Rule

    def __post_init__(self) -> None:
        for attribute in COPIED:
            object.__setattr__(self, attribute, getattr(self.rule, attribute))

    @property
    def code_class(self) -> type[Rule]:
        return self.rule.code_class

    def __call__(self, predictions: Any, lanes: Any) -> Decision:
        import torch

        cell = torch.arange(lanes.hidden.shape[1], device=lanes.hidden.device)
        target = (cell < lanes.width[:, None]) & (lanes.columns >= lanes.origin[:, None])  # (R, W)
        fresh = (lanes.hidden == target).all(1)  # (R,) no target is revealed yet
        later = dataclasses.replace(lanes, step=(lanes.step - 1).clamp(min=0))
        decision = self.rule(predictions, later)
        if not isinstance(decision, Decision):
            decision = Decision(decision)
        first = lanes.hidden & (lanes.hidden.cumsum(1) == 1)  # (R, W)
        lead = decision.lead
        return Decision(
            torch.where(fresh[:, None], first, decision.pick),
            None if lead is None else lead.double().masked_fill(fresh, math.inf),
            tuple(plane.masked_fill(_like(fresh, plane), 0) for plane in decision.memory),
        )

    def __str__(self) -> str:
        return f"{self.rule}:{SEED_FIRST}=True"


def inner(rule: Rule) -> Rule:
    """The rule that follows the first cell of a `SeedFirst`, or the rule itself."""
    return rule.rule if isinstance(rule, SeedFirst) else rule


def replaced(rule: Rule, **values: Any) -> Rule:
    """The rule with other parameters."""
    changed = dataclasses.replace(inner(rule), **values)
    return SeedFirst(changed) if isinstance(rule, SeedFirst) else changed


def _like(fresh: Any, plane: Any) -> Any:
    """`fresh` (R,) in as many dimensions as `plane` (R, W, ...)."""
    return fresh.view(-1, *[1] * (plane.dim() - 1))
