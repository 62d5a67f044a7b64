"""A network as `reference.py` calls it: one row z (L,) -> logits (L, V), without lanes, batches or kept keys.

    network                         is shown
    bidirectional                   z
    block-causal, causal prefix     z up to the end of the block in progress, which is filled up with [MASK] or cut
    causal                          the whole text, once: a prediction does not depend on what follows

This shares no code with the views of a run, only the calls of the network: `features` or `stream`, and `head`. Caches,
noise levels, guidance and filters: wrapped_networks.py. Networks whose noise is random tokens: commit_once.py.

Shapes: L row length, D features, V tokens, W block width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from lm_eval_duel import reference
from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.core.windows import Window

NO_ID = -1  # the mask of a causal network, which is never shown one


class OneRow:
    """`denoiser` for one window; `block` and `grid` as in an estimator.

    `x`, `blocks`, `m` and `relative_positions` are the arguments of `reference.log_likelihood`, besides this network
    and a rule. `inputs` (L, D): the input of the LM head in the last call, None if there are two.

    `difference_under_masks`: by how much the logits of a row of masks differ between positions, in their standard
    deviations; None if there was no such row.
    """

    def __init__(self, denoiser: Denoiser, window: Window, block: int | None, grid: str):
        self.denoiser = denoiser
        self.block = block
        self.relative_positions = denoiser.relative_positions
        self.m = NO_ID if denoiser.mask_id is None else denoiser.mask_id

        # the row: context | target | tail | suffix
        self.x = [*window.context, *window.target, *[self.m] * window.tail, *window.suffix]
        self.origin = len(window.context)
        self.end = self.origin + len(window.target)
        self.suffix = len(window.suffix)

        # blocks are counted from here, and hold the target positions that are not known
        self.zero = 0 if grid == "row" and block is not None else self.origin
        self.known = [self.origin + index for index in window.known]
        target = range(self.origin, self.end)
        self.scored = [column for column in target if column not in self.known]
        self.blocks: Sequence[Sequence[int]] = reference.cut(self.scored, block, self.zero)

        self.inputs: torch.Tensor | None = None
        self.difference_under_masks: float | None = None
        self._causal: torch.Tensor | None = None  # (L, V)

    def path(self, F: reference.Rule) -> reference.Path:
        """The likelihood of the window under this network and a rule."""
        return reference.log_likelihood(self.x, self.blocks, self, F, self.m, self.relative_positions)

    def span(self, position: int) -> tuple[int, int]:
        """The first column of the block of a target position, and the column after its last."""
        if self.block is None:
            return self.origin, self.end
        begin = position - (position - self.zero) % self.block
        return begin, min(begin + self.block, self.end)

    @torch.inference_mode()
    def __call__(self, z: torch.Tensor) -> torch.Tensor:
        """Logits (L, V) at the positions of the block in progress; others may be NaN, or not there."""
        excluded = self.denoiser.excluded
        logits = self.logits(self.denoiser, z.to(self.denoiser.device))
        if (z == self.m).all() and len(self.blocks[0]) > 1:
            block = logits[list(self.blocks[0])][:, ~excluded]  # (W, V)
            block = block.nan_to_num(neginf=0.0)
            largest = (block - block[0]).abs().max()
            self.difference_under_masks = float(largest / block.std().clamp(min=1e-12))
        return logits.masked_fill(excluded, -math.inf)

    def logits(self, denoiser: Denoiser, z: torch.Tensor) -> torch.Tensor:
        """Logits (L, V) of a row in float64."""
        if self._causal is not None:
            return self._causal
        masked = (z[self.origin : self.end] == self.m).nonzero()
        begin, _ = self.span(self.origin + int(masked[0]))
        shown = self.shown(denoiser, z, begin)
        features = self.features(denoiser, shown, begin)  # (L, D)

        # A network with shifted logits predicts a position one before it. Causal networks are not shown the last
        # token of the text, so they have a feature less than the text has tokens.
        causal = denoiser.attention == "causal"
        length = len(features)
        if causal:
            length += denoiser.shift
        predicted_at = torch.arange(length) - denoiser.shift  # (L,)
        if denoiser.seeds_blocks:  # the clean stream predicts the first token of a block
            predicted_at[begin] = begin - 1
        self.inputs = features[predicted_at.clamp(min=0).to(features.device)]
        logits = self.head(denoiser, self.inputs).double()
        if causal:
            self._causal = logits
        return logits

    def shown(self, denoiser: Denoiser, z: torch.Tensor, begin: int) -> torch.Tensor:
        """The row that the network sees while the block at `begin` is revealed."""
        if denoiser.attention == "causal":
            return torch.tensor(self.x[: len(z) - denoiser.shift], device=z.device)
        if not denoiser.by_blocks:
            return z
        stop = begin + (denoiser.block or 1)
        shown = z[:stop]
        if denoiser.last_block == "cut":
            return shown
        return torch.nn.functional.pad(shown, (0, stop - len(shown)), value=self.m)

    def features(self, denoiser: Denoiser, shown: torch.Tensor, begin: int) -> torch.Tensor:
        """The input of the LM head (L, D) of the row."""
        if not denoiser.by_blocks:
            return denoiser.features(shown[None], None)[0]
        column = torch.arange(len(shown), device=shown.device)  # (L,)
        seen = self.attended(denoiser, column, begin)
        features, _ = denoiser.stream(shown[None], column[None], seen[None], None)
        return features[0]

    def attended(self, denoiser: Denoiser, column: torch.Tensor, begin: int) -> torch.Tensor:
        """The columns that each of `column` (L,) attends to in a network that works by blocks, (L, L) bool."""
        if denoiser.attention == "causal_prefix":
            return (column[:, None] >= column) | (column[:, None] >= begin)
        zero = self.origin if denoiser.anchor == "target" else 0
        number = (column - zero) // (denoiser.block or 1)  # (L,)
        number = number.clamp(min=-1)  # what is before `zero` is one block
        return number[:, None] >= number

    def head(self, denoiser: Denoiser, features: torch.Tensor) -> torch.Tensor:
        """Logits (L, V) of features (L, D)."""
        return denoiser.head(features)
