"""The exact likelihood of samplers whose texts have many orders: the sum over the sets of masked positions of a block.

    alpha(H) = p that a sampler comes to mask exactly the positions H, with the targets elsewhere
    alpha(H - A) = sum over H of alpha(H) P(A | H), larger sets first; alpha(no position) = p of the block

P(A | H) is the probability of a move: that one step of the sampler reveals exactly the positions A of H, and their
targets there. One network row at H gives it for every A. The sum has three parts:

    states      every set H of every block is a lane, evaluated once (`SetAccumulator.states`)
    tables      what the sampler reads of the predictions at H, kept until a block has all of its sets (`add`)
    moves       P(A | H) from these tables, and the sum over H (`sum_over_orders`)

A sampler is a subclass of `OrderSum` that says what it reads and how it moves: sampled_confidence.py, sampled_order.py.

Shapes: N windows, R lanes, W block width, B blocks of a chunk, S = 2^W sets (by number: the sum of 2^position), X
states of one size, I moves, x states that they reach, T steps of a schedule of which a state must know its own (else
1).
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch

from lm_eval_duel.core.decision import EVALUATE_ALL
from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.core.lanes import Lanes
from lm_eval_duel.core.reveal import Step, WindowGroup
from lm_eval_duel.core.scores import IndexedScores, Score, known_sum
from lm_eval_duel.estimators.arguments import check_block
from lm_eval_duel.estimators.base import Estimator
from lm_eval_duel.estimators.checks import check_every_order
from lm_eval_duel.estimators.lattice import belonging, every_set
from lm_eval_duel.estimators.moves import Moves, StateLevel, Tables, UntimedStates, arrivals, from_bitmask, to_bitmask

STATES = 4096  # sets of a chunk of blocks, if a network call holds fewer
TABLE = 1 << 24  # values of a chunk's tables: 128 MiB


class OrderSum(Estimator):
    """A sampler whose texts have many orders, and whose next step depends only on the set of masked positions."""

    timing: UntimedStates = UntimedStates()  # whether a state must know its step

    def __init__(self, denoiser: Denoiser, block: int | str | None, **layout: Any):
        check_every_order(denoiser, self.name)
        super().__init__(denoiser, block=block, **layout)
        check_block(self.name, self.block, only=denoiser.block is not None)

    @abc.abstractmethod
    def step_begins(self, lanes: Lanes) -> torch.Tensor:
        """True for lanes whose number of masked positions is one at which a step may begin, (R,) bool."""

    @abc.abstractmethod
    def read(self, step: Step) -> Tables:
        """The parts of the predictions in some states that `moves` reads, (R, W, ...) each.

        "log_probs" of the targets is one of them. Optional are "pick" (R, W), the positions that argmax decoding
        reveals next, and "missed" (R, W), where a token there is not the target.
        """

    @abc.abstractmethod
    def moves(self, level: StateLevel, tables: Tables) -> Moves:
        """The moves of the next step from each state of a level, from what was read in these states (X, W, ...)."""

    def step_count(self, m: int) -> int | None:
        """The number of steps that a block of m positions takes; None: not known."""
        return None

    def score_group(self, group: WindowGroup) -> IndexedScores:
        sums = SetAccumulator(group, self)
        return self.reveal(group, EVALUATE_ALL, sums.states(), sums)


@dataclasses.dataclass
class SetChunk:
    """Some blocks, and what was read of the predictions at their sets of masked positions."""

    lanes: Lanes  # (B,) as their blocks begin
    missing: int  # sets that have not been evaluated
    tables: Tables = dataclasses.field(default_factory=dict)  # (B, S, W, ...) each


class SetAccumulator:
    """The blocks of one group of windows: tables that are filled call by call, and the sums of finished blocks."""

    def __init__(self, group: WindowGroup, sampler: OrderSum):
        self.group = group
        self.sampler = sampler
        self.chunks: dict[int, SetChunk] = {}
        # of each window: the number of blocks that are missing, and the sums over those that are finished
        self.waiting = [len(sampler.blocks(window)) for window in group.windows]
        count = len(group.windows)
        self.log_prob = [0.0] * count
        self.is_greedy = [True] * count
        self.nfe: list[int | None] = [0] * count

    def states(self) -> Iterator[Lanes]:
        """Every set of every block with which a step may begin, one chunk of blocks after the other."""
        spans = self.sampler.block_spans(self.group)
        widest = max(width for _, _, width in spans)
        # for each set a sampler's largest table (W, W), and an entry of alpha for each step
        values_of_block = (widest * widest + self.sampler.timing.count) << widest
        most_blocks = TABLE // values_of_block

        def blocks_of_chunk(room: int) -> int:
            sets = max(4 * room, STATES)  # a chunk fills several calls
            return min(sets >> widest, most_blocks)

        chunks = self.sampler.batches(self.group, spans, blocks_of_chunk, EVALUATE_ALL)
        for n, (fresh, _) in enumerate(chunks):
            lanes = every_set(self.group, fresh, n)
            lanes = lanes.select(self.sampler.step_begins(lanes))
            self.chunks[n] = SetChunk(fresh, len(lanes))
            yield lanes

    def add(self, step: Step) -> None:
        """Enter what was read at some sets."""
        planes = self.sampler.read(step)
        lanes_of_chunk, block = belonging(step.lanes)  # (R,) each
        state = to_bitmask(step.lanes.masked)  # (R,)
        for n, members in lanes_of_chunk.items():
            chunk = self.chunks[n]
            block_count, width = chunk.lanes.masked.shape
            for name, plane in planes.items():
                # a chunk may be narrower than the call, whose lanes come from several chunks
                index: tuple[torch.Tensor | slice, ...] = (members, *[slice(width)] * (plane.dim() - 1))
                part = plane[index]
                if name not in chunk.tables:
                    chunk.tables[name] = part.new_zeros(block_count, 1 << width, *part.shape[1:])
                chunk.tables[name][block[members], state[members]] = part

        # only now that everything is entered: a step that runs out of memory is taken again
        for n, members in lanes_of_chunk.items():
            self.chunks[n].missing -= int(members.sum())

    def take(self, finished: Lanes) -> IndexedScores:
        """(row, score) of the windows that have all their blocks. Complete chunks are summed up."""
        complete = [n for n, chunk in self.chunks.items() if not chunk.missing]
        for n in complete:
            chunk = self.chunks.pop(n)
            log_prob = sum_over_orders(chunk, self.sampler).tolist()
            is_greedy = argmax_writes(chunk).tolist()
            sizes = chunk.lanes.masked.sum(1).tolist()
            for block, row in enumerate(chunk.lanes.row.tolist()):
                step_count = self.sampler.step_count(sizes[block])
                self.log_prob[row] += log_prob[block]
                self.is_greedy[row] &= is_greedy[block]
                self.nfe[row] = known_sum(self.nfe[row], step_count)
                self.waiting[row] -= 1
                if not self.waiting[row]:
                    yield row, Score(self.log_prob[row], self.is_greedy[row], nfe=self.nfe[row])


def sum_over_orders(chunk: SetChunk, sampler: OrderSum) -> torch.Tensor:
    """log p of each block, (B,): alpha of its sets, larger ones first, from all positions masked to none.

    Set S of block b is the state number b 2^W + S. A state passes its probability on to smaller ones only, so when its
    size comes up, its alpha is complete.
    """
    masked = chunk.lanes.masked  # (B, W)
    block_size = masked.sum(1)  # (B,)
    block_count, width = masked.shape
    timing = sampler.timing
    tables = {name: table.flatten(0, 1) for name, table in chunk.tables.items()}  # (B S, W, ...) each
    every_state = torch.arange(block_count << width, device=masked.device)  # (B S,)
    sizes = from_bitmask(every_state, width).sum(1)  # (B S,) from the low W bits, which are the set

    # before the first step all positions of a block are masked
    log_alpha = tables["log_probs"].new_full((len(every_state), timing.count), -math.inf)  # (B S, T)
    empty_set = torch.arange(block_count, device=masked.device) << width  # (B,) the state of each block
    log_alpha[empty_set + to_bitmask(masked), 0] = 0

    log_p = log_alpha.new_full((block_count,), -math.inf)  # (B,)
    for size in range(width, 0, -1):
        is_reached = (log_alpha > -math.inf).any(1)  # (B S,)
        state = ((sizes == size) & is_reached).nonzero()[:, 0]  # (X,)
        if not len(state):
            continue

        # the moves from all states of this size, and the states in which they end
        level = StateLevel(block_size[state >> width], from_bitmask(state, width))
        tables_of_level = {name: table[state] for name, table in tables.items()}
        moves = sampler.moves(level, tables_of_level)
        state_after = state[moves.state] & ~moves.revealed  # (I,) in the same block: the mask has low bits only
        reached, place = state_after.unique(return_inverse=True)  # (x,), (I,)

        # p of arriving there at each step
        log_leave = timing.wait(log_alpha[state], size)  # (X, T)
        log_arrived = arrivals(log_leave, moves, place, len(reached))  # (x, T)
        log_arrived = timing.reveal(log_arrived, size, sizes[reached])

        # a block is finished at any step; other states go on
        is_finished = sizes[reached] == 0  # (x,)
        block = reached[is_finished] >> width
        log_p[block] = log_p[block].logaddexp(log_arrived[is_finished].logsumexp(1))
        log_alpha[reached] = log_alpha[reached].logaddexp(timing.advance(log_arrived))
    return log_p


def argmax_writes(chunk: SetChunk) -> torch.Tensor:
    """True for the blocks that argmax decoding writes, (B,) bool; False if the sampler has no such decoding."""
    state = to_bitmask(chunk.lanes.masked)  # (B,)
    if "pick" not in chunk.tables:
        return torch.zeros_like(state, dtype=torch.bool)
    block = torch.arange(len(state), device=state.device)  # (B,)
    written = torch.ones_like(state, dtype=torch.bool)  # (B,)
    while ((state > 0) & written).any():
        # a finished block stays in the empty set, in which nothing was read
        written &= ~(chunk.tables["missed"][block, state].any(1) & (state > 0))
        pick = to_bitmask(chunk.tables["pick"][block, state])  # (B,)
        state = torch.where(written, state & ~pick, 0)
    return written
