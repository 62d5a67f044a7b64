"""Where the layers of a network lie: on one device, or shared out over several (`device_map`)."""

from __future__ import annotations

import os
from typing import Any

import torch

from lm_eval_duel.denoisers.load_options import LoadOptions
from lm_eval_duel.errors import DuelError

SHARED_OUT = ("auto", "balanced", "balanced_low_0", "sequential")


def options(asked: LoadOptions) -> dict[str, Any]:
    """What `from_pretrained` is told about devices: nothing, where the network is moved to its one device later.

    Raises DuelError where this machine has fewer GPUs than processes that share them.
    """
    if asked.device_map is None:
        return {}
    own = own_gpus(asked.device_map) if asked.device_map in SHARED_OUT else None
    return {"device_map": asked.device_map} | ({} if own is None else {"max_memory": own})


def own_gpus(device_map: str) -> dict[int, int] | None:
    """Free bytes of each GPU that is this process's, as the harness's own models share them out; None: all are.

    Of P processes on this machine, process p has GPUs p, p + P, p + 2 P, ...
    """
    processes, number = (
        int(os.environ.get(name, least)) for name, least in (("LOCAL_WORLD_SIZE", 1), ("LOCAL_RANK", 0))
    )
    if processes == 1 or not torch.cuda.is_available():
        return None
    gpus = torch.cuda.device_count()
    if gpus < processes:
        raise DuelError(
            f"{processes} processes share {gpus} GPUs of this machine (device_map, parallelize), and each needs one: "
            f"start at most {gpus} (accelerate launch --num_processes {gpus} ...)."
        )
    if device_map == "balanced_low_0":  # accelerate looks for the GPUs 1, 2, ...
        raise DuelError("device_map=balanced_low_0 goes with one process on a machine; take auto.")
    return {gpu: torch.cuda.mem_get_info(gpu)[0] for gpu in range(number, gpus, processes)}


def spread(model: Any, asked: LoadOptions) -> Any:
    """A network that lies in memory, moved to its device or shared out; raises DuelError where it cannot be."""
    if asked.device_map is None:
        return model.to(asked.device)
    from accelerate import dispatch_model, infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    places, whole = asked.device_map, getattr(model, "_no_split_modules", None)
    if places in SHARED_OUT and not whole:
        raise DuelError(
            f"The code of {asked.name} does not say which of its modules stay on one device (_no_split_modules), so it "
            "cannot be shared out; leave device_map, parallelize out."
        )
    try:
        if places in SHARED_OUT:
            memory, low = own_gpus(places), places == "balanced_low_0"
            memory = memory if places == "sequential" else get_balanced_memory(model, memory, whole, low_zero=low)
            places = infer_auto_device_map(model, memory, whole)
        return dispatch_model(model, {"": places} if isinstance(places, str) else places)
    except ValueError as error:
        raise DuelError(f"{asked.name} cannot be laid out as device_map={asked.device_map}: {error}") from error


def device_of(model: Any) -> torch.device:
    """Where a network takes its ids: where its input embedding is computed, wherever its weights are kept."""
    table = model.get_input_embeddings()
    weight = getattr(table, "weight", table)  # some networks say the bare parameter
    if not weight.is_meta:
        return weight.device
    hook = table._hf_hook  # accelerate's, which brings the weights there for each call
    return torch.device(getattr(hook, "hooks", (hook,))[0].execution_device)
