"""The placement of a network's layers: on one device, or split over several (`device_map`)."""

from __future__ import annotations

import os
from typing import Any

import torch

from lm_eval_duel.denoisers.load_options import LoadOptions
from lm_eval_duel.errors import DuelError

AUTOMATIC = ("auto", "balanced", "balanced_low_0", "sequential")


def model_kwargs(options: LoadOptions) -> dict[str, Any]:
    """The arguments of `from_pretrained` for devices; empty if the network is moved to its one device later."""
    if options.device_map is None:
        return {}
    memory = own_gpus(options.device_map) if options.device_map in AUTOMATIC else None
    return {"device_map": options.device_map} | ({} if memory is None else {"max_memory": memory})


def own_gpus(device_map: str) -> dict[int, int] | None:
    """Free bytes of each GPU that this process may use, as for the harness's own models; None: it may use all.

    Of P processes on this machine, process p uses GPUs p, p + P, p + 2 P, ...
    """
    processes, rank = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), int(os.environ.get("LOCAL_RANK", 0))
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

    layout, unsplit = options.device_map, getattr(model, "_no_split_modules", None)
    if layout in AUTOMATIC and not unsplit:
        raise DuelError(
            f"The code of {options.name} does not say which modules must stay on one device (_no_split_modules), so "
            "it cannot be split; leave device_map, parallelize out."
        )
    try:
        if layout in AUTOMATIC:
            memory, low = own_gpus(layout), layout == "balanced_low_0"
            memory = memory if layout == "sequential" else get_balanced_memory(model, memory, unsplit, low_zero=low)
            layout = infer_auto_device_map(model, memory, unsplit)
        return dispatch_model(model, {"": layout} if isinstance(layout, str) else layout)
    except ValueError as error:
        raise DuelError(f"{options.name} cannot be placed as device_map={options.device_map}: {error}") from error


def device_of(model: Any) -> torch.device:
    """The device of a network's ids: the one that computes its input embedding, even if the weights are offloaded."""
    table = model.get_input_embeddings()
    weight = getattr(table, "weight", table)  # some networks return the parameter itself
    if not weight.is_meta:
        return weight.device
    hook = table._hf_hook  # accelerate's, which moves the weights there for each call
    return torch.device(getattr(hook, "hooks", (hook,))[0].execution_device)
