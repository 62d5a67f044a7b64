"""Rows and lanes: whole windows, and the blocks of them that are being revealed.

    window      context c c, target t t t t, suffix s
    row         c c t t t t s - -       padded to the longest row of its group
    lanes           t t|t t             blocks of two

With the targets known every block starts from a known state, so all lanes of all windows go side by side. Lanes wait in
a `Queue` until the loop has room for them.

Shapes: N windows, L row length, R lanes, W block width, C masked positions.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TypeVar

import torch

from lm_eval_duel.core.windows import Window

Self = TypeVar("Self", bound="Lanes")
PLANES = ("row", "start", "origin", "width", "tokens", "masked", "step")  # of Lanes


@dataclasses.dataclass(frozen=True)
class Rows:
    """Whole windows as planes. The view decides by column whether it may read `ids` at the target."""

    ids: torch.Tensor  # (N, L) context | target | tail | suffix; 0 in the tail and in padding
    visible: torch.Tensor  # (N, L) bool: context, known target positions and suffix
    origin: torch.Tensor  # (N,) column of the first target position
    target: torch.Tensor  # (N,) target positions
    length: torch.Tensor  # (N,) real positions
    noise_seed: torch.Tensor  # (N,) of the noise at masked positions, if it is random tokens

    @classmethod
    def from_windows(
        cls,
        windows: Sequence[Window],
        device: torch.device,
        noise_seed: int = 0,
    ) -> Rows:
        """The rows of `windows`, right-padded to the longest."""
        longest = max(window.length for window in windows)
        ids = torch.zeros(len(windows), longest, dtype=torch.int64)  # (N, L)
        visible = torch.zeros(len(windows), longest, dtype=torch.bool)  # (N, L)
        for n, window in enumerate(windows):
            start = len(window.context)
            end = start + len(window.target)
            ids[n, :end] = torch.tensor(window.context + window.target, dtype=torch.int64)
            visible[n, :start] = True
            if window.known:
                visible[n, [start + index for index in window.known]] = True
            if window.suffix:
                suffix = slice(window.length - len(window.suffix), window.length)
                ids[n, suffix] = torch.tensor(window.suffix)
                visible[n, suffix] = True
        origin = torch.tensor([len(window.context) for window in windows])  # (N,)
        target = torch.tensor([len(window.target) for window in windows])  # (N,)
        length = torch.tensor([window.length for window in windows])  # (N,)
        seed = torch.full_like(length, noise_seed)  # (N,)
        planes = (ids, visible, origin, target, length, seed)
        if device.type != "cuda":
            return cls(*(plane.to(device) for plane in planes))
        # pinned, so that the copies do not wait for the device
        return cls(*(plane.pin_memory().to(device, non_blocking=True) for plane in planes))

    def alone(self, row: int) -> Rows:
        """A copy of one window, without padding."""
        only = slice(row, row + 1)
        length = int(self.length[row])
        return Rows(
            ids=self.ids[only, :length].clone(),  # sampling writes into it
            visible=self.visible[only, :length].clone(),
            origin=self.origin[only],
            target=self.target[only],
            length=self.length[only],
            noise_seed=self.noise_seed[only],
        )

    def targets(self, lanes: Lanes) -> torch.Tensor:
        """The token at each position of `lanes`, (R, W). Beyond a lane's width it is arbitrary."""
        last = self.ids.shape[1] - 1  # columns beyond a short block's width may lie outside the row
        return self.ids[lanes.row[:, None], lanes.columns.clamp(max=last)]


@dataclasses.dataclass(frozen=True)
class Lanes:
    """Blocks that are being revealed, each in its own columns.

    W is the width of the widest block. Positions of a lane beyond its `width` are never masked and never read.
    """

    row: torch.Tensor  # (R,) the index of the window in its group
    start: torch.Tensor  # (R,) the block's first column
    origin: torch.Tensor  # (R,) the column of the first target position
    width: torch.Tensor  # (R,) real positions
    tokens: torch.Tensor  # (R, W) revealed tokens; -1 where masked
    masked: torch.Tensor  # (R, W) bool
    step: torch.Tensor  # (R,) steps taken in this block
    memory: tuple[torch.Tensor, ...] = ()  # the rule's, each (R, W, ...); zeros in fresh lanes
    carried: tuple[torch.Tensor, ...] = ()  # the network's own output at the step before, likewise

    @classmethod
    def fresh(
        cls,
        rows: Rows,
        row: torch.Tensor,
        start: torch.Tensor,
        width: torch.Tensor,
    ) -> Lanes:
        """Lanes at the start of their blocks: target positions masked, context and known positions revealed."""
        origin = rows.origin[row]  # (R,)
        position = torch.arange(int(width.max()), device=row.device)  # (W,)
        columns = start[:, None] + position  # (R, W)
        real = position < width[:, None]  # (R, W)
        last = rows.ids.shape[1] - 1
        at = (row[:, None], columns.clamp(max=last))
        masked = real & (columns >= origin[:, None]) & ~rows.visible[at]  # (R, W)
        tokens = rows.ids[at].masked_fill(masked | ~real, -1)  # (R, W)
        return cls(
            row=row,
            start=start,
            origin=origin,
            width=width,
            tokens=tokens,
            masked=masked,
            step=torch.zeros_like(row),
        )

    def __len__(self) -> int:
        return len(self.row)

    @cached_property  # several parts of a step ask for it
    def columns(self) -> torch.Tensor:
        """The row's column of each position, (R, W)."""
        return self.start[:, None] + torch.arange(self.masked.shape[1], device=self.start.device)

    @property
    def in_target(self) -> torch.Tensor:
        """The positions of the blocks that belong to the target and not to the context, (R, W) bool."""
        columns = self.columns  # (R, W)
        end = self.start + self.width  # (R,)
        return (columns >= self.origin[:, None]) & (columns < end[:, None])

    @cached_property
    def masked_at(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(lane, position) of each masked position, (C,) each, in the order of `masked.nonzero()`.

        Asking for it waits for the device.
        """
        lane, position = self.masked.nonzero().unbind(1)
        return lane, position

    def reveal(
        self: Self,
        pick: torch.Tensor,
        tokens: torch.Tensor,
        memory: tuple[torch.Tensor, ...],
        carried: tuple[torch.Tensor, ...] = (),
    ) -> Self:
        """The lanes after a step: `tokens` (R, W) shown at `pick` (R, W)."""
        return dataclasses.replace(
            self,
            tokens=torch.where(pick, tokens, self.tokens),
            masked=self.masked & ~pick,
            step=self.step + 1,
            memory=memory,
            carried=carried,
        )

    def show(self: Self, tokens: torch.Tensor, masked: torch.Tensor) -> Self:
        """Fresh lanes with the positions `masked` (R, W) masked and `tokens` (R, W) at the others."""
        shown = torch.where(self.masked & ~masked, tokens, self.tokens)  # (R, W)
        return dataclasses.replace(self, masked=masked, tokens=shown)

    def in_row(self: Self, row: int) -> Self:
        """These lanes as blocks of window `row`."""
        return dataclasses.replace(self, row=torch.full_like(self.row, row))

    def select(self: Self, keep: torch.Tensor | slice) -> Self:
        """The lanes at `keep`: a boolean plane (R,), indices, or a slice."""
        if isinstance(keep, torch.Tensor) and keep.dtype == torch.bool:
            keep = keep.nonzero()[:, 0]  # one host sync, not one for each plane
        planes = {name: getattr(self, name)[keep] for name in PLANES}
        memory = tuple(plane[keep] for plane in self.memory)
        carried = tuple(plane[keep] for plane in self.carried)
        return dataclasses.replace(self, **planes, memory=memory, carried=carried)

    def concat(self: Self, other: Self) -> Self:
        """These lanes, then the others. W is the larger of the two; lanes without memory get zeros."""
        width = max(self.masked.shape[1], other.masked.shape[1])
        planes = {}
        for name in PLANES:
            fill = -1 if name == "tokens" else 0
            first = _widen(getattr(self, name), width, fill)
            second = _widen(getattr(other, name), width, fill)
            planes[name] = torch.cat([first, second])
        memory = _joined(self, self.memory, other, other.memory, width)
        carried = _joined(self, self.carried, other, other.carried, width)
        return dataclasses.replace(self, **planes, memory=memory, carried=carried)


def _joined(
    first_lanes: Lanes,
    first_planes: tuple[torch.Tensor, ...],
    second_lanes: Lanes,
    second_planes: tuple[torch.Tensor, ...],
    width: int,
) -> tuple[torch.Tensor, ...]:
    """The planes of the first lanes, then those of the second ones, padded to W = `width`.

    Lanes without planes get zeros.
    """
    first_planes = first_planes or _zeros_like(second_planes, first_lanes)
    second_planes = second_planes or _zeros_like(first_planes, second_lanes)
    joined = []
    for first, second in zip(first_planes, second_planes, strict=True):
        plane = torch.cat([_widen(first, width, 0), _widen(second, width, 0)])
        joined.append(plane)
    return tuple(joined)


def _zeros_like(planes: tuple[torch.Tensor, ...], lanes: Lanes) -> tuple[torch.Tensor, ...]:
    """Zeros for these lanes (R, W, ...) in place of `planes`, which are of other lanes."""
    zeros = []
    for plane in planes:
        shape = (*lanes.masked.shape, *plane.shape[2:])
        zeros.append(plane.new_zeros(shape))
    return tuple(zeros)


def _widen(plane: torch.Tensor, width: int, fill: float) -> torch.Tensor:
    """`plane` (R, W, ...) padded to W = `width`; one of shape (R,) has no W and stays."""
    if plane.dim() == 1 or plane.shape[1] == width:
        return plane
    padded = plane.new_full((len(plane), width, *plane.shape[2:]), fill)
    padded[:, : plane.shape[1]] = plane
    return padded


def blocks(origin: int, target: int, block: int | None, grid: str) -> list[tuple[int, int]]:
    """(first column, width) of each block of a target that begins at column `origin` and has `target` positions.

    row            c c c c c t t t t t t t        origin 5, target 7, block 4
    grid=target              0 0 0 0 1 1 1        blocks count from the target
    grid=row       - - - - 0 0 0 0 1 1 1 1        blocks count from the row; the first one is partly revealed
    """
    if target == 0:
        return []
    if block is None:
        return [(origin, target)]
    end = origin + target
    first = origin if grid == "target" else origin - origin % block
    spans = []
    for start in range(first, end, block):
        width = min(block, end - start)  # the last block may be short
        spans.append((start, width))
    return spans


# ---------------------------------------------------------------- the order in which windows are opened, and lanes wait


GROUP = 4096  # windows opened at once, which bounds the ids in memory, not the batch


def groups(
    windows: Sequence[Window],
    same_length: bool,
    buckets: Sequence[int] | None = None,
) -> list[list[int]]:
    """Groups of windows to open together, as indices, longest windows first. Windows without a target are left out.

    `same_length`: all windows of a group have one length. `buckets`: a number for each window. Smaller numbers come
    first, and windows are sorted by length within a bucket.
    """

    def sort_key(n: int) -> tuple[int, int]:
        bucket = buckets[n] if buckets else 0
        return (bucket, -windows[n].length)

    with_targets = [n for n, window in enumerate(windows) if window.target]
    result: list[list[int]] = []
    group: list[int] = []
    for n in sorted(with_targets, key=sort_key):
        is_full = len(group) >= GROUP
        differs = bool(group) and windows[group[0]].length != windows[n].length
        if not result or is_full or (same_length and differs):
            group = []
            result.append(group)
        group.append(n)
    return result


class Queue:
    """Waiting lanes in order, made when they are needed. The loop may put more in front.

    Lanes that have begun and fresh ones are never joined here, so that fresh lanes take no memory for the rule.
    """

    def __init__(self, lanes: Iterable[Lanes]):
        self._ready: deque[Lanes] = deque()
        self._coming = iter(lanes)

    def __bool__(self) -> bool:
        if not self._ready:  # only making the next lanes tells whether there are any
            following = next(self._coming, None)
            if following is not None:
                self._ready.append(following)
        return bool(self._ready)

    def first(self) -> Lanes:
        """The next lane, which stays in the queue."""
        return self._ready[0].select(slice(0, 1))

    def take(self, count: int) -> Lanes:
        """The next lanes, at most `count`."""
        part = self._ready.popleft()
        if len(part) > count:
            self._ready.appendleft(part.select(slice(count, None)))
        return part.select(slice(0, count))

    def put_first(self, lanes: Lanes) -> None:
        """Put these lanes in front."""
        self._ready.appendleft(lanes)
