"""The moves of a sampler in many states at once: subsets of the masked positions, with probabilities.

Shapes: X states, W block width, c products, I moves, C sums, T steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch

Planes: TypeAlias = dict[str, torch.Tensor]  # (X, ...) each: what a sampler keeps of the predictions in some states


class StateLevel(NamedTuple):
    """The sets of one size that are evaluated."""

    block: torch.Tensor  # (X,)
    first: torch.Tensor  # (X,) how many positions are masked as the block begins
    masked: torch.Tensor  # (X, W) bool
    weight: torch.Tensor  # (X, C, T) log alpha


class Moves(NamedTuple):
    """The positions that the next step reveals, or a part of them."""

    state: torch.Tensor  # (I,) the set before
    chosen: torch.Tensor  # (I,) the number of the positions revealed
    log_p: torch.Tensor  # (I, C) log P(A | H) with the targets at A


Thin: TypeAlias = Callable[[Moves], tuple[Moves, torch.Tensor | slice]]  # those to follow, and which they were


def from_bitmask(number: torch.Tensor, wide: int) -> torch.Tensor:
    """The positions of bit masks: (X,) -> (X, W) bool."""
    return (number[:, None] >> torch.arange(wide, device=number.device) & 1).bool()


def to_bitmask(positions: torch.Tensor) -> torch.Tensor:
    """The bit mask of positions, the sum of 2^position: (X, W) bool -> (X,)."""
    return (positions.long() << torch.arange(positions.shape[1], device=positions.device)).sum(1)


def log_sums(values: torch.Tensor, at: torch.Tensor, count: int) -> torch.Tensor:
    """The logsumexp of the values (I, ...) at each of `count` places, (count, ...); `at` (I,): the place of a value."""
    index = at.reshape(-1, *[1] * (values.dim() - 1)).expand_as(values)
    top = values.new_full((count, *values.shape[1:]), -math.inf).scatter_reduce(0, index, values, "amax")
    top = top.clamp(min=torch.finfo(values.dtype).min)
    return torch.zeros_like(top).index_add_(0, at, (values - top[at]).exp()).log() + top


def independent(
    level: StateLevel, state: torch.Tensor, log_in: torch.Tensor, log_out: torch.Tensor, count: torch.Tensor, thin: Thin
) -> Moves:
    """The subsets whose probability is a product over positions, of log_in for members and log_out for others.

    `state` (c,): the state of each product; log_in, log_out (c, W); `count` (2, c): the least and the most members.
    """
    possible = (log_in > -math.inf).long()  # (c, W)
    later = possible.flip(1).cumsum(1).flip(1) - possible  # (c, W) possible members after each position
    product, members = torch.arange(len(state), device=state.device), torch.zeros_like(state)  # (I,) each
    moves = Moves(state, torch.zeros_like(state), log_in.new_zeros(len(state), level.weight.shape[1]))
    for position in range(log_in.shape[1]):
        least, most = count[:, product]
        enters, stays = log_in[product, position], log_out[product, position]  # (I,) each
        out = ((stays > -math.inf) & (members + later[product, position] >= least)).nonzero()[:, 0]
        into = ((enters > -math.inf) & (members < most)).nonzero()[:, 0]
        chosen = torch.cat([moves.chosen[out], moves.chosen[into] | 1 << position])
        log_p = torch.cat([moves.log_p[out] + stays[out, None], moves.log_p[into] + enters[into, None]])
        product, members = product[torch.cat([out, into])], torch.cat([members[out], members[into] + 1])
        moves, kept = thin(Moves(state[product], chosen, log_p))
        product, members = product[kept], members[kept]
    return moves


def in_turn(level: StateLevel, log_p: torch.Tensor, score: torch.Tensor, count: torch.Tensor, thin: Thin) -> Moves:
    """Subsets of `count` (X,) positions, drawn one after the other without replacement by weights exp(score) (X, W).

    `log_p` (X, W): of the targets. The sum over the orders in which a subset is drawn (Plackett and Luce).
    """
    wide, state = score.shape[1], torch.arange(len(score), device=score.device)  # (X,)
    moves = Moves(state, torch.zeros_like(state), score.new_zeros(len(score), level.weight.shape[1]))
    for turn in range(int(count.max())):
        left = level.masked[moves.state] & ~from_bitmask(moves.chosen, wide)  # (I, W)
        total = score[moves.state].masked_fill(~left, -math.inf).logsumexp(1)  # (I,)
        growing = count[moves.state] > turn  # (I,)
        i, position = (left & growing[:, None]).nonzero().unbind(1)
        before = moves.state[i]
        more = moves.log_p[i] + (score[before, position] - total[i] + log_p[before, position])[:, None]
        states = torch.cat([moves.state[~growing], before])
        chosen = torch.cat([moves.chosen[~growing], moves.chosen[i] | 1 << position])
        pairs, at = torch.stack([states, chosen], 1).unique(dim=0, return_inverse=True)
        merged = log_sums(torch.cat([moves.log_p[~growing], more]), at, len(pairs))
        moves, _ = thin(Moves(pairs[:, 0], pairs[:, 1], merged))
    return moves
