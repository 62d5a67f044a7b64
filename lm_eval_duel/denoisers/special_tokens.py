"""Special tokens around a text: those that a tokenizer writes, and those that a network expects in its rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lm_eval_duel.denoisers.base import Denoiser
from lm_eval_duel.errors import DuelError

USUAL = ("a", "A", "the", "0")
TRIED = 1000  # tokens of the vocabulary that are tried as texts


def convention(tokenizer: Any, denoiser: Denoiser) -> tuple[str, list[int], list[int]]:
    """The convention of special tokens (as in `bos=`), and the ids before and after a text.

    A masked LM has its tokenizer's ([CLS] text [SEP]); any other network one BOS, if its family has one. Raises
    DuelError if the convention needs a token that the tokenizer lacks.
    """
    bos = denoiser.bos
    if bos in ("none", "first"):
        return bos, [], []
    prefix, suffix = framing(tokenizer)
    suffix = suffix if denoiser.appends_sep else []
    if bos == "auto":
        bos = "given" if prefix or suffix else "none"
    if bos == "none":
        return bos, [], []
    if not (prefix or suffix):
        start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else end_of_text(tokenizer)
        if start is None:
            remedy = "name one that has, with tokenizer=" if denoiser.shift else "use bos=none"
            raise DuelError(f"bos={bos} needs a BOS (or EOS) token and this tokenizer has none; {remedy}.")
        prefix = [start]
    return bos, prefix, suffix


def end_of_text(tokenizer: Any) -> int | None:
    """The id of the end of a text, or what comes nearest."""
    for token in (tokenizer.eos_token_id, tokenizer.sep_token_id, tokenizer.bos_token_id):
        if token is not None:
            return token
    return None


def framing(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The ids that a tokenizer puts before and after a text, such as [CLS] and [SEP].

    Found with a text that has ordinary tokens: the ids of a text without any begin everywhere, and an unknown letter
    may be written as a special token. Raises DuelError if no text shows them.
    """
    special = set(tokenizer.all_special_ids)
    for text in _texts(tokenizer):
        plain = _ids(tokenizer, text, False)
        if not plain or not special.isdisjoint(plain):
            continue
        framed = _ids(tokenizer, text, True)
        for start in range(len(framed) - len(plain) + 1):
            if framed[start : start + len(plain)] == plain:
                return framed[:start], framed[start + len(plain) :]
    raise DuelError(
        f"The special tokens that {tokenizer.name_or_path or 'this tokenizer'} adds could not be determined: no text "
        "that was tried has ordinary tokens, the same with and without special tokens. To score without them, use "
        "bos=none; to use another tokenizer, pass tokenizer=<a folder or hub name>."
    )


def _texts(tokenizer: Any) -> Iterator[str]:
    """Texts that may have ordinary tokens in this vocabulary."""
    yield from USUAL
    special = set(tokenizer.all_special_ids)
    ordinary = sorted(token for token in tokenizer.get_vocab().values() if token not in special)
    for token in ordinary[:TRIED]:
        yield tokenizer.decode([token])


def _ids(tokenizer: Any, text: str, special: bool) -> list[int]:
    return tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
