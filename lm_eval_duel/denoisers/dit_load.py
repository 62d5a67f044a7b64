"""Checkpoints of the MDLM, BD3-LM and SEDD authors, read into our own DiT from config and weights alone.

What a checkpoint is follows from its config, never from its name: `causal` is the AR baseline, `cross_attn` with a
block shorter than the row is block-causal (BD3-LM), an `absorb` graph or time conditioning is SEDD, else MDLM. None of
a checkpoint's code is run. Weights: `.safetensors`, or `.bin` read as tensors only.
"""

from __future__ import annotations

import os
import pickle
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from lm_eval_duel.denoisers.dit import DiT, DiTConfig, DiTDenoiser
from lm_eval_duel.denoisers.hub import first_line, row_length
from lm_eval_duel.errors import DuelError

TYPES = ("mdlm", "bd3lm")  # config.model_type, of files whose code we replace
IGNORED = ("rotary_emb.inv_freq", "sampling_eps_min", "sampling_eps_max", "noise.")  # computed anew, or for sampling
TOKENIZER = "gpt2"  # of the published checkpoints, which hold none
FILES = ("model.safetensors", "pytorch_model.bin")


def reads(config: dict[str, Any]) -> bool:
    """Whether a raw config.json is of one of these families."""
    return config.get("model_type") in TYPES or "graph" in config


def load(
    folder: str,
    config: dict[str, Any],
    *,
    device: torch.device,
    dtype: str,
    max_length: int | None,
    mask_token_id: int | None,
    tokens: set[int] | None,
) -> DiTDenoiser:
    """The denoiser of a local folder; raises DuelError for weights that do not fill the network exactly.

    `tokens`: the tokenizer's ids, where there is one; other columns get no probability.
    """
    if dtype not in ("auto", "float32"):
        raise DuelError(f"MDLM, SEDD and their AR baseline run in float32, not {dtype}; leave dtype out.")
    try:
        family, shape, length = _shape(config)
    except KeyError as error:
        raise DuelError(f"The config.json of {folder} has no {error}, which its family needs.") from None
    if mask_token_id not in (None, shape.vocab_size - 1):
        raise DuelError(f"[MASK] is the last id of {folder}, {shape.vocab_size - 1}; leave mask_token_id out.")
    row = row_length(folder, max_length, length)
    network = DiT(shape)
    _fill(network, _weights(folder), folder)
    return DiTDenoiser(network.to(device).eval(), family, row, folder, tokens)


def _shape(config: dict[str, Any]) -> tuple[str, DiTConfig, int]:
    """Family, network shape and row length of a raw config."""
    if "graph" in config:  # SEDD keeps its network in a section of its own, and counts no [MASK]
        kind = config["graph"].get("type")
        if kind != "absorb":
            raise DuelError(
                f"This SEDD has a {kind} graph: without a mask state there is no order of unmasking to score."
            )
        model = config["model"]
        shape = DiTConfig(
            config["tokens"] + 1,
            model["hidden_size"],
            model["n_blocks"],
            model["n_heads"],
            model["cond_dim"],
            time=True,
        )
        return "sedd", shape, model["length"]
    causal, time = config.get("causal", False), config.get("time_conditioning", False)
    shape = DiTConfig(
        config["vocab_size"],
        config["hidden_dim"],
        config["n_blocks"],
        config["n_heads"],
        config.get("cond_dim", 128),
        adaptive=config.get("adaln", not causal),
        time=time,
    )
    length, block = config["model_length"], config.get("block_size")
    if not causal and config.get("cross_attn", False) and block is not None and block < length:
        raise DuelError(f"Block-causal networks (this one has blocks of {block}) are not supported yet.")
    return "ar" if causal else "sedd" if time else "mdlm", shape, length


def _weights(folder: str) -> dict[str, torch.Tensor]:
    """The tensors of a folder's weight file."""
    for name in FILES:
        path = os.path.join(folder, name)
        if os.path.exists(path):
            try:
                found = load_file(path) if name.endswith("safetensors") else torch.load(path, "cpu", weights_only=True)
            except (SafetensorError, RuntimeError, OSError, EOFError, pickle.UnpicklingError) as error:
                raise DuelError(f"Cannot read {path}: {type(error).__name__}: {first_line(error)}") from error
            if not all(isinstance(value, torch.Tensor) for value in found.values()):
                raise DuelError(f"{path} holds more than tensors; save the network's state_dict alone.")
            return found
    raise DuelError(f"No weights in {folder}: wanted one of {', '.join(FILES)}.")


def _fill(network: DiT, weights: dict[str, torch.Tensor], folder: str) -> None:
    """Load every tensor of the file; what is left over or missing on either side is an error naming the first ten."""
    named = {}
    for key, value in weights.items():
        key = key.removeprefix("backbone.")
        if not key.startswith(IGNORED):
            named[key] = value.float()
    own = network.state_dict()
    wrong = {
        "missing": [key for key in own if key not in named],
        "not known": [key for key in named if key not in own],
        "of another shape": [key for key in own if key in named and own[key].shape != named[key].shape],
    }
    for kind, keys in wrong.items():
        if keys:
            raise DuelError(
                f"The weights in {folder} do not fill the network: {len(keys)} {kind}: {', '.join(keys[:10])}."
            )
    network.load_state_dict(named)
