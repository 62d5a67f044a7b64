"""Checks of what a user's rule returns, as a rule around it; the package's own rules need none.

Shapes: R lanes, W block width.
"""

from __future__ import annotations

import dataclasses
import sys
import traceback
from typing import TYPE_CHECKING, Any

from lm_eval_duel.core.decision import Decision
from lm_eval_duel.errors import DuelError, RuleStalled
from lm_eval_duel.rules.around import Around
from lm_eval_duel.rules.base import Rule

if TYPE_CHECKING:
    import torch

REPEATED = 8  # calls with a real choice that are repeated
NOISE = 1e-5  # of memory, relative and absolute: the same sums in another order


def with_checks(rule: Rule) -> Rule:
    """The rule, with the innermost one checked at every step if a user wrote it."""
    if type(rule).__module__.partition(".")[0] != "lm_eval_duel":
        return Checked(rule)
    if isinstance(rule, Around) and not isinstance(rule, Checked):
        return dataclasses.replace(rule, rule=with_checks(rule.rule))
    return rule


@dataclasses.dataclass(frozen=True)
class Checked(Around):
    """A user's rule, which may return the pick alone.

    Its first calls with a real choice are repeated, on the same predictions and on one lane alone: picks and memory
    must agree, except in near ties. This detects a rule that is no function of a lane's predictions; it proves nothing.

    Raises:
        DuelError: the rule raised an exception, returned something else than planes of the lanes' shape and device,
            changed the lanes, or decided differently when it was asked again.
        RuleStalled: it picked nothing, unless it may wait and its step or memory moves on, or what is not masked.
    """

    repeats: list[int] = dataclasses.field(default_factory=lambda: [REPEATED], init=False, repr=False, compare=False)

    def __call__(self, predictions: Any, lanes: Any) -> Decision:
        choice = (lanes.masked.sum(1) > 1).nonzero()[:, 0].tolist() if self.repeats[0] else []  # lanes with a choice
        if not choice:
            return self._decided(predictions, lanes)
        self.repeats[0] -= 1
        others = choice[1:] or choice  # what a rule draws for the first lane may be what it draws for one alone
        return self._repeated(predictions, lanes, others[self.repeats[0] % len(others)])

    def _repeated(self, predictions: Any, lanes: Any, lane: int) -> Decision:
        """The rule's decision, which must be the same when it is asked again, and for `lane` alone."""
        import torch

        before = [plane.clone() for plane in _planes(lanes)]
        decision = self._decided(predictions, lanes)
        if not all(map(torch.equal, before, _planes(lanes))):
            raise DuelError(f"Rule {self} changed the lanes that it was given; it must return new tensors.")
        near = decision.near_tie
        self._compare(decision, self._decided(predictions, lanes), ~near, "when it was asked again")
        width = int(lanes.width[lane])
        alone = None if predictions is None else predictions.of_lane(lane, width)
        again = self._decided(alone, _alone(lanes, lane, width))
        here = slice(lane, lane + 1)
        cut = Decision(decision.pick[here, :width], None, tuple(plane[here, :width] for plane in decision.memory))
        tie = near[here] if alone is None else near[here] | alone.all_mask
        self._compare(cut, again, ~tie, "when it was asked about one lane alone")
        return decision

    def _decided(self, predictions: Any, lanes: Any) -> Decision:
        """The rule's decision, of the right form."""
        import torch

        try:
            returned: Any = self.rule(predictions, lanes)
        except (DuelError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise DuelError(
                f"Rule {self} raised {type(error).__name__}: {error} ({_line_of(self.rule, error)})."
            ) from error
        decision = self._of_form(returned, lanes)
        pick = decision.pick  # (R, W)
        stalled = (~pick.any(1) & ~self._waits(decision, lanes)) | (pick & ~lanes.masked).any(1)  # (R,)
        if stalled.any():
            lane = int(stalled.nonzero()[0])
            what = "picked a position that is not masked" if pick[lane].any() else "picked nothing"
            raise RuleStalled(f"Rule {self} {what}.", lane=lane)
        return decision

    def _of_form(self, returned: Any, lanes: Any) -> Decision:
        """What the rule returned as a Decision; raises DuelError unless its planes fit the lanes."""
        import torch

        decision = Decision(returned) if isinstance(returned, torch.Tensor) else returned
        if not isinstance(decision, Decision):
            raise DuelError(
                f"Rule {self} must return a Decision or a boolean tensor (R, W); got {type(decision).__name__}."
            )
        (count, wide), device = lanes.masked.shape, lanes.masked.device
        parts: list[tuple[str, Any, str, tuple[int, ...]]]
        parts = [("pick", decision.pick, "a boolean tensor (R, W)", (count, wide))]
        if decision.decision_margin is not None:
            parts += [("decision_margin", decision.decision_margin, "a number for each lane (R,)", (count,))]
        parts += [("memory", plane, "tensors (R, W, ...)", (count, wide)) for plane in decision.memory]
        for what, plane, form, shape in parts:
            got = f"{plane.dtype} {(*plane.shape,)}" if isinstance(plane, torch.Tensor) else type(plane).__name__
            extends = isinstance(plane, torch.Tensor) and plane.shape[: len(shape)] == shape
            fits = extends and (what == "memory" or plane.dim() == len(shape))
            if not fits or (what == "pick" and plane.dtype != torch.bool):
                raise DuelError(f"The {what} of rule {self} is {form}, with R, W = {count}, {wide}; got {got}.")
            if plane.device != device:
                raise DuelError(
                    f"The {what} of rule {self} is on {plane.device}, but the network is on {device}: make it from the "
                    "rule's arguments, or with device=lanes.masked.device."
                )
        return decision

    def _waits(self, decision: Decision, lanes: Any) -> torch.Tensor:
        """Which lanes may pick nothing now, because the rule's step or memory moves on, (R,)."""
        import torch

        waits = torch.full_like(lanes.row, self.may_pick_none and self.reads_step, dtype=torch.bool)  # (R,)
        if self.may_pick_none and not self.reads_step and not decision.pick.any(1).all():
            before = lanes.memory or tuple(torch.zeros_like(plane) for plane in decision.memory)
            for old, new in zip(before, decision.memory, strict=True):
                waits |= (old != new).flatten(1).any(1)
        return waits

    def _compare(self, decision: Decision, again: Decision, lanes: torch.Tensor, when: str) -> None:
        """Raise DuelError unless both are one decision in `lanes` (R,) bool."""
        import torch

        one, other = ((decided.pick, *decided.memory) for decided in (decision, again))
        same = len(one) == len(other)
        for old, new in zip(one, other, strict=False):
            same = same and old.shape == new.shape
            same = same and torch.allclose(old[lanes].double(), new[lanes].double(), NOISE, NOISE, equal_nan=True)
        if not same:
            raise DuelError(
                f"Rule {self} is not deterministic: it decided otherwise {when}. A rule is a function of a lane's own "
                "predictions, masked positions, step and memory; anything else gives no likelihood."
            )

    def __str__(self) -> str:
        return str(self.rule)


def _planes(lanes: Any) -> list[torch.Tensor]:
    """All tensors of lanes."""
    values = [getattr(lanes, field.name) for field in dataclasses.fields(lanes) if field.name != "memory"]
    return [*values, *lanes.memory]


def _alone(lanes: Any, lane: int, width: int) -> Any:
    """One of the lanes, cut to its own width. Memory that is zero at its first step is left out, as in lanes alone."""
    part = lanes.select(slice(lane, lane + 1))
    fresh = not part.step[0] and not any(plane.any() for plane in part.memory)
    memory = () if fresh else tuple(plane[:, :width] for plane in part.memory)
    return dataclasses.replace(part, tokens=part.tokens[:, :width], masked=part.masked[:, :width], memory=memory)


def _line_of(rule: Rule, error: Exception) -> str:
    """The line of a user's rule that raised `error`."""
    frames = traceback.extract_tb(error.__traceback__)
    file = getattr(sys.modules.get(type(rule).__module__), "__file__", None)
    own = [frame for frame in frames if frame.filename == file] or frames
    return f"{own[-1].filename}, line {own[-1].lineno}"
