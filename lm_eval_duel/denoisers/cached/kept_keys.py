"""Keys and values that are kept between calls, and the arguments of a call that attends to them.

Shapes: P rows of a call, Q its positions, K keys, S slots, H heads, L row length, D features.
"""

from __future__ import annotations

import dataclasses

import torch

from lm_eval_duel.core.network import KeysValues


@dataclasses.dataclass(frozen=True)
class CachedStep:
    """The positions (P, Q) of a call and the keys that they attend to: the arguments of a step after its ids."""

    positions: torch.Tensor  # (P or 1, Q)
    seen: torch.Tensor | None  # (P, Q or 1, K) which keys each position attends to; None: all
    past: list[KeysValues]  # of each layer, before the call's own
    places: torch.Tensor  # (P or 1, K) the positions of the keys
    columns: torch.Tensor  # (P, M) the positions of the call that are asked for


class Slots:
    """The kept keys and values of blocks, a row of each layer for every slot.

    `identity` (S,) says whose they are; -1: a free slot. One call always uses slots 0..n-1, and so reads them where
    they are. A slot that no lane of a call needs is overwritten only when its place is wanted.
    """

    def __init__(self, length: int, device: torch.device):
        self.length = length  # columns of a row
        self.layers: list[KeysValues] = []  # (S, H, L, D / H) each
        self.features: torch.Tensor | None = None  # (S, W, D) of the block's positions, as the block began
        self.identity = torch.empty(0, dtype=torch.int64, device=device)  # (S,)

    def arrange(self, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Give `wanted` (n,), all different, the slots 0..n-1: which (n,), and whether it must be filled first (n,)."""
        count = len(wanted)
        if count > len(self.identity):
            more = self.identity.new_full((count - len(self.identity),), -1)
            self.identity = torch.cat([self.identity, more])
        same = self.identity == wanted[:, None]  # (n, S)
        slot = torch.where(same.any(1), same.byte().argmax(1), -1)  # (n,)
        missing, far = slot < 0, slot >= count  # (n,) each
        taken = torch.zeros(count, dtype=torch.bool, device=slot.device)  # (n,)
        taken[slot[~missing & ~far]] = True
        free = (~taken).nonzero()[:, 0]  # as many as are missing or far
        self.identity[free] = -1
        old, among = slot, missing | far
        slot = slot.masked_scatter(among, free)
        if far.any():
            for plane in self._planes():
                to, since = slot[far].to(plane.device), old[far].to(plane.device)
                plane[to] = plane[since]
            self.identity[slot[far]] = wanted[far]
            self.identity[old[far]] = -1
        return slot, missing

    def fill(self, slot: torch.Tensor, of: torch.Tensor, features: torch.Tensor, layers: list[KeysValues]) -> None:
        """Keep the first evaluation of blocks `of` (n,) at `slot` (n,): features (n, w, D), keys (n, H, K, D / H)."""
        self._make_room(features, layers)
        self.features[slot, : features.shape[1]] = features
        for layer, made in zip(self.layers, layers, strict=True):
            for plane, positions in zip(layer, made, strict=True):
                plane[slot.to(plane.device), :, : positions.shape[2]] = positions
        self.identity[slot] = of  # last: memory may have run out before

    def drop(self) -> None:
        """Release all memory."""
        self.layers, self.features = [], None
        self.identity = self.identity[:0]

    def _planes(self) -> list[torch.Tensor]:
        planes = [plane for layer in self.layers for plane in layer]
        return planes + ([self.features] if self.features is not None else [])

    def _make_room(self, features: torch.Tensor, layers: list[KeysValues]) -> None:
        """A row for every slot, in the shapes that the network returns."""
        count, width = len(self.identity), features.shape[1]
        have, wide = (0, 0) if self.features is None else self.features.shape[:2]
        if have < count:
            self.layers = self.layers or [(None, None)] * len(layers)
            for n, likes in enumerate(layers):  # one layer after another: its old planes are free before the next
                shapes = [(count, like.shape[1], self.length, like.shape[3]) for like in likes]
                self.layers[n] = tuple(map(_grown, self.layers[n], likes, shapes))
        if have < count or wide < width:
            self.features = _grown(self.features, features, (count, max(wide, width), features.shape[2]))


def _grown(old: torch.Tensor | None, like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """`old`, the start of zeros of a larger `shape`."""
    new = like.new_zeros(shape)
    if old is not None:
        new[tuple(slice(size) for size in old.shape)] = old
    return new
