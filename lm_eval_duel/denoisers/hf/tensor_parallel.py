"""Networks whose layers are split over processes by the plans of transformers' own classes (`tp_plan=auto`).

A plan splits the heads of an attention, the columns and rows of a feed-forward network or of each expert, and the
vocabulary of embedding and head; a process reads only its part of each tensor. The results of the parts are summed or
joined after each half of a layer.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

from lm_eval_duel.denoisers import process_groups
from lm_eval_duel.denoisers.load_options import LoadOptions
from lm_eval_duel.errors import DuelError

NEEDED = "5.23"  # the release that this was tested with
SIZES = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size")


def network_class(native: Any, options: LoadOptions) -> Any:
    """`native`; with tp_plan a subclass whose `from_pretrained` loads this process's part for its group.

    transformers wants one group of all processes, so the subclass supplies a mesh with a row for each group.
    """
    if options.tp_plan is None:
        return native

    def prepare_distribute_model(cls: Any, config: Any, device_map: Any = None) -> tuple[Any, torch.device, Any]:
        return config, options.device, _meshes(process_groups.size(options), options.device)

    own = {"prepare_distribute_model": classmethod(prepare_distribute_model), "__module__": native.__module__}
    return type(native.__name__, (native,), own)


def model_kwargs(options: LoadOptions) -> dict[str, Any]:
    """The arguments of `from_pretrained` for a network that is split; empty for one that is not.

    Raises DuelError if this release of transformers cannot split networks as this module needs it.
    """
    if options.tp_plan is None:
        return {}
    try:
        from transformers.distributed import DistributedConfig
        from transformers.distributed.utils import TransformersDeviceMesh  # noqa: F401 - for `_meshes`
    except ImportError as error:
        raise DuelError(
            f"tp_plan=auto needs transformers {NEEDED} or later; this is {transformers.__version__}."
        ) from error

    return {"distributed_config": DistributedConfig(tp_size=process_groups.size(options), tp_plan="auto")}


def require_plan(native: Any, model_config: Any, options: LoadOptions) -> None:
    """Raise DuelError if `native` has no plan, or if the sizes of its config do not divide by the group's."""
    size = process_groups.size(options)
    if native is None:
        raise DuelError(
            f"tp_plan=auto needs a network in transformers' own classes, and {options.name} runs code of its own; "
            "leave tp_plan out."
        )
    if not getattr(model_config, "base_model_tp_plan", None):
        raise DuelError(
            f"transformers has no plan to split {native.__name__} over processes: leave tp_plan out. "
            "parallelize=true spreads whole layers over the GPUs of one process."
        )
    for name in SIZES:
        count = getattr(model_config, name, None)
        if isinstance(count, int) and count % size:
            divisors = [n for n in range(2, size) if all(not _size(model_config, key) % n for key in SIZES)]
            advice = f"Use tp_size={' or '.join(map(str, divisors))}." if divisors else "Leave tp_plan out."
            raise DuelError(
                f"{options.name} has {name}={count}, which does not divide into tp_size={size} equal parts. {advice}"
            )


def _size(model_config: Any, name: str) -> int:
    """The entry, 0 if there is none."""
    count = getattr(model_config, name, None)
    return count if isinstance(count, int) else 0


def _meshes(size: int, device: torch.device) -> Any:
    """The processes as transformers arranges them: a row for each group of `size`."""
    from torch.distributed import get_world_size, init_device_mesh
    from transformers.distributed.utils import TransformersDeviceMesh

    groups, replicas = get_world_size() // size, ("pp", "dp_replicate")
    return TransformersDeviceMesh(
        init_device_mesh(device.type, (1, groups, 1, size), mesh_dim_names=(*replicas, "fsdp", "tp")),
        init_device_mesh(device.type, (1, groups, size, 1), mesh_dim_names=(*replicas, "efsdp", "ep")),
    )
