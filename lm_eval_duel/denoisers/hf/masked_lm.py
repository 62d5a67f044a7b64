"""transformers' masked LMs (BERT, RoBERTa, ...), and the networks of a checkpoint's own code.

Shapes: R rows, L row length, N rows of a call, Q queries, K keys, D features, V tokens.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoModelForMaskedLM,
    PreTrainedTokenizerBase,
)

from lm_eval_duel.core.network import KeysValues
from lm_eval_duel.denoisers import self_tests
from lm_eval_duel.denoisers.hf import auto_model
from lm_eval_duel.denoisers.hf.families import Family
from lm_eval_duel.denoisers.hf.own_forward import OwnForward
from lm_eval_duel.denoisers.load_options import LoadOptions
from lm_eval_duel.errors import DuelError

log = logging.getLogger("lm_eval.duel_mdm")

MASKED_LM = Family("masked-lm", "", bos="auto")
OWN_CODE = Family("own code", "", bos="auto")  # of no family that is known
SAME = ("EsmForDPLM", "AntiBERTy")  # classes of others that are transformers' own network
MOVED = ("eurobert",)  # model types that were published with their own code, which is now in transformers
COPIED_PARAMETERS = 2_000_000_000  # up to this size a network's tensors are copied into float32 for self-tests


def is_native(config: dict[str, Any]) -> bool:
    """True if transformers has the network of a checkpoint that still carries it as code."""
    return config.get("model_type") in MOVED and config["model_type"] in CONFIG_MAPPING


def unfilled(config: dict[str, Any], options: LoadOptions, tokenizer: PreTrainedTokenizerBase | None) -> MaskedLM:
    """A masked LM of transformers, without its weights; raises DuelError for any other network."""
    model_config = AutoConfig.from_pretrained(options.name, revision=options.revision)
    classes = ", ".join(config.get("architectures") or [type(model_config).__name__])
    if getattr(model_config, "is_encoder_decoder", False):
        raise DuelError(f"{options.name} ({classes}) is an encoder-decoder network, which this package does not score.")
    if type(model_config) not in MODEL_FOR_MASKED_LM_MAPPING:
        causal = type(model_config) in MODEL_FOR_CAUSAL_LM_MAPPING
        kind = "autoregressive: add estimator=ar" if causal else "neither a masked LM nor of a known diffusion family"
        raise DuelError(
            f"{options.name} ({classes}) is {kind}. If it is a masked diffusion model whose network belongs to a known "
            "family, pass family=; to run its own code, backend=remote,trust_remote_code=true."
        )
    auto_model.require_known(config, options.name, MODEL_FOR_MASKED_LM_MAPPING[type(model_config)].__name__, SAME)
    options.refuse("masked LM", "shift_logits", "backend", "sigma", "first_token", "peft")
    if options.attention not in (None, "bidirectional"):
        raise DuelError(f"{options.name} is a masked LM of transformers, so bidirectional; leave attention out.")
    log.info("%s is a masked LM (%s), scored as an any-order model", options.name, classes)
    denoiser = MaskedLM(MASKED_LM, config, options, tokenizer, getattr(model_config, "vocab_size", None))
    denoiser.kind, denoiser.model_config = AutoModelForMaskedLM, model_config
    return denoiser


class MaskedLM(OwnForward):
    """A masked LM of transformers, or a network of a checkpoint's own code."""

    appends_sep = True
    steers_attention = True  # a cache is inserted at its attention calls (cached/steering.py): `stream` keeps no keys

    def take(self, model: Any) -> None:
        self.pad_id, self.sparse_from = padding_id(model.config, self.tokens, self.mask_id), without_block_sparse(model)
        super().take(model)
        if self.sparse_from is not None and self.max_length >= self.sparse_from:
            log.warning(
                "By its config %s has block-sparse attention from %d positions on; it is scored with full attention at "
                "every length, as its own code does after the first shorter row",
                self.path,
                self.sparse_from,
            )
        if self.attention == "bidirectional" and self.refuses:
            length = self_tests.REPEATED if auto_model.is_native(model) else self_tests.LENGTH
            with torch.no_grad():
                self_tests.require_repeatable(self, self.path, length)
                if self.dtype.itemsize < 4 and not self.quantized:
                    self._retest_in_float32()

    def features(self, ids: torch.Tensor, real: torch.Tensor | None, **more: torch.Tensor) -> torch.Tensor:
        mask = None
        if real is not None:
            mask = real.long()  # (R, L)
            ids = ids.masked_fill(~real, self.pad_id)  # not [MASK]: ESM counts the masked positions of a row
        return self._features(ids, mask, **more)

    def stream(
        self, ids: torch.Tensor, positions: torch.Tensor, seen: torch.Tensor, past: list[KeysValues] | None
    ) -> tuple[torch.Tensor, list[KeysValues]]:
        """Own code may not accept our cache, so clean positions are evaluated again; their "keys" are their ids."""
        own = ids[:, None, :, None]  # (N, 1, Q, 1)
        clean = past[0][0][:, 0, :, 0] if past else ids[:, :0]  # (N, K); rows with fewer clean positions end in padding
        places = torch.arange(clean.shape[1], device=ids.device)  # (K,)
        known = (places[:, None] // self.block >= places // self.block).expand(len(ids), -1, -1)  # (N, K, K)
        none = torch.zeros(len(ids), clean.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device)  # (N, K, Q)
        allowed = torch.cat([torch.cat([known, none], 2), seen], 1)  # (N, K + Q, K + Q)
        lowest = torch.finfo(self.dtype).min
        mask = torch.zeros(allowed.shape, dtype=self.dtype, device=ids.device).masked_fill(~allowed, lowest)
        whole = torch.cat([clean, ids], 1)  # (N, K + Q)
        position_ids = torch.cat([places.expand_as(clean), positions.expand_as(ids)], 1)
        logits = self._logits(whole, mask[:, None], position_ids=position_ids)  # (N, K + Q, V)
        return logits[:, clean.shape[1] :], [(own, own)]

    def describe(self) -> dict[str, object]:
        if self.sparse_from is None or self.max_length < self.sparse_from:
            return super().describe()
        return {**super().describe(), "attention_type": "original_full, not block_sparse as in its config"}

    def _retest_in_float32(self) -> None:
        """Repeat self-tests in float32, if the network is small enough: rounding could hide weak effects."""
        if sum(parameter.numel() for parameter in self.model.parameters()) <= COPIED_PARAMETERS:
            splits, self.splits_head = self.splits_head, False
            with _in_float32(self.model):
                self.relative_positions = self_tests.ties_when_all_mask(self)
                self.honours_padding = self.honours_padding and self_tests.honours_padding(self)
                self_tests.require_separate_rows(self, self.path)
            self.splits_head = splits


@contextlib.contextmanager
def _in_float32(model: torch.nn.Module) -> Iterator[None]:
    """Copies of a network's tensors in float32 take their place; a part of a tensor stays that part."""
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()]
    own = [tensor.data for tensor in tensors]
    try:
        for tensor in tensors:
            tensor.data = tensor.data.float()
        yield
    finally:
        for tensor, data in zip(tensors, own, strict=True):
            tensor.data = data


def padding_id(config: Any, tokens: set[int], mask_id: int) -> int:
    """The id for padding: that of the config, if it is a token other than [MASK]; otherwise the lowest token."""
    pad_id = getattr(config, "pad_token_id", None)
    known = isinstance(pad_id, int) and pad_id in tokens and pad_id != mask_id
    return pad_id if known else min(tokens - {mask_id})


def without_block_sparse(model: Any) -> int | None:
    """Give a BigBird full attention; returns the row length from which its config has block-sparse attention, or None.

    Its own code switches for good at the first shorter row, so numbers would depend on earlier rows.
    """
    config = model.config
    if getattr(config, "attention_type", None) != "block_sparse" or not hasattr(model, "base_model"):
        return None
    model.base_model.set_attention_type("original_full")
    return (5 + 2 * config.num_random_blocks) * config.block_size + 1
