"""The steps of a sampler in many states at once: the subsets of the masked positions that they reveal, and how likely.

A state is a set of masked positions. Steps that reveal none change nothing, so the number of masked positions tells the
next step of a schedule, and sets of other sizes are never reached.

Shapes: X states, x of them that moves reach, R lanes, W block width, c products, I moves, M the most positions of a
block, T steps of a schedule of which a state must know its own (else 1).
"""

from __future__ import annotations

import dataclasses
import math
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import torch

from lm_eval_duel.core.lanes import Lanes
from lm_eval_duel.estimators.arguments import LATTICE_BLOCK, ConfidenceArguments
from lm_eval_duel.rules.scheduled import dream_counts, even_counts

Planes: TypeAlias = dict[str, torch.Tensor]  # (X, ...) each: what a sampler keeps of the predictions in some states


class StateLevel(NamedTuple):
    """Some sets of masked positions, all of one size, at which a step may begin."""

    block: torch.Tensor  # (X,)
    first: torch.Tensor  # (X,) how many positions are masked as the block begins
    masked: torch.Tensor  # (X, W) bool


class Moves(NamedTuple):
    """The positions that the next step reveals, or a part of them."""

    state: torch.Tensor  # (I,) the place in its level of the set before
    chosen: torch.Tensor  # (I,) the positions revealed, as a bit mask
    log_p: torch.Tensor  # (I,) log P(A | H) with the targets at A


def from_bitmask(number: torch.Tensor, wide: int) -> torch.Tensor:
    """The positions of bit masks: (X,) -> (X, W) bool."""
    position = torch.arange(wide, device=number.device)  # (W,)
    return (number[:, None] >> position & 1).bool()


def to_bitmask(positions: torch.Tensor) -> torch.Tensor:
    """The bit mask of positions, the sum of 2^position: (X, W) bool -> (X,)."""
    position = torch.arange(positions.shape[1], device=positions.device)  # (W,)
    return (positions.long() << position).sum(1)


def log_sums(values: torch.Tensor, at: torch.Tensor, count: int) -> torch.Tensor:
    """The logsumexp of the values (I,) at each of `count` places, (count,); `at` (I,): the place of a value."""
    top = largest_at(values, at, count)
    sums = torch.zeros_like(top).index_add_(0, at, (values - top[at]).exp())
    return sums.log() + top


def largest_at(values: torch.Tensor, at: torch.Tensor, count: int) -> torch.Tensor:
    """The largest of the values (I,) at each of `count` places, (count,), to be subtracted before `exp`.

    Where all are -inf it is finite, so that the difference is -inf and not NaN.
    """
    largest = values.new_full((count,), -math.inf).scatter_reduce(0, at, values, "amax")
    return largest.clamp(min=torch.finfo(values.dtype).min)


def independent(
    state: torch.Tensor,
    log_in: torch.Tensor,
    log_out: torch.Tensor,
    count: torch.Tensor,
) -> Moves:
    """The subsets whose probability is a product over positions, of log_in for members and log_out for others.

    `state` (c,): the state of each product; log_in, log_out (c, W); `count` (2, c): the least and the most members.
    """
    possible = (log_in > -math.inf).long()  # (c, W)
    later = possible.flip(1).cumsum(1).flip(1) - possible  # (c, W) possible members after each position

    # Partial subsets, which say of every position so far whether it is a member. At each position they split in two.
    product = torch.arange(len(state), device=state.device)  # (I,) the product that each belongs to
    members = torch.zeros_like(state)  # (I,) how many it has
    chosen = torch.zeros_like(state)  # (I,) which ones, as a bit mask
    log_p = log_in.new_zeros(len(state))  # (I,)
    for position in range(log_in.shape[1]):
        least, most = count[:, product]
        enters = log_in[product, position]  # (I,)
        stays = log_out[product, position]  # (I,)
        # a partial subset is dropped as soon as it can no longer reach `least` members, or would exceed `most`
        enough = members + later[product, position] >= least  # (I,)
        out = ((stays > -math.inf) & enough).nonzero()[:, 0]
        into = ((enters > -math.inf) & (members < most)).nonzero()[:, 0]
        log_p = torch.cat([log_p[out] + stays[out], log_p[into] + enters[into]])
        chosen = torch.cat([chosen[out], chosen[into] | (1 << position)])
        members = torch.cat([members[out], members[into] + 1])
        product = torch.cat([product[out], product[into]])
    return Moves(state[product], chosen, log_p)


def in_turn(
    level: StateLevel,
    log_p: torch.Tensor,
    score: torch.Tensor,
    count: torch.Tensor,
) -> Moves:
    """Subsets of `count` (X,) positions, drawn one after the other without replacement by weights exp(score) (X, W).

    `log_p` (X, W): of the targets. The sum over the orders in which a subset is drawn (Plackett and Luce).
    """
    wide = score.shape[1]
    state = torch.arange(len(score), device=score.device)  # (X,)
    moves = Moves(state, torch.zeros_like(state), score.new_zeros(len(score)))
    for turn in range(int(count.max())):
        left = level.masked[moves.state] & ~from_bitmask(moves.chosen, wide)  # (I, W)
        weights = score[moves.state].masked_fill(~left, -math.inf)  # (I, W)
        total = weights.logsumexp(1)  # (I,)

        # a subset that is not complete grows by each position that is left
        growing = count[moves.state] > turn  # (I,)
        i, position = (left & growing[:, None]).nonzero().unbind(1)
        before = moves.state[i]
        grown = moves.log_p[i] + score[before, position] - total[i] + log_p[before, position]

        # the same subset in another order: their probabilities are added
        states = torch.cat([moves.state[~growing], before])
        chosen = torch.cat([moves.chosen[~growing], moves.chosen[i] | (1 << position)])
        log_ps = torch.cat([moves.log_p[~growing], grown])
        pairs, at = torch.stack([states, chosen], 1).unique(dim=0, return_inverse=True)
        moves = Moves(pairs[:, 0], pairs[:, 1], log_sums(log_ps, at, len(pairs)))
    return moves


def arrivals(
    log_leave: torch.Tensor,
    moves: Moves,
    new: torch.Tensor,
    count: int,
) -> torch.Tensor:
    """log p of arriving at each of `count` sets at each step, (count, T): sums over the moves (I,) that end there.

    `log_leave` (X, T): log p of leaving each state. `new` (I,): the place of the set at which a move ends. It is the
    product of a sparse matrix, of numbers up to 1, and a dense one.
    """
    least = torch.finfo(log_leave.dtype).min
    most = log_leave.amax(1).clamp(min=least)  # (X,)
    values = most[moves.state] + moves.log_p  # (I,)
    top = largest_at(values, new, count)
    place = torch.stack([new, moves.state])  # (2, I)
    shape = (count, len(log_leave))
    matrix = torch.sparse_coo_tensor(place, (values - top[new]).exp(), shape, check_invariants=False)
    leave = (log_leave - most[:, None]).exp()  # (X, T)
    return (matrix @ leave).log() + top[:, None]


# A step of SampledOrder with alg=origin reveals each masked position with its share, or none: so a set is left at any
# step after the one at which it was reached, and alpha has an entry for each step.


def leaving(arrived: torch.Tensor, shares: torch.Tensor, size: int) -> torch.Tensor:
    """log p that sets of `size` positions, reached before steps (X, T), are still there at each step, (X, T)."""
    log_stay = torch.log1p(-shares[:-1])  # (T - 1,) of one position at one step; none stays at the last
    log_stayed = torch.cat([log_stay.new_zeros(1), log_stay.cumsum(0)])  # (T,) of one position up to each step
    log_kept = size * log_stayed  # (T,) of all of them
    return (arrived - log_kept).logcumsumexp(1) + log_kept


def log_chance(shares: torch.Tensor, size: int, left: torch.Tensor) -> torch.Tensor:
    """log p that each step reveals given positions of `size` and leaves the others, (x, T); `left` (x,): how many."""
    revealed = (size - left)[:, None]  # (x, 1)
    others = left[:, None]  # (x, 1)
    # the last share is 1, whose log1p is -inf: 0 times that would be NaN
    log_left = torch.where(others > 0, others * torch.log1p(-shares), 0.0)  # (x, T)
    return revealed * shares.log() + log_left


COUNTS = {"even": even_counts, "dream": dream_counts}


@dataclasses.dataclass(frozen=True)
class StepCounts:
    """The number of positions at each step: `n`, or by a `schedule` over `steps` steps, "even" (LLaDA) or "dream".

    `or_more`: a step may reveal more than n.
    """

    n: int = 1
    steps: int | None = None
    schedule: str = "even"
    or_more: bool = False

    @classmethod
    def from_arguments(cls, arguments: ConfidenceArguments) -> StepCounts:
        """The counts of `sampled_confidence`."""
        return cls(arguments.n or 1, arguments.steps, arguments.schedule, or_more=arguments.tau is not None)

    def of_block(self, m: int) -> list[int]:
        """The number of positions that each step reveals, of m in all."""
        if self.steps is None:
            return [min(self.n, m - done) for done in range(0, m, self.n)]
        return COUNTS[self.schedule](m, self.steps)

    def of_state(self, m: int, masked: int) -> int:
        """The number of positions that the next step reveals when `masked` of m are left; 0 if no step begins there."""
        if self.or_more:  # a block that has begun has at least one step behind it, of n positions or more
            is_reached = masked == m or masked <= m - self.n
            return min(self.n, masked) if is_reached else 0
        left = m
        for count in self.of_block(m):
            if left == masked and count:
                return count
            left -= count
        return 0

    def of_lanes(self, lanes: Lanes) -> torch.Tensor:
        """The number of positions that the next step of each lane reveals, (R,); 0 where no step begins."""
        return self.of_sizes(lanes.in_target.sum(1), lanes.masked.sum(1))

    def of_sizes(self, first: torch.Tensor, masked: torch.Tensor) -> torch.Tensor:
        """The same for blocks that begin with `first` (X,) masked positions of which `masked` (X,) are left, (X,)."""
        return table(self, first.device)[first, masked]


@lru_cache(maxsize=64)
def table(counts: StepCounts, device: torch.device) -> torch.Tensor:
    """The number of positions that a step reveals, by the block's width and its masked positions: (M + 1, M + 1).

    0 where no step begins.
    """
    entries = torch.zeros(LATTICE_BLOCK + 1, LATTICE_BLOCK + 1, dtype=torch.int64)
    for m in range(1, LATTICE_BLOCK + 1):
        for masked in range(1, m + 1):
            entries[m, masked] = counts.of_state(m, masked)
    return entries.to(device)
