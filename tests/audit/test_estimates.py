"""Estimates by `reference.py`: its two readings of noise, ties, and the draws; all of them: test_every_estimator.py."""

import dataclasses
import itertools
import math
from collections import Counter

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
    s = torch.tensor(0.4, dtype=torch.float64)
    t = torch.tensor(0.7, dtype=torch.float64)
    before = toy.level(s)
    now, slope = torch.func.jvp(toy.level, (t,), (torch.ones_like(t),))
    P = torch.tensor([0.5, 0.2, 0.3, 0.0], dtype=torch.float64)[: toy.vocab_size]

    for noisy in range(toy.vocab_size):
        r = reference.plug_in(P, noisy, now) if denoiser else P

        expected = of_position(P, noisy, before, now, denoiser)
        assert torch.allclose(reference.posterior(r, noisy, before, now), expected, atol=1e-14)

        rate = reference.noised_rate(1, noisy, r, now, slope)
        by_step = reference.noised_term(1, noisy, r, now, toy.level(t - 1e-3)) / 1e-3
        by_small_step = reference.noised_term(1, noisy, r, now, toy.level(t - 1e-4)) / 1e-4
        assert by_small_step == pytest.approx(rate, rel=1e-3)
        assert abs(by_small_step - rate) < abs(by_step - rate) / 5


def test_a_tie_does_not_let_a_wrong_block_pass():
    """Positions of two kinds, so two of them tie in every block."""
    network = Attends(length=12)
    network.place[2:] = network.place[:2].repeat(5, 1)
    estimator = TwoPhase(network, "greedy", 4, TwoPhaseArguments(1.0))
    window = Window((), (2, 0, 1, 1, 2, 0, 1, 2))
    [score] = estimator.log_prob([window])
    assert recompute(estimator, window, score).log_prob == pytest.approx(score.log_prob, abs=1e-9)

    wrong_blocks = dataclasses.replace(
        score.blocks,
        cached=tuple(nats + 0.5 for nats in score.blocks.cached),
        uncached=tuple(nats + 0.5 for nats in score.blocks.uncached),
    )
    wrong = dataclasses.replace(score, log_prob=score.log_prob + 1, blocks=wrong_blocks)
    again = recompute(estimator, window, wrong)

    assert again.route == ALONE
    assert CheckedWindow("", window, wrong.log_prob, again).differs, again


def p_value(statistic, freedom):
    """The probability that a chi-squared variable of `freedom` degrees of freedom is larger."""
    half = torch.tensor(freedom / 2)
    return 1 - float(torch.special.gammainc(half, torch.tensor(statistic / 2)))


@pytest.mark.slow
def test_draws_are_uniform_in_number_and_in_place():
    """Pearson's statistic over masked sets of four positions; right draws fail for one seed in 10^4.

    The number of masked positions is uniform in 1..4, and so is the set of them given their number. Draws of the form
    `ratio` have uniform times.
    """
    window = Window((1,), (2, 0, 1, 1))

    times_drawn = Counter()
    for seed in range(12):
        for ((masked, t),) in Elbo(Toy(), ElboArguments(64), draw_seed=seed).draws(window):
            assert t is None
            times_drawn[tuple(sorted(masked))] += 1

    expected = {}
    for size in range(1, 5):
        for masked in itertools.combinations(range(1, 5), size):
            expected[masked] = times_drawn.total() / 4 / math.comb(4, size)
    assert times_drawn.keys() == expected.keys()
    statistic = sum((times_drawn[masked] - times) ** 2 / times for masked, times in expected.items())
    assert p_value(statistic, freedom=len(expected) - 1) > 1e-4

    times = [t for ((_, t),) in Elbo(Toy(), ElboArguments(64, "ratio")).draws(window)]
    in_quarters = torch.histc(torch.tensor(times), 4, 0, 1)
    assert all(abs(count - 16) <= 8 for count in in_quarters.tolist())  # each replicate is stratified
