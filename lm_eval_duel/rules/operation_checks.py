"""A check of a user's rule: its operations get the same numbers again, and none that change with other lanes.

Picks show little. Noise of 1e-4 in the scores of a rule, or a maximum over all lanes, seldom changes one of the few
picks that are repeated, but it always changes the numbers that are sorted and compared. So the operations of a call
are recorded, and those of the next call are compared with them one by one, as long as both calls go the same way.

Shapes: R lanes, W block width.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lm_eval_duel.core.float_noise import FLOOR, difference, equal_or_nan, magnitude
from lm_eval_duel.rules.nan_checks import COMPARISONS, SELECTIONS, SORTS

aten = torch.ops.aten

BETWEEN_TWO = (*COMPARISONS, aten.add, aten.sub, aten.mul, aten.div, aten.maximum, aten.minimum)
SMALLEST = 1e-30  # the size of numbers that are all zero


class OtherNumbers(Exception):
    """An operation of a rule has other numbers than in the call before."""


class DrawsNumbers(OtherNumbers):
    """The rule was asked the same."""


class ReadsOtherLanes(OtherNumbers):
    """The predictions in other lanes had changed."""


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation, with copies of its operands; of one that draws random numbers, of its result."""

    function: Any
    values: tuple[Any, ...]  # tensors and numbers
    shape: torch.Size  # of the result, the first of several

    @property
    def name(self) -> str:
        packet = self.function.overloadpacket
        return f"'{COMPARISONS.get(packet, packet.__name__)}'"

    @property
    def draws(self) -> bool:
        """True if it draws random numbers."""
        return torch.Tag.nondeterministic_seeded in self.function.tags

    def follows(self, before: Operation) -> bool:
        """True if this may be the same operation in a later call."""
        if self.function is not before.function or self.shape != before.shape:
            return False
        return [_form(value) for value in self.values] == [_form(value) for value in before.values]


class RecordedCall(TorchDispatchMode):
    """A context in which the operations are recorded.

    Args:
        most: The most numbers of a tensor that are kept; of larger ones they are the first.
    """

    def __init__(self, most: int):
        super().__init__()
        self.most = most
        self.operations: list[Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        first = result if isinstance(result, torch.Tensor) else None
        if isinstance(result, tuple) and isinstance(result[0], torch.Tensor):
            first = result[0]
        if first is None:
            return result
        values: tuple[Any, ...] = ()
        if torch.Tag.nondeterministic_seeded in func.tags:
            values = (first,)
        elif func.overloadpacket in BETWEEN_TWO:
            values = args[:2]
        elif func in SELECTIONS or func in SORTS:
            values = args[:1]
        if values:
            self.see(Operation(func, tuple(self._copied(value) for value in values), first.shape))
        return result

    def see(self, operation: Operation) -> None:
        """Take the next operation."""
        self.operations.append(operation)

    def _copied(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.numel() > self.most:
            value = value.flatten()[: self.most]
        return value.clone()


class ComparedCall(RecordedCall):
    """A context in which each operation is compared with that in a call before, while both calls go the same way.

    Args:
        before: The call before.
    """

    def __init__(self, before: RecordedCall):
        super().__init__(before.most)
        self.before = iter(before.operations)
        self.same_way = True

    def see(self, operation: Operation) -> None:
        before = next(self.before, None)
        if before is None or not operation.follows(before):
            self.same_way = False
        if before is not None and self.same_way:
            self.compare(before, operation)

    def compare(self, before: Operation, now: Operation) -> None:
        """Raise OtherNumbers if this operation shows what is looked for."""
        raise NotImplementedError


class AskedAgain(ComparedCall):
    """A context of the same call, in which an operation raises DrawsNumbers if it has other numbers than before."""

    def compare(self, before: Operation, now: Operation) -> None:
        for old, new in zip(before.values, now.values, strict=True):
            if _differ(old, new):
                verb = "drew" if now.draws else "got"
                raise DrawsNumbers(f"{now.name} {verb} other numbers when it was asked again")


class OthersChanged(ComparedCall):
    """A context of the same call but for the predictions in all lanes save one.

    An operation raises ReadsOtherLanes if it puts numbers of this lane, which are the same as before while those of
    other lanes are not, together with a number that has changed. So an operation on another lane alone raises nothing.
    Numbers of lanes are known by their shape: (R, W), and (R, 1) or (R,) if R is not W.

    Args:
        before: The call before.
        lane: The lane whose predictions are the same.
        shape: (R, W).
    """

    def __init__(self, before: RecordedCall, lane: int, shape: torch.Size):
        super().__init__(before)
        self.lane = lane
        count, width = shape
        self.of_lanes = [shape]
        if count != width:  # else these may be positions of one lane, in a loop over lanes
            self.of_lanes += [torch.Size((count, 1)), torch.Size((count,))]

    def compare(self, before: Operation, now: Operation) -> None:
        if now.function.overloadpacket not in BETWEEN_TWO:
            return
        if now.shape not in self.of_lanes:
            return
        is_own = []
        is_changed = []
        for old, new in zip(before.values, now.values, strict=True):
            same = not _differ(self._in_lane(old, now.shape), self._in_lane(new, now.shape))
            has_lanes = isinstance(old, torch.Tensor) and old.shape == now.shape
            is_own.append(has_lanes and same and _differ(old, new))
            is_changed.append(not same)
        if any(is_own) and any(is_changed):
            raise ReadsOtherLanes(
                f"{now.name} got a number that changed when only the predictions in other lanes changed"
            )

    def _in_lane(self, value: Any, shape: torch.Size) -> Any:
        """The part of an operand that meets the numbers of the lane in a result of this shape."""
        return value.expand(shape)[self.lane] if isinstance(value, torch.Tensor) else value


def _form(value: Any) -> Any:
    """Shape and dtype of a tensor, or the type of a number: equal for values that can be compared."""
    return (value.shape, value.dtype) if isinstance(value, torch.Tensor) else type(value)


def _differ(old: Any, new: Any) -> bool:
    """True if two values of one form are different numbers, by more than the float noise of their dtype."""
    if not isinstance(old, torch.Tensor):
        return bool(old != new and not (old != old and new != new))  # NaN is itself
    if not old.is_floating_point():
        return not old.equal(new)
    changed = ~equal_or_nan(old, new)
    if not changed.any():
        return False
    limit = max(FLOOR, 8 * torch.finfo(old.dtype).eps)
    # A constant such as -1e9, in place of positions that are not masked, is not the size of the numbers beside it.
    least = magnitude(old.reshape(1, -1), SMALLEST).clamp(max=1.0)
    size = torch.maximum(magnitude(old[changed][None], SMALLEST), least)
    return difference(old[changed], new[changed], size) > limit
