"""Every set of masked positions of every block of a group of windows: evaluated once, kept until its block is complete.

Blocks are taken in chunks. A chunk's tables are filled call by call, and folded when all of its states are there.

Shapes: N windows, L row length, R lanes, W block width, B blocks of a chunk, m masked positions, S = 2^m states.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from lm_eval_duel.core.decision import EVALUATE_ALL
from lm_eval_duel.core.lanes import Lanes
from lm_eval_duel.core.reveal import WindowGroup
from lm_eval_duel.core.scores import IndexedScores
from lm_eval_duel.estimators.base import Estimator
from lm_eval_duel.estimators.subsets.sets import fresh_positions, number_of, numbered

TABLE = 1 << 22  # the most values of a table of a chunk


@dataclasses.dataclass
class Chunk:
    """Some blocks while the tables of their states are filled."""

    lanes: Lanes  # (B,) as their blocks begin
    waiting: int  # states that are missing

    @property
    def full(self) -> torch.Tensor:
        """The state of each block in which all its positions are masked, (B,)."""
        return (1 << self.lanes.masked.sum(1)) - 1


@dataclasses.dataclass(frozen=True)
class Located:
    """Where states of a call stand in the tables."""

    chunk: torch.Tensor  # (R,) the chunk's number
    block: torch.Tensor  # (R,) the block in its chunk
    state: torch.Tensor  # (R,)
    position: torch.Tensor  # (R, W) the number of each position among those that are masked as the block begins


class SubsetAccumulator(abc.ABC):
    """The tables of one group of windows. A subclass says what a table holds, and what a complete one gives."""

    def __init__(self, group: WindowGroup, estimator: Estimator):
        self.group, self.estimator = group, estimator
        count, length = group.rows.ids.shape
        device = group.rows.ids.device
        self.place = torch.full((2, count, length + 1), -1, dtype=torch.int64, device=device)  # chunk and block in it
        self.chunks: dict[int, Any] = {}
        self.begun = 0  # how many chunks
        self.waiting = [len(estimator.blocks(window)) for window in group.windows]  # blocks that are missing

    def states(self) -> Iterator[Lanes]:
        """Every state of every block that is reached, one chunk of blocks after the other."""
        group, places, done = self.group, self.estimator.block_spans(self.group), 0
        block = max(width for _, _, width in places)
        while done < len(places):
            room = self.estimator.budget.room(group.view, EVALUATE_ALL, group.fresh(places[done : done + 1]))
            most = TABLE // (block << block)
            count = max(1, min(most, 4 * -(-room // (1 << block))))  # a chunk fills several calls
            lanes, done = group.fresh(places[done : done + count]), done + count
            states = (1 << lanes.masked.sum(1)) - 1  # (B,)
            of_block = torch.arange(len(lanes), device=states.device).repeat_interleave(states)  # (R,)
            before = (states.cumsum(0) - states).repeat_interleave(states)  # (R,)
            number = torch.arange(len(of_block), device=states.device) - before + 1  # (R,) 1..2^m - 1
            states_of = lanes.select(of_block)
            position = numbered(states_of.masked).clamp(min=0)  # (R, W)
            masked = states_of.masked & (number[:, None] >> position & 1).bool()  # (R, W)
            states_of = states_of.show(group.rows.targets(states_of), masked)
            self._begin(lanes, len(states_of))
            yield states_of

    def _begin(self, lanes: Lanes, states: int) -> None:
        """Make the tables of these blocks, of which `states` states will be evaluated."""
        self.place[0, lanes.row, lanes.start] = self.begun
        self.place[1, lanes.row, lanes.start] = torch.arange(len(lanes), device=lanes.row.device)
        self.chunks[self.begun] = self.new_chunk(lanes, states, int(lanes.masked.sum(1).max()))
        self.begun += 1

    def locate(self, lanes: Lanes) -> Located:
        """Where these states stand in the tables."""
        chunk, block = self.place[:, lanes.row, lanes.start]  # (R,) each
        position = numbered(fresh_positions(lanes))  # (R, W)
        return Located(chunk, block, number_of(lanes.masked, position), position)

    def enter(
        self, lanes: Lanes, located: Located, states: Mapping[str, torch.Tensor], positions: Mapping[str, torch.Tensor]
    ) -> None:
        """Write values into the tables of these names: of `states` (R, ...), and of their masked `positions` (R, W,
        ...).

        On out-of-memory in here, these states are evaluated and entered again.
        """
        lane, at = lanes.masked_at  # (C,)
        numbers, counts = (part.tolist() for part in located.chunk.unique(return_counts=True))
        for n in numbers:
            mine = located.chunk == n  # (R,)
            r, w = lane[mine[lane]], at[mine[lane]]  # (c,)
            for name, plane in states.items():
                getattr(self.chunks[n], name)[located.block[mine], located.state[mine]] = plane[mine]
            for name, plane in positions.items():
                getattr(self.chunks[n], name)[located.block[r], located.state[r], located.position[r, w]] = plane[r, w]
        for n, count in zip(numbers, counts, strict=True):
            self.chunks[n].waiting -= count

    def take(self, finished: Lanes) -> IndexedScores:
        """(row, score) of the windows that have all their blocks. Complete chunks are folded."""
        for n in [n for n, chunk in self.chunks.items() if not chunk.waiting]:
            chunk = self.chunks.pop(n)
            self.fold(chunk)
            for row in chunk.lanes.row.tolist():
                self.waiting[row] -= 1
                if not self.waiting[row]:
                    yield row, self.score(row)

    @abc.abstractmethod
    def new_chunk(self, lanes: Lanes, states: int, most: int) -> Chunk:
        """Empty tables for these fresh blocks (B,), which have `states` states and at most `most` masked positions."""

    @abc.abstractmethod
    def fold(self, chunk: Any) -> None:
        """Enter what a complete chunk gives."""

    @abc.abstractmethod
    def score(self, row: int) -> Any:
        """The score of a window that has all its blocks."""
