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
import re
from typing import Any

import torch

from lm_eval_duel.arguments import COUNT, PROBABILITY, TRUTH, ArgumentType
from lm_eval_duel.denoisers.checkpoint import Checkpoint, name_unread, unread_entries
from lm_eval_duel.denoisers.dit.denoiser import ATTENTION, FAMILIES, GIDD, NOISED, SEDD, DiTDenoiser, NoisedDiT
from lm_eval_duel.denoisers.dit.network import DiT, DiTConfig
from lm_eval_duel.denoisers.load_options import LoadOptions
from lm_eval_duel.denoisers.recognition import GIDD as GIDD_TYPE
from lm_eval_duel.denoisers.recognition import MASKING, UNIFORM, model_names
from lm_eval_duel.denoisers.vocabulary import find_mask_id, row_length
from lm_eval_duel.errors import DuelError

log = logging.getLogger("lm_eval.duel_mdm")

GIDD_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "timestep_cond_dim",
    "max_seq_len",
)
GIDD_MASK = 50258  # the authors add [PAD] and [MASK] to GPT-2's tokenizer
NAMED_UNIFORM = re.compile(r"p_unif-0*\.?0*[1-9]|gidd-unif")  # in the names of GIDDs with uniform noise
DISTILLED = "distilled"  # in the name of a checkpoint
KINDS = {  # of families with a separate class
    "sedd": SEDD,
    **dict.fromkeys(FAMILIES, GIDD),
    **dict.fromkeys(UNIFORM, NoisedDiT),
}
SIZES = ("vocab_size", "hidden_dim", "n_blocks", "n_heads", "model_length")
READ = (
    *SIZES,
    "cond_dim",
    "causal",
    "time_conditioning",
    "cross_attn",
    "adaln",
    "block_size",
    "cfg",
    "mask_token_id",
    *MASKING,
)
HARMLESS = {  # entries that change no number, and the reason
    "var_min": "training",
    "sampling_eps_min": "training",
    "sampling_eps_max": "training",
    "tie_word_embeddings": "the head is stored",
}
READ_BY_GIDD = (*GIDD_SIZES, "p_uniform", "t_eps", "mask_token_id", *MASKING)
SEDD_SIZES = ("hidden_size", "n_blocks", "n_heads", "cond_dim", "length")
READ_OF_SECTIONS = {  # SEDD's, by section
    "graph": ("type", "file", "report_all"),
    "model": (*SEDD_SIZES, "scale_by_sigma", "name", "type", "dropout"),
}
OTHER_SECTIONS = (
    "noise",
    "training",
    "sampling",
    "eval",
    "optim",
    "data",
    "ngpus",
    "work_dir",
    "wandb_name",
)
REFUSED = (
    "shift_logits",
    "first_token",
    "backend",
    "peft",
    "device_map",
    "load_in_8bit",
    "load_in_4bit",
)


def unfilled(checkpoint: Checkpoint) -> DiTDenoiser:
    """The network of a local folder. `fill` raises DuelError if the weights do not fit exactly.

    Columns that are not among the tokenizer's tokens get no probability; its mask token, if it has one, is [MASK].
    """
    options = checkpoint.options
    config = checkpoint.config
    family, shape, length, block = read_shape(checkpoint)
    _require_options(options, family)
    if block is not None:
        options.require_block(block)

    row = row_length(options.name, options.max_length, length)
    mask_id, tokens = _vocabulary(checkpoint, family, shape.vocab_size)
    noise = {}
    if family in FAMILIES:
        share, margin = entries(config, options.name, PROBABILITY, "p_uniform", "t_eps")
        noise = {"uniform": share, "t_eps": margin}
    with torch.device("meta"):
        network = DiT(shape).eval()
    kind = KINDS.get(family, DiTDenoiser)
    denoiser: DiTDenoiser = kind(
        network,
        family,
        row,
        options.name,
        tokens,
        mask_id,
        block,
        **noise,
    )

    denoiser.last_block = options.last_block
    denoiser.bos = options.bos or denoiser.bos
    if options.sigma is not None:
        denoiser.sigma = options.sigma
    denoiser.placed_on = options.device
    denoiser.unread_entries = unread(config)
    name_unread(config, denoiser.unread_entries, options.name, family)
    return denoiser


def _shows_noise(family: str) -> bool:
    """True if the noise of a family is random tokens, at least in part."""
    return family == NOISED or family in UNIFORM


def _require_options(options: LoadOptions, family: str) -> None:
    """Raise DuelError for options that this family does not have, or that contradict its config."""
    options.refuse("DiT", *REFUSED)
    if family != "sedd":
        options.refuse("DiT", "sigma")
    if family in UNIFORM:
        options.refuse(family, "mask_token_id", why="all of its noise is random tokens")
    if _shows_noise(family):
        options.refuse(family, "cache", why="its noise level, and so every key, changes at each step")
        options.refuse(family, "exclude_ids", why="its noise is drawn from its whole vocabulary")

    if options.family not in (None, family):
        raise DuelError(f"By its config.json {options.name} is {family}, not {options.family}; leave family out.")
    attention = ATTENTION.get(family, "bidirectional")
    if options.attention not in (None, attention):
        given = "attention"
        if options.attention == "causal":
            given = "estimator=ar, or attention=causal,"
        raise DuelError(
            f"By its config.json {options.name} is {attention}, not {options.attention}; leave {given} out."
        )


def _vocabulary(checkpoint: Checkpoint, family: str, columns: int) -> tuple[int | None, set[int]]:
    """The id of [MASK], if the family has one, and the ids that are tokens, among the columns of the logits."""
    tokenizer = checkpoint.tokenizer
    if family in UNIFORM:
        return None, set(range(columns))

    # with GPT-2's tokenizer the last column; LM1B's checkpoints have the [MASK] of BERT's tokenizer
    usual: int | None = columns - 1
    if family in FAMILIES:
        usual = GIDD_MASK if columns > GIDD_MASK else None
    mask_id = find_mask_id(checkpoint.options, checkpoint.config, tokenizer, usual, columns)
    if tokenizer is not None and not _shows_noise(family):
        return mask_id, set(tokenizer.get_vocab().values())
    # GIDD's columns after [MASK] are padding; its noise is over all others, whatever the tokenizer
    count = mask_id if family in FAMILIES else columns
    return mask_id, set(range(count))


def unread(config: dict[str, Any]) -> tuple[str, ...]:
    """The entries of a config.json that are not read; those of a section as section.entry."""
    names = [name.lower() for name in model_names(config)]
    if GIDD_TYPE in names:
        return unread_entries(config, READ_BY_GIDD)
    if names:
        return unread_entries(config, (*READ, *HARMLESS))

    at_the_top = ("tokens", *MASKING, *READ_OF_SECTIONS, *OTHER_SECTIONS)
    unread = list(unread_entries(config, at_the_top))
    for section, read in READ_OF_SECTIONS.items():
        for key in unread_entries(config[section], read):
            unread.append(f"{section}.{key}")
    return tuple(unread)


def read_shape(checkpoint: Checkpoint) -> tuple[str, DiTConfig, int, int | None]:
    """Family, network shape, row length and trained block; raises DuelError for a config that is wrong."""
    name = checkpoint.name
    config = checkpoint.config
    names = [name.lower() for name in model_names(config)]
    if GIDD_TYPE in names:
        return *_read_gidd(checkpoint), None
    if not names:
        return "sedd", *_read_sections(config, name), None

    *sizes, length = entries(config, name, COUNT, *SIZES)
    causal = bool(TRUTH("causal", config.get("causal")))
    timed = bool(TRUTH("time_conditioning", config.get("time_conditioning")))
    adaptive = TRUTH("adaln", config.get("adaln"))
    if adaptive is None:
        adaptive = not causal
    shape = DiTConfig(
        *sizes,
        COUNT("cond_dim", config.get("cond_dim")) or 128,
        adaptive=adaptive,
        time=timed,
    )
    if names[0] in UNIFORM:
        _require_uniform(checkpoint, names[0])
        return names[0], dataclasses.replace(shape, time=True), length, None

    sedd = _is_sedd(checkpoint, names, timed and not causal)
    if sedd != timed or (causal and timed):
        raise DuelError(
            f"The config.json of {name} has time_conditioning={str(timed).lower()}: SEDD is given the noise "
            "level; MDLM, BD3-LM and the AR baseline are not. If it is a SEDD that is, pass family=sedd."
        )
    block = COUNT("block_size", config.get("block_size"))
    crossed = TRUTH("cross_attn", config.get("cross_attn"))
    has_short_block = block is not None and block < length
    if "bd3lm" in names and crossed is None and not causal and has_short_block:
        raise DuelError(
            f"The config.json of {name} has block_size={block} and no cross_attn: set cross_attn: true for a BD3-LM, "
            "false for a network that sees the whole row."
        )
    if causal:
        return "ar", shape, length, None
    if not crossed or not has_short_block:
        return "sedd" if sedd else "mdlm", shape, length, None
    if sedd:
        raise DuelError("A block-causal network with time conditioning is not supported: its blocks differ in noise.")
    return "bd3lm", shape, length, block


def _is_sedd(checkpoint: Checkpoint, names: list[str], may_be_one: bool) -> bool:
    """True if config or options say that a network is a SEDD; or its own name, which a warning then says.

    `may_be_one`: it is given the noise level, and is not autoregressive.
    """
    parameterization = str(checkpoint.config.get("parameterization")).lower()
    if "sedd" in (*names, parameterization, checkpoint.options.family):
        return True
    by_name = "sedd" in checkpoint.published_name.lower()
    if may_be_one and by_name:
        log.warning(
            "By its name %s is taken as a SEDD; its config does not say. Set family=sedd to decide",
            checkpoint.name,
        )
        return True
    return False


def _read_sections(config: dict[str, Any], name: str) -> tuple[DiTConfig, int]:
    """The shape and the row length of a SEDD in its authors' layout, which does not count [MASK]."""
    graph = config["graph"]
    model = config["model"]
    are_sections = isinstance(graph, dict) and isinstance(model, dict)
    if not are_sections or not graph.get("type"):
        raise DuelError(f"The config.json of {name} has a graph without a type, or a model without sizes.")
    if TRUTH("scale_by_sigma", model.get("scale_by_sigma")) is False:
        raise DuelError(f"{name} has scale_by_sigma=false: its output is not the score of the published SEDDs.")
    (tokens,) = entries(config, name, COUNT, "tokens")
    *sizes, length = entries(model, name, COUNT, *SEDD_SIZES)
    return DiTConfig(tokens + 1, *sizes, time=True), length


def _read_gidd(checkpoint: Checkpoint) -> tuple[str, DiTConfig, int]:
    """The family, the network's shape and its row length; raises DuelError if name and config contradict each other."""
    name = checkpoint.name
    config = checkpoint.config
    *shape, length = entries(config, name, COUNT, *GIDD_SIZES)
    uniform, margin = entries(config, name, PROBABILITY, "p_uniform", "t_eps")
    if not 0 < margin < 0.5:
        raise DuelError(f"'t_eps' is above 0 and below 0.5; got {margin:g} in the config.json of {name}.")
    if not uniform and NAMED_UNIFORM.search(checkpoint.published_name):
        raise DuelError(f"By its name {name} was trained with uniform noise, and its config.json has p_uniform=0.")
    if uniform == 1:
        raise DuelError(f"{name} has p_uniform=1: noise without masks is not supported.")
    family = NOISED if uniform else "gidd"
    return family, DiTConfig(*shape, time=True), length


def _require_uniform(checkpoint: Checkpoint, family: str) -> None:
    """Raise DuelError for entries with which these are other networks; warn of one that was distilled."""
    name = checkpoint.name
    config = checkpoint.config
    timed = TRUTH("time_conditioning", config.get("time_conditioning"))
    if timed is False or (family == "udlm" and not timed):
        raise DuelError(f"The config.json of {name} has no time_conditioning=true, which a {family} has.")
    for key in ("causal", "cross_attn", "cfg"):
        if TRUTH(key, config.get(key)):
            raise DuelError(f"{name} is a {family} with {key}=true, which is not supported.")
    if DISTILLED in checkpoint.published_name.lower():
        log.warning("By its name %s was distilled for sampling in few steps: its bound says little about it", name)


def entries(
    config: dict[str, Any],
    name: str,
    kind: ArgumentType,
    *keys: str,
) -> list[Any]:
    """Values that the config.json of `name` must have; raises DuelError that names all that are missing."""
    values = [kind(key, config.get(key), f" in the config.json of {name}") for key in keys]
    missing = []
    for key, value in zip(keys, values, strict=True):
        if value is None:
            missing.append(key)
    if missing:
        raise DuelError(f"The config.json of {name} has no {', '.join(missing)}, which its family needs.")
    return values
