"""Wrapped rows: documents are concatenated and cut into full rows, as the 110M models are evaluated.

    documents    a b c | d e | f g h i j         rows of 6, from [B] to [E], with an [E] after each document
    stream       a b c E d e E f g h i j E
    rows         B a b c E E | B d e E f E | ... 4 ids of the stream each

Ids only: no text, no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from lm_eval_duel.errors import DuelError

REMAINDERS = ("keep", "drop", "official")
BATCH = 1000  # documents that the authors' code wraps at a time (the default of datasets.map)


@dataclasses.dataclass(frozen=True)
class Wrapping:
    """The settings of wrapped documents.

    `length`: ids of a row, special tokens included. `framed`: rows begin with `bos` and end with `eos`. `insert_eos`:
    an `eos` after each document.

    `remainder`: what to do with ids that do not fill a row: "keep" (the last row is short), "drop", or "official":
    documents are wrapped 1,000 at a time and the remainder of each batch is dropped, as in the authors' code.
    """

    length: int
    bos: int
    eos: int
    framed: bool = True
    insert_eos: bool = False
    remainder: str = "keep"

    def __post_init__(self) -> None:
        if self.length <= 2 * self.framed:
            raise DuelError(f"length={self.length} leaves no position for text in a row; raise it.")

    @property
    def special_tokens(self) -> tuple[int, int]:
        """The number of special tokens at a row's beginning and at its end."""
        return (1, 1) if self.framed else (0, 0)

    def rows(self, documents: Iterable[Sequence[int]]) -> Iterator[list[int]]:
        """The rows of the documents' ids."""
        waiting: list[int] = []
        size = self.length - sum(self.special_tokens)
        for count, document in enumerate(documents, 1):
            waiting += document
            if self.insert_eos:
                waiting.append(self.eos)
            whole = len(waiting) // size * size
            for start in range(0, whole, size):
                yield self._row(waiting[start : start + size])
            del waiting[:whole]
            if self.remainder == "official" and count % BATCH == 0:
                waiting.clear()
        if waiting and self.remainder == "keep":
            yield self._row(waiting)

    def _row(self, ids: list[int]) -> list[int]:
        return [self.bos, *ids, self.eos] if self.framed else list(ids)
