"""Perplexities of one document, as (log-likelihood, units) for each metric."""

from __future__ import annotations

import logging
from typing import Any

from lm_eval_duel.errors import DuelError
from lm_eval_duel.text.annotated import count_units

TOKENS = "duel_tokens"  # a column of the documents: their tokens, which are checked when they are scored
UNCOUNTED = "The documents have no column %s, and this model does not count tokens: there is no token_perplexity"
log = logging.getLogger("lm_eval.duel_mdm")  # lm-eval prints its own loggers only


def token_perplexity(doc: dict[str, Any], results: list[float]) -> dict[str, tuple[float, int]]:
    """(log-likelihood, scored positions) of a row."""
    (log_prob,) = results
    return {"token_perplexity": (log_prob, doc[TOKENS])}


def perplexity(doc: dict[str, Any], results: list[float]) -> dict[str, tuple[float, int]]:
    """(log-likelihood, units) of a document, for each metric of a loglikelihood_rolling task.

    A user's own data do not count tokens: duel-mdm's answer tells which text it scored, and its number of tokens. If
    another model answers, tokens are unknown: there is no token perplexity, and a warning says so.
    """
    (log_prob,) = results
    text = getattr(log_prob, "text", doc.get("text"))
    if text is None:
        raise DuelError(
            f"This document has no column 'text', in which words and bytes are counted; it has {', '.join(doc)}. Name "
            "the column that is scored 'text' in the data."
        )
    words, size = (doc["words"], doc["bytes"]) if TOKENS in doc and "words" in doc else count_units(text)
    units = {"word_perplexity": words, "byte_perplexity": size, "bits_per_byte": size}
    if (tokens := doc.get(TOKENS, getattr(log_prob, "tokens", None))) is None:
        from lm_eval.utils import warning_once

        warning_once(log, UNCOUNTED, TOKENS)
    else:
        units["token_perplexity"] = tokens
    return {metric: (log_prob, count) for metric, count in units.items()}
