"""Text that carries its own token ids: a task that cuts streams of tokens scores exactly those.

To the harness, and to any other model, it is a `str`; decoding and encoding again cannot change what duel-mdm scores.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from lm_eval_duel.errors import DuelError


class TokenText(str):
    """A text and the row of ids that stands for it.

    `token_ids`: the whole row, framing included; `framing`: how many ids at its beginning and its end are framing
    tokens; `tokenizer`: the name and the fingerprint of the tokenizer that wrote it; `bos`: the convention by which its
    scored positions were counted, "" where they were not.
    """

    token_ids: tuple[int, ...]
    framing: tuple[int, int]
    tokenizer: tuple[str, str]
    bos: str

    def __new__(
        cls,
        text: str,
        token_ids: Sequence[int],
        framing: tuple[int, int] = (0, 0),
        tokenizer: tuple[str, str] = ("", ""),
        bos: str = "",
    ) -> TokenText:
        before, after = framing
        if before < 0 or after < 0 or before + after > len(token_ids):
            raise DuelError(f"A row of {len(token_ids)} ids cannot have {before} and {after} framing tokens.")
        self = super().__new__(cls, text)
        self.token_ids = tuple(int(token) for token in token_ids)
        self.framing, self.tokenizer, self.bos = (int(before), int(after)), tuple(tokenizer), bos
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenText, (str(self), self.token_ids, self.framing, self.tokenizer, self.bos)

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits of ids, framing and tokenizer."""
        said = json.dumps([self.token_ids, self.framing, self.tokenizer])
        return hashlib.sha256(said.encode()).hexdigest()[:16]


MADE: set[str] = set()  # how the documents and rows of this process were made, by digest


def made(*how: object) -> str:
    """The digest of how documents were made (data set, tokenizer, metadata), remembered: those of a request cache that
    were made otherwise are told by it."""
    digest = hashlib.sha256(json.dumps(how, sort_keys=True, default=str).encode()).hexdigest()[:16]
    MADE.add(digest)
    return digest
