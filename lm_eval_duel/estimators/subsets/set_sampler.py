"""Estimators of samplers whose text has many orders: the sum over them, exact or by a beam (chunk.py).

A block has converged if the error of its estimate, over beams of three sizes, is at most `tolerance`; it then counts
with its estimate, else with its bound. With `tolerance` K doubles until then. The sets of one beam are not evaluated
again for the next.

Shapes: N windows, R lanes, W block width, B blocks of a chunk, T steps.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar, cast

import torch

from lm_eval_duel.core.accumulators import Step
from lm_eval_duel.core.decision import EVALUATE_ALL
from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.core.lanes import Lanes
from lm_eval_duel.core.reveal import WindowGroup
from lm_eval_duel.core.scores import IndexedScores, Score, known_sum
from lm_eval_duel.estimators.arguments import LATTICE_BLOCK, TOLERANCE, BeamArguments, check_block
from lm_eval_duel.estimators.base import Estimator
from lm_eval_duel.estimators.blocks import BeamBlocks
from lm_eval_duel.estimators.checks import check_every_order
from lm_eval_duel.estimators.subsets.chunk import TABLE, BeamResult, Chunk, followed
from lm_eval_duel.estimators.subsets.moves import Moves, Planes, StateLevel, Thin

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
