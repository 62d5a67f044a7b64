"""Networks through their own forward: transformers' masked LMs (BERT, RoBERTa, ...), and a checkpoint's own code.

Only what every such network has is relied on: ids in, logits out. Whether its head can be split off, and whether it
listens to an attention mask, is found by small forwards at load.

Shapes: R rows, L row length, N rows of a call, Q queries, K keys, U cells, D features, V tokens.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
from collections.abc import Iterator
from typing import Any

import torch
from transformers import MODEL_FOR_MASKED_LM_MAPPING, AutoConfig, AutoModelForMaskedLM, PreTrainedTokenizerBase
from transformers.utils import cached_file

from lm_eval_duel import fingerprint
from lm_eval_duel.denoisers import self_tests as probes
from lm_eval_duel.denoisers import weights
from lm_eval_duel.denoisers.base import Denoiser, KeysValues
from lm_eval_duel.denoisers.hf import device_map as placement
from lm_eval_duel.denoisers.hf import quantization as quantized
from lm_eval_duel.denoisers.hf import strict_load as filling
from lm_eval_duel.denoisers.hf.row_effects import padding_id, without_block_sparse
from lm_eval_duel.denoisers.hub import QUIET, mask_of, pick_dtype, row_length, said, unreadable
from lm_eval_duel.denoisers.load_options import LoadOptions
from lm_eval_duel.denoisers.predictions import excluded_columns, require_fit
from lm_eval_duel.errors import DuelError

log = logging.getLogger("lm_eval.duel_mdm")

LENGTHS = ("max_position_embeddings", "max_sequence_length", "model_length", "n_positions", "max_seq_len", "n_ctx")
COPIED_PARAMETERS = 2_000_000_000
UNBOUNDED = 1_000_000  # tokenizers without a length say 1e30


def load(raw: dict[str, Any], asked: LoadOptions, tokenizer: PreTrainedTokenizerBase) -> HuggingFace:
    """The denoiser of one of transformers' masked LMs; raises DuelError for any other network."""
    config = config_of(asked)
    if type(config) not in MODEL_FOR_MASKED_LM_MAPPING:
        classes = ", ".join(raw.get("architectures") or [type(config).__name__])
        raise DuelError(
            f"{asked.name} ({classes}) is neither a masked LM of transformers nor of a known diffusion family. "
            "If it is autoregressive, score it with estimator=ar. If it is a masked diffusion model whose network "
            "is one of the families', say family=; its own code runs with backend=remote,trust_remote_code=true."
        )
    asked.refuse("masked LM", "shift_logits", "backend", "sigma", "peft")
    if asked.family is not None or asked.attention not in (None, "bidirectional"):
        raise DuelError(f"{asked.name} is one of transformers' masked LMs: bidirectional; leave family, attention out.")
    rows = getattr(config, "vocab_size", None)
    mask_id = mask_of(asked, raw, tokenizer, None, rows)
    if rows is not None:
        require_fit(set(tokenizer.get_vocab().values()), mask_id, rows, asked.name)
    model = filled(AutoModelForMaskedLM, config, raw, asked)
    log.info("%s is a masked LM (%s), scored as an any-order model", asked.name, type(model).__name__)
    return finish(model, asked, tokenizer, mask_id)


def config_of(asked: LoadOptions, **options: Any) -> Any:
    """The config of a checkpoint, as transformers reads it; raises DuelError where it cannot."""
    try:
        return AutoConfig.from_pretrained(asked.name, revision=asked.revision, **options)
    except Exception as error:  # a config of the wrong types raises what its class checks them with
        raise unreadable(asked.name, error) from error


def filled(auto: Any, config: Any, raw: dict[str, Any], asked: LoadOptions, **options: Any) -> Any:
    """The network that an Auto class of transformers makes of a checkpoint, on its device.

    Raises DuelError where it cannot be read, or where a tensor is missing or of another shape.
    """
    require_no_adapter(asked)
    coarse = quantized.options(raw, asked)
    options |= coarse | placement.options(asked)
    files = weights.shapes(asked.name) if os.path.isdir(asked.name) else {}
    if files:
        filling.require_counts(asked.name, {key: raw.get(key) for key in ("num_hidden_layers", "n_layer")}, files)
        # not own code, which may keep what it computes for a next network, and here it would be empty
        own = asked.trust_remote_code and raw.get("auto_map")
        network = None if own else filling.empty(lambda: auto.from_config(config))
        filling.require_room(asked.name, network, files.values(), hasattr(config, quantized.SAID))
    try:
        with contextlib.nullcontext() if coarse else filling.quiet():
            model, report = auto.from_pretrained(
                asked.name,
                config=config,
                dtype=pick_dtype(asked.dtype, asked.device),
                revision=asked.revision,
                ignore_mismatched_sizes=not coarse,  # reported, and an error below; packed ones transformers 4 cannot
                output_loading_info=True,
                **options,
            )
    except Exception as error:  # a truncated file raises the error of whichever library reads it
        if os.path.isdir(asked.name):
            weights.require_readable(asked.name)  # names the file
        raise unreadable(asked.name, error) from error
    filling.require_filled(asked.name, report, model, files)
    quantized.require_used(model, report["unexpected_keys"], asked.name)
    return model if "device_map" in options else model.to(asked.device)


def require_no_adapter(asked: LoadOptions) -> None:
    """Raise DuelError for an adapter beside the weights: where peft is installed transformers adds it, or takes another
    checkpoint that the adapter names; where not, it does neither."""
    if cached_file(asked.name, "adapter_config.json", revision=asked.revision, **QUIET) is not None:
        raise DuelError(
            f"{asked.name} holds an adapter (adapter_config.json) beside its weights, and whether it is part of the "
            "network depends on what is installed. Take a copy without the adapter's files, and say "
            "peft=<their folder> if it is to be added."
        )


def finish(
    model: torch.nn.Module,
    asked: LoadOptions,
    tokenizer: PreTrainedTokenizerBase,
    mask_id: int,
    max_length: int | None = None,
    **quirks: Any,
) -> HuggingFace:
    """The denoiser of a loaded network; `quirks` as in HuggingFace."""
    held = min((length for length in (max_length, held_length(model, tokenizer)) if length), default=None)
    if not (asked.max_length or held):
        raise DuelError(
            f"Neither config nor tokenizer of {asked.name} says how many positions it holds; pass max_length=."
        )
    row = row_length(asked.name, asked.max_length, held)
    tokens = set(tokenizer.get_vocab().values())
    denoiser = HuggingFace(model.eval(), mask_id, tokens, held or asked.max_length, asked.name, **quirks)
    denoiser.max_length, denoiser.last_block, denoiser.adapter = row, asked.last_block, asked.peft
    denoiser.bos, denoiser.revision = asked.bos or denoiser.bos, asked.revision
    if denoiser.sparse_from is not None and row >= denoiser.sparse_from:
        log.warning(
            "%s has block-sparse attention from %d positions on, by its config; it is scored with full attention at "
            "every length. Its code does the same after one shorter row",
            asked.name,
            denoiser.sparse_from,
        )
    return denoiser


def held_length(model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Positions that the network can hold: the smallest of what config, position table and tokenizer say."""
    found = [getattr(model.config, name) for name in LENGTHS if getattr(model.config, name, None)]
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            found.append(len(module.weight) - module.padding_idx - 1)  # RoBERTa counts from after the padding id
    found += [tokenizer.model_max_length] if tokenizer.model_max_length < UNBOUNDED else []
    return min(found, default=None)


class HuggingFace(Denoiser):
    """A network of transformers, or of a checkpoint's own code, through its own forward."""

    appends_sep = True

    def __init__(
        self,
        model: torch.nn.Module,
        mask_id: int,
        tokens: set[int],
        max_length: int,
        path: str,
        family: str = "masked-lm",
        attention: str = "bidirectional",
        shift: int = 0,
        block: int | None = None,
        published_block: int | None = None,
        bos: str = "auto",
    ):
        self.model, self.path, self.max_length, self.mask_id = model, path, max_length, mask_id
        self.family, self.attention, self.shift, self.block, self.bos = family, attention, shift, block, bos
        self.device, self.quantized = placement.device_of(model), quantized.is_quantized(model)
        self.dtype = next(model.parameters()).dtype
        self.published_block = published_block
        self.adapter: str | None = None
        self.pad_id = padding_id(model.config, tokens, mask_id)
        self.sparse_from = without_block_sparse(model)
        self.revision: str | None = None  # the commit, of a hub name
        self._output = model.get_output_embeddings()
        self.splits_head = False
        with torch.inference_mode(), first_calls(path):
            self.vocab_size = self._try_out().shape[-1]
            self._excluded = excluded_columns(tokens, mask_id, self.vocab_size, path, self.device)
            rows = probes.tokens(self)  # (2, L)
            if attention == "bidirectional":
                self.splits_head = self._splits(rows, self._logits(rows))
            probes.probe(self, path)
            if attention == "bidirectional":
                probes.require_repeatable(self, path, probes.REPEATED if is_native(model) else probes.LENGTH)
                if self.dtype.itemsize < 4 and not self.quantized:
                    self._look_closer()

    @property
    def excluded(self) -> torch.Tensor:
        return self._excluded

    @property
    def layers(self) -> torch.nn.Module:
        return self.model

    @torch.inference_mode()
    def features(self, ids: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
        mask = None
        if real is not None:
            mask = real.long()  # (R, L)
            ids = ids.masked_fill(~real, self.pad_id)  # ESM counts the masked cells of a row, padding included
        if not self.splits_head:
            return self._logits(ids, mask)  # (R, L, V)
        caught = []

        def catch(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            caught.append(inputs[0])
            return (inputs[0][:, :0], *inputs[1:])  # the head runs later, at hidden cells only

        hook = self._output.register_forward_pre_hook(catch)
        try:
            self._logits(ids, mask)
        finally:
            hook.remove()
        return caught[-1].to(self.device)  # (R, L, D)

    @torch.inference_mode()
    def stream(
        self, ids: torch.Tensor, positions: torch.Tensor, seen: torch.Tensor, past: list[KeysValues] | None
    ) -> tuple[torch.Tensor, list[KeysValues]]:
        """Own code may take no cache of ours, so clean cells are evaluated anew: their ids stand for their keys."""
        own = ids[:, None, :, None]  # (N, 1, Q, 1)
        clean = past[0][0][:, 0, :, 0] if past else ids[:, :0]  # (N, K) a row may know fewer; then its last are no ids
        places = torch.arange(clean.shape[1], device=ids.device)  # (K,)
        known = (places[:, None] // self.block >= places // self.block).expand(len(ids), -1, -1)  # (N, K, K)
        none = torch.zeros(len(ids), clean.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device)  # (N, K, Q)
        allowed = torch.cat([torch.cat([known, none], 2), seen], 1)  # (N, K + Q, K + Q)
        lowest = torch.finfo(self.dtype).min
        mask = torch.zeros(allowed.shape, dtype=self.dtype, device=ids.device).masked_fill(~allowed, lowest)
        logits = logits_of(
            self.model,
            torch.cat([clean, ids], 1),
            mask[:, None],
            position_ids=torch.cat([places.expand_as(clean), positions.expand_as(ids)], 1),
        )  # (N, K + Q, V)
        return logits[:, clean.shape[1] :].to(self.device), [(own, own)]

    @torch.inference_mode()
    def head(self, features: torch.Tensor) -> torch.Tensor:
        return self._output(features).to(self.device) if self.splits_head else features  # (U, V)

    def describe(self) -> dict[str, object]:
        described = described_by(self)
        if self.family != "masked-lm":
            described |= {"attention": self.attention, "shift": self.shift}
        if self.attention == "block_causal":
            described["last_block"] = self.last_block
        if self.sparse_from is not None and self.max_length >= self.sparse_from:
            described["attention_type"] = "original_full, not block_sparse as in its config"
        return described

    def _logits(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return logits_of(self.model, ids, mask).to(self.device)  # (R, L, V)

    # ------------------------------------------------------------ what this network does

    def _try_out(self) -> torch.Tensor:
        """Logits of a first small row."""
        ids = torch.full((1, min(2, self.max_length)), self.mask_id, device=self.device)  # (1, L)
        if self.attention == "block_causal":
            seen = torch.ones(1, ids.shape[1], ids.shape[1], dtype=torch.bool, device=self.device)
            return self.stream(ids, torch.arange(ids.shape[1], device=self.device)[None], seen, None)[0]
        logits = self._logits(ids)
        if logits.shape[:2] != ids.shape:
            raise DuelError(
                f"{self.path} returns logits of shape {tuple(logits.shape)} for a row of {ids.shape[1]} positions; "
                "wanted one distribution for each position. It is not supported."
            )
        return logits

    def _splits(self, ids: torch.Tensor, logits: torch.Tensor) -> bool:
        """Whether the output embedding alone makes the logits of its input, to the bit."""
        if self._output is None:
            return False
        self.splits_head = True
        try:
            return torch.equal(self.head(self.features(ids, None)), logits)
        except (RuntimeError, IndexError, TypeError, ValueError, AttributeError, AssertionError):
            return False  # it does more with the head's input or output than we can stand in for

    def _look_closer(self) -> None:
        """In float32 where a copy of the network is affordable: a coarser dtype could hide weak position signals, and
        padding that is seen a little."""
        if sum(parameter.numel() for parameter in self.model.parameters()) <= COPIED_PARAMETERS:
            own, self.model = self.model, copy.deepcopy(self.model).float()
            output, self._output, splits, self.splits_head = self._output, None, self.splits_head, False
            self.relative_positions = probes.ties_when_all_mask(self)
            self.honours_padding = self.honours_padding and probes.honours_padding(self)
            self.model, self._output, self.splits_head = own, output, splits


@contextlib.contextmanager
def first_calls(path: str) -> Iterator[None]:
    """The first calls of a network: whatever its code raises is a DuelError."""
    try:
        yield
    except (DuelError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise DuelError(
            f"Cannot read checkpoint '{path}': {said(error)}. Its network does not run on short rows of ids with an "
            "attention mask at most; networks that need other inputs, or rows of one length, are not supported."
        ) from error


def is_native(model: torch.nn.Module) -> bool:
    """Whether a network is of a class of transformers, not of a checkpoint's own code."""
    return type(model).__module__.startswith("transformers.")


def described_by(denoiser: Any) -> dict[str, object]:
    """What of a network that came with transformers' or its own code defines the spec."""
    model, path, native = denoiser.model, denoiser.path, is_native(denoiser.model)
    local = os.path.isdir(path)
    described = {
        "denoiser": type(model).__name__,
        "weights": fingerprint.weights_of(path, not native) if local else f"{path} at commit {denoiser.revision}",
        "dtype": str(denoiser.dtype).removeprefix("torch."),
        "mask_token_id": denoiser.mask_id,
        "vocabulary": f"{int((~denoiser.excluded).sum())} of {denoiser.vocab_size}",
        "relative_positions": denoiser.relative_positions,
    }
    described |= quantized.described(model)
    if not native:  # of a hub name, and from another repository than the weights, too
        described["code"] = fingerprint.code_of(type(model))
    if denoiser.adapter:
        described["peft"] = fingerprint.adapter_of(denoiser.adapter)
    return described


def logits_of(
    model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor | None = None, **more: torch.Tensor
) -> torch.Tensor:
    """Logits (R, L, V) of any of the ways in which networks return them."""
    out = model(input_ids=ids, **more) if mask is None else model(input_ids=ids, attention_mask=mask, **more)
    return out if isinstance(out, torch.Tensor) else out[0] if isinstance(out, tuple) else out.logits
