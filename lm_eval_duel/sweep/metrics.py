"""Statistics of samples, from their ids and log-probabilities. Entropies and rates are in nats."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import fmean, stdev

Ids = Sequence[int]
NGRAMS = (1, 2, 3, 4)  # lengths of the n-grams in distinct-n


def entropy(samples: Sequence[Ids]) -> tuple[float, float | None]:
    """The mean entropy of the samples' token histograms (the paper's definition), and its standard error."""
    return mean_error([_entropy(sample) for sample in samples])


def _entropy(sample: Ids) -> float:
    return sum(-n / len(sample) * math.log(n / len(sample)) for n in Counter(sample).values())


def distinct(samples: Sequence[Ids], n: int) -> float | None:
    """The share of distinct n-grams in all samples together; None if there are no n-grams."""
    grams = [gram for sample in samples for gram in _grams(sample, n)]
    return len(set(grams)) / len(grams) if grams else None


def repetition(samples: Sequence[Ids], n: int = 4) -> tuple[float | None, float | None]:
    """The mean share of a sample's n-grams that occurred earlier in it, and its standard error; None if it has none."""
    grams = [_grams(sample, n) for sample in samples]
    shares = [1 - len(set(of_sample)) / len(of_sample) for of_sample in grams if of_sample]
    return mean_error(shares) if shares else (None, None)


def _grams(sample: Ids, n: int) -> list[tuple[int, ...]]:
    return [tuple(sample[start : start + n]) for start in range(len(sample) - n + 1)]


def mean_error(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean and its standard error; None for a single value and for infinite ones."""
    mean = fmean(values)
    known = len(values) > 1 and all(map(math.isfinite, values))
    return mean, stdev(values) / math.sqrt(len(values)) if known else None


def kl(own: Sequence[float], other: Sequence[float], length: int) -> tuple[float, float | None]:
    """KL(A || B) per token and its standard error, from log p_A and log p_B of A's samples."""
    return mean_error([(a - b) / length for a, b in zip(own, other, strict=True)])
