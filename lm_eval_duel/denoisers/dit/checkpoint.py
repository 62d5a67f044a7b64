"""Checkpoints of the MDLM, BD3-LM, SEDD and GIDD authors, read into our own DiT from config and weights alone.

A config is one of these by its names (`architectures`, `auto_map`, `model_type`), or by the sections of SEDD's authors:

    MDLM, BD3LM    `causal`: the AR baseline; `cross_attn` with a block shorter than the row: BD3-LM; else MDLM
                   `time_conditioning`: SEDD, if its name or family= says so
    sedd           the same entries, a SEDD
    DIT            GIDD, under masks alone or under masks and random tokens
    DUO, udlm      Duo, UDLM: uniform noise
    none           `graph`, `tokens` and `model`, the graph absorbing: SEDD

None of a checkpoint's code is run.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from lm_eval_duel.arguments import COUNT, PROBABILITY, TRUTH
from lm_eval_duel.denoisers import identity
from lm_eval_duel.denoisers.dit import denoiser as gidd
from lm_eval_duel.denoisers.dit import denoiser as uniform
from lm_eval_duel.denoisers.dit.denoiser import ATTENTION, SEDD, DiTDenoiser, entries
from lm_eval_duel.denoisers.dit.network import DiT, DiTConfig
from lm_eval_duel.denoisers.hub import find_mask_id, row_length
from lm_eval_duel.denoisers.load_options import LoadOptions
from lm_eval_duel.errors import DuelError

log = logging.getLogger("lm_eval.duel_mdm")

NAMES = {"mdlm", "bd3lm", "sedd"}  # class names and model types in lower case; GIDD's is identity.GIDD
LAYOUT = ("hidden_dim", "n_blocks", "n_heads", "model_length")  # entries of config.json of such networks
SECTIONS = ("graph", "model", "tokens")  # of the config.json of SEDD's authors, which names no class
TOKENIZER = "gpt2"  # for the published checkpoints, which have none
KINDS = {  # of families with a separate class
    "sedd": SEDD,
    **dict.fromkeys(gidd.FAMILIES, gidd.GIDD),
    **dict.fromkeys(identity.UNIFORM, uniform.NoisedDiT),
}
READ = ("vocab_size", "hidden_dim", "n_blocks", "n_heads", "model_length", "cond_dim", "causal", "time_conditioning")
READ += ("cross_attn", "adaln", "block_size", "cfg", "mask_token_id", *identity.MASKING)
HARMLESS = {  # entries that change no number, and the reason
    **dict.fromkeys(("var_min", "sampling_eps_min", "sampling_eps_max"), "training"),
    "tie_word_embeddings": "the head is stored",
}
READ_BY_GIDD = (*gidd.SIZES, "p_uniform", "t_eps", "mask_token_id", *identity.MASKING)
READ_OF_SECTIONS = {  # SEDD's, by section
    "graph": ("type", "file", "report_all"),
    "model": ("hidden_size", "n_blocks", "n_heads", "cond_dim", "length", "scale_by_sigma", "name", "type", "dropout"),
}
OTHER_SECTIONS = ("noise", "training", "sampling", "eval", "optim", "data", "ngpus", "work_dir", "wandb_name")
REFUSED = ("shift_logits", "first_token", "backend", "cfg_scale", "peft", "device_map", "load_in_8bit", "load_in_4bit")


def is_dit(config: dict[str, Any], path: str) -> bool:
    """True if a config.json belongs to one of these families; raises DuelError if its names contradict its entries."""
    names = identity.model_names(config)
    lower = {name.lower() for name in names}
    if lower and (lower <= NAMES or (len(lower) == 1 and lower <= {identity.GIDD, *identity.UNIFORM})):
        return True
    if not names and all(key in config for key in SECTIONS):
        return True
    if lower & {*NAMES, *identity.UNIFORM} or all(key in config for key in LAYOUT):
        says = f"names {', '.join(dict.fromkeys(names))}" if names else "names neither a class nor a model type"
        raise DuelError(
            f"The config.json of {path} {says}. Networks with our own DiT are recognised by their names alone "
            f"({', '.join((*sorted(NAMES), identity.GIDD, *identity.UNIFORM))}): if it is one, say so in model_type."
        )
    return False


def unfilled(config: dict[str, Any], options: LoadOptions, tokenizer: PreTrainedTokenizerBase | None) -> DiTDenoiser:
    """The network of a local folder. `fill` raises DuelError if the weights do not fit exactly.

    `tokenizer`: columns that are not among its tokens get no probability; its mask token, if it has one, is [MASK].
    """
    family, shape, length, block = read_shape(config, options)
    attention = ATTENTION.get(family, "bidirectional")
    options.refuse("DiT", *REFUSED, *(() if family == "sedd" else ("sigma",)))
    for name, value, own in (("family", options.family, family), ("attention", options.attention, attention)):
        if value not in (None, own):
            given = "estimator=ar, or attention=causal," if value == "causal" else name
            raise DuelError(f"By its config.json {options.name} is {own}, not {value}; leave {given} out.")
    require_float32(options)
    if block is not None:
        options.require_block(block)
    row = row_length(options.name, options.max_length, length)
    if family in identity.UNIFORM:  # all noise is random tokens
        options.refuse(family, "mask_token_id")
        mask_id, columns = None, range(shape.vocab_size)
    else:  # BERT's [MASK] for LM1B; with GPT-2's tokenizer the last column; GIDD's columns after [MASK] are padding
        last = shape.vocab_size - 1
        known = last if family not in gidd.FAMILIES else gidd.MASK if last >= gidd.MASK else None
        mask_id = find_mask_id(options, config, tokenizer, known, shape.vocab_size)
        columns = range(mask_id if family in gidd.FAMILIES else shape.vocab_size)
    noised = family == gidd.NOISED or family in identity.UNIFORM  # noise is over all columns, whatever the tokenizer
    tokens = set(columns) if tokenizer is None or noised else set(tokenizer.get_vocab().values())
    with torch.device("meta"):
        network = DiT(shape).eval()
    more = {}
    if family in gidd.FAMILIES:
        share, margin = entries(config, options.name, PROBABILITY, "p_uniform", "t_eps")
        more = {"t_eps": margin, "uniform": share}
    if noised:
        options.refuse(family, "cache", "temperature", "top_k", "top_p", "exclude_ids")
    denoiser = KINDS.get(family, DiTDenoiser)(network, family, row, options.name, tokens, mask_id, block, **more)
    denoiser.last_block = options.last_block
    denoiser.bos = options.bos or denoiser.bos
    if options.sigma is not None:
        denoiser.sigma = options.sigma
    denoiser.placed_on = options.device
    denoiser.unread_entries = unread(config)
    identity.name_unread(config, denoiser.unread_entries, options.name, family)
    return denoiser


def unread(config: dict[str, Any]) -> tuple[str, ...]:
    """The entries of a config.json that are not read; those of a section as section.entry."""
    names = [name.lower() for name in identity.model_names(config)]
    if names:
        return identity.unread_entries(config, READ_BY_GIDD if identity.GIDD in names else (*READ, *HARMLESS))
    found = identity.unread_entries(config, ("tokens", *identity.MASKING, *READ_OF_SECTIONS, *OTHER_SECTIONS))
    for section, read in READ_OF_SECTIONS.items():
        found += tuple(f"{section}.{key}" for key in identity.unread_entries(config[section], read))
    return found


def require_float32(options: LoadOptions) -> None:
    """Raise DuelError for a dtype other than float32."""
    if options.dtype not in ("auto", "float32"):
        raise DuelError(f"MDLM, BD3-LM, SEDD and the AR baseline run in float32, not {options.dtype}; leave dtype out.")


def read_shape(config: dict[str, Any], options: LoadOptions) -> tuple[str, DiTConfig, int, int | None]:
    """Family, network shape, row length and trained block; raises DuelError for a config that is wrong."""
    name, names = options.name, [name.lower() for name in identity.model_names(config)]
    if identity.GIDD in names:
        return *gidd.read_shape(config, name), None
    if not names:
        return "sedd", *_read_sections(config, name), None
    *sizes, length = entries(config, name, COUNT, "vocab_size", "hidden_dim", "n_blocks", "n_heads", "model_length")
    causal, time, crossed = (TRUTH(key, config.get(key)) for key in ("causal", "time_conditioning", "cross_attn"))
    adaptive = TRUTH("adaln", config.get("adaln"))
    shape = DiTConfig(
        *sizes,
        COUNT("cond_dim", config.get("cond_dim")) or 128,
        adaptive=not causal if adaptive is None else adaptive,
        time=bool(time),
    )
    if names[0] in identity.UNIFORM:
        uniform.require_known(config, name, names[0])
        return names[0], dataclasses.replace(shape, time=True), length, None
    block = COUNT("block_size", config.get("block_size"))
    sedd = "sedd" in (*names, str(config.get("parameterization")).lower(), options.family)
    if time and not causal and not sedd and "sedd" in os.path.basename(name.rstrip("/")).lower():
        log.warning("By its name %s is taken as a SEDD; its config does not say. Set family=sedd to decide", name)
        sedd = True
    if sedd != bool(time) or (causal and time):
        raise DuelError(
            f"The config.json of {name} has time_conditioning={str(bool(time)).lower()}: SEDD is given the noise "
            "level; MDLM, BD3-LM and the AR baseline are not. If it is a SEDD that is, pass family=sedd."
        )
    if "bd3lm" in names and crossed is None and not causal and block is not None and block < length:
        raise DuelError(
            f"The config.json of {name} has block_size={block} and no cross_attn: set cross_attn: true for a BD3-LM, "
            "false for a network that sees the whole row."
        )
    if causal or not crossed or block is None or block >= length:
        return "ar" if causal else "sedd" if sedd else "mdlm", shape, length, None
    if sedd:
        raise DuelError("A block-causal network with time conditioning is not supported: its blocks differ in noise.")
    return "bd3lm", shape, length, block


def _read_sections(config: dict[str, Any], name: str) -> tuple[DiTConfig, int]:
    """The shape and the row length of a SEDD in its authors' layout, which does not count [MASK]."""
    if not all(isinstance(config[key], dict) for key in ("graph", "model")) or not config["graph"].get("type"):
        raise DuelError(f"The config.json of {name} has a graph without a type, or a model without sizes.")
    if TRUTH("scale_by_sigma", config["model"].get("scale_by_sigma")) is False:
        raise DuelError(f"{name} has scale_by_sigma=false: its output is not the score of the published SEDDs.")
    (tokens,) = entries(config, name, COUNT, "tokens")
    *sizes, length = entries(config["model"], name, COUNT, "hidden_size", "n_blocks", "n_heads", "cond_dim", "length")
    return DiTConfig(tokens + 1, *sizes, time=True), length
