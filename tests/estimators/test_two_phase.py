"""The two-phase estimate: unbiased, with intervals that cover (law 16); the same sample in every batch and order."""

import math
import random

import pytest
import torch
from attends import Attends
from laws import slow_but

from lm_eval_duel.core.scores import Counts
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.cached.denoiser import Cached, under_cache
from lm_eval_duel.denoisers.filters import warped
from lm_eval_duel.denoisers.wrappers import Guided
from lm_eval_duel.estimators import two_phase as block_sample
from lm_eval_duel.estimators.arguments import TwoPhaseArguments
from lm_eval_duel.estimators.duel import DuelEstimator
from lm_eval_duel.estimators.totals import FEW, TwoPhaseBlocks
from lm_eval_duel.estimators.two_phase import TwoPhase

RULES = ["greedy:k=1", "left_to_right:k=2", "threshold:mu=0.45", "klass:mu=0.4:nu=0.3"]


def texts(count, lengths=(10, 7), seed=0):
    """Windows of random tokens, some of them equal."""
    draw = random.Random(seed)
    windows = []
    for _ in range(count):
        length = draw.choice(lengths)
        windows.append(Window((), [draw.randrange(3) for _ in range(length)]))
    return windows


MIXED = [
    *texts(6),
    Window((1,), (0, 2, 1, 1, 2)),
    Window((0, 2), (1, 1, 2, 0), (1,)),
    Window((2,), (0, 1, 2), tail=3),
    Window((), ()),
]


def per_block(duel, windows):
    """The log-prob of each block of each window, as planes (N, B) with zeros beyond."""
    planes = []
    for window, score in zip(windows, duel.log_prob(windows), strict=True):
        starts = [start - len(window.context) for start, _ in duel.blocks(window)]
        ends = [*starts[1:], len(window.target)]
        log_probs = []
        for start, end in zip(starts, ends, strict=True):
            log_probs.append(math.fsum(score.token_logprobs[max(0, start) : end]))
        planes.append(torch.tensor(log_probs, dtype=torch.float64))
    return torch.nn.utils.rnn.pad_sequence(planes, batch_first=True)


def blocks_of(scores):
    """The blocks of all windows."""
    return sum((score.blocks for score in scores), TwoPhaseBlocks())


# ---------------------------------------------------------------- law 16


@pytest.mark.parametrize(("rule", "cache"), list(zip(RULES, ["dual", "prefix"] * 2, strict=True)))
def test_with_every_block_in_the_sample_it_is_the_exact_value(rule, cache):
    toy = Attends(length=10)
    exact = DuelEstimator(toy, rule, 3).log_prob(MIXED)
    full = TwoPhase(toy, rule, 3, TwoPhaseArguments(1.0), cache=cache).log_prob(MIXED)
    for estimate, value in zip(full, exact, strict=True):
        assert estimate.log_prob == pytest.approx(value.log_prob, abs=1e-9)
        assert estimate.stderr == 0


@pytest.mark.parametrize(("rule", "block"), [("greedy:k=1", 1), ("greedy:k=3", 3), ("threshold:mu=0.0", 4)])
def test_blocks_that_take_one_step_have_no_sampling_error(rule, block):
    """The first step of a block reads no kept keys, and what float noise makes of the two phases is no error."""
    toy = Attends(length=10)
    for sample in (0.3, 1.0):
        estimator = TwoPhase(toy, rule, block, TwoPhaseArguments(sample))
        blocks = blocks_of(estimator.log_prob(texts(8)))
        assert blocks.sampled
        assert blocks.error == 0.0


def both_phases(count):
    """Values f and g of each block (N, B) of some texts, their keys and their numbers of blocks."""
    toy = Attends(length=12)
    windows = list(dict.fromkeys(texts(150, lengths=(12, 10, 5), seed=1)))[:count]
    exact = DuelEstimator(toy, "greedy", 3)
    cached = DuelEstimator(Cached(toy, "dual"), "greedy", 3)
    keys = [window.key for window in windows]
    blocks = [len(exact.blocks(window)) for window in windows]
    return per_block(exact, windows), per_block(cached, windows), keys, blocks


@pytest.mark.parametrize("share", slow_but([0.3, 0.8], [0.3]))
def test_unbiased_and_covering_over_seeds(share):
    """Unbiased; its estimate of the variance, too; 95 % intervals cover 93 to 97 % of 1,000 seeds."""
    seeds = 1000
    f, g, keys, blocks = both_phases(150)
    exact = f.sum()

    estimates = []
    variances = []
    for seed in range(seeds):
        weights = block_sample.block_sample_weights(keys, blocks, share, seed)
        estimate, variance = block_sample.combine(g, f, weights)
        estimates.append(estimate.sum())
        variances.append(variance.sum())
    estimates = torch.stack(estimates)
    variances = torch.stack(variances)

    assert abs(estimates.mean() - exact) < 4 * estimates.std() / math.sqrt(seeds)
    error = estimates.var() * math.sqrt(2 / seeds) + variances.std() / math.sqrt(seeds)
    assert abs(variances.mean() - estimates.var()) < 4 * error
    covered = (estimates - exact).abs() < 1.96 * variances.sqrt()
    assert 0.93 <= covered.double().mean() <= 0.97


def test_intervals_cover_from_the_fewest_drawn_blocks_on():
    """Law 20: of the samples that have a standard error at all, in which about 11 blocks are drawn."""
    covered = []
    f, g, keys, blocks = both_phases(30)
    for seed in range(400):
        weights = block_sample.block_sample_weights(keys, blocks, 0.1, seed)
        if (weights > 0).sum() < FEW:
            continue
        estimate, variance = block_sample.combine(g, f, weights)
        distance = (estimate.sum() - f.sum()).abs()
        covered.append(bool(distance <= 1.96 * variance.sum().sqrt()))
    assert len(covered) > 100
    assert sum(covered) >= 0.9 * len(covered)


# ---------------------------------------------------------------- cost


def test_only_the_sampled_blocks_are_evaluated_without_the_cache():
    toy = Attends(length=10)
    windows = list(dict.fromkeys(texts(40)))
    tokens = sum(len(window.target) for window in windows)
    estimator = TwoPhase(toy, "left_to_right", 2, TwoPhaseArguments(0.25))

    scores = estimator.log_prob(windows)

    assert blocks_of(scores).count == sum(len(estimator.blocks(window)) for window in windows)
    counts = estimator.counts
    cached = counts.phases["cached"]
    uncached = counts.phases["uncached"]
    assert counts.phases.keys() == {"cached", "uncached"}
    assert 0 < uncached.rows < tokens / 2
    assert cached.rows <= tokens
    assert counts.rows == cached.rows + uncached.rows
    assert counts.forwards == cached.forwards + uncached.forwards
    assert cached.seconds > 0
    assert uncached.seconds > 0

    again = estimator.with_counts(Counts())
    again.log_prob(windows)
    assert again.counts.rows == counts.rows


def test_what_both_phases_count_adds_up():
    class Relative(Attends):
        relative_positions = True

    toy = Relative(length=10)
    windows = texts(10)
    both = TwoPhase(toy, "greedy", 3, TwoPhaseArguments(1.0)).log_prob(windows)
    uncached = DuelEstimator(toy, "greedy", 3).log_prob(windows)
    cached = DuelEstimator(Cached(toy, "dual"), "greedy", 3).log_prob(windows)

    for score, target_phase, cheap_phase in zip(both, uncached, cached, strict=True):
        assert score.near_ties == target_phase.near_ties + cheap_phase.near_ties
        assert score.all_mask_starts == target_phase.all_mask_starts + cheap_phase.all_mask_starts == 2


def test_too_few_drawn_blocks_have_no_standard_error():
    toy = Attends(length=10)
    estimator = TwoPhase(toy, "greedy", 3, TwoPhaseArguments(0.02))

    blocks = blocks_of(estimator.log_prob(texts(10)))

    assert blocks.drawn < 8
    assert blocks.stderr is None


def test_blocks_that_all_happen_to_be_drawn_have_an_unknown_error():
    """A weight above 1 stands for blocks that another draw would leave out. Without any, nothing is drawn."""
    f = torch.tensor([-3.0, -2.0], dtype=torch.float64)
    g = torch.tensor([-3.5, -2.5], dtype=torch.float64)

    for weights, stderr in (([1.0, 1.0], 0.0), ([1.0, 1.5], None)):
        blocks = TwoPhaseBlocks.from_blocks(g, f, torch.tensor(weights), variance=0.0)
        assert blocks.stderr == stderr


def test_the_correlation_is_that_of_the_sampled_blocks():
    toy = Attends(length=10)
    estimator = TwoPhase(toy, "greedy", 3, TwoPhaseArguments(0.5))

    scores = estimator.log_prob(texts(40))

    cached = []
    uncached = []
    for score in scores:
        blocks = score.blocks
        uncached += blocks.uncached
        cached += [value for value, weight in zip(blocks.cached, blocks.weights, strict=True) if weight]
    expected = torch.corrcoef(torch.tensor([uncached, cached]).double())[0, 1]
    assert blocks_of(scores).correlation == pytest.approx(expected.item())


# ---------------------------------------------------------------- wrappers


def test_guidance_and_temperature_stay_around_the_cached_network():
    toy = Attends(length=10)
    wrapped = warped(Guided(toy, 0.5), 0.7)
    cheap = under_cache(wrapped, "dual")
    assert "cache" not in wrapped.describe()
    assert cheap.describe() == {**wrapped.describe(), "cache": "dual"}

    windows = [Window((1,), (0, 2, 1, 1, 2))]
    cached_inside = warped(Guided(Cached(toy, "dual"), 0.5), 0.7)
    [score] = TwoPhase(wrapped, "greedy", 3, TwoPhaseArguments(1.0)).log_prob(windows)
    [exact] = DuelEstimator(wrapped, "greedy", 3).log_prob(windows)
    [cached] = DuelEstimator(cheap, "greedy", 3).log_prob(windows)
    [expected] = DuelEstimator(cached_inside, "greedy", 3).log_prob(windows)

    assert score.log_prob == pytest.approx(exact.log_prob, abs=1e-9)
    assert sum(score.blocks.cached) == pytest.approx(cached.log_prob, abs=1e-9)
    assert cached.log_prob == pytest.approx(expected.log_prob, abs=1e-9)
