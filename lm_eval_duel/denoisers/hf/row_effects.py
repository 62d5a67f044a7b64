"""Networks whose predictions depend on more than the positions of a row: on padding, row length, or earlier rows."""

from __future__ import annotations

from typing import Any

from lm_eval_duel.core.denoiser import Denoiser

LENGTHENED = ("dynamic", "longrope")  # rotary types that depend on the row length


def padding_id(config: Any, tokens: set[int], mask_id: int) -> int:
    """The id for padding: that of the config, if it is a token other than [MASK]; otherwise the lowest token."""
    pad_id = getattr(config, "pad_token_id", None)
    known = isinstance(pad_id, int) and pad_id in tokens and pad_id != mask_id
    return pad_id if known else min(tokens - {mask_id})


def without_block_sparse(model: Any) -> int | None:
    """Give a BigBird full attention; returns the row length from which its config has block-sparse attention.

    None for other networks. BigBird's code switches to full attention for good at the first shorter row. Here attention
    is full from the start, so that no number depends on earlier rows.
    """
    config = model.config
    if getattr(config, "attention_type", None) != "block_sparse" or not hasattr(model, "base_model"):
        return None
    model.base_model.set_attention_type("original_full")
    return (5 + 2 * config.num_random_blocks) * config.block_size + 1


def scales_by_length(denoiser: Denoiser) -> bool:
    """True if rotary frequencies change with the longest row of a call, as in Phi-3's long versions."""
    unscaled = unscaled_length(denoiser)
    return unscaled is not None and denoiser.max_length > unscaled


def unscaled_length(denoiser: Denoiser) -> int | None:
    """The longest row with the same rotary frequencies as shorter rows; None if every row has the same."""
    config = getattr(getattr(denoiser, "model", None), "config", None)
    sections = [getattr(config, name, None) or {} for name in ("rope_parameters", "rope_scaling")]
    sections += [
        value for section in sections for value in section.values() if isinstance(value, dict)
    ]  # per layer type
    if not any((section.get("rope_type") or section.get("type")) in LENGTHENED for section in sections):
        return None
    names = ("original_max_position_embeddings", "max_position_embeddings")
    lengths = [section.get(names[0]) for section in sections] + [getattr(config, name, None) for name in names]
    return min((length for length in lengths if length), default=0)
