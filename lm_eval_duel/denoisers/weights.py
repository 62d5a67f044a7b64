"""The tensors of a checkpoint folder: `.safetensors` or `.bin`, whole or sharded, or a Lightning `.ckpt` (its EMA).

Files are read as tensors only; nothing that a pickle would run is run.
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

from lm_eval_duel.denoisers.hub import said
from lm_eval_duel.errors import DuelError

log = logging.getLogger("lm_eval.duel_mdm")

NAMES = ("model.safetensors", "pytorch_model.bin")
POINTER = b"version https://git-lfs"
COMPUTED = ("rotary_emb.inv_freq",)  # buffers of a .ckpt's network: no parameters, so its EMA has none of them


def read(folder: str) -> dict[str, torch.Tensor]:
    """Every tensor of a folder's weights, on the CPU, by name; raises DuelError where a file is missing or broken."""
    if (kept := _whole_or_sharded(folder)) is not None:
        return kept
    found = sorted(name for name in os.listdir(folder) if name.endswith(".ckpt"))
    if len(found) == 1:
        return _lightning(os.path.join(folder, found[0]))
    if found:
        raise DuelError(f"{folder} holds {len(found)} .ckpt files ({', '.join(found[:5])}); keep the one to score.")
    raise DuelError(f"No weights in {folder}: wanted one of {', '.join(NAMES)} (or its shards), or a .ckpt.")


def require_readable(folder: str) -> None:
    """Raise DuelError, naming the file, where one that holds weights (no .ckpt) cannot be read."""
    _whole_or_sharded(folder)


def shapes(folder: str) -> dict[str, torch.Tensor]:
    """The tensors of a folder's weights (no .ckpt) without their contents, on the meta device; none without files.

    Raises DuelError where a file is missing or broken.
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
    places = _guarded(index, lambda: _places(index))
    tensors: dict[str, torch.Tensor] = {}
    for name in sorted(set(places.values())):
        if not os.path.exists(os.path.join(folder, name)):
            raise DuelError(f"{index} names {name}, which is not there: the download is not complete.")
        tensors |= _file(os.path.join(folder, name), device)
    if lacking := sorted(set(places) - set(tensors)):
        raise DuelError(f"{len(lacking)} tensors that {index} names are in no shard: {', '.join(lacking[:10])}.")
    return tensors


def _places(index: str) -> dict[str, str]:
    """Which shard holds each tensor."""
    with open(index, encoding="utf-8") as file:
        return {str(key): os.fspath(name) for key, name in json.load(file)["weight_map"].items()}


def _file(path: str, device: str) -> dict[str, torch.Tensor]:
    if path.endswith(".safetensors"):
        return _guarded(path, lambda: load_file(path) if device == "cpu" else _header(path))
    found = _unpickled(path, "{key: c[key] for key in c if torch.is_tensor(c[key])}", os.path.basename(path), device)
    if not isinstance(found, dict) or not all(isinstance(value, torch.Tensor) for value in found.values()):
        raise DuelError(f"{path} holds more than tensors; save the network's state_dict alone.")
    return found


def _header(path: str) -> dict[str, torch.Tensor]:
    """The tensors of a .safetensors, without their contents."""
    tensors = load_file(path)  # mapped into memory, and read where it is looked at
    return {key: value.to("meta") for key, value in tensors.items()}


def _lightning(path: str) -> dict[str, torch.Tensor]:
    """The network of a Lightning checkpoint: its averaged weights (EMA), which its authors score, where it has them."""
    content = _unpickled(path, "{key: c[key] for key in ('state_dict', 'ema') if key in c}", "weights.ckpt")
    if not isinstance(content, dict) or not isinstance(content.get("state_dict"), dict):
        raise DuelError(f"{path} is no Lightning checkpoint: it has no state_dict.")
    tensors = {key.replace("_orig_mod.", ""): value for key, value in content["state_dict"].items()}
    tensors = {key: value for key, value in tensors.items() if key.startswith("backbone.")}
    average = content.get("ema")
    if average is None:
        log.warning("%s has no averaged weights (EMA): scoring the last ones", path)
        return tensors
    names = [key for key in tensors if not key.removeprefix("backbone.").startswith(COMPUTED)]
    # a list, in the order of the network's parameters
    shadow = (average.get("shadow_params") if isinstance(average, dict) else None) or []
    if [tensors[key].shape for key in names] != [getattr(value, "shape", None) for value in shadow]:
        raise DuelError(
            f"The averaged weights (EMA) of {path} do not match its network: {len(shadow)} tensors for {len(names)} "
            "parameters, or other shapes."
        )
    return tensors | dict(zip(names, shadow, strict=True))


def _unpickled(path: str, kept: str, name: str, device: str = "cpu") -> Any:
    """What torch wrote, tensors and plain values only.

    Raises DuelError where it cannot be read. Where it holds code, the error has the command that saves what is `kept`
    of the content `c` under `name`.
    """
    try:
        return torch.load(path, device, weights_only=True)
    except Exception as error:  # a broken pickle raises anything
        if not isinstance(error, pickle.UnpicklingError) or not _pickled(path):
            raise _broken(path, error) from error
        raise DuelError(
            f"{path} needs code to be read ({said(error)}), which is not run here. If you trust the file, "
            "save its tensors alone where its training code is installed:\n"
            f"    python -c \"import torch; c = torch.load({path!r}, 'cpu', weights_only=False); "
            f'torch.save({kept}, {name!r})"'
        ) from error


def _pickled(path: str) -> bool:
    """Whether a file begins as torch writes one, rather than as a web page or a pointer to a large file."""
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
        reason = "It is a pointer of git-lfs and not the file itself: run git lfs pull."
    return DuelError(f"Cannot read {path}: {said(error)}. {reason}")
