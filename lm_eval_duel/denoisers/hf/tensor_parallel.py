"""Networks that several processes hold together by the plans of transformers' own classes (`tp_plan`, `ep_size`).

`tp_plan=auto` splits the heads of an attention, the columns and rows of a feed-forward network or of each expert, and
the vocabulary of embedding and head. `ep_size` places whole experts on different processes; all of them run the router
on the same tokens, and each computes the experts that it has. A process reads only its part of each tensor. The results
of the parts are summed or joined after each half of a layer.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers

from lm_eval_duel.denoisers import process_groups
from lm_eval_duel.denoisers.load_options import LoadOptions
from lm_eval_duel.errors import DuelError

NEEDED = "5.23"  # the release that this was tested with
SIZES = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size")
WHOLE = ("moe_intermediate_size",)  # sizes that are not split if experts stay whole
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")  # their number, by config class
DISPATCH = "ep_dispatch_experts"  # transformers' style of a module of experts that are placed whole


def network_class(native: Any, options: LoadOptions) -> Any:
    """`native`; with `tp_plan` or `ep_size` a subclass whose `from_pretrained` loads this process's part for its group.

    transformers wants one group of all processes, so the subclass supplies a mesh with a row for each group. Without
    `tp_plan` its rules replicate what they would split: 5.23 documents an empty plan for this, and refuses it.
    """
    if not process_groups.is_shared(options):
        return native

    def prepare_distribute_model(cls: Any, config: Any, device_map: Any = None) -> tuple[Any, torch.device, Any]:
        return config, options.device, _meshes(process_groups.size(options), options.device.type)

    def init_parallel_plans(self: Any) -> None:
        native.init_parallel_plans(self)
        if options.tp_plan is None:
            self._tp_plan = dict.fromkeys(self._tp_plan, "replicate")

    own = {
        "prepare_distribute_model": classmethod(prepare_distribute_model),
        "init_parallel_plans": init_parallel_plans,
        "__module__": native.__module__,
    }
    return type(native.__name__, (native,), own)


def model_kwargs(options: LoadOptions) -> dict[str, Any]:
    """The arguments of `from_pretrained` for a network that is split; empty for one that is not.

    Raises DuelError if this release of transformers cannot split networks as this module needs it.
    """
    if not process_groups.is_shared(options):
        return {}
    try:
        from transformers.distributed import DistributedConfig
        from transformers.distributed.utils import TransformersDeviceMesh  # noqa: F401 - for `_meshes`
    except ImportError as error:
        raise DuelError(
            f"{process_groups.in_words(options)} needs transformers {NEEDED} or later; this is "
            f"{transformers.__version__}."
        ) from error

    size = process_groups.size(options)
    if options.ep_size is None:
        return {"distributed_config": DistributedConfig(tp_size=size, tp_plan="auto")}
    from lm_eval_duel.denoisers.hf.expert_parallel import NAME

    experts = {"ep_size": size, "ep_implementation": NAME}
    return {"distributed_config": DistributedConfig(tp_size=size, tp_plan="auto", **experts)}


def require_plan(native: Any, model_config: Any, options: LoadOptions) -> None:
    """Raise DuelError if `native` has no plan, or if the sizes of its config do not divide by the group's."""
    if native is None:
        raise DuelError(
            f"{process_groups.in_words(options)} needs a network in transformers' own classes, and {options.name} runs "
            f"code of its own; leave {'tp_plan' if options.tp_plan else 'ep_size'} out."
        )
    if options.ep_size is not None:
        _require_experts(native, model_config, options)
    if options.tp_plan is not None:
        if not getattr(model_config, "base_model_tp_plan", None):
            raise DuelError(
                f"transformers has no plan to split {native.__name__} over processes: leave tp_plan out. "
                "parallelize=true spreads whole layers over the GPUs of one process."
            )
        names = [name for name in SIZES if options.ep_size is None or name not in WHOLE]
        _require_divisible(model_config, names, "tp_size", options)


def _require_experts(native: Any, model_config: Any, options: LoadOptions) -> None:
    """Raise DuelError if transformers cannot place the experts of `native` on this many processes."""
    plan = getattr(model_config, "base_model_ep_plan", None) or {}
    name = next((name for name in EXPERTS if _size(model_config, name)), None)
    if DISPATCH not in plan.values() or name is None:
        problem = "has no experts" if name is None else "has experts that transformers does not place on processes"
        raise DuelError(
            f"{options.name} ({native.__name__}) {problem}: leave ep_size out. tp_plan=auto splits its layers instead."
        )
    _require_divisible(model_config, [name], "ep_size", options)


def _require_divisible(model_config: Any, names: list[str], argument: str, options: LoadOptions) -> None:
    """Raise DuelError if one of these entries does not divide by the size of the group."""
    size = process_groups.size(options)
    for name in names:
        if (count := _size(model_config, name)) % size:
            divisors = [n for n in range(2, size) if all(not _size(model_config, key) % n for key in names)]
            advice = "Leave ep_size out." if argument == "ep_size" else "Leave tp_plan out."
            if divisors:
                advice = f"Use {argument}={' or '.join(map(str, divisors))}."
            raise DuelError(
                f"{options.name} has {name}={count}, which does not divide into {argument}={size} equal parts. {advice}"
            )


def _size(model_config: Any, name: str) -> int:
    """The entry, 0 if there is none."""
    count = getattr(model_config, name, None)
    return count if isinstance(count, int) else 0


@functools.cache  # all processes of the launch must make a mesh together, and later loads may be of one group alone
def _meshes(size: int, device: str) -> Any:
    """The processes as transformers arranges them: a row for each group of `size`. `device`: its type."""
    from torch.distributed import get_world_size, init_device_mesh
    from transformers.distributed.utils import TransformersDeviceMesh

    groups, replicas = get_world_size() // size, ("pp", "dp_replicate")
    return TransformersDeviceMesh(
        init_device_mesh(device, (1, groups, 1, size), mesh_dim_names=(*replicas, "fsdp", "tp")),
        init_device_mesh(device, (1, groups, 1, size), mesh_dim_names=(*replicas, "efsdp", "ep")),
    )
