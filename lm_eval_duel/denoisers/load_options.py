"""The identity of a network by its config.json: class names, a model type, and entries that name its noise.

A config is recognised by these, never by its sizes. No torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

from lm_eval_duel.arguments import (
    BLOCK,
    CHECKPOINT,
    COUNT,
    MAX_FACTOR,
    PROBABILITY,
    SHARE,
    TEXT,
    TRUTH,
    Argument,
    Arguments,
    ArgumentType,
    argument,
    choice,
    declared,
    number,
    whole,
)
from lm_eval_duel.demo import BUNDLED
from lm_eval_duel.errors import DuelError, another_block

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

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


# ---------------------------------------------------------------- load_options
# The network arguments: how a checkpoint is read. What is not given is detected.
#
# Each argument is declared once, here; `denoisers.load`, the model args of the harness and the Python API use these
# declarations.


Dtype = Literal["auto", "float32", "bfloat16", "float16", "float64"]
Bos = Literal["given", "scored", "official", "none", "first"]
Attention = Literal["bidirectional", "block_causal", "causal"]
LastBlock = Literal["fill", "cut"]
FirstToken = Literal["causal", "block"]
Sigma = Literal["clamped", "schedule"]
Backend = Literal["native", "remote"]
Cache = Literal["prefix", "dual"]
CACHES = get_args(Cache)

DTYPES: tuple[str, ...] = get_args(Dtype)
BOS: tuple[str, ...] = get_args(Bos)
WHOLE_ROW_BOS = ("scored", "official", "first")  # values of `bos` that say which positions of a whole row are scored


TEMPERATURE = number(f"a number from {1 / MAX_FACTOR:g} to {MAX_FACTOR:g}", lambda x: 1 / MAX_FACTOR <= x <= MAX_FACTOR)
GUIDANCE = number(f"a number from 0 (no guidance) to {MAX_FACTOR:g}", lambda x: 0 <= x <= MAX_FACTOR)


def _ids(value: Any) -> tuple[int, ...]:
    """Ids such as 5, 5+7 or [5, 7], in ascending order."""
    parts = value if isinstance(value, list | tuple) else str(value).split("+") if isinstance(value, str) else [value]
    return tuple(sorted({whole(0).convert(part) for part in parts}))


@dataclasses.dataclass(frozen=True, kw_only=True)
class NetworkArguments(Arguments):
    """The arguments of a network, as they are given to `denoisers.load` and in model args."""

    max_length: int | None = argument(
        COUNT, None, "positions of a window, special tokens included", unset="the checkpoint's"
    )
    dtype: Dtype = argument(
        choice(Dtype, convert=lambda value: str(value).removeprefix("torch.")),
        "auto",
        "dtype of the network. `auto`: float32 on a CPU, else the checkpoint's (MDLM and SEDD: float32 only). "
        "Log-softmax runs in float32 or better, sums in float64",
    )
    mask_token_id: int | None = argument(
        whole(0, "a token id"), None, "the id of [MASK]", unset="from config, tokenizer or family"
    )
    family: str | None = argument(TEXT, None, "[what the checkpoint is](checkpoints.md#families)", unset="detected")
    attention: Attention | None = argument(choice(Attention), None, "what a position sees", unset="detected")
    shift_logits: bool | None = argument(
        TRUTH, None, "a token is predicted from the position before it", unset="detected"
    )
    block: int | str | None = argument(BLOCK, None, "the trained block, if neither config nor family names it")
    bos: Bos | None = argument(
        choice(Bos, convert=lambda value: str(value).lower()),
        None,
        "which [special tokens](#special-tokens) are visible or scored; also `add_bos_token`",
        none="none",
        unset="the family's",
    )
    last_block: LastBlock = argument(
        choice(LastBlock),
        "fill",
        "the short last block of a network with trained blocks is filled with [MASK], or cut",
    )
    first_token: FirstToken | None = argument(
        choice(FirstToken),
        None,
        "Nemotron-Labs-Diffusion: the causal prefix predicts the first token of a block, as in the authors' code, or "
        "the `block` does, as in vLLM",
        unset="causal",
    )
    sigma: Sigma | None = argument(
        choice(Sigma),
        None,
        "SEDD's noise level: the masked share clamped to [0.1, 0.9], as in its evaluation, or its `schedule`",
        unset="clamped",
    )
    cache: Cache | None = argument(
        choice(Cache),
        None,
        "the [cached sampler](samplers.md#cached-samplers) of Fast-dLLM, another distribution. The first phase of "
        "`estimator=two_phase`, where the default is `dual`",
    )
    cfg_scale: float | None = argument(
        ArgumentType(GUIDANCE.words, lambda value: GUIDANCE.convert(value) or None),
        None,
        "classifier-free guidance as in LLaDA, another distribution",
    )
    temperature: float | None = argument(
        TEMPERATURE,
        None,
        "temperature of the network's distributions, when scoring and sampling; another distribution",
    )
    top_k: int | None = argument(
        COUNT,
        None,
        "only the k most probable tokens are kept, so most texts have probability 0. Another distribution",
    )
    top_p: float | None = argument(
        SHARE,
        None,
        "only the fewest tokens that have this probability together are kept, as with `top_k`. Another distribution",
    )
    exclude_ids: tuple[int, ...] = argument(
        ArgumentType("token ids, such as 126081 or 126081+126348", _ids),
        (),
        "ids left out of the vocabulary (LLaDA's `logits_eos_inf`), another distribution. Contexts may hold them, "
        "scored texts may not",
    )
    peft: str | None = argument(CHECKPOINT, None, "a LoRA, merged into the weights")
    load_in_8bit: bool = argument(
        TRUTH,
        False,
        "[LLM.int8](checkpoints.md#quantized-networks) by bitsandbytes; another distribution",
    )
    load_in_4bit: bool = argument(TRUTH, False, "nf4 by bitsandbytes, multiplied in `dtype`; another distribution")
    backend: Backend | None = argument(choice(Backend), None, "`remote`: run the checkpoint's own code", unset="native")
    revision: str = argument(TEXT, "main", "branch, tag or commit of a hub checkpoint")
    trust_remote_code: bool = argument(TRUTH, False, "run code of the checkpoint, as in `--model hf`", identity=False)
    device_map: str | Mapping[str, int | str | torch.device] | None = argument(
        ArgumentType("a text or a mapping", lambda value: value if isinstance(value, Mapping) else str(value)),
        None,
        "`auto` (or `parallelize=true`): spread [the layers](running.md#a-model-larger-than-one-gpu) over GPUs",
        identity=False,
    )
    compile: bool = argument(
        TRUTH, False, "`torch.compile` the layers: a slower start, a faster long run", identity=False
    )


NETWORK_ARGUMENTS: dict[str, Argument] = declared(NetworkArguments)
ALIASES: dict[str, tuple[str, Callable[[str, Any], Any]]] = {  # the harness's words: the argument meant, and its value
    "add_bos_token": ("bos", lambda key, value: "given" if TRUTH(key, value) else "none"),
    "parallelize": ("device_map", lambda key, value: "auto" if TRUTH(key, value) else None),
}


@dataclasses.dataclass(frozen=True)
class LoadOptions(NetworkArguments):
    """The arguments of `denoisers.load`; every network argument is read and checked here."""

    name: str
    device: torch.device
    tokenizer: str | PreTrainedTokenizerBase | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.load_in_8bit and self.load_in_4bit:
            raise DuelError("load_in_8bit and load_in_4bit are both given; leave one out.")
        if self.cache and self.backend == "remote":
            raise DuelError(
                f"cache={self.cache} does not go with backend=remote (a checkpoint's own code): leave one out."
            )
        if self.cache and self.compile:
            raise DuelError(f"compile=true does not trace kept keys and values: leave it or cache={self.cache} out.")

    def require_block(self, trained: int) -> None:
        """Raise DuelError if a block other than the trained one was given."""
        if isinstance(self.block, int) and self.block != trained:
            raise another_block(trained, self.block)

    def refuse(self, family: str, *names: str) -> None:
        """Raise DuelError if one of these arguments was given, which `family` does not support."""
        for name in names:
            if getattr(self, name) not in (None, False, ()):
                raise DuelError(
                    f"{self.name} is of the family {family}, which has no choice of '{name}'; leave it out."
                )


def tokenizer_source(arguments: Mapping[str, Any]) -> tuple[str, str]:
    """(name, revision) of the tokenizer that model args name: `tokenizer`, else `pretrained`, else `model`."""
    if (name := CHECKPOINT("tokenizer", arguments.get("tokenizer"))) is not None:
        return name, "main"
    names = [CHECKPOINT(key, arguments.get(key)) for key in ("pretrained", "model")]
    return names[0] or names[1] or BUNDLED, str(arguments.get("revision") or "main")
