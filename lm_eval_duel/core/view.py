"""A view: a denoiser opened on a group of windows, as a function from lanes to predictions.

Shapes: N windows, L row length, R lanes, W block width, C masked positions, U rows of features that the LM head runs
on, D features, M columns asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import torch

from lm_eval_duel.core.hashing import hashed
from lm_eval_duel.core.lanes import Lanes, Rows
from lm_eval_duel.core.network import Network
from lm_eval_duel.core.predictions import Predictions


class Positions(NamedTuple):
    """The input of the LM head at masked positions. Positions known to be equal share a row of features."""

    features: torch.Tensor  # (U, D)
    row: torch.Tensor  # (C,) the feature row of each masked position, in the order of masked.nonzero()
    all_mask: torch.Tensor  # (R,) bool: nothing in the row is visible, so all its positions share one distribution

    @classmethod
    def from_lanes(
        cls, lanes: Lanes, all_mask: torch.Tensor, at: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> Positions:
        """The masked positions of lanes; `at(lane, n)` (C,) -> (C, D): the features of a lane's n-th masked position.

        Only the first position of an all-mask lane is evaluated.
        """
        lane, position = lanes.masked_at  # (C,) each
        nth = lanes.masked.cumsum(1)[lane, position] - 1  # (C,)
        unique = (nth == 0) | ~all_mask[lane]  # (C,)
        evaluated = unique.nonzero()[:, 0]  # (U,)
        return cls(at(lane[evaluated], nth[evaluated]), unique.cumsum(0) - 1, all_mask)

    def spread(self, lanes: Lanes, evaluated: Lanes, number: torch.Tensor) -> Positions:
        """The positions of `lanes`, where `number` (R,) is the evaluated lane that each of them equals."""
        before = evaluated.masked.sum(1).cumsum(0) - evaluated.masked.sum(1)  # (r,)
        lane, position = lanes.masked_at  # (C,) each
        nth = lanes.masked.cumsum(1)[lane, position] - 1  # (C,)
        of_lane = number[lane]  # (C,)
        return Positions(self.features, self.row[before[of_lane] + nth], self.all_mask[number])


def distinct(*planes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the rows that are equal in all integer or boolean planes (R, ...).

    Returns the index of the first row of each kind (r,) and the kind of each row (R,). Rows are compared by a 64-bit
    hash, then in full: if two rows with the same hash differ, all rows count as different.
    """
    rows = torch.cat([plane.reshape(len(plane), -1).long() for plane in planes], 1)  # (R, X)
    weight = hashed(torch.arange(rows.shape[1], device=rows.device), 1)  # (X,)
    values, kind = (rows * weight).sum(1).unique(return_inverse=True)  # wraps
    every = torch.arange(len(rows), device=rows.device)  # (R,)
    first = every.new_full(values.shape, len(rows)).scatter_reduce_(0, kind, every, "amin")  # (r,)
    if len(first) == len(rows) or not torch.equal(rows[first[kind]], rows):
        return every, every
    first, order = first.sort()
    return first, order.argsort()[kind]


def masked_positions(lanes: Lanes) -> torch.Tensor:
    """The masked positions of each lane, padded with other positions to the largest number in a lane, (R, M)."""
    largest = int(lanes.masked.sum(1).max())
    return (~lanes.masked).byte().sort(dim=1, stable=True).indices[:, :largest]


class View:
    """A bidirectional (or causal) denoiser opened on a group of rows: lanes in, predictions out.

    A lane sees the context, the target left of its block, the block as revealed so far, [MASK] up to the end of target
    and tail, and the suffix. The rows may hold the targets: from a lane's block start on, targets are not read.
    """

    def __init__(self, denoiser: Network, rows: Rows):
        self.denoiser, self.rows = denoiser, rows
        self.forwards = 0  # network calls
        self.evaluated = 0  # rows evaluated

    def cost(self, lanes: Lanes) -> torch.Tensor:
        """The cost of each lane in network tokens, (R,)."""
        return self.rows.length[lanes.row]

    def commit(self, lanes: Lanes) -> None:
        """Write finished blocks into the rows, so that later blocks see them (sampling)."""
        inside = torch.arange(lanes.masked.shape[1], device=lanes.start.device) < lanes.width[:, None]  # (R, W)
        rows = lanes.row[:, None].expand_as(inside)
        self.rows.ids[rows[inside], lanes.columns[inside]] = lanes.tokens[inside]

    def __call__(self, lanes: Lanes, targets: torch.Tensor | None = None) -> Predictions:
        """The predictions at the masked positions of `lanes`; `targets` (R, W): tokens whose log-probs are needed."""
        features, row, all_mask = self.positions(lanes)
        excluded, columns = self._excluded
        inputs = (lanes.masked, all_mask, features, row, self.denoiser.head, excluded, targets)
        return Predictions(*inputs, columns=columns, masked_at=lanes.masked_at)

    @cached_property
    def _excluded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The excluded columns as a plane (V,) and as indices (E,)."""
        excluded = self.denoiser.excluded
        return excluded, excluded.nonzero()[:, 0]

    @cached_property
    def _unpadded(self) -> bool:
        """True if all rows have one length."""
        return bool((self.rows.length == self.rows.ids.shape[1]).all())

    def positions(self, lanes: Lanes) -> Positions:
        """The input of the LM head at the masked positions of `lanes`; lanes with equal rows are evaluated once."""
        ids, shown, real = self._input(lanes)  # (R, L) each
        visible = self.rows.visible[lanes.row].sum(1)  # (R,) with `origin` and `real` it fixes context and suffix
        first, number = distinct(ids, shown, real, visible, lanes.masked, lanes.start, lanes.origin)
        if len(first) == len(lanes):
            return self._evaluate(lanes, ids, shown, real)
        unique = lanes.select(first)
        return self._evaluate(unique, ids[first], shown[first], real[first]).spread(lanes, unique, number)

    def _evaluate(self, lanes: Lanes, ids: torch.Tensor, shown: torch.Tensor, real: torch.Tensor) -> Positions:
        columns = lanes.start[:, None] + masked_positions(lanes) - self.denoiser.shift  # (R, M)
        columns = columns.clamp(0, ids.shape[1] - 1)  # columns that pad `masked_positions` may lie outside
        extra, padded = self._extra_inputs(lanes, shown, real), self._padding(real)
        features = self.denoiser.features_at(columns, ids, padded, **extra)  # (R, M, D)
        self.forwards += 1
        self.evaluated += len(lanes)
        all_mask = ~shown.any(1) & self.denoiser.relative_positions  # (R,)
        return Positions.from_lanes(lanes, all_mask, lambda lane, n: features[lane, n])

    def _padding(self, real: torch.Tensor) -> torch.Tensor | None:
        """`real` (R, L) for the network: None if no row has padding."""
        return None if self._unpadded or real.all() else real

    def _extra_inputs(self, lanes: Lanes, shown: torch.Tensor, real: torch.Tensor) -> dict[str, torch.Tensor]:
        """Inputs of the network besides the rows, (R, ...) each."""
        return {}

    def _input(self, lanes: Lanes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Input ids, which positions show a token, and which positions are not padding; (R, L) each."""
        rows, row = self.rows, lanes.row
        length = rows.ids.shape[1] if self._unpadded else int(rows.length[row].max())
        column = torch.arange(length, device=row.device)  # (L,)
        ids, visible = rows.ids[row, :length], rows.visible[row, :length]  # (R, L)
        real = column < rows.length[row][:, None]  # (R, L)
        before = (column >= lanes.origin[:, None]) & (column < lanes.start[:, None])  # (R, L) earlier blocks

        revealed = (lanes.tokens >= 0) & ~lanes.masked  # (R, W)
        at = torch.where(revealed, lanes.columns, length)  # (R, W) other positions go into an extra column
        written = ids.new_full((len(row), length + 1), -1).scatter_(1, at, lanes.tokens)[:, :length]  # (R, L)
        shown = visible | before | (written >= 0)  # (R, L)
        ids = torch.where(written >= 0, written, ids)  # (R, L)
        mask_id = self.denoiser.mask_id or 0  # a causal network never attends to a masked position
        return torch.where(shown, ids, mask_id), shown, real
