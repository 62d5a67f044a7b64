"""Text that carries its own token ids: a task that cuts streams of tokens scores exactly those.

To the harness, and to any other model, it is a `str`; decoding and encoding again cannot change what duel-mdm scores.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Iterable, Sequence
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


def keep_apart_in_caches(generating: str) -> None:
    """Let the harness's response cache tell apart what its keys, made of letters only, do not: texts of equal letters
    and different ids; generated texts of other laws (`generating`: the law's digest); and samples, which are never
    found again, so that repeats differ.

    Keys of plain texts stay what they are.
    """
    from lm_eval.api import model

    plain = getattr(model.hash_args, "plain", model.hash_args)

    def hash_args(attr: str, args: Iterable[Any]) -> str:
        args = list(args)
        more = [arg.digest for arg in args if isinstance(arg, TokenText)]
        if attr == "generate_until":
            sampled = args[1].get("do_sample") or (args[1].get("do_sample") is None and args[1].get("temperature"))
            more.append(uuid.uuid4().hex if sampled else generating)
        return plain(attr, [*args, *more])

    hash_args.plain = plain
    model.hash_args = hash_args


MADE: set[str] = set()  # how the documents and rows of this process were made, by digest


def made(*how: object) -> str:
    """The digest of how documents were made (data set, tokenizer, metadata), remembered: those of a request cache that
    were made otherwise are told by it."""
    digest = hashlib.sha256(json.dumps(how, sort_keys=True, default=str).encode()).hexdigest()[:16]
    MADE.add(digest)
    return digest
