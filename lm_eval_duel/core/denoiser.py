"""The denoiser, and its views: opened on a group of windows, it is a function from lanes to predictions.

    row      c c c | t t t t | t t t t | t t t t | - - | s      context, three blocks of the target, tail, suffix
    lane                       t m t m                          the second block, half of it revealed
    input    c c c   t t t t   t m t m   m m m m   m m   s      m: [MASK]

Shapes: N windows, L row length, R lanes, r of them that differ, W block width, B >= W the trained block, C masked
positions, U rows of features that the LM head runs on, D features, M columns asked for, P rows of a packed call, A
lanes of one row, Q = A B queries, V tokens, K of them that are no special columns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F

from lm_eval_duel.core.block_causal import CleanStream, PackedCall, lanes_abreast, stretch_of
from lm_eval_duel.core.hashing import hashed
from lm_eval_duel.core.lanes import Lanes, Rows
from lm_eval_duel.core.network import Evaluator, Network
from lm_eval_duel.core.noise import NoiseKeys, masked_tokens
from lm_eval_duel.core.predictions import Predictions


class Denoiser(Network):
    """A network, opened on windows: masked rows in, a distribution over tokens at each masked position out.

    To bring your own network, subclass it and define four members:

        class Mine(Denoiser):
            vocab_size = 50258    # columns of the logits
            mask_id = 50257
            max_length = 1024

            def features(self, ids, real):
                return logits    # (R, L, V) of rows of ids (R, L)

    `Network` lists what else may be defined: `head`, so that logits are computed at masked positions only; `device`;
    `stream` in place of `features` for a network that works by blocks.
    """

    def open(self, rows: Rows, generating: bool = False) -> View:
        """A view of one group of windows, for scoring or for generating.

        Where the noise is random tokens, masked positions show noise, as in commit-once samplers.
        """
        if self.by_blocks or (self.attention == "causal" and self.shift):
            return BlockCausalView(self, rows, generating)
        return View(self, rows)

    def open_noised(self, rows: Rows) -> NoiseView:
        """A view of one group of windows whose targets are noised, for the bound of ancestral sampling."""
        return NoiseView(self, rows)


class View(Evaluator):
    """A bidirectional (or causal) network opened on a group of rows: lanes in, predictions out.

    A lane sees the context, the target left of its block, the block as revealed so far, [MASK] up to the end of target
    and tail, and the suffix. The rows may hold the targets: from a lane's block start on, targets are not read.
    """

    def __call__(self, lanes: Lanes, targets: torch.Tensor | None = None) -> Predictions:
        """The predictions at the masked positions of `lanes`; `targets` (R, W): tokens whose log-probs are needed."""
        positions, step = self.at_steps(lanes, self.positions(lanes))
        excluded, columns = self._excluded
        return Predictions(
            lanes.masked,
            positions.all_mask,
            positions.features,
            positions.row,
            self.denoiser.head,
            excluded,
            targets,
            columns=columns,
            masked_at=lanes.masked_at,
            carried=positions.carried,
            filters=self.denoiser.filters,
            step=step,
        )

    def at_steps(self, lanes: Lanes, positions: Positions) -> tuple[Positions, torch.Tensor | None]:
        """The positions of `lanes`, and the step of each row of features (U,); None if no filter reads the step.

        A row of features that lanes at different steps share is repeated, once for each step.
        """
        if not any(each.reads_step for each in self.denoiser.filters):
            return positions, None
        lane, _ = lanes.masked_at
        step = lanes.step[lane]  # (C,)
        first, row = distinct(positions.row, step)  # (U,), (C,)
        features = positions.features[positions.row[first]]  # (U, D)
        return positions._replace(features=features, row=row), step[first]

    def positions(self, lanes: Lanes) -> Positions:
        """The input of the LM head at the masked positions of `lanes`; lanes with equal rows are evaluated once."""
        ids, shown, real = self._input(lanes)  # (R, L) each
        # Rows that look alike may differ in how much of them was given, which guidance masks.
        visible = self.rows.visible[lanes.row].sum(1)  # (R,)
        first, kind = distinct(ids, shown, real, visible, lanes.masked, lanes.start, lanes.origin)  # (r,), (R,)
        if len(first) == len(lanes):
            return self._evaluate(lanes, ids, shown, real)
        unique = lanes.select(first)
        evaluated = self._evaluate(unique, ids[first], shown[first], real[first])
        return evaluated.spread(lanes, unique, kind)

    def _evaluate(
        self,
        lanes: Lanes,
        ids: torch.Tensor,
        shown: torch.Tensor,
        real: torch.Tensor,
    ) -> Positions:
        """One network call on different rows: input ids, which show a token, which are not padding, (R, L) each."""
        columns = lanes.start[:, None] + masked_positions(lanes) - self.denoiser.shift  # (R, M)
        last = ids.shape[1] - 1
        columns = columns.clamp(0, last)  # what pads `masked_positions` may lie outside the row
        extra = self._extra_inputs(lanes, shown, real)
        features = self.denoiser.features_at(columns, ids, self._padding(real), **extra)  # (R, M, D)
        self.forwards += 1
        self.evaluated += len(lanes)

        # A lane has a masked position, so a row of one token is a row of nothing but masks (or of one noise token).
        one_token = ((ids == ids[:, :1]) | ~real).all(1)  # (R,)
        # If the network knows relative positions alone, it predicts the same everywhere in such a row. Then float
        # noise would choose the first pick, so the positions share one row of features and tie exactly.
        all_mask = one_token & self.denoiser.relative_positions  # (R,)
        return Positions.from_lanes(lanes, all_mask, lambda lane, n: features[lane, n])

    def _padding(self, real: torch.Tensor) -> torch.Tensor | None:
        """`real` (R, L) as the network takes it: None if no row has padding."""
        return None if self._unpadded or real.all() else real

    def _extra_inputs(self, lanes: Lanes, shown: torch.Tensor, real: torch.Tensor) -> dict[str, torch.Tensor]:
        """Inputs of the network besides the rows, (R, ...) each."""
        if self.denoiser.noise_training is None:
            return {}
        share = self.masked_share(lanes, shown, real)  # (R,)
        return self.denoiser.noise_inputs(share)

    # ------------------------------------------------------------ what a lane sees

    def _input(self, lanes: Lanes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Input ids, which positions show a token, and which positions are not padding; (R, L) each."""
        rows = self.rows
        row = lanes.row
        length = rows.ids.shape[1]
        if not self._unpadded:
            length = int(rows.length[row].max())  # no more padding than the longest of these rows needs
        column = torch.arange(length, device=row.device)  # (L,)
        ids = rows.ids[row, :length]  # (R, L)
        visible = rows.visible[row, :length]  # (R, L)
        real = column < rows.length[row][:, None]  # (R, L)

        # earlier blocks of the target
        before = (column >= lanes.origin[:, None]) & (column < lanes.start[:, None])  # (R, L)

        # what is revealed of the block itself; all other positions are written to an extra column
        revealed = (lanes.tokens >= 0) & ~lanes.masked  # (R, W)
        at = torch.where(revealed, lanes.columns, length)  # (R, W)
        written = ids.new_full((len(row), length + 1), -1)  # (R, L + 1)
        written = written.scatter_(1, at, lanes.tokens)[:, :length]  # (R, L)

        shown = visible | before | (written >= 0)  # (R, L)
        ids = torch.where(written >= 0, written, ids)  # (R, L)
        return torch.where(shown, ids, self._masked_ids(lanes, shown, real)), shown, real

    def _masked_ids(self, lanes: Lanes, shown: torch.Tensor, real: torch.Tensor) -> torch.Tensor | int:
        """[MASK], or the noise (R, L) that positions show as long as they show no token of the text."""
        mask_id = self.denoiser.mask_id
        trained = self.denoiser.noise_training
        if trained is None:
            return mask_id or 0  # a causal network never attends to a masked position
        columns = torch.arange(shown.shape[1], device=shown.device)  # (L,)
        keys = self.noise_keys(lanes, columns)
        share = self.masked_share(lanes, shown, real)  # (R,)
        return masked_tokens(trained.noise, self._tokens, mask_id, share, keys)

    def masked_share(self, lanes: Lanes, shown: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        """The share of each row's positions that show no token of the text, float64 (R,)."""
        masked = (real & ~shown).sum(1)  # (R,)
        return masked.double() / self.rows.length[lanes.row]

    def noise_keys(self, lanes: Lanes, columns: torch.Tensor) -> NoiseKeys:
        """The keys of the noise of masked positions at `columns`, (L,) or (R, L)."""
        return NoiseKeys(
            seed=self.rows.noise_seed[lanes.row][:, None],
            block=(lanes.start - lanes.origin)[:, None],
            step=lanes.step[:, None],
            position=columns - lanes.origin[:, None],
        )

    # ------------------------------------------------------------ computed once, since each waits for the device

    @cached_property
    def _excluded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The excluded columns as a plane (V,) and as indices (E,)."""
        excluded = self.denoiser.excluded
        return excluded, excluded.nonzero()[:, 0]

    @cached_property
    def _tokens(self) -> torch.Tensor:
        """The ids that are tokens of the network, (K,)."""
        return (~self.denoiser.excluded).nonzero()[:, 0]

    @cached_property
    def _unpadded(self) -> bool:
        """True if all rows have one length."""
        return bool((self.rows.length == self.rows.ids.shape[1]).all())


class BlockCausalView(View):
    """A block-causal network opened on a group of rows: many blocks of a window side by side (core/block_causal.py).

    A short last block is filled up with [MASK] to its border, as these networks are trained (`last_block="fill"`), or
    ends where the window ends (`"cut"`). A suffix is visible only to the last block of the target.
    """

    def __init__(self, denoiser: Network, rows: Rows, generating: bool):
        super().__init__(denoiser, rows)
        self.block = denoiser.block or 1  # a causal network has blocks of one
        self.clean = CleanStream(denoiser, rows, generating)
        if generating:  # a window then has a single lane, whose cost is the keys of the whole window
            self._share = rows.length  # (N,)
        else:
            self._share = self.clean.shares(self.block)  # (N,)
        self._calls: dict[int, PackedCall] = {}  # of the last step, by stretch
        self._prefix_hashes: torch.Tensor | None = None  # (N, L + 1) of all columns before each one

    def cost(self, lanes: Lanes) -> torch.Tensor:
        """A lane's own positions, or its share of the clean positions if that is larger: their keys take memory too."""
        return self._share[lanes.row]

    def commit(self, lanes: Lanes) -> None:
        super().commit(lanes)
        self._prefix_hashes = None

    def positions(self, lanes: Lanes) -> Positions:
        ids, shown, real = self._blocks(lanes)  # (R, B) each
        zero = self.clean.zero[lanes.row]  # (R,)
        prefix = self._prefix_hash(lanes)  # (R,)
        first, kind = distinct(prefix, lanes.start, zero, ids, shown, real, lanes.masked)  # (r,), (R,)
        unique = lanes if len(first) == len(lanes) else lanes.select(first)
        # no clean call is larger than the call of the blocks
        tokens = len(lanes) * self.block
        for evaluated in self.clean.extend(unique.row, unique.start, tokens):
            self.forwards += 1
            self.evaluated += evaluated

        if self.denoiser.attention == "causal":  # all its predictions are in the clean stream

            def edge(lane: torch.Tensor, nth: torch.Tensor) -> torch.Tensor:
                return self._edge_features(unique, lane)

            all_mask = torch.zeros_like(unique.row, dtype=torch.bool)  # (r,)
            positions = Positions.from_lanes(unique, all_mask, edge)
        else:
            positions = self._evaluate(unique, ids[first], shown[first], real[first])
        return positions if unique is lanes else positions.spread(lanes, unique, kind)

    def _prefix_hash(self, lanes: Lanes) -> torch.Tensor:
        """A hash of the ids before the block of each lane, (R,)."""
        if self._prefix_hashes is None:
            columns = torch.arange(self.rows.ids.shape[1], device=self.rows.ids.device)  # (L,)
            total = hashed(self.rows.ids, columns).cumsum(1)  # (N, L) sums of int64 wrap around
            self._prefix_hashes = F.pad(total, (1, 0))  # (N, L + 1)
        return self._prefix_hashes[lanes.row, lanes.start]

    # ------------------------------------------------------------ what a block sees

    def _blocks(self, lanes: Lanes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Input ids of whole blocks, which positions show a token, and which positions exist; (R, B) each."""
        rows = self.rows
        row = lanes.row
        column = lanes.start[:, None] + torch.arange(self.block, device=row.device)  # (R, B)
        last = rows.ids.shape[1] - 1
        at = (row[:, None], column.clamp(max=last))
        in_row = column < rows.length[row][:, None]  # (R, B)

        # the suffix, which a block shows from the first step on
        end = (rows.origin + rows.target)[row]  # (R,) of the target
        shown = rows.visible[at] & (column >= end[:, None]) & in_row  # (R, B)
        ids = torch.where(shown, rows.ids[at], self.denoiser.mask_id or 0)  # (R, B)

        # what is revealed of the block
        revealed = (lanes.tokens >= 0) & ~lanes.masked  # (R, W)
        width = revealed.shape[1]
        ids[:, :width] = torch.where(revealed, lanes.tokens, ids[:, :width])
        shown[:, :width] |= revealed
        if self.denoiser.last_block == "fill":  # with [MASK] to its border, beyond the end of the row
            return ids, shown, torch.ones_like(shown)
        return ids, shown, in_row

    # ------------------------------------------------------------ its evaluation

    def _evaluate(
        self,
        lanes: Lanes,
        ids: torch.Tensor,
        shown: torch.Tensor,
        real: torch.Tensor,
    ) -> Positions:
        """The input of the LM head at the masked positions of the lanes, one call for each stretch of columns."""
        position = masked_positions(lanes)  # (R, M)
        read = (position - self.denoiser.shift).clamp(min=0)  # (R, M)
        slot = self.clean.slot[lanes.row]  # (R,)
        stretch = stretch_of(lanes.start, self.block)  # (R,)
        calls: dict[int, PackedCall] = {}
        lanes_of_calls = []
        features_of_calls = []
        for n in stretch.unique().tolist():
            lane = (stretch == n).nonzero()[:, 0]  # (r,)
            call = self._layout(n, slot[lane], lanes.start[lane], real[lane])
            calls[n] = call
            slot_of_row = slot[lane][call.lane[:, 0]]  # (P,) the lanes of a row are of one window
            past = self.clean.past(slot_of_row, call.kept.shape[1])
            queries = call.queries(read[lane])  # (P, A M)
            inputs = ids[lane][call.lane].flatten(1)  # (P, Q)
            part, _ = self.denoiser.stream_at(queries, inputs, call.columns, call.seen, past)  # (P, A M, D)
            self.forwards += 1
            self.evaluated += len(inputs)
            lanes_of_calls.append(lane)
            features_of_calls.append(call.by_lane(part))  # (r, M, D)
        self._calls = calls
        features = torch.cat(features_of_calls)  # (R, M, D)
        index = torch.cat(lanes_of_calls).argsort()  # (R,) where the features of each lane are

        def at(lane: torch.Tensor, nth: torch.Tensor) -> torch.Tensor:
            values = features[index[lane], nth]  # (C, D)
            if not self.clean.reads_edges:
                return values
            # a block's first prediction is read from the clean stream, at the last position before the block
            first = position[lane, nth] < 1  # (C,)
            if first.any():
                values[first] = self._edge_features(lanes, lane[first])
            return values

        # a block at the row's start that shows nothing sees nothing but [MASK]
        nothing_seen = ~shown.any(1) & (lanes.start == 0)  # (R,)
        all_mask = nothing_seen & self.denoiser.relative_positions  # (R,)
        return Positions.from_lanes(lanes, all_mask, at)

    def _layout(self, stretch: int, slot: torch.Tensor, start: torch.Tensor, real: torch.Tensor) -> PackedCall:
        """The layout of the call of one stretch: that of the step before if its lanes are the same.

        `slot`, `start` (r,) and `real` (r, B): of its lanes.
        """
        call = self._calls.get(stretch)
        if call is not None and call.holds(slot, start, real):
            return call
        clean = torch.arange(int(start.max()), device=start.device) < start[:, None]  # (r, K)
        return PackedCall.from_slots(slot, start, real, clean, lanes_abreast(self.block))

    def _edge_features(self, lanes: Lanes, lane: torch.Tensor) -> torch.Tensor:
        """The clean stream's features at the last position before the block of `lane` (c,), (c, D)."""
        return self.clean.edges(lanes.row[lane], lanes.start[lane])


class NoiseView(Evaluator):
    """A network opened on a group of rows: noisy tokens in, a distribution at every position of a span out.

    A lane sees the context, its span as given, and the suffix. A network with canvases (`block`) sees the targets
    before its span, and nothing after it.
    """

    def predictions(
        self,
        lanes: Lanes,
        noisy: torch.Tensor,
        t: torch.Tensor,
        own_output: torch.Tensor | None = None,
    ) -> Predictions:
        """The predictions at all positions of `lanes`; the arguments are those of `features`."""
        features = self.features(lanes, noisy, t, own_output)[lanes.masked_at]  # (C, D)
        every = torch.arange(len(features), device=features.device)  # (C,)
        no_ties = torch.zeros_like(lanes.row, dtype=torch.bool)  # (R,)
        return Predictions(
            lanes.masked,
            no_ties,
            features,
            every,
            self.denoiser.head,
            self.denoiser.excluded,
            filters=self.denoiser.filters,
        )

    def features(
        self,
        lanes: Lanes,
        noisy: torch.Tensor,
        t: torch.Tensor,
        own_output: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The input of the LM head (R, W, D) at all columns of `lanes`, which show `noisy` (R, W) at times t (R,).

        `own_output`: the logits (R, W, V) of an earlier pass. Only networks with self-conditioning read them.
        """
        rows = self.rows
        row = lanes.row
        columns = lanes.columns  # (R, W)
        # a canvas sees nothing after it
        end = rows.length[row] if self.denoiser.block is None else lanes.start + lanes.width  # (R,)
        length = int(end.max())
        real = torch.arange(length, device=row.device) < end[:, None]  # (R, L)

        # positions that are not masked are written to an extra column
        at = torch.where(lanes.masked, columns, length)  # (R, W)
        ids = rows.ids.new_zeros(len(row), length + 1)  # (R, L + 1)
        ids[:, :length] = rows.ids[row, :length]
        ids = ids.scatter_(1, at, noisy)[:, :length]  # (R, L)

        columns = columns.clamp(max=length - 1)
        padding = None if real.all() else real
        self.forwards += 1
        self.evaluated += len(row)
        return self.denoiser.features_at(columns, ids, padding, **self.denoiser.noise_inputs(t))


# ---------------------------------------------------------------- masked positions


class Positions(NamedTuple):
    """The input of the LM head at masked positions. Positions known to be equal share a row of features."""

    features: torch.Tensor  # (U, D)
    # the row of features of each masked position, in the order of `masked.nonzero()`
    row: torch.Tensor  # (C,)
    # one token is everywhere, [MASK], so all positions share one distribution
    all_mask: torch.Tensor  # (R,) bool
    # what the network reads at the next step
    carried: tuple[torch.Tensor, ...] = ()  # (R, W, ...) each

    @classmethod
    def from_lanes(
        cls,
        lanes: Lanes,
        all_mask: torch.Tensor,
        at: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> Positions:
        """The masked positions of lanes.

        `at(lane, nth)`: the features (C, D) of the nth masked position of each lane, both (C,). Of an all-mask lane
        only the first position has a row of features.
        """
        lane, position = lanes.masked_at  # (C,) each
        nth = lanes.masked.cumsum(1)[lane, position] - 1  # (C,)
        has_own_row = (nth == 0) | ~all_mask[lane]  # (C,)
        evaluated = has_own_row.nonzero()[:, 0]  # (U,)
        features = at(lane[evaluated], nth[evaluated])  # (U, D)
        row = has_own_row.cumsum(0) - 1  # (C,)
        return cls(features, row, all_mask)

    def spread(self, lanes: Lanes, evaluated: Lanes, kind: torch.Tensor) -> Positions:
        """The positions of all `lanes` from those of the `evaluated` ones; `kind` (R,): which of these each equals."""
        counts = evaluated.masked.sum(1)  # (r,)
        before = counts.cumsum(0) - counts  # (r,) masked positions of earlier lanes
        lane, position = lanes.masked_at  # (C,) each
        nth = lanes.masked.cumsum(1)[lane, position] - 1  # (C,)
        row = self.row[before[kind[lane]] + nth]  # (C,)
        carried = tuple(plane[kind] for plane in self.carried)
        return Positions(self.features, row, self.all_mask[kind], carried)


def masked_positions(lanes: Lanes) -> torch.Tensor:
    """The masked positions of each lane, padded with other positions to the largest number in a lane, (R, M)."""
    largest = int(lanes.masked.sum(1).max())
    # 0 where masked, 1 elsewhere: a stable sort brings the masked positions to the front, in order
    order = (~lanes.masked).byte().sort(dim=1, stable=True).indices  # (R, W)
    return order[:, :largest]


@functools.lru_cache(maxsize=64)  # asked at every step
def _factors(columns: int, device: torch.device) -> torch.Tensor:
    """The factor of each column in the hash of a row, (X,)."""
    return hashed(torch.arange(columns, device=device), 1)


def distinct(*planes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the rows that are equal in all integer or boolean planes (R, ...).

    Returns the index of the first row of each kind (r,) and the kind of each row (R,). Rows are compared by a 64-bit
    hash, then in full: if two rows with the same hash differ, all rows count as different.
    """
    rows = torch.cat([plane.reshape(len(plane), -1).long() for plane in planes], 1)  # (R, X)
    sums = (rows * _factors(rows.shape[1], rows.device)).sum(1)  # (R,) products of int64 wrap around
    values, kind = sums.unique(return_inverse=True)  # (r,), (R,)
    every = torch.arange(len(rows), device=rows.device)  # (R,)
    first = every.new_full(values.shape, len(rows))  # (r,)
    first = first.scatter_reduce_(0, kind, every, "amin")
    if len(first) == len(rows) or not torch.equal(rows[first[kind]], rows):
        return every, every
    # `unique` sorts by hash; kinds are numbered in the order of rows
    first, order = first.sort()
    return first, order.argsort()[kind]
