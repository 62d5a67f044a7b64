"""Checkpoints of the MDLM, BD3-LM and SEDD authors, read into our own DiT from config and weights alone.

What a checkpoint is follows from its config, never from its name: `causal` is the AR baseline, `cross_attn` with a
block shorter than the row is block-causal (BD3-LM), an `absorb` graph or time conditioning is SEDD, else MDLM. None of
a checkpoint's code is run.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from lm_eval_duel.denoisers import weights
from lm_eval_duel.denoisers.asked import Asked
from lm_eval_duel.denoisers.dit import DiT, DiTConfig
from lm_eval_duel.denoisers.dit_denoiser import SEDD, DiTDenoiser
from lm_eval_duel.denoisers.hub import row_length
from lm_eval_duel.errors import DuelError, unknown

LAYOUT = ("hidden_dim", "n_blocks", "n_heads", "model_length")  # of config.json, of files whose code we replace
IGNORED = ("rotary_emb.inv_freq", "sampling_eps_min", "sampling_eps_max", "noise.")  # computed anew, or for sampling
TOKENIZER = "gpt2"  # of the published checkpoints, which hold none
FAMILIES = ("mdlm", "bd3lm", "sedd", "ar")
EXAMPLE = '{"model_type": "mdlm", "vocab_size": 30522, "model_length": 128, "hidden_dim": 768, "cond_dim": 128, '
EXAMPLE += '"n_blocks": 12, "n_heads": 12, "time_conditioning": false}'


def reads(config: dict[str, Any]) -> bool:
    """Whether a raw config.json is of one of these families."""
    return "graph" in config or config.get("model_type") in ("mdlm", "bd3lm") or all(key in config for key in LAYOUT)


def load(folder: str, config: dict[str, Any], asked: Asked, tokenizer: PreTrainedTokenizerBase | None) -> DiTDenoiser:
    """The denoiser of a local folder; raises DuelError for weights that do not fill the network exactly.

    `tokenizer`: columns that are none of its tokens get no probability; its mask token, where it has one, is [MASK].
    """
    asked.refuse("DiT", "shift_logits", "backend", "cfg_scale", "peft", "device_map", "load_in_8bit", "load_in_4bit")
    if asked.dtype not in ("auto", "float32"):
        raise DuelError(f"MDLM, BD3-LM, SEDD and their AR baseline run in float32, not {asked.dtype}; leave dtype out.")
    try:
        family, shape, length, block = _shape(config)
    except KeyError as error:
        raise DuelError(
            f"The config.json of {folder} has no {error}, which its family needs, as in {EXAMPLE}."
        ) from None
    if asked.family not in (None, family):
        if asked.family not in FAMILIES:
            raise unknown("family", asked.family, FAMILIES)
        raise DuelError(f"By its config.json {folder} is of the family {family}, not {asked.family}; leave family out.")
    row = row_length(folder, asked.max_length, length)
    mask_id = _mask_id(folder, asked, config, tokenizer, shape.vocab_size)
    network = DiT(shape)
    _fill(network, weights.read(folder), folder)
    tokens = set(range(shape.vocab_size)) if tokenizer is None else set(tokenizer.get_vocab().values())
    kind = SEDD if family == "sedd" else DiTDenoiser
    denoiser = kind(network.to(asked.device).eval(), family, row, folder, tokens, mask_id, block)
    if asked.attention not in (None, denoiser.attention):
        raise DuelError(f"By its config.json {folder} is {denoiser.attention}, not {asked.attention}.")
    denoiser.last_block = asked.last_block
    denoiser.bos = asked.bos or denoiser.bos
    if asked.sigma is not None:
        if family != "sedd":
            raise DuelError(f"sigma is SEDD's noise level; {folder} is of the family {family}, which ignores it.")
        denoiser.sigma = asked.sigma
    return denoiser


def _shape(config: dict[str, Any]) -> tuple[str, DiTConfig, int, int | None]:
    """Family, network shape, row length and trained block of a raw config."""
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
        return "sedd", shape, model["length"], None
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
        if time:
            raise DuelError("A block-causal network that is told the noise level is not supported: whose level is it?")
        return "bd3lm", shape, length, block
    return "ar" if causal else "sedd" if time else "mdlm", shape, length, None


def _mask_id(
    folder: str, asked: Asked, config: dict[str, Any], tokenizer: PreTrainedTokenizerBase | None, vocab_size: int
) -> int:
    """The column of [MASK]: as asked, else the tokenizer's mask token (BERT's in LM1B), else the last one (GPT-2)."""
    named = None if tokenizer is None else tokenizer.mask_token_id
    for mask_id in (asked.mask_token_id, config.get("mask_token_id"), named, vocab_size - 1):
        if mask_id is not None:
            if not 0 <= mask_id < vocab_size:
                raise DuelError(f"mask_token_id={mask_id} is not an id of {folder}; its ids are 0 to {vocab_size - 1}.")
            return mask_id
    raise AssertionError


def _fill(network: DiT, tensors: dict[str, torch.Tensor], folder: str) -> None:
    """Load every tensor of the file; what is left over or missing on either side is an error naming the first ten."""
    named = {}
    for key, value in tensors.items():
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
