"""PEFT adapters (LoRA), merged into the weights before anything is scored; needs the package peft."""

from __future__ import annotations

import dataclasses
import os
import re
from functools import partial
from typing import Any

import torch
from huggingface_hub import snapshot_download

from lm_eval_duel.denoisers.hf import strict_load
from lm_eval_duel.denoisers.hf.families import Family
from lm_eval_duel.denoisers.hf.native import native_name
from lm_eval_duel.denoisers.hub import short_reason
from lm_eval_duel.denoisers.load_options import LoadOptions
from lm_eval_duel.errors import DuelError

PREFIX = "base_model.model."


def fetch(options: LoadOptions) -> LoadOptions:
    """The options with the adapter as a local folder; an adapter from the hub is downloaded.

    Raises DuelError if there is none, or if the package peft is not installed.
    """
    _require_peft(options.peft)
    if os.path.isdir(options.peft):
        return options
    try:
        folder = snapshot_download(options.peft, allow_patterns=["adapter_config.json", "adapter_model.*"])
    except (OSError, ValueError) as error:
        raise DuelError(f"Cannot read adapter '{options.peft}': {short_reason(error)}") from error
    return dataclasses.replace(options, peft=folder)


def _require_peft(path: str) -> None:
    try:
        import peft  # noqa: F401
    except ImportError as error:
        raise DuelError(f"The adapter {path} needs the package peft (pip install peft): {error}") from error


def merge(model: Any, path: str, family: Family | None) -> Any:
    """`model` with the LoRA of `path` merged into its weights; its tensors may have the names of the family's own code.

    Raises DuelError if the adapter is not a LoRA, or if one of its tensors does not fit.
    """
    try:
        from peft import (
            PeftConfig,
            get_peft_model,
            get_peft_model_state_dict,
            load_peft_weights,
            set_peft_model_state_dict,
        )
    except ImportError as error:
        raise DuelError(f"The adapter {path} needs the package peft (pip install peft): {error}") from error
    try:
        config, tensors = PeftConfig.from_pretrained(path), load_peft_weights(path, device="cpu")
    except Exception as error:  # peft raises the errors of many libraries
        raise DuelError(f"Cannot read adapter '{path}': {short_reason(error)}") from error
    if str(config.peft_type).rsplit(".", 1)[-1] != "LORA":
        raise DuelError(f"The adapter {path} is a {config.peft_type}; only LoRA can be merged.")
    renamed = partial(native_name, family) if family else str
    places = {key: PREFIX + renamed(key.removeprefix(PREFIX)) for key in tensors}
    modules = {
        _module(place): _module(key) for key, place in places.items() if ".lora_" in key
    }  # native -> in the file
    known = {name for name, _ in model.named_modules()}
    what = f"The adapter {path} does not fit this network"
    if not modules:
        raise DuelError(f"{what}: it has no LoRA tensors.")
    if unknown := sorted(modules[native] for native in modules.keys() - known):
        names = ", ".join(unknown[:10]) + (", ..." if len(unknown) > 10 else "")
        raise DuelError(f"{what}: the network has no {names}.")
    _untie(model, set(modules))
    for field in ("rank_pattern", "alpha_pattern"):
        setattr(config, field, _by_module(getattr(config, field, None) or {}, modules))
    config.target_modules, config.exclude_modules = set(modules), None
    config.inference_mode, config.task_type = True, None  # a task type requires more of the network's class
    placed = {places[key]: value for key, value in tensors.items()}
    _require_ranks(path, config, placed, modules)
    origin = {place: key for key, place in places.items()}

    def name(key: str) -> str:
        module = _module(key)
        return origin.get(key) or key.replace(module, modules.get(module, module))

    try:
        adapted = get_peft_model(model, config)
        own = get_peft_model_state_dict(adapted, save_embedding_layers=False)
        expected = {key: tuple(value.shape) for key, value in own.items() if ".lora_" in key}
        faults = strict_load.compare(expected, {key: tuple(value.shape) for key, value in placed.items()})
        strict_load.require_no_faults(what, faults, name)
        report = set_peft_model_state_dict(adapted, placed)
    except DuelError:
        raise
    except (RuntimeError, ValueError, KeyError) as error:
        raise DuelError(f"{what}: {' '.join(str(error).split())[:500]}") from error
    missing = [key for key in report.missing_keys if ".lora_" in key]
    strict_load.require_no_faults(what, strict_load.Faults(missing, report.unexpected_keys), name)
    return adapted.merge_and_unload()


def _require_ranks(path: str, config: Any, placed: dict[str, torch.Tensor], modules: dict[str, str]) -> None:
    """Raise DuelError if ranks of config and file differ, before peft allocates matrices of the config's ranks."""
    wrong = []
    for place, value in placed.items():
        native, rank = _module(place), config.rank_pattern.get(re.escape(_module(place)), config.r)
        if re.search(r"\.lora_(embedding_)?A\b", place) and tuple(value.shape[:1]) != (rank,):
            wrong.append(f"{modules[native]} is {tuple(value.shape)}, not of rank {rank}")
    if wrong:
        raise DuelError(
            f"The ranks of the adapter {path} differ from its adapter_config.json: {', '.join(sorted(wrong)[:10])}."
        )


def _untie(model: Any, modules: set[str]) -> None:
    """Give the head weights of its own if they are tied to the embedding and the adapter changes one of the two."""
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
