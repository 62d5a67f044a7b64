"""The network that a config.json names, and the noise that it was trained with.

A network is recognised by class names, a model type, and entries that name its noise, never by its sizes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from typing import Any

from lm_eval_duel.arguments import PROBABILITY
from lm_eval_duel.denoisers import refused
from lm_eval_duel.denoisers.hf.layouts import Config
from lm_eval_duel.errors import DuelError

# Names of networks in lower case
GEMMA = ("diffusiongemmaforblockdiffusion", "diffusion_gemma")
UNIFORM = ("duo", "udlm")  # under uniform noise
GIDD = "dit"  # its model type
DIT_NAMES = {"mdlm", "bd3lm", "sedd"}  # our own DiT, besides UNIFORM and GIDD
DIT_LAYOUT = ("hidden_dim", "n_blocks", "n_heads", "model_length")  # entries of such a config
DIT_SECTIONS = ("graph", "model", "tokens")  # of the config of SEDD's authors, which names no class

# Kinds of noise
ABSORBING = ("absorbing_state", "absorbing", "absorb", "masked", "mask")
RANDOM = ("uniform", "uniform_state")
HYBRID = ("hybrid", "gidd")
LINEAR = ("loglinear", "log-linear", "log_linear")


def _entries(kinds: tuple[str, ...], outputs: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """The entries that name the noise or what the output means, and their values for these kinds of noise."""
    return {
        "diffusion": kinds,
        "graph": kinds,
        "forward_process": kinds,
        "noise": LINEAR,
        "noise_type": (*LINEAR, *kinds),
        "parameterization": outputs,
    }


MASKING = _entries(ABSORBING, ("subs", "sedd", "ar"))
REPLACING = _entries(RANDOM, ("mean", "d3pm"))  # Duo and UDLM
MIXED = {  # GIDD's masks and random tokens
    **_entries(HYBRID, (*HYBRID, "linear")),
    "noise": (*HYBRID, "linear"),
    "noise_type": HYBRID,
}


def class_names(config: Config) -> list[str]:
    """Class names in `architectures` and in `auto_map`, whose values are module.Class or lists of them."""
    names = list(config.get("architectures") or [])
    for entry in (config.get("auto_map") or {}).values():
        values = entry if isinstance(entry, list) else [entry]
        for value in values:
            if value:
                names.append(str(value).rsplit(".", 1)[-1])
    return names


def model_names(config: Config) -> list[str]:
    """The names of the network itself: its model type and its classes, without the config's and the tokenizer's."""
    auto_map = config.get("auto_map") or {}
    models = {key: value for key, value in auto_map.items() if key.startswith("AutoModel")}
    names = class_names({"architectures": config.get("architectures"), "auto_map": models})
    if config.get("model_type"):
        names.append(str(config["model_type"]))
    return names


def has_random_tokens(config: Config) -> bool:
    """True if the noise of a network is random tokens, by its names, or for GIDD by its `p_uniform`."""
    names = {name.lower() for name in model_names(config)}
    if names & {*UNIFORM, *GEMMA}:
        return True
    return GIDD in names and bool(_p_uniform(config))


def _p_uniform(config: Config) -> float:
    """The share of random tokens in the noise, 0 if the config does not say."""
    return float(PROBABILITY("p_uniform", config.get("p_uniform"), " in config.json") or 0.0)


def _kinds(name: str, key: str, entry: Any) -> list[str]:
    """The kinds of noise that an entry names: a string, or a section with a type or a name. A number names none."""
    if isinstance(entry, str):
        return [entry]
    if not isinstance(entry, Mapping):
        return []
    kinds = []
    for field in ("type", "name"):
        if entry.get(field) is not None:
            kinds.append(str(entry[field]))
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
    # "DiT" names other networks, too, so it counts only where it is the only name.
    if len(lower) == 1 and lower <= {GIDD, *UNIFORM}:
        return True
    if lower and lower <= DIT_NAMES:
        return True
    if not names and all(key in config for key in DIT_SECTIONS):
        return True

    has_our_name = bool(lower & {*DIT_NAMES, *UNIFORM})
    has_our_entries = all(key in config for key in DIT_LAYOUT)
    if has_our_name or has_our_entries:
        says = "names neither a class nor a model type"
        if names:
            says = f"names {', '.join(dict.fromkeys(names))}"
        raise DuelError(
            f"The config.json of {path} {says}. Networks with our own DiT are recognised by their names alone "
            f"({', '.join((*sorted(DIT_NAMES), GIDD, *UNIFORM))}): if it is one, say so in model_type."
        )
    return False


def require_supported(
    config: Config,
    name: str,
    family: str | None = None,
    causal: bool = False,
) -> None:
    """Raise DuelError if the config.json of `name` describes a network that is not supported.

    `family`: given by the user, if any; then class names and the model type refuse nothing. `causal`: the network is
    scored as an autoregressive one.
    """
    if family is None:
        _require_covered(name, model_names(config), causal)
    names = [given.lower() for given in model_names(config)]
    if GIDD not in names and (share := _p_uniform(config)):
        raise DuelError(
            f"The config.json of {name} has p_uniform={share:g}, an entry of GIDD, but no name of GIDD. If the network "
            f"is a GIDD, set model_type to {GIDD}."
        )
    if is_diffusion_gemma(config):
        return
    random = has_random_tokens(config)
    entries = MASKING
    if random:
        entries = MIXED if GIDD in names else REPLACING
    for key, values in entries.items():
        for kind in _kinds(name, key, config.get(key)):
            if kind.lower() not in values:
                supported = "this family" if random else "masked diffusion"
                raise DuelError(
                    f"The config.json of {name} has {key}={kind}, and {supported} has {key}={values[0]}. A network "
                    "that was trained with other noise, or whose output means something else, would get a wrong number."
                )


def _require_covered(name: str, names: Collection[str], causal: bool) -> None:
    """Raise DuelError for a network that is refused, by its class names and model type (`names`), or by its own name.

    `causal`: it is scored as an autoregressive network, so what its name says does not count.
    """
    lower = {each.lower() for each in names}
    folder = os.path.basename(name.rstrip("/"))
    for entry in refused.ENTRIES:
        for kind in entry.classes:
            if kind.lower() in lower:
                raise entry.error(name, kind)
        if entry.named and not causal and re.search(entry.named, folder, re.IGNORECASE):
            raise entry.error(name, entry.checkpoint)
