"""A checkpoint's network in the class that its authors name, to compare with the one that runs here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers

from lm_eval_duel.demo import resolve
from lm_eval_duel.denoisers import hub
from lm_eval_duel.denoisers.hf import remote_code
from lm_eval_duel.denoisers.load_options import LoadOptions
from lm_eval_duel.errors import DuelError

READ = ("dtype", "revision", "trust_remote_code")  # network arguments that concern this class, too


def load(name: str, device: str | None, network: Mapping[str, Any]) -> torch.nn.Module:
    """The network of a checkpoint, from its own code, if that is trusted, or from a class of transformers."""
    for argument in ("peft", "load_in_8bit", "load_in_4bit", "device_map"):
        if network.get(argument):
            raise DuelError(f"{argument} changes the network or where it is.")
    arguments = {key: network[key] for key in READ if key in network}
    options = hub.pin_revision(LoadOptions(resolve(name), hub.pick_device(device), **arguments))
    config = hub.read_config(options.name, options.revision)
    if any(name in (config.get("auto_map") or {}) for name in remote_code.HEADED):
        if not options.trust_remote_code:
            raise DuelError("its own code is run only where it is trusted; pass trust_remote_code=true.")
        folder = hub.local_folder(options.name, options.revision)
        model = remote_code.own_network(config, LoadOptions(folder, options.device, **arguments))
        return model.to(options.device).eval()
    kind = next((getattr(transformers, each, None) for each in config.get("architectures") or ()), None)
    if kind is None:
        raise DuelError("it has no code, and transformers has no class for it.")
    dtype = hub.pick_dtype(options.dtype, options.device)
    model = kind.from_pretrained(options.name, dtype=dtype, revision=options.revision)
    return model.to(options.device).eval()
