"""PEFT adapters (LoRA), merged into the weights before anything is scored; needs the package peft."""

from __future__ import annotations

import dataclasses
import os
import re
from functools import partial
from typing import Any

import torch
from huggingface_hub import snapshot_download

from lm_eval_duel.denoisers.hf import strict_load as filling
from lm_eval_duel.denoisers.hf.families import Family
from lm_eval_duel.denoisers.hf.native import native_name
from lm_eval_duel.denoisers.hub import said
from lm_eval_duel.denoisers.load_options import LoadOptions
from lm_eval_duel.errors import DuelError

PREFIX = "base_model.model."


def fetched(asked: LoadOptions) -> LoadOptions:
    """The same with the adapter in a local folder: of a hub name, the snapshot that is read and hashed.

    Raises DuelError where there is none, or the package peft is not installed.
    """
    _require_peft(asked.peft)
    if os.path.isdir(asked.peft):
        return asked
    try:
        folder = snapshot_download(asked.peft, allow_patterns=["adapter_config.json", "adapter_model.*"])
    except (OSError, ValueError) as error:
        raise DuelError(f"Cannot read adapter '{asked.peft}': {said(error)}") from error
    return dataclasses.replace(asked, peft=folder)


def _require_peft(path: str) -> None:
    try:
        import peft  # noqa: F401
    except ImportError as error:
        raise DuelError(f"The adapter {path} needs the package peft (pip install peft): {error}") from error


def merge(model: Any, path: str, family: Family | None) -> Any:
    """`model` with the LoRA of `path` added to its weights; the LoRA may carry the names of the family's own code.

    Raises DuelError where the adapter is no LoRA, or has a tensor that finds no place.
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
        raise DuelError(f"Cannot read adapter '{path}': {said(error)}") from error
    if str(config.peft_type).rsplit(".", 1)[-1] != "LORA":
        raise DuelError(f"The adapter {path} is a {config.peft_type}; only LoRA can be merged.")
    renamed = partial(native_name, family) if family else str
    places = {key: PREFIX + renamed(key.removeprefix(PREFIX)) for key in tensors}
    modules = {_module(place): _module(key) for key, place in places.items() if ".lora_" in key}  # here -> in the file
    known = {name for name, _ in model.named_modules()}
    what = f"The adapter {path} does not fit this network"
    if not modules:
        raise DuelError(f"{what}: no LoRA tensors at all.")
    if lost := sorted(modules[here] for here in modules.keys() - known):
        raise DuelError(f"{what}: it has no {', '.join(lost[:10])}{', ...' if len(lost) > 10 else ''}.")
    _untie(model, set(modules))
    for field in ("rank_pattern", "alpha_pattern"):
        setattr(config, field, _by_module(getattr(config, field, None) or {}, modules))
    config.target_modules, config.exclude_modules = set(modules), None
    config.inference_mode, config.task_type = True, None  # a task wants more of the network's class
    placed = {places[key]: value for key, value in tensors.items()}
    _require_ranks(path, config, placed, modules)
    origin = {place: key for key, place in places.items()}

    def name(key: str) -> str:
        module = _module(key)
        return origin.get(key) or key.replace(module, modules.get(module, module))

    try:
        adapted = get_peft_model(model, config)
        own = get_peft_model_state_dict(adapted, save_embedding_layers=False)
        wanted = {key: tuple(value.shape) for key, value in own.items() if ".lora_" in key}
        filling.require(what, filling.compare(wanted, {key: tuple(value.shape) for key, value in placed.items()}), name)
        report = set_peft_model_state_dict(adapted, placed)
    except DuelError:
        raise
    except (RuntimeError, ValueError, KeyError) as error:
        raise DuelError(f"{what}: {' '.join(str(error).split())[:500]}") from error
    lacking = [key for key in report.missing_keys if ".lora_" in key]
    filling.require(what, filling.Faults(lacking, report.unexpected_keys), name)
    return adapted.merge_and_unload()


def _require_ranks(path: str, config: Any, placed: dict[str, torch.Tensor], modules: dict[str, str]) -> None:
    """Raise DuelError where the config says other ranks than the file has: matrices of any size would be made."""
    wrong = []
    for place, value in placed.items():
        here, rank = _module(place), config.rank_pattern.get(re.escape(_module(place)), config.r)
        if re.search(r"\.lora_(embedding_)?A\b", place) and tuple(value.shape[:1]) != (rank,):
            wrong.append(f"{modules[here]} is {tuple(value.shape)}, not of rank {rank}")
    if wrong:
        raise DuelError(
            f"The adapter {path} has other ranks than its adapter_config.json says: {', '.join(sorted(wrong)[:10])}."
        )


def _untie(model: Any, modules: set[str]) -> None:
    """A head of its own, where head and embedding are one and the adapter changes only either."""
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is not table.weight:
        return
    if any(module in (head, table) for name, module in model.named_modules() if name in modules):
        head.weight = torch.nn.Parameter(head.weight.detach().clone())


def _module(key: str) -> str:
    return key.removeprefix(PREFIX).split(".lora_")[0]


def _by_module(patterns: dict[str, int], modules: dict[str, str]) -> dict[str, int]:
    """Exceptions that the adapter makes for modules by a pattern of their names in its file, by their names here."""
    found = {}
    for here, there in modules.items():
        pattern = next((pattern for pattern in patterns if re.match(rf"(.*\.)?({pattern})$", there)), None)
        if pattern is not None:
            found[re.escape(here)] = patterns[pattern]
    return found
