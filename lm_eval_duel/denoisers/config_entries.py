"""Typed access to the entries of a config.json: a count is 12, not "12", 12.0 or true; a switch is not a string.

Each function raises ValueError for a value of another type. A null entry counts as absent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

COUNTS = (
    "d_model",
    "embedding_size",
    "expert_intermediate_size",
    "head_dim",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "max_sequence_length",
    "mlp_hidden_size",
    "moe_intermediate_size",
    "n_embd",
    "n_group",
    "n_head",
    "n_heads",
    "n_kv_heads",
    "n_layer",
    "n_layers",
    "n_positions",
    "n_query_groups",
    "n_routed_experts",
    "num_attention_heads",
    "num_experts",
    "num_experts_per_tok",
    "num_hidden_layers",
    "num_key_value_heads",
    "topk_group",
    "vocab_size",
)
SIZES = ("hidden_size", "n_embd", "n_head", "n_layer", "num_attention_heads", "num_hidden_layers", "vocab_size")
COUNTS_OR_NONE_AT_ALL = ("dense_intermediate_size", "first_k_dense_replace", "n_shared_experts", "num_shared_experts")
NUMBERS = (
    "layer_norm_epsilon",
    "norm_eps",
    "partial_rotary_factor",
    "rms_norm_eps",
    "rope_theta",
    "routed_scaling_factor",
)
SWITCHES = (
    "attention_bias",
    "include_bias",
    "include_qkv_bias",
    "mlp_bias",
    "norm_topk_prob",
    "right_shift_logits",
    "tie_word_embeddings",
    "use_qk_norm",
    "weight_tying",
)


def count(config: Mapping[str, Any], key: str, least: int = 1) -> int | None:
    """An integer, at least `least`, or None."""
    value = config.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
        raise ValueError(f"'{key}' must be an integer, at least {least}; got {value!r}")
    return value


def number(config: Mapping[str, Any], key: str) -> float | None:
    """A number above 0, or None."""
    value = config.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"'{key}' must be a number above 0; got {value!r}")
    return value


def switch(config: Mapping[str, Any], key: str, default: bool | None = None) -> bool | None:
    """True or false, or `default`."""
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"'{key}' must be true or false; got {value!r}")
    return default if value is None else value


def section(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    """An entry that is an object itself; empty if absent."""
    value = config.get(key)
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"'{key}' must be an object of names and values; got {value!r}")
    return value or {}


def check(config: Mapping[str, Any], blocks: Iterable[str] = ()) -> None:
    """Raise ValueError for an entry of a decoder's config of the wrong type; `blocks`: entries that hold a block."""
    readers: list[tuple[Callable[..., Any], Iterable[str], tuple[int, ...]]] = [
        (count, (*COUNTS, *blocks), (1,)),
        (count, COUNTS_OR_NONE_AT_ALL, (0,)),
        (number, NUMBERS, ()),
        (switch, SWITCHES, ()),
    ]
    for entries in (config, _rotary(config)):
        for read, keys, least in readers:
            for key in keys:
                read(entries, key, *least)


def check_sizes(config: Mapping[str, Any]) -> None:
    """Raise ValueError for a size below 1 in a config that transformers reads, whatever else it holds."""
    for key in SIZES:
        if isinstance(config.get(key), int):
            count(config, key)


def lookup(config: Mapping[str, Any], key: str) -> Any:
    """An entry, which transformers 5 may have moved into `rope_parameters`; None if absent."""
    value = config.get(key)
    return _rotary(config).get(key) if value is None else value


def _rotary(config: Mapping[str, Any]) -> dict[str, Any]:
    parameters = config.get("rope_parameters")
    return parameters if isinstance(parameters, dict) else {}
