"""Bounds, estimates and sums over orders equal their definitions in `reference.py` and samplers.py, and faults show."""

import dataclasses
import itertools
import math

import pytest
import torch
from attends import Attends
from noised_toys import NoisyToy, of_position
from toys import BlockCausal, Rotary, Toy

from lm_eval_duel import reference
from lm_eval_duel.audit.checked import CheckedWindow
from lm_eval_duel.audit.recompute import ALONE, REFERENCE, recompute
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.wrappers import Warped
from lm_eval_duel.estimators.elbo import Elbo
from lm_eval_duel.estimators.noised_elbo import NoisedElbo
from lm_eval_duel.estimators.subsets.lattice import Lattice
from lm_eval_duel.estimators.subsets.sampled_confidence import SampledConfidence
from lm_eval_duel.estimators.subsets.sampled_order import SampledOrder
from lm_eval_duel.estimators.two_phase import TwoPhase

TOY = Toy(length=12)
WINDOWS = [
    Window((1,), (2, 0, 1, 1, 2)),
    Window((1, 2, 0), (2, 1, 0, 2), (1, 0)),
    Window((), (0, 1, 2, 0, 1, 0, 2)),
]
PLAIN = [window for window in WINDOWS if not window.suffix]
WARM = Warped(Toy(length=12), 0.7)
ESTIMATORS = {
    "elbo": Elbo(TOY, samples=16, seed=3),
    "elbo in blocks": Elbo(TOY, 3, samples=16),
    "elbo by ratio": Elbo(TOY, samples=16, form="ratio"),
    "elbo, few draws": Elbo(TOY, samples=4),
    "elbo, block-causal": Elbo(BlockCausal(3, length=12), samples=16),
    "all orders": Lattice(TOY, 4, value="mixture"),
    "all orders, block-causal": Lattice(BlockCausal(3, length=12), value="elbo_exact"),
    "all orders, rotary": Lattice(Rotary(length=12), 3, value="oracle"),
    "confidence": SampledConfidence(WARM, 3),
    "confidence, 2 at a time": SampledConfidence(WARM, 4, n=2, confidence="tempered"),
    "confidence, threshold": SampledConfidence(WARM, 3, tau=0.4, n=1),
    "confidence, at the threshold": SampledConfidence(TOY, 4, tau=0.3, n=2, strict=False),
    "confidence, even steps": SampledConfidence(WARM, 4, steps=3),
    "confidence, more steps than positions": SampledConfidence(WARM, 3, steps=5),
    "confidence, steps of dream": SampledConfidence(WARM, 4, steps=3, schedule="dream"),
    "confidence, rotary": SampledConfidence(Rotary(length=12), 3),
    "order, origin": SampledOrder(TOY, 4, alg="origin", steps=3),
    "order, random": SampledOrder(TOY, 4, alg="random", steps=3),
    "order, entropy": SampledOrder(TOY, 4, alg="entropy", steps=3, alg_temp=0.3),
    "order, margin": SampledOrder(TOY, 3, alg="topk_margin", steps=5, alg_temp=0.2),
    "two phases": TwoPhase(Attends(length=12), "greedy", 2, sample=0.5, seed=1),
    "two phases, prefix": TwoPhase(Attends(length=12), "margin:k=2", 3, cache="prefix", sample=1.0),
    "random tokens": NoisedElbo(NoisyToy(length=12), samples=32, seed=2),
    "random tokens, no limit": NoisedElbo(NoisyToy(length=12), samples=32, steps=math.inf),
    "random tokens, denoiser": NoisedElbo(NoisyToy(length=12, prediction="denoiser", timed=False), samples=32),
    "random tokens and masks": NoisedElbo(NoisyToy(length=12, share=0.2, prediction="denoiser"), samples=32),
    "random tokens and masks, no limit": NoisedElbo(NoisyToy(length=12, share=0.2), samples=32, steps=math.inf),
    "random tokens, denoiser, no limit": NoisedElbo(
        NoisyToy(length=12, prediction="denoiser"), samples=4, steps=math.inf
    ),
}


def checked(name):
    estimator = ESTIMATORS[name]
    windows = PLAIN if estimator.denoiser.attention == "block_causal" else WINDOWS
    scores = estimator.log_prob(windows)
    pairs = zip(windows, scores, strict=True)
    return [CheckedWindow(name, window, score.log_prob, recompute(estimator, window, score)) for window, score in pairs]


@pytest.mark.parametrize("share", [None, 0.2])
@pytest.mark.parametrize("denoiser", [True, False])
def test_one_reading_of_the_noise_gives_the_mean_over_clean_tokens_and_the_limit(share, denoiser):
    """The kernel by Bayes' rule over all clean tokens; the rate, by ever smaller steps."""
    toy = NoisyToy(share=share)
    s, t = (torch.tensor(time, dtype=torch.float64) for time in (0.4, 0.7))
    before, now = toy.level(s), toy.level(t)
    P = torch.tensor([0.5, 0.2, 0.3, 0.0], dtype=torch.float64)[: toy.vocab_size]
    for noisy in range(toy.vocab_size):
        r = reference.plug_in(P, noisy, now) if denoiser else P
        wanted = of_position(P, noisy, before, now, denoiser)
        assert torch.allclose(reference.posterior(r, noisy, before, now), wanted, atol=1e-14)
        rate = reference.noised_rate(1, noisy, r, *torch.func.jvp(toy.level, (t,), (torch.ones_like(t),)))
        steps = [reference.noised_term(1, noisy, r, now, toy.level(t - h)) / h for h in (1e-3, 1e-4)]
        assert steps[1] == pytest.approx(rate, rel=1e-3) and abs(steps[1] - rate) < abs(steps[0] - rate) / 5


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_estimate_equals_its_definition(name):
    for each in checked(name):
        assert each.again.route == REFERENCE and not each.problems, each
        assert each.difference < (1e-7 if "rotary" in name else 1e-9)


def test_a_tie_does_not_let_a_wrong_block_pass():
    """Positions of two kinds, so two of them tie in every block."""
    network = Attends(length=12)
    network.place[2:] = network.place[:2].repeat(5, 1)
    estimator = TwoPhase(network, "greedy", 4, sample=1.0)
    window = Window((), (2, 0, 1, 1, 2, 0, 1, 2))
    [score] = estimator.log_prob([window])
    more = [tuple(value + 0.5 for value in values) for values in (score.blocks.cached, score.blocks.uncached)]
    blocks = dataclasses.replace(score.blocks, cached=more[0], uncached=more[1])
    wrong = dataclasses.replace(score, log_prob=score.log_prob + 1, blocks=blocks)
    found = recompute(estimator, window, wrong)
    assert found.route == ALONE and CheckedWindow("", window, wrong.log_prob, found).differs, found
    assert recompute(estimator, window, score).log_prob == pytest.approx(score.log_prob, abs=1e-9)


@pytest.mark.slow
def test_draws_are_uniform_in_number_and_in_place():
    """Pearson's statistic over masked sets of four positions; right draws fail for one seed in 10^4."""
    [window] = [Window((1,), (2, 0, 1, 1))]
    draws = [draw for seed in range(12) for draw in Elbo(TOY, samples=64, seed=seed).draws(window)]
    sets = [(*sorted(M),) for ((M, t),) in draws]
    every = [chosen for n in range(1, 5) for chosen in itertools.combinations(range(1, 5), n)]
    assert {*sets} == {*every} and all(t is None for ((_, t),) in draws)
    expected = [len(sets) / 4 / math.comb(4, len(chosen)) for chosen in every]
    statistic = sum((sets.count(chosen) - e) ** 2 / e for chosen, e in zip(every, expected, strict=True))
    half = torch.tensor([(len(every) - 1) / 2, statistic / 2])
    assert 1 - float(torch.special.gammainc(half[0], half[1])) > 1e-4
    levels = [t for ((_, t),) in Elbo(TOY, samples=64, form="ratio").draws(window)]
    counts = torch.histc(torch.tensor(levels), 4, 0, 1)
    assert all(abs(count - 16) <= 8 for count in counts.tolist())  # each replicate is stratified
