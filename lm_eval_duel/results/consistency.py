"""One check that the numbers of a results file agree with each other, where two of its entries say the same thing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from lm_eval_duel.errors import DuelError
from lm_eval_duel.rates import perplexity

SAME = 1e-6  # relative difference up to which two values are one


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
    for key, scored in total.get("values", {}).items():
        if (scored["log_prob"] or 0.0) > 0:
            raise DuelError(
                f"{file}: the log_prob of {key} of {name} is {scored['log_prob']:g}, and that of a probability is at "
                "most 0. Run the task again, or leave the file out."
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
