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
    implied = {}  # metric -> what else says it, and the value
    if "bits_per_byte" in metrics:
        by_bits = perplexity(metrics["bits_per_byte"] * math.log(2))
        implied["byte_perplexity"] = "bits_per_byte makes it", by_bits
    log_probs = {
        key: value["log_prob"] for key, value in total.get("values", {}).items() if value["log_prob"] is not None
    }
    if total.get("tokens") and estimator in log_probs:
        by_nats = perplexity(-log_probs[estimator] / total["tokens"])
        implied["token_perplexity"] = "its log_prob and tokens make it", by_nats
    for metric, (what, value) in implied.items():
        if metric in metrics and not math.isclose(metrics[metric], value, rel_tol=SAME):
            raise DuelError(
                f"{file} contradicts itself: {metric} of {name} is {metrics[metric]:.10g}, but {what} {value:.10g}. "
                "Run the task again, or leave the file out."
            )
    impossible = [(key, value) for key, value in metrics.items() if value < 0 or (not value and "bits" not in key)]
    impossible += [(f"log_prob of {key}", nats) for key, nats in log_probs.items() if nats > 0]
    for what, value in impossible:
        raise DuelError(
            f"{file}: {what} of {name} is {value:g}, and a probability is at most 1. Run the task again, or leave the "
            "file out."
        )
