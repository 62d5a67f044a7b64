"""The common part of transformers' networks and of a checkpoint's own code: from config to denoiser.

    config.json, options -> family: what kind of network it is           set_attributes
    tokenizer            -> [MASK], and which columns are tokens         Pretrained.__init__
    files                -> the network, by the `load` of its module     Pretrained.take

Shapes: V tokens.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from lm_eval_duel import fingerprint
from lm_eval_duel.arguments import TRUTH
from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.denoisers.hf import auto_model, device_map, quantization
from lm_eval_duel.denoisers.hf.families import Family
from lm_eval_duel.denoisers.hub import find_mask_id, row_length
from lm_eval_duel.denoisers.load_options import LoadOptions
from lm_eval_duel.denoisers.vocabulary import excluded_columns, require_fit
from lm_eval_duel.errors import DuelError

log = logging.getLogger("lm_eval.duel_mdm")


def set_attributes(denoiser: Denoiser, family: Family, config: dict[str, Any], options: LoadOptions) -> None:
    """Set the attributes of a network, from its options, else its config, else its family."""
    denoiser.family, denoiser.last_block = family.name, options.last_block
    denoiser.attention = options.attention or family.attention
    shifts = [options.shift_logits, family.shift]
    if family.native:  # a decoder's config may say it; another network's entry of this name means nothing here
        shifts.insert(1, TRUTH("right_shift_logits", config.get("right_shift_logits")))
    denoiser.shift = int(next(shift for shift in shifts if shift is not None))
    if denoiser.attention == "causal":
        denoiser.shift = 1
    denoiser.seeds_blocks = denoiser.attention == "causal_prefix" and options.first_token != "block"
    denoiser.bos = options.bos or ("given" if denoiser.shift else family.bos)  # shifted: predicted from the one before
    denoiser.published_block = family.published_block if denoiser.attention == "bidirectional" else None
    denoiser.anchor = family.anchor if denoiser.attention == "block_causal" else "row"
    if denoiser.by_blocks:
        denoiser.block = trained_block(family, config, options)
        options.require_block(denoiser.block)


def trained_block(family: Family, config: dict[str, Any], options: LoadOptions) -> int:
    """The trained block, from the config, else from the options, else from the family."""
    if in_config := family.block_in(config):
        return in_config
    if isinstance(options.block, int):
        if family.block is not None and options.block not in (family.block, family.published_block):
            log.warning(
                "%s networks are trained on blocks of %d; using block=%d", family.name, family.block, options.block
            )
        return options.block
    if family.block is None:
        raise DuelError(f"{options.name} is block-causal and its config has no block; pass block=<the trained one>.")
    return family.published_block or family.block


def max_positions(family: Family, positions: int | None, config: dict[str, Any]) -> int | None:
    """The positions that a network of a family was trained on, at most the `positions` of its config.

    If queries are scaled from some position on (`Family.unscaled`), a last block that is filled up ends before it.
    """
    if family.unscaled:
        original = (config.get("rope_parameters") or config["rope_scaling"])["original_max_position_embeddings"]
        positions = min(positions, int(original) - (family.block_in(config) or family.block or 0))
    return min((length for length in (positions, family.max_length) if length), default=None)


class Pretrained(Denoiser):
    """A network of transformers, or of a checkpoint's own code.

    A subclass is made from what config and tokenizer say, before any weight is read; `fill` gives it its network.
    """

    model: Any
    kind: Any  # the class of its network, or an Auto class
    model_config: Any  # of transformers
    refuses = True  # after the self-tests; otherwise they only detect what numbers depend on

    def __init__(
        self,
        family: Family,
        config: dict[str, Any],
        options: LoadOptions,
        tokenizer: PreTrainedTokenizerBase | None,
        rows: int | None,
    ):
        """`tokenizer`: None for a plan, which needs no token. `rows`: of the embedding, if the config has them."""
        set_attributes(self, family, config, options)
        self.layout, self.config, self.options = family, config, options
        self.tokenizer_length = getattr(tokenizer, "model_max_length", None)
        self.path, self.mask_id = options.name, None
        if tokenizer is None:
            return
        if self.attention != "causal":
            self.mask_id = find_mask_id(options, config, tokenizer, family.mask_id, rows)
        self.tokens = set(tokenizer.get_vocab().values())
        if rows is not None:
            require_fit(self.tokens, self.mask_id, rows, self.path)

    def set_row_length(self, positions: int | None) -> None:
        """Set the length of rows: the one in the options, at most the `positions` that the network holds."""
        if self.by_blocks and positions is not None and positions < self.block:
            raise DuelError(f"{self.path} takes {positions} positions, so its trained block cannot be {self.block}.")
        self.max_length = row_length(self.path, self.options.max_length, positions)

    def build(self) -> Any:
        """The network without its weights, on torch's default device and in its default dtype."""
        return self.kind(self.model_config)

    def read(self) -> Any:
        """The network with its weights."""
        return auto_model.load_model(self.kind, self.model_config, self.config, self.options)

    def fill(self) -> Pretrained:
        """Read the weights, and test the network."""
        self.take(self.read().eval())
        return self

    def take(self, model: Any) -> None:
        """Give it its network, in eval mode."""
        self.model = model
        self.device, self.quantized = device_map.device_of(model), quantization.is_quantized(model)
        self.dtype = next(model.parameters()).dtype
        if self.quantized:  # some packages unpack weights only when the whole network is called
            with torch.no_grad():
                model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=self.device))

    def set_columns(self, columns: int) -> None:
        """Set the number of columns of the logits; the columns of the tokenizer's ids, except [MASK], are tokens."""
        self.vocab_size = columns
        self.excluded = excluded_columns(self.tokens, self.mask_id, columns, self.path, self.device)

    @property
    def coarse(self) -> bool:
        return self.dtype.itemsize < 4

    @property
    def layers(self) -> torch.nn.Module:
        return self.model

    def describe(self) -> dict[str, object]:
        native = type(self.model).__module__.startswith("transformers.")
        weights = f"{self.path} at commit {self.options.revision}"
        if os.path.isdir(self.path):
            weights = fingerprint.weights_of(self.path, not native)
        described = {
            "denoiser": type(self.model).__name__,
            "weights": weights,
            "dtype": str(self.dtype).removeprefix("torch."),
            "mask_token_id": self.mask_id,
            "vocabulary": f"{int((~self.excluded).sum())} of {self.vocab_size}",
            "relative_positions": self.relative_positions,
            **quantization.spec_entries(self.model),
        }
        if self.family != "masked-lm" or self.shift or self.attention != "bidirectional":
            described |= {"attention": self.attention, "shift": self.shift}
        if self.by_blocks:
            described["last_block"] = self.last_block
        if self.anchor == "target":
            described["context"] = "one block"
        if self.attention == "causal_prefix":
            described["first_token"] = "causal" if self.seeds_blocks else "block"
        if not native:  # also if code and weights come from different repositories
            described["code"] = fingerprint.code_of(type(self.model))
        if self.options.peft:
            described["peft"] = fingerprint.adapter_of(self.options.peft)
        return described
