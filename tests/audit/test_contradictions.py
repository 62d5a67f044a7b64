"""Values that contradict each other, and draws that do not have their distribution, are failures of an audit."""

import dataclasses
import math
import random

import pytest
from attends import Attends
from laws import slow_but
from noised_toys import NoisyToy
from toys import Toy

from lm_eval_duel.audit.checked import ALONE, CheckedWindow, Recomputed
from lm_eval_duel.audit.contradictions import contradictions
from lm_eval_duel.core.windows import Window
from lm_eval_duel.estimators import two_phase
from lm_eval_duel.estimators.arguments import ElboArguments, LatticeArguments, NoisedElboArguments, TwoPhaseArguments
from lm_eval_duel.estimators.duel import DuelEstimator
from lm_eval_duel.estimators.elbo import Elbo
from lm_eval_duel.estimators.lattice import Lattice
from lm_eval_duel.estimators.noised_elbo import NoisedElbo
from lm_eval_duel.estimators.two_phase import TwoPhase


def windows(count, length=8, seed=0):
    """Random texts."""
    draw = random.Random(seed)
    texts = []
    for _ in range(count):
        tokens = [draw.randrange(3) for _ in range(length)]
        texts.append(Window((), tokens))
    return texts


ESTIMATORS = {
    "duel": lambda: DuelEstimator(Toy(), "greedy", 4),
    "elbo": lambda: Elbo(Toy(), ElboArguments(16, elbo_block=4)),
    "elbo of the whole target": lambda: Elbo(Toy(), ElboArguments(16)),
    "elbo by ratio": lambda: Elbo(Toy(), ElboArguments(16, "ratio", 4)),
    "two phases": lambda: TwoPhase(Attends(), "greedy", 2, TwoPhaseArguments(0.4)),
    "all orders": lambda: Lattice(Toy(), 4, LatticeArguments(["greedy"]), estimator="mixture"),
    "random tokens": lambda: NoisedElbo(NoisyToy(), NoisedElboArguments(32)),
    "random tokens, no limit": lambda: NoisedElbo(NoisyToy(), NoisedElboArguments(32, float("inf"))),
}
COMPARED = {  # by name: what is compared at least
    "duel": "the best order of",
    "elbo": "the mean over all orders of",
    "elbo of the whole target": "draws",
    "two phases": "the exact value",
    "all orders": "the order of the values",
    "random tokens": "draws",
}


def compared(estimator, count=16, change=lambda score: score):
    """What contradicts each other in a run over random texts whose scores are changed."""
    texts = windows(count, min(8, estimator.denoiser.max_length))
    scores = [change(score) for score in estimator.log_prob(texts)]
    return contradictions(estimator, checked(texts, scores))


def checked(texts, scores):
    """Windows of a run that the reference agrees with."""
    entries = []
    for n, (text, score) in enumerate(zip(texts, scores, strict=True)):
        again = Recomputed(score.log_prob)
        entries.append(CheckedWindow(f"window {n}", text, score.log_prob, again, n, score))
    return entries


@pytest.mark.parametrize("name", slow_but(ESTIMATORS, COMPARED.keys() - {"elbo"}))
def test_right_values_do_not_contradict_each_other(name):
    comparison = compared(ESTIMATORS[name]())

    assert not comparison.problems
    expected = COMPARED.get(name, "")
    assert any(what.startswith(expected) for what in comparison.compared), comparison.compared


@pytest.mark.parametrize("block", slow_but([4, None], [None]))
def test_draws_that_prefer_few_masks_are_found(block, monkeypatch):
    strata = Elbo.strata
    monkeypatch.setattr(Elbo, "strata", lambda self, *lanes: strata(self, *lanes) ** 1.5)

    comparison = compared(Elbo(Toy(), ElboArguments(16, elbo_block=block)))
    assert "share of masked positions of the draws" in " ".join(comparison.problems)


@pytest.mark.parametrize("form", ["count", "ratio"])
def test_a_draw_that_is_a_little_out_of_place_is_found(form, monkeypatch):
    """By a hundredth or less: sums of draws, held to the variance of independent ones, do not show it."""
    estimator = Elbo(Toy(), ElboArguments(128, form, 4))
    texts = windows(8)
    assert not contradictions(estimator, checked(texts, estimator.log_prob(texts))).problems

    strata = Elbo.strata
    monkeypatch.setattr(Elbo, "strata", lambda self, *lanes: strata(self, *lanes) ** 1.03)
    problems = contradictions(estimator, checked(texts, estimator.log_prob(texts))).problems
    assert problems
    for problem in problems:
        assert "not evenly spread" in problem


def test_draws_that_prefer_places_are_found(monkeypatch):
    def positions_in_order(*keys):
        return keys[-1] + 0 * keys[0]

    monkeypatch.setattr("lm_eval_duel.estimators.elbo.hashed", positions_in_order)

    comparison = compared(Elbo(Toy(), ElboArguments(16)))
    assert "place of masked positions" in " ".join(comparison.problems)


def test_a_share_of_drawn_blocks_that_is_not_the_share_is_found(monkeypatch):
    uniform = two_phase.uniform
    monkeypatch.setattr(two_phase, "uniform", lambda *keys: uniform(*keys) ** 2)

    comparison = compared(TwoPhase(Attends(), "greedy", 2, TwoPhaseArguments(0.4)))
    assert "share of drawn blocks" in " ".join(comparison.problems)


def test_noise_that_is_not_that_of_its_time_is_found(monkeypatch):
    draws = NoisedElbo.draws

    def noise_at_the_first_position_only(self, window):
        clean = list(window.target[1:])
        return [(s, t, weight, row[:1] + clean) for s, t, weight, row in draws(self, window)]

    monkeypatch.setattr(NoisedElbo, "draws", noise_at_the_first_position_only)

    comparison = compared(NoisedElbo(NoisyToy(), NoisedElboArguments(32)))
    assert "number of tokens that the noise kept" in " ".join(comparison.problems)


@pytest.mark.parametrize("name", ["duel", "elbo", "two phases", "all orders"])
def test_a_value_that_is_too_good_is_found(name):
    """Whoever computed it: here the run and its recomputation agree."""

    def better(score):
        return dataclasses.replace(score, log_prob=score.log_prob + 30.0)

    assert compared(ESTIMATORS[name](), change=better).problems


def test_larger_blocks_compare_a_run_with_itself():
    """Its sums over orders must be in order, but that is no comparison with anything independent."""
    texts = windows(2)
    lattice = ESTIMATORS["all orders"]()
    scores = lattice.log_prob(texts)
    alone = []
    for each in checked(texts, scores):
        alone.append(dataclasses.replace(each, again=Recomputed(each.log_prob, ALONE)))
    in_order = contradictions(lattice, alone)
    assert in_order.compared == []
    assert in_order.problems == []

    too_good = dataclasses.replace(scores[0], log_prob=scores[0].log_prob + 30.0)
    alone[0] = dataclasses.replace(alone[0], score=too_good)
    assert contradictions(lattice, alone).problems


@pytest.mark.parametrize("name", ["elbo", "two phases"])
def test_a_text_that_stands_many_times_is_one_draw(name):
    """Three errors above the exact value are no contradiction, in one copy as in sixty."""
    estimator = ESTIMATORS[name]()
    texts = windows(8)
    if name == "elbo":
        lattice = Lattice(Toy(), 4)
        exact = [score.others["elbo_exact"] for score in lattice.log_prob(texts)]
    else:
        exact = DuelEstimator(Attends(), "greedy", 2).log_prob(texts)
    scores = []
    for exact_score, score in zip(exact, estimator.log_prob(texts), strict=True):
        error = score.stderr if name == "elbo" else score.blocks.error
        three_errors_above = exact_score.log_prob + 3 * error / math.sqrt(len(texts))
        scores.append(dataclasses.replace(score, log_prob=three_errors_above))

    once = contradictions(estimator, checked(texts, scores))
    copies = contradictions(estimator, checked(60 * texts, 60 * scores))

    assert not once.problems
    assert not copies.problems


@pytest.mark.parametrize("sign", [1, -1])
def test_the_tolerance_of_a_sum_is_not_the_sum_of_tolerances(sign):
    """100 texts of eight tokens, each a little off; with every block in the sample the estimate has no error."""
    estimator = TwoPhase(Attends(), "greedy", 2, TwoPhaseArguments(1.0))
    allowed = 1e-4 + 2e-6 * 100 * 8

    def off(score):
        return dataclasses.replace(score, log_prob=score.log_prob + sign * 2 * allowed / 100)

    assert not compared(estimator, 100).problems
    assert compared(estimator, 100, off).problems
