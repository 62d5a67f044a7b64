"""The bootstrap over documents: draws of rates, and the 95 % interval of draws.

All values that are compared use the same documents in a draw, so their ratios and differences are paired.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

DRAWS = 10_000
DRAWN_TOGETHER = 1_000_000  # documents drawn in one call, which makes as many draws as fit: 8 MB
SEED = 0
TAIL = 0.025  # the share of a law that a 95 % interval leaves out on either side


def resample(columns: np.ndarray, seed: int = SEED) -> np.ndarray:
    """Sums of each column over documents drawn with replacement: (documents, K) -> (draws, K).

    All columns use the same documents in a draw, so their ratios and differences are paired.
    """
    size = len(columns)
    random = np.random.default_rng(seed)
    together = max(1, DRAWN_TOGETHER // size)  # draws
    sums = []
    for begin in range(0, DRAWS, together):
        draws = min(together, DRAWS - begin)
        documents = random.integers(size, size=(draws, size))
        # One call counts all draws: the documents of draw d are numbered from d * size on.
        numbered = documents + size * np.arange(draws)[:, None]  # (draws, documents)
        times_drawn = np.bincount(numbered.ravel(), minlength=draws * size).reshape(draws, size)
        sums.append(times_drawn @ columns)  # (draws, K)
    return np.concatenate(sums)


def text_of(key: str) -> str:
    """The digest of a document's text: its key without the number of the copy."""
    return key.rpartition(":")[0]


def of_distinct(table: np.ndarray, texts: Sequence[str]) -> np.ndarray:
    """The rows of a table added up over copies of a text: (documents, ...) -> (distinct texts, ...).

    Copies are drawn together, since one says nothing about texts that another does not.
    """
    places: dict[str, int] = {}
    for text in texts:
        places.setdefault(text, len(places))
    sums = np.zeros((len(places), *table.shape[1:]))
    np.add.at(sums, [places[text] for text in texts], table)
    return sums


def bootstrap_rates(table: np.ndarray, texts: Sequence[str]) -> np.ndarray:
    """Bootstrap draws of nats per unit: (documents, K, 2) nats and units -> (K, draws).

    `texts`: of the documents, or digests of them; equal for copies.
    """
    _, count, _ = table.shape
    once = of_distinct(table, texts)  # (distinct texts, K, 2)
    sums = resample(once.reshape(len(once), -1)).reshape(-1, count, 2)  # (draws, K, 2)
    nats = sums[..., 0]
    units = sums[..., 1]
    with np.errstate(divide="ignore", invalid="ignore"):  # a draw of empty documents only has no units
        return -(nats / units).T


def with_errors(draws: Sequence[np.ndarray], errors: Sequence[float | None]) -> list[np.ndarray]:
    """The draws of rates that are compared, each with its Monte Carlo error in nats per unit.

    Resampled documents carry their Monte Carlo errors along, so the spread over documents already includes them, unless
    there are few documents. Only the part that is missing in the difference to the nearest of the others is added. So
    the interval of a difference depends on what is compared alone, not on other rows of its table.
    """
    result = []
    for k, (drawn, error) in enumerate(zip(draws, errors, strict=True)):
        if error and math.isfinite(error):
            others = [*draws[:k], *draws[k + 1 :]]
            spreads = [_variance(drawn - other) for other in others] or [_variance(drawn)]
            present = min(spreads)
            missing = math.sqrt(max(0.0, error**2 - present))
            noise = np.random.default_rng([SEED, k]).standard_normal(len(drawn))  # of row k: errors are independent
            drawn = drawn + missing * noise
        result.append(drawn)
    return result


def _variance(draws: np.ndarray) -> float:
    """The variance of the draws that have a rate."""
    return float(np.var(draws[np.isfinite(draws)]))


# ---------------------------------------------------------------- intervals


def percentile_interval(values: np.ndarray, documents: int) -> list[float]:
    """The 95 % interval of bootstrap draws over so many distinct documents: their percentiles at `tail` and 1 - `tail`.

    A draw of empty documents only has no rate and is left out.
    """
    share = tail(documents)
    low, high = np.quantile(values[np.isfinite(values)], (share, 1 - share))
    return [float(low), float(high)]


def tail(documents: int) -> float:
    """The share of the draws beyond either end of a 95 % interval: Phi(-sqrt(n / (n - 1)) t) for n documents.

    t is the 0.975 quantile of Student's t with n - 1 degrees of freedom. The share is 2.5 % for infinitely many
    documents and less for few: their draws vary too little, and by how much is known less well. The result is the
    expanded percentile interval (Hesterberg 2015, "What Teachers Should Know About the Bootstrap", The American
    Statistician 69(4), on narrowness bias).
    """
    if documents < 2:  # the draws of copies of one document vary by their Monte Carlo error alone, which is normal
        return TAIL
    return NormalDist().cdf(-math.sqrt(documents / (documents - 1)) * student_quantile(documents - 1))


def student_quantile(freedom: int) -> float:
    """The 0.975 quantile of Student's t by the Cornish-Fisher expansion, to 0.001 from 9 degrees of freedom on."""
    z = NormalDist().inv_cdf(1 - TAIL)
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )
