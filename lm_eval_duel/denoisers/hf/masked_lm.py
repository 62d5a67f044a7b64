"""Networks through their own forward: transformers' masked LMs (BERT, RoBERTa, ...), and a checkpoint's own code.

All they need to have in common is ids in, logits out. Small forward passes at load detect whether the head can be
split off and whether the attention mask has an effect.

Shapes: R rows, L row length, N rows of a call, Q queries, K keys, U positions, D features, V tokens.
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
from lm_eval_duel.denoisers.hf.pretrained import Pretrained
from lm_eval_duel.denoisers.hf.row_effects import padding_id, without_block_sparse
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


def load(config: dict[str, Any], options: LoadOptions, tokenizer: PreTrainedTokenizerBase) -> MaskedLM:
    """The denoiser of one of transformers' masked LMs; raises DuelError for any other network."""
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
    denoiser = MaskedLM(MASKED_LM, config, options, tokenizer, getattr(model_config, "vocab_size", None))
    denoiser.take(auto_model.load_model(AutoModelForMaskedLM, model_config, config, options).eval())
    log.info("%s is a masked LM (%s), scored as an any-order model", options.name, classes)
    return denoiser


class MaskedLM(Pretrained):
    """A network of transformers, or of a checkpoint's own code, through its own forward."""

    appends_sep = True
    steers_attention = True  # a cache is inserted at its attention calls (cached/steering.py): `stream` keeps no keys
    splits_head = False

    def __init__(self, family: Family, config: dict[str, Any], options: LoadOptions, tokenizer: Any, rows: int | None):
        super().__init__(family, config, options, tokenizer, rows)
        self.longest, self.model_max_length = family.max_length, tokenizer.model_max_length

    def take(self, model: Any) -> None:
        super().take(model)
        self.set_row_length(
            min(filter(None, (self.longest, auto_model.max_positions(model, self.model_max_length))), default=None)
        )
        self.pad_id = padding_id(model.config, self.tokens, self.mask_id)
        self.sparse_from = without_block_sparse(model)
        if self.sparse_from is not None and self.max_length >= self.sparse_from:
            log.warning(
                "By its config %s has block-sparse attention from %d positions on; it is scored with full attention at "
                "every length, as its own code does after the first shorter row",
                self.path,
                self.sparse_from,
            )
        self._output = model.get_output_embeddings()
        with torch.no_grad():
            self.set_columns(self._first_call().shape[-1])
            rows = self_tests.probe_rows(self)  # (R, L)
            if self.attention == "bidirectional":
                self.splits_head = self._can_split_head(rows, self._logits(rows))
            self_tests.run(self, self.path, self.refuses)
            if self.attention == "bidirectional" and self.refuses:
                long = auto_model.is_native(model)
                self_tests.require_repeatable(self, self.path, self_tests.REPEATED if long else self_tests.LENGTH)
                if self.dtype.itemsize < 4 and not self.quantized:
                    self._retest_in_float32()

    def features(self, ids: torch.Tensor, real: torch.Tensor | None, **more: torch.Tensor) -> torch.Tensor:
        mask = None
        if real is not None:
            mask = real.long()  # (R, L)
            ids = ids.masked_fill(~real, self.pad_id)  # not [MASK]: ESM counts the masked positions of a row
        if not self.splits_head:
            return self._logits(ids, mask, **more)  # (R, L, V)
        caught = []

        def catch(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            caught.append(inputs[0])
            return (inputs[0][:, :0], *inputs[1:])  # an empty input: the head runs later, at masked positions only

        hook = self._output.register_forward_pre_hook(catch)
        try:
            self._logits(ids, mask, **more)
        finally:
            hook.remove()
        return caught[-1].to(self.device)  # (R, L, D)

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
        logits = auto_model.logits_of(
            self.model,
            torch.cat([clean, ids], 1),
            mask[:, None],
            position_ids=torch.cat([places.expand_as(clean), positions.expand_as(ids)], 1),
        )  # (N, K + Q, V)
        return logits[:, clean.shape[1] :].to(self.device), [(own, own)]

    def head(self, features: torch.Tensor) -> torch.Tensor:
        return self._output(features).to(self.device) if self.splits_head else features  # (U, V)

    def describe(self) -> dict[str, object]:
        if self.sparse_from is None or self.max_length < self.sparse_from:
            return super().describe()
        return {**super().describe(), "attention_type": "original_full, not block_sparse as in its config"}

    def _logits(self, ids: torch.Tensor, mask: torch.Tensor | None = None, **more: torch.Tensor) -> torch.Tensor:
        return auto_model.logits_of(self.model, ids, mask, **more).to(self.device)  # (R, L, V)

    # ------------------------------------------------------------ detection at load

    def _first_call(self) -> torch.Tensor:
        """Logits of a first small row."""
        ids = torch.full((1, min(2, self.max_length)), self.mask_id, device=self.device)  # (1, L)
        if self.attention == "block_causal":
            seen = torch.ones(1, ids.shape[1], ids.shape[1], dtype=torch.bool, device=self.device)
            return self.stream(ids, torch.arange(ids.shape[1], device=self.device)[None], seen, None)[0]
        logits = self._logits(ids)
        if logits.shape[:2] != ids.shape:
            raise DuelError(
                f"{self.path} returns logits of shape {tuple(logits.shape)} for a row of {ids.shape[1]} positions; "
                "expected one distribution for each position. It is not supported."
            )
        return logits

    def _can_split_head(self, ids: torch.Tensor, logits: torch.Tensor) -> bool:
        """True if the output embedding, applied to its own input, gives the network's logits bit for bit."""
        if self._output is None:
            return False
        self.splits_head = True
        try:
            return torch.equal(self.head(self.features(ids, None)), logits)
        except (RuntimeError, IndexError, TypeError, ValueError, AttributeError, AssertionError):
            return False  # the network does more with the head's input or output

    def _retest_in_float32(self) -> None:
        """Repeat two self-tests in float32, if the network is small enough.

        Rounding in a coarser dtype could hide weak effects of positions or padding.
        """
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
    stores = [store for module in model.modules() for store in (module._parameters, module._buffers)]
    own = [(store, name, value) for store in stores for name, value in store.items() if value is not None]
    own = [(store, name, value) for store, name, value in own if value.is_floating_point()]
    try:
        for store, name, value in own:
            copied = value.detach().float()
            store[name] = torch.nn.Parameter(copied, False) if isinstance(value, torch.nn.Parameter) else copied
        yield
    finally:
        for store, name, value in own:
            store[name] = value
