"""Decoders that became diffusion models (LLaDA, Dream, SDAR, ...) in transformers' own classes, with an explicit mask.

Their networks are those of Llama, Qwen2, Qwen3, Qwen3-MoE, GLM-4-MoE and GPT-2, with another attention pattern. The
weights are loaded into those classes (decoder_checkpoint.py), and every call passes a 4-D additive mask. So none of a
checkpoint's code is run, and the same network can be bidirectional, block-causal or causal.

Shapes: R rows, L row length, N rows of a call, Q queries, K keys, D features, V tokens.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from lm_eval_duel import fingerprint
from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.core.network import KeysValues, Past, joined
from lm_eval_duel.denoisers import config_entries, self_tests
from lm_eval_duel.denoisers.hf import device_map, quantization
from lm_eval_duel.denoisers.hf.families import Family
from lm_eval_duel.denoisers.hub import row_length
from lm_eval_duel.denoisers.load_options import LoadOptions
from lm_eval_duel.denoisers.vocabulary import excluded_columns
from lm_eval_duel.errors import DuelError

log = logging.getLogger("lm_eval.duel_mdm")


class Decoder(Denoiser):
    """A decoder of transformers under the attention mask of its diffusion family."""

    maskless = False  # whole rows are evaluated without a mask

    def __init__(
        self,
        model: Any,
        family: Family,
        config: dict[str, Any],
        path: str,
        options: LoadOptions,
        mask_id: int,
        tokenizer: PreTrainedTokenizerBase,
    ):
        self.model, self.family, self.path = model, family.name, path
        self.device, self.quantized = device_map.device_of(model), quantization.is_quantized(model)
        self.dtype = model.get_input_embeddings().weight.dtype
        self.attention = options.attention or family.attention
        shifted = config_entries.switch(config, "right_shift_logits", bool(family.shift))
        self.shift = int(shifted if options.shift_logits is None else options.shift_logits)
        if self.attention == "causal":
            self.shift = 1
        self.seeds_blocks = self.attention == "causal_prefix" and options.first_token != "block"
        self.bos = options.bos or ("given" if self.shift else family.bos)  # shifted: predicted from the token before
        self.last_block = options.last_block
        self.adapter = options.peft
        self.mask_id = None if self.attention == "causal" else mask_id
        self.published_block = family.published_block if self.attention == "bidirectional" else None
        self.block = trained_block(family, config, options) if self.by_blocks else None
        self.anchor = family.anchor if self.attention == "block_causal" else "row"
        positions = max_positions(family, model.config.max_position_embeddings, config)
        self.max_length = row_length(path, options.max_length, positions)
        self.vocab_size = model.config.vocab_size
        self._excluded = excluded_columns(
            set(tokenizer.get_vocab().values()), mask_id, self.vocab_size, path, self.device
        )
        if self.attention == "bidirectional":
            self.maskless = self._is_bidirectional_without_mask()

    @property
    def excluded(self) -> torch.Tensor:
        return self._excluded

    def _is_bidirectional_without_mask(self) -> bool:
        """Whether layers with is_causal=False see whole rows without a mask: flash kernels do not accept one."""
        layers = [module for module in self.model.modules() if hasattr(module, "is_causal")]
        for layer in layers:
            layer.is_causal = False  # read only in calls without a mask
        rows = self_tests.random_rows(self)  # (2, L)
        with torch.inference_mode():
            masked = self.features(rows, None)  # (2, L, D)
            self.maskless = True
            unmasked = self.features(rows, None)
        self.maskless = False
        return bool(layers) and self_tests.relative_difference(masked, unmasked) <= self_tests.tolerance(self, unmasked)

    @property
    def layers(self) -> torch.nn.Module:
        return self.model.base_model

    def compile(self) -> None:
        self.maskless = False  # when traced, transformers creates a causal mask if none is given
        super().compile()

    def features(self, ids: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
        length = ids.shape[1]
        position = torch.arange(length, device=ids.device)[None]  # (1, L)
        if real is None and self.maskless:
            return self._hidden(ids, position, None, None)
        seen = torch.ones(1, length, length, dtype=torch.bool, device=ids.device)  # (1, L, L)
        seen = seen.tril() if self.attention == "causal" else seen
        if real is not None:
            seen = seen & real[:, None]  # (R, L, L)
            seen |= torch.eye(length, dtype=torch.bool, device=ids.device)  # padding sees itself: no empty softmax
        return self._hidden(ids, position, seen, None)

    def stream(
        self, ids: torch.Tensor, positions: torch.Tensor, seen: torch.Tensor | None, past: list[Past] | None
    ) -> tuple[torch.Tensor, list[KeysValues]]:
        clean = CleanKeys(past)
        return self._hidden(ids, positions, seen, clean), clean.own

    def head(self, features: torch.Tensor) -> torch.Tensor:
        return self.model.lm_head(features).to(self.device)  # (U, V); accelerate moves the input to the head's device

    def _hidden(
        self, ids: torch.Tensor, positions: torch.Tensor, seen: torch.Tensor | None, clean: CleanKeys | None
    ) -> torch.Tensor:
        """The input of the LM head (N, Q, D); `seen` (N or 1, Q, K + Q), None: all of it."""
        mask = None
        if seen is not None:
            lowest = torch.finfo(self.dtype).min  # with -inf, a query that sees nothing would give NaN
            mask = torch.zeros(seen.shape, dtype=self.dtype, device=seen.device).masked_fill(~seen, lowest)[:, None]
        out = self.model.base_model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=clean,
            use_cache=False,
        )
        return out.last_hidden_state.to(self.device)

    def describe(self) -> dict[str, object]:
        described = {
            "denoiser": f"{self.family} as {type(self.model).__name__}",
            "weights": fingerprint.weights_of(self.path),
            "dtype": str(self.dtype).removeprefix("torch."),
            "mask_token_id": self.mask_id,
            "vocabulary": f"{int((~self._excluded).sum())} of {self.vocab_size}",
            "attention": self.attention,
            "shift": self.shift,
            "relative_positions": self.relative_positions,
            **quantization.spec_entries(self.model),
        }
        if self.by_blocks:
            described["last_block"] = self.last_block
        if self.anchor == "target":
            described["context"] = "one block"
        if self.attention == "causal_prefix":
            described["first_token"] = "causal" if self.seeds_blocks else "block"
        if self.adapter:
            described["peft"] = fingerprint.adapter_of(self.adapter)
        return described


class CleanKeys:
    """Acts as a transformers cache: puts the keys and values of clean positions before a call's own, and collects
    these.
    """

    def __init__(self, past: list[Past] | None):
        self.past = past
        self.own: list[KeysValues] = []

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *ignored: Any, **also_ignored: Any
    ) -> KeysValues:
        """Keys and values (N, H, K + Q, D / H) that the layer attends to."""
        self.own.append((keys, values))
        return joined(None if self.past is None else self.past[layer], keys, values)

    def get_seq_length(self, *ignored: Any) -> int:
        """0: every call passes its positions."""
        return 0


def max_positions(family: Family, positions: int, config: dict[str, Any]) -> int:
    """The positions that a network of a family was trained on, at most `positions`, those of its config.

    If queries are scaled from some position on (`Family.unscaled`), a last block that is filled up ends before it.
    """
    if family.unscaled:
        original = (config.get("rope_parameters") or config["rope_scaling"])["original_max_position_embeddings"]
        positions = min(positions, int(original) - (_block_in_config(family, config, "") or family.block or 0))
    return min(positions, family.max_length or positions)


def trained_block(family: Family | None, config: dict[str, Any], options: LoadOptions) -> int:
    """The trained block, from the config, else from the options, else from the family.

    Raises DuelError if none has one, or if it is longer than a row.
    """
    block = _block_in_config(family, config, options.name) or _block_of_options(family, options)
    positions = config.get("max_position_embeddings") or config.get("max_sequence_length")
    if isinstance(positions, int) and block > positions:
        raise DuelError(f"{options.name} holds {positions} positions, so its trained block cannot be {block}.")
    return block


def _block_in_config(family: Family | None, config: dict[str, Any], name: str) -> int | None:
    try:
        blocks = [config_entries.count(config, key) for key in (family.block_keys if family else ())]
    except ValueError as error:
        raise DuelError(f"The config.json of {name} is wrong: {error}.") from None
    return next((block for block in blocks if block), None)


def _block_of_options(family: Family | None, options: LoadOptions) -> int:
    known, published = (family.block, family.published_block) if family else (None, None)
    if isinstance(options.block, int):
        if options.block not in (known, published) and known is not None:
            log.warning("%s networks are trained on blocks of %d; using block=%d", family.name, known, options.block)
        return options.block
    if known is None:
        raise DuelError(f"{options.name} is block-causal and its config has no block; pass block=<the trained one>.")
    return published or known
