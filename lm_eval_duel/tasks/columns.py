"""Columns that this package's tasks add to their documents."""

from __future__ import annotations

import hashlib
import json

TOKENS = "duel_tokens"  # the number of a document's tokens, which is checked when it is scored
MADE = "duel_made"  # how the document was made
MADE_HERE: set[str] = set()  # digests of how the documents and rows of this process were made


def digest_of(*how: object) -> str:
    """A digest of what made the documents: data set, tokenizer, metadata. It is stored in them, so that documents of a
    request cache with other metadata are recognised."""
    digest = hashlib.sha256(json.dumps(how, sort_keys=True, default=str).encode()).hexdigest()[:16]
    MADE_HERE.add(digest)
    return digest
