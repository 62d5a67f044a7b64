"""Perplexities with their errors, the error of gap closed, and bootstrap draws over documents that all rows share."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

DRAWS, SEED = 10_000, 0
CLEAR = 2.0  # standard errors beyond which two values are distinguishable
LEVEL = (2.5, 97.5)  # percentiles of a 95 % interval
MAX_UNDEFINED = 0.025  # share of draws without a positive gap above which there is no interval


def value(metric: str, nats: float | np.ndarray, units: float | np.ndarray) -> float | np.ndarray:
    """A metric of a log-likelihood in nats: exp(-nats / units); for bits_per_byte -nats / units / ln 2."""
    rate = -np.asarray(nats, dtype=np.float64) / units
    with np.errstate(over="ignore"):
        result = rate / math.log(2) if metric == "bits_per_byte" else np.exp(rate)
    return result if result.ndim else float(result)


def rate(metric: str, known: float) -> float:
    """The nats per unit behind a metric's value: the inverse of `value`."""
    if metric == "bits_per_byte":
        return known * math.log(2)
    return math.log(known) if known > 0 else -math.inf


def stderr(metric: str, known: float, nats: float | None, error: float | None) -> float | None:
    """Standard error of a metric's value from its log-likelihood's (delta method); None if not finite."""
    if not nats or error is None or not all(map(math.isfinite, (known, nats, error))):
        return None
    relative = abs(error / nats)  # the rate is proportional to the nats
    return known * relative * (1.0 if metric == "bits_per_byte" else abs(math.log(known)))


def is_distinguishable(here: float, there: float, error: float | None) -> bool:
    """True if two values differ by more than two standard errors of their difference (always, without an error)."""
    return error is None or abs(here - there) > CLEAR * error


def interval(values: np.ndarray) -> list[float]:
    """The 95 % percentile interval of draws. A draw of empty documents only has no rate and is left out."""
    low, high = np.percentile(values[np.isfinite(values)], LEVEL)
    return [float(low), float(high)]


# ---------------------------------------------------------------- gap closed


def gap_closed_stderr(
    elbo: float, duel: float, ar: float, elbo_error: float | None, duel_error: float | None
) -> float | None:
    """Standard error of (ELBO - DUEL) / (ELBO - AR) in percentage points, from the ELBO's and DUEL's.

    The two are drawn independently (delta method). None if one of them is not known.
    """
    if elbo_error is None or duel_error is None:
        return None
    return 100 * math.hypot((duel - ar) / (elbo - ar) ** 2 * elbo_error, duel_error / (elbo - ar))


def gap_interval(elbo: np.ndarray, duel: np.ndarray, ar: np.ndarray) -> tuple[list[float] | None, str]:
    """The interval of gap closed from paired draws, and a remark if the ELBO's gap is not positive in some of them."""
    gap, count = elbo - ar, len(elbo)
    undefined = int((~(gap > 0)).sum())
    if undefined > MAX_UNDEFINED * count:
        return None, f"no interval: {undefined:,} of {count:,} draws have no positive ELBO gap"
    remark = f"{undefined:,} of {count:,} draws without a positive ELBO gap are left out" if undefined else ""
    return interval(100 * (elbo - duel)[gap > 0] / gap[gap > 0]), remark


# ---------------------------------------------------------------- the bootstrap


def resample(columns: np.ndarray, seed: int = SEED) -> np.ndarray:
    """Sums of each column over documents drawn with replacement: (documents, K) -> (draws, K).

    All columns use the same documents in a draw, so their ratios and differences are paired.
    """
    size, random = len(columns), np.random.default_rng(seed)
    return np.array([np.bincount(random.integers(size, size=size), minlength=size) @ columns for _ in range(DRAWS)])


def rates(table: np.ndarray) -> np.ndarray:
    """Bootstrap draws of nats per unit: (documents, K, 2) nats and units -> (K, draws)."""
    documents, count, _ = table.shape
    sums = resample(table.reshape(documents, -1)).reshape(-1, count, 2)
    with np.errstate(divide="ignore", invalid="ignore"):
        return -(sums[..., 0] / sums[..., 1]).T


def with_errors(draws: Sequence[np.ndarray], errors: Sequence[float | None]) -> list[np.ndarray]:
    """The draws of rates that are compared, each with its Monte Carlo error in nats per unit.

    Resampled documents carry their Monte Carlo errors along, so the spread over documents already includes them, unless
    there are few documents. Only the part that is missing in the difference to the nearest of the others is added. So
    the interval of a difference depends on what is compared alone, not on other rows of its table.
    """
    result = []
    for k, (drawn, error) in enumerate(zip(draws, errors, strict=True)):
        if error and math.isfinite(error):
            others = [drawn - other for n, other in enumerate(draws) if n != k] or [drawn]
            present = min(float(np.var(other[np.isfinite(other)])) for other in others)
            missing = math.sqrt(max(0.0, error**2 - present))
            drawn = drawn + missing * np.random.default_rng([SEED, k]).standard_normal(len(drawn))
        result.append(drawn)
    return result
