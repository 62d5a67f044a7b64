"""Special tokens around a text, as a tokenizer adds them and as a network expects them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch

from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.errors import DuelError

USUAL = ("a", "A", "the", "0")
TRIED = 1000  # ordinary tokens that are tried as texts


def convention(tokenizer: Any, denoiser: Denoiser) -> tuple[str, list[int], list[int]]:
    """The convention for special tokens (the value of `bos=`), and the ids before and after a text.

    A masked LM uses its tokenizer's ([CLS] text [SEP]); other networks use one BOS, if their family expects one.
    """
    bos = denoiser.bos
    if bos in ("none", "first"):
        return bos, [], []
    prefix, suffix = added_tokens(tokenizer)
    suffix = suffix if denoiser.appends_sep else []
    if bos == "auto":
        bos = "given" if prefix or suffix else "none"
    if bos == "none":
        return bos, [], []
    if not (prefix or suffix):
        start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else end_of_text(tokenizer)
        if start is None:
            remedy = "pass tokenizer=<one that has it>" if denoiser.shift else "use bos=none"
            raise DuelError(f"bos={bos} needs a BOS (or EOS) token, and this tokenizer has none; {remedy}.")
        prefix = [start]
    return bos, prefix, suffix


def expected(denoiser: Denoiser, tokenizer: Any | None) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The special tokens before and after a text; None: texts have none. Both are empty if no tokenizer names them."""
    if tokenizer is None:
        return ((), ()) if denoiser.bos == "given" else None
    try:
        bos, prefix, suffix = convention(tokenizer, denoiser)
    except DuelError:  # raised again when a text is scored; ids can be scored without
        return None
    return (tuple(prefix), tuple(suffix)) if bos == "given" and prefix else None


def end_of_text(tokenizer: Any) -> int | None:
    """The id that ends a text: EOS, else SEP, else BOS."""
    for token in (tokenizer.eos_token_id, tokenizer.sep_token_id, tokenizer.bos_token_id):
        if token is not None:
            return token
    return None


def added_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The ids that a tokenizer adds before and after a text of ordinary tokens, such as [CLS] and [SEP].

    Raises DuelError if no text reveals them.
    """
    special = set(tokenizer.all_special_ids)
    for text in _texts(tokenizer):
        plain = _ids(tokenizer, text, False)
        if not plain or not special.isdisjoint(plain):
            continue
        full = _ids(tokenizer, text, True)
        for start in range(len(full) - len(plain) + 1):
            if full[start : start + len(plain)] == plain:
                return full[:start], full[start + len(plain) :]
    raise DuelError(
        f"Cannot determine the special tokens that {tokenizer.name_or_path or 'this tokenizer'} adds: no text that was "
        "tried shows them. Use bos=none to score without them, or tokenizer=<a folder or hub name>."
    )


def _texts(tokenizer: Any) -> Iterator[str]:
    """Texts that are likely to have ordinary tokens in this vocabulary."""
    yield from USUAL
    special = set(tokenizer.all_special_ids)
    ordinary = sorted(token for token in tokenizer.get_vocab().values() if token not in special)
    for token in ordinary[:TRIED]:
        yield tokenizer.decode([token])


def _ids(tokenizer: Any, text: str, special: bool) -> list[int]:
    return tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]


# ---------------------------------------------------------------- vocabulary
# The columns of the logits that are tokens of the vocabulary.


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
