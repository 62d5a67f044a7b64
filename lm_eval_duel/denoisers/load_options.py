"""The network arguments: how a checkpoint is read. What is not given is detected.

Each argument is declared once, here: its type, its default, and its reader. `denoisers.load`, the model args of the
harness and the Python API use these declarations.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal, get_args

from lm_eval_duel.arguments import (
    NOTHING,
    Reader,
    argument,
    at_least,
    block_size,
    checkpoint_name,
    choice,
    count,
    number_where,
    one_of,
    readers,
    require_finite,
    required_choice,
    text,
    text_or_mapping,
    truth,
    whole,
)
from lm_eval_duel.demo import BUNDLED
from lm_eval_duel.errors import DuelError, another_block, clean_keys_exact

if TYPE_CHECKING:
    from collections.abc import Mapping

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

DTYPES: tuple[str, ...] = get_args(Dtype)
BOS: tuple[str, ...] = get_args(Bos)
WHOLE_ROW_BOS = ("scored", "official", "first")  # values of `bos` that say which positions of a whole row are scored


def _dtype(key: str, value: Any) -> str:
    name = str(value).removeprefix("torch.") if value not in NOTHING else "auto"
    return one_of(key, name, DTYPES)


def _bos(key: str, value: Any) -> str:
    return one_of(key, str(value).lower(), BOS)  # the harness's parser reads `none` as None


def _cache(key: str, value: Any) -> str | None:
    return None if value in NOTHING or value == "none" else one_of(key, value, get_args(Cache))


def _temperature(key: str, value: Any) -> float | None:
    number = number_where("a number above 0", lambda x: 0 < x < float("inf"))(key, value)
    if number is not None:
        require_finite(key, number, 1 / number)
    return number


def _cfg_scale(key: str, value: Any) -> float | None:
    number = number_where("a number >= 0 (0: no guidance)", lambda x: 0 <= x < float("inf"))(key, value)
    require_finite(key, number or 0)
    return number or None


def _ids(key: str, value: Any) -> tuple[int, ...]:
    """Ids such as 5, 5+7 or [5, 7], in ascending order."""
    if isinstance(value, list | tuple):
        parts = list(value)
    else:
        parts = [] if value in NOTHING else str(value).split("+") if isinstance(value, str) else [value]
    try:
        ids = {whole(part) for part in parts}
        if any(number < 0 for number in ids):
            raise ValueError
    except (ValueError, TypeError, OverflowError):
        raise DuelError(f"'{key}' is token ids, such as 126081 or 126081+126348; got '{value}'.") from None
    return tuple(sorted(ids))


@dataclasses.dataclass(frozen=True, kw_only=True)
class NetworkArguments:
    """The arguments of a network, as they are given to `denoisers.load` and in model args."""

    dtype: Dtype = argument(_dtype, "auto")
    revision: str = argument(lambda key, value: text(key, value) or "main", "main")
    trust_remote_code: bool = argument(truth, False)
    mask_token_id: int | None = argument(at_least(0))
    max_length: int | None = argument(count)
    bos: Bos | None = argument(_bos)
    family: str | None = argument(text)
    attention: Attention | None = argument(choice(*get_args(Attention)))
    block: int | str | None = argument(block_size)  # the trained block, if neither config nor family names it
    shift_logits: bool | None = argument(lambda key, value: None if value in NOTHING else truth(key, value))
    last_block: LastBlock = argument(required_choice(*get_args(LastBlock)), "fill")
    first_token: FirstToken | None = argument(choice(*get_args(FirstToken)))  # causal prefix: of each block
    sigma: Sigma | None = argument(choice(*get_args(Sigma)))  # SEDD
    backend: Backend | None = argument(choice(*get_args(Backend)))
    cache: Cache | None = argument(_cache)  # the cached sampler, another distribution
    exclude_ids: tuple[int, ...] = argument(_ids, ())  # left out of the vocabulary, another distribution
    cfg_scale: float | None = argument(_cfg_scale)
    temperature: float | None = argument(_temperature)  # of the network that is scored, as are top_k and top_p
    top_k: int | None = argument(count)
    top_p: float | None = argument(number_where("a probability above 0, at most 1", lambda x: 0 < x <= 1))
    peft: str | None = argument(checkpoint_name)
    device_map: str | Mapping[str, int | str | torch.device] | None = argument(text_or_mapping)
    load_in_8bit: bool = argument(truth, False)
    load_in_4bit: bool = argument(truth, False)
    compile: bool = argument(truth, False)


NETWORK_READERS: dict[str, Reader] = readers(NetworkArguments)
ALIASES: dict[str, tuple[str, Reader]] = {  # the harness's words: the argument meant, and what the value means there
    "add_bos_token": ("bos", lambda key, value: "given" if truth(key, value) else "none"),
    "parallelize": ("device_map", lambda key, value: "auto" if value not in NOTHING and truth(key, value) else None),
}


@dataclasses.dataclass(frozen=True)
class LoadOptions(NetworkArguments):
    """What `denoisers.load` is asked for; every network argument is read and checked here."""

    name: str
    device: torch.device
    tokenizer: str | PreTrainedTokenizerBase | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(NetworkArguments):
            value = getattr(self, field.name)
            if value != field.default:
                object.__setattr__(self, field.name, NETWORK_READERS[field.name](field.name, value))
        if self.load_in_8bit and self.load_in_4bit:
            raise DuelError("load_in_8bit and load_in_4bit are both given; leave one out.")
        if self.cache and self.backend == "remote":
            raise DuelError(
                f"cache={self.cache} needs a network whose attention this package knows, and backend=remote runs a "
                "checkpoint's own code. Leave backend out, or use cache=none."
            )
        if self.cache and self.compile:
            raise DuelError(
                "compile=true traces the layers without kept keys and values, so it does not support "
                f"cache={self.cache}; leave one out."
            )

    def require_block(self, trained: int) -> None:
        """Raise DuelError if a block other than the trained one was given."""
        if isinstance(self.block, int) and self.block != trained:
            raise another_block(trained, self.block)

    def require_cacheable(self, attention: str) -> None:
        """Raise DuelError if a cache was given for a network that is not bidirectional."""
        if self.cache and attention != "bidirectional":
            raise clean_keys_exact(self.cache, attention)

    def refuse(self, family: str, *names: str) -> None:
        """Raise DuelError if one of these arguments was given, which `family` does not support."""
        for name in names:
            if getattr(self, name) not in (None, False):
                raise DuelError(
                    f"{self.name} is of the family {family}, which has no choice of '{name}'; leave it out."
                )


def tokenizer_source(arguments: Mapping[str, Any]) -> tuple[str, str]:
    """(name, revision) of the tokenizer that model args name: `tokenizer`, else `pretrained`, else `model`."""
    if (name := checkpoint_name("tokenizer", arguments.get("tokenizer"))) is not None:
        return name, "main"
    names = [checkpoint_name(key, arguments.get(key)) for key in ("pretrained", "model")]
    return names[0] or names[1] or BUNDLED, str(arguments.get("revision") or "main")
