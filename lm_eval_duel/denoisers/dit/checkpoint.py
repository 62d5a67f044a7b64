"""Checkpoints of the MDLM, BD3-LM and SEDD authors, read into our own DiT from config and weights alone.

What a checkpoint is follows from its config, never from its name: `causal` is the AR baseline, `cross_attn` with a
block shorter than the row is block-causal (BD3-LM), an `absorb` graph or time conditioning is SEDD, else MDLM. None of
a checkpoint's code is run.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from lm_eval_duel.denoisers import config_entries as entries
from lm_eval_duel.denoisers import weights
from lm_eval_duel.denoisers.dit.denoiser import ATTENTION, SEDD, DiTDenoiser
from lm_eval_duel.denoisers.dit.network import DiT, DiTConfig
from lm_eval_duel.denoisers.hf import strict_load as filling
from lm_eval_duel.denoisers.hub import mask_of, row_length, said
from lm_eval_duel.denoisers.load_options import LoadOptions
from lm_eval_duel.denoisers.predictions import require_fit
from lm_eval_duel.errors import DuelError, unknown

LAYOUT = ("hidden_dim", "n_blocks", "n_heads", "model_length")  # of config.json, of files whose code we replace
IGNORED = ("rotary_emb.inv_freq", "sampling_eps_min", "sampling_eps_max", "noise.")  # computed anew, or for sampling
PREFIX = "backbone."  # of names in some files
TOKENIZER = "gpt2"  # of the published checkpoints, which hold none
FAMILIES = ("mdlm", "bd3lm", "sedd", "ar")
EXAMPLE = '{"model_type": "mdlm", "vocab_size": 30522, "model_length": 128, "hidden_dim": 768, "cond_dim": 128, '
EXAMPLE += '"n_blocks": 12, "n_heads": 12, "time_conditioning": false}'


def reads(config: dict[str, Any]) -> bool:
    """Whether a raw config.json is of one of these families."""
    return "graph" in config or config.get("model_type") in ("mdlm", "bd3lm") or all(key in config for key in LAYOUT)


def load(
    folder: str, config: dict[str, Any], asked: LoadOptions, tokenizer: PreTrainedTokenizerBase | None
) -> DiTDenoiser:
    """The denoiser of a local folder; raises DuelError for weights that do not fill the network exactly.

    `tokenizer`: columns that are none of its tokens get no probability; its mask token, where it has one, is [MASK].
    """
    asked.refuse("DiT", "shift_logits", "backend", "cfg_scale", "peft", "device_map", "load_in_8bit", "load_in_4bit")
    if asked.dtype not in ("auto", "float32"):
        raise DuelError(f"MDLM, BD3-LM, SEDD and their AR baseline run in float32, not {asked.dtype}; leave dtype out.")
    try:
        family, shape, length, block = _shape(config)
    except DuelError:
        raise
    except KeyError as error:
        raise DuelError(
            f"The config.json of {folder} has no {error.args[0]}, which its family needs, as in {EXAMPLE}."
        ) from None
    except ValueError as error:
        raise DuelError(
            f"The config.json of {folder} is wrong: {str(error).rstrip('.')}. A right one: {EXAMPLE}."
        ) from None
    if asked.family not in (None, family):
        if asked.family not in FAMILIES:
            raise unknown("family", asked.family, FAMILIES)
        raise DuelError(f"By its config.json {folder} is of the family {family}, not {asked.family}; leave family out.")
    kind = SEDD if family == "sedd" else DiTDenoiser
    attention = ATTENTION.get(family, "bidirectional")
    if asked.attention not in (None, attention):
        raise DuelError(f"By its config.json {folder} is {attention}, not {asked.attention}.")
    if asked.sigma is not None and family != "sedd":
        raise DuelError(f"sigma is SEDD's noise level; {folder} is of the family {family}, which ignores it.")
    if block is not None:
        asked.require_block(block)
    row = row_length(folder, asked.max_length, length)
    # [MASK] as asked, else the tokenizer's (BERT's in LM1B), else the last column (GPT-2)
    mask_id = mask_of(asked, config, tokenizer, shape.vocab_size - 1, shape.vocab_size)
    if tokenizer is not None:
        require_fit(set(tokenizer.get_vocab().values()), mask_id, shape.vocab_size, folder)
    network = _filled(shape, weights.read(folder), folder, "model.n_blocks" if family == "sedd" else "n_blocks")
    tokens = set(range(shape.vocab_size)) if tokenizer is None else set(tokenizer.get_vocab().values())
    denoiser = kind(network.to(asked.device).eval(), family, row, folder, tokens, mask_id, block)
    denoiser.last_block = asked.last_block
    denoiser.bos = asked.bos or denoiser.bos
    if asked.sigma is not None:
        denoiser.sigma = asked.sigma
    return denoiser


def _shape(config: dict[str, Any]) -> tuple[str, DiTConfig, int, int | None]:
    """Family, network shape, row length and trained block of a raw config."""
    if "graph" in config:  # SEDD keeps its network in a section of its own, and counts no [MASK]
        kind = entries.section(config, "graph").get("type")
        if kind != "absorb":
            raise DuelError(
                f"This SEDD has a {kind} graph: without a mask state there is no order of unmasking to score."
            )
        (tokens,) = _counts(config, "tokens")
        *sizes, length = _counts(
            entries.section(config, "model"), "hidden_size", "n_blocks", "n_heads", "cond_dim", "length"
        )
        return "sedd", _divided(DiTConfig(tokens + 1, *sizes, time=True)), length, None
    *sizes, length = _counts(config, "vocab_size", "hidden_dim", "n_blocks", "n_heads", "model_length")
    causal, time = entries.switch(config, "causal", False), entries.switch(config, "time_conditioning", False)
    condition, block = entries.count(config, "cond_dim") or 128, entries.count(config, "block_size")
    adaptive, crossed = entries.switch(config, "adaln", not causal), entries.switch(config, "cross_attn", False)
    shape = _divided(DiTConfig(*sizes, condition, adaptive=adaptive, time=time))
    if not causal and crossed and block is not None and block < length:
        if time:
            raise DuelError("A block-causal network that is told the noise level is not supported: whose level is it?")
        return "bd3lm", shape, length, block
    return "ar" if causal else "sedd" if time else "mdlm", shape, length, None


def _counts(config: dict[str, Any], *keys: str) -> list[int]:
    """Entries that are whole numbers; raises KeyError, of all that are not there in quotes."""
    found = {key: entries.count(config, key) for key in keys}
    if lacking := [key for key, value in found.items() if value is None]:
        raise KeyError(", ".join(f"'{key}'" for key in lacking))
    return list(found.values())


def _divided(shape: DiTConfig) -> DiTConfig:
    """The same shape; raises ValueError where heads do not divide it."""
    if shape.width % (2 * shape.heads):
        raise ValueError(f"{shape.heads} heads do not divide a width of {shape.width} into even parts.")
    return shape


def _filled(shape: DiTConfig, tensors: dict[str, torch.Tensor], folder: str, layers: str) -> DiT:
    """The network of a shape with every tensor of the file; raises DuelError for what is left over, or does not fit.

    It is built without memory first: the sizes are the config's word until the file has said the same. `layers`: the
    entry that says how many there are.
    """
    filling.require_counts(folder, {layers: shape.layers}, tensors)
    start = PREFIX if any(key.startswith(PREFIX) for key in tensors) else ""
    named = {key.removeprefix(PREFIX): value for key, value in tensors.items()}
    if twice := [key for key in named if key in tensors and PREFIX + key in tensors]:
        raise DuelError(f"The weights in {folder} hold both {twice[0]} and {PREFIX}{twice[0]}: which is the network's?")
    named = {key: value for key, value in named.items() if not key.startswith(IGNORED)}
    try:
        with torch.device("meta"):
            network = DiT(shape)
    except (RuntimeError, TypeError, OverflowError) as error:  # more elements than there are numbers
        raise DuelError(f"The config.json of {folder} describes no network: {said(error)}") from None
    wanted = {key: tuple(value.shape) for key, value in network.state_dict().items()}
    faults = filling.compare(wanted, {key: tuple(value.shape) for key, value in named.items()})
    filling.require(f"The weights in {folder} do not fill the network", faults, lambda key: f"{start}{key}")
    network.to_empty(device="cpu").load_state_dict(named)  # copied: the files may change while they are scored
    return network
