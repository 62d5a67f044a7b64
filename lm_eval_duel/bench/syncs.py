"""How often the host waits for the device, counted on any device, so that the figure exists without a GPU.

A GPU works through a queue of kernels; when Python needs a value of a tensor, or a shape that depends on values, it
waits until the queue is empty, and the GPU then waits for Python. Counted as one wait each:

    item            `.item()`, `int(x)`, `float(x)`, `if x:`, an index that is a tensor without dimensions
    shape           `nonzero`, `unique`, `masked_select`, `bincount`, `repeat_interleave` without a size, and each
                    boolean index
    equal           `torch.equal`
    to host         `.tolist()`, `.cpu()`, `.numpy()`
    to device       `torch.tensor(..., device=)`, `.to(device)` of a host tensor (unless non_blocking), a list as index

On a CPU a tensor counts as a host tensor if it was made without `device=`, copied by `.cpu()`, or computed from such
tensors alone.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HOST = "_host_tensor"  # an attribute of host tensors, while counting

KINDS = ("item", "shape", "equal", "to host", "to device")
aten = torch.ops.aten
WAITS = {
    aten._local_scalar_dense: "item",
    aten.equal: "equal",
    aten.nonzero: "shape",
    aten.masked_select: "shape",
    aten._unique2: "shape",
    aten.unique_dim: "shape",
    aten.unique_consecutive: "shape",
    aten.bincount: "shape",
}
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}
TO_HOST = {torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.numpy}
TENSOR = torch.tensor
INDEXED = {torch.Tensor.__getitem__, torch.Tensor.__setitem__}


@contextlib.contextmanager
def count_syncs() -> Iterator[Counter[str]]:
    """Count the waits inside this context, by kind."""
    counts: Counter[str] = Counter()
    with _Calls(counts), _Operations(counts):
        yield counts


def figures(run: Callable[[], Any], network_calls: Callable[[], Any], calls: int) -> dict[str, Any]:
    """The waits of a run, by kind; their sum, and that divided by its network `calls`; and those inside these calls."""
    with count_syncs() as counts:
        run()
    with count_syncs() as inside:
        network_calls()
    total = sum(counts.values())
    return {**{kind: counts[kind] for kind in KINDS}, "total": total, "per_call": total / calls} | {
        "inside_network": sum(inside.values())
    }


class _Operations(TorchDispatchMode):
    """Counts the operations that wait."""

    def __init__(self, counts: Counter[str]):
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, packet = kwargs or {}, func.overloadpacket
        if packet not in WAITS:
            with self:  # in inference mode, operations that consist of others arrive whole
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if packet in WAITS and not _on_host(args[0]):
            self.counts[WAITS[packet]] += 1
        elif packet in INDEXING and not _on_host(args[0]):
            self.counts["shape"] += sum(index is not None and index.dtype == torch.bool for index in args[1])
        elif packet is aten.repeat_interleave and kwargs.get("output_size") is None and not _on_host(args[0]):
            self.counts["shape"] += 1
        return func(*args, **kwargs)


class _Calls(TorchFunctionMode):
    """Counts copies between host and device, and marks the tensors that are on the host."""

    def __init__(self, counts: Counter[str]):
        super().__init__()
        self.counts = counts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = _tensors((args, kwargs))
        host = all(map(_on_host, tensors)) if tensors else kwargs.get("device") is None
        copied = None
        if func in TO_HOST:
            copied, host = (None if host else "to host"), True
        elif func in INDEXED and not _on_host(args[0]):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            copied = "to device" if any(isinstance(part, list) for part in index) else None
        elif (func is TENSOR and not host) or (func is torch.Tensor.to and host and _has_device(args, kwargs)):
            copied, host = (None if kwargs.get("non_blocking") else "to device"), False
        if copied:
            self.counts[copied] += 1
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor) and any(result is tensor for tensor in tensors):
            result = result.detach() if func in (torch.Tensor.cpu, torch.Tensor.to) else result  # a copy elsewhere
        for value in _tensors(result):
            if value.device.type == "cpu":
                setattr(value, HOST, host)
        return result


def _on_host(tensor: torch.Tensor) -> bool:
    return getattr(tensor, HOST, False)


def _has_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the arguments of `Tensor.to` name a device."""
    named = kwargs.get("device", args[1] if len(args) > 1 else None)
    return isinstance(named, torch.device | str | int)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
