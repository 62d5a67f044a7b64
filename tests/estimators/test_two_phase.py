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
    draw = random.Random(seed)
    return [Window((), [draw.randrange(3) for _ in range(draw.choice(lengths))]) for _ in range(count)]


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
        planes.append([math.fsum(score.token_logprobs[max(0, a) : b]) for a, b in zip(starts, ends, strict=True)])
    wide = max(map(len, planes))
    return torch.tensor([plane + [0.0] * (wide - len(plane)) for plane in planes], dtype=torch.float64)


def total(scores):
    phases = sum((score.blocks for score in scores), TwoPhaseBlocks())
    return math.fsum(score.log_prob for score in scores), phases


# ---------------------------------------------------------------- law 16


@pytest.mark.parametrize(("rule", "cache"), list(zip(RULES, ["dual", "prefix"] * 2, strict=True)))
def test_with_every_block_in_the_sample_it_is_the_exact_value(rule, cache):
    toy = Attends(length=10)
    exact = DuelEstimator(toy, rule, 3).log_prob(MIXED)
    full = TwoPhase(toy, rule, 3, TwoPhaseArguments(1.0), cache=cache).log_prob(MIXED)
    for one, other in zip(full, exact, strict=True):
        assert one.log_prob == pytest.approx(other.log_prob, abs=1e-9) and one.stderr == 0


@pytest.mark.parametrize(("rule", "block"), [("greedy:k=1", 1), ("greedy:k=3", 3), ("threshold:mu=0.0", 4)])
def test_blocks_that_take_one_step_have_no_sampling_error(rule, block):
    """The first step of a block reads no kept keys, and what float noise makes of the two phases is no error."""
    toy = Attends(length=10)
    for sample in (0.3, 1.0):
        estimator = TwoPhase(toy, rule, block, TwoPhaseArguments(sample))
        _, phases = total(estimator.log_prob(texts(8)))
        assert phases.sampled and phases.error == 0.0


def phases(count):
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
    f, g, keys, blocks = phases(150)
    weights = (block_sample.block_sample_weights(keys, blocks, share, seed) for seed in range(seeds))
    sums = [[x.sum() for x in block_sample.combine(g, f, weight)] for weight in weights]
    means, variances = torch.tensor(sums, dtype=torch.float64).T
    error = means.var() * math.sqrt(2 / seeds) + variances.std() / math.sqrt(seeds)
    assert abs(means.mean() - f.sum()) < 4 * means.std() / math.sqrt(seeds)
    assert abs(variances.mean() - means.var()) < 4 * error
    assert 0.93 <= ((means - f.sum()).abs() < 1.96 * variances.sqrt()).double().mean() <= 0.97


def test_intervals_cover_from_the_fewest_drawn_blocks_on():
    """Law 20: of the samples that have a standard error at all, in which about 11 blocks are drawn."""
    held = []
    f, g, keys, blocks = phases(30)
    for seed in range(400):
        weights = block_sample.block_sample_weights(keys, blocks, 0.1, seed)
        estimate, variance = (part.sum() for part in block_sample.combine(g, f, weights))
        if (weights > 0).sum() >= FEW:
            held.append(bool((estimate - f.sum()).abs() <= 1.96 * variance.sqrt()))
    assert len(held) > 100 and sum(held) >= 0.9 * len(held)


# ---------------------------------------------------------------- cost


def test_only_the_sampled_blocks_are_evaluated_without_the_cache():
    toy = Attends(length=10)
    windows = list(dict.fromkeys(texts(40)))
    estimator = TwoPhase(toy, "left_to_right", 2, TwoPhaseArguments(0.25))
    scores = estimator.log_prob(windows)
    _, phases = total(scores)
    tokens = sum(len(w.target) for w in windows)
    assert phases.count == sum(len(estimator.blocks(window)) for window in windows)
    assert 0 < estimator.counts.phases["uncached"].rows < tokens / 2
    assert estimator.counts.phases["cached"].rows <= tokens
    counts = estimator.counts
    phases = estimator.counts.phases.values()
    assert counts.rows == sum(phase.rows for phase in phases)
    assert counts.forwards == sum(phase.forwards for phase in phases)
    assert all(phase.seconds > 0 for phase in phases)
    again = estimator.with_counts(Counts())
    again.log_prob(windows)
    assert again.counts.rows == counts.rows


def test_what_both_phases_count_adds_up():
    class Relative(Attends):
        relative_positions = True

    toy = Relative(length=10)
    windows = texts(10)
    both = TwoPhase(toy, "greedy", 3, TwoPhaseArguments(1.0)).log_prob(windows)
    phases = [DuelEstimator(network, "greedy", 3).log_prob(windows) for network in (toy, Cached(toy, "dual"))]
    for score, *parts in zip(both, *phases, strict=True):
        assert score.near_ties == sum(part.near_ties for part in parts)
        assert score.all_mask_starts == sum(part.all_mask_starts for part in parts) == 2


def test_too_few_drawn_blocks_have_no_standard_error():
    toy = Attends(length=10)
    windows = texts(10)
    _, phases = total(TwoPhase(toy, "greedy", arguments=TwoPhaseArguments(0.02), block=3).log_prob(windows))
    assert phases.drawn < 8 and phases.stderr is None


def test_the_correlation_is_that_of_the_sampled_blocks():
    toy = Attends(length=10)
    windows = texts(40)
    scores = TwoPhase(toy, "greedy", arguments=TwoPhaseArguments(0.5), block=3).log_prob(windows)
    pairs = []
    for of in (score.blocks for score in scores):
        sampled = [value for value, weight in zip(of.cached, of.weights, strict=True) if weight]
        pairs += zip(of.uncached, sampled, strict=True)
    assert total(scores)[1].correlation == pytest.approx(torch.corrcoef(torch.tensor(pairs).double().T)[0, 1].item())


# ---------------------------------------------------------------- wrappers


def test_guidance_and_temperature_stay_around_the_cached_network():
    toy = Attends(length=10)
    wrapped = warped(Guided(toy, 0.5), 0.7)
    cheap = under_cache(wrapped, "dual")
    assert cheap.describe() == {**wrapped.describe(), "cache": "dual"} and "cache" not in wrapped.describe()
    window = [Window((1,), (0, 2, 1, 1, 2))]
    [score] = TwoPhase(wrapped, "greedy", 3, TwoPhaseArguments(1.0)).log_prob(window)
    [exact], [cached] = (DuelEstimator(denoiser, "greedy", 3).log_prob(window) for denoiser in (wrapped, cheap))
    [own] = DuelEstimator(warped(Guided(Cached(toy, "dual"), 0.5), 0.7), "greedy", 3).log_prob(window)
    assert score.log_prob == pytest.approx(exact.log_prob, abs=1e-9)
    assert sum(score.blocks.cached) == pytest.approx(cached.log_prob, abs=1e-9) == pytest.approx(own.log_prob, abs=1e-9)
