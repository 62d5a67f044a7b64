"""Statistics of samples, from their ids. Entropies are in nats."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

from lm_eval_duel.sweep.judges import Texts

NGRAMS = (1, 2, 3, 4)  # lengths of the n-grams in distinct-n


def look(samples: Texts) -> dict[str, Any]:
    """The mean entropy of the samples' token histograms (the paper's definition), n-grams, and their standard errors.

    distinct-n: the share of distinct n-grams in all samples together. repetition: the mean share of a sample's 4-grams
    that occurred earlier in it. None without n-grams.
    """
    histograms = [[n / len(sample) for n in Counter(sample).values()] for sample in samples]
    entropy = mean_error([sum(-share * math.log(share) for share in shares) for shares in histograms])
    each = [_grams(sample, 4) for sample in samples]
    repeated = [1 - len(set(grams)) / len(grams) for grams in each if grams]
    repetition = mean_error(repeated) if repeated else (None, None)
    return {
        "count": len(samples),
        "tokens": sum(map(len, samples)),
        "entropy": entropy[0],
        **{f"distinct_{n}": _distinct(samples, n) for n in NGRAMS},
        "repetition": repetition[0],
        "entropy_stderr": entropy[1],
        "repetition_stderr": repetition[1],
    }


def mean_error(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean and its standard error; None for a single value and for infinite ones."""
    mean = fmean(values)
    known = len(values) > 1 and all(map(math.isfinite, values))
    return mean, stdev(values) / math.sqrt(len(values)) if known else None


def _distinct(samples: Texts, n: int) -> float | None:
    grams = [gram for sample in samples for gram in _grams(sample, n)]
    return len(set(grams)) / len(grams) if grams else None


def _grams(sample: tuple[int, ...], n: int) -> list[tuple[int, ...]]:
    return [sample[start : start + n] for start in range(len(sample) - n + 1)]
