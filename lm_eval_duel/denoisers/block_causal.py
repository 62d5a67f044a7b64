"""Block-causal networks: a block sees itself whole and the clean blocks before it, never a later one.

The keys and values of a window's clean blocks are computed once and kept while lanes of the window are being revealed.
A step evaluates the hidden state of many blocks of a window in one row of the batch:

    queries    block 3 as revealed so far | block 4 as revealed so far | ...
    keys       clean blocks 0 1 2 3       | the queries' own
    seen       clean blocks before the query's, and the cells of its own block

Blocks that begin within the same stretch of columns go together, so that a call reads no more clean keys than its last
block sees.

Shapes: R lanes, B the trained block, W <= B block width of the lanes, P windows of a call, A lanes of one window in it,
Q queries, K clean keys, S slots, H heads, D features.
"""

from __future__ import annotations

import torch

from lm_eval_duel.denoisers.base import Cells, Denoiser, KeysValues, View
from lm_eval_duel.lanes import Lanes, Rows

STRETCH = 128  # columns of a window whose blocks are evaluated together


class BlockCausalView(View):
    """A block-causal denoiser opened on a group of rows.

    A short last block is shown filled with [MASK] up to its border, as these networks are trained
    (`last_block="fill"`), or ends where the window ends (`"cut"`). Given ids after the target are
    seen inside its last block only.
    """

    def __init__(self, denoiser: Denoiser, rows: Rows, generating: bool):
        super().__init__(denoiser, rows)
        self.generating = generating
        self.block = denoiser.block or 1  # a causal network has blocks of one, read from the clean stream alone
        self._slot: dict[int, int] = {}  # row -> slot
        self._known: dict[int, int] = {}  # row -> clean columns whose keys are held
        self._held: list[KeysValues] = []  # of each layer, (S, H, L, D / H) each
        self._edge: torch.Tensor | None = None  # (S, L / B, D) features of the last cell of each clean block

    def cost(self, lanes: Lanes) -> torch.Tensor:
        """Its own cells, and its share of the clean row: all of it when generating, where a row has one lane."""
        own = torch.full_like(lanes.row, self.block)  # (R,)
        return own + (self.rows.length[lanes.row] if self.generating else own)

    def cells(self, lanes: Lanes) -> Cells:
        ids, shown, real = self._blocks(lanes)  # (R, B) each
        self._remember(lanes)
        if self.denoiser.attention == "causal":
            return Cells.of(
                lanes, torch.zeros_like(lanes.row, dtype=torch.bool), lambda lane, _: self._edges(lanes, lane)
            )
        stretch = lanes.start // max(self.block, STRETCH)  # (R,)
        parts = [(stretch == n).nonzero()[:, 0] for n in stretch.unique().tolist()]  # (r,) each
        found = torch.cat([self._evaluate(lanes.select(at), ids[at], real[at]) for at in parts])  # (R, B, D)
        features = found[torch.cat(parts).argsort()]  # (R, B, D)
        blank = ~shown.any(1) & (lanes.start == 0) & self.denoiser.relative_positions  # (R,)
        shift = self.denoiser.shift

        def at(lane: torch.Tensor, cell: torch.Tensor) -> torch.Tensor:
            found = features[lane, (cell - shift).clamp(min=0)]  # (C, D)
            if shift and (first := cell < shift).any():  # read from the clean stream, as the block before ends
                found[first] = self._edges(lanes, lane[first])
            return found

        return Cells.of(lanes, blank, at)

    def _edges(self, lanes: Lanes, lane: torch.Tensor) -> torch.Tensor:
        """What the clean stream says at the end of the block before that of `lane` (c,), (c, D)."""
        return self._edge[self._slots(lanes)[lane], lanes.start[lane] // self.block - 1]

    # ------------------------------------------------------------ what a block shows

    def _blocks(self, lanes: Lanes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Ids of whole blocks as the network gets them, which cells show a token, which exist; (R, B) each."""
        rows, row, width = self.rows, lanes.row, self.block
        column = lanes.start[:, None] + torch.arange(width, device=row.device)  # (R, B)
        inside = column.clamp(max=rows.ids.shape[1] - 1)  # (R, B)
        after = column >= (rows.origin + rows.target)[row][:, None]  # (R, B)
        shown = rows.given[row[:, None], inside] & after & (column < rows.length[row][:, None])  # (R, B) the suffix
        ids = torch.where(shown, rows.ids[row[:, None], inside], self.denoiser.mask_id or 0)  # (R, B)
        revealed = (lanes.tokens >= 0) & ~lanes.hidden  # (R, W)
        ids[:, : revealed.shape[1]] = torch.where(revealed, lanes.tokens, ids[:, : revealed.shape[1]])
        shown[:, : revealed.shape[1]] |= revealed
        fills = self.denoiser.last_block == "fill"
        return ids, shown, torch.ones_like(shown) if fills else column < rows.length[row][:, None]

    # ------------------------------------------------------------ the clean stream

    def _remember(self, lanes: Lanes) -> None:
        """Hold the clean keys and values that these lanes see; let go of those of windows that have no lane here."""
        needed: dict[int, int] = {}  # row -> clean columns; a first block sees none
        for row, start in zip(lanes.row.tolist(), lanes.start.tolist(), strict=True):
            if start:
                needed[row] = max(needed.get(row, 0), start)
        for row in [row for row in self._slot if row not in needed]:
            del self._slot[row], self._known[row]
        free = iter(sorted(set(range(len(needed) + len(self._slot))) - set(self._slot.values())))
        for row in needed:
            if row not in self._slot:
                self._slot[row], self._known[row] = next(free), 0
        lacking = sorted((row for row in needed if self._known[row] < needed[row]), key=lambda row: -needed[row])
        most = max(1, len(lanes) * self.block // max(needed.values(), default=1))
        for begin in range(0, len(lacking), most):
            part = lacking[begin : begin + most]
            self._extend(part, [needed[row] for row in part])

    def _extend(self, rows: list[int], until: list[int]) -> None:
        """Evaluate the clean columns of `rows` that are not known yet, up to `until`."""
        device, block = self.rows.ids.device, self.block
        row, end = torch.tensor(rows, device=device), torch.tensor(until, device=device)  # (P,)
        known = torch.tensor([self._known[n] for n in rows], device=device)  # (P,)
        slot = torch.tensor([self._slot[n] for n in rows], device=device)  # (P,)
        column = known[:, None] + torch.arange(int((end - known).max()), device=device)  # (P, Q)
        real = column < end[:, None]  # (P, Q)
        ids = self.rows.ids[row[:, None], column.clamp(max=self.rows.ids.shape[1] - 1)]  # (P, Q)

        before = int(known.max())
        past = torch.arange(before, device=device) < known[:, None]  # (P, K)
        own = (column // block)[:, :, None] >= (column // block)[:, None]  # (P, Q, Q)
        own &= real[:, None] | ~real[:, :, None]
        seen = torch.cat([past[:, None].expand(-1, column.shape[1], -1), own], dim=2)  # (P, Q, K + Q)
        features, new = self.denoiser.stream(ids, column, seen, self._past(slot, before))  # (P, Q, D)
        self.forwards += 1
        self.evaluated += len(rows)

        self._make_room(new, features)
        p, q = real.nonzero().unbind(1)  # (M,)
        for (keys, values), (k, v) in zip(self._held, new, strict=True):
            keys[slot[p], :, column[p, q]] = k[p, :, q]
            values[slot[p], :, column[p, q]] = v[p, :, q]
        if self.denoiser.shift:
            p, q = (real & (column % block == block - 1)).nonzero().unbind(1)  # (M,)
            self._edge[slot[p], column[p, q] // block] = features[p, q]
        self._known.update(zip(rows, until, strict=True))

    def _make_room(self, like: list[KeysValues], features: torch.Tensor) -> None:
        """Slots for every row in use, in the shapes that the network returns."""
        slots, length = max(self._slot.values()) + 1, self.rows.ids.shape[1]
        if self._held and len(self._held[0][0]) >= slots:
            return

        def grown(old: torch.Tensor | None, shape: tuple[int, ...], of: torch.Tensor) -> torch.Tensor:
            new = of.new_zeros(slots, *shape)
            if old is not None:
                new[: len(old)] = old
            return new

        held = self._held or [(None, None)] * len(like)
        self._held = [
            tuple(grown(old, (of.shape[1], length, of.shape[3]), of) for old, of in zip(olds, news, strict=True))
            for olds, news in zip(held, like, strict=True)
        ]
        if self.denoiser.shift:
            edges = -(-length // self.block)
            self._edge = grown(self._edge, (edges, features.shape[2]), features)

    def _past(self, slot: torch.Tensor, columns: int) -> list[KeysValues] | None:
        """Keys and values of the first clean `columns` of rows at `slot` (P,); of a row that has none, any."""
        if not columns:
            return None
        slot = slot.clamp(max=len(self._held[0][0]) - 1)
        return [(k[slot, :, :columns], v[slot, :, :columns]) for k, v in self._held]

    def _slots(self, lanes: Lanes) -> torch.Tensor:
        return torch.tensor([self._slot.get(row, 0) for row in lanes.row.tolist()], device=lanes.row.device)  # (R,)

    # ------------------------------------------------------------ the noisy stream

    def _evaluate(self, lanes: Lanes, ids: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        """The input of the LM head at every cell of the lanes' blocks, (R, B, D)."""
        block, device = self.block, ids.device
        lane, place = _side_by_side(lanes)  # (P, A), (R, 2)
        used = lane >= 0  # (P, A)
        lane = lane.clamp(min=0)
        count, width = lane.shape
        clean = lanes.start[lane] * used  # (P, A) clean columns that a lane sees
        ahead = int(clean.max())

        inside = torch.arange(block, device=device)  # (B,)
        column = (lanes.start[lane][:, :, None] + inside).flatten(1)  # (P, Q)
        exists = (real[lane] & used[:, :, None]).flatten(1)  # (P, Q)
        of_lane = torch.arange(width, device=device).repeat_interleave(block)  # (Q,)
        own = (of_lane[:, None] == of_lane) & (exists[:, None] | ~exists[:, :, None])  # (P, Q, Q)
        past = torch.arange(ahead, device=device) < clean[:, of_lane][:, :, None]  # (P, Q, K)
        seen = torch.cat([past, own], dim=2)  # (P, Q, K + Q)

        past = self._past(self._slots(lanes)[lane[:, 0]], ahead)
        features, _ = self.denoiser.stream(ids[lane].flatten(1), column, seen, past)  # (P, Q, D)
        self.forwards += 1
        self.evaluated += count
        return features.unflatten(1, (width, block))[place[:, 0], place[:, 1]]  # (R, B, D)


def _side_by_side(lanes: Lanes) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers of the lanes of each window (P, A), -1 where it has fewer; and where each lane went (R, 2)."""
    _, window, count = lanes.row.unique(return_inverse=True, return_counts=True)  # (R,), (P,)
    order = window.argsort(stable=True)  # (R,)
    first = count.cumsum(0) - count  # (P,)
    column = torch.empty_like(order)
    column[order] = torch.arange(len(order), device=order.device) - first[window[order]]  # (R,)
    number = order.new_full((len(count), int(count.max())), -1)  # (P, A)
    number[window, column] = torch.arange(len(order), device=order.device)
    return number, torch.stack([window, column], dim=1)
