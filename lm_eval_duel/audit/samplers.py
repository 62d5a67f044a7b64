"""Samplers that draw which positions to unmask, in the form of `reference.py`: the sum over all their ways to a text.

    log p(x) = sum over blocks of log f(block, 0),   f({}, t) = 1
    f(M, t)  = sum over A of P(A, x_A | M, t) f(M - A, t + 1)

with M the masked positions, and P(A, x_A | M, t) the probability that step t unmasks just A, with the tokens of x.
Every subset A of M is listed, so blocks must be small. The samplers are those of LLaDA, Dream, SDAR and Fast-dLLM,
whose code draws tokens or positions where the paper's rules decide.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from lm_eval_duel.reference import Blocks, Ids, Network, States, confidence, entropy_nats, log_softmax, states

Chosen: TypeAlias = Iterator[tuple[Sequence[int], float]]  # A, log P(A, x_A | M, t)
Count: TypeAlias = Callable[[int, int, int], int]  # of the size of the block, |M| and t
Select: TypeAlias = Callable[[Tensor, list[int], int, int], Chosen]  # of log_P, M, t and the size of the block


def over_selections(
    x: Ids,
    blocks: Blocks,
    logits_of: Network,
    m: int,
    select: Select,
    relative_positions: bool = False,
) -> float:
    """log p(x) of a sampler whose steps are `select`."""

    def of_block(block: Sequence[int], log_P: States) -> float:
        @functools.cache
        def f(M: frozenset[int], t: int) -> float:
            if not M:
                return 0.0
            ways = []
            for A, log_p in select(log_P(M), sorted(M), t, len(block)):
                ways.append(log_p + f(M - {*A}, t + 1))
            return log_sum_exp(ways)

        return f(frozenset(block), 0)

    every_block = states(x, blocks, logits_of, m, relative_positions)
    return math.fsum(of_block(block, log_P) for block, log_P in every_block)


def log_sum_exp(values: list[float]) -> float:
    """The log of the sum of exp; -infinity if there are no values."""
    if not values:
        return -math.inf
    return float(torch.tensor(values, dtype=torch.float64).logsumexp(0))


def subsets(M: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All subsets of M."""
    for n in range(len(M) + 1):
        yield from itertools.combinations(M, n)


# ---------------------------------------------------------------- positions are drawn, then their tokens


def drawn_positions(x: Ids, alg: str, S: int, alg_temp: float | None = None) -> Select:
    """Dream, and LLaDA's random remasking: S steps a block.

    With s from 1 to 0.001 in S steps, r_t = 1 - s_(t+1) / s_t, and 1 at the last step:

        origin                  each masked position with probability r_t
        random                  n of them, n = L' // S, and one more in the first L' mod S steps
        entropy, topk_margin    n = int(|M| r_t), one after the other, with weights exp(score / alg_temp);
                                the score is minus the entropy, or P1 - P2
    """
    count = scheduled("even" if alg == "random" else "dream", S)

    def select(log_P: Tensor, M: list[int], t: int, size: int) -> Chosen:
        r = float(share(t, S))
        n = count(size, len(M), t)
        score = position_scores(log_P[M], M, alg, alg_temp)
        for A in subsets(M):
            if alg == "origin":
                p = r ** len(A) * (1 - r) ** (len(M) - len(A))
            elif len(A) == n:
                p = math.fsum(without_replacement(order, M, score) for order in itertools.permutations(A))
            else:
                p = 0.0
            if p > 0:
                of_tokens = math.fsum(float(log_P[ell, x[ell]]) for ell in A)
                yield A, math.log(p) + of_tokens

    return select


def position_scores(log_P: Tensor, M: list[int], alg: str, alg_temp: float | None) -> dict[int, float]:
    """The log weight of each masked position, from its distribution log_P (|M|, V)."""
    if alg == "entropy":
        score = -entropy_nats(log_P)
    elif alg == "topk_margin":
        p1, p2 = log_P.exp().topk(2).values.unbind(-1)
        score = p1 - p2
    else:
        return dict.fromkeys(M, 0.0)
    score = score / (alg_temp or 1.0)
    return dict(zip(M, score.tolist(), strict=True))


def without_replacement(order: Sequence[int], M: Sequence[int], score: dict[int, float]) -> float:
    """The probability of drawing positions of M in this order, by weights exp(score)."""
    top = max(score.values())  # so that no weight overflows
    left = list(M)
    p = 1.0
    for ell in order:
        of_all = math.fsum(math.exp(score[other] - top) for other in left)
        p *= math.exp(score[ell] - top) / of_all
        left.remove(ell)
    return p


def share(t: int, S: int) -> Tensor:
    """r_t of Dream, in float32 as in their code: int(|M| r_t) depends on its last bit."""
    if t == S - 1:
        return torch.ones(())
    s = torch.linspace(1, 1e-3, S + 1)
    return 1 - s[t + 1] / s[t]


def at_most(n: int) -> Count:
    """n positions a step, or all that are left."""
    return lambda size, left, t: min(n, left)


def scheduled(schedule: str, S: int) -> Count:
    """The number of positions that step t of S reveals: "even" (LLaDA) or "dream"."""
    if schedule == "even":
        return lambda size, left, t: size // S + (t < size % S)
    return lambda size, left, t: int(left * share(t, S))


# ---------------------------------------------------------------- tokens are drawn, then positions chosen by them


def best_drawn(
    x: Ids,
    count: Count,
    tau: float | None = None,
    strict: bool = True,
    scale: float = 1.0,
) -> Select:
    """LLaDA, SDAR, Fast-dLLM: every masked position draws a token, and the most confident draws are kept.

    `count`: how many, or at least how many. `tau`: all whose confidence exceeds it (not `strict`: or reaches it).
    `scale`: the confidence is taken from softmax(scale log_P). Of equal draws the left one is more confident.
    """
    bound = math.inf if tau is None else logit(tau)

    def passes(odds: Tensor) -> Tensor:
        return odds > bound if strict else odds >= bound

    def select(log_P: Tensor, M: list[int], t: int, size: int) -> Chosen:
        n = count(size, len(M), t)
        if not n:  # this step of the schedule keeps no draw
            yield (), 0.0
            return
        odds = {}  # of every token that a position may draw
        drawn = {}  # of the token of x
        for ell in M:
            odds[ell] = token_confidence(scaled(log_P[ell], scale))
            drawn[ell] = odds[ell][x[ell]]
        for A in subsets(M):
            by_bound = tau is not None and all(bool(passes(drawn[ell])) for ell in A)
            # By the bound, all draws of A pass and no other one does, if that makes n or more.
            # Else fewer than n pass, and the n best are kept: A, if no other draw comes before its last one.
            if len(A) < n or (len(A) > n and not by_bound):
                continue
            last = min(A, key=lambda ell: (float(drawn[ell]), -ell))
            log_p = math.fsum(float(log_P[ell, x[ell]]) for ell in A)
            for ell in {*M} - {*A}:  # its draw is thrown away: the sum over all that are not kept
                if by_bound:
                    kept = passes(odds[ell])
                elif ell < last:
                    kept = odds[ell] >= drawn[last]
                else:
                    kept = odds[ell] > drawn[last]
                thrown_away = log_P[ell].masked_fill(kept, -math.inf)
                log_p += float(thrown_away.logsumexp(0))
            yield A, log_p

    return select


def scaled(log_P: Tensor, scale: float) -> Tensor:
    """log softmax(scale log_P), (V,), also of tokens without probability."""
    return log_softmax(scale * log_P.nan_to_num(neginf=-1e30))


def token_confidence(log_P: Tensor) -> Tensor:
    """log p - log(1 - p) of every token (V,)."""
    odds = log_P - torch.log1p(-log_P.exp())
    odds[log_P.argmax()] = confidence(log_P)  # without cancellation
    return odds


def logit(p: float) -> float:
    """log p - log(1 - p); infinite where p is no probability between 0 and 1."""
    if p <= 0:
        return -math.inf
    if p >= 1:
        return math.inf
    return math.log(p) - math.log1p(-p)
