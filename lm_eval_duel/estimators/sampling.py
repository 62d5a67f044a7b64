"""Samples of a `DuelEstimator` (the paper, Algorithm 1): the reveal loop with one lane for each row.

A finished block is committed, so that later blocks see it, and then the row's next block enters.

Shapes: N prompts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import torch

from lm_eval_duel.core.decision import UnmaskingRule
from lm_eval_duel.core.reveal import Reveal
from lm_eval_duel.core.scores import Sample, Samples
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
            yield n, Sample.from_score(estimator.empty_score, (), prompt.tail)
    for group in estimator.groups(prompts, range(len(prompts)), generating=True):
        samples = Samples(group.rows, group.windows, estimator.traced)
        blocks = [deque(estimator.blocks(prompt)) for prompt in group.windows]  # of each row, those not started
        first = group.fresh([(row, *left.popleft()) for row, left in enumerate(blocks)])
        rule, draw = sampler(group.window_indices)
        reveal = Reveal(group, rule, [first], samples, estimator.budget, estimator.counts, draw)
        for finished in reveal:
            group.view.commit(finished)
            following = []
            for row in finished.row.tolist():
                if not blocks[row]:
                    continue
                if stop and stop(group.window_indices[row], samples.tokens(row, end=blocks[row][0][0])):
                    samples.stop(row)
                else:
                    following.append((row, *blocks[row].popleft()))
            if following:
                reveal.waiting.put_first(group.fresh(following))
            for row, sample in samples.take(finished):
                estimator.counts.add(sample, len(sample.tokens))
                yield group.window_indices[row], sample
