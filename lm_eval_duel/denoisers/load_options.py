"""The network arguments: how a checkpoint is read. What is not given is detected.

Each argument is declared once, here; `denoisers.load`, the model args of the harness and the Python API use these
declarations. No torch.
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
SHORT_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
BOS: tuple[str, ...] = get_args(Bos)
WHOLE_ROW_BOS = ("scored", "official", "first")  # values of `bos` that say which positions of a whole row are scored

TEMPERATURE = number(f"a number from {1 / MAX_FACTOR:g} to {MAX_FACTOR:g}", lambda x: 1 / MAX_FACTOR <= x <= MAX_FACTOR)
GUIDANCE = number(f"a number from 0 (no guidance) to {MAX_FACTOR:g}", lambda x: 0 <= x <= MAX_FACTOR)


def _dtype(value: Any) -> str:
    """The name of a dtype, which may be short (bf16) or torch's."""
    name = str(value).removeprefix("torch.")
    return SHORT_DTYPES.get(name, name)


def _ids(value: Any) -> tuple[int, ...]:
    """Ids such as 5, 5+7 or [5, 7], in ascending order."""
    if isinstance(value, str):
        value = value.split("+")
    elif not isinstance(value, list | tuple):
        value = [value]
    return tuple(sorted({whole(0).convert(part) for part in value}))


@dataclasses.dataclass(frozen=True, kw_only=True)
class NetworkArguments(Arguments):
    """The arguments of a network, as they are given to `denoisers.load` and in model args."""

    max_length: int | None = argument(
        COUNT, None, "positions of a window, special tokens included", unset="the checkpoint's"
    )
    dtype: Dtype = argument(
        choice(Dtype, convert=_dtype),
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
IN_MEMORY_ARGUMENTS = (  # those that concern a network which is loaded already
    "attention",
    "block",
    "bos",
    "cache",
    "cfg_scale",
    "exclude_ids",
    "family",
    "last_block",
    "mask_token_id",
    "max_length",
    "shift_logits",
    "temperature",
    "top_k",
    "top_p",
)
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

    def refuse(self, family: str, *names: str, why: str = "") -> None:
        """Raise DuelError if one of these arguments was given, which `family` does not support; `why`: the reason."""
        for name in names:
            if getattr(self, name) not in (None, False, ()):
                reason = f": {why}" if why else ""
                raise DuelError(
                    f"{self.name} is of the family {family}, which has no choice of '{name}'{reason}; leave it out."
                )


def tokenizer_source(arguments: Mapping[str, Any]) -> tuple[str, str]:
    """(name, revision) of the tokenizer that model args name: `tokenizer`, else `pretrained`, else `model`."""
    tokenizer = CHECKPOINT("tokenizer", arguments.get("tokenizer"))
    if tokenizer is not None:
        return tokenizer, "main"
    pretrained = CHECKPOINT("pretrained", arguments.get("pretrained"))
    model = CHECKPOINT("model", arguments.get("model"))
    revision = arguments.get("revision") or "main"
    return pretrained or model or BUNDLED, str(revision)
