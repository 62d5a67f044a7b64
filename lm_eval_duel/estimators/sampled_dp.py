"""The probability of a block's tokens when positions are selected after sampling, by dynamic programming over sets.

While the positions H are masked, position j draws token v with probability q_j(v), and the draws with the largest
scores s_j(v) are kept. With c_i = s_i(x_i) for the text x, the positions A of H are kept with their tokens x, and no
others, with probability

    n       |A| = min(n, |H|), a the member of A that ranks last (smallest c; of equals, the rightmost):
            P(A) = prod over i in A of q_i(x_i)  x  prod over j in H - A of q_j{v ranks after x_a}
    tau     all c_i > tau and |A| >= min(n, |H|):
            P(A) = prod over i in A of q_i(x_i)  x  prod over j in H - A of q_j{s_j(v) <= tau}
            fewer above tau: as n

and log p(x) = V(all positions), V(H) = log sum over A of P(A) exp(V(H - A)), V(empty set) = 0. The draws at the
positions of H - A are thrown away, so their probabilities are summed. n may depend on |H|.

Shapes: B blocks, m masked positions, S = 2^m states, x sets of one size, h positions of a set, K = 2^h subsets of a
set.
"""

from __future__ import annotations

import dataclasses
import math
from functools import lru_cache

import torch

from lm_eval_duel.estimators.registry import LATTICE_BLOCK
from lm_eval_duel.estimators.step_counts import StepCounts, table
from lm_eval_duel.estimators.subset_dp import Chunk, sets


@dataclasses.dataclass
class DrawnChunk(Chunk):
    """The draws in all states of some blocks while they are entered."""

    log_probs: torch.Tensor  # (B, S, m) log q of each position's target
    score: torch.Tensor  # (B, S, m) of each position's target
    log_after: torch.Tensor  # (B, S, m, m) as in `drawn_confidence.Draws`
    log_quiet: torch.Tensor  # (B, S, m)
    after: torch.Tensor  # (B, S) the state that follows if every draw is the most probable token
    missed: torch.Tensor  # (B, S) bool: that step reveals a token which is not the target


def fold(chunk: DrawnChunk, full: torch.Tensor, counts: StepCounts, tau: float | None, strict: bool) -> torch.Tensor:
    """log p of each block's targets (B,); `full` (B,): the state in which all positions of a block are masked.

    `counts`: n of each step. `tau`: the score that a kept draw exceeds (`strict`) or reaches; None: n draws are kept.
    """
    blocks, _, m = chunk.log_probs.shape
    value = torch.full_like(chunk.log_probs[:, :, 0], -math.inf)  # (B, S)
    value[:, 0] = 0
    kept_of = table(counts, full.device)[
        chunk.lanes.masked.sum(1)
    ]  # (B, M + 1) 0: no step begins with so many positions
    for size in kept_of.sum(0).nonzero()[:, 0].tolist():
        kept = kept_of[:, size, None, None]  # (B, 1, 1)
        state, position, _ = (indices.to(value.device) for indices in sets(m, size))  # (x,), (x, h)
        rest, count = (indices.to(value.device) for indices in subsets(m, size))  # (x, K), (K,)
        log_p, score, log_quiet = (
            plane[:, state[:, None], position] for plane in (chunk.log_probs, chunk.score, chunk.log_quiet)
        )  # (B, x, h) each
        log_after = chunk.log_after[:, state[:, None, None], position[:, :, None], position[:, None, :]]  # (B, x, h, h)
        above = torch.zeros_like(score, dtype=torch.bool)
        total = torch.full((blocks, *rest.shape), -math.inf, dtype=value.dtype, device=value.device)  # (B, x, K)
        if tau is not None:
            above = score > tau if strict else score >= tau  # (B, x, h)
            weight = product(log_p.where(above, -math.inf), log_quiet)  # (B, x, K)
            total = weight.where(count >= kept, -math.inf)
        for last in range(size):
            earlier = score > score[:, :, last, None]  # (B, x, h) ranks before `last`
            earlier[:, :, :last] |= score[:, :, :last] == score[:, :, last, None]
            earlier[:, :, last] = True
            log_out = log_after[:, :, :, last].clone()  # (B, x, h)
            log_out[:, :, last] = -math.inf
            weight = product(log_p.where(earlier, -math.inf), log_out)  # (B, x, K)
            possible = (count == kept) & ~above[:, :, last, None]  # (B, x, K)
            total = total.maximum(weight.where(possible, -math.inf))  # the others are -inf: a set has one last member
        value[:, state] = (total + value[:, rest]).logsumexp(2).where(kept[:, 0] > 0, -math.inf)
    return value[torch.arange(blocks, device=value.device), full]


def product(log_in: torch.Tensor, log_out: torch.Tensor) -> torch.Tensor:
    """The sum over positions of `log_in` for members of a subset and `log_out` for others, for every subset.

    (B, x, h) each -> (B, x, K), in the order of `subsets`.
    """
    total = log_in.new_zeros(*log_in.shape[:2], 1)
    for position in range(log_in.shape[2]):
        total = torch.cat([total + log_out[:, :, position, None], total + log_in[:, :, position, None]], 2)
    return total


@lru_cache(maxsize=LATTICE_BLOCK * LATTICE_BLOCK)
def subsets(m: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """For each set of `size` of m positions: the states without each of its subsets (x, K), and their sizes (K,)."""
    state, positions, _ = sets(m, size)
    rest, count = state[:, None], torch.zeros(1, dtype=torch.int64)
    for position in positions.unbind(1):
        rest = torch.cat([rest, rest - (1 << position)[:, None]], 1)
        count = torch.cat([count, count + 1])
    return rest, count


def decodes_to_targets(chunk: DrawnChunk, full: torch.Tensor) -> torch.Tensor:
    """Whether each block's targets are what argmax decoding writes, (B,) bool."""
    block, state = torch.arange(len(full), device=full.device), full
    greedy = torch.ones_like(full, dtype=torch.bool)
    while (state > 0).any():
        greedy &= ~(chunk.missed[block, state] & (state > 0))
        state = chunk.after[block, state] * (state > 0)
    return greedy
