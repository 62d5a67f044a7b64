"""Sweep blocks from fully masked to fully revealed, level by level.

    alpha(H) = p that a sampler comes to mask exactly the positions H, with the targets elsewhere
    alpha(H - A) = sum over H of alpha(H) P(A | H), larger sets first; alpha(no position) = p of the block

One network row at H gives P(A | H) for every A. Without a beam every set that can be reached is evaluated, and the sum
is exact. A beam evaluates at most K sets of each size, chosen by alpha(H) x product of p of the targets in H, under the
predictions before; beyond 64 K for each block, or fewer with many steps, it thins the subsets A of a step, too.

Thinning keeps half of the sets by their weight. For each of several independent sums, the repetitions, a few others are
drawn, each with probability min(1, weight / c), and count 1 / probability times (Fearnhead and Clifford 2003).

    bound       the sum over the sets that were evaluated: never above log p
    estimate    log of the mean of the repetitions, which is an unbiased estimate of p, or the bound if that is larger

Beams of K, 2 K and 4 K sets that miss the same orders agree by chance once, but rarely twice. So the error of an
estimate is the largest of its two differences from the last two, and of the standard errors of all three; before the
third beam it is not known. Each beam has separate draws.

Random numbers are functions of (seed, the window's ids, block, K), so that equal windows have equal values.

Shapes: N windows, R lanes, W block width, B blocks of a chunk, x sets that are reached, X sets of a level, I moves, C
sums (the bound, and each repetition), T steps of a schedule of which a state must know its own (else 1).
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple, Protocol

import torch

from lm_eval_duel.core.hashing import hashed, uniform
from lm_eval_duel.core.lanes import Lanes
from lm_eval_duel.core.reveal import WindowGroup
from lm_eval_duel.estimators.arguments import BeamArguments
from lm_eval_duel.estimators.subsets.moves import Moves, Planes, StateLevel, Thin, from_bitmask, to_bitmask

BEAM = 4  # key of the random numbers, different for each estimator
TIE = 2.0**-6  # nats: a beam keeps the lowest of sets whose weights round to one multiple of it
MOVES = 64  # subsets of a step that are followed, for each set of a beam
TABLE = 1 << 24  # values of the sets that they reach, one for each sum and step: 128 MiB


def followed(size: int, every: int, sums: int, steps: int) -> int:
    """The number of subsets of a step that a beam of `size` sets follows; a set has a value for each sum and step.

    They reach at most the `every` sets of a block, so where there is room for all of these, or the beam takes them all,
    the number of steps changes nothing.
    """
    if size >= every or every * sums * steps <= TABLE:
        return MOVES * size
    return min(MOVES * size, max(size, TABLE // (sums * steps)))


class Sampler(Protocol):
    """The attributes of a sampler that a chunk reads."""

    own: BeamArguments
    seed: int

    @property
    def shares(self) -> torch.Tensor | None:
        """The probability with which each step reveals a masked position, (T,), if steps have no other parameter."""

    def block_numbers(self, lanes: Lanes) -> torch.Tensor:
        """The number of each lane's block in its window, (R,)."""

    def moves(self, level: StateLevel, planes: Planes, thin: Thin) -> Moves:
        """The subsets that the next step of each state of a level can reveal."""


class BeamResult(NamedTuple):
    """The results of beams for some blocks, in nats, (B,) each."""

    exact: torch.Tensor  # bool: every set was evaluated
    bound: torch.Tensor  # the largest lower bound of all beams so far
    estimate: torch.Tensor
    stderr: torch.Tensor  # of the repetitions
    error: torch.Tensor  # of the estimate; infinite: not known

    def select(self, keep: torch.Tensor) -> BeamResult:
        """The values of the blocks `keep` (B,) bool."""
        return BeamResult(*(plane[keep] for plane in self))


class Chunk:
    """The blocks, with a beam of one size; `smaller`: what beams of the sizes before have found."""

    def __init__(
        self, group: WindowGroup, sampler: Sampler, number: int, lanes: Lanes, smaller: tuple[BeamResult, ...] = ()
    ):
        self.group, self.sampler, self.number = group, sampler, number
        self.lanes, self.smaller = lanes, smaller
        self.beam, shares = sampler.own, sampler.shares
        self.size, self.is_largest = self.beam.sizes[len(smaller)], len(smaller) + 1 == len(self.beam.sizes)
        self.shares = None if shares is None else shares.to(lanes.row.device)  # (T,)
        self.wide, device = lanes.masked.shape[1], lanes.row.device
        full, steps = to_bitmask(lanes.masked), 1 if self.shares is None else len(self.shares)
        self.block = torch.arange(len(lanes), device=device)  # (B,)
        self.key = self.block << self.wide | full  # (x,) of the sets that are reached and have not been evaluated
        like = torch.zeros((), dtype=torch.float64, device=device)
        self.weight = like.new_full((len(lanes), self.beam.sums, steps), -math.inf)  # (x, C, T)
        self.weight[:, :, 0] = 0
        self.followed = followed(self.size, 1 << self.wide, self.beam.sums, steps)
        self.lookahead = like.new_zeros(len(lanes))  # (x,) log p of the targets of a set, under the predictions before
        self.value = like.new_full((len(lanes), self.beam.sums), -math.inf)  # (B, C)
        self.path = self.key  # (B,) the sets of argmax decoding as far as it writes the targets; -1: it does not
        self.rows = torch.zeros_like(self.block)  # (B,)
        self.random = hashed(group.keys[lanes.row], sampler.seed, BEAM, sampler.block_numbers(lanes))  # (B,)
        self.thinned = torch.zeros_like(self.block)  # (B,) how often
        self.known: dict[int, tuple[torch.Tensor, Planes]] = {}  # by size: sets of the last level, what was read there

    def advance(self) -> Lanes | None:
        """The states to evaluate next; None: the blocks are finished."""
        while len(self.key):
            lanes = self._begin()
            if len(lanes):
                return lanes
            self.follow()
        return None

    def _begin(self) -> Lanes:
        """Choose the sets of the next level; return the lanes of sets that have not been evaluated."""
        sizes = from_bitmask(self.key, self.wide).sum(1)  # (x,)
        self.positions = int(sizes.max())
        here = sizes == self.positions
        key, weight, lookahead = self.key[here], self.weight[here], self.lookahead[here]
        self.key, self.weight, self.lookahead = self.key[~here], self.weight[~here], self.lookahead[~here]
        on_path = torch.isin(key, self.path)
        kept, log_count = self._thinned(key >> self.wide, weight.logsumexp(2) + lookahead[:, None], self.size, on_path)
        self.level_key = key[kept]
        block, masked = self.level_key >> self.wide, from_bitmask(self.level_key, self.wide)  # (X,), (X, W)
        self.level = StateLevel(block, self.lanes.masked.sum(1)[block], masked, weight[kept] + log_count[:, :, None])
        missing, self.planes = torch.ones_like(self.level_key, dtype=torch.bool), {}  # (X,)
        if self.positions in self.known:
            keys, planes = self.known.pop(self.positions)
            at = torch.searchsorted(keys, self.level_key).clamp(max=len(keys) - 1)
            missing = keys[at] != self.level_key
            self.planes = {name: plane[at] for name, plane in planes.items()}
        index = missing.nonzero()[:, 0]
        self.waiting = len(index)
        fresh = self.lanes.select(self.level.block[index])
        self.rows.index_add_(0, self.level.block[index], torch.ones_like(index))
        masked = self.level.masked[index]
        places = tuple(plane[:, None].expand_as(masked) for plane in (torch.full_like(index, self.number), index))
        return dataclasses.replace(fresh.show(self.group.rows.targets(fresh), masked), memory=places)

    def put(self, index: torch.Tensor, planes: Planes) -> None:
        """Enter what was evaluated at some sets of the level; again, if a later step ran out of memory."""
        for name, plane in planes.items():
            if name not in self.planes:
                self.planes[name] = plane.new_zeros(len(self.level_key), *plane.shape[1:])
            self.planes[name][index] = plane

    def follow(self) -> None:
        """Go from the sets of a level, all of which have been evaluated, to the sets after the next step."""
        level, shares = self.level, self.shares
        if not self.is_largest:
            self.known[self.positions] = self.level_key, self.planes
        log_leave, log_step = level.weight, None
        if shares is not None:  # each step reveals each position with its share, or none: a set is left at any step
            log_stay = torch.log1p(-shares)  # (T,)
            log_kept = self.positions * torch.cat([log_stay.new_zeros(1), log_stay[:-1].cumsum(0)])  # (T,)
            log_leave = (level.weight - log_kept).logcumsumexp(2) + log_kept
            members = torch.arange(self.positions + 1, device=shares.device)[:, None]  # (h + 1, 1)
            others = self.positions - members
            log_step = members * shares.log() + torch.where(others > 0, others * log_stay, 0.0)  # (h + 1, T)
        total = log_leave.logsumexp(2)  # (X, C)
        log_p = self.planes["log_probs"].nan_to_num(0.0).clamp(min=-1e3)  # (X, W) for the lookahead

        def lookahead_of(moves: Moves) -> torch.Tensor:
            return (log_p[moves.state] * (level.masked[moves.state] & ~from_bitmask(moves.chosen, self.wide))).sum(1)

        def thin(moves: Moves) -> tuple[Moves, torch.Tensor | slice]:
            if len(moves.state) <= self.followed:
                return moves, slice(None)
            weight = total[moves.state] + moves.log_p + lookahead_of(moves)[:, None]  # (I, C)
            kept, log_count = self._thinned(level.block[moves.state], weight, self.followed)
            return Moves(moves.state[kept], moves.chosen[kept], moves.log_p[kept] + log_count), kept

        moves = self.sampler.moves(level, self.planes, thin)
        state, chosen = moves.state, moves.chosen
        key = self.level_key[state] & ~chosen
        greedy = self._decoded()
        keys, at = torch.cat([self.key, greedy, key]).unique(return_inverse=True)  # (x,)
        old, new = at[: len(self.key)], at[len(self.key) + len(greedy) :]
        arrived = _arrived(log_leave, state, moves.log_p, new, len(keys))  # (x, C, T)
        if log_step is not None:
            left = self.positions - from_bitmask(keys, self.wide).sum(1)  # (x,) how many each of them reveals
            arrived = arrived + log_step[left][:, None]
        done = keys & ((1 << self.wide) - 1) == 0  # (x,)
        block = keys[done] >> self.wide
        self.value[block] = self.value[block].logaddexp(arrived[done].logsumexp(2))
        if shares is not None:  # a set is left at a later step than that at which it was reached
            arrived = torch.cat([torch.full_like(arrived[:, :, :1], -math.inf), arrived[:, :, :-1]], 2)
        arrived[old] = arrived[old].logaddexp(self.weight)
        unknown = torch.full_like(greedy, -math.inf, dtype=log_p.dtype)
        lookahead = arrived.new_full((len(keys),), -math.inf)
        lookahead = lookahead.scatter_reduce(0, at, torch.cat([self.lookahead, unknown, lookahead_of(moves)]), "amax")
        reached = ~done & ((arrived > -math.inf).any(2).any(1) | torch.isin(keys, self.path))
        self.key, self.weight, self.lookahead = keys[reached], arrived[reached], lookahead[reached]

    def _decoded(self) -> torch.Tensor:
        """Follow argmax decoding; the sets of this level's paths after it, as far as it writes the targets."""
        if "pick" not in self.planes:
            return self.path[:0]
        block = self.level.block[torch.isin(self.level_key, self.path)]  # (b,) whose path has this level
        at = torch.searchsorted(self.level_key, self.path[block])
        missed = self.planes["missed"][at]
        following = self.path[block] & ~to_bitmask(self.planes["pick"][at])
        self.path[block] = torch.where(missed, -1, following)
        return following[~missed]

    def _thinned(
        self, block: torch.Tensor, weight: torch.Tensor, room: int, needed: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | slice, torch.Tensor]:
        """Thin the states of each block to at most `room`: which are kept, and the log of how often each counts."""
        crowded = (block.bincount() > room).nonzero()[:, 0].tolist()
        log_count = torch.zeros_like(weight)
        if self.beam.all_sets or not crowded:
            return slice(None), log_count
        kept = torch.ones_like(block, dtype=torch.bool)
        for b in crowded:
            mine = (block == b).nonzero()[:, 0]
            self.thinned[b] += 1
            repetition = torch.arange(1, weight.shape[1], device=weight.device)  # (C - 1,)
            u = uniform(self.random[b], self.size, self.thinned[b], repetition)
            kept[mine], log_count[mine] = sample(weight[mine], room, u)
        kept = kept if needed is None else kept | needed
        index = kept.nonzero()[:, 0]
        return index, log_count[index]

    def found(self) -> BeamResult:
        """The result of the beams up to this one, for each block."""
        exact, bound = self.thinned == 0, self.value[:, 0]  # (B,) each
        if self.beam.all_sets:
            return BeamResult(exact, bound, bound, torch.zeros_like(bound), torch.zeros_like(bound))
        estimate, stderr = log_mean(self.value[:, 1:])
        if self.smaller:
            bound = bound.maximum(self.smaller[-1].bound)
        estimate = torch.where(exact, bound, estimate.maximum(bound))
        error = torch.full_like(bound, math.inf)
        if len(self.smaller) > 1:
            before, last = self.smaller[-2:]
            differences = (estimate - last.estimate).abs(), (last.estimate - before.estimate).abs()
            error = torch.stack([*differences, stderr, last.stderr, before.stderr]).amax(0)  # (B,)
        return BeamResult(exact, bound, estimate, stderr, error.masked_fill(exact, 0.0))

    def larger(self, number: int, found: BeamResult, again: torch.Tensor) -> Chunk:
        """The blocks of `again` (B,) from their start, with a beam of the next size; `found` by this one."""
        smaller = tuple(one.select(again) for one in (*self.smaller, found))
        twin = Chunk(self.group, self.sampler, number, self.lanes.select(again), smaller)
        place = again.cumsum(0) - 1  # (B,)
        for positions, (key, planes) in self.known.items():
            mine = again[key >> self.wide]
            if not mine.any():
                continue
            block, rest = place[key[mine] >> self.wide], key[mine] & ((1 << self.wide) - 1)
            twin.known[positions] = block << self.wide | rest, {name: plane[mine] for name, plane in planes.items()}
        twin.rows = self.rows[again]
        return twin


def _arrived(
    leaving: torch.Tensor, state: torch.Tensor, log_p: torch.Tensor, new: torch.Tensor, count: int
) -> torch.Tensor:
    """The log of the sum over moves (I,) of exp(leaving (X, C, T) of their state + log_p (I, C)), at their places `new`
    of `count`, (count, C, T): products of a sparse matrix, of numbers up to 1."""
    least = torch.finfo(leaving.dtype).min
    most = leaving.amax(2).clamp(min=least)  # (X, C)
    values = most[state] + log_p  # (I, C)
    top = values.new_full((count, values.shape[1]), -math.inf)
    top = top.scatter_reduce(0, new[:, None].expand_as(values), values, "amax").clamp(min=least)  # (count, C)
    values, scaled = (values - top[new]).exp(), (leaving - most[:, :, None]).exp()
    place = torch.stack([new, state])
    sums = [
        torch.sparse_coo_tensor(place, values[:, c], (count, len(leaving)), check_invariants=False) @ scaled[:, c]
        for c in range(values.shape[1])
    ]
    return torch.stack(sums, 1).log() + top[:, :, None]


def log_mean(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The log of the mean of exp of the repetitions, and its standard error: (B, repetitions) -> (B,) each."""
    count, top = value.shape[1], value.amax(1, keepdim=True).clamp(min=torch.finfo(value.dtype).min)
    p = (value - top).exp()
    return p.mean(1).log() + top[:, 0], (p.std(1) / math.sqrt(count) / p.mean(1)).nan_to_num(0.0)


def sample(weight: torch.Tensor, count: int, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose `count` states by their log weights (x, C): (x,) bool, and the log of how often each counts, (x, C).

    `u` (C - 1,): a uniform number for each repetition. Its draws are systematic, with probability min(1, weight / c).
    """
    draws = count // (2 * len(u))
    kept = torch.zeros_like(weight[:, 0], dtype=torch.bool)  # (x,)
    rank = (weight[:, 0] / TIE).round()  # many weights are equal but for float noise, which may not choose
    kept[rank.argsort(descending=True, stable=True)[: count - draws * len(u)]] = True
    rest = weight[:, 1:].masked_fill(kept[:, None], -math.inf)  # (x, C - 1)
    rest = (rest - rest.amax(0).clamp(min=torch.finfo(rest.dtype).min)).exp()
    largest = rest.sort(0, descending=True).values
    left = torch.arange(draws, 0, -1, device=rest.device)[:, None]
    c = largest.flip(0).cumsum(0).flip(0)[:draws] / left  # (draws, C - 1) if all before are kept
    sure = (largest[:draws] >= c).long().cumprod(0).sum(0).clamp(max=draws - 1)  # (C - 1,) as many are above c
    chance = (rest / c.gather(0, sure[None])).nan_to_num(0.0, posinf=1.0).clamp(max=1.0)  # (x, C - 1)
    total = torch.cat([u[None], chance.cumsum(0) + u]).floor()
    drawn = (total[1:] > total[:-1]) | (chance == 1)
    log_count = torch.where(kept[:, None], 0.0, torch.where(drawn, -chance.log(), -math.inf))
    return kept | drawn.any(1), torch.cat([torch.zeros_like(weight[:, :1]), log_count], 1)
