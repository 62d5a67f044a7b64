"""Checkpoints of the MDLM, BD3-LM, SEDD and GIDD authors, read into our own DiT from config and weights alone.

The family follows from the config, never from the checkpoint's name: `causal` means the AR baseline, `cross_attn` with
a block shorter than the row means BD3-LM, an `absorb` graph or time conditioning means SEDD, model_type `dit` means
GIDD, and anything else is MDLM.
None of a checkpoint's code is run.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from lm_eval_duel.denoisers import config_entries, weights
from lm_eval_duel.denoisers.dit import gidd
from lm_eval_duel.denoisers.dit.denoiser import ATTENTION, SEDD, DiTDenoiser
from lm_eval_duel.denoisers.dit.network import DiT, DiTConfig
from lm_eval_duel.denoisers.hf import strict_load
from lm_eval_duel.denoisers.hub import find_mask_id, row_length, short_reason
from lm_eval_duel.denoisers.load_options import LoadOptions
from lm_eval_duel.denoisers.vocabulary import require_fit
from lm_eval_duel.errors import DuelError, no_key_stays, unknown

LAYOUT = ("hidden_dim", "n_blocks", "n_heads", "model_length")  # entries of config.json that identify these networks
IGNORED = ("rotary_emb.", "sampling_eps_min", "sampling_eps_max", "noise.")  # recomputed, or for sampling
PREFIX = "backbone."  # of tensor names in some files
TOKENIZER = "gpt2"  # for the published checkpoints, which have none
FAMILIES = ("mdlm", "bd3lm", "sedd", "gidd", "ar")
KINDS = {"sedd": SEDD, "gidd": gidd.GIDD}  # of families with a class of their own
LAYERS = {"sedd": "model.n_blocks", "gidd": "num_hidden_layers"}  # entries for the number of layers; else n_blocks
EXAMPLE = '{"model_type": "mdlm", "vocab_size": 30522, "model_length": 128, "hidden_dim": 768, "cond_dim": 128, '
EXAMPLE += '"n_blocks": 12, "n_heads": 12, "time_conditioning": false}'


def is_dit(config: dict[str, Any]) -> bool:
    """Whether a config.json belongs to one of these families."""
    known = config.get("model_type") in ("mdlm", "bd3lm", gidd.MODEL_TYPE)
    return known or "graph" in config or all(key in config for key in LAYOUT)


def load(
    folder: str, config: dict[str, Any], options: LoadOptions, tokenizer: PreTrainedTokenizerBase | None
) -> DiTDenoiser:
    """The denoiser of a local folder; raises DuelError for weights that do not fill the network exactly.

    `tokenizer`: columns that are not among its tokens get no probability; its mask token, if it has one, is [MASK].
    """
    options.refuse(
        "DiT",
        "shift_logits",
        "first_token",
        "backend",
        "cfg_scale",
        "peft",
        "device_map",
        "load_in_8bit",
        "load_in_4bit",
    )
    if options.dtype not in ("auto", "float32"):
        raise DuelError(
            f"MDLM, BD3-LM, SEDD and their AR baseline run in float32, not {options.dtype}; leave dtype out."
        )
    family, shape, length, block = read_shape(config, options.name, folder)
    _require_agreement(options, folder, family)
    options.require_cacheable(ATTENTION.get(family, "bidirectional"))
    if options.cache and family == "sedd":
        raise no_key_stays(options.cache, family)
    if block is not None:
        options.require_block(block)
    row = row_length(folder, options.max_length, length)
    # [MASK] of the options, else of the config or the tokenizer (BERT's for LM1B), else the last column (GPT-2)
    last = shape.vocab_size - 1
    known = last if family != "gidd" else gidd.MASK if last >= gidd.MASK else None
    mask_id = find_mask_id(options, config, tokenizer, known, shape.vocab_size)
    if tokenizer is not None:
        require_fit(set(tokenizer.get_vocab().values()), mask_id, shape.vocab_size, folder)
    network = _filled(shape, weights.read(folder), folder, LAYERS.get(family, "n_blocks"))
    columns = range(mask_id if family == "gidd" else shape.vocab_size)  # GIDD's after [MASK] are padding
    tokens = set(columns) if tokenizer is None else set(tokenizer.get_vocab().values())
    denoiser = KINDS.get(family, DiTDenoiser)(
        network.to(options.device).eval(), family, row, folder, tokens, mask_id, block
    )
    denoiser.last_block = options.last_block
    denoiser.bos = options.bos or denoiser.bos
    if options.sigma is not None:
        denoiser.sigma = options.sigma
    if family == "gidd":
        denoiser.t_eps, denoiser.published_block = config["t_eps"], None
    return denoiser


def _require_agreement(options: LoadOptions, folder: str, family: str) -> None:
    """Raise DuelError for options that contradict the family of the config."""
    if options.family not in (None, family):
        if options.family not in FAMILIES:
            raise unknown("family", options.family, FAMILIES)
        raise DuelError(
            f"By its config.json {folder} is of the family {family}, not {options.family}; leave family out."
        )
    attention = ATTENTION.get(family, "bidirectional")
    if options.attention not in (None, attention):
        raise DuelError(f"By its config.json {folder} is {attention}, not {options.attention}; leave attention out.")
    if options.sigma is not None and family != "sedd":
        raise DuelError(f"sigma is SEDD's noise level; {folder} is of the family {family}, which ignores it.")


def read_shape(config: dict[str, Any], name: str, folder: str) -> tuple[str, DiTConfig, int, int | None]:
    """Family, network shape, row length and trained block; raises DuelError for a config that is wrong."""
    try:
        if config.get("model_type") == gidd.MODEL_TYPE:
            shape, length = gidd.read_shape(config, name)
            return "gidd", _divided(shape), length, None
        return _shape(config)
    except DuelError:
        raise
    except KeyError as error:
        raise DuelError(
            f"The config.json of {folder} has no {error.args[0]}, which its family needs, as in {EXAMPLE}."
        ) from None
    except ValueError as error:
        raise DuelError(
            f"The config.json of {folder} is wrong: {str(error).rstrip('.')}. A correct one: {EXAMPLE}."
        ) from None


def _shape(config: dict[str, Any]) -> tuple[str, DiTConfig, int, int | None]:
    """Family, network shape, row length and trained block of a config.json."""
    if "graph" in config:  # SEDD describes its network in a section of its own, and does not count [MASK]
        kind = config_entries.section(config, "graph").get("type")
        if kind != "absorb":
            raise DuelError(
                f"This SEDD has a {kind} graph: without a mask state there is no order of unmasking to score."
            )
        (tokens,) = _counts(config, "tokens")
        *sizes, length = _counts(
            config_entries.section(config, "model"), "hidden_size", "n_blocks", "n_heads", "cond_dim", "length"
        )
        return "sedd", _divided(DiTConfig(tokens + 1, *sizes, time=True)), length, None
    *sizes, length = _counts(config, "vocab_size", "hidden_dim", "n_blocks", "n_heads", "model_length")
    causal = config_entries.switch(config, "causal", False)
    time = config_entries.switch(config, "time_conditioning", False)
    adaptive = config_entries.switch(config, "adaln", not causal)
    crossed = config_entries.switch(config, "cross_attn", False)
    condition, block = config_entries.count(config, "cond_dim") or 128, config_entries.count(config, "block_size")
    shape = _divided(DiTConfig(*sizes, condition, adaptive=adaptive, time=time))
    if not causal and crossed and block is not None and block < length:
        if time:
            raise DuelError(
                "A block-causal network with time conditioning is not supported: its blocks differ in noise."
            )
        return "bd3lm", shape, length, block
    return "ar" if causal else "sedd" if time else "mdlm", shape, length, None


def _counts(config: dict[str, Any], *keys: str) -> list[int]:
    """Integer entries; raises KeyError with the quoted names of all that are missing."""
    counts = {key: config_entries.count(config, key) for key in keys}
    if missing := [key for key, value in counts.items() if value is None]:
        raise KeyError(", ".join(f"'{key}'" for key in missing))
    return list(counts.values())


def _divided(shape: DiTConfig) -> DiTConfig:
    """The same shape; raises ValueError if heads do not divide its width."""
    if shape.width % (2 * shape.heads):
        raise ValueError(f"{shape.heads} heads do not divide a width of {shape.width} into even parts.")
    return shape


def _filled(shape: DiTConfig, tensors: dict[str, torch.Tensor], folder: str, layers: str) -> DiT:
    """The network of a shape with every tensor of the file; raises DuelError if one is missing, unknown or misshapen.

    The network is built on the meta device first: until its sizes are checked against the file, it takes no memory.
    `layers`: the entry of the config for the number of layers.
    """
    strict_load.require_counts(folder, {layers: shape.layers}, tensors)
    prefix = PREFIX if any(key.startswith(PREFIX) for key in tensors) else ""
    named = {key.removeprefix(PREFIX): value for key, value in tensors.items()}
    if twice := [key for key in named if key in tensors and PREFIX + key in tensors]:
        raise DuelError(f"The weights in {folder} hold both {twice[0]} and {PREFIX}{twice[0]}; remove one of them.")
    named = {key: value for key, value in named.items() if not key.startswith(IGNORED)}
    try:
        with torch.device("meta"):
            network = DiT(shape)
    except (RuntimeError, TypeError, OverflowError) as error:  # more elements than an integer can count
        raise DuelError(f"The config.json of {folder} describes no valid network: {short_reason(error)}") from None
    expected = {key: tuple(value.shape) for key, value in network.state_dict().items()}
    faults = strict_load.compare(expected, {key: tuple(value.shape) for key, value in named.items()})
    strict_load.require_no_faults(
        f"The weights in {folder} do not fill the network", faults, lambda key: f"{prefix}{key}"
    )
    network.to_empty(device="cpu").load_state_dict(named)  # copied, so that the file may change later
    return network
