"""A network as views call it: from rows of ids to features, from features to logits.

Shapes: N windows, L row length, R rows, U rows of features that the LM head runs on, D features, V tokens, H heads, Q
queries, K keys, M columns asked for.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import torch

from lm_eval_duel.core.hashing import hashed
from lm_eval_duel.core.lanes import Lanes, Rows
from lm_eval_duel.core.noise import CommitOnce, NoiseTraining, Place, masked_tokens
from lm_eval_duel.core.predictions import LogitFilter, Predictions

KeysValues = tuple[torch.Tensor, torch.Tensor]  # of one layer, (N, H, K, D / H) each


def joined(past: KeysValues | None, keys: torch.Tensor, values: torch.Tensor) -> KeysValues:
    """The keys and values that a layer attends to: those kept, if any, and the call's own."""
    if past is None:
        return keys, values
    return torch.cat([past[0], keys], 2), torch.cat([past[1], values], 2)


def take(plane: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """`plane` (R or 1, L, D) at `columns` (R, M), (R, M, D)."""
    return plane.expand(len(columns), -1, -1).gather(1, columns[:, :, None].expand(-1, -1, plane.shape[2]))


BY_BLOCKS = ("block_causal", "causal_prefix")  # attention of networks with a trained block


class Network(abc.ABC):
    """A network as a function from rows of ids to features, and from features to logits.

    A bidirectional or causal network implements `features`, a network that works `by_blocks` implements `stream`, and
    both implement `head`. The attributes below describe the checkpoint; those without a default are required.
    """

    family: str = "own"
    mask_id: int | None  # None for a causal network
    vocab_size: int  # columns of the logits, V
    excluded: torch.Tensor  # columns that are not tokens: [MASK] and padding of the embedding, (V,) bool
    max_length: int  # positions in a row
    device: torch.device
    attention: str = "bidirectional"  # or "block_causal", "causal_prefix", "causal"
    block: int | None = None  # the trained block
    anchor: str = "row"  # where a block-causal network counts blocks from; "target": the context is one block
    published_block: int | None = None  # the block of the published results, for block=auto
    last_block: str = "fill"  # a short last block of a block-causal network is filled up with [MASK], or "cut"
    shift: int = 0  # the logits for position i are read at position i - shift, which must be visible
    seeds_blocks: bool = False  # causal_prefix: the clean stream predicts a block's first token, revealed alone
    bos: str = "auto"  # the special tokens that this family expects; "auto": those that the tokenizer adds
    appends_sep: bool = False  # a row ends with the tokenizer's closing token, if it has one
    splits_head: bool = True  # the head can run at masked positions only; otherwise it runs at every position of a row
    honours_padding: bool = False  # under an attention mask, padding changes nothing
    relative_positions: bool = False  # a row of one token (all masks) has the same distribution at every position
    needs_visible: bool = False  # a row of masks has no distribution: the network divides by the visible tokens
    special_tokens: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # before and after a text, if expected
    cache: str | None = None  # of a cached sampler: "prefix" or "dual"
    excluded_ids: tuple[int, ...] = ()  # tokens that are left out of the vocabulary
    filters: tuple[LogitFilter, ...] = ()  # functions of clean logits: temperature, top-k, ...
    image_ids: frozenset[int] = frozenset()  # tokens that stand for images, which no window may hold
    quantized: bool = False  # its weights are coarser than its dtype
    noise_training: NoiseTraining | None = None  # if its noise is random tokens; None: [MASK] alone
    commit_once: CommitOnce = CommitOnce()  # how it predicts at masked positions, if its noise is random tokens
    reads_causally: bool = False  # its noise is random tokens, and with attention=causal it is autoregressive
    separate_tokens: int = 0  # in the largest call whose rows a self-test found independent; 0: not tested
    unread_entries: tuple[str, ...] = ()  # of config.json, which nothing here reads
    hides_given: bool = False  # it also evaluates rows in which everything given is masked (guidance)
    fixed_weights: bool = True  # the weights never change; False: read the spec from `describe` each time

    schedule = None  # t -> noise level, if rows may be opened with a level for each lane (SEDD); wrappers have none

    def resemble(self, other: Network) -> None:
        """Copy every declared attribute of `other`, for a denoiser that wraps it."""
        for name in Network.__annotations__:
            if hasattr(other, name):
                setattr(self, name, getattr(other, name))

    @property
    def by_blocks(self) -> bool:
        """True if a position sees no later block, so that clean positions are evaluated once."""
        return self.attention in BY_BLOCKS

    @property
    def coarse(self) -> bool:
        """True if it runs in a dtype below float32."""
        return False

    def features(self, ids: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
        """The input of the LM head (R, L, D) for rows of ids (R, L); `real` (R, L) is False at padding."""
        raise NotImplementedError(f"{type(self).__name__} is {self.attention} and does not evaluate whole rows.")

    def features_at(
        self, columns: torch.Tensor, ids: torch.Tensor, real: torch.Tensor | None, **extra: torch.Tensor
    ) -> torch.Tensor:
        """`features` at `columns` (R, M), (R, M, D); `extra`: more inputs, which the network's own view passes."""
        return take(self.features(ids, real, **extra), columns)

    def stream(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        seen: torch.Tensor | None,
        past: list[KeysValues] | None,
    ) -> tuple[torch.Tensor, list[KeysValues]]:
        """The input of the LM head (N, Q, D) for ids (N, Q) at `positions` (N, Q), and their keys and values.

        `seen` (N, Q, K + Q): which of the K keys of `past` and of the call's own keys each query attends to;
        None: all.
        """
        raise NotImplementedError(f"{type(self).__name__} is {self.attention} and does not evaluate blocks.")

    def stream_at(
        self,
        columns: torch.Tensor,
        ids: torch.Tensor,
        positions: torch.Tensor,
        seen: torch.Tensor | None,
        past: list[KeysValues] | None,
        keys: bool = False,
    ) -> tuple[torch.Tensor, list[KeysValues]]:
        """`stream` at the queries `columns` (N, M), (N, M, D); the keys and values are used only with `keys`."""
        features, own = self.stream(ids, positions, seen, past)
        return take(features, columns), own

    @abc.abstractmethod
    def head(self, features: torch.Tensor) -> torch.Tensor:
        """Logits (U, V) of feature rows (U, D)."""

    def noise_inputs(self, t: torch.Tensor) -> dict[str, torch.Tensor]:
        """Inputs of a network with `noise_training` besides the rows, at times t (R,), (R, ...) each."""
        return {}

    def evaluating(self) -> contextlib.AbstractContextManager[None]:
        """The modes in which calls run, and in which gradient checkpointing repeats them in the backward pass."""
        return contextlib.nullcontext()

    @property
    def layers(self) -> torch.nn.Module:
        """The module that every call runs."""
        raise NotImplementedError(f"{type(self).__name__} does not define `layers`.")

    def compile(self) -> None:
        """Compile the layers (torch.compile): the first calls take a minute, later ones are faster."""
        self.layers.compile(dynamic=True)  # batches have many shapes

    def describe(self) -> dict[str, object]:
        """The part of the spec that this network defines, for the fingerprint and the results."""
        return {"denoiser": type(self).__name__}


def without_autocast(network: Network) -> torch.autocast:
    """A context in which an autocast around the call does not count: numbers are of the dtype in the spec."""
    return torch.autocast(network.device.type, enabled=False)


# ---------------------------------------------------------------- view
# A view: a denoiser opened on a group of windows, as a function from lanes to predictions.
#
# Shapes: N windows, L row length, R lanes, W block width, C masked positions, U rows of features that the LM head runs
# on, D features, M columns asked for.


class Positions(NamedTuple):
    """The input of the LM head at masked positions. Positions known to be equal share a row of features."""

    features: torch.Tensor  # (U, D)
    row: torch.Tensor  # (C,) the feature row of each masked position, in the order of masked.nonzero()
    all_mask: torch.Tensor  # (R,) bool: one token is everywhere, [MASK], so all positions share one distribution
    carried: tuple[torch.Tensor, ...] = ()  # (R, W, ...) each, which the network reads at the next step

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
        carried = tuple(plane[number] for plane in self.carried)
        return Positions(self.features, self.row[before[of_lane] + nth], self.all_mask[number], carried)


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

    carries: int = 0  # values of a position that a lane carries to its next step

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
        positions, step = self.at_steps(lanes, self.positions(lanes))
        features, row, all_mask, carried = positions
        excluded, columns = self._excluded
        return Predictions(
            lanes.masked,
            all_mask,
            features,
            row,
            self.denoiser.head,
            excluded,
            targets,
            columns=columns,
            masked_at=lanes.masked_at,
            carried=carried,
            filters=self.denoiser.filters,
            step=step,
        )

    def at_steps(self, lanes: Lanes, positions: Positions) -> tuple[Positions, torch.Tensor | None]:
        """Positions, and the step of each row of features (U,) if a filter reads it: equal rows may be at others."""
        if not any(each.reads_step for each in self.denoiser.filters):
            return positions, None
        step = lanes.step[lanes.masked_at[0]]  # (C,)
        first, row = distinct(positions.row, step)  # (U,), (C,)
        return positions._replace(features=positions.features[positions.row[first]], row=row), step[first]

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
        one_token = ((ids == ids[:, :1]) | ~real).all(1)  # (R,) where masks are shown, nothing else is
        all_mask = one_token & self.denoiser.relative_positions  # (R,)
        return Positions.from_lanes(lanes, all_mask, lambda lane, n: features[lane, n])

    def _padding(self, real: torch.Tensor) -> torch.Tensor | None:
        """`real` (R, L) for the network: None if no row has padding."""
        return None if self._unpadded or real.all() else real

    def _extra_inputs(self, lanes: Lanes, shown: torch.Tensor, real: torch.Tensor) -> dict[str, torch.Tensor]:
        """Inputs of the network besides the rows, (R, ...) each."""
        if self.denoiser.noise_training is None:
            return {}
        return self.denoiser.noise_inputs(self.masked_share(lanes, shown, real))

    def masked_share(self, lanes: Lanes, shown: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        """The share of each row's positions that show no token of the text, float64 (R,)."""
        return (real & ~shown).sum(1).double() / self.rows.length[lanes.row]

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
        return torch.where(shown, ids, self._masked_ids(lanes, shown, real)), shown, real

    def _masked_ids(self, lanes: Lanes, shown: torch.Tensor, real: torch.Tensor) -> torch.Tensor | int:
        """[MASK], or the noise (R, L) that positions show as long as they show no token of the text."""
        mask_id, trained = self.denoiser.mask_id, self.denoiser.noise_training
        if trained is None:
            return mask_id or 0  # a causal network never attends to a masked position
        columns = torch.arange(shown.shape[1], device=shown.device)  # (L,)
        share = self.masked_share(lanes, shown, real)  # (R,)
        return masked_tokens(trained.noise, self._tokens, mask_id, share, self.place(lanes, columns))

    def place(self, lanes: Lanes, columns: torch.Tensor) -> Place:
        """The keys of the noise of masked positions at `columns`, (L,) or (R, L)."""
        return Place(
            seed=self.rows.noise_seed[lanes.row][:, None],
            block=(lanes.start - lanes.origin)[:, None],
            step=lanes.step[:, None],
            position=columns - lanes.origin[:, None],
        )

    @cached_property
    def _tokens(self) -> torch.Tensor:
        """The ids that are tokens of the network, (K,)."""
        return (~self.denoiser.excluded).nonzero()[:, 0]


# ---------------------------------------------------------------- noise_view
# The view of a network that sees noisy tokens in place of [MASK].
#
# Shapes: N windows, L row length, R lanes, W span width, D features, V tokens.


class NoiseView(View):
    """A network opened on a group of rows: noisy tokens in, a distribution at every position of a span out.

    A lane sees the context, its span as given, and the suffix. A network with canvases (`block`) sees the targets
    before its span, and nothing after it.
    """

    def predictions(
        self, lanes: Lanes, noisy: torch.Tensor, t: torch.Tensor, before: torch.Tensor | None = None
    ) -> Predictions:
        """The predictions at all positions of `lanes`; the arguments are those of `features`."""
        features = self.features(lanes, noisy, t, before)[lanes.masked_at]  # (C, D)
        every = torch.arange(len(features), device=features.device)  # (C,)
        no_ties = torch.zeros_like(lanes.row, dtype=torch.bool)  # (R,)
        return Predictions(lanes.masked, no_ties, features, every, self.denoiser.head, self.denoiser.excluded)

    def features(
        self, lanes: Lanes, noisy: torch.Tensor, t: torch.Tensor, before: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The input of the LM head (R, W, D) at all columns of `lanes`, which show `noisy` (R, W) at times t (R,).

        `before`: the logits (R, W, V) of the pass before, for a network with self-conditioning.
        """
        rows, row, columns = self.rows, lanes.row, lanes.columns
        end = rows.length[row] if self.denoiser.block is None else lanes.start + lanes.width  # (R,)
        length = int(end.max())
        real = torch.arange(length, device=row.device) < end[:, None]  # (R, L)
        at = torch.where(lanes.masked, columns, length)  # (R, W) other positions go into an extra column
        ids = rows.ids.new_zeros(len(row), length + 1)
        ids[:, :length] = rows.ids[row, :length]
        ids = ids.scatter_(1, at, noisy)[:, :length]  # (R, L)
        columns = columns.clamp(max=length - 1)
        extra, padded = self.denoiser.noise_inputs(t), None if real.all() else real
        self.forwards += 1
        self.evaluated += len(row)
        return self.denoiser.features_at(columns, ids, padded, **extra)
