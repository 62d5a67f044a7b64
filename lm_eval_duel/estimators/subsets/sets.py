"""The sets of positions of a block, and sums over the subsets that one step reveals.

A state is the set of positions that are masked; its number is the sum of 2^q over these positions q.

Shapes: B blocks, m masked positions, S = 2^m states, x sets of one size, h positions of a set, K = 2^h subsets of a
set, M the most positions of a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from itertools import combinations

import torch

from lm_eval_duel.core.lanes import Lanes
from lm_eval_duel.estimators.subsets.arguments import LATTICE_BLOCK

# (states (x,), their positions (x, h), sizes of subsets (K,), how many positions the step reveals (B, 1, 1))
# -> log p that the step reveals each subset with its target tokens, (B, x, K)
LogStep = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@lru_cache(maxsize=LATTICE_BLOCK * LATTICE_BLOCK)
def sets(m: int, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The sets of `size` of m positions: their numbers (x,), their positions (x, size), and the sets without each (x,
    size).
    """
    positions = torch.tensor(list(combinations(range(m), size)))  # (x, size)
    state = (1 << positions).sum(1)  # (x,)
    return state, positions, state[:, None] - (1 << positions)


@lru_cache(maxsize=LATTICE_BLOCK * LATTICE_BLOCK)
def subsets(m: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """For each set of `size` of m positions: the states without each of its subsets (x, K), and their sizes (K,)."""
    state, positions, _ = sets(m, size)
    rest, count = state[:, None], torch.zeros(1, dtype=torch.int64)
    for position in positions.unbind(1):
        rest = torch.cat([rest, rest - (1 << position)[:, None]], 1)
        count = torch.cat([count, count + 1])
    return rest, count


def product(log_in: torch.Tensor, log_out: torch.Tensor) -> torch.Tensor:
    """The sum over positions of `log_in` for members of a subset and `log_out` for others, for every subset.

    (B, x, h) each -> (B, x, K), in the order of `subsets`.
    """
    total = log_in.new_zeros(*log_in.shape[:2], 1)
    for position in range(log_in.shape[2]):
        total = torch.cat([total + log_out[:, :, position, None], total + log_in[:, :, position, None]], 2)
    return total


def sum_over_subsets(counts: torch.Tensor, log_probs: torch.Tensor, log_step: LogStep) -> torch.Tensor:
    """V(H) = log of the sum over subsets A of H of P(A) exp(V(H - A)), V(empty set) = 0, in every state H, (B, S).

    `counts` (B, M + 1): how many positions a step reveals, by how many are masked; 0: no step begins there, V = -inf.
    `log_probs` (B, S, m): the table whose shape and dtype V has. `log_step`: log P.
    """
    value = torch.full_like(log_probs[:, :, 0], -math.inf)  # (B, S)
    value[:, 0] = 0
    for size in counts.sum(0).nonzero()[:, 0].tolist():
        count = counts[:, size, None, None]  # (B, 1, 1)
        state, position, _ = (indices.to(value.device) for indices in sets(log_probs.shape[2], size))  # (x,), (x, h)
        rest, chosen = (indices.to(value.device) for indices in subsets(log_probs.shape[2], size))  # (x, K), (K,)
        total = log_step(state, position, chosen, count) + value[:, rest]  # (B, x, K)
        value[:, state] = total.logsumexp(2).where(count[:, 0] > 0, -math.inf)
    return value


def fresh_positions(lanes: Lanes) -> torch.Tensor:
    """The positions that are masked as the blocks begin, (R, W) bool."""
    target = lanes.columns >= lanes.origin[:, None]  # (R, W)
    return target & (torch.arange(target.shape[1], device=target.device) < lanes.width[:, None])


def numbered(masked: torch.Tensor) -> torch.Tensor:
    """The number of each position among the masked ones of its block, (R, W)."""
    return masked.cumsum(1) - 1


def number_of(masked: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """The number of a state, (R,), from its masked positions and the `position` number of each, (R, W)."""
    return (masked.long() << position.clamp(min=0)).sum(1)
