"""One check that a file is whole and agrees with itself, where two of its entries say the same thing."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lm_eval_duel.errors import DuelError
from lm_eval_duel.rates import perplexity

SAME = 1e-6  # relative difference up to which two values are one


@contextlib.contextmanager
def whole(file: Path, what: str) -> Iterator[None]:
    """Raise a DuelError that names the file, where reading it finds an entry missing or of another type."""
    try:
        yield
    except DuelError:
        raise
    except (ArithmeticError, AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError) as error:
        raise DuelError(
            f"{file} is not {what}, or is not whole ({type(error).__name__}: {str(error)[:120]}). Write it again, or "
            "leave it out."
        ) from None


def load(file: Path, what: str) -> Any:
    """The JSON of a file; raises DuelError if it cannot be read. `what`: what the file should be, for the message."""
    with whole(file, what):
        return json.loads(file.read_text(encoding="utf-8"))


def number(value: Any) -> float | None:
    """A number, which lm_eval may have written as text, or None for null; raises ValueError for NaN."""
    if value is None:
        return None
    if math.isnan(result := float(value)):
        raise ValueError("a number is NaN")
    return result


def check(file: str, name: str, metrics: Mapping[str, float], total: Mapping[str, Any], estimator: str) -> None:
    """Raise DuelError if a task contradicts itself.

    `metrics`: its perplexities under one filter. `total`: its entry in config.duel.tasks, if that covers all of its
    documents; `estimator`: that of `metrics`.
    """
    for (what, value), (other_what, other) in _pairs(metrics, total, estimator):
        if not math.isclose(value, other, rel_tol=SAME):
            raise DuelError(
                f"{file} contradicts itself: {what} of {name} is {value:.10g}, but {other_what} {other:.10g}. "
                "Run the task again, or leave the file out."
            )
    impossible = [
        (metric, value) for metric, value in metrics.items() if value < 0 or (not value and "bits" not in metric)
    ]
    impossible += [
        (f"log_prob of {key}", scored["log_prob"])
        for key, scored in total.get("values", {}).items()
        if (scored["log_prob"] or 0.0) > 0
    ]
    for what, value in impossible:
        raise DuelError(
            f"{file}: {what} of {name} is {value:g}, and a probability is at most 1. Run the task again, or leave the "
            "file out."
        )


def _pairs(
    metrics: Mapping[str, float], total: Mapping[str, Any], estimator: str
) -> Iterator[tuple[tuple[str, float], tuple[str, float]]]:
    """Two values that must be equal, each with what it is."""
    if {"bits_per_byte", "byte_perplexity"} <= metrics.keys():
        bits, value = metrics["bits_per_byte"], metrics["byte_perplexity"]
        yield ("byte_perplexity", value), ("bits_per_byte makes it", perplexity(bits * math.log(2)))
    tokens, log_prob = total.get("tokens"), total.get("values", {}).get(estimator, {}).get("log_prob")
    if "token_perplexity" in metrics and tokens and log_prob is not None:
        implied = perplexity(-log_prob / tokens)
        yield ("token_perplexity", metrics["token_perplexity"]), ("its log_prob and tokens make it", implied)
