"""The tensors of a checkpoint folder: `.safetensors` or `.bin`, whole or sharded, or a Lightning `.ckpt` (its EMA).

Files are read as tensors only: code in a pickle is never run.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
from collections.abc import Iterator
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


def names(folder: str) -> set[str]:
    """The names of the tensors in a folder's weights (other than .ckpt); raises DuelError, naming a broken file."""
    return set(_whole_or_sharded(folder) or ())


def _whole_or_sharded(folder: str) -> dict[str, torch.Tensor] | None:
    for name in NAMES:
        index = os.path.join(folder, f"{name}.index.json")
        if os.path.exists(index):
            return _sharded(folder, index)
        if os.path.exists(os.path.join(folder, name)):
            return _file(os.path.join(folder, name))
    return None


def _sharded(folder: str, index: str) -> dict[str, torch.Tensor]:
    with _reading(index), open(index, encoding="utf-8") as file:
        shards = dict(json.load(file)["weight_map"])
    tensors: dict[str, torch.Tensor] = {}
    for name in sorted(set(shards.values())):
        if not os.path.exists(os.path.join(folder, name)):
            raise DuelError(f"{index} names {name}, which is missing: the download is incomplete.")
        tensors |= _file(os.path.join(folder, name))
    return tensors


def _file(path: str) -> dict[str, torch.Tensor]:
    if path.endswith(".safetensors"):
        with _reading(path):
            return load_file(path)
    tensors = _unpickled(path, "{key: c[key] for key in c if torch.is_tensor(c[key])}", os.path.basename(path))
    if not isinstance(tensors, dict) or not all(isinstance(value, torch.Tensor) for value in tensors.values()):
        raise DuelError(f"{path} holds more than tensors; save the network's state_dict alone.")
    return tensors


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
        counts = f"{len(shadow)} tensors for {len(names)} parameters"
        raise DuelError(f"The averaged weights (EMA) of {path} do not match its network: {counts}, or other shapes.")
    return tensors | dict(zip(names, shadow, strict=True))


def _unpickled(path: str, kept: str, name: str) -> Any:
    """The content of a file that torch wrote. If it holds code, the error has a command that saves `kept` of its
    content `c` under `name`.
    """
    with _reading(path):
        try:
            return torch.load(path, "cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            if not _starts(path, b"PK", b"\x80\x02"):  # a web page or a git-lfs pointer, not a file from torch
                raise
            raise DuelError(
                f"{path} needs code to be read ({short_reason(error)}), which is not run here. If you trust it, save "
                "its tensors alone where its training code is installed:\n"
                f"    python -c \"import torch; c = torch.load({path!r}, 'cpu', weights_only=False); "
                f'torch.save({kept}, {name!r})"'
            ) from error


def _starts(path: str, *starts: bytes) -> bool:
    with open(path, "rb") as file:
        return file.read(max(map(len, starts))).startswith(starts)


@contextlib.contextmanager
def _reading(path: str) -> Iterator[None]:
    """Turn any error of a broken file into a DuelError that names the file and the likely reason."""
    try:
        yield
    except DuelError:
        raise
    except Exception as error:
        reason = "It is cut off or damaged: download it again."
        if os.path.getsize(path) == 0:
            reason = "It is empty: download it again."
        elif _starts(path, POINTER):
            reason = "It is a git-lfs pointer, not the file itself: run git lfs pull."
        raise DuelError(f"Cannot read {path}: {short_reason(error)}. {reason}") from error
