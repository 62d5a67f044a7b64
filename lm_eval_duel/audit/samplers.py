"""Samplers that draw which positions to unmask, in the form of `reference.py`: the sum over all their ways to a text.

    log p(x) = sum over blocks of log f(block, 0),   f({}, t) = 1
    f(M, t)  = sum over A of P(A, x_A | M, t) f(M - A, t + 1)

with M the masked positions, and P(A, x_A | M, t) the probability that step t unmasks just A, with the tokens of x.
Every subset A of M is listed, so blocks must be small.
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
    x: Ids, blocks: Blocks, logits_of: Network, m: int, select: Select, relative_positions: bool = False
) -> float:
    """log p(x) of a sampler whose steps are `select`."""

    def over(block: Sequence[int], log_P: States) -> float:
        @functools.cache
        def f(M: frozenset[int], t: int) -> float:
            if not M:
                return 0.0
            ways = [log_p + f(M - {*A}, t + 1) for A, log_p in select(log_P(M), sorted(M), t, len(block))]
            return float(torch.tensor(ways, dtype=torch.float64).logsumexp(0)) if ways else -math.inf

        return f(frozenset(block), 0)

    return math.fsum(over(*each) for each in states(x, blocks, logits_of, m, relative_positions))


def drawn_positions(x: Ids, alg: str, S: int, alg_temp: float | None = None) -> Select:
    """Dream, and LLaDA's random remasking: S steps a block; positions are drawn, then their tokens.

    With s from 1 to 0.001 in S steps, r_t = 1 - s_(t+1) / s_t, and 1 at the last step:

        origin                  each masked position with probability r_t
        random                  n of them, n = L' // S, and one more in the first L' mod S steps
        entropy, topk_margin    n = int(|M| r_t), one after the other, with weights exp(score / alg_temp);
                                the score is minus the entropy, or P1 - P2
    """
    count = scheduled("even" if alg == "random" else "dream", S)

    def select(log_P: Tensor, M: list[int], t: int, size: int) -> Chosen:
        r, n = float(share(t, S)), count(size, len(M), t)
        score = dict.fromkeys(M, 0.0)
        if alg in ("entropy", "topk_margin"):
            p1, p2 = log_P[M].exp().topk(2).values.unbind(-1)
            of = -entropy_nats(log_P[M]) if alg == "entropy" else p1 - p2
            score = dict(zip(M, (of / (alg_temp or 1.0)).tolist(), strict=True))
        for A in subsets(M):
            p = r ** len(A) * (1 - r) ** (len(M) - len(A))
            if alg != "origin":
                p = math.fsum(in_turn(order, M, score) for order in itertools.permutations(A)) if len(A) == n else 0.0
            if p > 0:
                yield A, math.log(p) + math.fsum(float(log_P[ell, x[ell]]) for ell in A)

    return select


def share(t: int, S: int) -> Tensor:
    """r_t of Dream, in float32 as in their code."""
    s = torch.linspace(1, 1e-3, S + 1)
    return 1 - s[t + 1] / s[t] if t < S - 1 else torch.ones(())


def scheduled(schedule: str, S: int) -> Count:
    """The number of positions that step t of S reveals: "even" (LLaDA) or "dream"."""
    if schedule == "even":
        return lambda size, left, t: size // S + (t < size % S)
    return lambda size, left, t: int(left * share(t, S))


def in_turn(order: Sequence[int], M: Sequence[int], score: dict[int, float]) -> float:
    """The probability of drawing positions of M in this order, without replacement, by weights exp(score)."""
    top, left, p = max(score.values()), list(M), 1.0
    for ell in order:
        p *= math.exp(score[ell] - top) / math.fsum(math.exp(score[other] - top) for other in left)
        left.remove(ell)
    return p


def best_drawn(x: Ids, count: Count, tau: float | None = None, strict: bool = True, scale: float = 1.0) -> Select:
    """LLaDA, SDAR, Fast-dLLM: every masked position draws a token, and the most confident draws are kept.

    `count`: how many, or at least how many. `tau`: all whose confidence exceeds it (not `strict`: or reaches it).
    `scale`: the confidence is taken from softmax(scale log_P). Of equal draws the left one is more confident.
    """

    def select(log_P: Tensor, M: list[int], t: int, size: int) -> Chosen:
        score = {ell: token_confidence(log_softmax(scale * log_P[ell].nan_to_num(neginf=-1e30))) for ell in M}
        drawn, n = {ell: float(score[ell][x[ell]]) for ell in M}, count(size, len(M), t)
        bound = math.inf if tau is None else -math.inf if tau <= 0 else logit(tau)
        for A in subsets(M):
            above = tau is not None and all(drawn[ell] > bound or (not strict and drawn[ell] == bound) for ell in A)
            if not n or not (len(A) >= n if above else len(A) == n):
                if not n and not A:
                    yield A, 0.0
                continue
            log_p, last = math.fsum(float(log_P[ell, x[ell]]) for ell in A), min(A, key=lambda ell: (drawn[ell], -ell))
            for ell in {*M} - {*A}:
                other = score[ell]
                if above:
                    kept = other > bound if strict else other >= bound
                else:
                    kept = other >= drawn[last] if ell < last else other > drawn[last]
                log_p += float(log_P[ell].masked_fill(kept, -math.inf).logsumexp(0))
            yield A, log_p

    return select


def token_confidence(log_P: Tensor) -> Tensor:
    """log p - log(1 - p) of every token (V,)."""
    odds = log_P - torch.log1p(-log_P.exp())
    odds[log_P.argmax()] = confidence(log_P)  # without cancellation
    return odds


def logit(p: float) -> float:
    """log p - log(1 - p)."""
    return math.inf if p >= 1 else math.log(p) - math.log1p(-p)


def subsets(M: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All subsets of M."""
    return itertools.chain.from_iterable(itertools.combinations(M, n) for n in range(len(M) + 1))
