"""PEFT adapters (LoRA), merged into the weights before anything is scored; needs the package peft."""

from __future__ import annotations

import dataclasses
import os
import re
from functools import partial
from typing import Any

import torch
from huggingface_hub import snapshot_download

from lm_eval_duel.denoisers.asked import Asked
from lm_eval_duel.denoisers.families import Family, native_name
from lm_eval_duel.denoisers.hub import said
from lm_eval_duel.errors import DuelError

PREFIX = "base_model.model."


def fetched(asked: Asked) -> Asked:
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
    from peft import PeftConfig, get_peft_model, load_peft_weights, set_peft_model_state_dict

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
    if not modules or modules.keys() - known:
        lost = ", ".join(sorted(modules.keys() - known)[:10]) or "no LoRA tensors at all"
        raise DuelError(f"The adapter {path} does not fit this network: {lost}.")
    _untie(model, set(modules))
    for field in ("rank_pattern", "alpha_pattern"):
        setattr(config, field, _by_module(getattr(config, field, None) or {}, modules))
    config.target_modules, config.exclude_modules = set(modules), None
    config.inference_mode, config.task_type = True, None  # a task wants more of the network's class
    try:
        adapted = get_peft_model(model, config)
        report = set_peft_model_state_dict(adapted, {places[key]: value for key, value in tensors.items()})
    except (RuntimeError, ValueError, KeyError) as error:
        problem = " ".join(str(error).split())[:500]
        raise DuelError(f"The adapter {path} does not fit this network: {problem}") from error
    lacking = [key for key in report.missing_keys if ".lora_" in key]
    for problem, keys in (("tensors without a place", report.unexpected_keys), ("no tensors for", lacking)):
        if keys:
            raise DuelError(f"The adapter {path} has {problem}: {', '.join(keys[:10])}.")
    return adapted.merge_and_unload()


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
