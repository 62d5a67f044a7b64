"""Strings of the harness that carry more than their characters: token ids, or the text after a gap.

To the harness and to other models they are a `str`; duel-mdm reads the rest. `TokenText` holds its token ids, which
decoding and encoding could change. `Gap` knows the text after it, which the network sees. Other models join a gap to
its context before they encode it, and are refused there, before anything is scored.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from lm_eval_duel.errors import DuelError

FILE = "file of this document"  # an entry of documents that come from the user's own files
BLIND = (
    "asks for the text between a prefix and a suffix, and this model sees the prefix only. Use --model duel-mdm with a "
    "bidirectional network, or rows without a suffix."
)


class Units(NamedTuple):
    """The sizes by which a log-probability is divided."""

    words: int
    bytes: int  # UTF-8


def count_units(text: str, between: bool = False) -> Units:
    """Words and bytes of the text that was scored.

    Words are the parts between white space, as the harness counts them: white space at an end of a text adds an empty
    part. A blank text has no words. `between`: the text stands between others, and white space at its ends separates
    it from them.
    """
    size = len(text.encode("utf-8"))
    if not text.strip():
        return Units(0, size)
    words = re.split(r"\s+", text.strip() if between else text)
    return Units(len(words), size)


def split_at_borders(context: str, text: str, suffix: str | None = None) -> tuple[str, str, str]:
    """Context, text and suffix as they are encoded; `suffix` is None if nothing follows the text.

    White space at a border belongs to what follows it. That at the end of a context is scored with the text; that at
    the end of a text with a suffix is shown with the suffix, and not scored, unless there is nothing else to score.
    """
    if not text:
        return context, "", suffix or ""
    before = context.rstrip()
    inside = text
    if suffix is not None:
        inside = text.rstrip() or text
    return before, context[len(before) :] + inside, text[len(inside) :] + (suffix or "")


class Gap(str):
    """The text of a gap. `suffix`: what follows it, visible and not scored; `known`: see `Residues`."""

    suffix: str
    known: tuple[int, ...]

    def __new__(cls, text: str, suffix: str = "", known: Sequence[int] = ()) -> Gap:
        self = super().__new__(cls, text)
        self.suffix = suffix
        self.known = tuple(known)
        return self

    def __radd__(self, context: str) -> str:
        """`context + self`, as other models join them; raises DuelError, since that leaves the suffix out."""
        if self.suffix:
            raise DuelError(f"This task {BLIND}")
        return context + str(self)

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits of what the text alone does not say, for the key of a response cache."""
        return _digest("suffix", self.suffix)


class Residues(Gap):
    """Residues of a protein between others, a token each. `known`: indices of those that are given and not scored."""

    def __radd__(self, context: str) -> str:
        raise DuelError(
            "This task scores single residues given all others, but this model sees only the residues before them. Use "
            "--model duel-mdm with a bidirectional network."
        )

    @property
    def digest(self) -> str:
        return _digest("residues", self.suffix, self.known)


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
        token_ids: Sequence[int] = (),
        special_tokens: tuple[int, int] = (0, 0),
        tokenizer: tuple[str, str] = ("", ""),
        bos: str = "",
    ) -> TokenText:
        before, after = special_tokens
        if before < 0 or after < 0 or before + after > len(token_ids):
            raise DuelError(f"A row of {len(token_ids)} ids cannot have {before} and {after} special tokens.")
        self = super().__new__(cls, text)
        self.token_ids = tuple(int(token) for token in token_ids)
        self.special_tokens = (int(before), int(after))
        name, fingerprint = tokenizer
        self.tokenizer = (name, fingerprint)
        self.bos = bos
        return self

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits of ids, special tokens and tokenizer."""
        return _digest(self.token_ids, self.special_tokens, self.tokenizer)


def _digest(*content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


# ---------------------------------------------------------------- the text that each token adds


UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # how a tokenizer decodes the first tokens of a character of several tokens
CONTEXT = 8  # tokens decoded before each one, because some tokenizers decode the first token of a text differently


def token_texts(ids: Sequence[int], tokenizer: Any) -> list[str]:
    """The text that each id adds. The pieces add up to the decoded text.

    A character of several ids stands at the last of them; the others get an empty piece. `tokenizer` has `decode(ids)`.
    """
    ids = list(ids)
    pieces = []
    start = 0
    done = ""  # the text of ids[start:n], for the ids that have their piece
    complete = [0]  # numbers of ids before which the text is complete, latest last
    for n in range(len(ids)):
        text = tokenizer.decode(ids[start : n + 1])
        if text.endswith(UNFINISHED) and n + 1 < len(ids):
            pieces.append("")
            continue
        pieces.append(text[len(done) :])
        done = text
        complete.append(n + 1)
        if len(complete) > 2 * CONTEXT:  # decode from a later token on: the cost stays linear
            complete = complete[-CONTEXT:]
            start = complete[0]
            done = tokenizer.decode(ids[start : n + 1])
    return pieces


def document_of(request: Any) -> Any:
    """The name of the document of a harness's request: its file, if it comes from one, else its number."""
    if isinstance(request.doc, dict):
        return request.doc.get(FILE, request.doc_id)
    return request.doc_id
