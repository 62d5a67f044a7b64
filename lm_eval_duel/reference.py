"""The specification: DUEL (Turok, De Sa and Kuleshov, 2026) as printed, for one row, one step at a time.

Every probability comes from a softmax over all tokens, and sums are float64. Nothing here is fast; the rest of the
package is, and the tests and `lm-eval-duel audit` check it against this page. Names are the paper's:

    x            a row of L tokens, none of which is the mask
    z            the same row, partially masked
    m            the mask
    M            the masked positions of the block in progress, ascending
    logits_of    the denoiser x_theta: z (L,) -> logits (L, V), with -inf in every column that is not a token
    log_P        log softmax(x_theta(z)), (L, V): the distribution of the token at each position
    F            the unmasking rule: F(log_P, M) -> I, the positions to unmask
    sigma        the ordered partition: the positions that each step unmasks

Where the noise is random tokens, a masked position shows one of them: `log_likelihood_given_noise`.

`blocks` lists the positions to score or to sample; a block is finished before the next one begins. Every other position
shows its token of x from the first step on. This is how a context or a suffix is given.

`relative_positions`: the denoiser knows positions only by their distances, as rotary networks do. In a row of nothing
but masks it then predicts the same distribution everywhere, and float noise alone would choose the first position; it
changes with the dtype and the length of the row. Here the positions tie exactly, so the lowest one comes first.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import softplus

Ids: TypeAlias = Sequence[int]
Blocks: TypeAlias = Sequence[Sequence[int]]
Network: TypeAlias = Callable[[Tensor], Tensor]
Rule: TypeAlias = Callable[[Tensor, list[int]], list[int]]
# a draw of the ELBO: for each block the positions that are masked, and t if each of them was masked with probability t
Draw: TypeAlias = Sequence[tuple[Sequence[int], float | None]]
States: TypeAlias = Callable[[frozenset[int]], Tensor]  # the masked positions of a block -> log_P


class Path(NamedTuple):
    """The path on which F reveals x. There is one only, since F is deterministic."""

    ll: float  # log p(x) under (x_theta, F), in nats
    sigma: list[list[int]]
    log_p: dict[int, float]  # log P_ell[x_ell] at the step that unmasked ell


def log_likelihood(
    x: Ids, blocks: Blocks, logits_of: Network, F: Rule, m: int, relative_positions: bool = False
) -> Path:
    """Algorithm 2: exact likelihood."""
    z = masked(x, blocks, m)
    ll = 0.0
    sigma = []
    log_p = {}
    for block in blocks:
        while M := [ell for ell in block if z[ell] == m]:
            log_P = log_softmax(logits_of(torch.tensor(z)))  # token probabilities
            if relative_positions and {*z} == {m}:  # nothing is visible: an exact tie
                log_P = log_P[M[0]].expand_as(log_P)
            I = F(log_P, M)  # positions to unmask
            for ell in I:
                log_p[ell] = log_P[ell, x[ell]].item()
                ll += log_p[ell]  # accumulate
                z[ell] = x[ell]  # reveal token
            sigma.append(I)
    return Path(ll, sigma, log_p)


def sample(
    x: Ids,
    blocks: Blocks,
    logits_of: Network,
    F: Rule,
    m: int,
    generator: torch.Generator,
    relative_positions: bool = False,
) -> list[int]:
    """Algorithm 1: sampling. Returns x with new tokens in its blocks."""
    z = masked(x, blocks, m)
    for block in blocks:
        while M := [ell for ell in block if z[ell] == m]:
            log_P = log_softmax(logits_of(torch.tensor(z)))  # token probabilities
            if relative_positions and {*z} == {m}:  # nothing is visible: an exact tie
                log_P = log_P[M[0]].expand_as(log_P)
            I = F(log_P, M)  # positions to unmask
            for ell in I:
                x_ell = log_P[ell].exp().multinomial(1, generator=generator)  # sample token
                z[ell] = int(x_ell)  # reveal token
    return z


def log_likelihood_given_noise(
    x: Ids,
    blocks: Blocks,
    logits_of: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    F: Rule,
    m: int,
    noise: Callable[[Tensor, int, int], Tensor],
    relative_positions: bool = False,
) -> Path:
    """Algorithm 2 where the noise is random tokens: exact likelihood of a commit-once sampler, given its noise.

    Where z has m, the denoiser sees a token of `noise(z, start, step)` (L,), which is not read at other positions. The
    noise may depend on the block's first position `start`, on the step and on which positions are masked, but not on
    the tokens of x. A token that is revealed stays, so x has one path.

    `logits_of(z, y, previous)`: the denoiser on y, the row with its noise. `previous`: its own logits at the step
    before, None at the first step of a block. F may pick nothing, since the next step shows other noise.
    """
    z = torch.tensor(masked(x, blocks, m))
    ll = 0.0
    sigma = []
    log_p = {}
    for block in blocks:
        logits = None
        step = 0
        while M := [ell for ell in block if z[ell] == m]:
            y = torch.where(z == m, noise(z, block[0], step), z)  # the row that the denoiser sees
            logits = logits_of(z, y, logits)
            log_P = log_softmax(logits)  # token probabilities
            if relative_positions and len({*y.tolist()}) == 1:  # the same token everywhere: an exact tie
                log_P = log_P[M[0]].expand_as(log_P)
            I = F(log_P, M)  # positions to unmask
            for ell in I:
                log_p[ell] = log_P[ell, x[ell]].item()
                ll += log_p[ell]  # accumulate
                z[ell] = x[ell]  # reveal token
            sigma.append(I)
            step += 1
    return Path(ll, sigma, log_p)


def sum_over_strings(tokens: Ids, x: Ids, blocks: Blocks, logits_of: Network, F: Rule, m: int) -> float:
    """The sum of p over all strings of `tokens` in the blocks of x: 1, since p is a distribution."""
    positions = [ell for block in blocks for ell in block]

    def p(string: Ids) -> float:
        token_at = dict(zip(positions, string, strict=True))
        row = [token_at.get(ell, token) for ell, token in enumerate(x)]
        return math.exp(log_likelihood(row, blocks, logits_of, F, m).ll)

    return math.fsum(p(string) for string in itertools.product(tokens, repeat=len(positions)))


def masked(x: Ids, blocks: Blocks, m: int) -> list[int]:
    """The row at the start: the mask in every block, x elsewhere."""
    positions = {ell for block in blocks for ell in block}
    return [m if ell in positions else token for ell, token in enumerate(x)]


def cut(positions: Ids, size: int | None, origin: int = 0) -> list[list[int]]:
    """Ascending positions, cut into blocks of L' = `size` that are counted from `origin`. None: one block."""
    if size is None:
        return [list(positions)] if positions else []
    blocks = itertools.groupby(positions, lambda ell: (ell - origin) // size)
    return [list(block) for _, block in blocks]


# ---------------------------------------------------------------- bounds, random orders, estimates


def elbo(x: Ids, blocks: Blocks, logits_of: Network, m: int, draws: Sequence[Draw]) -> list[float]:
    """The Monte Carlo ELBO of log p(x): one value per draw. Their mean is the estimate.

    A draw masks n random positions of each block (n uniform on 1..L') and weights their log-probabilities by L' / n. Or
    it masks each position with probability t (uniform on 0..1) and weights by 1 / t. Earlier blocks are revealed.
    """
    every_block = list(states(x, blocks, logits_of, m))
    values = []
    for draw in draws:
        value = 0.0
        for (M, t), (block, log_P_at) in zip(draw, every_block, strict=True):
            if not M:  # where each position is masked with probability t, there may be none
                continue
            weight = len(block) / len(M) if t is None else 1 / t
            log_P = log_P_at(frozenset(M))
            value += weight * math.fsum(log_P[ell, x[ell]].item() for ell in M)
        values.append(value)
    return values


def random_draw(blocks: Blocks, generator: torch.Generator) -> Draw:
    """A draw of the ELBO: n random positions of each block, n uniform on 1..L'."""
    draw = []
    for block in blocks:
        n = int(torch.randint(1, len(block) + 1, (), generator=generator))
        chosen = torch.randperm(len(block), generator=generator)[:n]
        draw.append(([block[i] for i in chosen], None))
    return draw


def mean_and_error(values: Sequence[float], S: int) -> tuple[float, float]:
    """The mean of the draws and its standard error, from S independent parts of equal size: draw i is in part i mod S.

    Draws of the same part may depend on each other (they are stratified), so only the means of parts are compared.
    """
    parts = torch.tensor(values, dtype=torch.float64).view(-1, S).mean(0)
    return float(parts.mean()), float(parts.std()) / math.sqrt(S)


def over_orders(
    x: Ids,
    blocks: Blocks,
    logits_of: Network,
    m: int,
    combine: Callable[[list[float]], float],
    relative_positions: bool = False,
) -> float:
    """All orders that unmask one position at a time, combined into one value per block and summed over blocks.

    `combine` makes the value of a state from the values of its next steps: `fmean` gives the ELBO, `log_mean_exp` the
    log-likelihood of a uniformly random order, and `max` the best order, which is not a likelihood: it sees x.
    """

    def value_of(block: Sequence[int], log_P_at: States) -> float:
        @functools.cache
        def value(M: frozenset[int]) -> float:
            if not M:
                return 0.0
            log_P = log_P_at(M)
            next_steps = [log_P[ell, x[ell]].item() + value(M - {ell}) for ell in sorted(M)]
            return combine(next_steps)

        return value(frozenset(block))

    every_block = states(x, blocks, logits_of, m, relative_positions)
    return math.fsum(value_of(block, log_P_at) for block, log_P_at in every_block)


def two_phase(g: Sequence[float], f: dict[int, float], share: float) -> tuple[float, float]:
    """An estimate of the sum of f over all blocks, and its standard error, from a cheap approximation g of f.

    g is known for every block, f for some, each drawn with probability `share` (Horvitz and Thompson 1952).
    """
    corrections = [(f[b] - g[b]) / share for b in f]
    variance = math.fsum((1 - share) * correction**2 for correction in corrections)
    return math.fsum(g) + math.fsum(corrections), math.sqrt(variance)


def states(
    x: Ids, blocks: Blocks, logits_of: Network, m: int, relative_positions: bool = False
) -> Iterator[tuple[Sequence[int], States]]:
    """Each block, with a function from M, those of its positions that are masked, to log_P in that state.

    Earlier blocks are revealed, later ones masked.
    """

    def log_P_at(n: int, M: frozenset[int]) -> Tensor:
        z = masked(x, [sorted(M), *blocks[n + 1 :]], m)
        log_P = log_softmax(logits_of(torch.tensor(z)))
        if relative_positions and {*z} == {m}:  # nothing is visible: an exact tie
            log_P = log_P[min(M)].expand_as(log_P)
        return log_P

    for n, block in enumerate(blocks):
        yield block, functools.partial(log_P_at, n)


def log_mean_exp(values: list[float]) -> float:
    """log mean exp, the log of the mean of probabilities that are given as logs."""
    return float(torch.tensor(values, dtype=torch.float64).logsumexp(0)) - math.log(len(values))


# ---------------------------------------------------------------- unmasking rules; ties go to the lowest position


def left_to_right(k: int = 1) -> Rule:
    """The first k masked positions."""
    return lambda log_P, M: M[:k]


def greedy(k: int = 1) -> Rule:
    """The k positions with the largest P1, the probability of the top token."""
    return lambda log_P, M: best(k, M, confidence(log_P[M]))


def margin(k: int = 1) -> Rule:
    """The k positions with the largest P1 - P2, the margin between the two most probable tokens."""
    return lambda log_P, M: best(k, M, margin_log_odds(log_P[M]))


def entropy(k: int = 1) -> Rule:
    """The k positions with the smallest entropy."""
    return lambda log_P, M: best(k, M, -entropy_nats(log_P[M]))


def threshold(mu: float) -> Rule:
    """All positions with P1 >= mu; if there are none, the one with the largest P1."""

    def F(log_P: Tensor, M: list[int]) -> list[int]:
        score = confidence(log_P[M])
        return where(score >= log_odds(mu), M) or best(1, M, score)

    return F


def klass(mu: float, nu: float) -> Rule:
    """All positions with P1 >= mu and KL(P before || P) <= nu; if there are none, the one with the largest P1.

    P before: the distribution at the previous step of the block. At a block's first step there is none, so no position
    is stable. The rule remembers the steps of a block; being asked twice at the same step counts as one step.
    """
    steps: list[tuple[list[int], Tensor]] = []  # M and log_P of each step of this block

    def F(log_P: Tensor, M: list[int]) -> list[int]:
        if steps and not {*M} <= {*steps[-1][0]}:  # inside a block M only shrinks, so this is another block
            steps.clear()
        if not steps or steps[-1][0] != M:
            steps.append((M, log_P))
        score = confidence(log_P[M])
        if len(steps) == 1:
            return best(1, M, score)
        _, before = steps[-2]
        divergence = torch.tensor([kl(before[ell].exp(), log_P[ell].exp()) for ell in M])
        sure_and_stable = (score >= log_odds(mu)) & (divergence <= nu)
        return where(sure_and_stable, M) or best(1, M, score)

    return F


def best(k: int, M: list[int], score: Tensor) -> list[int]:
    """The k positions of M with the largest score (|M|,)."""
    return [M[i] for i in score.argsort(descending=True, stable=True)[:k]]


def where(chosen: Tensor, M: list[int]) -> list[int]:
    """The positions of M at which `chosen` (|M|,) is true."""
    return [ell for ell, yes in zip(M, chosen.tolist(), strict=True) if yes]


# ---------------------------------------------------------------- scores, as log-odds: probabilities near 1 round to 1


def log_odds(probability: float) -> Tensor:
    """log p - log(1 - p), in float64."""
    return torch.tensor(probability, dtype=torch.float64).logit()


def log_softmax(logits: Tensor) -> Tensor:
    """log P in float64."""
    return logits.double().log_softmax(-1)


def confidence(log_P: Tensor) -> Tensor:
    """P1 as log-odds, log P1 - log(1 - P1)."""
    return log_P.amax(-1) - others(log_P)


def margin_log_odds(log_P: Tensor) -> Tensor:
    """P1 - P2 as log-odds, log(P1 - P2) - log((1 - P1) + P2)."""
    first, second = log_P.topk(2).values.unbind(-1)
    return first + torch.log(-torch.expm1(second - first)) - torch.logaddexp(others(log_P), second)


def others(log_P: Tensor) -> Tensor:
    """log(1 - P1), summed over all tokens but the top one."""
    top = log_P.argmax(-1, keepdim=True)
    return log_P.scatter(-1, top, -math.inf).logsumexp(-1)


def entropy_nats(log_P: Tensor) -> Tensor:
    """The entropy as -log P1 + sum_v P_v log(P1 / P_v), where no summand is negative, so nothing cancels."""
    minus_log_p1 = softplus(-confidence(log_P))
    log_ratio = log_P.amax(-1, keepdim=True) - log_P
    summands = (log_P.exp() * log_ratio).nan_to_num(nan=0.0)  # 0 times infinity where P_v = 0
    return minus_log_p1 + summands.sum(-1)


# ---------------------------------------------------------------- noise that is not masks

Noise: TypeAlias = tuple[Tensor, Tensor]  # a_t and b_t (V,): q(x_t | x_0) = a_t 1[x_t = x_0] + b_t(x_t)
NoisyDraw: TypeAlias = tuple[Tensor, Tensor, float, Ids]  # times s <= t, a weight, and x with the noise of time t


def noised_elbo(
    x: Ids,
    positions: Ids,
    logits_of: Callable[[Tensor, float], Tensor],
    level: Callable[[Tensor], Noise],
    draws: Sequence[NoisyDraw],
    denoiser: bool,
) -> list[float]:
    """The Monte Carlo bound of log p(x): one value per draw. Their mean is the estimate.

    With T steps a draw has s = (i - 1) / T, t = i / T for a random i, and the weight 1 / (probability of i). With
    infinitely many it has s = t and the weight 1 / (density of t). The term of the prior is 0, since a(1) = 0.

    `logits_of(z, t)`: the network on x with noise at `positions`. `denoiser`: True if its softmax is p(x_0 | x_t),
    given the position's own x_t as well; False if it takes the place of x_0 in the posterior.
    """
    values = []
    for s, t, weight, z in draws:
        P = log_softmax(logits_of(torch.tensor(z), float(t))).exp()
        # a_t and b_t, and their derivatives with respect to t
        now, slope = torch.func.jvp(level, (t,), (torch.ones_like(t),))  # type: ignore[misc]
        terms = []
        for ell in positions:
            r = plug_in(P[ell], z[ell], now) if denoiser else P[ell]
            if s < t:
                terms.append(noised_term(x[ell], z[ell], r, now, level(s)))
            else:
                terms.append(noised_rate(x[ell], z[ell], r, now, slope))
        values.append(-weight * math.fsum(terms))
    return values


def noised_term(clean: int, noisy: int, r: Tensor, t: Noise, s: Noise) -> float:
    """KL(q(x_s | x_t = noisy, x_0 = clean) || k(x_s | x_t = noisy)) at one position; with s = 0, -log k(clean)."""
    of_token = posterior(one_hot(clean, r), noisy, s, t)
    of_model = posterior(r, noisy, s, t)
    return kl(of_token, of_model)


def noised_rate(clean: int, noisy: int, r: Tensor, t: Noise, slope: Noise) -> float:
    """The limit of `noised_term` / (t - s) as s approaches t; `slope`: the derivatives of a_t and b_t."""
    a, b = t
    da, db = slope
    q = a * one_hot(clean, r) + b  # q(x_t | x_0) of the token, (V,)
    k = a * r + b  # the same with r in place of x_0, (V,)
    y = q[noisy] / k[noisy]
    rate = (db - da / a * b)[noisy] / q[noisy]  # the rate at which the noise makes x_t, given x_0
    return float(rate * (kl(q, k) + y - 1 - y.log()))


def posterior(x_0: Tensor, noisy: int, s: Noise, t: Noise) -> Tensor:
    """q(x_s | x_t = noisy, x_0) by Bayes' rule; x_0 (V,) is a distribution in place of a token."""
    a_s, b_s = s  # noise at times s < t
    a_t, b_t = t
    step = a_t / a_s * (one_hot(noisy, x_0) - b_s[noisy]) + b_t[noisy]  # q(x_t = noisy | x_s), (V,)
    return step * (a_s * x_0 + b_s) / (a_t * x_0[noisy] + b_t[noisy])


def plug_in(P: Tensor, noisy: int, t: Noise) -> Tensor:
    """r ~ P / q(x_t = noisy | x_0): `posterior` of r is the mean over P(x_0) of the posterior of x_0."""
    a, b = t
    r = torch.where(P > 0, P / (a * one_hot(noisy, P) + b[noisy]), 0.0)
    return r / r.sum()


def kl(q: Tensor, k: Tensor) -> float:
    """KL(q || k)."""
    return float(torch.where(q > 0, q * (q / k).log(), 0.0).sum())


def one_hot(token: int, like: Tensor) -> Tensor:
    """1 at the token, 0 elsewhere, (V,)."""
    return (torch.arange(len(like), device=like.device) == token).double()
