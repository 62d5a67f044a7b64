"""Rules around a rule: a block's first position alone at first, or one sub-block after the other.

    greedy:k=1:seed_first=True    Fast-dLLM's sampler for Dream
    threshold:mu=0.9:sub_block=8  Fast_dLLM_v2: blocks of 32, in sub-blocks of 8 from left to right

Dream predicts a token from the position before it, and under a prefix or dual cache the position before a block is
evaluated only at the block's start. Fast_dLLM_v2 takes a block's first token from the clean positions before it. If a
context ends inside a block, that block's first position is known, and the rule starts at once
(v2/generation_functions.py, batch_sample).

Shapes: R lanes, W block width.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any, ClassVar

from lm_eval_duel.arguments import COUNT, KEY, TRUTH, Argument, argument
from lm_eval_duel.rules.base import READS, Decision, Rule


@dataclasses.dataclass(frozen=True)
class Around(Rule):
    """The base class of rules around `rule`. Such a rule reads what `rule` reads, and tables list it under its name.

    A subclass has one field that is declared as an argument and goes with every rule; `parameter` is its name.
    """

    parameter: ClassVar[str] = ""
    rule: Rule

    @property
    def followed(self) -> Rule:
        """The rule that decides inside."""
        return self.rule

    def describe(self) -> dict[str, str]:
        return {**self.rule.describe(), "rule": str(self)}

    def with_tokenizer(self, tokenizer: Any) -> Rule:
        return dataclasses.replace(self, rule=self.rule.with_tokenizer(tokenizer))

    def check_network(self, denoiser: Any) -> None:
        self.rule.check_network(denoiser)

    def __str__(self) -> str:
        return f"{self.rule}:{self.parameter}={getattr(self, self.parameter)}"

    def inside(self, predictions: Any, lanes: Any, **planes: Any) -> Decision:
        """The decision of the rule inside, on lanes with other `planes` and the predictions at their masked positions.

        `predictions` is None for a fixed rule.
        """
        if "masked" in planes and predictions is not None:
            predictions = predictions.narrowed(planes["masked"])
        return self.followed(predictions, dataclasses.replace(lanes, **planes))


# Class attributes of other rules are properties here, since they depend on the rule inside.
for attribute in ("name", "adaptive", "speed", *READS, "spans_blocks", "dense_memory"):
    setattr(Around, attribute, property(operator.attrgetter(f"rule.{attribute}")))


def inner(rule: Rule) -> Rule:
    """The rule inside all that is around it, or the rule itself."""
    return inner(rule.rule) if isinstance(rule, Around) else rule


def replaced(rule: Rule, **values: Any) -> Rule:
    """The rule with other parameters, inside what is around it."""
    if isinstance(rule, Around):
        return dataclasses.replace(rule, rule=replaced(rule.rule, **values))
    return dataclasses.replace(rule, **values)


def emptied(memory: tuple[Any, ...], lanes: Any) -> tuple[Any, ...]:
    """The memory with zeros in `lanes` (R,) bool."""
    planes = []
    for plane in memory:
        ones = (1,) * (plane.dim() - 1)
        planes.append(plane.masked_fill(lanes.view(-1, *ones), 0))
    return tuple(planes)


# ---------------------------------------------------------------- the wrappers


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
        # the rule counts its steps from the one after the seed
        decision = self.inside(predictions, lanes, step=(lanes.step - seeded.long()).clamp(min=0))

        first = lanes.masked & (lanes.masked.cumsum(1) == 1)  # (R, W)
        pick = torch.where(fresh[:, None], first, decision.pick)  # (R, W)
        margin = decision.decision_margin  # (R,)
        if margin is not None:
            margin = margin.double().masked_fill(fresh, math.inf)
        return Decision(pick, margin, emptied(decision.memory, fresh))


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
        width = masked.shape[1]
        number = torch.arange(width, device=masked.device) // self.sub_block  # (W,) of the sub-block
        first = torch.where(masked, number, width).amin(1, keepdim=True)  # (R, 1) that has masked positions
        inside = masked & (number == first)  # (R, W)
        if self.rule.state_only:
            return self.inside(predictions, lanes, masked=inside)

        # the first plane of the memory counts the steps in the sub-block; the others are the rule's
        steps_taken, *memory = lanes.memory or (torch.zeros_like(masked, dtype=torch.int64),)  # (R, W)
        step = steps_taken[:, 0]  # (R,)
        decision = self.inside(predictions, lanes, masked=inside, step=step, memory=tuple(memory))
        done = ~(inside & ~decision.pick).any(1)  # (R,)
        step = (step + 1).masked_fill(done, 0)
        steps_taken = step[:, None].expand_as(masked)  # (R, W)
        if not self.carries:
            decision = decision._replace(memory=emptied(decision.memory, done))
        return decision._replace(memory=(steps_taken, *decision.memory))
