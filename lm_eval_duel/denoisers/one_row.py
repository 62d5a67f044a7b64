"""A network as `reference.py` calls it: one row z (L,) -> logits (L, V), without lanes, batches or kept keys.

    network                         is shown
    bidirectional                   z
    under a cache                   z as the block began; then the evaluated positions, against its keys and values
    block-causal, causal prefix     z up to the end of the block in progress, which is filled up with [MASK] or cut
    causal                          the whole text, once: a prediction does not depend on what follows

This is written apart from the views, and shares the network calls alone with them (`features` or `stream`, `head`, and
`begin` and `step` under a cache). So whatever the views do with lanes is checked against it.

Shapes: L row length, Q positions of a call, K keys, D features, V tokens.
"""

from __future__ import annotations

import math

import torch

from lm_eval_duel import reference
from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.cached.denoiser import Cached
from lm_eval_duel.denoisers.cached.kept_keys import Step
from lm_eval_duel.denoisers.dit.denoiser import Timed
from lm_eval_duel.denoisers.wrappers.exclusion import Excluding
from lm_eval_duel.denoisers.wrappers.guidance import Guided
from lm_eval_duel.denoisers.wrappers.warpers import Warped

NO_ID = -1  # the mask of a causal network, which is never shown one


def supports(denoiser: Denoiser) -> bool:
    """Whether what a network is shown is known here: not if it opens rows in a way of its own."""
    if isinstance(denoiser, Cached | Excluding | Guided | Warped):
        return supports(denoiser.plain)
    return type(denoiser).open in (Denoiser.open, Timed.open)


class OneRow:
    """`denoiser` for one window; `block` and `grid` as in an estimator.

    `x`, `blocks` and `m` are the arguments of `reference.log_likelihood` beside this network and a rule.
    """

    def __init__(self, denoiser: Denoiser, window: Window, block: int | None, grid: str):
        self.denoiser, self.block = denoiser, block
        self.m = NO_ID if denoiser.mask_id is None else denoiser.mask_id
        self.origin, self.end = len(window.context), len(window.context) + len(window.target)
        self.suffix = len(window.suffix)
        self.x = [*window.context, *window.target, *[self.m] * window.tail, *window.suffix]
        self.zero = 0 if grid == "row" and block is not None else self.origin  # blocks count from here
        self.known = [self.origin + index for index in window.known]
        scored = [column for column in range(self.origin, self.end) if column not in self.known]
        self.blocks = reference.cut(scored, block, self.zero)
        self._causal: torch.Tensor | None = None  # (L, V)

    def span(self, position: int) -> tuple[int, int]:
        """The first column of the block of a target position, and the column after its last."""
        if self.block is None:
            return self.origin, self.end
        begin = position - (position - self.zero) % self.block
        return begin, min(begin + self.block, self.end)

    @torch.inference_mode()
    def __call__(self, z: torch.Tensor) -> torch.Tensor:
        """Logits (L, V) at the positions of the block in progress; others may be NaN, or not there."""
        logits = self._distribution(self.denoiser, z.to(self.denoiser.device))
        return logits.masked_fill(self.denoiser.excluded, -math.inf)

    def _distribution(self, denoiser: Denoiser, z: torch.Tensor) -> torch.Tensor:
        """Logits (L, V) under the wrappers around a network, in float64."""
        if isinstance(denoiser, Warped):
            return warped(denoiser, self._distribution(denoiser.plain, z))
        if isinstance(denoiser, Excluding):
            return self._distribution(denoiser.plain, z)
        if isinstance(denoiser, Guided):
            bare = z.clone()
            bare[: self.origin] = self.m
            bare[len(z) - self.suffix :] = self.m
            conditional, unconditional = (self._distribution(denoiser.plain, row) for row in (z, bare))
            return unconditional + (1 + denoiser.scale) * (conditional - unconditional)
        masked = (z[self.origin : self.end] == self.m).nonzero()
        begin, _ = self.span(first := self.origin + int(masked[0]))
        shown = self._shown(denoiser, z, begin)
        logits = self._read(denoiser, self._features(denoiser, shown, begin), begin)
        if denoiser.relative_positions and (shown == self.m).all():  # an exact tie: all positions are alike
            return logits[first].expand_as(logits)
        return logits

    # ------------------------------------------------------------ the row

    def _shown(self, denoiser: Denoiser, z: torch.Tensor, begin: int) -> torch.Tensor:
        """The row that the network sees while the block at `begin` is revealed."""
        if denoiser.attention == "causal":
            return torch.tensor(self.x[: len(z) - denoiser.shift], device=z.device)
        if not denoiser.by_blocks:
            return z
        stop = begin + (denoiser.block or 1)
        filled = max(0, stop - len(z)) if denoiser.last_block == "fill" else 0
        return torch.nn.functional.pad(z[:stop], (0, filled), value=self.m)

    def _features(self, denoiser: Denoiser, shown: torch.Tensor, begin: int) -> torch.Tensor:
        """The input of the LM head (L, D) of the row."""
        ids, column = shown[None], torch.arange(len(shown), device=shown.device)
        if denoiser.attention == "causal":
            if self._causal is None:
                self._causal = denoiser.features(ids, None)[0]
            return self._causal
        if isinstance(denoiser, Cached):
            return self._cached(denoiser, shown, begin)
        if isinstance(denoiser, Timed):
            masked, counted = shown == self.m, torch.ones_like(shown, dtype=torch.bool)  # (L,)
            if denoiser.bos == "official":  # context and suffix do not count, where they are visible
                counted[self.origin : len(shown) - self.suffix] = False
                counted = masked | ~counted
                counted[self.known] = False
            share = masked.sum().double() / counted.sum()
            return denoiser.features(ids, None, sigma=denoiser.noise_level(share[None]))[0]
        if not denoiser.by_blocks:
            return denoiser.features(ids, None)[0]
        if denoiser.attention == "block_causal":
            zero = self.origin if denoiser.anchor == "target" else 0
            number = ((column - zero) // (denoiser.block or 1)).clamp(min=-1)  # (L,)
            seen = number[:, None] >= number  # (L, L)
        else:  # causal_prefix
            seen = (column[:, None] >= column) | (column[:, None] >= begin)  # (L, L)
        return denoiser.stream(ids, column[None], seen[None], None)[0][0]

    def _cached(self, denoiser: Cached, z: torch.Tensor, begin: int) -> torch.Tensor:
        """The input of the LM head (L, D): NaN at positions that a later step of the block does not evaluate."""
        column = torch.arange(len(z), device=z.device)[None]  # (1, L)
        stop = self.span(max(begin, self.origin))[1]
        start = z.clone()
        start[max(begin, self.origin) : stop] = self.m
        features, layers = denoiser.begin(start[None], None, column)  # (1, L, D)
        if torch.equal(z, start):
            return features[0]
        own = (column >= begin) & (column < (stop if denoiser.cache == "dual" else len(z)))  # (1, L)
        outside, inside = column[~own], column[own]  # (K,), (Q,)
        past = [tuple(plane[:, :, outside.to(plane.device)] for plane in layer) for layer in layers]
        places = torch.cat([outside, inside])[None]
        step = Step(inside[None], None, past, places, (inside - begin)[None])
        evaluated = torch.full_like(features[0], math.nan)
        evaluated[inside] = denoiser.step(z[inside][None], step)[0]
        return evaluated

    def _read(self, denoiser: Denoiser, features: torch.Tensor, begin: int) -> torch.Tensor:
        """Logits (L, V) in float64: the prediction for a position is read where the network makes it."""
        at = torch.arange(len(features) + denoiser.shift * (denoiser.attention == "causal")) - denoiser.shift
        if denoiser.seeds_blocks:
            at[begin] = begin - 1
        return denoiser.head(features)[at.clamp(min=0).to(features.device)].double()


def warped(denoiser: Warped, logits: torch.Tensor) -> torch.Tensor:
    """Logits (L, V) with a temperature, then cut to the `top_k` tokens and to `top_p`."""
    logits = logits.masked_fill(denoiser.excluded, -math.inf) / denoiser.temperature
    order = logits.argsort(dim=1, descending=True, stable=True)  # (L, V)
    ranked = logits.gather(1, order)
    if denoiser.top_k is not None:
        ranked[:, denoiser.top_k :] = -math.inf
    if denoiser.top_p < 1:
        p = ranked.softmax(1)
        ranked = ranked.masked_fill(p.cumsum(1) - p >= denoiser.top_p, -math.inf)
    return torch.empty_like(logits).scatter_(1, order, ranked)
