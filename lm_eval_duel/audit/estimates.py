"""Bounds, estimates and sums over orders by `reference.py`: the definition over one row at a time.

elbo, noised_elbo                     `reference.elbo`, `.noised_elbo` on the run's own draws; their error recomputed
elbo_exact, mixture, oracle           all orders of each block of at most `SMALL` positions
sampled_confidence, sampled_order     all ways of such a sampler (samplers.py)
two_phase                             g of every block and f of the drawn ones by Algorithm 2, weights recomputed
"""

from __future__ import annotations

import math
from statistics import fmean
from typing import cast

import torch

from lm_eval_duel import reference
from lm_eval_duel.audit import samplers
from lm_eval_duel.audit.checked import Recomputed
from lm_eval_duel.audit.one_row import OneRow
from lm_eval_duel.audit.other_networks import one_row
from lm_eval_duel.audit.replay import Watched, rule_of
from lm_eval_duel.core.scores import Score
from lm_eval_duel.core.windows import Window
from lm_eval_duel.estimators.base import Estimator
from lm_eval_duel.estimators.blocks import TwoPhaseBlocks
from lm_eval_duel.estimators.elbo import Elbo
from lm_eval_duel.estimators.noised_elbo import NoisedElbo
from lm_eval_duel.estimators.registry import LATTICE
from lm_eval_duel.estimators.subsets.drawn import untempered
from lm_eval_duel.estimators.subsets.lattice import Lattice
from lm_eval_duel.estimators.subsets.sampled_confidence import SampledConfidence
from lm_eval_duel.estimators.subsets.sampled_order import SampledOrder
from lm_eval_duel.estimators.two_phase import TwoPhase

SMALL = 6  # positions of a block: 63 states, and 729 pairs of a state and a set that it may unmask
NOISE = 1e-4  # nats, and relative
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
        return Recomputed(found[estimator.name], problems=_unequal(pairs))
    if isinstance(estimator, SampledConfidence | SampledOrder):
        if not estimator.own.all_sets:
            return "a beam follows some sets of positions only"
        select = (
            _confidence(estimator, network) if isinstance(estimator, SampledConfidence) else _order(estimator, network)
        )
        return Recomputed(samplers.over_selections(*arguments, select, network.relative_positions))
    return f"the reference has no estimator {estimator.name}"


def _elbo(elbo: Elbo, network: OneRow, window: Window, score: Score) -> Recomputed | str:
    if elbo.form == "score_entropy":
        return "the reference does not have SEDD's own loss"
    if elbo.eps:
        return "the reference has no elbo_eps: the value is no bound"
    values = reference.elbo(network.x, network.blocks, network, network.m, elbo.draws(window))
    return _monte_carlo(values, elbo.replicates, score)


def _noised_elbo(elbo: NoisedElbo, network: OneRow, window: Window, score: Score) -> Recomputed | str:
    denoiser, noise = elbo.denoiser, elbo.noise
    if elbo.block or elbo.conditioning != "none":
        return "the reference has neither canvases nor self-conditioning"

    @torch.inference_mode()
    def logits_of(z: torch.Tensor, t: float) -> torch.Tensor:
        time = torch.tensor([t], dtype=torch.float64, device=denoiser.device)
        features = denoiser.features(z[None].to(denoiser.device), None, **denoiser.noise_inputs(time))[0]
        return denoiser.head(features).double().masked_fill(denoiser.excluded, -math.inf)

    def level(t: torch.Tensor) -> reference.Noise:
        a, u, m = noise.level(t, 1 - t)
        b = torch.where(denoiser.excluded, 0.0, u)
        if denoiser.mask_id is not None:
            b[denoiser.mask_id] = m
        return a, b

    draws, by_mean = elbo.draws(window), elbo.prediction == "denoiser"
    values = reference.noised_elbo(network.x, network.scored, logits_of, level, draws, by_mean)
    return _monte_carlo(values, elbo.replicates, score)


def _monte_carlo(values: list[float], replicates: int, score: Score) -> Recomputed:
    """The mean of draws, and the difference of their standard error, if there are enough for one."""
    if replicates == 1:
        return Recomputed(fmean(values))
    mean, error = reference.mean_and_error(values, replicates)
    return Recomputed(mean, problems=_unequal({"stderr": (math.nan if score.stderr is None else score.stderr, error)}))


def _two_phase(estimator: TwoPhase, network: OneRow, window: Window, score: Score) -> Recomputed | str:
    """g and f of the blocks along the reference's own order, since an estimate records none.

    Where that has a tie, the run may have taken another order, so a block whose value then differs is not checked.
    """
    make = rule_of(estimator.rule)
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
            if F.tied and _unequal(pair):
                tied = True
            else:
                pairs |= pair
    pairs |= {f"weight of block {n}": (blocks.weights[n], 1 / estimator.sample) for n in drawn}
    if tied and not _unequal(pairs):
        return "an estimate records no order, and blocks with ties have other values along the reference's"
    estimate, error = reference.two_phase([*g.values()], f, estimator.sample)
    pairs |= {} if score.stderr is None else {"stderr": (score.stderr, error)}
    return Recomputed(estimate, problems=_unequal(pairs))


def _of_block(network: OneRow, F: reference.Rule, n: int) -> float:
    """log p of block n, with the blocks before it revealed and those after it masked."""
    after = {ell for block in network.blocks[n + 1 :] for ell in block}
    x = [network.m if ell in after else token for ell, token in enumerate(network.x)]
    return reference.log_likelihood(x, [network.blocks[n]], network, F, network.m, network.relative_positions).ll


def _confidence(estimator: SampledConfidence, network: OneRow) -> samplers.Select:
    args = estimator.own
    scale = 1.0 if args.confidence == "tempered" else untempered(estimator.denoiser)
    if args.steps is None:
        count: samplers.Count = lambda size, left, t: min(args.n or 1, left)  # noqa: E731
    else:
        count = samplers.scheduled(args.schedule, args.steps)
    return samplers.best_drawn(network.x, count, args.tau, args.strict, scale)


def _order(estimator: SampledOrder, network: OneRow) -> samplers.Select:
    return samplers.drawn_positions(network.x, estimator.own.alg, estimator.own.steps, estimator.own.alg_temp)


def _unequal(pairs: dict[str, tuple[float, float]]) -> tuple[str, ...]:
    """The differences between the run and the reference, as text."""
    return tuple(
        f"{name} is {run:.6g}, not {other:.6g}"
        for name, (run, other) in pairs.items()
        if run != other and not abs(run - other) <= NOISE * max(1.0, abs(other))
    )
