"""Estimates by `reference.py`: its two readings of noise, ties, and the draws; all of them: test_every_estimator.py."""

import dataclasses
import itertools
import math

import pytest
import torch
from attends import Attends
from noised_toys import NoisyToy, of_position
from toys import Toy

from lm_eval_duel import reference
from lm_eval_duel.audit.checked import ALONE, CheckedWindow
from lm_eval_duel.audit.recompute import recompute
from lm_eval_duel.core.windows import Window
from lm_eval_duel.estimators.arguments import ElboArguments, TwoPhaseArguments
from lm_eval_duel.estimators.elbo import Elbo
from lm_eval_duel.estimators.two_phase import TwoPhase


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


def test_a_tie_does_not_let_a_wrong_block_pass():
    """Positions of two kinds, so two of them tie in every block."""
    network = Attends(length=12)
    network.place[2:] = network.place[:2].repeat(5, 1)
    estimator = TwoPhase(network, "greedy", 4, TwoPhaseArguments(1.0))
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
    draws = [draw for seed in range(12) for draw in Elbo(Toy(), ElboArguments(64), draw_seed=seed).draws(window)]
    sets = [(*sorted(M),) for ((M, t),) in draws]
    every = [chosen for n in range(1, 5) for chosen in itertools.combinations(range(1, 5), n)]
    assert {*sets} == {*every} and all(t is None for ((_, t),) in draws)
    expected = [len(sets) / 4 / math.comb(4, len(chosen)) for chosen in every]
    statistic = sum((sets.count(chosen) - e) ** 2 / e for chosen, e in zip(every, expected, strict=True))
    half = torch.tensor([(len(every) - 1) / 2, statistic / 2])
    assert 1 - float(torch.special.gammainc(half[0], half[1])) > 1e-4
    levels = [t for ((_, t),) in Elbo(Toy(), ElboArguments(64, "ratio")).draws(window)]
    counts = torch.histc(torch.tensor(levels), 4, 0, 1)
    assert all(abs(count - 16) <= 8 for count in counts.tolist())  # each replicate is stratified
