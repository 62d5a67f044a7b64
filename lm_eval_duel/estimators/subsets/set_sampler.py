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

import abc
import dataclasses
import math
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple, Protocol, cast

import torch

from lm_eval_duel.core.decision import EVALUATE_ALL
from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.core.hashing import hashed, uniform
from lm_eval_duel.core.lanes import Lanes
from lm_eval_duel.core.reveal import Step, WindowGroup
from lm_eval_duel.core.scores import IndexedScores, Score, known_sum
from lm_eval_duel.estimators.arguments import LATTICE_BLOCK, TOLERANCE, BeamArguments, check_block
from lm_eval_duel.estimators.base import Estimator, check_every_order
from lm_eval_duel.estimators.blocks import BeamBlocks
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


# ---------------------------------------------------------------- set_sampler
# Estimators of samplers whose text has many orders: the sum over them, exact or by a beam (chunk.py).
#
# A block has converged if the error of its estimate, over beams of three sizes, is at most `tolerance`; it then counts
# with its estimate, else with its bound. With `tolerance` K doubles until then. The sets of one beam are not evaluated
# again for the next.
#
# Shapes: N windows, R lanes, W block width, B blocks of a chunk, T steps.


STATES = 4096  # of a chunk of blocks in a level, if a network call holds fewer


class SetAccumulator:
    """The blocks of one group of windows: chunks of them while they are followed, and the sums of finished ones."""

    def __init__(self, group: WindowGroup, sampler: SetSampler):
        self.group, self.sampler, self.beam = group, sampler, sampler.own
        self.chunks: dict[int, Chunk] = {}
        self.begun = 0
        self.complete: list[int] = []  # chunks whose level has been evaluated
        self.waiting = [len(sampler.blocks(window)) for window in group.windows]  # blocks that are missing
        self.finished: list[int] = []  # rows of windows
        windows = len(group.windows)  # of each, over its finished blocks:
        self.log_prob, self.is_greedy, self.blocks = [0.0] * windows, [True] * windows, [BeamBlocks()] * windows
        self.nfe: list[int | None] = [0] * windows

    def fresh(self) -> Iterator[Lanes]:
        """The first states of every block, one chunk of blocks after the other."""
        spans, sums = self.sampler.block_spans(self.group), self.beam.sums
        steps = 1 if (shares := self.sampler.shares) is None else len(shares)
        every = 1 << max(width for _, _, width in spans)
        reached = min(followed(self.beam.most, every, sums, steps), every)  # by a step of a block

        def size(room: int) -> int:
            return min(max(4 * room, STATES) // min(self.beam.most, every), TABLE // (reached * sums * steps))

        for lanes, _ in self.sampler.batches(self.group, spans, size, EVALUATE_ALL):
            chunk = Chunk(self.group, self.sampler, self.begun, lanes)
            self.begun += 1
            yield cast(Lanes, self._next(chunk))  # the states in which all positions are masked

    def _next(self, chunk: Chunk) -> Lanes | None:
        """The next states of a chunk, or of its blocks that need more sets; None: all blocks are finished."""
        while (lanes := chunk.advance()) is None:
            found = chunk.found()
            if not (again := self._finish(chunk, found)).any():
                return None
            chunk = chunk.larger(self.begun, found, again)
            self.begun += 1
        self.chunks[chunk.number] = chunk
        return lanes

    def add(self, step: Step) -> None:
        """Enter what was evaluated at some states."""
        lanes, read = step.lanes, self.sampler.planes(step)
        number, index = (plane[:, 0] for plane in lanes.memory)  # (R,) each
        parts = {n: number == n for n in number.unique().tolist()}
        for n, mine in parts.items():
            chunk = self.chunks[n]
            planes = {
                name: plane[mine][(slice(None), *[slice(chunk.wide)] * (plane.dim() - 1))]
                for name, plane in read.items()
            }
            chunk.put(index[mine], planes)
        for n, mine in parts.items():  # once everything is entered: a step that runs out of memory comes again
            self.chunks[n].waiting -= int(mine.sum())
            if not self.chunks[n].waiting:
                self.complete.append(n)

    def following(self, finished: Lanes) -> Lanes | None:
        """The next states of the chunks whose level is complete, and the first ones of blocks that need more sets."""
        following: Lanes | None = None
        while self.complete:
            chunk = self.chunks.pop(self.complete.pop())
            chunk.follow()
            if (lanes := self._next(chunk)) is not None:
                following = lanes if following is None else following.concat(lanes)
        return following

    def _finish(self, chunk: Chunk, found: BeamResult) -> torch.Tensor:
        """Add up the blocks of a finished chunk; return the blocks that need more sets instead, (B,) bool."""
        converged = ~found.exact & (found.error <= (self.beam.tolerance or TOLERANCE))
        again = ~found.exact & (not chunk.is_largest)
        if self.beam.tolerance is not None:
            again &= ~converged
        value = torch.where(found.exact | converged, found.estimate, found.bound)  # (B,)
        error = torch.where(converged, found.error, 0.0)  # (B,)
        positions = chunk.lanes.masked.sum(1)  # (B,)
        greedy = chunk.path == chunk.block << chunk.wide  # (B,)
        of_block = (found.exact, converged, converged & (positions > LATTICE_BLOCK), found.bound, chunk.rows, error)
        planes = (chunk.lanes.row, positions, again, greedy, value, *of_block)
        lists = zip(*(plane.tolist() for plane in planes), strict=True)
        for row, m, goes_on, is_greedy, log_prob, *sums in lists:
            if goes_on:
                continue
            self.log_prob[row] += log_prob
            self.is_greedy[row] &= is_greedy
            self.nfe[row] = known_sum(self.nfe[row], self.sampler.steps(m))
            self.blocks[row] += BeamBlocks(1, *sums)
            self.waiting[row] -= 1
            if not self.waiting[row]:
                self.finished.append(row)
        return again

    def take(self, finished: Lanes) -> IndexedScores:
        """(row, score) of the windows that have all their blocks."""
        while self.finished:
            row = self.finished.pop()
            yield row, self.sampler.score(self.log_prob[row], self.is_greedy[row], self.nfe[row], self.blocks[row])


class SetSampler(Estimator):
    """A sampler whose texts have many orders, and whose next step depends only on the set of masked positions."""

    reads: ClassVar[type[BeamArguments]]
    own: BeamArguments

    def __init__(self, denoiser: Denoiser, block: int | str | None = "auto", *, seed: int = 0, **arguments: Any):
        self.own, self.seed = self.reads.popped_from(arguments), seed
        check_every_order(denoiser, self.name)
        super().__init__(denoiser, block=block, **arguments)
        check_block(self.name, self.own, self.block, only=denoiser.block is not None)
        self.empty_score = dataclasses.replace(self.score(0.0, True, 0, BeamBlocks()), near_ties=0)

    def score(self, log_prob: float, is_greedy: bool, nfe: int | None, blocks: BeamBlocks) -> Score:
        """The score of a window. Under a beam it has estimates, and the bounds of blocks that have not converged."""
        if self.own.all_sets:
            return Score(log_prob, is_greedy, nfe=nfe)
        return Score(log_prob, is_greedy, nfe=nfe, kind=blocks.kind, stderr=blocks.stderr, blocks=blocks)

    @property
    def shares(self) -> torch.Tensor | None:
        """The probability with which each step reveals a masked position, (T,), if steps have no other parameter."""
        return None

    @abc.abstractmethod
    def planes(self, step: Step) -> Planes:
        """The planes that `moves` reads of the predictions in some states, (R, W, ...) each.

        "log_probs" of the targets is one of them. Optional are "pick" (R, W), the positions that argmax decoding
        reveals next, and "missed" (R,), whether a token there is not the target.
        """

    @abc.abstractmethod
    def moves(self, level: StateLevel, planes: Planes, thin: Thin) -> Moves:
        """The subsets that the next step of each state of a level can reveal."""

    def steps(self, m: int) -> int | None:
        """The number of steps that a block of m positions takes; None: not known."""
        return None

    def score_group(self, group: WindowGroup) -> IndexedScores:
        sums = SetAccumulator(group, self)
        return self.reveal(group, EVALUATE_ALL, sums.fresh(), sums, following=sums.following)
