"""A check of a user's rule: a NaN, as statistics are where a position is not masked, must not decide the pick.

The mean of a lane is NaN as soon as one of its positions is revealed, and `confidence >= mean` is then False
everywhere. The rule is silently another one, whose likelihoods are as exact as those of the one that was meant. So the
operations of the rule are watched while it is called.

Shapes: R lanes, W block width.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

# without `!=`: x != x is how one finds a NaN
COMPARISONS = {aten.ge: ">=", aten.gt: ">", aten.le: "<=", aten.lt: "<", aten.eq: "=="}
SELECTIONS = (aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim, aten.topk.default)
SORTS = (aten.sort.default, aten.sort.stable, aten.argsort.default, aten.argsort.stable)


class DecidedByNaN(Exception):
    """A NaN decided the result of an operation of a rule."""


class NoNaN(TorchDispatchMode):
    """A context in which an operation raises DecidedByNaN if a NaN decides its result.

    Two kinds of operations are watched:

    - Comparisons. At a masked position every statistic is a number, so a NaN on either side comes from a mean, a sum or
      a maximum over other positions.
    - Maxima, `argmax`, `topk` and descending sorts over positions. They take a NaN before any number.

    Args:
        masked: (R, W) bool, of the lanes that the rule is called with, each of which has a masked position.
    """

    def __init__(self, masked: torch.Tensor):
        super().__init__()
        self.masked = masked

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        operation = func.overloadpacket
        if operation in COMPARISONS:
            for side in args[:2]:
                if self._has_nan(side, result):
                    raise DecidedByNaN(f"'{COMPARISONS[operation]}' compares with NaN, so it is False")
        if func in SELECTIONS or func in SORTS:
            index = result if isinstance(result, torch.Tensor) else result[1]
            if func in SORTS:
                index = index[..., :1]  # the others are behind it
            if self._is_over_positions(func, args, kwargs) and self._takes_nan(args[0], index):
                raise DecidedByNaN(f"'{operation.__name__}' puts NaN before any number")
        return result

    def _has_nan(self, side: Any, result: torch.Tensor) -> bool:
        """True if one side of a comparison is NaN where no statistic is."""
        if isinstance(side, float):
            return math.isnan(side)
        if not isinstance(side, torch.Tensor):
            return False
        nan = side.isnan()
        lanes, width = self.masked.shape
        if result.shape == (lanes, width):
            nan = nan & self.masked  # (R, W)
        elif result.shape == (width,):  # in a loop over lanes
            if side.numel() > 1:
                return False  # the statistics of the lane; a threshold is a single number
        elif result.shape not in ((lanes,), (lanes, 1)):
            return False
        return bool(nan.any())

    def _is_over_positions(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """True if an operation is over the positions of lanes, (R, W), or of one lane, (W,)."""
        shape = args[0].shape
        if shape not in (self.masked.shape, self.masked.shape[1:]):
            return False
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        return given.get("dim", -1) in (-1, len(shape) - 1, None)  # None: the flattened lanes

    def _takes_nan(self, given: torch.Tensor, index: torch.Tensor) -> bool:
        """True if `index`, of the largest or smallest over positions, is of a NaN although there is a number."""
        if index.dim() == 0:
            given = given.flatten()
        is_number = ~given.isnan().reshape(-1, given.shape[-1])  # (R, W)
        taken = index.reshape(len(is_number), -1)  # (R, K)
        expected = is_number.sum(1).clamp(max=taken.shape[1])  # (R,)
        return bool((is_number.gather(1, taken).sum(1) < expected).any())
