"""The size of a network call: as given or found by trial before the first one, and halved when memory runs out."""

from __future__ import annotations

import dataclasses
import logging
import weakref
from typing import TypeAlias

import torch

from lm_eval_duel.arguments import COUNT
from lm_eval_duel.core.decision import UnmaskingRule
from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.core.float_noise import random_rows
from lm_eval_duel.core.lanes import Lanes, Rows, blocks
from lm_eval_duel.core.network import Evaluator
from lm_eval_duel.core.windows import Window

log = logging.getLogger("lm_eval.duel_mdm")

# Network tokens of a call on a CPU. More were not faster on any CPU we tried, and take more memory.
CPU_TOKENS = 2048
# The first and the last trial on a GPU, in network tokens. More are not faster.
GPU_TOKENS = 1 << 14, 1 << 18
# Whole distributions in memory at once, in values. A rule keeps them, or a head that is not split off makes them.
VALUES = 1 << 27

Sizes: TypeAlias = dict[tuple[int | None, str], int]  # by (block, grid)
_largest: weakref.WeakKeyDictionary[Denoiser, Sizes] = weakref.WeakKeyDictionary()  # found by trial


@dataclasses.dataclass
class Budget:
    """The limits of one network call: `tokens` that the network evaluates, and `values` of whole distributions."""

    tokens: int
    values: int = VALUES
    halved: bool = False

    def rows(self, cost: int, values: int = 0) -> int:
        """The number of lanes that fit, of `cost` network tokens and `values` in memory each; at least one."""
        fits = self.tokens // max(cost, 1)
        if values:
            fits = min(fits, self.values // values)
        return max(1, fits)

    def room(self, view: Evaluator, rule: UnmaskingRule, *lanes: Lanes) -> int:
        """The number of lanes in one network call, each as expensive as the most expensive of `lanes`."""
        denoiser = view.denoiser
        costs = torch.cat([view.cost(part) for part in lanes])  # (R,)
        cost = int(costs.max())
        width = max(part.masked.shape[1] for part in lanes)
        values = view.carries * width
        if not denoiser.splits_head:  # logits at every position of a row
            values += cost * denoiser.vocab_size
        elif rule.dense_memory:  # the distributions of two steps, and what is computed from them
            values += 4 * width * denoiser.vocab_size
        return self.rows(cost, values)

    def halve(self, device: torch.device) -> None:
        """Halve both limits after an out-of-memory error. The first time is logged."""
        if not self.halved:
            log.warning(
                "Out of memory at %d tokens per call: halving the batch until it fits",
                self.tokens,
            )
            self.halved = True
        self.tokens = max(1, self.tokens // 2)
        self.values = max(1, self.values // 2)
        free(device)


def free(device: torch.device) -> None:
    """Release unused memory of the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


# ---------------------------------------------------------------- before the first call


def plan(
    denoiser: Denoiser,
    block: int | None,
    grid: str,
    batch_size: int | Budget | None,
    max_batch_size: int | None,
) -> Budget:
    """The budget of `batch_size` rows of max_length.

    None: 2048 tokens on a CPU, and on a GPU as many as fit, which is found by trial. `max_batch_size` limits it to
    that many rows of max_length. A `Budget` is returned unchanged, so that estimators that share one halve it together.
    Raises DuelError for a number below 1.
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
    windows = []
    for row in random_rows(denoiser, length, count).tolist():
        windows.append(Window(row[:context], row[context:]))
    rows = Rows.from_windows(windows, denoiser.device)
    view = denoiser.open(rows)

    spans = []  # (row, first column, width) of every block
    for n in range(count):
        for start, width in blocks(context, length - context, block, grid):
            spans.append((n, start, width))
    fresh = Lanes.fresh(rows, *torch.tensor(spans, device=denoiser.device).unbind(1))
    cost = int(view.cost(fresh).max())
    fitting = max(1, tokens // cost)
    predictions = view(fresh.select(slice(0, fitting)))
    predictions.confidence  # noqa: B018 - computing it takes the memory
