"""The unigram of some texts, which knows no context, and the warning of a network that predicts them worse.

A network that reads its context is far below the unigram of the texts' own tokens. One above it probably has a wrong
argument: another [MASK], another shift.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping

from lm_eval_duel.core.windows import Window


def scored_tokens(windows: Iterable[Window]) -> Counter[int]:
    """The count of each token among those that some windows score."""
    counts: Counter[int] = Counter()
    for window in windows:
        scored = window.target
        if window.known:
            scored = tuple(token for n, token in enumerate(scored) if n not in window.known)
        counts.update(scored)
    return counts


def unigram_perplexity(counts: Mapping[int, int], vocabulary: int) -> float:
    """The token perplexity of texts if each token is predicted by the shares of all others; NaN without tokens.

    As many tokens as there are distinct ones are added, spread over the vocabulary, since a token that occurs
    once is not among the others. Of n tokens, d of them distinct, over V tokens, one that occurs c times has the
    probability (c - 1 + d / V) / (n - 1 + d).

    Args:
        counts: How often each token occurs.
        vocabulary: The number of tokens that the network may predict, V.
    """
    tokens = sum(counts.values())
    if not tokens:
        return math.nan
    added = len(counts)
    added_to_each = added / max(vocabulary, added)
    nats = 0.0
    for times in counts.values():
        nats -= times * math.log((times - 1 + added_to_each) / (tokens - 1 + added))
    return math.exp(nats / tokens)


def unigram_sentence(counts: Mapping[int, int], vocabulary: int) -> str:
    """The unigram's token perplexity in a sentence, which says so if the texts are too short to judge by it."""
    limit = unigram_perplexity(counts, vocabulary)
    tokens = max(vocabulary, len(counts))
    sentence = f"a unigram of these texts has a token perplexity of {limit:.4f}"
    if limit > tokens:
        sentence += f"; they are too short to judge by it: chance is {tokens:,}, the number of tokens"
    return sentence


def unigram_warning(
    task: str,
    value: float,
    counts: Mapping[int, int],
    vocabulary: int,
    at_most: bool = False,
    stderr: float | None = None,
) -> str:
    """A sentence if a token perplexity is above the unigram of its texts; empty otherwise, and for an infinite one.

    On a short text the unigram can be above the number of tokens, the perplexity of a network that knows nothing. That
    is then the limit.

    Args:
        task: The name of the texts.
        value: Their token perplexity under the network.
        counts, vocabulary: As in `unigram_perplexity`.
        at_most: The value is an upper bound.
        stderr: The Monte Carlo standard error of the value, if it has one and it is known.
    """
    limit = unigram_perplexity(counts, vocabulary)
    without_context = f"a unigram of its texts has {limit:.2f}"
    tokens = max(vocabulary, len(counts))
    if limit > tokens:
        limit = tokens
        without_context = f"a network for which all {tokens:,} tokens are equally probable has {tokens:,}"
    if not limit < value < math.inf:  # an infinite one has a reason of its own; of no tokens, both are NaN
        return ""
    shown = f"at most {value:.2f}" if at_most else f"{value:.2f}"
    if stderr is not None:
        shown += f" ± {stderr:.2f}"
    return (
        f"the token perplexity of {task} is {shown}, and {without_context}: check the mask, shift_logits, the "
        "temperature, the special tokens and the tokenizer, or whether the model was trained on such texts"
    )
