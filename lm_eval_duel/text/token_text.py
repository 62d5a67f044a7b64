"""The text that each token adds, for people to read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # how a tokenizer decodes the first tokens of a character of several tokens
CONTEXT = 8  # tokens decoded before each one, because some tokenizers decode the first token of a text differently


def token_texts(ids: Sequence[int], tokenizer: Any) -> list[str]:
    """The text that each id adds. The pieces add up to the decoded text.

    A character of several ids stands at the last of them; the others get an empty piece. `tokenizer` has `decode(ids)`.
    """
    ids, pieces = list(ids), []
    start, done = 0, ""  # `done` is the text of ids[start:n] for the ids that have their piece
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
