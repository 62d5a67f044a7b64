"""Block-causal networks: a block sees all of itself and the clean blocks before it, never a later one.

The keys and values of a window's clean blocks are computed once and kept while lanes of the window are being revealed.
A step evaluates many blocks of a window side by side in one row of the batch (`PackedCall`):

    queries    block 3 as revealed so far | block 4 as revealed so far | ...
    keys       clean blocks 0 1 2 3       | the queries' own
    seen       clean blocks before the query's, and the positions of its own block

The clean stream reads G positions at a time: positions of a group see each other and all earlier groups.

    block-causal                       G = B, groups count from the row's first column
    block-causal, anchor="target"      G = B, groups count from the target's first column; the context is one more group
    causal prefix, causal              G = 1

With a causal prefix (Nemotron-Labs-Diffusion) a block may begin at any column: it sees itself whole and every clean
position before it. Blocks that begin within the same stretch of columns go together, so that a call reads no more clean
keys than its last block sees. A causal network is the case of blocks of one: all its predictions are read from the
clean stream.

Shapes: N windows, R lanes, r of them that differ, B the trained block, W <= B block width of the lanes, G positions of
a clean group, P rows of a call, A lanes of one row, Q = A B queries, K clean keys, M masked positions of a lane, S
slots, L row length, H heads, D features, X positions of a call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
import torch.nn.functional as F

from lm_eval_duel.core.lanes import Rows
from lm_eval_duel.core.network import KeysValues, Network

STRETCH = 256  # columns of a window whose blocks are evaluated together
CLEAN = 512  # columns of clean blocks that are evaluated together: a later piece reads the keys of an earlier one


def clean_group(denoiser: Network) -> int:
    """The number of positions that the clean stream reads together, G."""
    return (denoiser.block or 1) if denoiser.attention == "block_causal" else 1


def stretch_of(start: torch.Tensor, block: int) -> torch.Tensor:
    """The number of the stretch in which each block begins (R,), from the first columns of the blocks (R,)."""
    return start // max(block, STRETCH)


def lanes_abreast(block: int) -> int:
    """The most lanes in a row of a call: blocks of one stretch."""
    return max(1, STRETCH // block)


class CleanStream:
    """The clean columns of a group of windows, evaluated once. What later blocks read of them is kept.

    `slot` (N,): where the keys and values of each window are, -1 if nowhere. They go when the window has no lane left.
    """

    def __init__(self, denoiser: Network, rows: Rows, generating: bool):
        self.denoiser = denoiser
        self.rows = rows
        self.generating = generating
        self.group = clean_group(denoiser)  # G
        # the first token of a block may be predicted at the last position before it, the edge
        self.reads_edges = bool(denoiser.shift or denoiser.seeds_blocks)

        # the column from which groups count, and the end of the clean columns that a window needs
        self.zero = torch.zeros_like(rows.origin)  # (N,)
        if denoiser.anchor == "target":
            self.zero = rows.origin
        last = rows.origin + rows.target - 1 - self.zero  # (N,) of the target, counted from there
        self.end = self.zero + last // self.group * self.group  # (N,) where its last group begins

        # what is kept of the clean columns: their keys and values, and the features at edges
        self.slot = torch.full_like(rows.origin, -1)  # (N,)
        self._kept = torch.zeros_like(rows.origin)  # (N,) how many columns
        self._slots = 0  # S
        self._clean: list[KeysValues] = []  # of each layer, (S, H, L, D / H) each
        self._edge = torch.empty(0, 0, 0)  # (S, L / G, D) at the last position before each group

    def shares(self, block: int) -> torch.Tensor:
        """The clean columns of each window, divided by the number of its blocks; at least `block`, (N,)."""
        first = self.rows.origin - self.zero  # (N,)
        last = first + self.rows.target - 1  # (N,)
        block_count = last // block - first // block + 1  # (N,)
        share = -(-self.end // block_count)  # (N,) rounded up
        return share.clamp(min=block)

    def extend(self, row: torch.Tensor, start: torch.Tensor, tokens: int) -> Iterator[int]:
        """Evaluate the clean columns that blocks see and that are not kept yet; yield the rows of each network call.

        `row`, `start` (R,): the window and the first column of each block. A call has at most `tokens` positions. The
        slots of windows without a block here become free for others.
        """
        for windows, end in self._missing(row, start, tokens):
            self._extend(windows, end)
            yield len(windows)

    def _missing(
        self,
        row: torch.Tensor,
        start: torch.Tensor,
        tokens: int,
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(windows, end) of the columns of each call, (P,) both: clean columns up to `end` that are not kept yet.

        The caller keeps them before it asks for the next ones. The arguments are those of `extend`.
        """
        has_slot = self.slot[row] >= 0  # (R,)
        has_keys = self._kept[row] >= start  # (R,)
        if bool((has_slot & has_keys).all()):
            return
        present = torch.zeros_like(self.slot, dtype=torch.bool)  # (N,)
        present[row] = True
        self._assign_slots(present)

        if self.generating:
            needed = torch.zeros_like(self._kept).scatter_reduce_(0, row, start, "amax")  # (N,)
        else:  # the targets of the whole window are known: one pass for all of its blocks
            needed = self.end * present  # (N,)
        if self.denoiser.attention == "causal":
            piece = self.rows.ids.shape[1]
        else:
            piece = max(self.group, CLEAN // self.group * self.group)  # whole groups
        while len(lacking := (self._kept < needed).nonzero()[:, 0]):
            # a context before the first group is not divided
            until = needed.minimum(self._kept.maximum(self.zero) + piece)  # (N,)
            columns = int((until - self._kept).max())
            # windows at the same piece go together, since a call is as wide as its widest window
            lacking = lacking[self._kept[lacking].argsort(stable=True)]
            most = max(1, tokens // columns)
            for part in lacking.split(most):
                yield part, until[part]

    def _assign_slots(self, present: torch.Tensor) -> None:
        """Give a slot to each window that is `present` (N,) and has none, and take back those of the others."""
        self._kept[~present] = 0
        self.slot[~present] = -1
        entering = (present & (self.slot < 0)).nonzero()[:, 0]  # (n,)
        # Windows that enter take the lowest free slots, so slots in use stay below N, and N + the windows present are
        # enough to choose from.
        most = int(present.sum()) + len(self.slot)
        free = torch.ones(most, dtype=torch.bool, device=present.device)
        in_use = self.slot[self.slot >= 0]
        free[in_use] = False
        self.slot[entering] = free.nonzero()[: len(entering), 0]

    def _group_of(self, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        """The index of the clean group of `column` (P, Q) in windows `row` (P,); -1 in the context before the first."""
        return ((column - self.zero[row][:, None]) // self.group).clamp(min=-1)  # (P, Q)

    def _extend(self, row: torch.Tensor, end: torch.Tensor) -> None:
        """Evaluate the clean columns of windows `row` (P,) that are not kept yet, up to `end` (P,)."""
        device = row.device
        begin = self._kept[row]  # (P,) the first column that is not kept
        slot = self.slot[row]  # (P,)
        column = begin[:, None] + torch.arange(int((end - begin).max()), device=device)  # (P, Q)
        real = column < end[:, None]  # (P, Q)
        last = self.rows.ids.shape[1] - 1
        ids = self.rows.ids[row[:, None], column.clamp(max=last)]  # (P, Q)

        # a position sees what is kept of its window, and of this call its own group and earlier ones
        before = int(begin.max())
        is_kept = torch.arange(before, device=device) < begin[:, None]  # (P, K)
        sees_past = is_kept[:, None].expand(-1, column.shape[1], -1)  # (P, Q, K)
        number = self._group_of(row, column)  # (P, Q)
        sees = number[:, :, None] >= number[:, None]  # (P, Q, Q)
        sees &= real[:, None] | ~real[:, :, None]  # padding sees itself, so that its softmax is not empty
        seen = torch.cat([sees_past, sees], dim=2)  # (P, Q, K + Q)
        features, new = self.denoiser.stream(ids, column, seen, self.past(slot, before))  # (P, Q, D)

        if self.denoiser.attention == "causal" and not self.generating:
            new = []  # one pass scores a causal network, so nobody will read its keys
        self._grow(new, features)
        self._keep(new, slot, column, real)
        if self.reads_edges:
            after = self._group_of(row, column + 1)  # (P, Q)
            is_edge = real & (after > number)  # (P, Q) the last position of its group
            p, q = is_edge.nonzero().unbind(1)  # (X,) each
            self._edge[slot[p], after[p, q]] = features[p, q]
        self._kept[row] = end

    def _grow(self, like: list[KeysValues], features: torch.Tensor) -> None:
        """Make slots for every window in use, in the shapes that the network returns."""
        more = int(self.slot.max()) + 1 - self._slots
        if more <= 0:
            return
        length = self.rows.ids.shape[1]
        if not self._slots:
            groups = 0
            if self.reads_edges:
                groups = -(-length // self.group)  # rounded up
            self._clean = []
            for keys, values in like:
                self._clean.append((_without_slots(keys, length), _without_slots(values, length)))
            self._edge = features.new_zeros(0, groups, features.shape[2])
        clean = []
        for keys, values in self._clean:
            clean.append((_with_more(keys, more), _with_more(values, more)))
        edge = _with_more(self._edge, more)
        # last, since memory may have run out before
        self._clean = clean
        self._edge = edge
        self._slots += more

    def _keep(
        self,
        new: list[KeysValues],
        slot: torch.Tensor,
        column: torch.Tensor,
        real: torch.Tensor,
    ) -> None:
        """Keep the keys and values of a call on windows at `slot` (P,) at `column` (P, Q), where `real` (P, Q)."""
        first = int(column[0, 0])
        end = first + column.shape[1]
        p, q = real.nonzero().unbind(1)  # (X,) each
        # without padding and at the same columns in every window, planes are copied by slices
        no_padding = len(p) == real.numel()
        same_columns = no_padding and bool((column[:, 0] == first).all())
        for kept, made in zip(self._clean, new, strict=True):
            for plane, positions in zip(kept, made, strict=True):
                device = plane.device  # a network may be spread over several
                if same_columns:
                    plane[slot.to(device), :, first:end] = positions
                else:
                    at = slot[p].to(device)  # (X,)
                    columns = column[p, q].to(device)  # (X,)
                    plane[at, :, columns] = positions[p.to(device), :, q.to(device)]

    def past(self, slot: torch.Tensor, columns: int) -> list[KeysValues] | None:
        """Keys and values of the first clean `columns` of windows at `slot` (P,); arbitrary where a window has fewer.

        None without columns.
        """
        if not columns:
            return None
        # a window that has just entered may have a slot that is not made yet
        made = slot.clamp(max=self._slots - 1)
        return rows_at(self._clean, made, columns)

    def edges(self, row: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        """The features at the last position before blocks that start at `start` (c,) of windows `row` (c,), (c, D)."""
        group = self._group_of(row, start[:, None])[:, 0]  # (c,)
        return self._edge[self.slot[row], group]


def _without_slots(plane: torch.Tensor, length: int) -> torch.Tensor:
    """A plane (0, H, L, D / H) for keys or values such as `plane` (P, H, Q, D / H), to which slots are added."""
    return plane.new_zeros(0, plane.shape[1], length, plane.shape[3])


def _with_more(plane: torch.Tensor, more: int) -> torch.Tensor:
    """`plane` (S, ...) with `more` slots of zeros at its end."""
    # F.pad takes (before, after) of every dimension from the last to the first, so the last entry is S
    padding = (0,) * (2 * plane.dim() - 1) + (more,)
    return F.pad(plane, padding)


# ---------------------------------------------------------------- many blocks in one row of a call


@dataclasses.dataclass(frozen=True)
class PackedCall:
    """The layout of lanes in one call: the lanes that share a row, and what their positions see.

        row of a window    block 3 | block 4 | block 5      its lanes
        columns            12 13 14 15 16 17 18 19 ...      their positions in the window
        seen               kept keys, such as those before a lane's block, and the block itself

    The next step can reuse it if it has the same lanes.
    """

    slot: torch.Tensor  # (R,) where the keys that each lane sees are kept
    start: torch.Tensor  # (R,) first column of each lane
    real: torch.Tensor  # (R, B) which of its positions exist
    lane: torch.Tensor  # (P, A) the lane at each place; arbitrary at empty places
    used: torch.Tensor  # (P, A) which places are not empty
    place: tuple[torch.Tensor, torch.Tensor]  # (R,) each: row and place of each lane
    columns: torch.Tensor  # (P, Q) positions in the window
    kept: torch.Tensor  # (R, K) which kept columns each lane sees

    @classmethod
    def from_slots(
        cls,
        slot: torch.Tensor,
        start: torch.Tensor,
        real: torch.Tensor,
        kept: torch.Tensor,
        most: int,
    ) -> PackedCall:
        """The call over lanes that see the columns `kept` (R, K) at `slot` (R,), with at most `most` lanes in a row."""
        number, place = arrange(slot, widest(slot, most))  # (P, A)
        lane = number.clamp(min=0)  # (P, A)
        position = torch.arange(real.shape[1], device=start.device)  # (B,)
        columns = start[lane][:, :, None] + position  # (P, A, B)
        return cls(
            slot=slot,
            start=start,
            real=real,
            lane=lane,
            used=number >= 0,
            place=place,
            columns=columns.flatten(1),
            kept=kept,
        )

    @cached_property
    def seen(self) -> torch.Tensor:
        """True at the keys that each query attends to, kept ones and the call's own, (P, Q, K + Q)."""
        lanes_in_row = self.lane.shape[1]
        block = self.real.shape[1]
        used = self.used[:, :, None]  # (P, A, 1)
        exists = (self.real[self.lane] & used).flatten(1)  # (P, Q)
        place = torch.arange(lanes_in_row, device=exists.device).repeat_interleave(block)  # (Q,) of each query
        same_lane = place[:, None] == place  # (Q, Q)
        # a position that does not exist sees its own block, so that its softmax is not empty
        sees_call = same_lane & (exists[:, None] | ~exists[:, :, None])  # (P, Q, Q)
        sees_kept = (self.kept[self.lane] & used)[:, place]  # (P, Q, K)
        return torch.cat([sees_kept, sees_call], dim=2)

    def holds(self, slot: torch.Tensor, start: torch.Tensor, real: torch.Tensor) -> bool:
        """True if these lanes have this layout."""
        same_blocks = torch.equal(self.slot, slot) and torch.equal(self.start, start)
        return same_blocks and torch.equal(self.real, real)

    def queries(self, position: torch.Tensor) -> torch.Tensor:
        """The queries of the positions (R, M) of each lane's block, (P, A M)."""
        block = self.real.shape[1]
        place = torch.arange(self.lane.shape[1], device=position.device)  # (A,)
        before = place[:, None] * block  # (A, 1) positions of earlier lanes in the row
        return (before + position[self.lane]).flatten(1)

    def by_lane(self, features: torch.Tensor) -> torch.Tensor:
        """Features at `queries` (P, A M, D), regrouped by lane (R, M, D)."""
        by_place: torch.Tensor = features.unflatten(1, (self.lane.shape[1], -1))  # (P, A, M, D)
        return by_place[self.place]


def rows_at(
    layers: Sequence[KeysValues],
    slot: torch.Tensor,
    columns: int,
) -> list[KeysValues]:
    """The first `columns` of kept rows (S, H, L, D / H) at `slot` (P,), without a copy if the slots are in sequence."""
    first = int(slot[0])
    end = first + len(slot)
    in_sequence = torch.equal(slot, torch.arange(first, end, device=slot.device))
    rows: list[KeysValues] = []
    for keys, values in layers:
        at = slice(first, end) if in_sequence else slot.to(keys.device)
        rows.append((keys[at, :, :columns], values[at, :, :columns]))
    return rows


def widest(window: torch.Tensor, most: int) -> int:
    """The largest number of lanes in a row, at most `most`, that leaves no more than a sixth of the places empty.

    `window` (R,): that of each lane. Lanes of several windows never share a row.
    """
    counts = window.unique(return_counts=True)[1]  # (windows,)
    while most > 1:
        in_a_row = min(most, int(counts.max()))
        rows_of_windows = -(-counts // in_a_row)  # (windows,) rounded up
        places = in_a_row * int(rows_of_windows.sum())
        if 6 * len(window) >= 5 * places:
            return in_a_row
        most = in_a_row // 2
    return 1


def arrange(
    window: torch.Tensor,
    most: int,
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Put lanes of the same `window` (R,) into rows of at most `most`.

    Returns the lane at each place (P, A), -1 at empty places, and the row and place of each lane (R,).
    """
    # in the order of windows: number the lanes of each window from 0, and begin a row at every `most`-th of them
    order = window.argsort(stable=True)  # (R,)
    every = torch.arange(len(order), device=order.device)  # (R,)
    is_first = torch.ones_like(order, dtype=torch.bool)  # (R,) of its window
    is_first[1:] = window[order].diff() != 0
    first = torch.where(is_first, every, 0).cummax(0).values  # (R,) where its window begins
    nth = every - first  # (R,)
    place = nth % most  # (R,)
    row = (place == 0).cumsum(0) - 1  # (R,)
    shape = (int(row[-1]) + 1, int(place.max()) + 1)
    number = order.new_full(shape, -1)  # (P, A)
    number[row, place] = order
    back = order.argsort()  # (R,)
    return number, (row[back], place[back])
