"""What lies outside a network: its files in a folder or on the hub, and the device and dtype it runs in."""

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
UNHEARD_OF = re.compile(r"model type `(.*?)` but Transformers does not recognize|Unrecognized model in ")
CAUSE = re.compile(r"WeightsUnpickler error:\s*(.*?)(?:\. |\n|$)")  # amid torch's advice to run a file's code


def raw_config(path: str, revision: str, needed: bool = True) -> dict[str, Any]:
    """config.json as it stands; no code of the checkpoint is run for it. `needed`: a folder without one is an error."""
    if needed and os.path.isdir(path) and not os.path.isfile(os.path.join(path, "config.json")):
        raise DuelError(f"{path} holds no config.json: it is no checkpoint, or its download is not complete.")
    try:
        raw = PretrainedConfig.get_config_dict(path, revision=revision)[0]
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    except TypeError:  # transformers 4, of a list
        raw = None
    if not isinstance(raw, dict):
        raise DuelError(f"The config.json of {path} is no config: wanted an object of names and values.")
    for key in ("auto_map", "quantization_config"):
        if not isinstance(raw.get(key) or {}, dict):
            raise DuelError(f"The config.json of {path} is no config: '{key}' is an object; got {raw[key]!r}.")
    classes = raw.get("architectures") or []
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise DuelError(f"The config.json of {path} is no config: 'architectures' is a list of names; got {classes!r}.")
    return raw


def pinned(asked: LoadOptions) -> LoadOptions:
    """The same with the revision of a hub name as a commit, so that all files are of one state; the spec names it."""
    if os.path.isdir(asked.name):
        return asked
    try:
        file = cached_file(asked.name, "config.json", revision=asked.revision, **QUIET)
    except (OSError, ValueError):  # reading the config says what is wrong
        return asked
    folder, commit = os.path.split(os.path.dirname(file or ""))
    return dataclasses.replace(asked, revision=commit) if os.path.basename(folder) == "snapshots" else asked


def local_folder(path: str, revision: str, code_only: bool = False) -> str:
    """The folder that holds a checkpoint's config, code (as text) and weights, fetched where it is a hub name."""
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
        raise unreadable(path, error) from error


def has_tokenizer(path: str, revision: str) -> bool:
    """Whether a tokenizer lies beside the weights."""
    return any(
        cached_file(path, name, revision=revision, **QUIET) is not None
        for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt")
    )


def load_tokenizer(path: str, trust_remote_code: bool, revision: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or hub name; raises DuelError when there is none."""
    tokenizer = _load_tokenizer(path, trust_remote_code, revision)
    if not set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids):  # made by its class, of no file
        raise DuelError(f"There is no tokenizer in {path}; {TOKENIZER_REMEDY}.")
    return tokenizer


def _load_tokenizer(path: str, trust_remote_code: bool, revision: str) -> PreTrainedTokenizerBase:
    """What transformers makes of it; Dream's, which has code of its own, is Qwen2's with other special tokens."""
    configs = logging.getLogger("transformers.configuration_utils")
    level = configs.level
    configs.setLevel(logging.ERROR)  # it warns of every model_type that it does not know
    options = {"trust_remote_code": trust_remote_code, "revision": revision}
    try:
        return AutoTokenizer.from_pretrained(path, **options)
    except AttributeError:  # transformers 5, of a config with scaled rotary positions whose model_type it does not know
        return AutoTokenizer.from_pretrained(path, config=PretrainedConfig(), **options)
    except Exception as error:  # where it is trusted, a config's own code is run too, which raises whatever it does
        if _tokenizer_class(path, revision) in QWEN2_TOKENIZERS:
            return Qwen2TokenizerFast.from_pretrained(path, revision=revision)
        if os.path.isdir(path) and not has_tokenizer(path, revision):
            raise DuelError(f"There is no tokenizer in {path}; {TOKENIZER_REMEDY}.") from error
        raise unreadable(path, error, "config and tokenizer of", TOKENIZER_REMEDY) from error
    finally:
        configs.setLevel(level)


def _tokenizer_class(path: str, revision: str) -> str | None:
    """The class that tokenizer_config.json names, if there is such a file and it can be read."""
    named = cached_file(path, "tokenizer_config.json", revision=revision, **QUIET)
    try:
        with open(named or os.devnull, encoding="utf-8") as file:
            return json.load(file).get("tokenizer_class")
    except (ValueError, AttributeError):
        return None


def mask_of(
    asked: LoadOptions,
    raw: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase | None,
    known: int | None,
    rows: int | None,
) -> int:
    """The id of [MASK]: as asked, as config, tokenizer or family (`known`) say; `rows` of the embedding bound it.

    Raises DuelError where none says, or where the id is another special token's.
    """
    named = getattr(tokenizer, "mask_token_id", None)
    for mask_id in (asked.mask_token_id, raw.get("mask_token_id"), named, known):
        if mask_id is not None:
            if isinstance(mask_id, bool) or not isinstance(mask_id, int) or not 0 <= mask_id < (rows or mask_id + 1):
                ids = f"its ids are 0 to {rows - 1}" if rows else "ids are whole numbers"
                raise DuelError(
                    f"mask_token_id={mask_id} is not an id of {asked.name}; {ids}. Pass mask_token_id=<the right one>."
                )
            for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
                if mask_id == getattr(tokenizer, name, None) and mask_id != named:
                    raise DuelError(f"mask_token_id={mask_id} is the {name} of {asked.name}'s tokenizer, not [MASK].")
            return int(mask_id)
    raise DuelError(f"Neither config nor tokenizer of {asked.name} names a mask token; pass mask_token_id=<id>.")


def said(error: Exception) -> str:
    """What an error is and says, in a line; of torch's for a pickle with code, the cause alone."""
    if cause := CAUSE.search(str(error)):
        return cause[1]
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    line = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    return f"{type(error).__name__}: {line}".rstrip(" :,.")


def unreadable(path: str, error: Exception, what: str = "checkpoint", remedy: str = "") -> DuelError:
    """The error for a checkpoint, or what of it, that cannot be read, with the likely remedy."""
    hint = f" To use another one, {remedy}." if remedy else ""
    cause = said(error)
    if "trust_remote_code" in str(error):
        hint = " It runs code of its own: pass trust_remote_code=true if you trust it."
    elif unheard := UNHEARD_OF.search(str(error)):
        cause = f"transformers knows no model_type {unheard[1]!r}" if unheard[1] else "it names no model_type"
        hint = (
            f" If its network is one of the families', say which: family={'|'.join(NAMED)}. If it has code of its own "
            "that you trust: backend=remote,trust_remote_code=true."
        )
    elif not os.path.isdir(path):
        near = difflib.get_close_matches(path, NAMES, n=1)
        meant = f" Did you mean the bundled {near[0]}?" if near else ""
        hint = f"{meant} It is no local folder; a hub name needs a connection or a filled cache.{hint}"
    return DuelError(f"Cannot read {what} '{path}': {cause}.{hint}")


def row_length(path: str, asked: int | None, held: int | None) -> int:
    """The positions of a row: those asked for, which the network must hold, else all that it holds."""
    if asked and held and asked > held:
        raise DuelError(f"max_length={asked} is too long: {path} holds {held} positions; leave it out or lower it.")
    return asked or held


def pick_device(name: str | None) -> torch.device:
    """The device of a name; None: a GPU where there is one.

    Where there is no GPU at all a CPU stands in for the first one, which the harness asks for unless told otherwise.
    Only CPU and CUDA: results are kept in float64, which other devices lack.
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
        log.info("no CUDA device here: running on the CPU")
        return torch.device("cpu")
    if device.type == "cuda" and (device.index or 0) >= count:
        raise DuelError(f"No device '{name}': {count} CUDA devices are here, counted from 0. Use device=cpu.")
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype | str:
    """The dtype of a name; "auto": float32 on a CPU, else the checkpoint's."""
    name = str(name).removeprefix("torch.")
    if name == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    if name not in DTYPES:
        raise unknown("dtype", name, DTYPES)
    return getattr(torch, name)
