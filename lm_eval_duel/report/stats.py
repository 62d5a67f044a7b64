"""Perplexity, gap closed, and bootstrap intervals over documents."""

from __future__ import annotations

import math

import numpy as np

DRAWS, SEED = 10_000, 0
CLEAR = 2.0  # standard errors, beyond which two values are told apart
LEVEL = (2.5, 97.5)  # percentiles of a 95 % interval
MOST_UNDEFINED = 0.025  # share of draws without a positive gap, above which an interval would be a choice of draws
AT_ONCE = 4_000_000  # documents drawn in one piece


def value(metric: str, nats: float | np.ndarray, units: float | np.ndarray) -> float | np.ndarray:
    """A metric of a log-likelihood: exp(-nats / units), for bits_per_byte -nats / units / ln 2."""
    rate = -np.asarray(nats, dtype=np.float64) / units
    with np.errstate(over="ignore"):
        found = rate / math.log(2) if metric == "bits_per_byte" else np.exp(rate)
    return found if found.ndim else float(found)


def scaled(metric: str, known: float, ratio: float) -> float:
    """A metric's value where the log-likelihood is `ratio` times that of the known value."""
    if metric == "bits_per_byte":
        return known * ratio
    return math.exp(power) if (power := math.log(known) * ratio) < 700 else math.inf


def stderr(metric: str, found: float, nats: float, nats_stderr: float) -> float | None:
    """Standard error of a metric's value from that of the nats (delta method); None: of an infinite value."""
    if not nats or not all(map(math.isfinite, (found, nats, nats_stderr))):
        return None
    rate = found if metric == "bits_per_byte" else math.log(found)  # in proportion to the nats
    error = abs(rate * nats_stderr / nats)
    return error if metric == "bits_per_byte" else found * error


def clear(here: float, there: float, error: float | None) -> bool:
    """Whether two values differ by more than two standard errors of their difference; None: they have none."""
    return error is None or abs(here - there) > CLEAR * error


def gap_closed(elbo: float, duel: float, ar: float) -> float | None:
    """(ELBO - DUEL) / (ELBO - AR) x 100 in perplexity; None where the ELBO's gap is not positive."""
    finite = all(map(math.isfinite, (elbo, duel, ar)))
    return 100 * (elbo - duel) / (elbo - ar) if finite and elbo > ar else None


def gap_closed_stderr(elbo: float, duel: float, ar: float, error: float | None) -> float | None:
    """Standard error of gap closed, in points, from that of the ELBO (delta method)."""
    return None if error is None else abs(100 * (duel - ar) / (elbo - ar) ** 2 * error)


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


def with_error(rates: np.ndarray, column: int, error: float, seed: int = SEED) -> np.ndarray:
    """Draws (draws,) of a rate whose documents have a Monte Carlo error, from those of all rows (draws, rows).

    Documents that are drawn again bring their errors with them, so a spread over documents holds the Monte Carlo error
    already, unless they are few. What is missing of it in the difference from the row that is nearest is added.
    """
    others = [rates[:, column] - rates[:, n] for n in range(rates.shape[1]) if n != column] or [rates[:, column]]
    held = min(float(np.var(other)) for other in others)
    missing = math.sqrt(max(0.0, error**2 - held))
    return rates[:, column] + missing * np.random.default_rng([seed, column]).standard_normal(len(rates))


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
