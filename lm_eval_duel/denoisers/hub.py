"""Everything around a network: its files in a folder or on the hub, its tokenizer, device and dtype."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import json
import logging
import os
import re
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase, Qwen2TokenizerFast
from transformers.utils import cached_file

from lm_eval_duel.demo import NAMES
from lm_eval_duel.denoisers.hf.families import NAMED
from lm_eval_duel.denoisers.load_options import DTYPES, LoadOptions
from lm_eval_duel.errors import DuelError, unknown

log = logging.getLogger("lm_eval.duel_mdm")

QUIET = {"_raise_exceptions_for_missing_entries": False}
QWEN2_TOKENIZERS = ("DreamTokenizer",)
TOKENIZER_REMEDY = "pass tokenizer=<a folder or hub name>"
UNKNOWN_MODEL_TYPE = re.compile(r"model type `(.*?)` but Transformers does not recognize|Unrecognized model in ")
CAUSE = re.compile(r"WeightsUnpickler error:\s*(.*?)(?:\. |\n|$)")  # without torch's advice to run the file's code


def read_config(path: str, revision: str, needed: bool = True) -> dict[str, Any]:
    """config.json as a dict, without running code of the checkpoint. `needed`: a folder without one is an error."""
    if needed and os.path.isdir(path) and not os.path.isfile(os.path.join(path, "config.json")):
        raise DuelError(f"{path} has no config.json: it is not a checkpoint, or its download is incomplete.")
    try:
        config = PretrainedConfig.get_config_dict(path, revision=revision)[0]
    except (OSError, ValueError) as error:
        raise cannot_read(path, error) from error
    except TypeError:  # transformers 4, if it is a list
        config = None
    if not isinstance(config, dict):
        raise DuelError(f"The config.json of {path} is not a config: expected an object of names and values.")
    for key in ("auto_map", "quantization_config"):
        if not isinstance(config.get(key) or {}, dict):
            raise DuelError(f"The config.json of {path} is wrong: '{key}' must be an object; got {config[key]!r}.")
    classes = config.get("architectures") or []
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise DuelError(
            f"The config.json of {path} is wrong: 'architectures' must be a list of names; got {classes!r}."
        )
    return config


def pin_revision(options: LoadOptions) -> LoadOptions:
    """The options with the revision of a hub name as a commit: all files come from it and the spec names it."""
    if os.path.isdir(options.name):
        return options
    try:
        file = cached_file(options.name, "config.json", revision=options.revision, **QUIET)
    except (OSError, ValueError):  # raised again when the config is read
        return options
    folder, commit = os.path.split(os.path.dirname(file or ""))
    return dataclasses.replace(options, revision=commit) if os.path.basename(folder) == "snapshots" else options


def local_folder(path: str, revision: str, code_only: bool = False) -> str:
    """The folder with a checkpoint's config, code (as text) and weights; a hub name is downloaded."""
    if os.path.isdir(path):
        return path
    try:
        if code_only:
            return snapshot_download(path, revision=revision, allow_patterns=["config.json", "*.py"])
        for weights in ("*.safetensors", "*.bin", "*.ckpt"):
            wanted = ["config.json", "*.py", weights, f"{weights}.index.json"]
            folder = snapshot_download(path, revision=revision, allow_patterns=wanted)
            if fnmatch.filter(os.listdir(folder), weights):
                break
        return folder
    except (OSError, ValueError) as error:
        raise cannot_read(path, error) from error


def has_tokenizer(path: str, revision: str) -> bool:
    """Whether a checkpoint has a tokenizer."""
    return any(
        cached_file(path, name, revision=revision, **QUIET) is not None
        for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt")
    )


def load_tokenizer(path: str, trust_remote_code: bool, revision: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or hub name; raises DuelError if there is none."""
    tokenizer = _load_tokenizer(path, trust_remote_code, revision)
    if not set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids):  # built by its class, without a file
        raise DuelError(f"There is no tokenizer in {path}; {TOKENIZER_REMEDY}.")
    return tokenizer


def _load_tokenizer(path: str, trust_remote_code: bool, revision: str) -> PreTrainedTokenizerBase:
    """The tokenizer as transformers reads it. Dream's has code of its own, but is Qwen2's with other special tokens."""
    configs = logging.getLogger("transformers.configuration_utils")
    level = configs.level
    configs.setLevel(logging.ERROR)  # it warns about every unknown model_type
    tokenizer_kwargs = {"trust_remote_code": trust_remote_code, "revision": revision}
    try:
        return AutoTokenizer.from_pretrained(path, **tokenizer_kwargs)
    except AttributeError:  # transformers 5, if rotary positions are scaled and the model_type is unknown
        return AutoTokenizer.from_pretrained(path, config=PretrainedConfig(), **tokenizer_kwargs)
    except Exception as error:  # trusted code of a config is run too and may raise anything
        if _tokenizer_class(path, revision) in QWEN2_TOKENIZERS:
            return Qwen2TokenizerFast.from_pretrained(path, revision=revision)
        if os.path.isdir(path) and not has_tokenizer(path, revision):
            raise DuelError(f"There is no tokenizer in {path}; {TOKENIZER_REMEDY}.") from error
        raise cannot_read(path, error, "config and tokenizer of", TOKENIZER_REMEDY) from error
    finally:
        configs.setLevel(level)


def _tokenizer_class(path: str, revision: str) -> str | None:
    """The class that tokenizer_config.json names, if the file exists and can be read."""
    path = cached_file(path, "tokenizer_config.json", revision=revision, **QUIET)
    try:
        with open(path or os.devnull, encoding="utf-8") as file:
            return json.load(file).get("tokenizer_class")
    except (ValueError, AttributeError):
        return None


def find_mask_id(
    options: LoadOptions,
    config: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase | None,
    known: int | None,
    rows: int | None,
) -> int:
    """The id of [MASK], from the options, the config, the tokenizer or the family (`known`), in this order.

    `rows`: of the embedding, an upper bound. Raises DuelError if no source has one, or if the id is that of another
    special token.
    """
    of_tokenizer = getattr(tokenizer, "mask_token_id", None)
    for mask_id in (options.mask_token_id, config.get("mask_token_id"), of_tokenizer, known):
        if mask_id is not None:
            if isinstance(mask_id, bool) or not isinstance(mask_id, int) or not 0 <= mask_id < (rows or mask_id + 1):
                ids = f"its ids are 0 to {rows - 1}" if rows else "ids are whole numbers"
                raise DuelError(
                    f"mask_token_id={mask_id} is not an id of {options.name}; {ids}. "
                    "Pass mask_token_id=<the right one>."
                )
            for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
                if mask_id == getattr(tokenizer, name, None) and mask_id != of_tokenizer:
                    raise DuelError(f"mask_token_id={mask_id} is the {name} of {options.name}'s tokenizer, not [MASK].")
            return int(mask_id)
    raise DuelError(f"Neither config nor tokenizer of {options.name} names a mask token; pass mask_token_id=<id>.")


def short_reason(error: Exception) -> str:
    """An error's type and message in one line; for torch's error about code in a pickle, the cause alone."""
    if cause := CAUSE.search(str(error)):
        return cause[1]
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    line = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    return f"{type(error).__name__}: {line}".rstrip(" :,.")


def cannot_read(path: str, error: Exception, what: str = "checkpoint", remedy: str = "") -> DuelError:
    """The error for a checkpoint, or the part of it in `what`, that cannot be read, with the likely remedy."""
    hint = f" To use another one, {remedy}." if remedy else ""
    cause = short_reason(error)
    if "trust_remote_code" in str(error):
        hint = " It runs code of its own: pass trust_remote_code=true if you trust it."
    elif match := UNKNOWN_MODEL_TYPE.search(str(error)):
        cause = f"transformers does not know model_type {match[1]!r}" if match[1] else "its config has no model_type"
        hint = (
            f" If its network belongs to a known family, say which: family={'|'.join(NAMED)}. If it has code of its "
            "own that you trust: backend=remote,trust_remote_code=true."
        )
    elif not os.path.isdir(path):
        nearest = difflib.get_close_matches(path, NAMES, n=1)
        suggestion = f" Did you mean the bundled {nearest[0]}?" if nearest else ""
        hint = f"{suggestion} It is not a local folder; a hub name needs a connection or a cached copy.{hint}"
    return DuelError(f"Cannot read {what} '{path}': {cause}.{hint}")


def row_length(path: str, max_length: int | None, positions: int | None) -> int:
    """The positions of a row: `max_length`, which the network must have, else all `positions` of the network."""
    if max_length and positions and max_length > positions:
        raise DuelError(
            f"max_length={max_length} is too long: {path} holds {positions} positions; leave it out or lower it."
        )
    return max_length or positions


def pick_device(name: str | None) -> torch.device:
    """The device of a name; None: a GPU if there is one.

    Without any GPU, the first one, which is the harness's default, becomes the CPU. Only CPU and CUDA are supported:
    results are kept in float64, which other devices lack.
    """
    name = "cuda" if name is None or str(name) == "auto" else f"cuda:{name}" if str(name).isdigit() else str(name)
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise DuelError(f"No device '{name}'; use cpu, cuda or cuda:0.")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and count == 0 and not device.index:
        log.info("No CUDA device found: running on the CPU")
        return torch.device("cpu")
    if device.type == "cuda" and (device.index or 0) >= count:
        raise DuelError(f"No device '{name}': there are {count} CUDA devices, numbered from 0. Use device=cpu.")
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype | str:
    """The dtype of a name; "auto": float32 on a CPU, otherwise the checkpoint's."""
    name = str(name).removeprefix("torch.")
    if name == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    if name not in DTYPES:
        raise unknown("dtype", name, DTYPES)
    return getattr(torch, name)
