"""A network with a cache, a noise level, guidance or filters, as `reference.py` calls it: one row at a time.

    network               is shown
    under a cache         z as the block began; then the evaluated positions, against its keys and values
    with a noise level    z, and the level of its masked share
    under guidance        z, and z with context and suffix masked
    with filters          z; its distributions are sharpened and truncated

`one_row` chooses between these and the plain network of networks.py.

Shapes: L row length, Q positions of a call, K keys, D features, V tokens.
"""

from __future__ import annotations

import math

import torch

from lm_eval_duel.audit.networks import OneRow
from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.cached.denoiser import Cached
from lm_eval_duel.denoisers.cached.kept_keys import CachedStep
from lm_eval_duel.denoisers.dit.denoiser import Timed
from lm_eval_duel.denoisers.filters import Warp
from lm_eval_duel.denoisers.wrappers import Guided


def one_row(denoiser: Denoiser, window: Window, block: int | None, grid: str) -> OneRow | None:
    """The network of one window; None if it overrides how rows are opened, so that what it is shown is not known."""
    plain = denoiser
    while isinstance(plain, Cached | Guided):
        plain = plain.plain
    if type(plain).open not in (Denoiser.open, Timed.open):
        return None
    if isinstance(denoiser, Cached | Guided | Timed) or denoiser.filters:
        return OtherRow(denoiser, window, block, grid)
    return OneRow(denoiser, window, block, grid)


class OtherRow(OneRow):
    """A network for one window, under the wrappers around it and its filters."""

    def logits(self, denoiser: Denoiser, z: torch.Tensor) -> torch.Tensor:
        logits = self._before_filters(denoiser, z).masked_fill(denoiser.excluded, -math.inf)  # (L, V)
        for each in denoiser.filters:
            if isinstance(each, Warp):  # the other kind, excluded ids, is among `excluded`
                logits = warped(each, logits)
        return logits

    def _before_filters(self, denoiser: Denoiser, z: torch.Tensor) -> torch.Tensor:
        if not isinstance(denoiser, Guided):
            return super().logits(denoiser, z)
        bare = z.clone()
        bare[: self.origin] = self.m
        bare[len(z) - self.suffix :] = self.m
        conditional = self._before_filters(denoiser.plain, z)
        unconditional = self._before_filters(denoiser.plain, bare)
        self.inputs = None
        return unconditional + (1 + denoiser.scale) * (conditional - unconditional)

    def features(self, denoiser: Denoiser, shown: torch.Tensor, begin: int) -> torch.Tensor:
        if isinstance(denoiser, Cached):
            return self._cached(denoiser, shown, begin)
        if isinstance(denoiser, Timed):
            share = self._masked_share(denoiser, shown)
            noise_level = denoiser.noise_inputs(share[None])
            return denoiser.features(shown[None], None, **noise_level)[0]
        return super().features(denoiser, shown, begin)

    def _masked_share(self, denoiser: Denoiser, shown: torch.Tensor) -> torch.Tensor:
        """The share of the row that is masked, float64 (), which decides the noise level that the network gets."""
        masked = shown == self.m  # (L,)
        counted = torch.ones_like(masked)
        if denoiser.bos == "official":  # context and suffix do not count, where they are visible
            inside = torch.zeros_like(masked)
            inside[self.origin : len(shown) - self.suffix] = True
            counted = masked | inside
            counted[self.known] = False
        return masked.sum().double() / counted.sum()

    def _cached(self, denoiser: Cached, z: torch.Tensor, begin: int) -> torch.Tensor:
        """The input of the LM head (L, D): NaN at positions that a later step of the block does not evaluate."""
        column = torch.arange(len(z), device=z.device)[None]  # (1, L)
        first = max(begin, self.origin)  # a block that is counted from the row may begin in the context
        _, stop = self.span(first)
        start = z.clone()  # the row as the block began
        start[first:stop] = self.m
        features, layers = denoiser.begin(start[None], None, column)  # (1, L, D)
        if torch.equal(z, start):
            return features[0]

        last = stop if denoiser.cache == "dual" else len(z)
        evaluated = (column >= begin) & (column < last)  # (1, L)
        outside = column[~evaluated]  # (K,)
        inside = column[evaluated]  # (Q,)
        past = []  # of each layer: the keys and the values of positions that are not evaluated again
        for keys, values in layers:
            at = outside.to(keys.device)
            past.append((keys[:, :, at], values[:, :, at]))
        step = CachedStep(
            positions=inside[None],
            seen=None,
            past=past,
            places=torch.cat([outside, inside])[None],
            columns=(inside - begin)[None],
        )
        row = torch.full_like(features[0], math.nan)  # (L, D)
        row[inside] = denoiser.step(z[inside][None], step)[0]
        return row


def warped(warp: Warp, logits: torch.Tensor) -> torch.Tensor:
    """Logits (L, V) with a temperature, then cut to the `top_k` tokens and to `top_p`."""
    logits = logits / warp.temperature
    order = logits.argsort(dim=1, descending=True, stable=True)  # (L, V)
    ranked = logits.gather(1, order)
    if warp.top_k is not None:
        ranked[:, warp.top_k :] = -math.inf
    if warp.top_p < 1:
        p = ranked.softmax(1)
        before = p.cumsum(1) - p  # the probability of the tokens that rank before each
        ranked = ranked.masked_fill(before >= warp.top_p, -math.inf)
    return torch.empty_like(logits).scatter_(1, order, ranked)
