"""The sample of blocks that a two-phase estimate also scores without the cache, and its weights.

    estimate = sum over blocks of g_b + sum over sampled blocks of w_b (f_b - g_b)
    variance = sum over sampled blocks of w_b (w_b - 1) (f_b - g_b)^2

f_b and g_b are the log-probs of a block without and with the cache.

With a share s, block b of a window is sampled if u_b < s, and w_b = 1 / s. The uniform number u_b depends on the seed,
the window's ids and b alone, so the sample is the same for every batch size, order, number of ranks and resumed run.
Blocks are drawn independently and with the same probability (Poisson sampling; Horvitz and Thompson 1952). Let I_b be 1
if block b is sampled, else 0. E[I_b w_b] = 1, so the estimate is unbiased. Var(I_b w_b) = 1 / s - 1 =
E[I_b w_b (w_b - 1)], and variances of independent blocks add up, so the variance of the estimate is
sum (1 / s - 1) (f_b - g_b)^2, and the second line is unbiased for it. Both hold for every window, and so for every
document and corpus.

A sample of fixed size, or strata that span windows, would need the other windows, and a window often has fewer blocks
than 1 / s. The price is that the variance has the mean square of the differences, not their variance.

Shapes: N windows, B blocks of a window.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lm_eval_duel.core.hashing import uniform

BLOCK = 3  # key of the random numbers, different for each estimator


def weights(keys: Sequence[int], blocks: Sequence[int], share: float, seed: int) -> torch.Tensor:
    """The weight of each block, (N, B) float64, for windows with these keys and numbers of blocks.

    0: not sampled, or no block.
    """
    block = torch.arange(max(blocks))  # (B,)
    u = uniform(torch.tensor(keys)[:, None], seed, BLOCK, block)  # (N, B)
    drawn = (u < share) & (block < torch.tensor(blocks)[:, None])  # (N, B)
    return drawn.double() / share


def combine(g: torch.Tensor, f: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The estimate of the sum of f over blocks, and of its variance: (..., B) each -> (...).

    `f` is read where `weight` is not 0.
    """
    difference = torch.where(weight > 0, f - g, 0.0)  # (..., B)
    return g.sum(-1) + (weight * difference).sum(-1), (weight * (weight - 1) * difference**2).sum(-1)
