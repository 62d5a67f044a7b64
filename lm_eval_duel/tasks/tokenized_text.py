"""Text that carries its token ids, so that a task of wrapped rows scores exactly those.

To the harness and to other models it is a `str`. duel-mdm reads the ids, which decoding and encoding could change.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from lm_eval_duel.errors import DuelError


class TokenText(str):
    """A text and its row of ids.

    `token_ids`: the whole row; `special_tokens`: how many of them, at its beginning and at its end, are special tokens;
    `tokenizer`: the name and the fingerprint of its tokenizer; `bos`: the convention by which its scored positions were
    counted, or "".
    """

    token_ids: tuple[int, ...]
    special_tokens: tuple[int, int]
    tokenizer: tuple[str, str]
    bos: str

    def __new__(
        cls,
        text: str,
        token_ids: Sequence[int],
        special_tokens: tuple[int, int] = (0, 0),
        tokenizer: tuple[str, str] = ("", ""),
        bos: str = "",
    ) -> TokenText:
        before, after = special_tokens
        if before < 0 or after < 0 or before + after > len(token_ids):
            raise DuelError(f"A row of {len(token_ids)} ids cannot have {before} and {after} special tokens.")
        self = super().__new__(cls, text)
        self.token_ids = tuple(int(token) for token in token_ids)
        self.special_tokens, self.tokenizer, self.bos = (int(before), int(after)), tuple(tokenizer), bos
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenText, (str(self), self.token_ids, self.special_tokens, self.tokenizer, self.bos)

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits of ids, special tokens and tokenizer."""
        content = json.dumps([self.token_ids, self.special_tokens, self.tokenizer])
        return hashlib.sha256(content.encode()).hexdigest()[:16]


MADE: set[str] = set()  # digests of how the documents and rows of this process were made


def made(*how: object) -> str:
    """The digest of how documents were made (data set, tokenizer, metadata). It is remembered, so that documents from a
    request cache that were made differently are recognised."""
    digest = hashlib.sha256(json.dumps(how, sort_keys=True, default=str).encode()).hexdigest()[:16]
    MADE.add(digest)
    return digest
