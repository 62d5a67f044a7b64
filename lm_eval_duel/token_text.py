"""Text that carries its own token ids: a task that cuts streams of tokens scores exactly those.

To the harness, and to any other model, it is a `str`; decoding and encoding again cannot change what duel-mdm scores.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

from lm_eval_duel.errors import DuelError


class TokenText(str):
    """A text and the row of ids that stands for it.

    `token_ids`: the whole row, framing included; `framing`: how many ids at its beginning and its end are framing
    tokens; `tokenizer`: the name and the fingerprint of the tokenizer that wrote it.
    """

    token_ids: tuple[int, ...]
    framing: tuple[int, int]
    tokenizer: tuple[str, str]

    def __new__(
        cls,
        text: str,
        token_ids: Sequence[int],
        framing: tuple[int, int] = (0, 0),
        tokenizer: tuple[str, str] = ("", ""),
    ) -> TokenText:
        before, after = framing
        if before < 0 or after < 0 or before + after > len(token_ids):
            raise DuelError(f"A row of {len(token_ids)} ids cannot have {before} and {after} framing tokens.")
        self = super().__new__(cls, text)
        self.token_ids = tuple(int(token) for token in token_ids)
        self.framing, self.tokenizer = (int(before), int(after)), tuple(tokenizer)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenText, (str(self), self.token_ids, self.framing, self.tokenizer)

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits of ids, framing and tokenizer."""
        said = json.dumps([self.token_ids, self.framing, self.tokenizer])
        return hashlib.sha256(said.encode()).hexdigest()[:16]


def keep_apart_in_caches() -> None:
    """Let the harness's response cache tell texts of equal letters and different ids apart: it keys on letters only.

    Keys of plain text stay what they are.
    """
    from lm_eval.api import model

    plain = model.hash_args
    if getattr(plain, "knows_ids", False):
        return

    def hash_args(attr: str, args: Iterable[Any]) -> str:
        args = list(args)
        return plain(attr, [*args, *(arg.digest for arg in args if isinstance(arg, TokenText))])

    hash_args.knows_ids = True
    model.hash_args = hash_args
