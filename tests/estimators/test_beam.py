"""Sums over orders by a beam over sets: a bound, or an estimate whose error covers; with all sets the exact value."""

import math
import statistics

import pytest
from attends import Attends
from laws import slow_but, strings
from toys import BlockCausal, Rotary, Toy

from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.cached.denoiser import Cached
from lm_eval_duel.denoisers.wrappers import Warped
from lm_eval_duel.estimators.blocks import BeamBlocks
from lm_eval_duel.estimators.registry import Kind, kind_of
from lm_eval_duel.estimators.subsets import set_sampler as chunk
from lm_eval_duel.estimators.subsets.samplers import SampledConfidence, SampledOrder
from lm_eval_duel.estimators.totals import Total
from lm_eval_duel.harness.store import decode_request, encode_request

SAMPLERS = {
    "one a step": (SampledConfidence, {}),
    "two a step": (SampledConfidence, {"n": 2}),
    "threshold": (SampledConfidence, {"tau": 0.4}),
    "at least two": (SampledConfidence, {"n": 2, "tau": 0.45, "confidence": "tempered"}),
    "random": (SampledOrder, {"alg": "random", "steps": 5}),
    "entropy": (SampledOrder, {"alg": "entropy", "steps": 5, "alg_temp": 0.5}),
    "origin": (SampledOrder, {"alg": "origin", "steps": 6}),
}
TEXTS = [(0, 2, 1, 1, 2, 0, 1, 1), (1, 1, 0, 2, 2, 0, 0, 2), (2, 0, 0, 1, 1, 2, 1, 0, 1)]  # blocks of 8, and of one
WINDOWS = [
    *(Window((1,), text) for text in TEXTS),
    Window((1, 2), TEXTS[1], (0,), tail=2),
    Window((2, 1), (1,), (0,)),
    Window((), ()),
]


def toy():
    return Warped(Toy(length=14, seed=3, scale=0.1), 0.8)


def made(sampler, network=None, block=8, **more):
    kind, settings = SAMPLERS[sampler]
    return kind(toy() if network is None else network, block, **settings, **more)


NETWORKS = {
    "bidirectional": (toy, WINDOWS, "auto"),
    "all-mask start": (lambda: Rotary(length=14, seed=5), [Window((), TEXTS[0])], "auto"),
    "block-causal": (lambda: BlockCausal(block=8, length=16, seed=2), [Window((1,), TEXTS[0][:7])], "row"),
    "dual cache": (lambda: Cached(Attends(length=14), "dual"), [Window((1,), TEXTS[0])], "auto"),
    "grid of rows": (toy, [Window((1, 0, 2), TEXTS[2])], "row"),
}
CASES = [*((sampler, "bidirectional") for sampler in SAMPLERS), *(("two a step", name) for name in NETWORKS)]
LONG = [Window((1,), text, (2,)) for text in strings(3, 10)[3**10 // 16 :: 3**10 // 8]]  # 8 texts, blocks of 10


@pytest.mark.parametrize(("sampler", "network"), dict.fromkeys(CASES))
def test_with_all_sets_it_is_the_exact_value_and_with_fewer_the_bound_is_below(sampler, network):
    network, windows, grid = NETWORKS[network]
    all_sets = {"beam": 4095} if "two" in sampler else {"tolerance": 1e-9}
    exact, every, few = (
        made(sampler, network(), grid=grid, **more).log_prob(windows) for more in ({}, all_sets, {"beam": 16})
    )
    for score, known in zip(every, exact, strict=True):
        of = score.blocks
        assert score.log_prob == pytest.approx(known.log_prob, abs=1e-9) and of.exact == of.count
        assert of.bound == pytest.approx(score.log_prob, abs=1e-9) and score.is_greedy == known.is_greedy
        assert score.nfe == known.nfe and score.stderr is known.stderr is None
        assert score.kind is known.kind is Kind.LIKELIHOOD
    assert all(score.blocks.bound <= known.log_prob + 1e-9 for score, known in zip(few, exact, strict=True))
    assert all((score.kind is Kind.UPPER_BOUND) == (score.blocks.bounded > 0) for score in few)
    if len(windows) > 1:
        assert any(score.blocks.bound < known.log_prob - 1e-6 for score, known in zip(few, exact, strict=True))


chunk_log_mean = chunk.log_mean


def ratios(sampler, seeds, windows, monkeypatch):
    """Of the estimate to the exact probability, one for each window and seed; and their standard errors, as told."""
    exact = made(sampler).log_prob(windows)
    found, errors, estimates = [], [], []

    def log_mean(value):
        estimates.append(chunk_log_mean(value))
        return estimates[-1]

    monkeypatch.setattr(chunk, "log_mean", log_mean)
    for seed in range(seeds):
        estimates.clear()
        made(sampler, beam=16, seed=seed).log_prob(windows)
        [(means, stderrs)] = estimates  # one chunk
        for known, estimate, stderr in zip(exact, means.tolist(), stderrs.tolist(), strict=True):
            found.append(math.exp(estimate - known.log_prob))
            errors.append(found[-1] * stderr)
    return found, errors


SOME = [Window((1,), text, (2,)) for text in strings(3, 8)[:: 3**8 // 25]]


@pytest.mark.parametrize("sampler", slow_but(["one a step", "threshold", "origin"], ["one a step"]))
def test_the_estimate_of_the_probability_is_unbiased(sampler, monkeypatch):
    """The mean is one within 4 standard errors, and the errors that are told have the size of the spread."""
    found, errors = ratios(sampler, 8, SOME[:12], monkeypatch)
    assert abs(statistics.mean(found) - 1) < 4 * statistics.stdev(found) / math.sqrt(len(found))
    told, spread = math.sqrt(statistics.mean(error**2 for error in errors)), statistics.stdev(found)
    assert 0.7 < told / spread < 1.4


def test_other_seeds_draw_other_sets():
    scores = [made("one a step", beam=16, seed=seed).log_prob(WINDOWS[:1])[0] for seed in (5, 6)]
    assert scores[0].blocks.bound != scores[1].blocks.bound


def test_sets_double_until_the_tolerance_and_are_not_evaluated_again():
    windows = LONG[:1]
    exact = made("random", block=10).log_prob(windows)
    estimator = made("random", block=10, tolerance=0.3)
    scores = estimator.log_prob(windows)
    for score, known in zip(scores, exact, strict=True):
        of = score.blocks
        assert of.converged == of.count == 1 and score.kind is Kind.ESTIMATE
        assert abs(score.log_prob - known.log_prob) <= 1.96 * score.stderr and 0 < score.stderr <= 0.3
        assert of.rows == estimator.counts.rows < 1023
    [stopped] = made("one a step", beam=32, tolerance=1e-12).log_prob(WINDOWS[3:4])
    of = stopped.blocks
    assert of.converged == 0 and stopped.log_prob == of.bound
    assert stopped.stderr is None and stopped.kind is Kind.UPPER_BOUND


def test_blocks_of_several_widths_double_with_any_number_of_repetitions():
    """A short block has no sets of the sizes of a long one, and the first beam has two sets for each repetition."""
    windows = [Window((), (0, 2, 1, 1, 2, 0, 1, 1, 2, 0, 1)), Window((), (2, 1, 0))]
    exact = made("origin").log_prob(windows)
    for more in ({"beam": 100}, {"repetitions": 20}):
        scores = made("origin", tolerance=1e-9, **more).log_prob(windows)
        for score, known in zip(scores, exact, strict=True):
            of = score.blocks
            assert of.bound <= known.log_prob + 1e-9 and of.bound == pytest.approx(known.log_prob, abs=0.1)
            assert of.bounded or score.log_prob == pytest.approx(known.log_prob, abs=1e-9)


@pytest.mark.parametrize("sampler", slow_but(["random", "entropy"], ["random"]))
def test_a_told_error_covers(sampler):
    """Law 20, where the first two beams are off by nats, the standard error of their repetitions by a third of one."""
    network = Toy(length=14, seed=3, scale=1.0)
    exact = made(sampler, network, block=10).log_prob(LONG)
    held = []
    for seed in range(2):
        scores = made(sampler, network, block=10, tolerance=3, seed=seed).log_prob(LONG)
        assert all((score.stderr or 0.0) <= 3 for score in scores)
        pairs = [pair for pair in zip(exact, scores, strict=True) if pair[1].kind is Kind.ESTIMATE]
        held += [abs(score.log_prob - known.log_prob) <= 1.96 * score.stderr for known, score in pairs]
    assert len(held) >= len(LONG) and sum(held) >= 0.9 * len(held)


def test_an_estimate_is_not_below_its_own_bound():
    """On this network the mean of the repetitions is, by up to 0.9 nats."""
    scores = made("random", Toy(length=14, seed=3, scale=3.0), block=10, tolerance=6).log_prob(LONG)
    assert sum(score.kind is Kind.ESTIMATE for score in scores) > len(LONG) / 2
    assert all(score.log_prob >= score.blocks.bound - 1e-9 for score in scores)


def test_a_converged_block_above_12_positions_is_not_proven():
    network, text = Toy(length=15, seed=3, scale=0.3), (0, 2, 1, 1, 2, 0, 1, 1, 2, 0, 1, 2, 2)
    estimator = made("random", network, block=13, tolerance=50, beam=128)
    scores = estimator.log_prob([Window((1,), text), Window((1,), text[:10])])
    assert [(score.blocks.converged, score.blocks.unproven) for score in scores] == [(1, 1), (1, 0)]


def test_errors_of_blocks_add_up():
    """They have one sign as a rule, so a root of squares would be too small for many blocks."""
    network = Toy(length=14, seed=3, scale=1.0)
    estimator = made("random", network, block=10, tolerance=3)
    scores = estimator.log_prob(LONG[:3])
    total = Total.from_scores(LONG[:3], scores, estimator.name)
    assert total.stderr == pytest.approx(sum(score.stderr for score in scores)) and total.stderr > 0


def test_a_value_is_an_estimate_or_a_bound_and_says_so():
    spec = {"beam": "64"}
    assert kind_of("sampled_order", {}) == Kind.LIKELIHOOD.value
    assert kind_of("sampled_order", spec, BeamBlocks(count=2, exact=2)) == Kind.LIKELIHOOD.value
    assert kind_of("sampled_order", spec, BeamBlocks(count=2, converged=1)) == Kind.UPPER_BOUND.value
    labels = {kind_of("sampled_order", spec, BeamBlocks(1, converged=1, unproven=n)) for n in (0, 1)}
    assert len(labels) == 2 and not labels & {Kind.LIKELIHOOD.value, Kind.UPPER_BOUND.value}
    estimator = made("random", beam=16)
    scores = estimator.log_prob(WINDOWS[:3])
    total = Total.from_scores(WINDOWS[:3], scores, estimator.name)
    read = decode_request(encode_request(scores), 3)
    assert Total.from_scores(WINDOWS[:3], read, estimator.name).blocks == total.blocks
    assert total.beam.only_bounded and total.stderr is None and total.describe()["stderr"] is None
    assert total.beam == sum((score.blocks for score in scores), BeamBlocks())
    assert total.beam.kind is Kind.UPPER_BOUND and total.beam.count == 4
    described = total.describe()["beam"]
    assert described["bound"] <= total.log_prob + 1e-9 and described["kind"] == "bound"
    assert BeamBlocks.read(described) == total.beam


def test_a_sample_carries_the_error_and_the_bound_of_its_value():
    estimator, contexts = made("two a step", beam=16), [(1,), (2, 0)]
    drawn = estimator.sample(contexts, 8, seed=3)
    windows = [Window(context, one.tokens) for context, one in zip(contexts, drawn, strict=True)]
    for one, score in zip(drawn, estimator.log_prob(windows), strict=True):
        assert one.log_prob == pytest.approx(score.log_prob, abs=1e-12) and one.kind is score.kind
        assert vars(one.blocks) == pytest.approx(vars(score.blocks))
    [none] = estimator.sample([(1,)], 0)
    assert none.log_prob == 0 and none.tokens == ()
