"""Samples of a `DuelEstimator` (the paper, Algorithm 1): the reveal loop with one lane for each row.

A finished block is committed, so that later blocks see it, and then the row's next block enters.

Shapes: N prompts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias, cast

import torch

from lm_eval_duel.core.decision import UnmaskingRule
from lm_eval_duel.core.lanes import Lanes
from lm_eval_duel.core.reveal import BlockSpan, Reveal, WindowGroup
from lm_eval_duel.core.scores import Sample, WindowScores
from lm_eval_duel.core.tokens import Draw
from lm_eval_duel.core.windows import Ids, Window
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.base import Estimator

Sampler: TypeAlias = Callable[[Sequence[int]], tuple[UnmaskingRule, Draw]]  # of the prompts at these indices
Stop: TypeAlias = Callable[[int, tuple[int, ...]], bool]  # (index, tokens so far) -> whether to stop here


def prompts(contexts: Sequence[Ids], length: int, suffix: Ids, tail: int) -> list[Window]:
    """The rows to generate, as windows whose targets are placeholders."""
    if length < 0:
        raise DuelError(f"length is the number of tokens to generate, at least 0; got {length}.")
    return [Window(context, (0,) * length, suffix, tail) for context in contexts]


@torch.inference_mode()
def stream(
    estimator: Estimator, prompts: list[Window], sampler: Sampler, stop: Stop | None
) -> Iterator[tuple[int, Sample]]:
    """(index, sample) of each prompt as it is finished."""
    for n, prompt in enumerate(prompts):
        if not prompt.target:
            yield n, Sample.from_score(Estimator.empty_score, (), prompt.tail)
    for group in estimator.groups(prompts, range(len(prompts)), generating=True):
        samples = Samples(group, estimator, stop)
        rule, draw = sampler(group.window_indices)
        first = [samples.next_block(row) for row in range(len(group.windows))]
        sampled = Reveal(
            group, rule, [group.fresh(first)], samples, estimator.budget, estimator.counts, draw, samples.following
        )
        for row, sample in cast(Iterator[tuple[int, Sample]], sampled):
            estimator.counts.add(sample, len(sample.tokens))
            yield group.window_indices[row], sample


class Samples(WindowScores):
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
            yield row, Sample.from_score(scored, tokens, prompt.tail + len(prompt.target) - len(tokens))
