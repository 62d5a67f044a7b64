"""What lies outside a network: its files in a folder or on the hub, and the device and dtype it runs in."""

from __future__ import annotations

import fnmatch
import json
import logging
import os
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase, Qwen2TokenizerFast
from transformers.utils import cached_file

from lm_eval_duel.denoisers.asked import Asked
from lm_eval_duel.errors import DuelError, unknown
from lm_eval_duel.options import DTYPES

log = logging.getLogger("lm_eval.duel_mdm")

QUIET = {"_raise_exceptions_for_missing_entries": False}
QWEN2_TOKENIZERS = ("DreamTokenizer",)


def raw_config(path: str, revision: str) -> dict[str, Any]:
    """config.json as it stands; no code of the checkpoint is run for it."""
    try:
        return PretrainedConfig.get_config_dict(path, revision=revision)[0]
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error


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
    """The tokenizer of a folder or hub name; raises DuelError when there is none.

    Dream's, which has code of its own, is the byte-level BPE of Qwen2 with other special tokens.
    """
    configs = logging.getLogger("transformers.configuration_utils")
    level = configs.level
    configs.setLevel(logging.ERROR)  # it warns of every model_type that it does not know
    options = {"trust_remote_code": trust_remote_code, "revision": revision}
    try:
        return AutoTokenizer.from_pretrained(path, **options)
    except AttributeError:  # transformers 5, of a config with scaled rotary positions whose model_type it does not know
        return AutoTokenizer.from_pretrained(path, config=PretrainedConfig(), **options)
    except Exception as error:  # where it is trusted, a config's own code is run too, which raises whatever it does
        named = cached_file(path, "tokenizer_config.json", revision=revision, **QUIET)
        if named:
            with open(named, encoding="utf-8") as file:
                if json.load(file).get("tokenizer_class") in QWEN2_TOKENIZERS:
                    return Qwen2TokenizerFast.from_pretrained(path, revision=revision)
        raise unreadable(path, error) from error
    finally:
        configs.setLevel(level)


def mask_of(
    asked: Asked, raw: dict[str, Any], tokenizer: PreTrainedTokenizerBase, known: int | None, rows: int | None
) -> int:
    """The id of [MASK]: as asked, as config, tokenizer or family (`known`) say; `rows` of the embedding bound it.

    Raises DuelError where none says, or where the id is another special token's.
    """
    for mask_id in (asked.mask_token_id, raw.get("mask_token_id"), tokenizer.mask_token_id, known):
        if mask_id is not None:
            if rows is not None and not 0 <= mask_id < rows:
                raise DuelError(
                    f"mask_token_id={mask_id} is not an id of {asked.name}; its ids are 0 to {rows - 1}. "
                    "Pass mask_token_id=<the right one>."
                )
            for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
                if mask_id == getattr(tokenizer, name, None) and mask_id != tokenizer.mask_token_id:
                    raise DuelError(f"mask_token_id={mask_id} is the {name} of {asked.name}'s tokenizer, not [MASK].")
            return int(mask_id)
    raise DuelError(f"Neither config nor tokenizer of {asked.name} names a mask token; pass mask_token_id=<id>.")


def first_line(error: Exception) -> str:
    """What an error says, in a line."""
    return (str(error).splitlines() or [""])[0]


def unreadable(path: str, error: Exception) -> DuelError:
    """The error for a checkpoint that cannot be read, with the likely remedy."""
    hint = ""
    if "trust_remote_code" in str(error):
        hint = " It runs code of its own: pass trust_remote_code=true if you trust it."
    elif not os.path.isdir(path):
        hint = " It is no local folder; a hub name needs a connection or a filled cache."
    return DuelError(f"Cannot read checkpoint '{path}': {type(error).__name__}: {first_line(error)}{hint}")


def row_length(path: str, asked: int | None, held: int | None) -> int:
    """The positions of a row: those asked for, which the network must hold, else all that it holds."""
    if asked and held and asked > held:
        raise DuelError(f"max_length={asked} is too long: {path} holds {held} positions; leave it out or lower it.")
    return asked or held


def pick_device(name: str | None) -> torch.device:
    """The device of a name; None: a GPU where there is one. A CPU takes over where there is no GPU at all.

    Only CPU and CUDA: results are kept in float64, which other devices lack.
    """
    name = "cuda" if name is None or str(name) == "auto" else f"cuda:{name}" if str(name).isdigit() else str(name)
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise DuelError(f"No device '{name}'; use cpu, cuda or cuda:0.")
    if device.type == "cuda" and not torch.cuda.is_available():
        log.info("no CUDA device here: running on the CPU")  # the harness asks for cuda:0 unless told otherwise
        return torch.device("cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise DuelError(f"No device '{name}': there are {torch.cuda.device_count()} CUDA devices, counted from 0.")
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype | str:
    """The dtype of a name; "auto": float32 on a CPU, else the checkpoint's."""
    name = str(name).removeprefix("torch.")
    if name == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    if name not in DTYPES:
        raise unknown("dtype", name, DTYPES)
    return getattr(torch, name)
