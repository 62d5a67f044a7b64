"""The tensors of a checkpoint folder: `.safetensors` or `.bin`, whole or sharded, or a Lightning `.ckpt` (its EMA).

Files are read as tensors only: code in a pickle is never run.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import load_file

from lm_eval_duel.denoisers.hub import short_reason
from lm_eval_duel.errors import DuelError

log = logging.getLogger("lm_eval.duel_mdm")

NAMES = ("model.safetensors", "pytorch_model.bin")
POINTER = b"version https://git-lfs"
COMPUTED = ("rotary_emb.inv_freq",)  # buffers of a .ckpt's network: not parameters, so its EMA lacks them


def read(folder: str) -> dict[str, torch.Tensor]:
    """Every tensor of a folder's weights, on the CPU, by name; raises DuelError if a file is missing or broken."""
    if (tensors := _whole_or_sharded(folder)) is not None:
        return tensors
    files = sorted(name for name in os.listdir(folder) if name.endswith(".ckpt"))
    if len(files) == 1:
        return _lightning(os.path.join(folder, files[0]))
    if files:
        raise DuelError(f"{folder} holds {len(files)} .ckpt files ({', '.join(files[:5])}); keep the one to score.")
    raise DuelError(f"No weights in {folder}: expected one of {', '.join(NAMES)} (or its shards), or a .ckpt.")


def require_readable(folder: str) -> None:
    """Raise DuelError, naming the file, if a file with weights (other than .ckpt) cannot be read."""
    _whole_or_sharded(folder)


def shapes(folder: str) -> dict[str, torch.Tensor]:
    """The tensors of a folder's weights (other than .ckpt) on the meta device, without values; empty without files.

    Raises DuelError if a file is missing or broken.
    """
    return _whole_or_sharded(folder, "meta") or {}


def _whole_or_sharded(folder: str, device: str = "cpu") -> dict[str, torch.Tensor] | None:
    for name in NAMES:
        index = os.path.join(folder, f"{name}.index.json")
        if os.path.exists(index):
            return _sharded(folder, index, device)
        if os.path.exists(os.path.join(folder, name)):
            return _file(os.path.join(folder, name), device)
    return None


def _sharded(folder: str, index: str, device: str) -> dict[str, torch.Tensor]:
    shards = _guarded(index, lambda: _shard_of(index))
    tensors: dict[str, torch.Tensor] = {}
    for name in sorted(set(shards.values())):
        if not os.path.exists(os.path.join(folder, name)):
            raise DuelError(f"{index} names {name}, which is missing: the download is incomplete.")
        tensors |= _file(os.path.join(folder, name), device)
    if missing := sorted(set(shards) - set(tensors)):
        raise DuelError(f"{len(missing)} tensors that {index} names are in no shard: {', '.join(missing[:10])}.")
    return tensors


def _shard_of(index: str) -> dict[str, str]:
    """Which shard holds each tensor."""
    with open(index, encoding="utf-8") as file:
        return {str(key): os.fspath(name) for key, name in json.load(file)["weight_map"].items()}


def _file(path: str, device: str) -> dict[str, torch.Tensor]:
    if path.endswith(".safetensors"):
        return _guarded(path, lambda: load_file(path) if device == "cpu" else _header(path))
    tensors = _unpickled(path, "{key: c[key] for key in c if torch.is_tensor(c[key])}", os.path.basename(path), device)
    if not isinstance(tensors, dict) or not all(isinstance(value, torch.Tensor) for value in tensors.values()):
        raise DuelError(f"{path} holds more than tensors; save the network's state_dict alone.")
    return tensors


def _header(path: str) -> dict[str, torch.Tensor]:
    """The tensors of a .safetensors file, without their values."""
    tensors = load_file(path)  # memory-mapped: the values are not read
    return {key: value.to("meta") for key, value in tensors.items()}


def _lightning(path: str) -> dict[str, torch.Tensor]:
    """The network of a Lightning checkpoint: its averaged weights (EMA), which its authors score, if it has them."""
    content = _unpickled(path, "{key: c[key] for key in ('state_dict', 'ema') if key in c}", "weights.ckpt")
    if not isinstance(content, dict) or not isinstance(content.get("state_dict"), dict):
        raise DuelError(f"{path} is not a Lightning checkpoint: it has no state_dict.")
    tensors = {key.replace("_orig_mod.", ""): value for key, value in content["state_dict"].items()}
    tensors = {key: value for key, value in tensors.items() if key.startswith("backbone.")}
    average = content.get("ema")
    if average is None:
        log.warning("%s has no averaged weights (EMA): scoring the last weights", path)
        return tensors
    names = [key for key in tensors if not key.removeprefix("backbone.").startswith(COMPUTED)]
    # the EMA is a list, in the order of the network's parameters
    shadow = (average.get("shadow_params") if isinstance(average, dict) else None) or []
    if [tensors[key].shape for key in names] != [getattr(value, "shape", None) for value in shadow]:
        raise DuelError(
            f"The averaged weights (EMA) of {path} do not match its network: {len(shadow)} tensors for {len(names)} "
            "parameters, or other shapes."
        )
    return tensors | dict(zip(names, shadow, strict=True))


def _unpickled(path: str, kept: str, name: str, device: str = "cpu") -> Any:
    """The content of a file that torch wrote: tensors and plain values only.

    Raises DuelError if it cannot be read. If it holds code, the error shows a command that saves the part `kept` of the
    content `c` under `name`.
    """
    try:
        return torch.load(path, device, weights_only=True)
    except Exception as error:  # a broken pickle raises anything
        if not isinstance(error, pickle.UnpicklingError) or not _pickled(path):
            raise _broken(path, error) from error
        raise DuelError(
            f"{path} needs code to be read ({short_reason(error)}), which is not run here. If you trust the file, "
            "save its tensors alone where its training code is installed:\n"
            f"    python -c \"import torch; c = torch.load({path!r}, 'cpu', weights_only=False); "
            f'torch.save({kept}, {name!r})"'
        ) from error


def _pickled(path: str) -> bool:
    """Whether a file begins like one that torch wrote, not like a web page or a git-lfs pointer."""
    return _starts(path, b"PK", b"\x80\x02")


def _starts(path: str, *starts: bytes) -> bool:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return file.read(max(map(len, starts))).startswith(starts)
    return False


def _guarded(path: str, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except Exception as error:
        raise _broken(path, error) from error


def _broken(path: str, error: Exception) -> DuelError:
    """The error for a file that cannot be read, with the likely reason."""
    reason = "It is cut off or damaged: download it again."
    if os.path.getsize(path) == 0:
        reason = "It is empty: download it again."
    elif _starts(path, POINTER):
        reason = "It is a git-lfs pointer, not the file itself: run git lfs pull."
    return DuelError(f"Cannot read {path}: {short_reason(error)}. {reason}")
