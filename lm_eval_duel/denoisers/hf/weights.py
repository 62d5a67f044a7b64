"""Weights as a user wants them: on several devices, quantized, with a LoRA merged.

    placement_kwargs, place  `device_map`: the layers on several devices
    quantization_kwargs      checkpoints with a `quantization_config`, or weights quantized by bitsandbytes at load
    merge_adapter            a LoRA, merged into the weights before anything is scored

transformers replaces quantized layers, reads their scales, zero points and code books, and says which package is
missing. Here the user's request is checked, and described in the spec.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
from collections.abc import Iterable
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import BitsAndBytesConfig
from transformers.quantizers.auto import AutoHfQuantizer

from lm_eval_duel.denoisers.hf.families import Family
from lm_eval_duel.denoisers.hub import explained, pick_dtype, require_none
from lm_eval_duel.denoisers.load_options import LoadOptions
from lm_eval_duel.errors import DuelError

log = logging.getLogger("lm_eval.duel_mdm")
bitsandbytes_log = logging.getLogger("bitsandbytes.autograd._functions")

AUTOMATIC = ("auto", "balanced", "balanced_low_0", "sequential")  # device maps
CONFIG_KEY = "quantization_config"
ADAPTER_PREFIX = "base_model.model."  # of tensor names in an adapter's file


def placement_kwargs(options: LoadOptions) -> dict[str, Any]:
    """The arguments of `from_pretrained` for a `device_map`."""
    model_kwargs: dict[str, Any] = {"device_map": options.device_map}
    if options.device_map in AUTOMATIC:
        memory = own_gpus(options.device_map)
        if memory is not None:
            model_kwargs["max_memory"] = memory
    return model_kwargs


def own_gpus(device_map: str) -> dict[int, int] | None:
    """Free bytes of each GPU that this process may use, as for the harness's own models; None: it may use all.

    Of P processes on this machine, process p uses GPUs p, p + P, p + 2 P, ...
    """
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    rank = int(os.environ.get("LOCAL_RANK", 0))
    if processes == 1 or not torch.cuda.is_available():
        return None

    gpus = torch.cuda.device_count()
    if gpus < processes:
        raise DuelError(
            f"{processes} processes share {gpus} GPUs of this machine (device_map, parallelize): start at most {gpus} "
            f"(accelerate launch --num_processes {gpus} ...)."
        )
    if device_map == "balanced_low_0":  # accelerate would use GPUs 1, 2, ...
        raise DuelError("device_map=balanced_low_0 works with one process per machine only; use auto.")
    return {gpu: torch.cuda.mem_get_info(gpu)[0] for gpu in range(rank, gpus, processes)}


def place(model: Any, options: LoadOptions) -> Any:
    """A loaded network, moved to its device or split over several; raises DuelError if that is not possible."""
    if options.device_map is None:
        return model.to(options.device)
    from accelerate import dispatch_model, infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    layout = options.device_map
    unsplit = getattr(model, "_no_split_modules", None)
    if layout in AUTOMATIC and not unsplit:
        raise DuelError(
            f"The code of {options.name} does not say which modules must stay on one device (_no_split_modules), so "
            "it cannot be split; leave device_map, parallelize out."
        )
    try:
        if layout in AUTOMATIC:
            memory = own_gpus(layout)
            if layout != "sequential":
                low_zero = layout == "balanced_low_0"
                memory = get_balanced_memory(model, memory, unsplit, low_zero=low_zero)
            layout = infer_auto_device_map(model, memory, unsplit)
        if isinstance(layout, str):  # one device for the whole network
            layout = {"": layout}
        return dispatch_model(model, layout)
    except ValueError as error:
        raise DuelError(f"{options.name} cannot be placed as device_map={options.device_map}: {error}") from error


def quantization_kwargs(config: dict[str, Any], options: LoadOptions) -> dict[str, Any]:
    """The arguments of `from_pretrained` for a quantized network (8 bits: LLM.int8; 4 bits: nf4).

    Raises DuelError for options that do not go with quantized weights.
    """
    scheme = config.get(CONFIG_KEY)  # of the files
    bits = None  # wanted by the user
    if options.load_in_8bit:
        bits = 8
    elif options.load_in_4bit:
        bits = 4
    _require_quantizable(scheme, bits, options)
    if bits == 8 or (scheme or {}).get("load_in_8bit"):
        bitsandbytes_log.setLevel(logging.ERROR)  # it warns in every call whose input is not float16
        log.warning(
            "With 8 bits, bitsandbytes looks for outliers in all rows of a call, so numbers change a little with the "
            "batch; with 4 bits they do not"
        )

    # always explicit: otherwise transformers chooses any GPU, and a quantized network cannot be moved
    placement = {"device_map": options.device_map or {"": options.device}}
    if scheme:
        return placement
    if bits == 8:
        int8 = BitsAndBytesConfig(load_in_8bit=True)
        return {**placement, CONFIG_KEY: int8}
    dtype = pick_dtype(options.dtype, options.device)  # of the products
    if dtype == "auto":
        stored = config.get("dtype") or config.get("torch_dtype") or "float32"
        dtype = str(stored).removeprefix("torch.")
    nf4 = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=dtype,
    )
    return {**placement, CONFIG_KEY: nf4}


def _require_quantizable(scheme: dict[str, Any] | None, bits: int | None, options: LoadOptions) -> None:
    """Raise DuelError for options that do not go with quantized weights: by the files' `scheme`, or in `bits` bits."""
    what = f"load_in_{bits}bit"
    if scheme is not None:
        method = method_of(scheme)
        what = f"the quantization of {options.name} ({method})"
        if bits is not None:
            raise DuelError(f"{options.name} is quantized already ({method}): leave load_in_{bits}bit out.")
        if not AutoHfQuantizer.supports_quant_method(scheme):  # transformers would load it unquantized
            raise DuelError(f"Unknown quantization type {method!r} of {options.name}, which transformers ignores.")
    if options.peft:
        raise DuelError(
            f"peft cannot be merged into quantized weights ({what}): it would be rounded, too. Merge it "
            "before they are quantized, or score both unquantized."
        )
    if options.dtype == "float64":
        raise DuelError(f"dtype=float64 does not work with {what}, whose products are coarser; leave dtype out.")


def method_of(scheme: dict[str, Any]) -> str:
    """The name of a quantization in config.json."""
    return str(scheme.get("quant_method") or "bitsandbytes")  # older files of bitsandbytes have no name


def quantization_entries(model: Any) -> dict[str, str]:
    """The quantization of a network as a part of the spec."""
    config = model.config.quantization_config
    described = config.to_diff_dict() if hasattr(config, "to_diff_dict") else config.to_dict()
    entries = {key: value for key, value in described.items() if not key.startswith("_")}
    method = getattr(model.quantization_method, "value", model.quantization_method)
    entries["quant_method"] = str(method)

    # How many parameters stay whole: experts too, which some releases of transformers fuse and do not quantize.
    whole = 0
    for tensor in model.parameters():
        if tensor.is_floating_point() and tensor.itemsize > 1:
            whole += tensor.numel()
    entries["whole_parameters"] = whole
    return {"quantization": json.dumps(entries, sort_keys=True, default=str)}


def require_quantized_tensors_used(model: Any, unused: Iterable[str], name: str) -> None:
    """Raise DuelError if a module with a weight leaves tensors unused: the file quantizes it, the network does not."""
    modules = dict(model.named_modules())
    lost = []
    for key in sorted(unused):
        module_name, _, _ = key.rpartition(".")
        if hasattr(modules.get(module_name), "weight"):
            lost.append(key)
    if lost:
        raise DuelError(
            f"{name} has quantized tensors that its network does not use, so it would misread their weights: "
            f"{', '.join(lost[:10])}."
        )


def fetch_adapter(options: LoadOptions) -> LoadOptions:
    """The options with the adapter, if there is one, as a local folder; one from the hub is downloaded."""
    if options.peft is None:
        return options
    with explained(options.peft, "read adapter"):
        import peft  # noqa: F401, before any weight is read

        if os.path.isdir(options.peft):
            return options
        folder = snapshot_download(options.peft, allow_patterns=["adapter_config.json", "adapter_model.*"])
    return dataclasses.replace(options, peft=folder)


def merge_adapter(model: Any, path: str | None, family: Family | None = None) -> Any:
    """`model` with the LoRA of `path`, if any, merged; its tensors may have the names of the family's own code."""
    if path is None:
        return model
    from peft import PeftConfig, get_peft_model, load_peft_weights, set_peft_model_state_dict

    with explained(path, "read adapter"):
        config = PeftConfig.from_pretrained(path)
        tensors = load_peft_weights(path, device="cpu")
        if str(config.peft_type).rsplit(".", 1)[-1] != "LORA":
            raise DuelError(f"The adapter {path} is a {config.peft_type}; only LoRA can be merged.")
        native_tensors = {}
        modules = {}  # those with an adapter: native names, and the name of each in the file
        for key, value in tensors.items():
            in_file = key.removeprefix(ADAPTER_PREFIX)
            native = family.native_name(in_file) if family else in_file
            native_tensors[ADAPTER_PREFIX + native] = value
            if ".lora_" in native:
                modules[_module(native)] = _module(in_file)
        _untie(model, set(modules))

        for field in ("rank_pattern", "alpha_pattern"):
            patterns = getattr(config, field, None) or {}
            setattr(config, field, _by_module(patterns, modules))
        config.target_modules = set(modules)
        config.exclude_modules = None
        config.inference_mode = True
        config.task_type = None  # a task type requires more of the network's class
        adapted = get_peft_model(model, config)

        report = set_peft_model_state_dict(adapted, native_tensors)
        missing = []
        for key in report.missing_keys:
            if ".lora_" in key:  # the network's own weights are not in the file
                missing.append(key.replace(".default.", "."))
        # whole weights, which peft would load without saying so
        whole = [key for key in native_tensors if ".lora_" not in key]
        require_none(f"The adapter {path} does not fit this network", missing, {*report.unexpected_keys, *whole})
        return adapted.merge_and_unload()


def _untie(model: Any, modules: set[str]) -> None:
    """Untie the head's weights from the embedding if the adapter changes one of the two."""
    head = model.get_output_embeddings()
    table = model.get_input_embeddings()
    if head is None or head.weight is not table.weight:
        return
    changed = [module for name, module in model.named_modules() if name in modules]
    if any(module in (head, table) for module in changed):
        head.weight = torch.nn.Parameter(head.weight.detach().clone())


def _module(key: str) -> str:
    """The name of the module that a tensor of an adapter belongs to."""
    module, _, _ = key.removeprefix(ADAPTER_PREFIX).partition(".lora_")
    return module


def _by_module(patterns: dict[str, int], modules: dict[str, str]) -> dict[str, int]:
    """Values of an adapter's config by patterns of module names in its file, as values by native names."""
    values = {}
    for native, in_file in modules.items():
        for pattern, value in patterns.items():  # as in peft, the first that matches counts
            if re.match(rf"(.*\.)?({pattern})$", in_file):
                values[re.escape(native)] = value
                break
    return values
