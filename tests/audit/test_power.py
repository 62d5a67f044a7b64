"""The power of the audit: how small a difference it calls one, whatever the length of the text."""

import dataclasses
import math

import pytest
from toys import Toy

from lm_eval_duel.audit.checked import CheckedWindow
from lm_eval_duel.audit.from_text import FromText
from lm_eval_duel.audit.recompute import Recomputed, recompute
from lm_eval_duel.cli.audited_run import totals_problems
from lm_eval_duel.core.float_noise import nats_tolerance
from lm_eval_duel.core.scores import Score
from lm_eval_duel.core.windows import Window
from lm_eval_duel.estimators.arguments import ElboArguments
from lm_eval_duel.estimators.duel import DuelEstimator
from lm_eval_duel.estimators.elbo import Elbo
from lm_eval_duel.estimators.lattice import Lattice

SIZES = (1, 10, 100, 1_000, 10_000, 100_000)


def allowed(tokens):
    """The largest tolerance that a float32 score may have, in nats."""
    return 1e-4 + 2e-6 * tokens


@pytest.mark.parametrize("tokens", SIZES)
def test_the_tolerance_is_that_of_float32_sums(tokens):
    assert 0 < nats_tolerance(tokens) <= allowed(tokens)


@pytest.mark.parametrize("tokens", (10, 1_000, 10_000))
@pytest.mark.parametrize("sign", (1, -1))
def test_a_difference_of_twice_that_is_one(tokens, sign):
    window = Window((), (1,) * tokens)
    value = -3.7 * tokens
    right = CheckedWindow("here", window, value, Recomputed(value))
    assert not right.differs
    assert CheckedWindow("here", window, value, Recomputed(value + sign * 2 * allowed(tokens))).differs
    assert CheckedWindow("here", window, value, Recomputed(math.nan)).differs
    assert CheckedWindow("here", window, -math.inf, Recomputed(value)).differs


@pytest.mark.parametrize("tokens", (10, 1_000, 10_000))
@pytest.mark.parametrize("size", (1, 10), ids=["windows of one token", "windows of ten"])
def test_many_short_windows_do_not_add_up_their_tolerances(tokens, size):
    """The sum of a task, in its results and as printed, is held to the tolerance of all its tokens together."""
    window = Window((), (1,) * size)
    count = tokens // size
    value = -3.7 * size
    score = Score(value, nfe=size)
    windows = [CheckedWindow("task t, document 0", window, value, Recomputed(value), n, score) for n in range(count)]
    total = count * value
    texts = FromText("t", None, "none", 100)
    texts.log_prob = total
    texts.tokens = tokens
    texts.ids[1] = tokens
    estimator = DuelEstimator(Toy(), "greedy", 3)

    def problems(moved):
        values = {"duel": {"log_prob": total + moved, "stderr": None, "window_stderr": None}}
        printed = {"token_perplexity": math.exp(-(total + moved) / tokens)}
        return [*totals_problems(estimator, windows, values)], texts.differing(printed)

    assert problems(0.0) == ([], [])
    for sign in (1, -1):
        in_results, as_printed = problems(sign * 2 * allowed(tokens))
        assert in_results and as_printed


WINDOW = Window((1,), (2, 0, 1, 1, 2))
ESTIMATORS = {
    "duel": lambda: DuelEstimator(Toy(), "greedy", 3),
    "elbo": lambda: Elbo(Toy(), ElboArguments(16)),
    "all orders": lambda: Lattice(Toy(), 3, value="mixture"),
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_each_number_of_a_score_is_held_to_that(name):
    """The value, its error, the other values of the same window, and each token: one of them moved is found."""
    estimator = ESTIMATORS[name]()
    [score] = estimator.log_prob([WINDOW])

    def found(other):
        return CheckedWindow("here", WINDOW, other.log_prob, recompute(estimator, WINDOW, other)).problems

    assert not found(score)
    moved = 2 * allowed(len(WINDOW.target))
    assert found(dataclasses.replace(score, log_prob=score.log_prob + moved))
    if score.stderr is not None:
        assert found(dataclasses.replace(score, stderr=score.stderr / 2))
        assert found(dataclasses.replace(score, stderr=score.stderr * 1.01))
        assert found(dataclasses.replace(score, stderr=None))
    if score.token_logprobs and name == "duel":
        tokens = [score.token_logprobs[0] + moved, score.token_logprobs[1] - moved, *score.token_logprobs[2:]]
        assert found(dataclasses.replace(score, token_logprobs=tuple(tokens)))
    for other, value in score.others.items():
        others = {**score.others, other: dataclasses.replace(value, log_prob=value.log_prob + moved)}
        assert found(dataclasses.replace(score, others=others)), other
