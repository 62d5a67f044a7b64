"""An accumulator of samples (the paper, Algorithm 1), for a reveal loop with one lane for each row.

A finished block is committed, so that later blocks see it, and then the row's next block enters.

Shapes: N prompts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import TypeAlias

from lm_eval_duel.core.accumulators import ScoreAccumulator
from lm_eval_duel.core.lanes import Lanes
from lm_eval_duel.core.reveal import BlockSpan, WindowGroup
from lm_eval_duel.core.scores import Sample
from lm_eval_duel.estimators.base import Estimator

Stop: TypeAlias = Callable[[int, tuple[int, ...]], bool]  # (index, tokens so far) -> whether to stop here


class SampleAccumulator(ScoreAccumulator):
    """The samples of one group of prompts: their scores, their tokens, and the blocks that are not begun."""

    def __init__(self, group: WindowGroup, estimator: Estimator, stop: Stop | None):
        super().__init__(group.rows, estimator.traced)
        self.group, self.stop = group, stop
        self.blocks = [deque(estimator.blocks(prompt)) for prompt in group.windows]  # (first column, width), by row

    def next_block(self, row: int) -> BlockSpan:
        """The next block of a row."""
        return (row, *self.blocks[row].popleft())

    def following(self, finished: Lanes) -> Lanes | None:
        """Commit finished blocks; the next block of each of their rows that has one and goes on."""
        self.group.view.commit(finished)
        spans = []
        for row in finished.row.tolist():
            if self.blocks[row] and self.stop and self.stop(self.group.window_indices[row], self.tokens(row)):
                self.blocks[row].clear()
                self.expected[row] = self.sums[row, 0]  # the sample is what has been revealed
                self.target[row] = int(self.expected[row])
            elif self.blocks[row]:
                spans.append(self.next_block(row))
        return self.group.fresh(spans) if spans else None

    def tokens(self, row: int) -> tuple[int, ...]:
        """The tokens of a row, up to the first block that is not begun."""
        end = self.blocks[row][0][0] if self.blocks[row] else self.origin[row] + self.target[row]
        return tuple(self.group.rows.ids[row, self.origin[row] : end].tolist())

    def take(self, finished: Lanes) -> Iterator[tuple[int, Sample]]:
        """(row, sample) of each text that is complete."""
        for row, scored in super().take(finished):
            tokens, prompt = self.tokens(row), self.group.windows[row]
            tail = prompt.tail + len(prompt.target) - len(tokens)
            yield row, Sample(**vars(scored), tokens=tokens, tail=tail)
