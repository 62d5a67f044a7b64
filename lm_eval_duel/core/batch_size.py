"""The size of a network call before the first one: as given, or found by trial.

Shapes: N windows.
"""

from __future__ import annotations

import logging
import weakref

import torch

from lm_eval_duel.arguments import COUNT
from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.core.float_noise import random_rows
from lm_eval_duel.core.lanes import Lanes, Rows, blocks
from lm_eval_duel.core.reveal import Budget, free
from lm_eval_duel.core.windows import Window

log = logging.getLogger("lm_eval.duel_mdm")

CPU_TOKENS = 2048  # network tokens of a call: more were not faster on any CPU we tried, and take more memory
GPU_TOKENS = 1 << 14, 1 << 18  # the first and the last trial: more are not faster

_largest: weakref.WeakKeyDictionary[Denoiser, dict[tuple[int | None, str], int]] = weakref.WeakKeyDictionary()


def plan(
    denoiser: Denoiser, block: int | None, grid: str, batch_size: int | Budget | None, max_batch_size: int | None
) -> Budget:
    """The budget of `batch_size` rows of max_length; None: 2048 tokens on a CPU, as many as fit on a GPU, by trial.

    At most `max_batch_size` rows of max_length, and at least one. A budget stays as it is: estimators that share one
    halve it together. Raises DuelError for a number below 1.
    """
    if isinstance(batch_size, Budget):
        return batch_size
    COUNT("batch_size", batch_size)
    COUNT("max_batch_size", max_batch_size)
    if batch_size:
        tokens = batch_size * denoiser.max_length
    elif denoiser.device.type == "cpu":
        tokens = max(CPU_TOKENS, denoiser.max_length)
    else:
        tried = _largest.setdefault(denoiser, {})
        if (block, grid) not in tried:
            tried[block, grid] = largest(denoiser, block, grid, *GPU_TOKENS)
        tokens = tried[block, grid]
    if max_batch_size:
        tokens = min(tokens, max_batch_size * denoiser.max_length)
    return Budget(tokens)


def largest(denoiser: Denoiser, block: int | None, grid: str, least: int, most: int) -> int:
    """The network tokens of the largest call: `least`, doubled until a trial runs out of memory, up to `most`."""
    tokens = max(least, denoiser.max_length)
    while 2 * tokens <= most:
        try:
            _try(denoiser, block, grid, 2 * tokens)
        except torch.OutOfMemoryError:
            free(denoiser.device)
            break
        tokens *= 2
    log.info("batch_size=auto: network calls of %d tokens", tokens)
    return tokens


@torch.inference_mode()
def _try(denoiser: Denoiser, block: int | None, grid: str, tokens: int) -> None:
    """One call of `tokens` network tokens, on different rows of max_length."""
    length = denoiser.max_length
    count = -(-tokens // length)  # rounded up
    # a network that predicts from the position before (shift, seeds_blocks) needs a context of at least one
    context = max(denoiser.shift, denoiser.seeds_blocks, length // 8)
    ids = random_rows(denoiser, length, count).tolist()
    rows = Rows.from_windows([Window(row[:context], row[context:]) for row in ids], denoiser.device)
    view = denoiser.open(rows)
    spans = blocks(context, length - context, block, grid)
    lanes = torch.tensor([(n, *span) for n in range(count) for span in spans], device=denoiser.device)
    fresh = Lanes.fresh(rows, *lanes.unbind(1))
    cost = int(view.cost(fresh).max())
    view(fresh.select(slice(0, max(1, tokens // cost)))).confidence  # noqa: B018 - computing it takes the memory
