"""Laws 1 and 19 at the sizes where the code branches: more tokens than one run of columns, rows of more columns than a
piece of the clean stream, several chunks of the head, many windows in one call."""

import random

import pytest
import torch
from attends import Attends
from laws import slow_but, total
from toys import Toy

from lm_eval_duel.audit.checked import CheckedWindow
from lm_eval_duel.audit.recompute import recompute
from lm_eval_duel.core import block_causal, logits
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.cached.denoiser import Cached
from lm_eval_duel.estimators.duel import Autoregressive
from lm_eval_duel.estimators.duel import DuelEstimator as Duel

TOKENS = 2 * logits.RUN + 9  # two runs of columns, and a rest
LENGTH = block_causal.CLEAN + 80


class ByBlocks(Attends):
    """A network that attends by blocks."""

    attention = "block_causal"
    block = 16


class Prefix(ByBlocks):
    """A causal prefix, and blocks that see it and themselves."""

    attention = "causal_prefix"
    seeds_blocks = True


class Shifted(ByBlocks):
    """An autoregressive network."""

    attention = "causal"
    block = None

    def features(self, ids, real):
        column = torch.arange(ids.shape[1])
        return self.stream(ids, column[None], (column[:, None] >= column)[None], None)[0]


def tokens(count, seed=0):
    return tuple(random.Random(seed).choices(range(TOKENS), k=count))


def agree(estimator, windows):
    """Assert that the reference gives the same values, without a tie."""
    for window, score in zip(windows, estimator.log_prob(windows), strict=True):
        again = recompute(estimator, window, score)
        compared = CheckedWindow("", window, score.log_prob, again)
        assert not compared.problems
        assert compared.difference < 1e-8
        assert again.ties == 0


@pytest.mark.parametrize("rule", slow_but(["greedy:k=1", "threshold:mu=0.02"], ["threshold:mu=0.02"]))
def test_sums_to_one_over_many_tokens(rule):
    count = TOKENS - 60
    duel = Duel(Toy(count, length=2), rule, 2)

    assert abs(total(duel, 2, tokens=count) - 1) < 1e-9


@pytest.mark.parametrize("rule", ["greedy", "margin", "log_margin", "entropy", "threshold:mu=0.2"])
def test_every_rule_over_many_tokens(rule):
    agree(Duel(Attends(TOKENS, 60, layers=1), rule, 25), [Window(tokens(4, 1), tokens(50, 2))])


@pytest.mark.parametrize(
    ("network", "rule", "block"),
    [
        (Attends(TOKENS, LENGTH, layers=1), "greedy:k=24", 48),
        (Cached(Attends(TOKENS, LENGTH, layers=1), "dual"), "margin:k=24", 48),
        pytest.param(ByBlocks(TOKENS, LENGTH, layers=1), "entropy:k=4", "auto", marks=pytest.mark.slow),
        (Prefix(TOKENS, LENGTH, layers=1), "greedy:k=4", "auto"),
    ],
    ids=["bidirectional", "cached", "block-causal", "causal prefix"],
)
def test_long_rows_equal_the_reference(network, rule, block):
    """A context of more than a piece of the clean stream, and a target of that length."""
    long = block_causal.CLEAN + 10
    windows = [Window(tokens(long, 1), tokens(50, 2)), Window(tokens(20, 3), tokens(long, 4))]
    agree(Duel(network, rule, block), windows if network.by_blocks else windows[:1])


def test_a_long_text_under_an_autoregressive_network():
    network = Shifted(TOKENS, LENGTH, layers=1, shift=1)
    window = Window(tokens(1), tokens(LENGTH - 1, 2))

    agree(Autoregressive(network), [window])
