"""Which blocks of a two-phase estimate are also scored without the cache, and what is made of their differences.

    estimate = sum over blocks of g_b + sum over sampled blocks of w_b (f_b - g_b)
    variance = sum over sampled blocks of w_b (w_b - 1) (f_b - g_b)^2

f_b and g_b are the log-probs of a block without and with the cache.

With a share s, block b of a window is sampled if u_b < s, and w_b = 1 / s. u_b is a uniform number that is a function
of (seed, the window's ids, b) alone: so the sample is the same for every batch size, order, number of ranks and resumed
run, and nobody needs to know how many blocks there are elsewhere. Blocks are drawn without replacement, independently,
and each with the same probability (Poisson sampling; Horvitz and Thompson 1952). Let I_b be 1 if block b is sampled,
else 0. E[I_b w_b] = 1, so the estimate is unbiased. Var(I_b w_b) = 1 / s - 1 = E[I_b w_b (w_b - 1)], and variances of
independent blocks add up, so that of the estimate is sum (1 / s - 1) (f_b - g_b)^2 and the second line is unbiased for
it. Both hold for every window, and therefore for every document and corpus.

A sample of a fixed size, or strata that span windows, would need the other windows, and inside a window there are often
fewer blocks than 1 / s. What this costs: the variance has the mean square of the differences, not their variance.

With a pilot of share p and a rate r, the blocks with u_b < p count once, as what they are (w_b = 1). Of the others,
those with u_b < p + r (1 - p) are sampled, and w_b = 1 / r. Given the pilot, r is a constant and the other u_b are
independent and uniform, so both lines are unbiased as above, although r was computed from the pilot's differences.

Shapes: N windows, B blocks of a window.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from lm_eval_duel.hashing import uniform

BLOCK = 3  # key of the random numbers, unlike those of the ELBO
LEAST = 16  # blocks that are drawn besides the pilot, at least and on average
AIM = 0.8  # of the variance that `precision` allows: the pilot's variance is uncertain


class Design(NamedTuple):
    """How the blocks of a window are sampled: the share that counts once, and the rate of the others."""

    pilot: float
    rate: float


def numbers(keys: Sequence[int], blocks: int, seed: int) -> torch.Tensor:
    """The uniform number u_b of each of so many blocks of windows with these keys, (N, B) float64."""
    return uniform(torch.tensor(keys)[:, None], seed, BLOCK, torch.arange(blocks))


def weights(keys: Sequence[int], blocks: Sequence[int], designs: Sequence[Design], seed: int) -> torch.Tensor:
    """The weight of each block, (N, B) float64, for windows with these keys, numbers of blocks, and designs.

    0: not sampled, or no block.
    """
    counts = torch.tensor(blocks)[:, None]  # (N, 1)
    pilot, rate = torch.tensor(designs, dtype=torch.float64)[:, :, None].unbind(1)  # (N, 1) each
    block = torch.arange(max(blocks))  # (B,)
    u = numbers(keys, len(block), seed)  # (N, B)
    drawn = u < pilot + rate * (1 - pilot)  # (N, B)
    weight = torch.where(u < pilot, 1.0, torch.where(drawn, 1 / rate, 0.0))  # (N, B)
    return torch.where(block < counts, weight, 0.0)


def combine(g: torch.Tensor, f: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The estimate of the sum of f over blocks, and of its variance: (..., B) each -> (...).

    `f` is read where `weight` is not 0.
    """
    difference = torch.where(weight > 0, f - g, 0.0)  # (..., B)
    return g.sum(-1) + (weight * difference).sum(-1), (weight * (weight - 1) * difference**2).sum(-1)


def rate_for(blocks: float, square: float, stderr: float) -> float:
    """The share of so many blocks, whose mean squared difference is about `square`, for this standard error in nats."""
    if blocks <= 0 or stderr <= 0:
        return 1.0
    variance = blocks * square
    rate = variance / (variance + AIM * stderr**2)
    return rounded(min(1.0, max(rate, LEAST / blocks)))


def rounded(share: float) -> float:
    """A share rounded up to three digits, so that float noise changes no sample."""
    digits = 10.0 ** (2 - math.floor(math.log10(share)))
    return min(1.0, math.ceil(share * digits - 1e-6) / digits)
