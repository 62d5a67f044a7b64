"""The moves of a sampler in many states at once: the positions that its next step reveals, and how likely these are.

A state is a set of masked positions of a block. A sampler says what its next step may reveal, in one of two forms:

    Products    positions are revealed independently of each other, within bounds on their number; `subsets` lists them
    Moves       each subset of positions with its probability

`arrivals` then adds up the moves that end in the same state. `StepCounts` is the number of positions that a step
reveals. Where it is drawn, `TimedStates` keeps the steps of a state apart.

Shapes: X states, x of them that moves reach, R lanes, W block width, c products, I moves, M the most positions of a
block, T steps of a schedule of which a state must know its own (else 1).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import torch

from lm_eval_duel.core.lanes import Lanes
from lm_eval_duel.estimators.arguments import LATTICE_BLOCK, ConfidenceArguments
from lm_eval_duel.rules.scheduled import dream_counts, even_counts

Tables: TypeAlias = dict[str, torch.Tensor]  # (X, ...) each: what a sampler keeps of the predictions in some states


class StateLevel(NamedTuple):
    """Some states, all with the same number of masked positions, at which a step may begin."""

    block_size: torch.Tensor  # (X,) how many positions are masked as the block begins
    masked: torch.Tensor  # (X, W) bool


class Moves(NamedTuple):
    """The subsets of masked positions that the next step may reveal, each in its state."""

    state: torch.Tensor  # (I,) the state before, by its place in the level
    revealed: torch.Tensor  # (I,) the positions, as a bit mask
    log_p: torch.Tensor  # (I,) log P(A | H) with the targets at A


# ---------------------------------------------------------------- sets of positions as bit masks


def from_bitmask(number: torch.Tensor, width: int) -> torch.Tensor:
    """The positions of bit masks: (X,) -> (X, W) bool."""
    position = torch.arange(width, device=number.device)  # (W,)
    return (number[:, None] >> position & 1).bool()


def to_bitmask(positions: torch.Tensor) -> torch.Tensor:
    """The bit mask of positions, the sum of 2^position: (X, W) bool -> (X,)."""
    position = torch.arange(positions.shape[1], device=positions.device)  # (W,)
    return (positions.long() << position).sum(1)


# ---------------------------------------------------------------- positions that are revealed independently


class Products(NamedTuple):
    """Subsets whose probability is a product over positions.

    A product stands for all subsets of its state that have at least `fewest` and at most `most` members.
    """

    state: torch.Tensor  # (c,) by its place in the level
    log_in: torch.Tensor  # (c, W) the factor of a member; -inf where a position cannot be one
    log_out: torch.Tensor  # (c, W) the factor of any other position; -inf where a position must be a member
    fewest: torch.Tensor  # (c,)
    most: torch.Tensor  # (c,)

    @classmethod
    def joined(cls, parts: Sequence[Products]) -> Products:
        """All products of several parts."""
        return cls(*(torch.cat(planes) for planes in zip(*parts, strict=True)))


def subsets(products: Products) -> Moves:
    """The subsets that products stand for, but for those of probability 0."""
    state, log_in, log_out, *_ = products
    bounds = torch.stack([products.fewest, products.most])  # (2, c) one plane, to be read at once
    possible = (log_in > -math.inf).long()  # (c, W)
    later = possible.flip(1).cumsum(1).flip(1) - possible  # (c, W) possible members after each position

    # Partial subsets, which say of every position so far whether it is a member. At each position they split in two.
    product = torch.arange(len(state), device=state.device)  # (I,) the product that each belongs to
    members = torch.zeros_like(state)  # (I,) how many it has
    chosen = torch.zeros_like(state)  # (I,) which ones, as a bit mask
    log_p = log_in.new_zeros(len(state))  # (I,)
    for position in range(log_in.shape[1]):
        fewest, most = bounds[:, product]  # (I,) each
        enters = log_in[product, position]  # (I,)
        stays = log_out[product, position]  # (I,)
        # a partial subset is dropped as soon as it can no longer reach `fewest` members, or would exceed `most`
        enough = members + later[product, position] >= fewest  # (I,)
        out = ((stays > -math.inf) & enough).nonzero()[:, 0]
        into = ((enters > -math.inf) & (members < most)).nonzero()[:, 0]
        log_p = torch.cat([log_p[out] + stays[out], log_p[into] + enters[into]])
        chosen = torch.cat([chosen[out], chosen[into] | (1 << position)])
        members = torch.cat([members[out], members[into] + 1])
        product = torch.cat([product[out], product[into]])
    return Moves(state[product], chosen, log_p)


# ---------------------------------------------------------------- moves that end in the same state


def arrivals(
    log_leave: torch.Tensor,
    moves: Moves,
    place: torch.Tensor,
    count: int,
) -> torch.Tensor:
    """log p of arriving at each of `count` states at each step, (count, T): sums over the moves (I,) that end there.

    `log_leave` (X, T): log p of leaving each state. `place` (I,): which of the `count` states a move ends in. It is the
    product of a sparse matrix, of numbers up to 1, and a dense one.
    """
    least = torch.finfo(log_leave.dtype).min
    most = log_leave.amax(1).clamp(min=least)  # (X,)
    values = most[moves.state] + moves.log_p  # (I,)
    top = largest_at(values, place, count)
    entry = torch.stack([place, moves.state])  # (2, I)
    shape = (count, len(log_leave))
    matrix = torch.sparse_coo_tensor(entry, (values - top[place]).exp(), shape, check_invariants=False)
    leave = (log_leave - most[:, None]).exp()  # (X, T)
    return (matrix @ leave).log() + top[:, None]


def log_sums(values: torch.Tensor, place: torch.Tensor, count: int) -> torch.Tensor:
    """The logsumexp of the values (I,) at each of `count` places, (count,); `place` (I,): that of each value."""
    top = largest_at(values, place, count)
    sums = torch.zeros_like(top).index_add_(0, place, (values - top[place]).exp())
    return sums.log() + top


def largest_at(values: torch.Tensor, place: torch.Tensor, count: int) -> torch.Tensor:
    """The largest of the values (I,) at each of `count` places, (count,), to be subtracted before `exp`.

    Where all are -inf it is finite, so that the difference is -inf and not NaN.
    """
    largest = values.new_full((count,), -math.inf).scatter_reduce(0, place, values, "amax")
    return largest.clamp(min=torch.finfo(values.dtype).min)


# ---------------------------------------------------------------- how many positions a step reveals

COUNTS = {"even": even_counts, "dream": dream_counts}


@dataclasses.dataclass(frozen=True)
class StepCounts:
    """The number of positions at each step: `n`, or by a `schedule` over `steps` steps, "even" (LLaDA) or "dream".

    Steps that reveal none change nothing, so the number of masked positions tells the next step of a schedule, and sets
    of other sizes are never reached. `or_more`: a step may reveal more than n.
    """

    n: int = 1
    steps: int | None = None
    schedule: str = "even"
    or_more: bool = False

    @classmethod
    def from_arguments(cls, arguments: ConfidenceArguments) -> StepCounts:
        """The counts of `sampled_confidence`."""
        return cls(arguments.n or 1, arguments.steps, arguments.schedule, or_more=arguments.tau is not None)

    def all_steps(self, m: int) -> list[int]:
        """The number of positions that each step of a block of m reveals."""
        if self.steps is None:
            return [min(self.n, m - done) for done in range(0, m, self.n)]
        return COUNTS[self.schedule](m, self.steps)

    def next_step(self, m: int, masked: int) -> int:
        """The number of positions that the next step reveals when `masked` of m are left; 0 if no step begins there."""
        if self.or_more:  # a block that has begun has at least one step behind it, of n positions or more
            is_reached = masked == m or masked <= m - self.n
            return min(self.n, masked) if is_reached else 0
        left = m
        for count in self.all_steps(m):
            if left == masked and count:
                return count
            left -= count
        return 0

    def next_steps(self, m: torch.Tensor, masked: torch.Tensor) -> torch.Tensor:
        """`next_step` of many blocks, at most as wide as the lattice's: m and masked (X,) -> (X,)."""
        return _next_step_table(self, m.device)[m, masked]

    def next_steps_of_lanes(self, lanes: Lanes) -> torch.Tensor:
        """The number of positions that the next step of each lane reveals, (R,); 0 where no step begins."""
        return self.next_steps(lanes.in_target.sum(1), lanes.masked.sum(1))


@lru_cache(maxsize=64)
def _next_step_table(counts: StepCounts, device: torch.device) -> torch.Tensor:
    """`next_step` by the block's width and its masked positions: (M + 1, M + 1)."""
    table = torch.zeros(LATTICE_BLOCK + 1, LATTICE_BLOCK + 1, dtype=torch.int64)
    for m in range(1, LATTICE_BLOCK + 1):
        for masked in range(1, m + 1):
            table[m, masked] = counts.next_step(m, masked)
    return table.to(device)


# ---------------------------------------------------------------- states that must know their step


class UntimedStates:
    """The number of masked positions tells the next step, so a state needs no entry for each step: T = 1."""

    @property
    def count(self) -> int:
        """T, the number of entries of alpha for each state."""
        return 1

    def wait(self, log_alpha: torch.Tensor, size: int) -> torch.Tensor:
        """log p that states of `size` positions are still there at each step, (X, T), from alpha (X, T)."""
        return log_alpha

    def reveal(self, log_arrived: torch.Tensor, size: int, left: torch.Tensor) -> torch.Tensor:
        """`log_arrived` (x, T) with the factor of each step; `left` (x,): how many of `size` positions stay masked."""
        return log_arrived

    def advance(self, log_arrived: torch.Tensor) -> torch.Tensor:
        """alpha of the states reached, (x, T), from log p of arriving there at each step (x, T)."""
        return log_arrived


@dataclasses.dataclass(frozen=True)
class TimedStates(UntimedStates):
    """Step i reveals each masked position with the share r_i, or none at all: a state may be left at any later step.

    So alpha has an entry for each step: log p that the step before it reached the state.
    """

    shares: torch.Tensor  # (T,) r_i; the last one is 1

    @property
    def count(self) -> int:
        return len(self.shares)

    def wait(self, log_alpha: torch.Tensor, size: int) -> torch.Tensor:
        log_stay = torch.log1p(-self.shares[:-1])  # (T - 1,) of one position at one step; none stays at the last
        log_stayed = torch.cat([log_stay.new_zeros(1), log_stay.cumsum(0)])  # (T,) of one position up to each step
        log_kept = size * log_stayed  # (T,) of all of them
        # a state reached before step i is there at step j if all of its positions stay at steps i, ..., j - 1
        return (log_alpha - log_kept).logcumsumexp(1) + log_kept

    def reveal(self, log_arrived: torch.Tensor, size: int, left: torch.Tensor) -> torch.Tensor:
        revealed = (size - left)[:, None]  # (x, 1)
        others = left[:, None]  # (x, 1)
        # the last share is 1, whose log1p is -inf: 0 times that would be NaN
        log_left = torch.where(others > 0, others * torch.log1p(-self.shares), 0.0)  # (x, T)
        log_factor = revealed * self.shares.log() + log_left  # (x, T)
        return log_arrived + log_factor

    def advance(self, log_arrived: torch.Tensor) -> torch.Tensor:
        never = torch.full_like(log_arrived[:, :1], -math.inf)  # no step comes before the first
        return torch.cat([never, log_arrived[:, :-1]], 1)
