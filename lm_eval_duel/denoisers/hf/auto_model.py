"""Networks in the classes of transformers' Auto mappings: how they are loaded, and what their configs say."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from typing import Any

import torch
import transformers
from transformers.utils import cached_file

from lm_eval_duel.denoisers import weights
from lm_eval_duel.denoisers.hf import device_map, quantization, strict_load
from lm_eval_duel.denoisers.hub import QUIET, pick_dtype
from lm_eval_duel.denoisers.load_options import LoadOptions
from lm_eval_duel.errors import DuelError

log = logging.getLogger("lm_eval.duel_mdm")

LENGTHS = ("max_position_embeddings", "max_sequence_length", "model_length", "n_positions", "max_seq_len", "n_ctx")
UNBOUNDED = 1_000_000  # tokenizers without a length report 1e30


def load_model(
    auto_class: Any, model_config: Any, config: dict[str, Any], options: LoadOptions, **model_kwargs: Any
) -> Any:
    """The network of a checkpoint in a class of transformers, on its device. Unused tensors are a warning only."""
    if cached_file(options.name, "adapter_config.json", revision=options.revision, **QUIET) is not None:
        raise DuelError(
            f"{options.name} holds an adapter (adapter_config.json) next to its weights. Use a copy without the "
            "adapter's files, and pass peft=<their folder> to add it."
        )
    quantized = quantization.model_kwargs(config, options)
    model_kwargs |= quantized | device_map.model_kwargs(options)
    try:
        with contextlib.nullcontext() if quantized else strict_load.quiet_transformers():
            model, report = auto_class.from_pretrained(
                options.name,
                config=model_config,
                dtype=pick_dtype(options.dtype, options.device),
                revision=options.revision,
                ignore_mismatched_sizes=not quantized,  # reported, and raised below; packed weights need False
                output_loading_info=True,
                **model_kwargs,
            )
    except Exception:
        if os.path.isdir(options.name):
            weights.names(options.name)  # raises an error that names the broken file
        raise
    missing, unknown, misshapen = report["missing_keys"], report["unexpected_keys"], strict_load.misshapen(report)
    if missing or misshapen:
        what = f"The weights of {options.name} do not fill {type(model).__name__}"
        strict_load.require_none(what, missing, unknown, misshapen)
    quantization.require_used(model, unknown, options.name)
    if unknown:
        log.warning(
            "Weights of %s that the network does not use: %s", options.name, sorted(unknown)[: strict_load.SHOWN]
        )
    return model if "device_map" in model_kwargs else model.to(options.device)


@functools.cache
def _classes() -> frozenset[str]:
    """The names of transformers in lower case; listing them takes 0.15 s."""
    return frozenset(map(str.lower, dir(transformers)))


def require_known(config: dict[str, Any], name: str, native: str, also: tuple[str, ...] = ()) -> None:
    """Raise DuelError if a config names a class that is neither in transformers nor one of `also`.

    Its model type alone does not make it transformers' class `native`: it may be a diffusion model built on it.
    """
    known = {*_classes(), *map(str.lower, also)}
    if unknown := [each for each in config.get("architectures") or [] if str(each).lower() not in known]:
        raise DuelError(
            f"By its config {name} is a {', '.join(unknown)}, which transformers does not have. If it is the same "
            f'network as {native}, set architectures to ["{native}"] in its config.json.'
        )


def max_positions(model: torch.nn.Module, model_max_length: int | None) -> int | None:
    """Positions that a network can hold: the minimum over config, position table and the tokenizer's own bound."""
    lengths = [getattr(model.config, name) for name in LENGTHS if getattr(model.config, name, None)]
    if getattr(model.config, "model_type", None) == "esm":  # its count starts after the padding id, even if rotary
        lengths.append(model.config.max_position_embeddings - (model.config.pad_token_id or 0) - 1)
    if table := _table_after_padding(model):
        lengths.append(len(table.weight) - first_position(model))
    lengths += [model_max_length] if model_max_length and model_max_length < UNBOUNDED else []
    return min(lengths, default=None)


def first_position(model: torch.nn.Module) -> int:
    """The position id of a row's first token. RoBERTa counts from after the padding id."""
    table = _table_after_padding(model)
    return table.padding_idx + 1 if table else 0


def _table_after_padding(model: torch.nn.Module) -> Any:
    """The position embedding of a network whose positions start after the padding id; None for other networks."""
    tables = (module for name, module in model.named_modules() if name.endswith("position_embeddings"))
    return next((table for table in tables if getattr(table, "padding_idx", None) is not None), None)


def is_native(model: torch.nn.Module) -> bool:
    """True if the class of a network belongs to transformers, not to a checkpoint's own code."""
    return type(model).__module__.startswith("transformers.")
