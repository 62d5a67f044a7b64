"""Statistics of logits, in few passes over them: the two largest, sums without cancellation, entropies.

Shapes: U (u of them) distributions, V tokens, G runs of columns.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

CACHED_VALUES = 1 << 17  # logits at once: half of one CPU core's cache
# Columns of a run, of which `two_largest` takes the largest value first: on a CPU `amax` handles sixteen values at a
# time, and `argmax` one.
RUN = 64


class Top(NamedTuple):
    """The most probable token of each distribution, and how far the others are from it."""

    token: torch.Tensor  # (U,)
    logit: torch.Tensor  # (U,)
    confidence: torch.Tensor  # (U,) log P1 - log(1 - P1)
    log_margin: torch.Tensor  # (U,) log P1 - log P2


@torch.inference_mode()
def top_of(logits: torch.Tensor) -> Top:
    """The top tokens of logits (u, V), which are modified in place and restored."""
    token, first, second = two_largest(logits)  # (u, 1), (u,), (u,)
    # The other tokens are summed without the top one. 1 - P1 would have no digits left where P1 is near 1.
    logits.scatter_(1, token, -math.inf)
    log_sum = log_sum_above(logits, second)  # (u,)
    logits.scatter_(1, token, first[:, None])
    others = torch.where(second == -math.inf, second, second + log_sum)  # (u,) log sum exp
    return Top(token[:, 0], first, confidence=first - others, log_margin=first - second)


def log_sum_above(logits: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """log sum exp(logit - largest) over each row of logits (u, V), given the `largest` of each row (u,); (u,)."""
    if logits.device.type != "cpu":
        log_p = F.log_softmax(logits, 1)  # one fused kernel
        return -log_p.amax(1)  # the largest entry is minus the log of the sum
    # The largest is -inf if there is no other token, and -inf - -inf would be NaN.
    lowest = torch.finfo(logits.dtype).min
    largest = largest.clamp(min=lowest)[:, None]  # (u, 1)
    sums = logits.new_empty(len(logits))  # (u,)
    # parts that stay in a CPU's cache: several times faster than logsumexp
    rows = max(1, CACHED_VALUES // logits.shape[1])
    for start in range(0, len(logits), rows):
        part = slice(start, start + rows)
        powers = (logits[part] - largest[part]).exp_()
        torch.sum(powers, 1, out=sums[part])
    return sums.log_()


def two_largest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The column of the largest logit of each row, the first of equals (u, 1), and the two largest values (u,).

    Takes the largest value of each run of columns, then searches the best run only: one pass over the logits.
    """
    count, vocabulary = logits.shape
    width = logits.shape[1] // RUN * RUN  # columns in whole runs
    rest = torch.arange(width, vocabulary, device=logits.device).expand(count, -1)  # (u, V - width)
    if width:
        runs = logits[:, :width].unflatten(1, (-1, RUN)).amax(2)  # (u, G)
        best = runs.argmax(1, keepdim=True)  # (u, 1)
        in_best = best * RUN + torch.arange(RUN, device=logits.device)  # (u, RUN)
        columns = torch.cat([in_best, rest], 1)
        others = runs.scatter_(1, best, -math.inf)  # (u, G) the largest of the other runs
    else:
        columns = rest
        others = logits.new_full((count, 1), -math.inf)  # (u, 1)
    # the two largest are among these columns, but for the second, which may be the largest of another run
    values = logits.gather(1, columns)
    at = values.argmax(1, keepdim=True)  # (u, 1)
    token = columns.gather(1, at)  # (u, 1)
    first = values.gather(1, at)[:, 0]  # (u,)
    second = values.scatter(1, at, -math.inf).amax(1).maximum(others.amax(1))  # (u,)
    return token, first, second


def log_p1(confidence: torch.Tensor) -> torch.Tensor:
    """log P1 from the log-odds of P1, exact near probability 1, too."""
    return -F.softplus(-confidence)


def log_p_of(logits: torch.Tensor, top: Top) -> torch.Tensor:
    """Log-probabilities (u, V)."""
    return logits - top.logit[:, None] + log_p1(top.confidence[:, None])


def entropy_of(logits: torch.Tensor, top: Top) -> torch.Tensor:
    """The entropies in nats, (u,)."""
    log_p = log_p_of(logits, top)  # (u, V)
    return torch.where(log_p > -math.inf, -log_p * log_p.exp(), 0.0).sum(1)


# Statistics that take long, and are computed only if a rule asks for them.
ON_DEMAND = {"entropy": entropy_of, "log_p": log_p_of}
