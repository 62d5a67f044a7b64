"""The contract between a rule and the reveal loop. No torch: rules are named and parsed without it.

Shapes: R lanes, W block width.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

from lm_eval_duel.errors import RuleStalled

if TYPE_CHECKING:
    import torch

    from lm_eval_duel.core.lanes import Lanes
    from lm_eval_duel.core.predictions import Predictions


NEAR_TIE = 1e-4  # logits: with a smaller margin, float noise could change the order


class Decision(NamedTuple):
    """The decision of a rule in one step, for R lanes of block width W.

    Args:
        pick: The positions to reveal, a subset of `lanes.masked`.
        decision_margin: How much the logits of a lane must change before its pick does. Infinite for an order that does
            not depend on the network; None if the rule does not know.
        memory: Tensors with leading (R, W), which the next step gets as `lanes.memory`: zeros in lanes at step 0, and
            an empty tuple if all lanes are at step 0.
    """

    pick: torch.Tensor  # (R, W) bool
    decision_margin: torch.Tensor | None = None  # (R,)
    memory: tuple[torch.Tensor, ...] = ()

    @property
    def near_tie(self) -> torch.Tensor:
        """The lanes in which float noise could change the pick, (R,) bool; none if the rule does not know."""
        if self.decision_margin is None:
            return self.pick.new_zeros(len(self.pick))
        return ~(self.decision_margin >= NEAR_TIE)  # not `<`: a margin of NaN counts as a near tie

    @classmethod
    def certain(cls, pick: torch.Tensor) -> Decision:
        """The decision for a pick (R, W) that does not depend on the network: its margin is infinite."""
        import torch

        return cls(pick, torch.full((len(pick),), math.inf, dtype=torch.float64, device=pick.device))


class UnmaskingRule(Protocol):
    """The attributes of a rule that the loop reads; see `rules.Rule` for each."""

    fixed: ClassVar[bool] = False
    may_pick_none: ClassVar[bool] = False
    dense_memory: ClassVar[bool] = False

    def __call__(self, predictions: Predictions, lanes: Lanes) -> Decision:
        """Pick the masked positions of each lane to reveal next."""


class EvaluateAll(UnmaskingRule):
    """Picks every masked position, for states that are evaluated once."""

    def __call__(self, predictions: Predictions, lanes: Lanes) -> Decision:
        return Decision.certain(lanes.masked)


EVALUATE_ALL = EvaluateAll()


def require_pick(rule: UnmaskingRule, decision: Decision) -> None:
    """Raise RuleStalled unless something is picked in every lane, or the rule may pick nothing."""
    if rule.may_pick_none:
        return
    picked = decision.pick.any(1)  # (R,)
    if not picked.all():
        raise RuleStalled(f"Rule {rule} picked nothing.", lane=int((~picked).nonzero()[0]))
