"""Recorded trajectories: the joint probability of text and order, and what is said of an order."""

import itertools
import math

import pytest
import torch
from toys import BlockCausal, Toy

from lm_eval_duel import Duel, DuelError, Window
from lm_eval_duel.denoisers.filters import warped


def orders(length):
    """Every ordered partition of so many positions, as the step of each."""
    for steps in itertools.product(range(length), repeat=length):
        if set(steps) == set(range(max(steps) + 1)):
            yield steps


TEXTS = [Window((1,), (0, 2, 1)), Window((), (2, 0, 0, 1), (1,))]
SETTINGS = [
    {"n": 2},
    {"steps": 2},
    {"steps": 2, "schedule": "dream"},
    {"tau": 0.4, "n": 2},
    {"tau": 0.4, "strict": False},
    {"n": 1, "confidence": "tempered"},
]


@pytest.mark.parametrize(("settings", "window"), list(zip(SETTINGS, TEXTS * 3, strict=True)))
def test_the_joint_of_text_and_order_sums_to_the_probability_of_the_text(settings, window):
    denoiser = warped(Toy(length=8, tokens=7, scale=1.0), temperature=0.8)
    text = Duel(denoiser, block=4, estimator="sampled_confidence", **settings)
    every = list(orders(len(window.target)))
    along = Duel(denoiser, "left_to_right", 4)
    joints = [each.log_joint for each in along.follow([window] * len(every), every, settings)]
    [score] = text.log_prob([window])
    assert math.log(math.fsum(map(math.exp, joints))) == pytest.approx(score.log_prob, abs=1e-9)
    assert sum(joint > -math.inf for joint in joints) > 1


@pytest.mark.parametrize("kind", [Toy, BlockCausal])
@pytest.mark.parametrize("rule", ["greedy", "margin:k=2", "threshold:mu=0.5", "klass:mu=0.6:nu=0.5"])
def test_own_samples_follow_the_rule(kind, rule):
    duel = Duel(kind(length=8, tokens=5), rule, block=2 if kind is BlockCausal else 3)
    samples = duel.sample([(), (1,), (2, 0)], length=6, seed=1)
    windows = [Window(context, s.tokens) for context, s in zip([(), (1,), (2, 0)], samples, strict=True)]
    for sample, each in zip(samples, duel.follow(windows, [s.reveal_steps for s in samples]), strict=True):
        assert each.log_prob == pytest.approx(sample.log_prob, abs=1e-9)
        assert not each.differences and each.steps <= sample.nfe


def test_steps_are_numbered_in_any_way_and_blocks_must_fit():
    duel = Duel(Toy(length=8), "left_to_right", block=2)
    window = [Window((), (0, 1, 2, 0))]
    for steps in ([0, 1, 0, 1], [1, 2, 1, 2], [1, 2, 3, 4], [10, 20, 30, 40]):
        [each] = duel.follow(window, [steps])
        assert not each.differences and each.steps == 4
    [each] = duel.follow(window, [[2, 1, 3, 4]])
    assert [(d.block, d.step) for d in each.differences] == [(0, 0)] and each.differences[0].margin == math.inf
    with pytest.raises(DuelError, match="not revealed in blocks of 2"):
        duel.follow(window, [[1, 3, 2, 4]])
    with pytest.raises(DuelError, match="Window 0 has 4 target tokens but 1 steps"):
        duel.follow(window, [[1]])


def test_a_near_tie_is_told_from_another_rule():
    tied = Toy(length=8)
    tied.codes = torch.tensor([[1.0, 0, 0, 0], [1 + 1e-7, 0, 0, 0]], dtype=torch.float64)
    tied.head = lambda features: tied.codes[torch.arange(len(features)) % 2]
    [each] = Duel(tied, "greedy", block=3).follow(TEXTS[:1], [(0, 2, 1)])
    assert each.differences and all(step.near_tie for step in each.differences)
    duel = Duel(Toy(length=8), "greedy", block=3)
    [score] = duel.log_prob(TEXTS[:1])
    other = [max(score.reveal_steps) - step for step in score.reveal_steps]
    [each] = duel.follow(TEXTS[:1], [other])
    assert each.differences[0].step == 0 and not each.differences[0].near_tie


def test_a_departure_names_a_target_position_of_its_block():
    """On the row's grid the first block begins in the context."""
    duel = Duel(Toy(length=8), "greedy", block=4, grid="row")
    window = Window((1, 0), (0, 2, 1, 0))
    [score] = duel.log_prob([window])
    other = [7 - step for step in score.reveal_steps[:2]] + [
        9 + max(score.reveal_steps) - step for step in score.reveal_steps[2:]
    ]
    [each] = duel.follow([window], [other])
    assert {step.block for step in each.differences} == {0, 2}


def test_steps_that_restart_under_a_rule_over_blocks_are_refused():
    duel = Duel(Toy(length=8), "klass:mu=0.41:nu=0.3:kl=authors:across=true", block=3)
    window = Window((), (0, 1, 2, 0, 1, 2))
    [score] = duel.log_prob([window])
    [each] = duel.follow([window], [score.reveal_steps])
    assert each.log_prob == pytest.approx(score.log_prob, abs=1e-9) and not each.differences
    [in_one_block] = Duel(Toy(length=8), duel.rule, block=6).log_prob([window])
    [each] = Duel(Toy(length=8), duel.rule, block=6).follow([window], [in_one_block.reveal_steps])
    assert not each.differences, "one block has nothing to restart in"
    with pytest.raises(DuelError, match="do not restart"):
        duel.follow([window], [(0, 1, 2, 0, 1, 2)])
