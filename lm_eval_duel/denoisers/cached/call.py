"""The layout of one call under a cache: the positions of blocks that it evaluates, and what they see.

    one lane a block      whole kept rows, in which the call's keys and values replace the kept ones of its positions;
                          nothing is copied where the slots of the lanes follow each other
    several lanes         the states of a block stand side by side in one row of the call, behind the kept keys:
                          | kept, all but the block's positions | state 1 | state 2 | ...  (dual only)

Shapes: R lanes, W block width, L row length, M positions of a lane that are asked for, P rows of a call, A lanes of one
row, Q positions of a call, K keys, S slots, D features.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch

from lm_eval_duel.core.block_packing import arrange, widest
from lm_eval_duel.core.lanes import Lanes
from lm_eval_duel.core.network import KeysValues
from lm_eval_duel.denoisers.cached.kept_keys import CachedStep, Places, Replaced

ROW = 256  # positions of states that share a row
WASTE = 8  # if lanes of several blocks share a call, at most one position in WASTE is wasted,
SMALL = 1024  # except in calls of so few positions


@dataclasses.dataclass(frozen=True)
class CachedCall:
    """One network call. `by_lane` regroups its features (P, ., D) by lane, (R, M, D)."""

    ids: torch.Tensor  # (P, Q)
    step: CachedStep  # asks for M positions of a row, or A M
    by_lane: Callable[[torch.Tensor], torch.Tensor]


def nearby(start: torch.Tensor, length: torch.Tensor) -> Iterator[torch.Tensor]:
    """Groups of lanes (r,) whose rows are evaluated from nearly the same column on; `start` (R,): their columns."""
    order = start.argsort(stable=True)  # (R,)
    ascending, end = start[order].tolist(), int(length.max())
    begin = 0
    for n, column in enumerate(ascending):
        small = (n + 1 - begin) * (end - ascending[begin]) <= SMALL
        if (column - ascending[begin]) * WASTE > end - column and not small:
            yield order[begin:n]
            begin = n
    yield order[begin:]


def separate_rows(
    ids: torch.Tensor,
    columns: torch.Tensor,
    real: torch.Tensor,
    length: torch.Tensor,
    slot: torch.Tensor,
    layers: list[KeysValues],
    wanted: torch.Tensor,
) -> CachedCall:
    """Positions of every lane in a separate row, against whole kept rows.

    `ids` (R, Q) at `columns` (R, Q) of rows of `length` (R,) positions; the keys and values of those that are `real`
    (R, Q) stand for what is kept. `wanted` (R, M): which of the Q are asked for.
    """
    most = int(length.max())
    every = torch.arange(most, device=ids.device)[None]  # (1, K)
    seen = None if bool((length == most).all()) else (every < length[:, None])[:, None]  # (R, 1, K)
    places = Places(columns, real)
    kept = _rows(slot)
    past = [Replaced(_taken(keys, kept, most), _taken(values, kept, most), places) for keys, values in layers]
    step = CachedStep(columns.clamp(max=most - 1), seen, past, every, wanted)
    return CachedCall(ids, step, lambda features: features)


def shared_rows(
    lanes: Lanes,
    ids: torch.Tensor,
    length: torch.Tensor,
    slot: torch.Tensor,
    layers: list[KeysValues],
    wanted: torch.Tensor,
) -> CachedCall:
    """The positions `ids` (R, W) of lanes' blocks, states of one block behind each other in a row of the call."""
    width, most, device = ids.shape[1], int(length.max()), ids.device
    number, place = arrange(slot, widest(slot, max(1, ROW // width)))  # (P, A)
    used, lane = number >= 0, number.clamp(min=0)  # (P, A)
    first = lane[:, 0]  # (P,) a lane of the row
    start, real = lanes.start[first], _inside(lanes)  # (P,), (R, W)

    every = torch.arange(most, device=device)[None]  # (1, K)
    outside = (every < start[:, None]) | (every >= (start + lanes.width[first])[:, None])  # (P, K)
    kept = outside & (every < length[first][:, None])  # (P, K)
    exists = (real[lane] & used[:, :, None]).flatten(1)  # (P, Q)
    of_lane = torch.arange(lane.shape[1], device=device).repeat_interleave(width)  # (Q,)
    own = (of_lane[:, None] == of_lane) & (exists[:, None] | ~exists[:, :, None])  # (P, Q, Q)
    seen = torch.cat([kept[:, None].expand(-1, own.shape[1], -1), own], 2)  # (P, Q, K + Q)

    columns = (start[:, None] + torch.arange(width, device=device)).clamp(max=most - 1)  # (P, W)
    columns = columns.repeat(1, lane.shape[1])  # (P, Q)
    rows = _rows(slot[first])
    past = [(_taken(keys, rows, most), _taken(values, rows, most)) for keys, values in layers]
    before = torch.arange(lane.shape[1], device=device)[:, None] * width  # (A, 1)
    places = torch.cat([every.expand(len(first), -1), columns], 1)  # (P, K + Q)
    step = CachedStep(columns, seen, past, places, (before + wanted[lane]).flatten(1))
    return CachedCall(ids[lane].flatten(1), step, lambda features: features.unflatten(1, (lane.shape[1], -1))[place])


def _inside(lanes: Lanes) -> torch.Tensor:
    """The positions of each lane's plane that belong to its block, (R, W) bool."""
    return torch.arange(lanes.masked.shape[1], device=lanes.width.device) < lanes.width[:, None]


def _rows(slot: torch.Tensor) -> slice | torch.Tensor:
    """The slots (P,), as a slice where they follow each other."""
    first = int(slot[0])
    together = torch.equal(slot, torch.arange(first, first + len(slot), device=slot.device))
    return slice(first, first + len(slot)) if together else slot


def _taken(plane: torch.Tensor, rows: slice | torch.Tensor, columns: int) -> torch.Tensor:
    """The first `columns` of some rows of `plane` (S, H, L, D / H): a view of a slice, else a copy."""
    rows = rows if isinstance(rows, slice) else rows.to(plane.device)
    return plane[rows, :, :columns]
