"""Quantized networks: checkpoints with a `quantization_config`, or weights quantized by bitsandbytes at load.

transformers replaces the layers, reads their scales, zero points and code books, and says which package is missing.
This module checks the user's request and describes it in the spec.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from typing import Any

from transformers import BitsAndBytesConfig
from transformers.quantizers.auto import AutoHfQuantizer

from lm_eval_duel.denoisers.hub import pick_dtype
from lm_eval_duel.denoisers.load_options import LoadOptions
from lm_eval_duel.errors import DuelError

log = logging.getLogger("lm_eval.duel_mdm")
bitsandbytes_log = logging.getLogger("bitsandbytes.autograd._functions")

CONFIG_KEY = "quantization_config"


def model_kwargs(config: dict[str, Any], options: LoadOptions) -> dict[str, Any]:
    """The arguments of `from_pretrained` for a quantized network (8 bits: LLM.int8; 4 bits: nf4); empty for others."""
    own, bits = config.get(CONFIG_KEY), 8 if options.load_in_8bit else 4 if options.load_in_4bit else None
    if own is None and bits is None:
        return {}
    what = f"load_in_{bits}bit" if own is None else f"the quantization of {options.name} ({method_of(own)})"
    if own is not None and bits is not None:
        raise DuelError(f"{options.name} is quantized already ({method_of(own)}): leave load_in_{bits}bit out.")
    if own is not None and not AutoHfQuantizer.supports_quant_method(own):  # transformers would load it unquantized
        raise DuelError(f"Unknown quantization type {method_of(own)!r} of {options.name}, which transformers ignores.")
    if options.peft:
        raise DuelError(
            f"peft cannot be merged into quantized weights ({what}): it would be rounded, too. Merge it "
            "before they are quantized, or score both unquantized."
        )
    if options.dtype == "float64":
        raise DuelError(f"dtype=float64 does not work with {what}, whose products are coarser; leave dtype out.")
    if bits == 8 or (own or {}).get("load_in_8bit"):
        bitsandbytes_log.setLevel(logging.ERROR)  # it warns in every call whose input is not float16
        log.warning(
            "With 8 bits, bitsandbytes looks for outliers in all rows of a call, so numbers change a little with the "
            "batch; with 4 bits they do not"
        )
    # always explicit: otherwise transformers chooses any GPU, and a quantized network cannot be moved
    placement = {"device_map": options.device_map or {"": options.device}}
    if own:
        return placement
    if bits == 8:
        return {**placement, CONFIG_KEY: BitsAndBytesConfig(load_in_8bit=True)}
    dtype = pick_dtype(options.dtype, options.device)  # of the products
    if dtype == "auto":
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    return {**placement, CONFIG_KEY: nf4}


def method_of(scheme: dict[str, Any]) -> str:
    """The name of a quantization in config.json."""
    return str(scheme.get("quant_method") or "bitsandbytes")  # older files of bitsandbytes have no name


def is_quantized(model: Any) -> bool:
    """True if a network of transformers has quantized layers."""
    return getattr(model, "hf_quantizer", None) is not None


def spec_entries(model: Any) -> dict[str, str]:
    """The quantization as a part of the spec; empty for a network that is not quantized."""
    if not is_quantized(model):
        return {}
    config = model.config.quantization_config
    entries = config.to_diff_dict() if hasattr(config, "to_diff_dict") else config.to_dict()
    entries = {key: value for key, value in entries.items() if not key.startswith("_")}
    # experts too, which some releases of transformers fuse and do not quantise
    whole = sum(tensor.numel() for tensor in model.parameters() if tensor.is_floating_point() and tensor.itemsize > 1)
    method = getattr(model.quantization_method, "value", model.quantization_method)
    entries |= {"quant_method": str(method), "whole_parameters": whole}
    return {"quantization": json.dumps(entries, sort_keys=True, default=str)}


def require_used(model: Any, unused: Iterable[str], name: str) -> None:
    """Raise DuelError if a module with a weight leaves tensors unused: the file quantizes it, the network does not."""
    modules = dict(model.named_modules())
    lost = [key for key in sorted(unused) if hasattr(modules.get(key.rpartition(".")[0]), "weight")]
    if is_quantized(model) and lost:
        raise DuelError(
            f"{name} has quantized tensors that its network does not use, so it would misread their weights: "
            f"{', '.join(lost[:10])}."
        )
