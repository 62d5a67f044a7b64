"""Bounds, estimates and sums over orders by `reference.py`: the definition of each, over one row at a time.

    elbo, noised_elbo                    `reference.elbo`, `.noised_elbo` on the run's own draws; their error recomputed
    elbo_exact, mixture, oracle          all orders of each block of at most `SMALL` positions; the rules followed, as
                                         in a run of their own
    sampled_confidence, sampled_order    all ways of such a sampler (samplers.py)
    two_phase                            g of every block and f of the drawn ones by Algorithm 2, weights recomputed

That the run's own draws are drawn as they should be is looked at in contradictions.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import fmean
from typing import cast

import torch
from torch import Tensor

from lm_eval_duel import reference
from lm_eval_duel.audit.checked import Recomputed, unequal
from lm_eval_duel.audit.networks import OneRow
from lm_eval_duel.audit.replay import TIES, all_equal, moved, rule_of
from lm_eval_duel.audit.runs_rule import along_any_order
from lm_eval_duel.audit.samplers import (
    Select,
    at_most,
    best_drawn,
    drawn_positions,
    over_selections,
    scheduled,
)
from lm_eval_duel.audit.wrapped_networks import one_row
from lm_eval_duel.core.float_noise import nats_tolerance
from lm_eval_duel.core.scores import Score
from lm_eval_duel.core.windows import Window
from lm_eval_duel.errors import counted
from lm_eval_duel.estimators.base import Estimator
from lm_eval_duel.estimators.elbo import Elbo
from lm_eval_duel.estimators.lattice import Lattice
from lm_eval_duel.estimators.noised_elbo import NoisedElbo
from lm_eval_duel.estimators.registry import LATTICE
from lm_eval_duel.estimators.sampled_confidence import SampledConfidence, untempered
from lm_eval_duel.estimators.sampled_order import SampledOrder
from lm_eval_duel.estimators.totals import TwoPhaseBlocks
from lm_eval_duel.estimators.two_phase import TwoPhase

SMALL = 6  # positions of a block: 63 states, and 729 pairs of a state and a set that it may unmask
COMBINED: dict[str, Callable[[list[float]], float]] = {
    "elbo_exact": fmean,
    "mixture": reference.log_mean_exp,
    "oracle": max,
}


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
    if isinstance(estimator, Lattice):
        return _lattice(estimator, network, score)
    if isinstance(estimator, SampledConfidence):
        return _sampled(network, _confidence(estimator, network))
    if isinstance(estimator, SampledOrder):
        arguments = estimator.arguments
        select = drawn_positions(network.x, arguments.alg, arguments.steps, arguments.alg_temp)
        return _sampled(network, select)
    return f"the reference has no estimator {estimator.name}"


# ---------------------------------------------------------------- all orders, and all ways of a sampler


def over_orders(network: OneRow, name: str) -> float:
    """`elbo_exact`, `mixture` or `oracle` of a window."""
    return reference.over_orders(
        network.x,
        network.blocks,
        network,
        network.m,
        COMBINED[name],
        network.relative_positions,
    )


def _lattice(estimator: Lattice, network: OneRow, score: Score) -> Recomputed:
    """All three sums over orders, since the score of one of them holds the others, too; and the rules followed."""
    run = {estimator.name: score, **score.others}
    pairs = {}
    for name in LATTICE:
        pairs[name] = run[name].log_prob, over_orders(network, name)
    noise = nats_tolerance(len(network.scored))
    problems = unequal(pairs, noise)
    for rule in estimator.rules:
        path = score.others[str(rule)]
        along = along_any_order(network, rule, path)
        problems += unequal({str(rule): (path.log_prob, along.log_prob)}, noise)
        if along.other_picks:
            problems.append(f"{counted(along.other_picks, 'pick')} of {rule} other than the rule's")
    _, again = pairs[estimator.name]
    return Recomputed(again, problems=tuple(problems))


def _sampled(network: OneRow, select: Select) -> Recomputed:
    """The sum over all ways of a sampler whose steps are `select`."""
    log_prob = over_selections(
        network.x,
        network.blocks,
        network,
        network.m,
        select,
        network.relative_positions,
    )
    return Recomputed(log_prob)


def _confidence(estimator: SampledConfidence, network: OneRow) -> Select:
    """The steps of a sampler that keeps its most confident draws."""
    arguments = estimator.arguments
    scale = 1.0 if arguments.confidence == "tempered" else untempered(estimator.denoiser)
    count = at_most(arguments.n or 1)
    if arguments.steps is not None:
        count = scheduled(arguments.schedule, arguments.steps)
    return best_drawn(network.x, count, arguments.tau, arguments.strict, scale)


# ---------------------------------------------------------------- Monte Carlo bounds


def _elbo(elbo: Elbo, network: OneRow, window: Window, score: Score) -> Recomputed | str:
    if elbo.arguments.elbo_form == "score_entropy":
        return "the reference does not have SEDD's own loss"
    if elbo.arguments.elbo_eps:
        return "the reference has no elbo_eps: the value is no bound"
    values = reference.elbo(network.x, network.blocks, network, network.m, elbo.draws(window))
    return _monte_carlo(values, elbo.replicates, score, nats_tolerance(len(window.target)))


def _noised_elbo(elbo: NoisedElbo, network: OneRow, window: Window, score: Score) -> Recomputed | str:
    if elbo.block or elbo.conditioning != "none":
        return "the reference has neither canvases nor self-conditioning"
    denoiser = elbo.denoiser

    @torch.inference_mode()
    def logits_of(z: Tensor, t: float) -> Tensor:
        time = torch.tensor([t], dtype=torch.float64, device=denoiser.device)
        noise_level = denoiser.noise_inputs(time)
        [features] = denoiser.features(z[None].to(denoiser.device), None, **noise_level)  # (L, D)
        logits = denoiser.head(features).double()  # (L, V)
        return logits.masked_fill(denoiser.excluded, -math.inf)

    values = reference.noised_elbo(
        network.x,
        network.scored,
        logits_of,
        noise_of(elbo),
        elbo.draws(window),
        denoiser=elbo.arguments.prediction == "denoiser",
    )
    return _monte_carlo(values, elbo.replicates, score, nats_tolerance(len(window.target)))


def noise_of(elbo: NoisedElbo) -> Callable[[Tensor], reference.Noise]:
    """The noise of a network at a time, as in `reference.noised_elbo`."""
    denoiser = elbo.denoiser

    def level(t: Tensor) -> reference.Noise:
        a, u, m = elbo.noise.level(t, 1 - t)
        b = torch.where(denoiser.excluded, 0.0, u)  # (V,)
        if denoiser.mask_id is not None:
            b[denoiser.mask_id] = m
        return a, b

    return level


def _monte_carlo(
    values: list[float],
    replicates: int,
    score: Score,
    noise: float,
) -> Recomputed:
    """The mean of draws, and a problem if their standard error, where there are enough for one, is not the run's."""
    if replicates == 1 or not math.isfinite(math.fsum(values)):
        return Recomputed(fmean(values))
    mean, error = reference.mean_and_error(values, replicates)
    run_error = math.nan if score.stderr is None else score.stderr
    return Recomputed(mean, problems=tuple(unequal({"stderr": (run_error, error)}, noise)))


# ---------------------------------------------------------------- the two-phase estimate


def _two_phase(
    estimator: TwoPhase,
    network: OneRow,
    window: Window,
    score: Score,
) -> Recomputed | str:
    """g and f of the blocks along the reference's own order, since an estimate records none.

    Where that has a tie, the run may have taken another order, so a block whose value then differs is not checked.
    """
    make = rule_of(estimator.rule)
    under_cache = estimator.phases["cached"].denoiser
    cheap = one_row(under_cache, window, estimator.block, estimator.grid)
    if make is None or cheap is None:
        return "an estimate records no order, and the reference does not have the rule"
    noise = nats_tolerance(len(window.target))
    blocks = cast(TwoPhaseBlocks, score.blocks)
    drawn = [n for n, weight in enumerate(blocks.weights) if weight]
    g = dict(enumerate(blocks.cached))  # of the run, by block
    f = dict(zip(drawn, blocks.uncached, strict=True))

    pairs: dict[str, tuple[float, float]] = {}
    tied = False
    for name, rows, values in (("g", cheap, g), ("f", network, f)):
        again: list[float] = []
        for n, run in values.items():
            F = Watched(make())
            recomputed = _of_block(rows, F, n)
            again.append(recomputed)
            pair = {f"{name} of block {n}": (run, recomputed)}
            if F.tied and unequal(pair, noise):
                tied = True
            else:
                pairs |= pair
        if not tied:
            pairs[f"the sum of {name}"] = (math.fsum(values.values()), math.fsum(again))
    sample = estimator.arguments.sample
    for n in drawn:
        pairs[f"weight of block {n}"] = (blocks.weights[n], 1 / sample)
    if tied and not unequal(pairs, noise):
        return "an estimate records no order, and blocks with ties have other values along the reference's"

    # From the run's own g and f, which are held to the reference's above: weights would multiply their float noise.
    estimate, error = reference.two_phase([*g.values()], f, sample)
    if score.stderr is not None:
        pairs["stderr"] = (score.stderr, error)
    return Recomputed(estimate, problems=tuple(unequal(pairs, noise)))


def _of_block(network: OneRow, F: reference.Rule, n: int) -> float:
    """log p of block n, with the blocks before it revealed and those after it masked."""
    x = reference.masked(network.x, network.blocks[n + 1 :], network.m)
    path = reference.log_likelihood(
        x,
        [network.blocks[n]],
        network,
        F,
        network.m,
        network.relative_positions,
    )
    return path.ll


class Watched:
    """A rule of the reference that notes whether a pick was a tie, other than that of a row of masks."""

    def __init__(self, F: reference.Rule):
        self.F = F
        self.tied = False

    def __call__(self, log_P: torch.Tensor, M: list[int]) -> list[int]:
        picked = self.F(log_P, M)
        if all_equal(log_P, M):
            return picked
        for by in TIES:
            changed = moved(log_P, M, picked, *by)
            if {*self.F(changed, M)} != {*picked}:
                self.tied = True
        return picked
