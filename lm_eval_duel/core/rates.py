"""Negative log-likelihoods per unit: as perplexities, and with their standard error over texts."""

from __future__ import annotations

import math
from collections.abc import Sequence

METRICS = ("token_perplexity", "perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte")  # by preference
IMPOSSIBLE = (  # the reason of an infinite value
    "a token has probability 0 under this spec (for example because of top_k or top_p), so its log-likelihood is "
    "-infinity"
)


def perplexity(nll: float) -> float:
    """exp of a negative log-likelihood per unit; infinite if it is too large for a float."""
    try:
        return math.exp(nll)
    except OverflowError:
        return math.inf


def ratio(values: Sequence[float], sizes: Sequence[float]) -> tuple[float, float | None]:
    """The ratio of two sums over texts, and its standard error over texts.

        rate = sum values / sum sizes,   stderr = sqrt(n / (n - 1) sum (value - rate size)^2) / sum sizes

    The error is None for fewer than two texts of a size above 0, and for an infinite sum. The sum of sizes is above 0.
    """
    count, size = len(values), math.fsum(sizes)
    rate = math.fsum(values) / size
    if sum(own > 0 for own in sizes) < 2 or not math.isfinite(rate):
        return rate, None
    spread = math.fsum((value - rate * own) ** 2 for value, own in zip(values, sizes, strict=True))
    return rate, math.sqrt(count / (count - 1) * spread) / size
