"""Networks in the classes of transformers' Auto mappings: how they are loaded, called and described.

Shapes: R rows, L row length, V tokens.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedTokenizerBase
from transformers.utils import cached_file

from lm_eval_duel import fingerprint
from lm_eval_duel.denoisers import weights
from lm_eval_duel.denoisers.hf import device_map, quantization, strict_load
from lm_eval_duel.denoisers.hub import QUIET, cannot_read, pick_dtype
from lm_eval_duel.denoisers.load_options import LoadOptions
from lm_eval_duel.errors import DuelError

LENGTHS = ("max_position_embeddings", "max_sequence_length", "model_length", "n_positions", "max_seq_len", "n_ctx")
UNBOUNDED = 1_000_000  # tokenizers without a length report 1e30


def read_model_config(options: LoadOptions, **config_kwargs: Any) -> Any:
    """The config of a checkpoint, as transformers reads it; raises DuelError if it cannot."""
    try:
        return AutoConfig.from_pretrained(options.name, revision=options.revision, **config_kwargs)
    except Exception as error:  # config classes validate in different ways
        raise cannot_read(options.name, error) from error


def load_model(
    auto_class: Any, model_config: Any, config: dict[str, Any], options: LoadOptions, **model_kwargs: Any
) -> Any:
    """The network that an Auto class of transformers makes of a checkpoint, on its device.

    Raises DuelError if it cannot be read, or if a tensor is missing or of another shape.
    """
    _require_no_adapter(options)
    quantized = quantization.model_kwargs(config, options)
    model_kwargs |= quantized | device_map.model_kwargs(options)
    files = weights.shapes(options.name) if os.path.isdir(options.name) else {}
    if files:
        counts = {key: config.get(key) for key in ("num_hidden_layers", "n_layer")}
        strict_load.require_counts(options.name, counts, files)
        # own code is not built on the meta device: it may cache tensors for the next network, which would be empty
        own_code = options.trust_remote_code and config.get("auto_map")
        network = None if own_code else strict_load.build_on_meta(lambda: auto_class.from_config(model_config))
        packed = hasattr(model_config, quantization.CONFIG_KEY)
        strict_load.require_plausible_size(options.name, network, files.values(), packed)
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
    except Exception as error:  # each library raises its own errors for a truncated file
        if os.path.isdir(options.name):
            weights.require_readable(options.name)  # raises an error that names the file
        raise cannot_read(options.name, error) from error
    strict_load.require_filled(options.name, report, model, files)
    quantization.require_used(model, report["unexpected_keys"], options.name)
    return model if "device_map" in model_kwargs else model.to(options.device)


def _require_no_adapter(options: LoadOptions) -> None:
    """Raise DuelError for an adapter in the checkpoint folder.

    With peft installed, transformers would add it, or load the base checkpoint that it names; without, it would not.
    """
    if cached_file(options.name, "adapter_config.json", revision=options.revision, **QUIET) is not None:
        raise DuelError(
            f"{options.name} holds an adapter (adapter_config.json) next to its weights, and transformers adds it only "
            "if peft is installed. Use a copy without the adapter's files, and pass peft=<their folder> to add it."
        )


def max_positions(model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Positions that the network can hold: the minimum over config, position table and tokenizer."""
    lengths = [getattr(model.config, name) for name in LENGTHS if getattr(model.config, name, None)]
    if getattr(model.config, "model_type", None) == "esm":  # its count starts after the padding id, even if rotary
        lengths.append(model.config.max_position_embeddings - (model.config.pad_token_id or 0) - 1)
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            lengths.append(
                len(module.weight) - module.padding_idx - 1
            )  # RoBERTa's positions start after the padding id
    lengths += [tokenizer.model_max_length] if tokenizer.model_max_length < UNBOUNDED else []
    return min(lengths, default=None)


def require_max_positions(name: str, max_length: int | None, positions: int | None) -> None:
    """Raise DuelError if neither the user nor the checkpoint bounds a row."""
    if not (max_length or positions):
        raise DuelError(f"Neither config nor tokenizer of {name} gives its number of positions; pass max_length=.")


def is_native(model: torch.nn.Module) -> bool:
    """Whether the class of a network belongs to transformers, not to a checkpoint's own code."""
    return type(model).__module__.startswith("transformers.")


def describe_model(denoiser: Any) -> dict[str, object]:
    """The part of the spec that a network defines which runs through its own forward."""
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
    described |= quantization.spec_entries(model)
    if not native:  # also if code and weights come from different repositories
        described["code"] = fingerprint.code_of(type(model))
    if denoiser.adapter:
        described["peft"] = fingerprint.adapter_of(denoiser.adapter)
    return described


def logits_of(
    model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor | None = None, **more: torch.Tensor
) -> torch.Tensor:
    """Logits (R, L, V), in whichever form the network returns them."""
    out = model(input_ids=ids, **more) if mask is None else model(input_ids=ids, attention_mask=mask, **more)
    return out if isinstance(out, torch.Tensor) else out[0] if isinstance(out, tuple) else out.logits
