"""The files of a checkpoint, in a folder or on the hub: its config, its code as text, and its tensors.

    read_config, pin_revision      config.json, and the commit that all files of a hub name come from
    local_folder, read_tensors     the files themselves, and every tensor in them
    require_equal, require_none    no tensor may be missing, unknown or of another shape
    explained                      an error of a library, as one that says what to do
    pick_device, pick_dtype        where a network goes, and in which dtype

Tensors come from `.safetensors` or `.bin`, whole or sharded, or a Lightning `.ckpt` (its EMA). Files are read as
tensors only: code in a pickle is never run. Every error of a library becomes one that names the file and a remedy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import glob
import json
import logging
import os
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.constants import HF_HUB_OFFLINE
from huggingface_hub.errors import HFValidationError
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import PretrainedConfig
from transformers.utils import cached_file

from lm_eval_duel import demo
from lm_eval_duel.denoisers.load_options import LoadOptions
from lm_eval_duel.errors import DuelError, nearest

log = logging.getLogger("lm_eval.duel_mdm")

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
POINTER = b"version https://git-lfs"
COMPUTED = ("rotary_emb.inv_freq",)  # buffers of a .ckpt's network: not parameters, so its EMA lacks them
TEXTS = (".txt", ".md", ".jsonl", ".csv", ".tsv", ".parquet", ".gz")  # endings of files that are no checkpoints
SHOWN = 10  # names shown for each kind of fault
LONGEST_REASON = 800  # characters
QUIET = {"_raise_exceptions_for_missing_entries": False}
CAUSE = re.compile(r"WeightsUnpickler error:\s*(.*?)(?:\. |\n|$)")  # without torch's advice to run the file's code

Shape = tuple[int, ...]


def read_config(path: str, revision: str, needed: bool = True) -> dict[str, Any]:
    """config.json as a dict, without running code of the checkpoint. `needed`: raise DuelError if a folder has none."""
    has_config = os.path.isfile(os.path.join(path, "config.json"))
    if needed and os.path.isdir(path) and not has_config:
        raise DuelError(f"{path} has no config.json{_what_else_it_is(path)}")
    with explained(path):
        try:
            config = PretrainedConfig.get_config_dict(path, revision=revision)[0]
        except TypeError:  # transformers 4, if it is a list
            config = None
        if not isinstance(config, dict):
            if os.path.isfile(path):
                raise DuelError(f"{path} {_what_a_file_is(path)}")
            raise DuelError(f"The config.json of {path} is not a JSON object.")
    return config


def _what_else_it_is(folder: str) -> str:
    """The end of the error for a folder without a config.json: what it is by its files, and what to do."""
    adapter = os.path.join(folder, "adapter_config.json")
    if os.path.isfile(adapter):
        with _reading(adapter), open(adapter, encoding="utf-8") as file:
            base = json.load(file).get("base_model_name_or_path")
        network = f"its network, {base}," if base else "its network"
        return f", but an adapter_config.json: it is a LoRA. Pass {network} as pretrained and this folder as peft."
    inside = sorted(glob.glob(os.path.join(glob.escape(folder), "*", "config.json")), key=os.path.getmtime)
    if inside:
        names = ", ".join(os.path.dirname(path) for path in inside[-3:])  # the last ones that were written
        return f", but there are checkpoints in it: {names}. Pass one of them."
    return (
        ": it is not a checkpoint, or its download is incomplete. A checkpoint is a folder as save_pretrained writes "
        "it: config.json, weights and a tokenizer."
    )


def pin_revision(options: LoadOptions) -> LoadOptions:
    """The options with the revision of a hub name as a commit: all files come from it and the spec names it."""
    if os.path.isdir(options.name):
        return options
    try:
        file = cached_file(options.name, "config.json", revision=options.revision, **QUIET)
    except (OSError, ValueError):  # raised again when the config is read
        return options
    folder, commit = os.path.split(os.path.dirname(file or ""))  # .../snapshots/<commit>/config.json
    if os.path.basename(folder) != "snapshots":
        return options
    return dataclasses.replace(options, revision=commit)


def local_folder(path: str, revision: str, code_only: bool = False) -> str:
    """The folder with a checkpoint's config, code (as text) and weights; a hub name is downloaded."""
    if os.path.isdir(path):
        return path
    with explained(path):
        if code_only:
            return snapshot_download(path, revision=revision, allow_patterns=["config.json", "*.py"])
        for weights in ("*.safetensors", "*.bin", "*.ckpt"):
            wanted = ["config.json", "*.py", weights, f"{weights}.index.json"]
            folder = snapshot_download(path, revision=revision, allow_patterns=wanted)
            if fnmatch.filter(os.listdir(folder), weights):
                break
    return folder


def read_tensors(folder: str) -> dict[str, torch.Tensor]:
    """Every tensor of a folder's weights, on the CPU, by name; raises DuelError if a file is missing or broken."""
    if files := _weight_files(folder):
        tensors: dict[str, torch.Tensor] = {}
        for path in files:
            tensors |= _file(path)
        return tensors
    checkpoints = sorted(name for name in os.listdir(folder) if name.endswith(".ckpt"))
    if len(checkpoints) == 1:
        return _lightning(os.path.join(folder, checkpoints[0]))
    if checkpoints:
        names = ", ".join(checkpoints[:5])
        raise DuelError(f"{folder} holds {len(checkpoints)} .ckpt files ({names}); keep the one to score.")
    raise DuelError(f"No weights in {folder}: expected one of {', '.join(WEIGHT_FILES)} (or its shards), or a .ckpt.")


def tensor_names(folder: str) -> set[str]:
    """The names of the tensors in a folder's weights (other than .ckpt); raises DuelError, naming a broken file."""
    names: set[str] = set()
    for path in _weight_files(folder):
        names |= _names(path)
    return names


def _weight_files(folder: str) -> list[str]:
    """The file with a folder's weights, or all of its shards; empty if there is none, or a .ckpt."""
    for name in WEIGHT_FILES:
        index = os.path.join(folder, f"{name}.index.json")
        if os.path.exists(index):
            return _shards(folder, index)
        if os.path.exists(os.path.join(folder, name)):
            return [os.path.join(folder, name)]
    return []


def _shards(folder: str, index: str) -> list[str]:
    """The files that an index names; raises DuelError if one is missing."""
    with _reading(index), open(index, encoding="utf-8") as file:
        shards = dict(json.load(file)["weight_map"])
    paths = []
    for name in sorted(set(shards.values())):
        path = os.path.join(folder, name)
        if not os.path.exists(path):
            raise DuelError(f"{index} names {name}, which is missing: the download is incomplete. Download it again.")
        paths.append(path)
    return paths


def _file(path: str) -> dict[str, torch.Tensor]:
    """The tensors of one file."""
    if path.endswith(".safetensors"):
        with _reading(path):
            return load_file(path)
    only_tensors = "{key: c[key] for key in c if torch.is_tensor(c[key])}"
    tensors = _unpickled(path, only_tensors, os.path.basename(path))
    is_state_dict = isinstance(tensors, dict)
    if not is_state_dict or not all(isinstance(value, torch.Tensor) for value in tensors.values()):
        raise DuelError(f"{path} holds more than tensors; save the network's state_dict alone.")
    return tensors


def _names(path: str) -> set[str]:
    """The names of the tensors of one file; those of a .safetensors stand in its header, so nothing else is read."""
    if not path.endswith(".safetensors"):
        return set(_file(path))
    with _reading(path), safe_open(path, "pt") as file:
        return set(file.keys())


def _lightning(path: str) -> dict[str, torch.Tensor]:
    """The network of a Lightning checkpoint: its averaged weights (EMA), which its authors score, if it has them."""
    only_weights = "{key: c[key] for key in ('state_dict', 'ema') if key in c}"
    content = _unpickled(path, only_weights, "weights.ckpt")
    if not isinstance(content, dict) or not isinstance(content.get("state_dict"), dict):
        raise DuelError(f"{path} is not a Lightning checkpoint: it has no state_dict.")
    tensors = {}
    for key, value in content["state_dict"].items():
        name = key.replace("_orig_mod.", "")  # of torch.compile
        if name.startswith("backbone."):
            tensors[name] = value
    average = content.get("ema")
    if average is None:
        log.warning("%s has no averaged weights (EMA): scoring the last weights", path)
        return tensors

    # The EMA is a list without names, in the order of the network's parameters.
    parameters = []
    for key in tensors:
        if not key.removeprefix("backbone.").startswith(COMPUTED):
            parameters.append(key)
    averages = []
    if isinstance(average, dict):
        averages = average.get("shadow_params") or []
    expected = [tensors[key].shape for key in parameters]
    actual = [getattr(value, "shape", None) for value in averages]
    if actual != expected:
        counts = f"{len(averages)} tensors for {len(parameters)} parameters"
        raise DuelError(f"The averaged weights (EMA) of {path} do not match its network: {counts}, or other shapes.")
    return tensors | dict(zip(parameters, averages, strict=True))


def _unpickled(path: str, kept: str, name: str) -> Any:
    """The content of a file that torch wrote.

    If reading it would run code, the error has a command that saves `kept`, an expression of its content `c`, as
    `name`.
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
    """True if a file begins with one of these bytes."""
    longest = max(map(len, starts))
    with open(path, "rb") as file:
        beginning = file.read(longest)
    return beginning.startswith(starts)


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


def short_reason(error: Exception) -> str:
    """An error's type and message in one line; for torch's error about code in a pickle, the cause alone."""
    cause = CAUSE.search(str(error))
    if cause is not None:
        return cause[1]
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines and not lines[0].endswith(":"):  # else a list follows, which is the reason
        lines = lines[:1]
    reason = " ".join(lines)[:LONGEST_REASON]
    return f"{type(error).__name__}: {reason}".rstrip(" :,.")


@contextlib.contextmanager
def explained(path: str, what: str = "read checkpoint", remedy: str = "") -> Iterator[None]:
    """Turn any error of a library or of a checkpoint's own code into a DuelError with the checkpoint and a remedy."""
    try:
        yield
    except (DuelError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        is_missing = isinstance(error, OSError | HFValidationError) and not os.path.isdir(path)
        if not is_missing:
            raise DuelError(f"Cannot {what} '{path}': {_with_hint(error, remedy)}") from error
        subject = f"The adapter {path}" if what.endswith("adapter") else path
        reason = _why_not_found(path, error)
        advice = "" if os.path.isfile(path) else remedy  # the reason of a file says what to pass
        raise DuelError(f"{subject} {reason} {advice}".rstrip()) from error


def _what_a_file_is(path: str) -> str:
    """The sentences after the path of a file where a model is wanted."""
    if path.endswith(TEXTS):
        return "is a file of text, not a model: pass a folder or a hub name. In run and audit, texts go to --tasks."
    return f"is a file, not a folder. Pass its folder, {os.path.dirname(path) or '.'}."


def _why_not_found(path: str, error: Exception) -> str:
    """The sentences after a path or hub name of which nothing can be read."""
    if os.path.isfile(path):
        return _what_a_file_is(path)

    near = nearest(path, demo.NAMES)
    suggestion = f" Did you mean the bundled {near[0]}?" if near else ""
    is_path = os.path.isabs(path) or path.startswith((".", "~")) or os.path.isdir(os.path.dirname(path))
    is_no_hub_name = "Repo id must" in str(error)  # huggingface_hub's words
    if is_path or is_no_hub_name:
        return f"is not a local folder: there is none of this name.{suggestion}"
    offline = ", and HF_HUB_OFFLINE is set" if HF_HUB_OFFLINE else ""
    download = (
        f": run `hf download {path}` where there is one, and pass the folder that it prints" if "/" in path else ""
    )
    return (
        f"is not a local folder, and cannot be read from the hub ({short_reason(error)}).{suggestion} A hub name needs "
        f"a connection or a cached copy{offline}{download}."
    )


def _with_hint(error: Exception, remedy: str) -> str:
    """The reason of an error in one line, and what to do: by its text if that tells, else `remedy`."""
    text = str(error)
    hint = f" {remedy}" if remedy else ""
    if "trust_remote_code" in text:
        hint = " It runs its own code: pass trust_remote_code=true if you trust it."
    elif "does not recognize this architecture" in text:  # transformers' words for a model_type
        hint = " Either transformers is too old for it, or the auto_map in config.json lacks AutoConfig: add it there."
    elif isinstance(error, ModuleNotFoundError):
        hint = f" It needs the package {error.name}: pip install {error.name}."
    elif "offload" in text:
        hint = " It does not fit into the memory of the device_map: use fewer processes per machine or a smaller dtype."
    return f"{short_reason(error)}.{hint}"


@lru_cache(maxsize=1)  # said once, also if several models are loaded
def _say_cpu() -> None:
    log.info("No CUDA device found: running on the CPU")


def pick_device(name: str | None) -> torch.device:
    """The device of a name; None: a GPU if there is one. Without any, the harness's default cuda:0 becomes the CPU.

    Only CPU and CUDA are supported: results are kept in float64, which other devices lack.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name in (None, "auto"):
        name = "cuda" if count else "cuda:0"  # which becomes the CPU below
    elif str(name).isdigit():  # the number of a GPU
        name = f"cuda:{name}"
    name = str(name)
    if name == "cuda:0" and count == 0:
        _say_cpu()
        return torch.device("cpu")

    devices = ["cpu"]
    if count:
        devices.append("cuda")
        devices += [f"cuda:{index}" for index in range(count)]
    is_cpu = name == "cpu:0"  # as accelerate calls it
    if name not in devices and not is_cpu:
        raise DuelError(f"No device '{name}'; this machine has {count} CUDA devices: use {', '.join(devices)}.")
    return torch.device(name)


def pick_dtype(name: str, device: torch.device) -> torch.dtype | str:
    """The dtype of a name; "auto": float32 on a CPU, otherwise the checkpoint's."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    return getattr(torch, name)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """A context in which networks are built in a dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# ---------------------------------------------------------------- tensors that fit


def require_equal(
    what: str,
    expected: Mapping[str, Shape],
    actual: Mapping[str, Shape],
    name: Callable[[str], str] = str,
) -> None:
    """Raise DuelError, starting with `what`, unless a file has the tensors that a network expects.

    `name(key)`: the name of a tensor in the file.
    """
    misshapen = []
    for key, shape in sorted(expected.items()):
        if key in actual and actual[key] != shape:
            misshapen.append(f"{name(key)} is {actual[key]}, not {shape}")
    missing = map(name, expected.keys() - actual)
    unknown = map(name, actual.keys() - expected)
    require_none(what, missing, unknown, misshapen)


def require_none(
    what: str,
    missing: Iterable[str],
    unknown: Iterable[str] = (),
    misshapen: Iterable[str] = (),
) -> None:
    """Raise DuelError, starting with `what`, if any tensor is missing, unknown or of another shape."""
    faults = {
        "missing": sorted(set(missing)),
        "unknown": sorted(set(unknown)),
        "of another shape": sorted(misshapen),
    }
    parts = []
    for kind, tensors in faults.items():
        if tensors:
            more = ", ..." if len(tensors) > SHOWN else ""
            parts.append(f"{len(tensors)} {kind}: {', '.join(tensors[:SHOWN])}{more}")
    if parts:
        raise DuelError(f"{what}: {'; '.join(parts)}.")
