"""Perplexity, gap closed, and bootstrap intervals over documents."""

from __future__ import annotations

import math

import numpy as np

DRAWS, SEED = 10_000, 0
LEVEL = (2.5, 97.5)  # percentiles of a 95 % interval
MOST_UNDEFINED = 0.025  # share of draws without a positive gap, above which an interval would be a choice of draws
AT_ONCE = 4_000_000  # documents drawn in one piece


def value(metric: str, nats: float | np.ndarray, units: float | np.ndarray) -> float | np.ndarray:
    """A metric of a log-likelihood: exp(-nats / units), for bits_per_byte -nats / units / ln 2."""
    rate = -np.asarray(nats, dtype=np.float64) / units
    found = rate / math.log(2) if metric == "bits_per_byte" else np.exp(rate)
    return found if found.ndim else float(found)


def scaled(metric: str, known: float, ratio: float) -> float:
    """A metric's value where the log-likelihood is `ratio` times that of the known value."""
    return known * ratio if metric == "bits_per_byte" else known**ratio


def stderr(metric: str, found: float, nats: float, nats_stderr: float) -> float:
    """Standard error of a metric's value from that of the nats (delta method)."""
    rate = found if metric == "bits_per_byte" else math.log(found)  # in proportion to the nats
    error = abs(rate * nats_stderr / nats)
    return error if metric == "bits_per_byte" else found * error


def gap_closed(elbo: float, duel: float, ar: float) -> float | None:
    """(ELBO - DUEL) / (ELBO - AR) x 100 in perplexity; None where the ELBO's gap is not positive."""
    return 100 * (elbo - duel) / (elbo - ar) if elbo > ar else None


def resample(columns: np.ndarray, draws: int = DRAWS, seed: int = SEED) -> np.ndarray:
    """Sums of each column over documents drawn with replacement: (documents, K) -> (draws, K).

    All columns see the same documents in a draw, so quotients and differences of them are paired.
    """
    documents = len(columns)
    generator = np.random.default_rng(seed)
    found = []
    piece = max(1, AT_ONCE // documents)
    for start in range(0, draws, piece):
        n = min(piece, draws - start)
        drawn = generator.integers(documents, size=(n, documents)) + documents * np.arange(n)[:, None]
        times = np.bincount(drawn.ravel(), minlength=n * documents).reshape(n, documents)  # how often each was drawn
        found.append(times.astype(np.float64) @ columns)
    return np.concatenate(found)


def interval(values: np.ndarray) -> list[float]:
    """The 95 % percentile interval of draws."""
    low, high = np.percentile(values, LEVEL)
    return [float(low), float(high)]


def gap_interval(elbo: np.ndarray, duel: np.ndarray, ar: np.ndarray) -> tuple[list[float] | None, str]:
    """The interval of gap closed from paired draws, and a reason (or remark) where some have no positive ELBO gap."""
    defined = elbo > ar
    undefined = int((~defined).sum())
    if undefined > MOST_UNDEFINED * len(elbo):
        return None, f"no interval: {undefined:,} of {len(elbo):,} draws have no positive ELBO gap"
    gap = (elbo - ar)[defined]
    remark = f"{undefined:,} of {len(elbo):,} draws without a positive ELBO gap are left out" if undefined else ""
    return interval(100 * (elbo - duel)[defined] / gap), remark
