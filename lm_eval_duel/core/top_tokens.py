"""The statistics of logits in few passes over them: the top tokens, what they leave to the others, entropies.

Shapes: u rows of logits, V tokens, G runs of columns.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

CACHED_VALUES = 1 << 17  # logits at once: half of one CPU core's cache
RUN = 64  # columns per run when looking for the largest: a CPU's argmax handles one value at a time, its amax sixteen


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
    logits.scatter_(1, token, -math.inf)
    if logits.device.type == "cpu":  # parts that stay in its cache: several times faster than logsumexp
        most = second.clamp(min=torch.finfo(logits.dtype).min)[:, None]  # (u, 1) -inf if there is no other token
        sums = logits.new_empty(len(logits))  # (u,)
        rows = max(1, CACHED_VALUES // logits.shape[1])
        for part, top, total in zip(logits.split(rows), most.split(rows), sums.split(rows), strict=True):
            torch.sum((part - top).exp_(), 1, out=total)
        log_sum = sums.log_()
    else:
        log_sum = -F.log_softmax(logits, 1).amax(1)  # one fused kernel; its largest entry is minus the log of the sum
    logits.scatter_(1, token, first[:, None])
    others = torch.where(second == -math.inf, second, second + log_sum)
    return Top(token[:, 0], first, first - others, first - second)


def two_largest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The column of the largest logit of each row, the first of equals (u, 1), and the two largest values (u,).

    Takes the largest value of each run of columns, then searches the best run only: one pass over the logits.
    """
    width = logits.shape[1] // RUN * RUN  # columns in whole runs
    rest = torch.arange(width, logits.shape[1], device=logits.device).expand(len(logits), -1)
    near, others = rest, logits.new_full((len(logits), 1), -math.inf)  # columns near the largest; other runs' largest
    if width:
        runs = logits[:, :width].unflatten(1, (-1, RUN)).amax(2)  # (u, G)
        best = runs.argmax(1, keepdim=True)  # (u, 1)
        near = torch.cat([best * RUN + torch.arange(RUN, device=logits.device), rest], 1)  # (u, RUN + ...)
        others = runs.scatter_(1, best, -math.inf)
    values = logits.gather(1, near)
    at = values.argmax(1, keepdim=True)  # (u, 1)
    token, first = near.gather(1, at), values.gather(1, at)[:, 0]
    second = values.scatter(1, at, -math.inf).amax(1).maximum(others.amax(1))
    return token, first, second


def entropy_of(logits: torch.Tensor, top: Top) -> torch.Tensor:
    """The entropies in nats, (u,)."""
    log_p = log_p_of(logits, top)  # (u, V)
    return torch.where(log_p > -math.inf, -log_p * log_p.exp(), 0.0).sum(1)


def log_p_of(logits: torch.Tensor, top: Top) -> torch.Tensor:
    """Log-probabilities (u, V), exact near probability 1 too: log P1 = -softplus(-confidence)."""
    return logits - top.logit[:, None] - F.softplus(-top.confidence[:, None])
