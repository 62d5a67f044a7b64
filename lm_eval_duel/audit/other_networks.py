"""Networks that are called in another way than one_row.py does, still one row at a time.

    network                 is shown
    under a cache           z as the block began; then the evaluated positions, against its keys and values
    with a noise level      z, and the level of its masked share
    under guidance          z, and z with context and suffix masked
    with warpers            z; its distributions are sharpened and truncated

Shapes: L row length, Q positions of a call, K keys, D features, V tokens.
"""

from __future__ import annotations

import math

import torch

from lm_eval_duel.audit.one_row import OneRow
from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.cached.denoiser import Cached
from lm_eval_duel.denoisers.cached.kept_keys import CachedStep
from lm_eval_duel.denoisers.dit.denoiser import Timed
from lm_eval_duel.denoisers.wrappers import Excluding, Guided, Warped

OTHER = (Cached, Excluding, Guided, Timed, Warped)


def one_row(denoiser: Denoiser, window: Window, block: int | None, grid: str) -> OneRow | None:
    """The network of one window; None if it overrides how rows are opened, so that what it is shown is not known."""
    plain = denoiser
    while isinstance(plain, Cached | Excluding | Guided | Warped):
        plain = plain.plain
    if type(plain).open not in (Denoiser.open, Timed.open):
        return None
    return (OtherRow if isinstance(denoiser, OTHER) else OneRow)(denoiser, window, block, grid)


class OtherRow(OneRow):
    """A network for one window, under the wrappers around it."""

    def logits(self, denoiser: Denoiser, z: torch.Tensor) -> torch.Tensor:
        if isinstance(denoiser, Warped):
            return warped(denoiser, self.logits(denoiser.plain, z))
        if isinstance(denoiser, Excluding):
            return self.logits(denoiser.plain, z)
        if isinstance(denoiser, Guided):
            bare = z.clone()
            bare[: self.origin] = self.m
            bare[len(z) - self.suffix :] = self.m
            conditional, unconditional = (self.logits(denoiser.plain, row) for row in (z, bare))
            self.inputs = None
            return unconditional + (1 + denoiser.scale) * (conditional - unconditional)
        return super().logits(denoiser, z)

    def features(self, denoiser: Denoiser, shown: torch.Tensor, begin: int) -> torch.Tensor:
        if isinstance(denoiser, Cached):
            return self._cached(denoiser, shown, begin)
        if isinstance(denoiser, Timed):
            masked, counted = shown == self.m, torch.ones_like(shown, dtype=torch.bool)  # (L,)
            if denoiser.bos == "official":  # context and suffix do not count, where they are visible
                counted[self.origin : len(shown) - self.suffix] = False
                counted = masked | ~counted
                counted[self.known] = False
            share = masked.sum().double() / counted.sum()
            return denoiser.features(shown[None], None, **denoiser.noise_inputs(share[None]))[0]
        return super().features(denoiser, shown, begin)

    def _cached(self, denoiser: Cached, z: torch.Tensor, begin: int) -> torch.Tensor:
        """The input of the LM head (L, D): NaN at positions that a later step of the block does not evaluate."""
        column = torch.arange(len(z), device=z.device)[None]  # (1, L)
        stop = self.span(max(begin, self.origin))[1]
        start = z.clone()
        start[max(begin, self.origin) : stop] = self.m
        features, layers = denoiser.begin(start[None], None, column)  # (1, L, D)
        if torch.equal(z, start):
            return features[0]
        computed = (column >= begin) & (column < (stop if denoiser.cache == "dual" else len(z)))  # (1, L)
        outside, inside = column[~computed], column[computed]  # (K,), (Q,)
        past = [tuple(plane[:, :, outside.to(plane.device)] for plane in layer) for layer in layers]
        places = torch.cat([outside, inside])[None]
        step = CachedStep(inside[None], None, past, places, (inside - begin)[None])
        evaluated = torch.full_like(features[0], math.nan)
        evaluated[inside] = denoiser.step(z[inside][None], step)[0]
        return evaluated


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
