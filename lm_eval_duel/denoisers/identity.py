"""The meaning of a config.json: the names of a network, its noise, and the entries that are read.

A config is recognised by class names, a model type, and entries that name its noise, never by its sizes. Every other
entry is read by the network, listed here or by its family as one that changes no number, or named to the user: a class
may get a new entry under its old name, as LLaDA2's did for its routing. No torch.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

from lm_eval_duel.arguments import PROBABILITY
from lm_eval_duel.denoisers import refused
from lm_eval_duel.errors import DuelError

log = logging.getLogger("lm_eval.duel_mdm")

Config = dict[str, Any]

GEMMA = ("diffusiongemmaforblockdiffusion", "diffusion_gemma")  # names in lower case
UNIFORM = ("duo", "udlm")  # of networks under uniform noise
GIDD = "dit"  # its model type
DIT_NAMES = {"mdlm", "bd3lm", "sedd"}  # class names and model types of our own DiT in lower case, besides these
DIT_LAYOUT = ("hidden_dim", "n_blocks", "n_heads", "model_length")  # entries of such a config
DIT_SECTIONS = ("graph", "model", "tokens")  # of the config of SEDD's authors, which names no class
ABSORBING = ("absorbing_state", "absorbing", "absorb", "masked", "mask")
RANDOM = ("uniform", "uniform_state")
HYBRID = ("hybrid", "gidd")
LINEAR = ("loglinear", "log-linear", "log_linear")


def _entries(kinds: tuple[str, ...], outputs: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """The entries that name the noise or what the output means, and their values for these kinds of noise."""
    named = dict.fromkeys(("diffusion", "graph", "forward_process"), kinds)
    return {**named, "noise": LINEAR, "noise_type": (*LINEAR, *kinds), "parameterization": outputs}


MASKING = _entries(ABSORBING, ("subs", "sedd", "ar"))
REPLACING = _entries(RANDOM, ("mean", "d3pm"))  # Duo and UDLM
MIXED = {  # GIDD's masks and random tokens
    **_entries(HYBRID, (*HYBRID, "linear")),
    "noise": (*HYBRID, "linear"),
    "noise_type": HYBRID,
}


def class_names(config: Config) -> list[str]:
    """Class names in `architectures` and in `auto_map`, whose values are module.Class or lists of them."""
    auto_map = (config.get("auto_map") or {}).values()
    values = [value for entry in auto_map for value in (entry if isinstance(entry, list) else [entry])]
    return [*(config.get("architectures") or []), *(str(value).rsplit(".", 1)[-1] for value in values if value)]


def model_names(config: Config) -> list[str]:
    """The names of the network itself: its model type and its classes, without the config's and the tokenizer's."""
    auto_map = config.get("auto_map") or {}
    models = {key: value for key, value in auto_map.items() if key.startswith("AutoModel")}
    names = class_names({"architectures": config.get("architectures"), "auto_map": models})
    return [*names, *([str(config["model_type"])] if config.get("model_type") else [])]


def noise(config: Config) -> bool:
    """True if the noise of a network is random tokens, by its names, or for GIDD by its `p_uniform`."""
    names = [name.lower() for name in model_names(config)]
    return not {*UNIFORM, *GEMMA}.isdisjoint(names) or (GIDD in names and bool(_p_uniform(config)))


def _p_uniform(config: Config) -> float:
    """The share of random tokens in the noise, 0 if the config does not say."""
    return float(PROBABILITY("p_uniform", config.get("p_uniform"), " in config.json") or 0.0)


def _kinds(name: str, key: str, entry: Any) -> list[str]:
    """The kinds of noise that an entry names: a string, or a section with a type or a name. A number names none."""
    if not isinstance(entry, Mapping):
        return [entry] if isinstance(entry, str) else []
    kinds = [str(entry[field]) for field in ("type", "name") if entry.get(field) is not None]
    if not kinds:
        raise DuelError(f"The config.json of {name} has a {key} without a type or a name, so its noise is not known.")
    return kinds


def is_diffusion_gemma(config: Config) -> bool:
    """True if a network is DiffusionGemma, whose encoder is an autoregressive network as well."""
    return any(name.lower() in GEMMA for name in model_names(config))


def is_dit(config: dict[str, Any], path: str) -> bool:
    """True if a config.json belongs to one of these families; raises DuelError if its names contradict its entries."""
    names = model_names(config)
    lower = {name.lower() for name in names}
    if lower and (lower <= DIT_NAMES or (len(lower) == 1 and lower <= {GIDD, *UNIFORM})):
        return True
    if not names and all(key in config for key in DIT_SECTIONS):
        return True
    if lower & {*DIT_NAMES, *UNIFORM} or all(key in config for key in DIT_LAYOUT):
        says = f"names {', '.join(dict.fromkeys(names))}" if names else "names neither a class nor a model type"
        raise DuelError(
            f"The config.json of {path} {says}. Networks with our own DiT are recognised by their names alone "
            f"({', '.join((*sorted(DIT_NAMES), GIDD, *UNIFORM))}): if it is one, say so in model_type."
        )
    return False


def require_supported(config: Config, name: str, family: str | None = None, causal: bool = False) -> None:
    """Raise DuelError if the config.json of `name` describes a network that is not supported.

    `family`: given by the user, if any; then class names and the model type refuse nothing. `causal`: the network is
    scored as an autoregressive one.
    """
    if family is None:
        refused.require_covered(name, model_names(config), causal)
    names = [given.lower() for given in model_names(config)]
    if GIDD not in names and (share := _p_uniform(config)):
        raise DuelError(
            f"The config.json of {name} has p_uniform={share:g}, an entry of GIDD, but no name of GIDD. If the network "
            f"is a GIDD, set model_type to {GIDD}."
        )
    if is_diffusion_gemma(config):
        return
    random = noise(config)
    for key, values in (MASKING if not random else MIXED if GIDD in names else REPLACING).items():
        for kind in _kinds(name, key, config.get(key)):
            if kind.lower() not in values:
                own = "this family" if random else "masked diffusion"
                raise DuelError(
                    f"The config.json of {name} has {key}={kind}, and {own} has {key}={values[0]}. A network that was "
                    "trained with other noise, or whose output means something else, would get a wrong number."
                )


_REASONS: dict[str, tuple[str, ...]] = {  # for networks in evaluation mode that are run here, and the entries
    "names, versions and where files are": (
        *("_name_or_path", "_commit_hash", "architectures", "auto_map", "model_type", "transformers_version"),
        *("transformers_weights", "custom_pipelines", "base_model_name_or_path", "pretrained_model_path"),
        *("llm_model_path", "tokenizer_class"),
    ),
    "the file's dtype, which `dtype=` overrides": ("dtype", "torch_dtype", "precision"),
    "heads of classifiers": (
        *("id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "classifier_dropout"),
        *("classifier_pooling", "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"),
    ),
    "what a call returns, and whether it keeps keys": (
        *("return_dict", "use_return_dict", "output_hidden_states", "output_attentions", "output_router_logits"),
        *("use_cache", "keys_to_ignore_at_inference"),
    ),
    "initial weights": (
        *("initializer_range", "initializer_factor", "init_std", "init_fn", "init_device", "init_cutoff_factor"),
    ),
    "dropout, which is off": (
        *("dropout", "attention_dropout", "embedding_dropout", "residual_dropout", "output_dropout", "hidden_dropout"),
        *("resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout_prob", "attention_probs_dropout_prob"),
        "summary_first_dropout",
    ),
    "losses and training": (
        *("router_aux_loss_coef", "aux_loss_alpha", "gradient_checkpointing", "fuse_cross_entropy", "seq_length"),
        *("dlm_loss_weight", "ar_loss_weight", "dp_varying_mask_ratio", "mtp_loss_scaling_factor", "skip_checkpoint"),
    ),
    "special tokens, which the tokenizer names": (
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id", "unk_token_id", "mask_token"),
        "decoder_start_token_id",
    ),
    "samplers": (
        *("task_specific_params", "num_diffusion_steps", "do_sample", "temperature", "top_k", "top_p", "num_beams"),
        *("max_length", "min_length", "max_new_tokens", "repetition_penalty", "generation_config"),
    ),
    "how products are computed": (
        *("attn_implementation", "_attn_implementation", "_attn_implementation_autoset", "attn_backend"),
        *("flash_attention", "moe_backend", "pretraining_tp", "chunk_size_feed_forward", "ep_size", "use_deepep"),
        *("micro_forward", "torchscript", "use_bfloat16", "debug"),
    ),
    "the tensors of the file decide, of which none may be missing or left over": (
        *("tie_word_embeddings", "weight_tying", "num_nextn_predict_layers", "num_mtp_layers", "tie_encoder_decoder"),
    ),
}
HARMLESS: dict[str, str] = {entry: reason for reason, entries in _REASONS.items() for entry in entries}


def unread_entries(config: Config, read: Collection[str]) -> tuple[str, ...]:
    """The entries of a config.json that are neither null, nor among `read`, nor known to change no number."""
    return tuple(key for key in sorted(config) if config[key] is not None and key not in read and key not in HARMLESS)


def name_unread(config: Config, unread: Collection[str], name: str, family: str, refuse: bool = False) -> None:
    """Name entries that are not read in one warning; with `refuse`, raise DuelError."""
    if not unread:
        return
    entries = ", ".join(f"{key}={_short(config, key)}" for key in unread)
    if refuse:
        raise DuelError(
            f"The config.json of {name} has entries that the family {family} does not read here: {entries}. If none of "
            f"them changes its network, pass family={family}."
        )
    log.warning(
        "The config.json of %s has entries that its network (%s) does not read here: %s. If one of them changes the "
        "network, every number is wrong",
        name,
        family,
        entries,
    )


def _short(config: Config, key: str) -> str:
    """The value of an entry, or of a.b inside a section a, in at most 40 characters."""
    value: Any = config
    for part in [key] if key in config else key.split("."):
        value = value[part]
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
