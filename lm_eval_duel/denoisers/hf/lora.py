"""PEFT adapters (LoRA), merged into the weights before anything is scored; needs the package peft."""

from __future__ import annotations

import dataclasses
import os
import re
from typing import Any

import torch
from huggingface_hub import snapshot_download

from lm_eval_duel.denoisers.hf import strict_load
from lm_eval_duel.denoisers.hf.families import Family
from lm_eval_duel.denoisers.hub import explained
from lm_eval_duel.denoisers.load_options import LoadOptions
from lm_eval_duel.errors import DuelError

PREFIX = "base_model.model."


def fetch(options: LoadOptions) -> LoadOptions:
    """The options with the adapter, if there is one, as a local folder; one from the hub is downloaded."""
    if options.peft is None:
        return options
    with explained(options.peft, "read adapter"):
        import peft  # noqa: F401, before any weight is read

        if os.path.isdir(options.peft):
            return options
        folder = snapshot_download(options.peft, allow_patterns=["adapter_config.json", "adapter_model.*"])
    return dataclasses.replace(options, peft=folder)


def merge(model: Any, path: str | None, family: Family | None = None) -> Any:
    """`model` with the LoRA of `path`, if any, merged; its tensors may have the names of the family's own code."""
    if path is None:
        return model
    from peft import PeftConfig, get_peft_model, load_peft_weights, set_peft_model_state_dict

    with explained(path, "read adapter"):
        config, tensors = PeftConfig.from_pretrained(path), load_peft_weights(path, device="cpu")
        if str(config.peft_type).rsplit(".", 1)[-1] != "LORA":
            raise DuelError(f"The adapter {path} is a {config.peft_type}; only LoRA can be merged.")
        bare = {key.removeprefix(PREFIX): value for key, value in tensors.items()}
        placed = {PREFIX + (family.native_name(key) if family else key): value for key, value in bare.items()}
        modules = {_module(key): _module(own) for key, own in zip(placed, bare, strict=True) if ".lora_" in key}
        _untie(model, set(modules))
        for field in ("rank_pattern", "alpha_pattern"):
            setattr(config, field, _by_module(getattr(config, field, None) or {}, modules))
        config.target_modules, config.exclude_modules = set(modules), None
        config.inference_mode, config.task_type = True, None  # a task type requires more of the network's class
        adapted = get_peft_model(model, config)
        report = set_peft_model_state_dict(adapted, placed)
        missing = [key.replace(".default.", ".") for key in report.missing_keys if ".lora_" in key]
        unknown = {*report.unexpected_keys, *(key for key in placed if ".lora_" not in key)}  # peft takes weights, too
        strict_load.require_none(f"The adapter {path} does not fit this network", missing, sorted(unknown))
        return adapted.merge_and_unload()


def _untie(model: Any, modules: set[str]) -> None:
    """Untie the head's weights from the embedding if the adapter changes one of the two."""
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is not table.weight:
        return
    if any(module in (head, table) for name, module in model.named_modules() if name in modules):
        head.weight = torch.nn.Parameter(head.weight.detach().clone())


def _module(key: str) -> str:
    return key.removeprefix(PREFIX).split(".lora_")[0]


def _by_module(patterns: dict[str, int], modules: dict[str, str]) -> dict[str, int]:
    """Values of an adapter's config by patterns of module names in its file, as values by native names."""
    values = {}
    for native, in_file in modules.items():
        pattern = next((pattern for pattern in patterns if re.match(rf"(.*\.)?({pattern})$", in_file)), None)
        if pattern is not None:
            values[re.escape(native)] = patterns[pattern]
    return values
