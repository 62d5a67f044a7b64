"""Statistics of samples, from their ids and log-probabilities. Entropies and rates are in nats."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import fmean, stdev

Ids = Sequence[int]
NGRAMS = (1, 2, 3, 4)  # lengths of the n-grams in distinct-n


def entropy(samples: Sequence[Ids]) -> float:
    """The mean entropy of the samples' token histograms (the paper's definition)."""
    return fmean(_entropy(sample) for sample in samples)


def entropy_error(samples: Sequence[Ids]) -> float | None:
    """The standard error of `entropy` over samples."""
    return mean_error([_entropy(sample) for sample in samples])[1]


def _entropy(sample: Ids) -> float:
    return sum(-n / len(sample) * math.log(n / len(sample)) for n in Counter(sample).values())


def distinct(samples: Sequence[Ids], n: int) -> float | None:
    """The share of distinct n-grams in all samples together; None if there are no n-grams."""
    grams = [gram for sample in samples for gram in _grams(sample, n)]
    return len(set(grams)) / len(grams) if grams else None


def repetition(samples: Sequence[Ids], n: int = 4) -> float | None:
    """The mean share of a sample's n-grams that occurred earlier in it; None if there are no n-grams."""
    shares = _repeated(samples, n)
    return fmean(shares) if shares else None


def repetition_error(samples: Sequence[Ids], n: int = 4) -> float | None:
    """The standard error of `repetition` over samples."""
    shares = _repeated(samples, n)
    return mean_error(shares)[1] if shares else None


def _repeated(samples: Sequence[Ids], n: int) -> list[float]:
    grams = [_grams(sample, n) for sample in samples]
    return [1 - len(set(of_sample)) / len(of_sample) for of_sample in grams if of_sample]


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
