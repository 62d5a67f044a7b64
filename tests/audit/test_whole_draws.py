"""What an audit says of draws: statistics over all ways to draw, by hand; and the windows that it sums over orders."""

import dataclasses
import itertools

import pytest
import torch
from toys import Toy

from lm_eval_duel.audit import contradictions
from lm_eval_duel.audit.checked import CheckedWindow, Recomputed
from lm_eval_duel.audit.estimates import SMALL
from lm_eval_duel.core.scores import Score
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.dit import denoiser as dit
from lm_eval_duel.estimators.arguments import ElboArguments, TwoPhaseArguments
from lm_eval_duel.estimators.duel import DuelEstimator
from lm_eval_duel.estimators.elbo import Elbo
from lm_eval_duel.estimators.two_phase import TwoPhase


class AllDraws(Elbo):
    """An ELBO whose draws are given."""

    given = ()

    def draws(self, window):
        return self.given


def all_masks(size):
    """Every way to mask positions of a block of `size`, and its probability if every number of them is as likely."""
    for count in range(1, size + 1):
        ways = list(itertools.combinations(range(size), count))
        for masked in ways:
            yield masked, 1 / size / len(ways)


def all_masks_at(chance, size):
    """Every way to mask positions, and its probability if each is masked with probability `chance`."""
    for count in range(size + 1):
        for masked in itertools.combinations(range(size), count):
            yield masked, chance**count * (1 - chance) ** (size - count)


@pytest.mark.parametrize("size", range(1, 6))
def test_statistics_of_the_number_of_masks_are_exact(size):
    """Over all draws the deviations add up to 0, and their squares to the variance that is told."""
    elbo = AllDraws(Toy(), ElboArguments(16))
    window = Window((), (0,) * size)
    names = ("share of masked positions", "place of masked positions")
    zeros = dict.fromkeys(names, 0.0)
    means = dict(zeros)
    squares = dict(zeros)
    variances = dict(zeros)
    mean_spread = 0.0

    for masked, probability in all_masks(size):
        elbo.given = [[(masked, None)]]  # without a time
        statistics = contradictions.draw_statistics(elbo, [window])
        for name in names:
            means[name] += probability * statistics[name].deviation
            squares[name] += probability * statistics[name].deviation ** 2
            variances[name] += probability * statistics[name].variance
        mean_spread += probability * statistics["spread of the share of masked positions"].deviation
        assert statistics["number of masked positions at a time"].variance == 0

    assert means == pytest.approx(zeros, abs=1e-12)
    assert mean_spread == pytest.approx(0, abs=1e-12)
    assert squares == pytest.approx(variances, abs=1e-12)


@pytest.mark.parametrize(("form", "eps"), [("ratio", 0.0), ("ratio", 0.01), ("score_entropy", 0.0)])
def test_statistics_of_times_are_exact(form, eps):
    """At a grid of times, and over all masks at each: the chance of a mask is the time, or SEDD's share of it.

    Uniform times have the variance 1/12, and their squared distances from 1/2 have 1/180.
    """
    elbo = AllDraws(Toy(), ElboArguments(16, "ratio", elbo_eps=eps))
    elbo.arguments = dataclasses.replace(elbo.arguments, elbo_form=form)
    size = 3
    grid = 400
    window = Window((), (0,) * size)
    number = contradictions.Statistic()  # of masked positions at a time
    square_of_number = 0.0
    times = contradictions.Statistic()
    variance_of_share = 0.0
    variance_of_spread = 0.0

    for n in range(grid):
        t = eps + (1 - eps) * (n + 0.5) / grid
        chance = t * (1 - dit.NOISE_EPS) if form == "score_entropy" else t
        for masked, probability in all_masks_at(chance, size):
            elbo.given = [[(masked, t)]]
            statistics = contradictions.draw_statistics(elbo, [window])
            at_time = statistics["number of masked positions at a time"]
            number.add(probability * at_time.deviation, probability * at_time.variance)
            square_of_number += probability * at_time.deviation**2
        share = statistics["share of masked positions"]
        spread = statistics["spread of the share of masked positions"]
        times.add(share.deviation, share.variance)
        variance_of_share += share.deviation**2 / grid
        variance_of_spread += spread.deviation**2 / grid

    assert number.deviation == pytest.approx(0, abs=1e-9)
    assert square_of_number == pytest.approx(number.variance)
    assert times.deviation == pytest.approx(0, abs=1e-9)
    assert variance_of_share == pytest.approx(1 / 12, rel=1e-3)
    assert variance_of_spread == pytest.approx(1 / 180, rel=1e-3)
    assert share.variance == pytest.approx(1 / 12)
    assert spread.variance == pytest.approx(1 / 180)


@pytest.mark.parametrize("drawn", list(itertools.product((False, True), repeat=3)))
def test_statistics_of_drawn_blocks(drawn):
    """Places after the last block of a window do not count."""
    estimator = TwoPhase.__new__(TwoPhase)
    estimator.arguments = TwoPhaseArguments(0.3)
    estimator.blocks = lambda window: [0, 2, 4]
    weights = torch.tensor([[is_drawn / 0.3 for is_drawn in (*drawn, True)]])
    estimator.weights = lambda windows: weights

    statistics = contradictions.draw_statistics(estimator, [Window((), (0,) * 6)])

    share = statistics["share of drawn blocks"]
    assert share.deviation == pytest.approx(sum(drawn) - 3 * 0.3)
    assert share.variance == pytest.approx(3 * 0.3 * 0.7)


def test_unlikely_statistics_are_named_with_their_side():
    """A deviation of more than four standard errors is unlikely; here they are 2."""
    statistics = {
        "a": contradictions.Statistic(2 * 3.9, 4.0),
        "b": contradictions.Statistic(2 * 4.1, 4.0),
        "c": contradictions.Statistic(2 * -4.1, 4.0),
        "d": contradictions.Statistic(2 * -3.9, 4.0),
        "e": contradictions.Statistic(0.0, 4.0),
        "none": contradictions.Statistic(5.0, 0.0),
    }

    assert list(contradictions._unlikely(statistics)) == [
        "the b of the draws is 4.1 standard errors too large",
        "the c of the draws is 4.1 standard errors too small",
    ]


@pytest.mark.parametrize("states", [0, 14, 15, 16, 29, 30, 44, 45, 99])
def test_sums_over_orders_are_computed_while_they_are_cheap(states, monkeypatch):
    """A block of m positions has 2^m - 1 states; a window with a larger block is left out, and costs nothing."""
    monkeypatch.setattr(contradictions, "STATES", states)
    estimator = DuelEstimator(Toy(), "greedy", None)
    windows = [
        Window((), (0, 1, 2, 0)),
        Window((), (0,) * (SMALL + 1)),
        Window((), (1, 1, 2, 0)),
        Window((), (1, 2, 2, 0)),
    ]
    scored = [CheckedWindow("x", window, -1.0, Recomputed(-1.0), 0, Score(-1.0)) for window in windows]

    computed = [n for n, _ in contradictions._over_all_orders(estimator, scored)]

    small = [0, 2, 3]
    affordable = states // 15
    assert computed == small[:affordable]
