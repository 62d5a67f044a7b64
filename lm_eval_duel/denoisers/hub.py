"""What lies outside a network: its files in a folder or on the hub, and the device and dtype it runs in."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase
from transformers.utils import cached_file

from lm_eval_duel.errors import DuelError, unknown
from lm_eval_duel.options import DTYPES

log = logging.getLogger("lm_eval.duel_mdm")


def raw_config(path: str, revision: str) -> dict[str, Any]:
    """config.json as it stands; no code of the checkpoint is run for it."""
    try:
        return PretrainedConfig.get_config_dict(path, revision=revision)[0]
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error


def local_folder(path: str, revision: str, files: Sequence[str]) -> str:
    """The folder that holds a checkpoint's config and weights, fetched from the hub where it is a hub name."""
    if os.path.isdir(path):
        return path
    try:
        return snapshot_download(path, revision=revision, allow_patterns=["config.json", *files])
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error


def has_tokenizer(path: str, revision: str) -> bool:
    """Whether a tokenizer lies beside the weights."""
    return any(
        cached_file(path, name, revision=revision, _raise_exceptions_for_missing_entries=False) is not None
        for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt")
    )


def load_tokenizer(path: str, trust_remote_code: bool, revision: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or hub name; raises DuelError when there is none."""
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code, revision=revision)
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error


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
