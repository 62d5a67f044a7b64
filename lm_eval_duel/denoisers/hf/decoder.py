"""Decoders that became diffusion models (LLaDA, Dream, SDAR, ...) in transformers' own classes, with an explicit mask.

Their networks are those of Llama, Qwen2, Qwen3, Qwen3-MoE and GLM-4-MoE; what differs is who sees whom. So the weights
are loaded into those classes (backbone_load.py), and every call says with a 4-D additive mask what is seen: none of a
checkpoint's code is run, and the same network is bidirectional or block-causal.

Shapes: R rows, L row length, N rows of a call, Q queries, K keys, D features, V tokens.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from lm_eval_duel import fingerprint
from lm_eval_duel.denoisers import config_entries as entries
from lm_eval_duel.denoisers import self_tests as probes
from lm_eval_duel.denoisers.base import Denoiser, KeysValues
from lm_eval_duel.denoisers.hf import device_map as placement
from lm_eval_duel.denoisers.hf import quantization as quantized
from lm_eval_duel.denoisers.hf.families import Family
from lm_eval_duel.denoisers.hub import row_length
from lm_eval_duel.denoisers.load_options import LoadOptions
from lm_eval_duel.denoisers.predictions import excluded_columns
from lm_eval_duel.errors import DuelError

log = logging.getLogger("lm_eval.duel_mdm")


class Backbone(Denoiser):
    """A decoder of transformers, seen through the mask of its diffusion family."""

    maskless = False  # whole rows go without a mask

    def __init__(
        self,
        model: Any,
        family: Family,
        raw: dict[str, Any],
        path: str,
        asked: LoadOptions,
        mask_id: int,
        tokenizer: PreTrainedTokenizerBase,
    ):
        self.model, self.family, self.path = model, family.name, path
        self.device, self.quantized = placement.device_of(model), quantized.is_quantized(model)
        self.dtype = model.get_input_embeddings().weight.dtype
        self.attention = asked.attention or family.attention
        said = entries.switch(raw, "right_shift_logits", bool(family.shift))
        self.shift = int(said if asked.shift_logits is None else asked.shift_logits)
        self.bos = asked.bos or ("given" if self.shift else family.bos)  # the first token is predicted from one before
        self.last_block = asked.last_block
        self.adapter = asked.peft
        self.mask_id = mask_id
        self.published_block = family.published_block if self.attention == "bidirectional" else None
        self.block = trained_block(family, raw, asked) if self.attention == "block_causal" else None
        self.max_length = row_length(path, asked.max_length, held_length(family, model.config.max_position_embeddings))
        self.vocab_size = model.config.vocab_size
        self._excluded = excluded_columns(
            set(tokenizer.get_vocab().values()), mask_id, self.vocab_size, path, self.device
        )
        if self.attention == "bidirectional":
            self.maskless = self._sees_all_without_a_mask()

    @property
    def excluded(self) -> torch.Tensor:
        return self._excluded

    def _sees_all_without_a_mask(self) -> bool:
        """Whether layers told not to be causal see whole rows without a mask: flash kernels take none."""
        layers = [module for module in self.model.modules() if hasattr(module, "is_causal")]
        for layer in layers:
            layer.is_causal = False  # it is asked for where no mask is given, and nowhere else
        rows = probes.tokens(self)  # (2, L)
        with torch.inference_mode():
            masked = self.features(rows, None)  # (2, L, D)
            self.maskless = True
            free = self.features(rows, None)
        self.maskless = False
        return bool(layers) and probes.differ(masked, free) <= probes.tolerance(self, free)

    @property
    def layers(self) -> torch.nn.Module:
        return self.model.model

    def compile(self) -> None:
        self.maskless = False  # traced, transformers makes a causal mask where none is given
        super().compile()

    @torch.inference_mode()
    def features(self, ids: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
        length = ids.shape[1]
        position = torch.arange(length, device=ids.device)[None]  # (1, L)
        if real is None and self.maskless:
            return self._hidden(ids, position, None, None)
        seen = torch.ones(1, length, length, dtype=torch.bool, device=ids.device)  # (1, L, L)
        if real is not None:
            seen = seen & real[:, None]  # (R, L, L)
            seen |= torch.eye(length, dtype=torch.bool, device=ids.device)  # padding sees itself, never nothing
        return self._hidden(ids, position, seen, None)

    @torch.inference_mode()
    def stream(
        self, ids: torch.Tensor, positions: torch.Tensor, seen: torch.Tensor, past: list[KeysValues] | None
    ) -> tuple[torch.Tensor, list[KeysValues]]:
        clean = CleanKeys(past)
        return self._hidden(ids, positions, seen, clean), clean.own

    @torch.inference_mode()
    def head(self, features: torch.Tensor) -> torch.Tensor:
        return self.model.lm_head(features).to(self.device)  # (U, V) wherever it lies: accelerate takes its input there

    def _hidden(
        self, ids: torch.Tensor, positions: torch.Tensor, seen: torch.Tensor | None, clean: CleanKeys | None
    ) -> torch.Tensor:
        """The input of the LM head (N, Q, D); `seen` (N or 1, Q, K + Q), None: all of it."""
        mask = None
        if seen is not None:
            lowest = torch.finfo(self.dtype).min  # -inf would make a row that sees nothing NaN
            mask = torch.zeros(seen.shape, dtype=self.dtype, device=seen.device).masked_fill(~seen, lowest)[:, None]
        out = self.model.model(
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
            **quantized.described(self.model),
        }
        if self.attention == "block_causal":
            described["last_block"] = self.last_block
        if self.adapter:
            described["peft"] = fingerprint.adapter_of(self.adapter)
        return described


class CleanKeys:
    """What transformers takes for a cache: keys and values of clean cells go before a call's own, kept apart."""

    def __init__(self, past: list[KeysValues] | None):
        self.past = past
        self.own: list[KeysValues] = []

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *ignored: Any, **also_ignored: Any
    ) -> KeysValues:
        """Keys and values (N, H, K + Q, D / H) that the layer attends to."""
        self.own.append((keys, values))
        if self.past is None:
            return keys, values
        before = self.past[layer]
        return torch.cat([before[0], keys], 2), torch.cat([before[1], values], 2)

    def get_seq_length(self, *ignored: Any) -> int:
        """Positions are said in every call."""
        return 0


def held_length(family: Family, positions: int) -> int:
    """Positions that a network of a family was trained on, of those that its config promises."""
    return min(positions, family.max_length or positions)


def trained_block(family: Family | None, raw: dict[str, Any], asked: LoadOptions) -> int:
    """The trained block: what the config says, else what the user says, else what the family is known for.

    Raises DuelError where none says, or where it is longer than a row.
    """
    found = _said_block(family, raw, asked.name) or _known_block(family, asked)
    rows = raw.get("max_position_embeddings") or raw.get("max_sequence_length")
    if isinstance(rows, int) and found > rows:
        raise DuelError(f"{asked.name} holds {rows} positions, so its trained block cannot be of {found}.")
    return found


def _said_block(family: Family | None, raw: dict[str, Any], name: str) -> int | None:
    try:
        said = [entries.count(raw, key) for key in (family.block_keys if family else ())]
    except ValueError as error:
        raise DuelError(f"The config.json of {name} is wrong: {error}.") from None
    return next((block for block in said if block), None)


def _known_block(family: Family | None, asked: LoadOptions) -> int:
    known = family.block if family else None
    if isinstance(asked.block, int):
        if known not in (None, asked.block):
            log.warning("%s is known for blocks of %d; taking block=%d", family.name, known, asked.block)
        return asked.block
    if known is None:
        raise DuelError(f"{asked.name} is block-causal and its config names no block; pass block=<the trained one>.")
    return known
