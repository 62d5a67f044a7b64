"""A cached denoiser opened on a group of rows: whole rows at block starts, then some positions against what is kept.

Shapes: N windows, L row length, R lanes, W block width, M masked positions of a lane, E positions that a lane
evaluates, P rows of a call, A lanes of one row, Q = A E, K kept keys, D features.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from lm_eval_duel.core.block_packing import PackedCall, rows_at
from lm_eval_duel.core.hashing import hashed
from lm_eval_duel.core.lanes import Lanes, Rows
from lm_eval_duel.core.view import Positions, View, distinct, masked_positions
from lm_eval_duel.denoisers.cached.kept_keys import CachedStep, Slots
from lm_eval_duel.denoisers.wrappers import Wrapper
from lm_eval_duel.errors import first_position_unseen

# Kept numbers that weigh as much as a network token of a call. On a CPU, more blocks at a time are slower.
CPU_KEPT, GPU_KEPT = 1 << 13, 1 << 17
NEW = 8  # at most one block in NEW begins in one call, which returns its keys before they are kept
ROW = 256  # positions of states that share a row
WASTE = 8  # if lanes of several blocks share a call, at most one position in WASTE is wasted,
SMALL = 1024  # except in calls of so few positions


class CachedView(View):
    """A cached denoiser opened on a group of rows."""

    def __init__(self, denoiser: Wrapper, rows: Rows):  # a `Cached`
        super().__init__(denoiser, rows)
        self._slots = Slots(rows.ids.shape[1], rows.ids.device)
        self._contents: tuple[torch.Tensor, torch.Tensor] | None = None  # (N, L + 1), (N,) hashes

    def cost(self, lanes: Lanes) -> torch.Tensor:
        """The positions that a later step evaluates, or its kept positions if these take more memory."""
        length, device = self.rows.length[lanes.row], lanes.row.device  # (R,)
        positions = lanes.width if self.denoiser.cache == "dual" else length - lanes.start  # (R,)
        columns, kept = self.rows.ids.shape[1], CPU_KEPT if device.type == "cpu" else GPU_KEPT  # slots are equally long
        return positions.clamp(min=-(-columns * self.denoiser.kept // kept))

    def commit(self, lanes: Lanes) -> None:
        super().commit(lanes)
        self._contents = None

    def positions(self, lanes: Lanes) -> Positions:
        identity = self._identity(lanes)  # (R,)
        revealed = (lanes.tokens >= 0) & ~lanes.masked  # (R, W)
        ids = torch.where(revealed, lanes.tokens, self.denoiser.mask_id)  # (R, W)
        first, number = distinct(identity, ids, lanes.masked)
        base = lanes if len(first) == len(lanes) else lanes.select(first)
        try:
            positions = self._evaluate_block(base, ids[first], revealed[first], identity[first])
        except torch.OutOfMemoryError:
            self._slots.drop()  # they may be what fills the memory; fewer lanes need fewer slots
            raise
        return positions if base is lanes else positions.spread(lanes, base, number)

    # ------------------------------------------------------------ the identity of a block

    def _identity(self, lanes: Lanes) -> torch.Tensor:
        """A hash of what determines the kept keys of each lane: the row at the block's start, and the block, (R,)."""
        rows = self.rows
        if self._contents is None:
            columns = torch.arange(rows.ids.shape[1], device=rows.ids.device)  # (L,)
            each = hashed(rows.ids, columns)  # (N, L)
            after = rows.visible & (columns >= (rows.origin + rows.target)[:, None])  # (N, L) the suffix
            before = torch.nn.functional.pad(each.cumsum(1), (1, 0))  # (N, L + 1) wraps
            self._contents = before, (each * after).sum(1)
        before, after = self._contents
        row = lanes.row
        shown = before[row, lanes.start.maximum(lanes.origin)]  # (R,)
        return hashed(shown, after[row], lanes.start, lanes.origin, lanes.width, rows.length[row])

    # ------------------------------------------------------------ a block's start

    def _hold(self, lanes: Lanes, identity: torch.Tensor) -> torch.Tensor:
        """The slot of each lane's block, filled, (R,)."""
        own, which = distinct(identity)  # (n,), (R,)
        slot, missing = self._slots.arrange(identity[own])  # (n,) each
        if missing.any():
            blocks, empty, of = lanes.select(own[missing]), slot[missing], identity[own[missing]]
            rows = int(self.cost(lanes).sum()) // int(self.rows.length[blocks.row].max())  # of a call
            rows = max(1, min(rows, len(lanes) // NEW))
            for part in torch.arange(len(blocks), device=slot.device).split(rows):
                self._begin(blocks.select(part), empty[part], of[part])
        return slot[which]

    def _begin(self, blocks: Lanes, slot: torch.Tensor, identity: torch.Tensor) -> None:
        """Evaluate the whole rows of `blocks` as the blocks begin, and keep the result in `slot`."""
        fresh = dataclasses.replace(blocks, tokens=torch.full_like(blocks.tokens, -1))
        ids, _, real = self._input(fresh)  # (P, L) each
        position = torch.arange(blocks.masked.shape[1], device=ids.device)  # (W,)
        columns = (blocks.start[:, None] + position - self.denoiser.shift).clamp(0, ids.shape[1] - 1)  # (P, W)
        features, layers = self.denoiser.begin(ids, self._padding(real), columns)
        self.forwards += 1
        self.evaluated += len(ids)
        self._slots.fill(slot, identity, features, layers)

    # ------------------------------------------------------------ every state of a block

    def _evaluate_block(
        self, lanes: Lanes, ids: torch.Tensor, revealed: torch.Tensor, identity: torch.Tensor
    ) -> Positions:
        """The input of the head at the masked positions of lanes whose blocks show `ids` (R, W)."""
        slot = self._hold(lanes, identity)  # (R,)
        last = self._slots.features.shape[1] - 1
        position = masked_positions(lanes).clamp(max=last)  # (R, M) those not masked are not read
        features = self._slots.features[slot[:, None], position]  # (R, M, D) as the blocks began
        begun = (revealed & (lanes.columns >= lanes.origin[:, None])).any(1)  # (R,)
        if begun.any():
            if self.denoiser.shift and (lanes.masked[:, : self.denoiser.shift].any(1) & begun).any():
                raise first_position_unseen(self.denoiser.cache)  # it would be predicted in a later step
            for part in self._parts(lanes, begun):
                features[part] = self._step(lanes.select(part), ids[part], slot[part], position[part])
        shown = self.rows.visible[lanes.row].any(1) | (lanes.start > lanes.origin) | revealed.any(1)  # (R,)
        all_mask = ~shown & self.denoiser.relative_positions  # (R,)
        return Positions.from_lanes(lanes, all_mask, lambda lane, n: features[lane, n])

    def _parts(self, lanes: Lanes, begun: torch.Tensor) -> Iterator[torch.Tensor]:
        """The lanes (r,) of each network call: under a prefix cache, those that begin at nearly the same column."""
        order = begun.nonzero()[:, 0]  # (n,)
        if self.denoiser.cache == "dual":
            yield order
            return
        order = order[lanes.start[order].argsort(stable=True)]
        start, end, begin = lanes.start[order].tolist(), int(self.rows.length[lanes.row[order]].max()), 0
        for n, column in enumerate(start):
            small = (n + 1 - begin) * (end - start[begin]) <= SMALL
            if (column - start[begin]) * WASTE > end - column and not small:
                yield order[begin:n]
                begin = n
        yield order[begin:]

    def _step(self, lanes: Lanes, ids: torch.Tensor, slot: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """The input of the head at `position` (R, M) of the lanes' blocks, (R, M, D), in one network call.

        The states of a block stand side by side in one row of the call, behind the kept keys that they share:

            | kept: all positions that are not evaluated | state 1 | state 2 | ...
        """
        length, start, end = self.rows.length[lanes.row], lanes.start, lanes.start + lanes.width  # (R,) each
        most = columns = int(length.max())
        if self.denoiser.cache == "prefix":
            columns, begin, end = int(start.max()), int(start.min()), length
            ids, start = self._input(lanes)[0][:, begin:], torch.full_like(start, begin)  # (R, E), (R,)
        every = torch.arange(columns, device=ids.device)[None]  # (1, K)
        kept = (every < lanes.start[:, None]) | (every >= end[:, None]) & (every < length[:, None])  # (R, K)
        column = start[:, None] + torch.arange(ids.shape[1], device=ids.device)  # (R, E)
        own = (column >= lanes.start[:, None]) & (column < end[:, None])  # (R, E)
        abreast = max(1, ROW // ids.shape[1]) if self.denoiser.cache == "dual" else 1
        call = PackedCall.from_slots(slot, start, own, kept, abreast)
        # of one lane, every position sees the same
        seen = torch.cat([kept, own], 1)[call.lane] if call.lane.shape[1] == 1 else call.seen  # (P, 1 or Q, K + Q)
        wanted = (lanes.start - start)[:, None] + position - self.denoiser.shift  # (R, M)
        wanted = wanted.clamp(0, ids.shape[1] - 1)  # it may lie outside where nothing is masked
        positions = call.columns.clamp(max=most - 1)  # (P, Q)
        places = torch.cat([every.expand(len(positions), -1), positions], 1)  # (P, K + Q)
        past = rows_at(self._slots.layers, slot[call.lane[:, 0]], columns)
        step = CachedStep(positions, None if seen.all() else seen, past, places, call.queries(wanted))
        values = self.denoiser.step(ids[call.lane].flatten(1), step)  # (P, A M, D)
        self.forwards += 1
        self.evaluated += len(positions)
        return call.by_lane(values)
