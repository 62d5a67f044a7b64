"""The denoiser: a network as a function from lanes to predictions. Everything particular to a checkpoint stays here.

Shapes: N windows, L row length, R rows, U rows of features that the LM head runs on, D features, V tokens, Q queries,
K keys, M columns asked for.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING

import torch

from lm_eval_duel.core.block_causal import BlockCausalView
from lm_eval_duel.core.lanes import Rows
from lm_eval_duel.core.view import KeysValues, Past, View

if TYPE_CHECKING:
    from lm_eval_duel.core.decision import UnmaskingRule

BY_BLOCKS = ("block_causal", "causal_prefix")  # attention of networks with a trained block


class Denoiser(abc.ABC):
    """A network as a function from rows of ids to features, and from features to logits.

    A bidirectional or causal network implements `features`; one that works `by_blocks` implements `stream`.
    """

    family: str = "own"
    mask_id: int | None  # None for a causal network
    vocab_size: int  # columns of the logits, V
    max_length: int  # positions in a row
    device: torch.device
    attention: str = "bidirectional"  # or "block_causal", "causal_prefix", "causal"
    block: int | None = None  # the trained block
    anchor: str = "row"  # where a block-causal network counts blocks from; "target": the context is a block of its own
    published_block: int | None = None  # the block of the published results, for block=auto
    last_block: str = "fill"  # a short last block of a block-causal network is filled up with [MASK], or "cut"
    shift: int = 0  # the logits for position i are read at position i - shift, which must be visible
    seeds_blocks: bool = False  # causal_prefix: the clean stream predicts a block's first token, revealed alone
    bos: str = "auto"  # the special tokens that this family expects; "auto": those that the tokenizer adds
    appends_sep: bool = False  # a row ends with the tokenizer's closing token, if it has one
    splits_head: bool = True  # the head can run at masked positions only; otherwise it runs at every position of a row
    supports_columns: bool = False  # accepts `columns` and evaluates its last layer at these only
    honours_padding: bool = False  # under an attention mask, padding changes nothing
    relative_positions: bool = False  # a row of masks has the same distribution at every position
    needs_visible: bool = False  # a row of masks has no distribution: the network divides by the visible tokens
    special_tokens: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # before and after a text, if expected
    cache: str | None = None  # of a cached sampler: "prefix" or "dual"
    excluded_ids: tuple[int, ...] = ()  # tokens that are left out of the vocabulary
    quantized: bool = False  # its weights are coarser than its dtype
    fixed_weights: bool = True  # they do not change; otherwise the spec is read again from `describe` each time

    @property
    @abc.abstractmethod
    def excluded(self) -> torch.Tensor:
        """Columns that are not tokens: [MASK] and padding of the embedding, (V,) bool."""

    @property
    def by_blocks(self) -> bool:
        """Whether a position sees no later block, so that clean positions are evaluated once."""
        return self.attention in BY_BLOCKS

    def features(self, ids: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
        """The input of the LM head (R, L, D) for rows of ids (R, L); `real` (R, L) is False at padding.

        A network that `supports_columns` also accepts `columns` (R, M) and then returns (R, M, D).
        """
        raise NotImplementedError(f"{type(self).__name__} is {self.attention} and does not evaluate whole rows.")

    def stream(
        self, ids: torch.Tensor, positions: torch.Tensor, seen: torch.Tensor | None, past: list[Past] | None
    ) -> tuple[torch.Tensor, list[KeysValues]]:
        """The input of the LM head (N, Q, D) for ids (N, Q) at `positions` (N, Q), and their keys and values.

        `seen` (N, Q, K + Q): which of the K keys of `past` and of the call's own keys each query attends to;
        None: all. A network that `supports_columns` also accepts `columns` (N, M) of the queries and then returns
        (N, M, D); the keys and values of such a call are not used.
        """
        raise NotImplementedError(f"{type(self).__name__} is {self.attention} and does not evaluate blocks.")

    @abc.abstractmethod
    def head(self, features: torch.Tensor) -> torch.Tensor:
        """Logits (U, V) of feature rows (U, D)."""

    def ties(self, rule: UnmaskingRule) -> str | None:
        """Why `rule` cannot tell the positions of this network apart, as a sentence; None if it can."""
        return None

    @property
    def layers(self) -> torch.nn.Module:
        """The module that every call runs."""
        raise NotImplementedError(f"{type(self).__name__} does not define `layers`.")

    def compile(self) -> None:
        """Compile the layers (torch.compile): the first calls take a minute, later ones are faster."""
        self.layers.compile(dynamic=True)  # batches have many shapes

    def open(self, rows: Rows, generating: bool = False) -> View:
        """A view of one group of windows, for scoring or for generating."""
        if self.by_blocks or (self.attention == "causal" and self.shift):
            return BlockCausalView(self, rows, generating)
        return View(self, rows)

    def describe(self) -> dict[str, object]:
        """The part of the spec that this network defines, for the fingerprint and the results."""
        return {"denoiser": type(self).__name__}
