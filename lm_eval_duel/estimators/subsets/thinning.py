"""A beam over sets of positions: which of many weighted states to go on with, so that sums stay unbiased.

Half of the states are those with the largest weights. For each of several independent sums a few of the others are
drawn, each with probability min(1, weight / c), and count 1 / probability times (Fearnhead and Clifford 2003).

Shapes: x states, C sums (the bound, and each repetition).
"""

from __future__ import annotations

import dataclasses
import math

import torch

from lm_eval_duel import fingerprint
from lm_eval_duel.estimators.subsets.arguments import LATTICE_BLOCK, sizes


@dataclasses.dataclass(frozen=True)
class Beam:
    """How many sets of each size are evaluated. `size` and `tolerance` None: all of them."""

    size: int | None = None
    tolerance: float | None = None
    repetitions: int = 8
    seed: int = 0

    @property
    def all_sets(self) -> bool:
        """Whether every set is evaluated, so that the sum is exact."""
        return self.size is None and self.tolerance is None

    @property
    def sums(self) -> int:
        """C."""
        return 1 if self.all_sets else 1 + self.repetitions

    @property
    def most(self) -> int:
        """The largest K."""
        return max(sizes(self.size, self.tolerance), default=1 << LATTICE_BLOCK)

    @property
    def first(self) -> int:
        """The first K."""
        return min(self.most, max(2 * self.repetitions, min(sizes(self.size, self.tolerance), default=self.most)))

    def describe(self) -> dict[str, object]:
        """Its entries of the spec."""
        if self.all_sets:
            return {}
        tolerance = {} if self.tolerance is None else {"tolerance": fingerprint.number(self.tolerance)}
        return {"beam": self.most, **tolerance, "repetitions": self.repetitions, "draw_seed": self.seed}


def sample(weight: torch.Tensor, count: int, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Which `count` of some states to keep, (x,) bool, and what to add to their log weights `weight` (x, C), (x, C).

    `u` (C - 1,): a uniform number for each repetition. Its draws are systematic, with probability min(1, weight / c).
    """
    draws = count // (2 * len(u))
    kept = torch.zeros_like(weight[:, 0], dtype=torch.bool)  # (x,)
    kept[weight[:, 0].argsort(descending=True, stable=True)[: count - draws * len(u)]] = True
    rest = weight[:, 1:].masked_fill(kept[:, None], -math.inf)  # (x, C - 1)
    rest = (rest - rest.amax(0).clamp(min=torch.finfo(rest.dtype).min)).exp()
    largest = rest.sort(0, descending=True).values
    left = torch.arange(draws, 0, -1, device=rest.device)[:, None]
    c = largest.flip(0).cumsum(0).flip(0)[:draws] / left  # (draws, C - 1) if all before are kept
    sure = (largest[:draws] >= c).long().cumprod(0).sum(0).clamp(max=draws - 1)  # (C - 1,) as many are above c
    chance = (rest / c.gather(0, sure[None])).nan_to_num(0.0, posinf=1.0).clamp(max=1.0)  # (x, C - 1)
    total = torch.cat([u[None], chance.cumsum(0) + u]).floor()
    drawn = (total[1:] > total[:-1]) | (chance == 1)
    more = torch.where(kept[:, None], 0.0, torch.where(drawn, -chance.log(), -math.inf))
    return kept | drawn.any(1), torch.cat([torch.zeros_like(weight[:, :1]), more], 1)
