"""Rules around a rule: inside the first unfinished sub-block of each block, `threshold:mu=0.9:sub_block=8`.

Fast_dLLM_v2 does this: blocks of 32, in sub-blocks of 8 from left to right.

Shapes: R lanes, W block width.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from lm_eval_duel.rules.base import READS, Decision, Rule, check_count

SUB_BLOCK = "sub_block"
COPIED = ("name", "label", "adaptive", "speed", *READS, "dense_memory")  # from the rule inside


@dataclasses.dataclass(frozen=True)
class SubBlock(Rule):
    """`rule` among the cells of the first sub-block that has hidden ones. Sub-blocks count from the block's start.

    The rule starts again in each sub-block: its steps are counted from there, and its memory is empty. `carries`: the
    memory stays, and only the steps start again.
    """

    rule: Rule
    sub_block: int
    carries: bool = False

    def __post_init__(self) -> None:
        check_count(self, SUB_BLOCK, "a count of positions, at least 1")
        copy_attributes(self, self.rule)

    @property
    def spans_blocks(self) -> bool:
        return self.rule.spans_blocks

    @property
    def code_class(self) -> type[Rule]:
        return self.rule.code_class

    @property
    def files(self) -> tuple[str, ...]:
        return self.rule.files

    def with_tokenizer(self, tokenizer: Any) -> Rule:
        return dataclasses.replace(self, rule=self.rule.with_tokenizer(tokenizer))

    def check_network(self, denoiser: Any) -> None:
        self.rule.check_network(denoiser)

    def __call__(self, predictions: Any, lanes: Any) -> Decision:
        import torch

        hidden = lanes.hidden
        part = torch.arange(hidden.shape[1], device=hidden.device) // self.sub_block  # (W,)
        present = torch.where(hidden, part, hidden.shape[1]).amin(1, keepdim=True)  # (R, 1)
        inside = hidden & (part == present)  # (R, W)
        if self.rule.state_only:
            return as_decision(self.rule(predictions, dataclasses.replace(lanes, hidden=inside)))
        taken, *memory = lanes.memory or (torch.zeros_like(hidden, dtype=torch.int64),)  # (R, W) steps in the sub-block
        step = taken[:, 0]  # (R,)
        decision = as_decision(
            self.rule(predictions, dataclasses.replace(lanes, hidden=inside, step=step, memory=tuple(memory)))
        )
        done = ~(inside & ~decision.pick).any(1)  # (R,)
        taken = (step + 1).masked_fill(done, 0)[:, None].expand_as(hidden)  # (R, W)
        if not self.carries:
            decision = decision._replace(memory=emptied(decision.memory, done))
        return decision._replace(memory=(taken, *decision.memory))

    def __str__(self) -> str:
        return f"{self.rule}:{SUB_BLOCK}={self.sub_block}"


def copy_attributes(around: Rule, rule: Rule) -> None:
    """Give a rule around `rule` its class attributes."""
    for attribute in COPIED:
        object.__setattr__(around, attribute, getattr(rule, attribute))


def as_decision(decision: Any) -> Decision:
    """What a rule returned, as a Decision: a rule of the user's own may return the pick alone."""
    return decision if isinstance(decision, Decision) else Decision(decision)


def emptied(memory: tuple[Any, ...], lanes: Any) -> tuple[Any, ...]:
    """The memory with zeros in `lanes` (R,)."""
    return tuple(plane.masked_fill(lanes.view(-1, *[1] * (plane.dim() - 1)), 0) for plane in memory)
