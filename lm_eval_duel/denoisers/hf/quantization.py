"""Networks of coarse weights: a checkpoint that says so (`quantization_config`), or made so by bitsandbytes at load.

transformers puts the layers in place and reads what a file holds for them (scales, zero points, code books). Here: what
is asked for, whether its package is there before any weight is read, and how the results name it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from transformers import BitsAndBytesConfig
from transformers.quantizers.auto import AutoHfQuantizer

from lm_eval_duel.denoisers import hub
from lm_eval_duel.denoisers.hf.device_map import device_of
from lm_eval_duel.denoisers.load_options import LoadOptions
from lm_eval_duel.errors import DuelError

log = logging.getLogger("lm_eval.duel_mdm")
products = logging.getLogger("bitsandbytes.autograd._functions")

SAID = "quantization_config"


def options(raw: dict[str, Any], asked: LoadOptions) -> dict[str, Any]:
    """What `from_pretrained` is told: nothing, for a network that is not quantised.

    `raw`: the checkpoint's config. Raises DuelError for what does not go together, and where a package or a device is
    missing.
    """
    said, bits = raw.get(SAID), 8 if asked.load_in_8bit else 4 if asked.load_in_4bit else None
    if said is None and bits is None:
        return {}
    what = f"load_in_{bits}bit" if said is None else f"the quantisation of {asked.name} ({method_of(said)})"
    if said is not None and bits is not None:
        raise DuelError(f"{asked.name} is quantised already ({method_of(said)}): leave load_in_{bits}bit out.")
    if asked.peft:
        raise DuelError(
            f"peft is merged into the weights, and merged into quantised ones ({what}) it would be rounded with them: "
            "another spec than the adapter's. Merge it into the weights before they are quantised, or score the two "
            "unquantised."
        )
    if asked.dtype == "float64":
        raise DuelError(f"dtype=float64 does not go with {what}, whose products are coarser; leave dtype out.")
    if bits is not None and importlib.util.find_spec("bitsandbytes") is None:
        raise DuelError(f"load_in_{bits}bit needs the package bitsandbytes (pip install bitsandbytes).")
    scheme = said or _bitsandbytes(bits, hub.pick_dtype(asked.dtype, asked.device), raw)
    # where the one device is not said, transformers takes any GPU, and a quantised network cannot be moved
    there = asked.device_map or {"": asked.device}
    try:
        quantizer = AutoHfQuantizer.from_config(scheme, pre_quantized=said is not None)
        quantizer.validate_environment(device_map=there, weights_only=True)
    except Exception as error:  # a package, a release, a device, or an entry of the config
        raise DuelError(f"No network for {what}: {hub.said(error)}") from error
    if getattr(quantizer.quantization_config, "load_in_8bit", False):
        products.setLevel(logging.ERROR)  # it warns at every one of inputs that are not float16
        log.warning(
            "8 bits of bitsandbytes look for outliers in all rows of a call at once, so numbers change a little with "
            "batch size and with what is scored beside; 4 bits do not"
        )
    return {"device_map": there} | ({} if said else {SAID: scheme})


def _bitsandbytes(bits: int, dtype: torch.dtype | str, raw: dict[str, Any]) -> BitsAndBytesConfig:
    """8 bits: LLM.int8. 4 bits: nf4, multiplied in the network's dtype."""
    if bits == 8:
        return BitsAndBytesConfig(load_in_8bit=True)
    if dtype == "auto":
        dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)


def method_of(said: dict[str, Any]) -> str:
    """The name of a quantisation in config.json."""
    return str(said.get("quant_method") or "bitsandbytes")  # older files of bitsandbytes do not say


def is_quantized(model: Any) -> bool:
    """Whether a network of transformers has quantised layers."""
    return getattr(model, "hf_quantizer", None) is not None


def _method(model: Any) -> str:
    return str(getattr(model.quantization_method, "value", model.quantization_method))


def described(model: Any) -> dict[str, str]:
    """The quantisation as a part of the spec; nothing, for a network that is not quantised."""
    if not is_quantized(model):
        return {}
    config = model.config.quantization_config
    entries = config.to_diff_dict() if hasattr(config, "to_diff_dict") else config.to_dict()
    entries = {key: value for key, value in entries.items() if not key.startswith("_")}
    # those of experts too, which some releases of transformers fuse and leave as they are
    whole = sum(tensor.numel() for tensor in model.parameters() if tensor.is_floating_point() and tensor.itemsize > 1)
    entries |= {"quant_method": _method(model), "whole_parameters": whole}
    return {"quantization": json.dumps(entries, sort_keys=True, default=str)}


def require_used(model: Any, unused: Iterable[str], name: str) -> None:
    """Raise DuelError for tensors left over beside a weight: the file has quantised what the network has not."""
    modules = dict(model.named_modules())
    lost = [key for key in sorted(unused) if hasattr(modules.get(key.rpartition(".")[0]), "weight")]
    if is_quantized(model) and lost:
        raise DuelError(
            f"{name} has quantised tensors that its network does not take, so weights beside them would be read wrong: "
            f"{', '.join(lost[:10])}."
        )


@contextlib.contextmanager
def first_calls(model: Any, name: str) -> Iterator[None]:
    """The first calls of a network: what a quantised one raises comes from its file, and is a DuelError."""
    try:
        if is_quantized(model):  # some packages unpack weights when the whole network is called, and only then
            with torch.no_grad():
                model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=device_of(model)))
        yield
    except (DuelError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if not is_quantized(model):
            raise
        raise DuelError(
            f"{name} was loaded as quantised ({_method(model)}) and does not run: "
            f"{hub.said(error)}. Its file may not hold every weight as its config says, or this release does not "
            "run on this device."
        ) from error
