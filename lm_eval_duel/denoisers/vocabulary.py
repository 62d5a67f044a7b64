"""The columns of the logits that are tokens of the vocabulary."""

from __future__ import annotations

import logging

import torch

from lm_eval_duel.errors import DuelError

log = logging.getLogger("lm_eval.duel_mdm")

PADDING = 128  # embeddings are padded by up to this many columns, for speed


def require_fit(tokens: set[int], mask_id: int | None, vocab_size: int, path: str) -> None:
    """Raise DuelError if the tokenizer has an id that the network of `path` does not predict."""
    if (last := max(tokens - {mask_id})) >= vocab_size:
        raise DuelError(
            f"The tokenizer has ids up to {last} but {path} predicts {vocab_size}: "
            "they do not belong together; pass tokenizer=<the right one>."
        )


def excluded_columns(
    tokens: set[int], mask_id: int | None, vocab_size: int, path: str, device: torch.device
) -> torch.Tensor:
    """The columns that are not tokens of the vocabulary, [MASK] included, (V,) bool; see `require_fit`."""
    require_fit(tokens, mask_id, vocab_size, path)
    known = sorted(tokens - {mask_id})
    if vocab_size - len(known) > max(PADDING, vocab_size // 10):
        log.warning(
            "The tokenizer has %d tokens and %s predicts %d columns, more than padding explains. If this is the "
            "tokenizer of another model, every number is wrong (set tokenizer=)",
            len(known),
            path,
            vocab_size,
        )
    excluded = torch.ones(vocab_size, dtype=torch.bool, device=device)  # (V,)
    excluded[known] = False
    return excluded
