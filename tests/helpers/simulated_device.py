"""A second device without having one: tensors on `sim` hold CPU tensors, and mixing them with CPU tensors raises.

`register()` first, before the package is imported, in a process of its own: a backend stays registered, and
`torch.inference_mode` becomes `torch.no_grad`, because inference tensors have no views of wrappers.

The rules are those of CUDA: every tensor of an operation is on the device, except for scalars (0-dim) and for the
indices of a tensor on the device. `synchronisations` counts what makes the host wait for a CUDA device.
"""

import collections
import contextlib

import torch
import torch.utils._device
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "sim"
synchronisations = collections.Counter()  # by kind, since the last `clear()`

aten = torch.ops.aten
COPIES = {aten._to_copy, aten.copy_, aten.copy, aten._copy_from}
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}
WAITS = {  # their result, or its shape, is needed by the host
    aten._local_scalar_dense: "item",
    aten.nonzero: "nonzero",
    aten.masked_select: "nonzero",
    aten.equal: "equal",
    aten._unique2: "unique",
    aten._unique: "unique",
    aten.unique_dim: "unique",
    aten.unique_consecutive: "unique",
    aten.bincount: "bincount",
    aten.repeat_interleave: "repeat_interleave",
}


class Simulated(torch.Tensor):
    """A tensor on the simulated device."""

    @staticmethod
    def __new__(cls, held):
        size, stride = held.size(), held.stride()
        options = {"strides": stride, "storage_offset": held.storage_offset(), "dtype": held.dtype}
        wrapper = torch.Tensor._make_wrapper_subclass(cls, size, **options, device=torch.device(NAME, 0))
        wrapper.held = held
        return wrapper

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return run(function, args, kwargs or {})

    def __repr__(self):
        return f"Simulated({self.held})"

    def __getitem__(self, index):
        return super().__getitem__(_lists_to_tensors(index))

    def __setitem__(self, index, value):
        super().__setitem__(_lists_to_tensors(index), value)

    def new_tensor(self, data, dtype=None, **_):
        return torch.tensor(data, dtype=dtype or self.dtype).to(self.device)

    def tolist(self):
        return self.cpu().tolist()

    def data_ptr(self):
        return self.held.data_ptr()

    def __array__(self, *_):
        raise TypeError("can't convert a tensor on the simulated device to numpy; use .cpu() first")

    def numpy(self, **_):
        self.__array__()

    def pin_memory(self, *_):
        raise RuntimeError("only tensors on the CPU can be pinned")

    @property
    def is_cuda(self):
        return False


def run(function, args, kwargs):
    """Run an operation on the CPU tensors that its arguments hold, if a device would."""
    packet = function.overloadpacket
    leaves = torch.utils._pytree.tree_leaves((args, kwargs))
    tensors = [value for value in leaves if isinstance(value, torch.Tensor)]
    simulated = [value for value in tensors if isinstance(value, Simulated)]
    device = kwargs.get("device")
    on_device = bool(simulated) if device is None else torch.device(device).type == NAME
    _check(function, packet, args, tensors, simulated)
    _count(packet, args, tensors, simulated, on_device)
    wrappers = {id(value.held): value for value in simulated}
    if on_device and device is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    if kwargs.get("pin_memory"):
        kwargs = {**kwargs, "pin_memory": False}
    if packet is aten._fused_sdp_choice:
        return 0  # the plain one
    with torch._C._DisableTorchDispatch():
        result = function(*tree_map(_held, args), **tree_map(_held, kwargs))
    if packet is aten._to_copy and device is not None and not on_device:
        return result

    def wrap(value):
        if not isinstance(value, torch.Tensor) or isinstance(value, Simulated):
            return value
        if id(value) in wrappers:
            wrapper = wrappers[id(value)]
            if wrapper.shape != value.shape:
                raise NotImplementedError(f"{function} changes the shape of a tensor in place")
            return wrapper
        if any(value is tensor for tensor in tensors):
            return value  # written in place: `cpu.copy_(simulated)`
        return Simulated(value) if on_device else value

    return tree_map(wrap, result)


def _lists_to_tensors(index):
    """An index with tensors on the device for the lists in it, as torch makes them."""
    if isinstance(index, list):
        return torch.tensor(index).to(NAME)
    if isinstance(index, tuple):
        return tuple(map(_lists_to_tensors, index))
    return index


def _held(value):
    return value.held if isinstance(value, Simulated) else value


def _check(function, packet, args, tensors, simulated):
    """Raise as CUDA does for operations on tensors of two devices."""
    if not simulated or packet in COPIES:
        return
    others = [value for value in tensors if not isinstance(value, Simulated)]
    first = args[0] if args else None
    if packet in INDEXING:
        if not isinstance(first, Simulated):
            raise RuntimeError(f"{function}: indices should be on the CPU like the indexed tensor, not on {NAME}")
        indices = {id(index) for index in args[1] if index is not None}
        others = [value for value in others if id(value) not in indices]
    elif isinstance(first, torch.Tensor) and not isinstance(first, Simulated):
        is_scalar = first.dim() == 0 and not function._schema.is_mutable
        if not is_scalar:
            raise RuntimeError(f"{function}: expected all tensors to be on the same device, got cpu and {NAME}")
    if any(value.dim() for value in others):
        raise RuntimeError(f"{function}: expected all tensors to be on the same device, got {NAME} and cpu")


def _count(packet, args, tensors, simulated, on_device):
    """Count what a CUDA device would have to be waited for."""
    if packet in COPIES:
        devices = {isinstance(value, Simulated) for value in tensors}
        if packet is aten._to_copy:
            devices.add(on_device)
        if len(devices) > 1:
            source = tensors[0 if packet is aten._to_copy else 1]
            synchronisations["to host" if isinstance(source, Simulated) else "to device"] += 1
    elif not simulated:
        return
    elif packet in WAITS:
        synchronisations[WAITS[packet]] += 1
    elif packet in INDEXING:
        for index in args[1]:
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                synchronisations["boolean index"] += 1
            elif index is not None and not isinstance(index, Simulated):
                synchronisations["to device"] += 1


# made by a size-changing write into an empty tensor, unless the device has them
FACTORIES = ("arange", "arange.start", "arange.start_step", "eye", "eye.m", "linspace", "randperm")
_library = []  # of the registered operations, which live as long as it does


def register():
    """Register the device; before the package is imported."""
    torch.inference_mode = _inference_mode
    _setup_privateuseone_for_python_backend(NAME)
    getattr(torch, NAME).get_amp_supported_dtype = lambda: [torch.bfloat16]
    every = torch.library.Library("_", "IMPL")
    every.fallback(lambda function, *args, **kwargs: run(function, args, kwargs), "PrivateUse1")
    _library.append(every)
    operations = torch.library.Library("aten", "IMPL")
    for name in FACTORIES:
        packet, _, overload = name.partition(".")
        operations.impl(name, _factory(getattr(getattr(aten, packet), overload or "default")), "PrivateUse1")
    _library.append(operations)
    torch.utils._device._device_constructors()  # kept by torch, with its own `torch.tensor`
    torch.tensor = _tensor


def _inference_mode(mode=True):
    if callable(mode):
        return torch.no_grad()(mode)
    return torch.no_grad() if mode else contextlib.nullcontext()


def _factory(function):
    return lambda *args, **kwargs: run(function, args, {**kwargs, "device": torch.device(NAME)})


tensor_on_cpu = torch.tensor


def _tensor(data, *, device=None, **options):
    """`torch.tensor`, which copies to the device below the level at which wrappers can be made."""
    if device is None or torch.device(device).type != NAME:
        return tensor_on_cpu(data, device=device, **options)
    return tensor_on_cpu(data, device="cpu", **options).to(device)
