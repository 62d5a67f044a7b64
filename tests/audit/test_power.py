"""The power of the audit: how small a difference it calls one, whatever the length of the text."""

import dataclasses
import math

import dit_reference
import pytest
import torch
from laws import slow_but
from toys import Toy

from lm_eval_duel import denoisers
from lm_eval_duel.audit import network_check
from lm_eval_duel.audit.checked import CheckedWindow, Recomputed
from lm_eval_duel.audit.from_text import FromText
from lm_eval_duel.audit.network_check import Deviations
from lm_eval_duel.audit.recompute import recompute
from lm_eval_duel.cli.audited_run import totals_problems
from lm_eval_duel.core.float_noise import nats_tolerance
from lm_eval_duel.core.scores import Score
from lm_eval_duel.core.windows import Window
from lm_eval_duel.estimators.arguments import ElboArguments
from lm_eval_duel.estimators.duel import DuelEstimator
from lm_eval_duel.estimators.elbo import Elbo
from lm_eval_duel.estimators.lattice import Lattice
from lm_eval_duel.options import Options

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
        assert in_results
        assert as_printed


WINDOW = Window((1,), (2, 0, 1, 1, 2))
ESTIMATORS = {
    "duel": lambda: DuelEstimator(Toy(), "greedy", 3),
    "elbo": lambda: Elbo(Toy(), ElboArguments(16)),
    "all orders": lambda: Lattice(Toy(), 3, estimator="mixture"),
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_each_number_of_a_score_is_held_to_that(name):
    """The value, its error, the other values of the same window, and each token: one of them moved is found."""
    estimator = ESTIMATORS[name]()
    [score] = estimator.log_prob([WINDOW])

    def problems(**changes):
        changed = dataclasses.replace(score, **changes)
        again = recompute(estimator, WINDOW, changed)
        return CheckedWindow("here", WINDOW, changed.log_prob, again).problems

    moved = 2 * allowed(len(WINDOW.target))
    assert not problems()
    assert problems(log_prob=score.log_prob + moved)
    if score.stderr is not None:
        assert problems(stderr=score.stderr / 2)
        assert problems(stderr=score.stderr * 1.01)
        assert problems(stderr=None)
    if score.token_logprobs and name == "duel":
        first, second, *rest = score.token_logprobs
        assert problems(token_logprobs=(first + moved, second - moved, *rest))
    for other, value in score.others.items():
        wrong = dataclasses.replace(value, log_prob=value.log_prob + moved)
        assert problems(others={**score.others, other: wrong}), other


# ---------------------------------------------------------------- the network


def compared(positions, moved):
    """The comparison of one row whose log-probabilities are moved by `moved` (positions, 3)."""
    log_probs = torch.randn(positions, 3, dtype=torch.float64).log_softmax(1)
    log_probs[:, 2] = -math.inf  # no token
    deviations = Deviations()
    deviations.add(0, log_probs + moved, log_probs, torch.zeros(positions, dtype=torch.int64))
    return deviations.compared("another program", Toy())


@pytest.mark.parametrize("positions", (1, 10, 100, 1_000, 10_000))
@pytest.mark.parametrize("sign", (1, -1))
def test_a_network_is_held_to_that(positions, sign):
    """One log-probability, of the token of the text or of another one; and all of a row, a little each."""
    moved = torch.zeros(positions, 3, dtype=torch.float64)
    assert not compared(positions, moved).differs
    for token in (0, 1):
        one = moved.clone()
        one[-1, token] = sign * 2 * allowed(1)
        assert compared(positions, one).differs
    assert compared(positions, moved + sign * 2 * allowed(positions) / positions).differs
    for value in (math.nan, math.inf, -math.inf):
        one = moved.clone()
        one[-1, 1] = value
        assert compared(positions, one).differs


@pytest.mark.parametrize("name", slow_but(["bd3lm", "demo-bd", "demo-duo"], ["bd3lm"]))
def test_a_logit_of_twice_that_is_a_difference_of_the_network(name, tmp_path, monkeypatch):
    pretrained = name if name.startswith("demo") else dit_reference.write(tmp_path, name)[0]
    denoiser = denoisers.load(pretrained, device="cpu")
    options = Options.parse({"pretrained": pretrained, "device": "cpu"})
    head = denoiser.head
    moved = torch.zeros(denoiser.vocab_size)
    moved[7] = 2 * allowed(1) / 0.8  # at some position it has a probability below 0.2

    def compared_network():
        found, _ = network_check.compare(options, denoiser, "cpu")
        return found[0]

    assert not compared_network().differs
    monkeypatch.setattr(denoiser, "head", lambda features: head(features) + moved)
    assert compared_network().differs
