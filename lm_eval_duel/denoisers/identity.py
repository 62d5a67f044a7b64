"""The identity of a network by its config.json: class names, a model type, and entries that name its noise.

A config is recognised by these, never by its sizes. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lm_eval_duel.arguments import PROBABILITY
from lm_eval_duel.errors import DuelError

Config = dict[str, Any]

NO_ORDER = "so no deterministic order of unmasking explains a text, and the theorem does not cover it"
REFUSED = {  # by class name or model type
    "WeDLMForCausalLM": f"it reorders tokens under causal attention and revises revealed tokens, {NO_ORDER}",
    "LLaDA21MoeModelLM": f"it edits revealed tokens, {NO_ORDER}",
    "E2D2": "it is an encoder-decoder inside a wrapper, which is not supported",
    "EsmForDPLM2": "it has a second track of structure tokens (DPLM-2), which is not supported",
    "EsmForDPLM2Bit": "it has a second track of structure tokens (DPLM-2 Bit), which is not supported",
    "NemotronLabsDiffusionVLMModel": "it needs images, which are not supported",
}
GEMMA = ("diffusiongemmaforblockdiffusion", "diffusion_gemma")  # names in lower case
UNIFORM = ("duo", "udlm")  # of networks under uniform noise
GIDD = "dit"  # its model type
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


def require_supported(config: Config, name: str, family: str | None = None) -> None:
    """Raise DuelError if the config.json of `name` describes a network that is not supported.

    `family`: given by the user, if any; then class names and the model type refuse nothing.
    """
    names = [given.lower() for given in model_names(config)]
    for known, reason in REFUSED.items() if family is None else ():
        if known.lower() in names:
            raise DuelError(f"{name} is a {known}: {reason}.")
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
