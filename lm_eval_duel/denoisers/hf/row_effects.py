"""Networks for which a row is more than its visible cells: its padding, its length, or the rows before it matter."""

from __future__ import annotations

from typing import Any

from lm_eval_duel.denoisers.base import Denoiser

LENGTHENED = ("dynamic", "longrope")  # kinds of rotary positions


def padding_id(config: Any, tokens: set[int], mask_id: int) -> int:
    """The id that stands in padding: the config's, which must not be [MASK]; else the lowest of the other tokens."""
    found = getattr(config, "pad_token_id", None)
    known = isinstance(found, int) and found in tokens and found != mask_id
    return found if known else min(tokens - {mask_id})


def without_block_sparse(model: Any) -> int | None:
    """The shortest row of a BigBird for which its config asks for block-sparse attention; None for other networks.

    Its code changes to full attention for good at the first shorter row. Here attention is full from the start, so
    that no number depends on what was scored before.
    """
    config = model.config
    if getattr(config, "attention_type", None) != "block_sparse" or not hasattr(model, "base_model"):
        return None
    model.base_model.set_attention_type("original_full")
    return (5 + 2 * config.num_random_blocks) * config.block_size + 1


def scales_by_length(denoiser: Denoiser) -> bool:
    """Whether rotary frequencies change with the longest row of a call (Phi-3's long versions): padding counts."""
    unscaled = unscaled_length(denoiser)
    return unscaled is not None and denoiser.max_length > unscaled


def unscaled_length(denoiser: Denoiser) -> int | None:
    """The longest row whose rotary frequencies are those of shorter ones; None if all are."""
    config = getattr(getattr(denoiser, "model", None), "config", None)
    said = [getattr(config, name, None) or {} for name in ("rope_parameters", "rope_scaling")]
    said += [value for entries in said for value in entries.values() if isinstance(value, dict)]  # by kind of layer
    if not any((entries.get("rope_type") or entries.get("type")) in LENGTHENED for entries in said):
        return None
    names = ("original_max_position_embeddings", "max_position_embeddings")
    lengths = [entries.get(names[0]) for entries in said] + [getattr(config, name, None) for name in names]
    return min((length for length in lengths if length), default=0)
