"""The files of a checkpoint in a folder or on the hub, its tokenizer, device and dtype."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import logging
import os
import re
from collections.abc import Iterator
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.constants import HF_HUB_OFFLINE
from huggingface_hub.errors import HFValidationError
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase, Qwen2TokenizerFast
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.utils import cached_file

from lm_eval_duel.demo import NAMES
from lm_eval_duel.denoisers.hf.families import NAMED
from lm_eval_duel.denoisers.load_options import LoadOptions
from lm_eval_duel.errors import DuelError, nearest

log = logging.getLogger("lm_eval.duel_mdm")

LONGEST_REASON = 800  # characters
QUIET = {"_raise_exceptions_for_missing_entries": False}
QWEN2_TOKENIZERS = ("DreamTokenizer",)
TOKENIZER_REMEDY = "To use another one, pass tokenizer=<a folder or hub name>."
UNKNOWN_MODEL_TYPE = re.compile(r"model type `(.*?)` but Transformers does not recognize|Unrecognized model in ")
CAUSE = re.compile(r"WeightsUnpickler error:\s*(.*?)(?:\. |\n|$)")  # without torch's advice to run the file's code


def read_config(path: str, revision: str, needed: bool = True) -> dict[str, Any]:
    """config.json as a dict, without running code of the checkpoint. `needed`: raise DuelError if a folder has none."""
    if needed and os.path.isdir(path) and not os.path.isfile(os.path.join(path, "config.json")):
        raise DuelError(f"{path} has no config.json: it is not a checkpoint, or its download is incomplete.")
    with explained(path):
        try:
            config = PretrainedConfig.get_config_dict(path, revision=revision)[0]
        except TypeError:  # transformers 4, if it is a list
            config = None
        if not isinstance(config, dict):
            raise DuelError(f"The config.json of {path} is not a JSON object.")
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
    with explained(path):
        if code_only:
            return snapshot_download(path, revision=revision, allow_patterns=["config.json", "*.py"])
        for weights in ("*.safetensors", "*.bin", "*.ckpt"):
            wanted = ["config.json", "*.py", weights, f"{weights}.index.json"]
            folder = snapshot_download(path, revision=revision, allow_patterns=wanted)
            if fnmatch.filter(os.listdir(folder), weights):
                break
    return folder


def has_tokenizer(path: str, revision: str) -> bool:
    """True if a checkpoint has a tokenizer."""
    return any(
        cached_file(path, name, revision=revision, **QUIET) is not None
        for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt")
    )


def load_tokenizer(path: str, trust_remote_code: bool, revision: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or hub name. Dream's has its own code, but is Qwen2's with other special tokens."""
    configs = logging.getLogger("transformers.configuration_utils")
    level = configs.level
    configs.setLevel(logging.ERROR)  # it warns about every unknown model_type
    tokenizer_kwargs = {"trust_remote_code": trust_remote_code, "revision": revision}
    try:
        with explained(path, "read config and tokenizer of", TOKENIZER_REMEDY):
            try:
                tokenizer = AutoTokenizer.from_pretrained(path, **tokenizer_kwargs)
            except AttributeError:  # transformers 5, if rotary positions are scaled and the model_type is unknown
                tokenizer = AutoTokenizer.from_pretrained(path, config=PretrainedConfig(), **tokenizer_kwargs)
            except Exception:
                if os.path.isdir(path) and not has_tokenizer(path, revision):
                    raise DuelError(f"There is no tokenizer in {path}. {TOKENIZER_REMEDY}") from None
                if get_tokenizer_config(path, revision=revision).get("tokenizer_class") not in QWEN2_TOKENIZERS:
                    raise
                tokenizer = Qwen2TokenizerFast.from_pretrained(path, revision=revision)
    finally:
        configs.setLevel(level)
    if not set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids):  # built by its class, without a file
        raise DuelError(f"There is no tokenizer in {path}. {TOKENIZER_REMEDY}")
    return tokenizer


def find_mask_id(
    options: LoadOptions,
    config: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase | None,
    known: int | None,
    rows: int | None,
) -> int:
    """The id of [MASK], from the options, the config, the tokenizer or the family (`known`), in this order.

    `rows`: of the embedding, which bound the id. Raises DuelError if there is none, or it is another special token.
    """
    of_tokenizer = getattr(tokenizer, "mask_token_id", None)
    for mask_id in (options.mask_token_id, config.get("mask_token_id"), of_tokenizer, known):
        if mask_id is not None:
            if isinstance(mask_id, bool) or not isinstance(mask_id, int) or not 0 <= mask_id < (rows or mask_id + 1):
                ids = f"its ids are 0 to {rows - 1}" if rows else "ids are whole numbers"
                raise DuelError(f"mask_token_id={mask_id} is not an id of {options.name}; {ids}. Pass the right one.")
            for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
                if mask_id == getattr(tokenizer, name, None) and mask_id != of_tokenizer:
                    raise DuelError(f"mask_token_id={mask_id} is the {name} of {options.name}'s tokenizer, not [MASK].")
            return mask_id
    raise DuelError(f"Neither config nor tokenizer of {options.name} names a mask token; pass mask_token_id=<id>.")


def short_reason(error: Exception) -> str:
    """An error's type and message in one line; for torch's error about code in a pickle, the cause alone."""
    if cause := CAUSE.search(str(error)):
        return cause[1]
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    line = " ".join(lines[: None if lines and lines[0].endswith(":") else 1])[:LONGEST_REASON]
    return f"{type(error).__name__}: {line}".rstrip(" :,.")


@contextlib.contextmanager
def explained(path: str, what: str = "read checkpoint", remedy: str = "") -> Iterator[None]:
    """Turn any error of a library or of a checkpoint's own code into a DuelError that names the checkpoint and a
    remedy.
    """
    try:
        yield
    except (DuelError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise DuelError(f"Cannot {what} '{path}': {_with_hint(path, what, error, remedy)}") from error


def _with_hint(path: str, what: str, error: Exception, remedy: str) -> str:
    cause, text = short_reason(error), str(error)
    hint = f" {remedy}" if remedy else ""
    if "trust_remote_code" in text:
        hint = " It runs its own code: pass trust_remote_code=true if you trust it."
    elif match := UNKNOWN_MODEL_TYPE.search(text):
        cause = f"transformers does not know model_type {match[1]!r}" if match[1] else "its config has no model_type"
        hint = (
            f" If its network belongs to a known family, say which: family={'|'.join(NAMED)}. If it has code of its "
            "own that you trust: backend=remote,trust_remote_code=true."
        )
    elif isinstance(error, ModuleNotFoundError):
        hint = f" It needs the package {error.name}: pip install {error.name}."
    elif "offload" in text:
        hint = " It does not fit into the memory of the device_map: use fewer processes per machine or a smaller dtype."
    elif isinstance(error, OSError | HFValidationError) and not os.path.isdir(path):
        near = nearest(path, NAMES)
        suggestion = f" Did you mean the bundled {near[0]}?" if near else ""
        offline = ", and HF_HUB_OFFLINE is set" if HF_HUB_OFFLINE else ""
        hint = f"{suggestion} It is not a local folder; a hub name needs a connection or a cached copy{offline}.{hint}"
    return f"{cause}.{hint}"


def row_length(path: str, max_length: int | None, positions: int | None) -> int:
    """The length of rows: `max_length`, else all `positions` of the network; raises DuelError if neither will do."""
    if not (max_length or positions):
        raise DuelError(f"Neither config nor tokenizer of {path} gives its number of positions; pass max_length=.")
    if max_length and positions and max_length > positions:
        raise DuelError(f"max_length={max_length} is too long: {path} takes {positions} positions; lower it.")
    return max_length or positions


def pick_device(name: str | None) -> torch.device:
    """The device of a name; None: a GPU if there is one. Without any, the harness's default cuda:0 becomes the CPU.

    Only CPU and CUDA are supported: results are kept in float64, which other devices lack.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    default = "cuda" if count else "cuda:0"
    name = default if name in (None, "auto") else f"cuda:{name}" if str(name).isdigit() else str(name)
    if name == "cuda:0" and count == 0:
        log.info("No CUDA device found: running on the CPU")
        return torch.device("cpu")
    gpus = ["cuda", *(f"cuda:{index}" for index in range(count))] if count else []
    if name not in ("cpu", "cpu:0", *gpus):  # accelerate: cpu:0
        raise DuelError(f"No device '{name}'; this machine has {count} CUDA devices: use {', '.join(['cpu', *gpus])}.")
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
