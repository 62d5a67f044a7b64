"""The denoiser: a network as a function from lanes to predictions. Every quirk of a checkpoint stays behind it.

Shapes: N windows, L row length, R lanes, W block width, C hidden cells, U cells the head is run at, D features,
V tokens, Q queries, K keys, H heads, M columns asked for.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from lm_eval_duel.denoisers.predictions import Predictions
from lm_eval_duel.engine.lanes import Lanes, Rows
from lm_eval_duel.hashing import hashed

if TYPE_CHECKING:
    from lm_eval_duel.rules import Rule

KeysValues = tuple[torch.Tensor, torch.Tensor]  # of one layer, (N, H, K, D / H) each


class Denoiser(abc.ABC):
    """A network as a function from rows of ids to features, and from features to logits.

    A bidirectional or causal network has `features`; a block-causal one has `stream`.
    """

    family: str = "own"
    mask_id: int | None  # None for a causal network
    vocab_size: int  # columns of the logits, V
    max_length: int  # positions in a row
    device: torch.device
    attention: str = "bidirectional"  # or "block_causal", "causal"
    block: int | None = None  # the trained block
    published_block: int | None = None  # the block of the published results, for block=auto
    last_block: str = "fill"  # a short last block of a block-causal network is shown filled with [MASK], or "cut"
    shift: int = 0  # the logits for position i stand at i - shift, which must show a token
    bos: str = "auto"  # the framing that is right for the family; "auto": as the tokenizer frames a text
    appends_sep: bool = False  # a row ends with the tokenizer's closing token, where it has one
    splits_head: bool = True  # the head runs at hidden cells only; else at every position of a row
    supports_columns: bool = False  # takes `columns` and evaluates its last layer there only
    honours_padding: bool = False  # an attention mask keeps padding unseen
    relative_positions: bool = False  # a row of masks only has one distribution everywhere
    needs_visible: bool = False  # a row of masks only has no distribution at all
    special_tokens: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # given before and after a text, if known
    quantized: bool = False  # quantised: it rounds more than its dtype says

    @property
    @abc.abstractmethod
    def excluded(self) -> torch.Tensor:
        """Columns that are not tokens, [MASK] and padding of the embedding, (V,) bool."""

    def features(self, ids: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
        """The input of the LM head (R, L, D) for rows of ids (R, L); `real` (R, L) is False at padding.

        A network that `supports_columns` takes `columns` (R, M) too, and returns (R, M, D).
        """
        raise NotImplementedError(f"{type(self).__name__} is {self.attention}: it has no features of whole rows.")

    def stream(
        self, ids: torch.Tensor, positions: torch.Tensor, seen: torch.Tensor, past: list[KeysValues] | None
    ) -> tuple[torch.Tensor, list[KeysValues]]:
        """The input of the LM head (N, Q, D) for ids (N, Q) at `positions` (N, Q), and their keys and values.

        `seen` (N, Q, K + Q): which of the K keys of `past` and of the call's own each query attends to. A network that
        `supports_columns` takes `columns` (N, M) of the queries too, and returns (N, M, D); its keys and values are
        not read then.
        """
        raise NotImplementedError(f"{type(self).__name__} is {self.attention}: it has no blocks.")

    @abc.abstractmethod
    def head(self, features: torch.Tensor) -> torch.Tensor:
        """Logits (U, V) of feature rows (U, D)."""

    def ties(self, rule: Rule) -> str | None:
        """Why `rule` cannot tell the cells of this network apart, in a sentence; None: it can."""
        return None

    @property
    def layers(self) -> torch.nn.Module:
        """The part of the network that every call runs."""
        raise NotImplementedError(f"{type(self).__name__} does not say what its layers are.")

    def compile(self) -> None:
        """Compile the layers (torch.compile): the first calls take a minute, later ones less than they would."""
        self.layers.compile(dynamic=True)  # batches have many shapes

    def open(self, rows: Rows, generating: bool = False) -> View:
        """A view on one group of windows, to score or to generate."""
        if self.attention == "block_causal" or (self.attention == "causal" and self.shift):
            from lm_eval_duel.denoisers.block_causal import BlockCausalView

            return BlockCausalView(self, rows, generating)
        return View(self, rows)

    def describe(self) -> dict[str, object]:
        """What of this network defines the spec, for the fingerprint and the results."""
        return {"denoiser": type(self).__name__}


class Cells(NamedTuple):
    """The input of the LM head at hidden cells, equal ones once."""

    features: torch.Tensor  # (U, D)
    index: torch.Tensor  # (C,) the feature row of each hidden cell, in the order of hidden.nonzero()
    all_mask: torch.Tensor  # (R,) bool: the row shows nothing, so all its cells share one distribution

    @classmethod
    def of(
        cls, lanes: Lanes, all_mask: torch.Tensor, at: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> Cells:
        """The cells of lanes, `at(lane, n)` (C,) -> (C, D) the n-th hidden one; a all_mask lane has its first only."""
        lane = lanes.hidden.nonzero()[:, 0]  # (C,)
        nth = (lanes.hidden.cumsum(1) - 1)[lanes.hidden]  # (C,)
        unique = (nth == 0) | ~all_mask[lane]  # (C,)
        return cls(at(lane[unique], nth[unique]), unique.cumsum(0) - 1, all_mask)

    def spread(self, lanes: Lanes, evaluated: Lanes, number: torch.Tensor) -> Cells:
        """The cells of `lanes`, each of which is equal to the lane `number` (R,) of those evaluated."""
        before = evaluated.hidden.sum(1).cumsum(0) - evaluated.hidden.sum(1)  # (r,)
        nth = (lanes.hidden.cumsum(1) - 1)[lanes.hidden]  # (C,)
        of_lane = number[lanes.hidden.nonzero()[:, 0]]  # (C,)
        return Cells(self.features, self.index[before[of_lane] + nth], self.all_mask[number])


def distinct(*planes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that are equal in all integer or boolean planes (R, ...): the first of each kind (r,), and their kind (R,).

    By a 64-bit hash; rows of one hash are compared, and where two differ all rows count as different.
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


def hidden_cells(lanes: Lanes) -> torch.Tensor:
    """The hidden cells of each lane, then any others, up to the most that a lane has, (R, M)."""
    most = int(lanes.hidden.sum(1).max())
    return (~lanes.hidden).byte().sort(dim=1, stable=True).indices[:, :most]


def take(plane: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """`plane` (R or 1, L, D) at `columns` (R, M), (R, M, D)."""
    return plane.expand(len(columns), -1, -1).gather(1, columns[:, :, None].expand(-1, -1, plane.shape[2]))


class View:
    """A bidirectional (or causal) denoiser opened on a group of rows: lanes in, predictions out.

    A lane sees context, the target left of its block, the block as revealed so far, [MASK] up to the end of target
    and tail, and the suffix. Rows may hold the truth: nothing right of a lane's block start is read from them.
    """

    def __init__(self, denoiser: Denoiser, rows: Rows):
        self.denoiser, self.rows = denoiser, rows
        self.forwards = 0  # network calls
        self.evaluated = 0  # rows evaluated

    def cost(self, lanes: Lanes) -> torch.Tensor:
        """What each lane costs in network tokens, (R,)."""
        return self.rows.length[lanes.row]

    def commit(self, lanes: Lanes) -> None:
        """Write finished blocks into the rows, for the blocks to come (sampling)."""
        inside = torch.arange(lanes.hidden.shape[1], device=lanes.start.device) < lanes.width[:, None]  # (R, W)
        rows = lanes.row[:, None].expand_as(inside)
        self.rows.ids[rows[inside], lanes.columns[inside]] = lanes.tokens[inside]

    def __call__(self, lanes: Lanes) -> Predictions:
        features, index, all_mask = self.cells(lanes)
        return Predictions(lanes.hidden, all_mask, features, index, self.denoiser.head, self.denoiser.excluded)

    def cells(self, lanes: Lanes) -> Cells:
        """The input of the LM head at the hidden cells of `lanes`; lanes whose rows are equal are evaluated once."""
        ids, shown, real = self._input(lanes)  # (R, L) each
        given = self.rows.given[lanes.row].sum(1)  # (R,) with `origin` and `real` it says which cells are given
        first, number = distinct(ids, shown, real, given, lanes.hidden, lanes.start, lanes.origin)
        if len(first) == len(lanes):
            return self._evaluate(lanes, ids, shown, real)
        one = lanes.select(first)
        return self._evaluate(one, ids[first], shown[first], real[first]).spread(lanes, one, number)

    def _evaluate(self, lanes: Lanes, ids: torch.Tensor, shown: torch.Tensor, real: torch.Tensor) -> Cells:
        columns = lanes.start[:, None] + hidden_cells(lanes) - self.denoiser.shift  # (R, M)
        columns = columns.clamp(0, ids.shape[1] - 1)  # those of no hidden cell may lie outside
        told, padded = self._told(lanes, shown, real), None if real.all() else real
        if self.denoiser.supports_columns:
            features = self.denoiser.features(ids, padded, columns=columns, **told)  # (R, M, D)
        else:
            features = take(self.denoiser.features(ids, padded, **told), columns)
        self.forwards += 1
        self.evaluated += len(lanes)
        all_mask = ~shown.any(1) & self.denoiser.relative_positions  # (R,)
        return Cells.of(lanes, all_mask, lambda lane, n: features[lane, n])

    def _told(self, lanes: Lanes, shown: torch.Tensor, real: torch.Tensor) -> dict[str, torch.Tensor]:
        """What the network is told beside the rows, (R, ...) each: nothing."""
        return {}

    def _input(self, lanes: Lanes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Ids as the network gets them, which cells show a token, which are not padding; (R, L) each."""
        rows, row = self.rows, lanes.row
        length = int(rows.length[row].max())
        column = torch.arange(length, device=row.device)  # (L,)
        ids, given = rows.ids[row, :length], rows.given[row, :length]  # (R, L)
        real = column < rows.length[row][:, None]  # (R, L)
        before = (column >= lanes.origin[:, None]) & (column < lanes.start[:, None])  # (R, L) earlier blocks
        shown = given | before  # (R, L)

        revealed = (lanes.tokens >= 0) & ~lanes.hidden  # (R, W)
        lane, cell = revealed.nonzero().unbind(1)
        columns = lanes.start[lane] + cell
        shown[lane, columns] = True
        ids[lane, columns] = lanes.tokens[lane, cell]
        mask_id = self.denoiser.mask_id or 0  # a causal network never looks at a hidden cell
        return torch.where(shown, ids, mask_id), shown, real
