"""Windows with known target positions: the joint of any set of positions given all others."""

import itertools
import math

import pytest
from toys import Toy

from lm_eval_duel import Duel, Window, reference
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.totals import Total

RULES = ["greedy", "left_to_right", "right_to_left:k=2", "margin:k=2", "entropy", "threshold:mu=0.5", "random"]
CONTEXT = (1,)
TARGET = (0, 2, 1, 1, 0, 2)
SUFFIX = (2,)
KNOWN = (1, 2, 4)


def fillings(known=KNOWN):
    """Windows with every string at the positions that are not known."""
    windows = []
    masked = [index for index in range(len(TARGET)) if index not in known]
    for tokens in itertools.product(range(3), repeat=len(masked)):
        target = list(TARGET)
        for index, token in zip(masked, tokens, strict=True):
            target[index] = token
        windows.append(Window(CONTEXT, target, SUFFIX, known=known))
    return windows


def by_the_reference(toy, window):
    """log p of the unknown targets as one block, by Algorithm 2."""

    def network(z):
        return toy.features(z[None], None)[0].masked_fill(toy.excluded, -math.inf)

    x = [*window.context, *window.target, *window.suffix]
    unknown = [1 + index for index in range(len(window.target)) if index not in window.known]
    return reference.log_likelihood(x, [unknown], network, reference.greedy(), toy.mask_id).ll


@pytest.mark.parametrize(("rule", "block"), list(zip(RULES, [None, 2, 4, None, 2, 4, 2], strict=True)))
def test_probabilities_of_all_fillings_sum_to_one(rule, block):
    scores = Duel(Toy(), rule=rule, block=block).log_prob(fillings())

    assert math.fsum(math.exp(score.log_prob) for score in scores) == pytest.approx(1, abs=1e-9)
    for score in scores:
        assert math.fsum(score.token_logprobs) == pytest.approx(score.log_prob, abs=1e-9)
        for index, step in enumerate(score.reveal_steps):
            assert (step == -1) == (index in KNOWN)
        for index in KNOWN:
            assert score.token_logprobs[index] == 0.0


def test_the_joint_is_that_of_the_reference_alone_and_in_a_batch():
    toy = Toy()
    windows = [*fillings()[::3], *fillings((0, 5))[::9], Window(CONTEXT, TARGET, SUFFIX)]
    duel = Duel(toy, rule="greedy", block=None)

    together = duel.log_prob(windows)

    for window, score in zip(windows, together, strict=True):
        assert score.log_prob == pytest.approx(by_the_reference(toy, window), abs=1e-9)
        [alone] = Duel(toy, rule="greedy", block=None, batch_size=1).log_prob([window])
        assert alone.reveal_steps == score.reveal_steps
        assert alone.nfe == len(TARGET) - len(window.known)
    unknown = sum(score.nfe for score in together)
    assert duel.counts.tokens == unknown
    assert Total.from_scores(windows, together, "duel").tokens == unknown


def test_a_block_with_nothing_to_score_is_left_out_though_it_begins_inside_the_context():
    """Context, four targets in blocks of three by rows: 1 0 2 | 1 0. The first two targets are known."""
    duel = Duel(Toy(), rule="greedy", block=3, grid="row")
    window = Window((1,), (0, 2, 1, 0), known=(0, 1))
    assert duel.estimator.blocks(window) == [(3, 2)]
    assert duel.estimator.blocks(Window((1,), (0, 2, 1, 0), known=(0,))) == [(0, 3), (3, 2)]


def test_perplexity_is_per_scored_token():
    """Two of three tokens are given: the value is that of the one that is scored."""
    window = Window(CONTEXT, TARGET[:3], SUFFIX, known=(0, 1))
    [score] = Duel(Toy(), block=None).log_prob([window])
    assert Total.from_score(window, score, "duel").perplexity == pytest.approx(math.exp(-score.log_prob))


def test_positions_known_at_an_end_are_context_and_blocks_of_known_positions_alone_are_left_out():
    toy = Toy(length=8)
    long = Window(CONTEXT, TARGET, SUFFIX, known=(0, 4, 5))
    short = Window((*CONTEXT, TARGET[0]), TARGET[1:4], (*TARGET[4:], *SUFFIX))
    with_known, expected = Duel(toy, block=None).log_prob([long, short])
    assert with_known.log_prob == pytest.approx(expected.log_prob, abs=1e-12)
    assert with_known.reveal_steps[1:4] == expected.reveal_steps

    duel = Duel(toy, rule="greedy", block=2)
    window = Window(CONTEXT, TARGET, SUFFIX, known=(2, 3))
    [score] = duel.log_prob([window])
    [replayed] = duel.replay([window], [score.reveal_steps])
    assert score.nfe == 4
    assert replayed.log_prob == pytest.approx(score.log_prob, abs=1e-12)


def test_known_is_some_positions_of_the_target():
    for known in ((6,), (-1,), range(6)):
        with pytest.raises(DuelError, match="known"):
            Window(CONTEXT, TARGET, SUFFIX, known=known)
