"""The sets of positions of a block.

A state is the set of positions that are masked; its number is the sum of 2^q over these positions q.

Shapes: R lanes, W block width, m masked positions, x sets of one size.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import combinations

import torch

from lm_eval_duel.core.lanes import Lanes
from lm_eval_duel.estimators.subsets.arguments import LATTICE_BLOCK


@lru_cache(maxsize=LATTICE_BLOCK * LATTICE_BLOCK)
def sets(m: int, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The sets of `size` of m positions: their numbers (x,), their positions (x, size), and the sets without each (x,
    size).
    """
    positions = torch.tensor(list(combinations(range(m), size)))  # (x, size)
    state = (1 << positions).sum(1)  # (x,)
    return state, positions, state[:, None] - (1 << positions)


def fresh_positions(lanes: Lanes) -> torch.Tensor:
    """The positions that are masked as the blocks begin, (R, W) bool."""
    target = lanes.columns >= lanes.origin[:, None]  # (R, W)
    return target & (torch.arange(target.shape[1], device=target.device) < lanes.width[:, None])


def numbered(masked: torch.Tensor) -> torch.Tensor:
    """The number of each position among the masked ones of its block, (R, W)."""
    return masked.cumsum(1) - 1


def number_of(masked: torch.Tensor, position: torch.Tensor | None = None) -> torch.Tensor:
    """The number of a state, (R,), from its masked positions and the `position` number of each, (R, W).

    `position` None: the columns, 0 to W - 1.
    """
    if position is None:
        position = torch.arange(masked.shape[1], device=masked.device)  # (W,)
    return (masked.long() << position.clamp(min=0)).sum(1)
