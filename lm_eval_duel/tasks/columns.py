"""Columns that this package's tasks add to their documents."""

TOKENS = "duel_tokens"  # the number of a document's tokens, which is checked when it is scored
