"""A network as views call it: from rows of ids to features, from features to logits.

Shapes: N windows, L row length, R rows, U rows of features that the LM head runs on, D features, V tokens, H heads, Q
queries, K keys, M columns asked for, W block width, S values that are compared.
"""

from __future__ import annotations

import contextlib
from functools import cached_property
from typing import Protocol

import torch

from lm_eval_duel.core.lanes import Lanes, Rows
from lm_eval_duel.core.noise import CommitOnce, NoiseTraining

KeysValues = tuple[torch.Tensor, torch.Tensor]  # of one layer, (N, H, K, D / H) each

BY_BLOCKS = ("block_causal", "causal_prefix")  # attention of networks with a trained block


class LogitFilter(Protocol):
    """A function of clean logits: [MASK] and padding columns are -inf."""

    reads_step: bool  # it depends on the step that a lane is at
    # it gives some tokens probability 0, so that float noise may move one across the border
    truncates: bool

    def __call__(self, logits: torch.Tensor, step: torch.Tensor | None) -> torch.Tensor:
        """Logits (U, V) of logits (U, V) at steps (U,); `step` is None if no filter reads it."""

    def describe(self) -> dict[str, object]:
        """The entry of the spec."""


class Network:
    """A network as a function from rows of ids to features, and from features to logits.

    Four members have no default: `vocab_size`, `mask_id`, `max_length`, and `features` (or `stream`, if the network
    works by blocks). `head` is needed as well unless `features` returns logits. All others describe networks that
    differ from the simplest one: bidirectional, trained with masks alone, with special tokens as the tokenizer has
    them.
    """

    # ------------------------------------------------------------ required

    vocab_size: int  # columns of the logits, V
    mask_id: int | None  # None for a causal network
    max_length: int  # positions in a row

    # ------------------------------------------------------------ the network

    family: str = "own"
    device: torch.device = torch.device("cpu")
    quantized: bool = False  # its weights are coarser than its dtype
    # False: the weights may change, so the spec is read from `describe` each time
    fixed_weights: bool = True
    cache: str | None = None  # of a cached sampler: "prefix" or "dual"
    filters: tuple[LogitFilter, ...] = ()  # temperature, top-k, ...

    # ------------------------------------------------------------ attention and blocks

    attention: str = "bidirectional"  # or "block_causal", "causal_prefix", "causal"
    # the logits for position i are read at position i - shift, which must be visible
    shift: int = 0
    block: int | None = None  # the trained block
    published_block: int | None = None  # the block of the published results, for block=auto
    # where a block-causal network counts blocks from; "target": the context is one block
    anchor: str = "row"
    # a short last block of a block-causal network: "fill" it up with [MASK], or "cut" it
    last_block: str = "fill"
    # of causal_prefix: the clean stream predicts a block's first token, which is revealed alone
    seeds_blocks: bool = False

    # ------------------------------------------------------------ the text

    # the special tokens that this family expects; "auto": those that the tokenizer adds
    bos: str = "auto"
    # before and after a text; None: none are expected
    special_tokens: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    appends_sep: bool = False  # a row ends with the tokenizer's closing token, if it has one
    excluded_ids: tuple[int, ...] = ()  # tokens that are left out of the vocabulary
    image_ids: frozenset[int] = frozenset()  # stand for images; no window may hold them

    # ------------------------------------------------------------ noise that is not masks

    noise_training: NoiseTraining | None = None  # None: the noise is [MASK] alone
    commit_once: CommitOnce = CommitOnce()  # how it predicts where the noise is random tokens
    # its noise is random tokens, and with attention=causal it is autoregressive
    reads_causally: bool = False
    # t -> noise level, if rows may be opened with a level for each lane (SEDD). Without an annotation, so that
    # `resemble` does not copy it: wrappers have none.
    schedule = None

    # ------------------------------------------------------------ what self-tests and loading find out

    honours_padding: bool = False  # under an attention mask, padding changes nothing
    # a row of one token (all masks) has the same distribution at every position
    relative_positions: bool = False
    # a row of nothing but masks has no distribution: the network divides by the number of visible tokens
    needs_visible: bool = False
    # it also evaluates rows in which everything given is masked (guidance)
    hides_given: bool = False
    # network tokens of the largest call in which a self-test found the rows independent; 0: not tested
    separate_tokens: int = 0
    unread_entries: tuple[str, ...] = ()  # of config.json, which nothing here reads

    # ------------------------------------------------------------ defaults that follow from others

    @cached_property
    def excluded(self) -> torch.Tensor:
        """The columns that are not tokens, (V,) bool: [MASK], and padding of the embedding. By default [MASK] alone."""
        excluded = torch.zeros(self.vocab_size, dtype=torch.bool, device=self.device)
        if self.mask_id is not None:
            excluded[self.mask_id] = True
        return excluded

    @property
    def token_count(self) -> int:
        """The number of columns that are tokens."""
        return int((~self.excluded).sum())

    @cached_property
    def splits_head(self) -> bool:
        """True if the head can run at masked positions only; without one, there are logits at every position."""
        return type(self).head is not Network.head

    @property
    def by_blocks(self) -> bool:
        """True if a position sees no later block, so that clean positions are evaluated once."""
        return self.attention in BY_BLOCKS

    @property
    def coarse(self) -> bool:
        """True if it runs in a dtype below float32."""
        return False

    def resemble(self, other: Network) -> None:
        """Copy every attribute above from `other`, for a network that wraps it."""
        for name in (*Network.__annotations__, "excluded", "splits_head"):
            if hasattr(other, name):
                setattr(self, name, getattr(other, name))

    # ------------------------------------------------------------ evaluation

    def features(self, ids: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
        """The input of the LM head (R, L, D) for rows of ids (R, L); `real` (R, L) is False at padding."""
        raise NotImplementedError(f"{type(self).__name__} is {self.attention} and does not evaluate whole rows.")

    def features_at(
        self,
        columns: torch.Tensor,
        ids: torch.Tensor,
        real: torch.Tensor | None,
        **extra: torch.Tensor,
    ) -> torch.Tensor:
        """`features` (R, M, D) at `columns` (R, M); `extra`: more inputs, which the network's own view passes."""
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
        """`stream` (N, M, D) at the queries `columns` (N, M); the keys and values are used only with `keys`."""
        features, new = self.stream(ids, positions, seen, past)
        return take(features, columns), new

    def head(self, features: torch.Tensor) -> torch.Tensor:
        """Logits (U, V) of feature rows (U, D). By default the features are the logits."""
        return features

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


class Evaluated(Protocol):
    """The answer of a view for some lanes, as far as the loop reads it: `Predictions`, or terms of a bound."""

    @property
    def carried(self) -> tuple[torch.Tensor, ...]:
        """Planes that the network reads at the next step, (R, W, ...) each."""

    def compared(self, lane: int, tokens: torch.Tensor) -> torch.Tensor:
        """The values of one lane, with `tokens` (1, W), that must be the same when it is evaluated alone, (S, W)."""


class Evaluator:
    """A network opened on a group of rows, as the loop calls it: lanes in, what was evaluated of them out."""

    carries: int = 0  # values of a position that a lane carries to its next step

    def __init__(self, denoiser: Network, rows: Rows):
        self.denoiser = denoiser
        self.rows = rows
        self.forwards = 0  # network calls
        self.evaluated = 0  # rows evaluated

    def cost(self, lanes: Lanes) -> torch.Tensor:
        """The cost of each lane in network tokens, (R,)."""
        return self.rows.length[lanes.row]

    def commit(self, lanes: Lanes) -> None:
        """Write finished blocks into the rows, so that later blocks see them (sampling)."""
        width = torch.arange(lanes.masked.shape[1], device=lanes.start.device)  # (W,)
        inside = width < lanes.width[:, None]  # (R, W)
        rows = lanes.row[:, None].expand_as(inside)  # (R, W)
        self.rows.ids[rows[inside], lanes.columns[inside]] = lanes.tokens[inside]

    def __call__(self, lanes: Lanes, targets: torch.Tensor | None = None) -> Evaluated:
        """Evaluate lanes; `targets` (R, W): the tokens that will be asked about."""
        raise NotImplementedError


def without_autocast(network: Network) -> torch.autocast:
    """A context that switches off an autocast around the call: numbers are of the dtype in the spec."""
    return torch.autocast(network.device.type, enabled=False)


def joined(past: KeysValues | None, keys: torch.Tensor, values: torch.Tensor) -> KeysValues:
    """The keys and values that a layer attends to: those kept, if any, and the call's own."""
    if past is None:
        return keys, values
    return torch.cat([past[0], keys], 2), torch.cat([past[1], values], 2)


def take(plane: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """The columns (R, M) of `plane` (R or 1, L, D), (R, M, D)."""
    features = plane.shape[2]
    rows = plane.expand(len(columns), -1, -1)  # (R, L, D)
    index = columns[:, :, None].expand(-1, -1, features)  # (R, M, D)
    return rows.gather(1, index)
