"""Perplexity, gap closed, and bootstrap intervals over documents."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

DRAWS, SEED = 10_000, 0
CLEAR = 2.0  # standard errors beyond which two values are distinguishable
LEVEL = (2.5, 97.5)  # percentiles of a 95 % interval
MAX_UNDEFINED = 0.025  # share of draws without a positive gap above which there is no interval
MAX_DRAWN = 4_000_000  # documents drawn at once


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


def scaled(metric: str, known: float, ratio: float) -> float:
    """A metric's value for a log-likelihood that is `ratio` times that of the `known` value."""
    if metric == "bits_per_byte":
        return known * ratio
    return math.exp(power) if (power := math.log(known) * ratio) < 700 else math.inf


def stderr(metric: str, known: float, nats: float, nats_stderr: float) -> float | None:
    """Standard error of a metric's value from that of its log-likelihood (delta method); None if not finite."""
    if not nats or not all(map(math.isfinite, (known, nats, nats_stderr))):
        return None
    rate = known if metric == "bits_per_byte" else math.log(known)  # proportional to the nats
    error = abs(rate * nats_stderr / nats)
    return error if metric == "bits_per_byte" else known * error


def clear(here: float, there: float, error: float | None) -> bool:
    """Whether two values differ by more than two standard errors of their difference (always, without an error)."""
    return error is None or abs(here - there) > CLEAR * error


def gap_closed(elbo: float, duel: float, ar: float) -> float | None:
    """(ELBO - DUEL) / (ELBO - AR) x 100 in perplexity; None unless the ELBO's gap is positive."""
    finite = all(map(math.isfinite, (elbo, duel, ar)))
    return 100 * (elbo - duel) / (elbo - ar) if finite and elbo > ar else None


def gap_closed_stderr(
    elbo: float, duel: float, ar: float, elbo_error: float | None, duel_error: float | None = 0.0
) -> float | None:
    """Standard error of gap closed, in percentage points, from those of the ELBO and of DUEL (delta method).

    The two are drawn independently. None if one of them is not known.
    """
    if elbo_error is None or duel_error is None:
        return None
    return 100 * math.hypot((duel - ar) / (elbo - ar) ** 2 * elbo_error, duel_error / (elbo - ar))


def resample(columns: np.ndarray, draws: int | None = None, seed: int = SEED) -> np.ndarray:
    """Sums of each column over documents drawn with replacement: (documents, K) -> (draws, K).

    All columns use the same documents in a draw, so their ratios and differences are paired.
    """
    documents, draws = len(columns), draws or DRAWS
    generator = np.random.default_rng(seed)
    sums = []
    piece = max(1, MAX_DRAWN // documents)
    for start in range(0, draws, piece):
        n = min(piece, draws - start)
        drawn = generator.integers(documents, size=(n, documents)) + documents * np.arange(n)[:, None]
        times = np.bincount(drawn.ravel(), minlength=n * documents).reshape(n, documents)  # of each document
        sums.append(times.astype(np.float64) @ columns)
    return np.concatenate(sums)


def with_error(rates: np.ndarray, column: int, error: float, seed: int = SEED) -> np.ndarray:
    """Add Monte Carlo error to the bootstrap draws of one row: (draws, rows) -> (draws,).

    Resampled documents carry their Monte Carlo errors along, so the spread over documents already includes that error,
    unless there are few documents. Only the part that is missing in the difference to the nearest row is added.
    """
    others = [rates[:, column] - rates[:, n] for n in range(rates.shape[1]) if n != column] or [rates[:, column]]
    included = min(float(np.var(other)) for other in others)
    missing = math.sqrt(max(0.0, error**2 - included))
    return rates[:, column] + missing * np.random.default_rng([seed, column]).standard_normal(len(rates))


def rates(table: np.ndarray, errors: Sequence[float | None]) -> np.ndarray:
    """Bootstrap draws of nats per unit: (documents, K, 2) nats and units -> (draws, K), each with its error in nats."""
    documents, count, _ = table.shape
    sums = resample(table.reshape(documents, -1)).reshape(-1, count, 2)
    with np.errstate(divide="ignore", invalid="ignore"):
        drawn = sums[..., 0] / sums[..., 1]  # (draws, K)
    result = drawn.copy()
    for column, error in enumerate(errors):
        if error and math.isfinite(error):
            result[:, column] = with_error(drawn, column, error / table[:, column, 1].sum())
    return -result


def interval(values: np.ndarray) -> list[float]:
    """The 95 % percentile interval of draws."""
    low, high = np.percentile(values, LEVEL)
    return [float(low), float(high)]


def gap_interval(elbo: np.ndarray, duel: np.ndarray, ar: np.ndarray) -> tuple[list[float] | None, str]:
    """The interval of gap closed from paired draws, and a remark if the ELBO's gap is not positive in some of them."""
    defined = elbo > ar
    undefined = int((~defined).sum())
    if undefined > MAX_UNDEFINED * len(elbo):
        return None, f"no interval: {undefined:,} of {len(elbo):,} draws have no positive ELBO gap"
    gap = (elbo - ar)[defined]
    remark = f"{undefined:,} of {len(elbo):,} draws without a positive ELBO gap are left out" if undefined else ""
    return interval(100 * (elbo - duel)[defined] / gap), remark
