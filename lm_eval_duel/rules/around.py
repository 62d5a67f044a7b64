"""Rules around a rule: they change when it decides and which positions it sees, and leave the decision to it."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any, ClassVar

from lm_eval_duel.rules.base import READS, Decision, Rule


@dataclasses.dataclass(frozen=True)
class Around(Rule):
    """Base of rules around `rule`. Such a rule reads what `rule` reads, and stands under its name in tables.

    A subclass has one field with a declared argument, which goes with every rule; `parameter` is its name.
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
        """The decision of the rule inside on lanes with other `planes`: it sees the predictions at their masked
        positions.

        `predictions` is None for a fixed rule.
        """
        if "masked" in planes and predictions is not None:
            predictions = predictions.among(planes["masked"])
        return self.followed(predictions, dataclasses.replace(lanes, **planes))


for attribute in ("name", "label", "adaptive", "speed", *READS, "spans_blocks", "dense_memory"):
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
    """The memory with zeros in `lanes` (R,)."""
    return tuple(plane.masked_fill(lanes.view(-1, *[1] * (plane.dim() - 1)), 0) for plane in memory)
