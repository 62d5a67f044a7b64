"""PEFT adapters (LoRA), merged into the weights before anything is scored; needs the package peft."""

from __future__ import annotations

import re
from typing import Any

from lm_eval_duel.denoisers.families import Family
from lm_eval_duel.denoisers.hub import first_line
from lm_eval_duel.errors import DuelError

PREFIX = "base_model.model."


def merge(model: Any, path: str, family: Family | None) -> Any:
    """`model` with the LoRA of `path` added to its weights; the LoRA may carry the names of the family's own code.

    Raises DuelError where the adapter is no LoRA, or has a tensor that finds no place.
    """
    from peft import PeftConfig, get_peft_model, load_peft_weights, set_peft_model_state_dict

    try:
        config, tensors = PeftConfig.from_pretrained(path), load_peft_weights(path, device="cpu")
    except Exception as error:  # peft raises the errors of many libraries
        raise DuelError(f"Cannot read adapter '{path}': {type(error).__name__}: {first_line(error)}") from error
    if str(config.peft_type).rsplit(".", 1)[-1] != "LORA":
        raise DuelError(f"The adapter {path} is a {config.peft_type}; only LoRA can be merged.")
    renamed = {}
    for key, value in tensors.items():
        inner = key.removeprefix(PREFIX)
        for pattern, replacement in family.rename if family else ():
            inner, count = re.subn(pattern, replacement, inner)
            if count:
                break
        renamed[PREFIX + inner] = value
    modules = {key.removeprefix(PREFIX).split(".lora_")[0] for key in renamed if ".lora_" in key}
    known = {name for name, _ in model.named_modules()}
    if not modules or modules - known:
        lost = ", ".join(sorted(modules - known)[:10]) or "no LoRA tensors at all"
        raise DuelError(f"The adapter {path} does not fit this network: {lost}.")
    config.target_modules, config.inference_mode = modules, True
    adapted = get_peft_model(model, config)
    report = set_peft_model_state_dict(adapted, renamed)
    if report.unexpected_keys:
        raise DuelError(f"The adapter {path} has tensors without a place: {', '.join(report.unexpected_keys[:10])}.")
    return adapted.merge_and_unload()
