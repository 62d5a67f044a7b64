"""The tokenizer of a checkpoint, [MASK], the special tokens around a text, and the columns that are tokens."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase, Qwen2TokenizerFast
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.utils import cached_file

from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.denoisers.hub import QUIET, explained
from lm_eval_duel.denoisers.load_options import LoadOptions
from lm_eval_duel.errors import DuelError

log = logging.getLogger("lm_eval.duel_mdm")

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt")  # at least one of them
QWEN2_TOKENIZERS = ("DreamTokenizer",)
LIKE_MASK = re.compile(r"[<\[].*mask.*[>\]]", re.IGNORECASE)  # <|mask|>, [MASK], <|mdm_mask|>
SHORT_TEXTS = ("a", "A", "the", "0")  # likely to be ordinary tokens
TRIED = 1000  # ordinary tokens that are tried as texts after them
PADDING = 128  # embeddings are padded by up to this many columns, for speed

Ids: TypeAlias = tuple[int, ...]


def has_tokenizer(path: str, revision: str) -> bool:
    """True if a checkpoint has a tokenizer."""

    def is_there(name: str) -> bool:
        return cached_file(path, name, revision=revision, **QUIET) is not None

    return any(map(is_there, TOKENIZER_FILES))


def load_tokenizer(
    path: str, trust_remote_code: bool, revision: str, setting: str = "tokenizer="
) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or hub name. Dream's has its own code, but is Qwen2's with other special tokens.

    `setting`: what the user sets to name another one, for the error.
    """
    configs = logging.getLogger("transformers.configuration_utils")
    level = configs.level
    configs.setLevel(logging.ERROR)  # it warns about every unknown model_type
    try:
        remedy = f"To use another one, pass {setting}<a folder or hub name>."
        with explained(path, "read config and tokenizer of", remedy):
            tokenizer = _read_tokenizer(path, trust_remote_code, revision)
    finally:
        configs.setLevel(level)
    # Without a file, some classes build a tokenizer of special tokens alone.
    ordinary = set() if tokenizer is None else set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids)
    if not ordinary:
        raise DuelError(
            f"There is no tokenizer in {path}. Write it there with tokenizer.save_pretrained(folder), or pass another "
            f"one: {setting}<a folder or hub name>."
        )
    return tokenizer


def _read_tokenizer(path: str, trust_remote_code: bool, revision: str) -> PreTrainedTokenizerBase | None:
    """The tokenizer that transformers reads, None if there is none in a folder; raises the errors of transformers."""
    options = {"trust_remote_code": trust_remote_code, "revision": revision}
    try:
        return AutoTokenizer.from_pretrained(path, **options)
    except AttributeError:  # transformers 5, if rotary positions are scaled and the model_type is unknown
        return AutoTokenizer.from_pretrained(path, config=PretrainedConfig(), **options)
    except Exception:
        if os.path.isdir(path) and not has_tokenizer(path, revision):
            return None
        config = get_tokenizer_config(path, revision=revision)
        if config.get("tokenizer_class") not in QWEN2_TOKENIZERS:
            raise
        return Qwen2TokenizerFast.from_pretrained(path, revision=revision)


def find_mask_id(
    options: LoadOptions,
    config: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase | None,
    usual: int | None,
    rows: int | None,
) -> int:
    """The id of [MASK], from the options, the config, the tokenizer or the family (`usual`), in this order.

    `rows`: the rows of the embedding, if their number is known: an id is below it.

    Raises DuelError if there is no such id, or it is that of another special token.
    """
    of_tokenizer = getattr(tokenizer, "mask_token_id", None)
    named = (
        (options.mask_token_id, "given"),
        (config.get("mask_token_id"), "from its config"),
        (of_tokenizer, "from its tokenizer"),
        (usual, "the default of its family: neither config nor tokenizer names one"),
    )
    given = [(mask_id, source) for mask_id, source in named if mask_id is not None]
    if not given:
        raise DuelError(
            f"Neither config nor tokenizer of {options.name} names a mask token; pass mask_token_id=<id>."
            f"{_tokens_like_mask(tokenizer)}"
        )
    mask_id, source = given[0]

    is_whole = isinstance(mask_id, int) and not isinstance(mask_id, bool)
    if not is_whole or not 0 <= mask_id < (rows or mask_id + 1):
        ids = f"its ids are 0 to {rows - 1}" if rows else "ids are whole numbers"
        raise DuelError(
            f"mask_token_id={mask_id} ({source}) is not an id of {options.name}; {ids}. Pass the right one."
            f"{_tokens_like_mask(tokenizer)}"
        )
    if mask_id == of_tokenizer:
        return mask_id
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if mask_id == getattr(tokenizer, name, None):
            raise DuelError(f"mask_token_id={mask_id} is the {name} of {options.name}'s tokenizer, not [MASK].")
    return mask_id


def _tokens_like_mask(tokenizer: PreTrainedTokenizerBase | None) -> str:
    """A sentence with the tokens that may be [MASK] by their names; empty if there are none."""
    if tokenizer is None:
        return ""
    named = []
    for token, token_id in tokenizer.get_vocab().items():
        if LIKE_MASK.fullmatch(token):
            named.append(f"{token} (id {token_id})")
    return f" Tokens whose names look like one: {', '.join(sorted(named))}." if named else ""


def another_mask(mask_id: int | None, tokenizer: Any | None) -> int | None:
    """The [MASK] that the tokenizer names, if it is not that of the network; None if either has none."""
    of_tokenizer: int | None = getattr(tokenizer, "mask_token_id", None)
    if mask_id is None or of_tokenizer == mask_id:
        return None
    return of_tokenizer


def about_another_mask(name: str, mask_id: int | None, tokenizer: Any | None) -> str:
    """A warning that a network's [MASK] is not the one that the tokenizer names; empty if it is."""
    of_tokenizer = another_mask(mask_id, tokenizer)
    if tokenizer is None or of_tokenizer is None:
        return ""
    token = tokenizer.convert_ids_to_tokens(mask_id)
    return (
        f"{name} is scored with mask_token_id={mask_id} ({token!r}), and the tokenizer's [MASK] is {of_tokenizer} "
        f"({tokenizer.mask_token!r}), which counts as a token"
    )


def warn_of_another_mask(name: str, mask_id: int | None, tokenizer: Any | None) -> None:
    """Log the warning of `about_another_mask`, if there is one."""
    warning = about_another_mask(name, mask_id, tokenizer)
    if warning:
        log.warning("%s", warning)


def row_length(path: str, max_length: int | None, positions: int | None) -> int:
    """The length of rows: `max_length`, else all `positions` of the network; raises DuelError if neither will do."""
    if not (max_length or positions):
        raise DuelError(f"Neither config nor tokenizer of {path} gives its number of positions; pass max_length=.")
    if max_length and positions and max_length > positions:
        raise DuelError(f"max_length={max_length} is too long: {path} takes {positions} positions; lower it.")
    return max_length or positions


def convention(tokenizer: Any, denoiser: Denoiser) -> tuple[str, list[int], list[int]]:
    """The convention for special tokens (the value of `bos=`), and the ids before and after a text.

    A masked LM uses its tokenizer's ([CLS] text [SEP]); other networks use one BOS, if their family expects one.
    """
    bos = denoiser.bos
    if bos in ("none", "first"):
        return bos, [], []
    prefix, suffix = added_tokens(tokenizer)
    if not denoiser.appends_sep:
        suffix = []
    if bos == "auto":
        bos = "given" if prefix or suffix else "none"
    if bos == "none":
        return bos, [], []
    if prefix or suffix:
        return bos, prefix, suffix

    start = tokenizer.bos_token_id
    if start is None:  # GPT-2's tokens for the beginning and the end are one
        start = end_of_text(tokenizer)
    if start is None:
        remedy = "pass tokenizer=<one that has it>" if denoiser.shift else "use bos=none"
        raise DuelError(f"bos={bos} needs a BOS (or EOS) token, and this tokenizer has none; {remedy}.")
    return bos, [start], []


def expected(denoiser: Denoiser, tokenizer: Any | None) -> tuple[Ids, Ids] | None:
    """The special tokens before and after a text; None: texts have none. Both are empty if no tokenizer names them."""
    if tokenizer is None:
        return ((), ()) if denoiser.bos == "given" else None
    try:
        bos, prefix, suffix = convention(tokenizer, denoiser)
    except DuelError:  # raised again when a text is scored; ids can be scored without
        return None
    if bos != "given" or not prefix:
        return None
    return tuple(prefix), tuple(suffix)


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
        # The text's own ids stand somewhere in the whole; what is before and after them was added.
        for start in range(len(full) - len(plain) + 1):
            end = start + len(plain)
            if full[start:end] == plain:
                return full[:start], full[end:]
    raise DuelError(
        f"Cannot determine the special tokens that {tokenizer.name_or_path or 'this tokenizer'} adds: no text that was "
        "tried shows them. Use bos=none to score without them, or tokenizer=<a folder or hub name>."
    )


def _texts(tokenizer: Any) -> Iterator[str]:
    """Texts that are likely to have ordinary tokens in this vocabulary."""
    yield from SHORT_TEXTS
    special = set(tokenizer.all_special_ids)
    ordinary = set(tokenizer.get_vocab().values()) - special
    for token in sorted(ordinary)[:TRIED]:
        yield tokenizer.decode([token])


def _ids(tokenizer: Any, text: str, special: bool) -> list[int]:
    return tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]


def require_fit(
    tokens: set[int],
    mask_id: int | None,
    vocab_size: int,
    path: str,
) -> None:
    """Raise DuelError if the tokenizer has an id that the network of `path` does not predict."""
    last = max(tokens - {mask_id})
    if last >= vocab_size:
        raise DuelError(
            f"The tokenizer has ids up to {last} but {path} predicts {vocab_size}: "
            "they do not belong together; pass tokenizer=<the right one>."
        )


def excluded_columns(
    tokens: set[int],
    mask_id: int | None,
    vocab_size: int,
    path: str,
    device: torch.device,
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
