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
from statistics import fmean
from typing import TypeAlias, cast

import torch
from torch import Tensor

from lm_eval_duel import reference
from lm_eval_duel.audit.checked import Recomputed, distance
from lm_eval_duel.audit.networks import OneRow, one_row
from lm_eval_duel.audit.replay import Watched, rule_of
from lm_eval_duel.core.float_noise import nats_tolerance
from lm_eval_duel.core.scores import Score
from lm_eval_duel.core.windows import Window
from lm_eval_duel.estimators.base import Estimator
from lm_eval_duel.estimators.drawn import untempered
from lm_eval_duel.estimators.elbo import Elbo
from lm_eval_duel.estimators.lattice import Lattice
from lm_eval_duel.estimators.noised_elbo import NoisedElbo
from lm_eval_duel.estimators.registry import LATTICE
from lm_eval_duel.estimators.samplers import SampledConfidence, SampledOrder
from lm_eval_duel.estimators.totals import TwoPhaseBlocks
from lm_eval_duel.estimators.two_phase import TwoPhase
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


# ---------------------------------------------------------------- estimates
# Bounds, estimates and sums over orders by `reference.py`: the definition over one row at a time.
#
# elbo, noised_elbo                     `reference.elbo`, `.noised_elbo` on the run's own draws; their error recomputed
# elbo_exact, mixture, oracle           all orders of each block of at most `SMALL` positions
# sampled_confidence, sampled_order     all ways of such a sampler (py)
# two_phase                             g of every block and f of the drawn ones by Algorithm 2, weights recomputed


SMALL = 6  # positions of a block: 63 states, and 729 pairs of a state and a set that it may unmask
COMBINED = {"elbo_exact": fmean, "mixture": reference.log_mean_exp, "oracle": max}


def value(estimator: Estimator, network: OneRow, window: Window, score: Score) -> Recomputed | str:
    """A window's value by the reference; the reason if it has none."""
    if isinstance(estimator, Elbo):
        return _elbo(estimator, network, window, score)
    if isinstance(estimator, TwoPhase):
        return _two_phase(estimator, network, window, score)
    if isinstance(estimator, NoisedElbo):
        return _noised_elbo(estimator, network, window, score)
    if any(len(block) > SMALL for block in network.blocks):
        return f"a block of more than {SMALL} positions has too many orders to list"
    arguments = network.x, network.blocks, network, network.m
    if isinstance(estimator, Lattice):
        found = {
            name: reference.over_orders(*arguments, COMBINED[name], network.relative_positions) for name in LATTICE
        }
        values = {estimator.name: score, **score.others}
        pairs = {name: (values[name].log_prob, found[name]) for name in LATTICE}
        return Recomputed(found[estimator.name], problems=unequal(pairs, nats_tolerance(len(window.target))))
    if isinstance(estimator, SampledConfidence | SampledOrder):
        select = (
            _confidence(estimator, network) if isinstance(estimator, SampledConfidence) else _order(estimator, network)
        )
        return Recomputed(over_selections(*arguments, select, network.relative_positions))
    return f"the reference has no estimator {estimator.name}"


def _elbo(elbo: Elbo, network: OneRow, window: Window, score: Score) -> Recomputed | str:
    if elbo.arguments.elbo_form == "score_entropy":
        return "the reference does not have SEDD's own loss"
    if elbo.arguments.elbo_eps:
        return "the reference has no elbo_eps: the value is no bound"
    values = reference.elbo(network.x, network.blocks, network, network.m, elbo.draws(window))
    return _monte_carlo(values, elbo.replicates, score, nats_tolerance(len(window.target)))


def _noised_elbo(elbo: NoisedElbo, network: OneRow, window: Window, score: Score) -> Recomputed | str:
    denoiser = elbo.denoiser
    if elbo.block or elbo.conditioning != "none":
        return "the reference has neither canvases nor self-conditioning"

    @torch.inference_mode()
    def logits_of(z: torch.Tensor, t: float) -> torch.Tensor:
        time = torch.tensor([t], dtype=torch.float64, device=denoiser.device)
        features = denoiser.features(z[None].to(denoiser.device), None, **denoiser.noise_inputs(time))[0]
        return denoiser.head(features).double().masked_fill(denoiser.excluded, -math.inf)

    draws, by_mean = elbo.draws(window), elbo.arguments.prediction == "denoiser"
    values = reference.noised_elbo(network.x, network.scored, logits_of, noise_of(elbo), draws, by_mean)
    return _monte_carlo(values, elbo.replicates, score, nats_tolerance(len(window.target)))


def noise_of(elbo: NoisedElbo) -> Callable[[Tensor], reference.Noise]:
    """The noise of a network at a time, as in `reference.noised_elbo`."""
    denoiser = elbo.denoiser

    def level(t: torch.Tensor) -> reference.Noise:
        a, u, m = elbo.noise.level(t, 1 - t)
        b = torch.where(denoiser.excluded, 0.0, u)
        if denoiser.mask_id is not None:
            b[denoiser.mask_id] = m
        return a, b

    return level


def _monte_carlo(values: list[float], replicates: int, score: Score, noise: float) -> Recomputed:
    """The mean of draws, and the difference of their standard error, if there are enough for one."""
    if replicates == 1:
        return Recomputed(fmean(values))
    mean, error = reference.mean_and_error(values, replicates)
    told = math.nan if score.stderr is None else score.stderr
    return Recomputed(mean, problems=unequal({"stderr": (told, error)}, noise))


def _two_phase(estimator: TwoPhase, network: OneRow, window: Window, score: Score) -> Recomputed | str:
    """g and f of the blocks along the reference's own order, since an estimate records none.

    Where that has a tie, the run may have taken another order, so a block whose value then differs is not checked.
    """
    make, noise = rule_of(estimator.rule), nats_tolerance(len(window.target))
    cheap = one_row(estimator.phases["cached"].denoiser, window, estimator.block, estimator.grid)
    if make is None or cheap is None:
        return "an estimate records no order, and the reference does not have the rule"
    blocks = cast(TwoPhaseBlocks, score.blocks)
    drawn, pairs, tied = [n for n, weight in enumerate(blocks.weights) if weight], {}, False
    g, f = dict(enumerate(blocks.cached)), dict(zip(drawn, blocks.uncached, strict=True))
    for name, rows, values in (("g", cheap, g), ("f", network, f)):
        for n, run in values.items():
            F = Watched(make())
            values[n] = _of_block(rows, F, n)
            pair = {f"{name} of block {n}": (run, values[n])}
            if F.tied and unequal(pair, noise):
                tied = True
            else:
                pairs |= pair
    pairs |= {f"weight of block {n}": (blocks.weights[n], 1 / estimator.arguments.sample) for n in drawn}
    if tied and not unequal(pairs, noise):
        return "an estimate records no order, and blocks with ties have other values along the reference's"
    estimate, error = reference.two_phase([*g.values()], f, estimator.arguments.sample)
    pairs |= {} if score.stderr is None else {"stderr": (score.stderr, error)}
    return Recomputed(estimate, problems=unequal(pairs, noise))


def _of_block(network: OneRow, F: reference.Rule, n: int) -> float:
    """log p of block n, with the blocks before it revealed and those after it masked."""
    after = {ell for block in network.blocks[n + 1 :] for ell in block}
    x = [network.m if ell in after else token for ell, token in enumerate(network.x)]
    return reference.log_likelihood(x, [network.blocks[n]], network, F, network.m, network.relative_positions).ll


def _confidence(estimator: SampledConfidence, network: OneRow) -> Select:
    args = estimator.arguments
    scale = 1.0 if args.confidence == "tempered" else untempered(estimator.denoiser)
    if args.steps is None:
        count: Count = lambda size, left, t: min(args.n or 1, left)  # noqa: E731
    else:
        count = scheduled(args.schedule, args.steps)
    return best_drawn(network.x, count, args.tau, args.strict, scale)


def _order(estimator: SampledOrder, network: OneRow) -> Select:
    args = estimator.arguments
    return drawn_positions(network.x, args.alg, args.steps, args.alg_temp)


def unequal(pairs: dict[str, tuple[float, float]], noise: float) -> tuple[str, ...]:
    """The values, in the run and by the reference, that differ by more than `noise`, as text."""
    differing = (name for name, values in pairs.items() if not distance(*values) <= noise)
    return tuple("{} is {:.6g}, not {:.6g}".format(name, *pairs[name]) for name in differing)
