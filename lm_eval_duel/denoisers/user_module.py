"""A user's module: found inside its wrappers, called in evaluation mode, and restored."""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.denoisers import hub
from lm_eval_duel.denoisers.hf import pretrained
from lm_eval_duel.errors import DuelError

# entries of a config on which no number depends, or that are known otherwise
RUNTIME = ("_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache")


def unwrapped(model: Any) -> Any:
    """The network inside DistributedDataParallel (which waits for other ranks), torch.compile and PEFT.

    It has the same weights, and is called directly. PEFT's adapters are in its layers, so they count.
    """
    while True:
        if isinstance(model, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
            _require_adapters_in_layers(model)
            model = model.get_base_model()
        else:
            return model


def _require_adapters_in_layers(model: Any) -> None:
    """Raise DuelError for a PEFT model that does more than its network: prompt and prefix tuning, X-LoRA."""
    names = model.active_adapters
    if isinstance(names, str):
        names = [names]
    for name in names:
        config = model.peft_config.get(name)
        if config is None:
            continue
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        adds_a_prompt = getattr(config, "is_prompt_learning", False)
        if adds_a_prompt or kind == "XLORA":
            raise DuelError(
                f"A {kind} adapter is not in the network's layers, so it would be left out. Pass a function f(ids, "
                "real) that calls the PEFT model, and it as module=."
            )


@contextlib.contextmanager
def evaluating(
    module: torch.nn.Module | None,
    device: torch.device,
    autocast: torch.dtype | None = None,
) -> Iterator[None]:
    """Dropout off; autocast off, or to the given dtype; nothing compiled; restored at the end.

    No inference mode, in which a network may make tensors that it keeps, such as rotary tables, and then cannot train.
    """
    grad = torch.is_grad_enabled()
    training: list[torch.nn.Module] = []
    mixed = None  # accelerate's forward, which casts to the dtype of training
    if module is not None:
        training = [part for part in module.modules() if part.training]
        if hasattr(module, "_original_forward"):
            mixed = vars(module).get("forward")
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(grad))
        # its cache of cast weights would outlive this block, without their gradients
        mixed_precision = torch.autocast(
            device.type,
            autocast,
            enabled=autocast is not None,
            cache_enabled=False,
        )
        stack.enter_context(mixed_precision)
        if "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance"):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            for part in training:
                part.training = False  # not part.eval(), which some classes override to change weights
            if mixed is not None:
                del module.forward
            yield
        finally:
            for part in training:
                part.training = True
            if mixed is not None:
                module.forward = mixed


def digest(module: torch.nn.Module) -> str:
    """A hash (12 hexadecimal digits) of all parameters and buffers, the config, and the scales of PEFT's adapters."""
    config = getattr(module, "config", None)
    entries = config.to_dict() if hasattr(config, "to_dict") else {}
    described = sorted((key, str(value)) for key, value in entries.items() if key not in RUNTIME)
    total = hashlib.sha256(repr(described).encode())
    for name, part in module.named_modules():
        scales = getattr(part, "scaling", None)  # of PEFT's layers
        if isinstance(scales, dict):
            total.update(f"{name} {scales} {part.active_adapters} {part.disable_adapters}\n".encode())
    buffers = dict(module.named_buffers(remove_duplicate=False))
    for name, value in sorted((buffers | module.state_dict()).items()):
        if isinstance(value, torch.Tensor):
            total.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
            total.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return total.hexdigest()[:12]


def device_of(
    model: Any,
    module: torch.nn.Module | None,
    device: torch.device | str | None,
) -> torch.device:
    """The device on which a network takes its ids."""
    if device is not None:
        return hub.pick_device(str(device))
    if isinstance(model, Denoiser):
        return model.device
    if module is None:
        return torch.device("cpu")
    if hasattr(module, "get_input_embeddings"):
        return pretrained.device_of(module)
    tensors = [*module.parameters(), *module.buffers()]
    return tensors[0].device if tensors else torch.device("cpu")


def require_whole(module: torch.nn.Module) -> None:
    """Raise DuelError if this process holds only a part of a network."""
    how = _how_sharded(module)
    if how:
        raise DuelError(
            f"This process holds only a part of the weights ({how}), and each call would wait for the others. Save a "
            "checkpoint and score it with from_pretrained, or train with DistributedDataParallel."
        )


def _how_sharded(module: torch.nn.Module) -> str:
    """The way in which the weights of a network are shared out between processes; empty if each of them has all.

    Told by names, since none of these libraries need be installed.
    """
    for part in module.modules():
        names = {cls.__name__ for cls in type(part).__mro__}
        if names & {"FSDPModule", "FullyShardedDataParallel"}:
            return "FSDP"
    parameters = list(module.parameters())
    if any(hasattr(parameter, "ds_id") for parameter in parameters):
        return "DeepSpeed ZeRO-3"
    for parameter in parameters:
        if "DTensor" in (type(parameter).__name__, type(parameter.data).__name__):
            return "tensor parallelism"
    return ""
