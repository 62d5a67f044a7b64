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
    steps = list(orders(len(window.target)))

    paths = Duel(denoiser, "left_to_right", 4).follow([window] * len(steps), steps, settings)
    [score] = Duel(denoiser, block=4, estimator="sampled_confidence", **settings).log_prob([window])

    joints = [math.exp(path.log_joint) for path in paths]
    assert math.log(math.fsum(joints)) == pytest.approx(score.log_prob, abs=1e-9)
    assert len(joints) - joints.count(0.0) > 1


@pytest.mark.parametrize("kind", [Toy, BlockCausal])
@pytest.mark.parametrize("rule", ["greedy", "margin:k=2", "threshold:mu=0.5", "klass:mu=0.6:nu=0.5"])
def test_own_samples_follow_the_rule(kind, rule):
    duel = Duel(kind(length=8, tokens=5), rule, block=2 if kind is BlockCausal else 3)
    contexts = [(), (1,), (2, 0)]
    samples = duel.sample(contexts, length=6, seed=1)
    windows = [Window(context, sample.tokens) for context, sample in zip(contexts, samples, strict=True)]

    paths = duel.follow(windows, [sample.reveal_steps for sample in samples])

    for sample, path in zip(samples, paths, strict=True):
        assert path.log_prob == pytest.approx(sample.log_prob, abs=1e-9)
        assert path.steps <= sample.nfe
        assert not path.differences


@pytest.mark.parametrize(
    ("sampler", "named"), [({"m": 1}, "'m'"), ({1: 1}, "'1'"), ("n=1", "dict.*'n=1'"), (1, "dict")]
)
def test_a_sampler_is_a_dict_of_its_arguments(sampler, named):
    with pytest.raises(DuelError, match=f"{named}"):
        Duel(Toy(length=8), "left_to_right", 4).follow(TEXTS[:1], [(0, 1, 2)], sampler)


def test_steps_are_numbered_in_any_way_and_blocks_must_fit():
    duel = Duel(Toy(length=8), "left_to_right", block=2)
    windows = [Window((), (0, 1, 2, 0))]
    for steps in ([0, 1, 0, 1], [1, 2, 1, 2], [1, 2, 3, 4], [10, 20, 30, 40]):
        [path] = duel.follow(windows, [steps])
        assert not path.differences
        assert path.steps == 4

    [path] = duel.follow(windows, [[2, 1, 3, 4]])
    [departure] = path.differences
    assert departure.block == 0
    assert departure.step == 0
    assert departure.margin == math.inf

    with pytest.raises(DuelError, match="not revealed in blocks of 2"):
        duel.follow(windows, [[1, 3, 2, 4]])
    with pytest.raises(DuelError, match="Window 0 has 4 target tokens but 1 steps"):
        duel.follow(windows, [[1]])


def test_a_near_tie_is_told_from_another_rule():
    tied = Toy(length=8)
    tied.codes = torch.tensor([[1.0, 0, 0, 0], [1 + 1e-7, 0, 0, 0]], dtype=torch.float64)
    tied.head = lambda features: tied.codes[torch.arange(len(features)) % 2]
    [path] = Duel(tied, "greedy", block=3).follow(TEXTS[:1], [(0, 2, 1)])
    assert path.differences
    for departure in path.differences:
        assert departure.near_tie

    duel = Duel(Toy(length=8), "greedy", block=3)
    [score] = duel.log_prob(TEXTS[:1])
    [path] = duel.follow(TEXTS[:1], [reversed_order(score.reveal_steps)])
    first, *_ = path.differences
    assert first.step == 0
    assert not first.near_tie


def reversed_order(steps):
    """The last step first."""
    return [max(steps) - step for step in steps]


def test_a_departure_names_a_target_position_of_its_block():
    """On the row's grid the first block begins in the context."""
    duel = Duel(Toy(length=8), "greedy", block=4, grid="row")
    window = Window((1, 0), (0, 2, 1, 0))
    [score] = duel.log_prob([window])
    in_first_block = reversed_order(score.reveal_steps[:2])
    in_second_block = [9 + step for step in reversed_order(score.reveal_steps[2:])]

    [path] = duel.follow([window], [in_first_block + in_second_block])

    begin_at = {departure.block for departure in path.differences}
    assert begin_at == {0, 2}


def test_steps_that_restart_under_a_rule_over_blocks_are_refused():
    duel = Duel(Toy(length=8), "klass:mu=0.41:nu=0.3:kl=authors:across=true", block=3)
    window = Window((), (0, 1, 2, 0, 1, 2))
    [score] = duel.log_prob([window])
    [path] = duel.follow([window], [score.reveal_steps])
    assert path.log_prob == pytest.approx(score.log_prob, abs=1e-9)
    assert not path.differences

    one_block = Duel(Toy(length=8), duel.rule, block=6)
    [score] = one_block.log_prob([window])
    [path] = one_block.follow([window], [score.reveal_steps])
    assert not path.differences, "one block has nothing to restart in"

    with pytest.raises(DuelError, match="do not restart"):
        duel.follow([window], [(0, 1, 2, 0, 1, 2)])
