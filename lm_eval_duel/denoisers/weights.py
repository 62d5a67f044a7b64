"""The tensors of a checkpoint folder: `.safetensors` or `.bin`, whole or sharded, or a Lightning `.ckpt` (its EMA).

Files are read as tensors only; nothing that a pickle would run is run.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import re
from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import load_file

from lm_eval_duel.denoisers.hub import first_line
from lm_eval_duel.errors import DuelError

log = logging.getLogger("lm_eval.duel_mdm")

NAMES = ("model.safetensors", "pytorch_model.bin")
COMPUTED = ("rotary_emb.inv_freq",)  # buffers of a .ckpt's network: no parameters, so its EMA has none of them


def read(folder: str) -> dict[str, torch.Tensor]:
    """Every tensor of a folder's weights, on the CPU, by name; raises DuelError where a file is missing or broken."""
    for name in NAMES:
        index = os.path.join(folder, f"{name}.index.json")
        if os.path.exists(index):
            return _sharded(folder, index)
        if os.path.exists(os.path.join(folder, name)):
            return _file(os.path.join(folder, name))
    found = sorted(name for name in os.listdir(folder) if name.endswith(".ckpt"))
    if len(found) == 1:
        return _lightning(os.path.join(folder, found[0]))
    if found:
        raise DuelError(f"{folder} holds {len(found)} .ckpt files ({', '.join(found[:5])}); keep the one to score.")
    raise DuelError(f"No weights in {folder}: wanted one of {', '.join(NAMES)} (or its shards), or a .ckpt.")


def _sharded(folder: str, index: str) -> dict[str, torch.Tensor]:
    places = _guarded(index, lambda: _places(index))
    tensors: dict[str, torch.Tensor] = {}
    for name in sorted(set(places.values())):
        if not os.path.exists(os.path.join(folder, name)):
            raise DuelError(f"{index} names {name}, which is not there: the download is not complete.")
        tensors |= _file(os.path.join(folder, name))
    if lacking := sorted(set(places) - set(tensors)):
        raise DuelError(f"{len(lacking)} tensors that {index} names are in no shard: {', '.join(lacking[:10])}.")
    return tensors


def _places(index: str) -> dict[str, str]:
    """Which shard holds each tensor."""
    with open(index, encoding="utf-8") as file:
        return dict(json.load(file)["weight_map"].items())


def _file(path: str) -> dict[str, torch.Tensor]:
    if path.endswith(".safetensors"):
        return _guarded(path, lambda: load_file(path))
    found = _guarded(path, lambda: torch.load(path, "cpu", weights_only=True))
    if not isinstance(found, dict) or not all(isinstance(value, torch.Tensor) for value in found.values()):
        raise DuelError(f"{path} holds more than tensors; save the network's state_dict alone.")
    return found


def _lightning(path: str) -> dict[str, torch.Tensor]:
    """The network of a Lightning checkpoint: its averaged weights (EMA), which its authors score, where it has them."""
    try:
        content = torch.load(path, "cpu", weights_only=True)
    except Exception as error:
        if not isinstance(error, pickle.UnpicklingError) or not _pickled(path):
            raise _broken(path, error) from error
        raise DuelError(
            f"{path} needs code to be read ({_said(error)}), which is not run here. If you trust the file, "
            "save its tensors alone where its training code is installed:\n"
            f"    python -c \"import torch; c = torch.load({path!r}, 'cpu', weights_only=False); "
            "torch.save({key: c[key] for key in ('state_dict', 'ema') if key in c}, 'weights.ckpt')\""
        ) from error
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


def _pickled(path: str) -> bool:
    """Whether a file begins as torch writes one, rather than as a web page or a pointer to a large file."""
    with open(path, "rb") as file:
        return file.read(2) in (b"PK", b"\x80\x02")


def _guarded(path: str, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except Exception as error:  # a broken pickle raises anything
        raise _broken(path, error) from error


def _broken(path: str, error: Exception) -> DuelError:
    return DuelError(f"Cannot read {path}: {type(error).__name__}: {_said(error)}")


def _said(error: Exception) -> str:
    """What an error says, in a line; of torch's, the cause without the advice to load the file with its code."""
    cause = re.search(r"WeightsUnpickler error:\s*(.*?)(?:\. |\n|$)", str(error))
    return cause[1] if cause else first_line(error)
