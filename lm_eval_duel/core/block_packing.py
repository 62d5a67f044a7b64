"""The packing of blocks of many windows into one call: the lanes that share a row, and what their positions see.

    row of a window    block 3 | block 4 | block 5      its lanes
    columns            12 13 14 15 16 17 18 19 ...      their positions in the window
    seen               kept keys, such as those before the own block, and the own block

Shapes: R lanes, B positions of a lane, P rows of the call, A lanes of one row, Q = A B queries, K kept keys, M
positions of a lane that are evaluated, S slots, H heads, L row length, D features.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property

import torch

from lm_eval_duel.core.network import KeysValues


@dataclasses.dataclass(frozen=True)
class PackedCall:
    """The layout of lanes in one call. The next step can reuse it if it has the same lanes."""

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
        cls, slot: torch.Tensor, start: torch.Tensor, real: torch.Tensor, kept: torch.Tensor, most: int
    ) -> PackedCall:
        """The call over lanes that see the columns `kept` (R, K) at `slot` (R,), with at most `most` lanes in a row."""
        number, place = arrange(slot, widest(slot, most))  # (P, A)
        lane = number.clamp(min=0)  # (P, A)
        columns = (start[lane][:, :, None] + torch.arange(real.shape[1], device=start.device)).flatten(1)  # (P, Q)
        return cls(slot, start, real, lane, number >= 0, place, columns, kept)

    @cached_property
    def seen(self) -> torch.Tensor:
        """True at the kept keys, and at those of the call's own, that each query attends to, (P, Q, K + Q)."""
        used, (count, block) = self.used[:, :, None], (self.lane.shape[1], self.real.shape[1])
        exists = (self.real[self.lane] & used).flatten(1)  # (P, Q)
        of_lane = torch.arange(count, device=exists.device).repeat_interleave(block)  # (Q,)
        own = (of_lane[:, None] == of_lane) & (exists[:, None] | ~exists[:, :, None])  # (P, Q, Q)
        return torch.cat([(self.kept[self.lane] & used)[:, of_lane], own], dim=2)

    def holds(self, slot: torch.Tensor, start: torch.Tensor, real: torch.Tensor) -> bool:
        """True if these lanes have this layout."""
        ours, theirs = (self.slot, self.start, self.real), (slot, start, real)
        return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))

    def queries(self, position: torch.Tensor) -> torch.Tensor:
        """The queries of the positions (R, M) of each lane's block, (P, A M)."""
        block = self.real.shape[1]
        before = torch.arange(self.lane.shape[1], device=position.device)[:, None] * block  # (A, 1)
        return (before + position[self.lane]).flatten(1)

    def by_lane(self, features: torch.Tensor) -> torch.Tensor:
        """Features at `queries` (P, A M, D), regrouped by lane (R, M, D)."""
        of_places: torch.Tensor = features.unflatten(1, (self.lane.shape[1], -1))  # (P, A, M, D)
        return of_places[self.place]


def rows_at(layers: Sequence[KeysValues], slot: torch.Tensor, columns: int) -> list[KeysValues]:
    """The first `columns` of kept rows (S, H, L, D / H) at `slot` (P,): views where the slots follow each other."""
    first = int(slot[0])
    together = torch.equal(slot, torch.arange(first, first + len(slot), device=slot.device))
    rows: list[KeysValues] = []
    for keys, values in layers:
        at = slice(first, first + len(slot)) if together else slot.to(keys.device)
        rows.append((keys[at, :, :columns], values[at, :, :columns]))
    return rows


def widest(window: torch.Tensor, most: int) -> int:
    """The largest number of lanes in a row, at most `most`, that leaves no more than a sixth of the places empty."""
    counts = window.unique(return_counts=True)[1]  # (windows,)
    while most > 1:
        wide = min(most, int(counts.max()))
        rows = -(-counts // wide)  # (windows,)
        if 5 * wide * int(rows.sum()) <= 6 * len(window):
            return wide
        most = wide // 2
    return 1


def arrange(window: torch.Tensor, most: int) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Put lanes of the same `window` (R,) into rows of at most `most`.

    Returns the lane at each place (P, A), -1 at empty places, and the row and place of each lane (R,).
    """
    order = window.argsort(stable=True)  # (R,)
    every = torch.arange(len(order), device=order.device)  # (R,)
    begins = torch.ones_like(order, dtype=torch.bool)  # (R,)
    begins[1:] = window[order].diff() != 0
    nth = every - torch.where(begins, every, 0).cummax(0).values  # (R,) within its window
    row, place = (nth % most == 0).cumsum(0) - 1, nth % most  # (R,) each
    number = order.new_full((int(row[-1]) + 1, int(place.max()) + 1), -1)  # (P, A)
    number[row, place] = order
    back = order.argsort()  # (R,)
    return number, (row[back], place[back])
