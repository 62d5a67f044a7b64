"""Keys and values that are kept between calls, and calls that evaluate some positions against those of the others.

    Slots          where the keys of blocks are kept
    Streams        networks with `stream` (our DiT, the decoders) take them as their past
    Attentions     networks without a past (transformers' masked LMs) are steered where they attend: the n-th call of
                   `scaled_dot_product_attention` in a forward belongs to the n-th layer, and a torch function mode
                   inserts kept keys, values and masks. No class is copied or patched.

Shapes: P rows of a call, Q its positions, K keys, M columns asked for, S slots, H heads, L row length, D features.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.core.network import KeysValues, joined, take
from lm_eval_duel.denoisers.hf.pretrained import first_position

ATTENTION = torch.nn.functional.scaled_dot_product_attention
NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")  # its arguments, which may come by place


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

    `identity` (S,) says whose they are; -1: a free slot. A call always uses slots 0..n-1, so that it reads them in
    place, without a copy. A slot that no lane of a call needs is kept until another block needs its place.
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
        old = torch.where(same.any(1), same.byte().argmax(1), -1)  # (n,)
        missing = old < 0  # (n,)
        far = old >= count  # (n,) kept, but in a slot that this call may not use

        taken = torch.zeros(count, dtype=torch.bool, device=old.device)  # (n,)
        taken[old[~missing & ~far]] = True
        free = (~taken).nonzero()[:, 0]  # as many as are missing or far
        self.identity[free] = -1
        slot = old.masked_scatter(missing | far, free)

        # The keys that are kept elsewhere move: a call then reads the first slots as views, and copies nothing.
        if far.any():
            target = slot[far]
            source = old[far]
            for plane in self._planes():
                plane[target.to(plane.device)] = plane[source.to(plane.device)]
            self.identity[target] = wanted[far]
            self.identity[source] = -1
        return slot, missing

    def fill(
        self,
        slot: torch.Tensor,
        identity: torch.Tensor,
        features: torch.Tensor,
        layers: list[KeysValues],
    ) -> None:
        """Keep the first evaluation of some blocks at `slot` (n,): features (n, w, D), keys (n, H, K, D / H)."""
        self._make_room(features, layers)
        self.features[slot, : features.shape[1]] = features
        for layer, made in zip(self.layers, layers, strict=True):
            for plane, positions in zip(layer, made, strict=True):
                plane[slot.to(plane.device), :, : positions.shape[2]] = positions
        self.identity[slot] = identity  # last: memory may have run out before

    def drop(self) -> None:
        """Release all memory."""
        self.layers = []
        self.features = None
        self.identity = self.identity[:0]

    def _planes(self) -> list[torch.Tensor]:
        """Everything that is kept, a row for every slot."""
        planes: list[torch.Tensor] = []
        for layer in self.layers:
            planes += layer
        if self.features is not None:
            planes.append(self.features)
        return planes

    def _make_room(self, features: torch.Tensor, layers: list[KeysValues]) -> None:
        """Make a row for every slot, in the shapes that the network returns."""
        count = len(self.identity)
        slots, width = (0, 0) if self.features is None else self.features.shape[:2]
        if slots < count:
            if not self.layers:
                self.layers = [(None, None)] * len(layers)
            for n, (keys, values) in enumerate(layers):  # one after another: the old planes of a layer are freed first
                old_keys, old_values = self.layers[n]
                self.layers[n] = (
                    _grown(old_keys, keys, (count, keys.shape[1], self.length, keys.shape[3])),
                    _grown(old_values, values, (count, values.shape[1], self.length, values.shape[3])),
                )
                del old_keys, old_values
        if slots < count or width < features.shape[1]:
            width = max(width, features.shape[1])
            self.features = _grown(self.features, features, (count, width, features.shape[2]))


def _grown(old: torch.Tensor | None, like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """`old`, the start of zeros of a larger `shape`."""
    new = like.new_zeros(shape)
    if old is not None:
        corner = tuple(slice(size) for size in old.shape)
        new[corner] = old
    return new


class Streams:
    """A network with `stream`."""

    def __init__(self, plain: Denoiser):
        self.plain = plain

    def begin(
        self, ids: torch.Tensor, real: torch.Tensor | None, columns: torch.Tensor
    ) -> tuple[torch.Tensor, list[KeysValues]]:
        """Evaluate whole rows (P, L); `real` (P, L) is False at padding.

        Returns the input of the head at `columns` (P, M), (P, M, D), and each layer's keys and values of all positions.
        """
        positions = torch.arange(ids.shape[1], device=ids.device)[None]  # (1, L)
        seen = None if real is None else real[:, None]  # (P, 1, L)
        return self.plain.stream_at(columns, ids, positions, seen, None, keys=True)

    def step(self, ids: torch.Tensor, step: CachedStep) -> torch.Tensor:
        """Evaluate the positions `ids` (P, Q): the input of the head at the columns (P, M) asked for, (P, M, D)."""
        features, _ = self.plain.stream_at(step.columns, ids, step.positions, step.seen, step.past)
        return features


class Attentions:
    """A network of transformers that takes no past, steered where it attends.

    `begin` and `step`, as of `Streams`, raise NotSteered if the network's attention cannot be intercepted.
    """

    def __init__(self, plain: Any):
        self.plain = plain
        self.first = first_position(plain.model)
        self._patterns: list[torch.Tensor | None] = []  # (L, L) bool of each layer; None: it sees everything
        self._length = 0  # that the patterns are known for

    def begin(
        self, ids: torch.Tensor, real: torch.Tensor | None, columns: torch.Tensor
    ) -> tuple[torch.Tensor, list[KeysValues]]:
        length = ids.shape[1]
        self._learn_patterns(length)
        positions = torch.arange(length, device=ids.device)[None]  # (1, L)
        with _AttentionRecorder() as recorded:
            features = self._features(ids, real, positions)
        self._require(len(recorded.new) == len(self._patterns))
        return take(features, columns), recorded.new

    def step(self, ids: torch.Tensor, step: CachedStep) -> torch.Tensor:
        self._learn_patterns(int(step.places.max()) + 1)
        masks: dict[int, torch.Tensor | None] = {}  # most layers have the same pattern, so they share a mask
        layer_masks = []
        for pattern in self._patterns:
            if id(pattern) not in masks:
                masks[id(pattern)] = _mask(pattern, step)
            layer_masks.append(masks[id(pattern)])
        with _KeyInserter(step.past, layer_masks) as inserted:
            features = self._features(ids, None, step.positions)
        self._require(inserted.layer == len(step.past))
        return take(features, step.columns)

    def _features(
        self,
        ids: torch.Tensor,
        real: torch.Tensor | None,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        position_ids = (positions + self.first).expand_as(ids)
        return self.plain.features(ids, real, position_ids=position_ids)

    def _learn_patterns(self, length: int) -> None:
        """Learn which positions each layer lets a position see, from a row of `length` without padding."""
        if length <= self._length:
            return
        # at least twice as long as before, so that rows that grow bit by bit ask for few forwards
        self._length = min(max(length, 2 * self._length), self.plain.max_length)
        row = torch.full((1, self._length), self.plain.mask_id, device=self.plain.device)  # (1, L)
        positions = torch.arange(self._length, device=row.device)[None]  # (1, L)
        with _AttentionRecorder() as recorded:
            self._features(row, None, positions)
        self._require(bool(recorded.new))
        # transformers makes one mask for all layers of a kind, so the object tells which layers see the same
        patterns: dict[int, torch.Tensor | None] = {}
        for mask in recorded.masks:
            patterns.setdefault(id(mask), _pattern(mask))
        self._patterns = [patterns[id(mask)] for mask in recorded.masks]

    def _require(self, as_expected: bool) -> None:
        if not as_expected:
            raise NotSteered("its attention is not torch's scaled_dot_product_attention, once in every layer")


class NotSteered(Exception):
    """A network's attention cannot be intercepted; the message is the reason."""


class _AttentionRecorder(TorchFunctionMode):
    """Records the keys, values and mask of each attention call of a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.new: list[KeysValues] = []
        self.masks: list[torch.Tensor | None] = []

    def __torch_function__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if call is ATTENTION:
            arguments = _by_name(args, kwargs)
            if arguments.get("is_causal"):
                raise NotSteered("its attention is causal")
            self.new.append(_ungrouped(arguments))
            self.masks.append(arguments.get("attn_mask"))
        return call(*args, **(kwargs or {}))


class _KeyInserter(TorchFunctionMode):
    """Adds the kept keys and values, and a mask, to each attention call of a forward."""

    def __init__(self, past: list[KeysValues], masks: list[torch.Tensor | None]):
        super().__init__()
        self.past = past
        self.masks = masks
        self.layer = 0  # of the next call

    def __torch_function__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if call is not ATTENTION:
            return call(*args, **(kwargs or {}))
        if self.layer >= len(self.past):
            raise NotSteered("its layers attend a different number of times from call to call")
        arguments = _by_name(args, kwargs)
        keys, values = joined(self.past[self.layer], *_ungrouped(arguments))
        for name in ("key", "value", "enable_gqa"):  # kept keys have a head for every query's
            arguments.pop(name, None)
        mask = self.masks[self.layer]
        arguments["attn_mask"] = None if mask is None else mask.to(keys.device)
        self.layer += 1
        return call(arguments.pop("query"), keys, values, **arguments)


def _by_name(args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of an attention call by name, however they were passed."""
    by_place = dict(zip(NAMES, args, strict=False))
    return {**by_place, **(kwargs or {})}


def _ungrouped(arguments: dict[str, Any]) -> KeysValues:
    """The keys and values of an attention call, with as many heads as its queries.

    A call with `enable_gqa` has fewer, each for a group of queries.
    """
    heads = arguments["query"].shape[1]
    keys = arguments["key"]
    values = arguments["value"]
    group = heads // keys.shape[1]
    if group == 1:
        return keys, values
    return keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)


def _pattern(mask: torch.Tensor | None) -> torch.Tensor | None:
    """The positions that each position sees, (L, L) bool, by an attention's mask (1, 1, L, L) or less; None: all."""
    if mask is None:
        return None
    if mask.dtype != torch.bool:
        out = mask <= torch.finfo(mask.dtype).min / 2  # the lowest number, or -inf
        if not (out | (mask == 0)).all():
            raise NotSteered("its attention has a bias for the distance of two positions")
        mask = ~out
    if mask.all():
        return None
    while mask.dim() > 2:
        if mask.shape[0] > 1:
            raise NotSteered("its heads do not see the same positions")
        mask = mask[0]
    return mask


def _mask(pattern: torch.Tensor | None, step: CachedStep) -> torch.Tensor | None:
    """The mask (P, 1, Q or 1, K) of a layer in a call."""
    if pattern is None:
        return None if step.seen is None else step.seen[:, None]
    seen = pattern[step.positions[:, :, None], step.places[:, None]]  # (P, Q, K)
    if step.seen is not None:
        seen = seen & step.seen
    return seen[:, None]
