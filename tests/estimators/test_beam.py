"""Sums over orders by a beam over sets: a bound, or an estimate whose error covers; with all sets the exact value."""

import math
import statistics
from pathlib import Path

import pytest
from attends import Attends
from laws import slow_but, strings
from toys import BlockCausal, Rotary, Toy
from transformers import AutoTokenizer

import lm_eval_duel
from lm_eval_duel import load, rules
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.cached.denoiser import Cached
from lm_eval_duel.denoisers.wrappers import Warped
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.blocks import BeamBlocks
from lm_eval_duel.estimators.records import read_request, request_record
from lm_eval_duel.estimators.registry import Kind, kind_of
from lm_eval_duel.estimators.subsets import chunk
from lm_eval_duel.estimators.subsets.sampled_confidence import SampledConfidence
from lm_eval_duel.estimators.subsets.sampled_order import SampledOrder
from lm_eval_duel.estimators.totals import Total
from lm_eval_duel.options import Options

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


BOTH = {(Kind.UPPER_BOUND, True), (Kind.LIKELIHOOD, False)}


def toy():
    return Warped(Toy(length=14, seed=3, scale=0.1), 0.8)


def made(sampler, network=None, block=8, **more):
    kind, settings = SAMPLERS[sampler]
    return kind(toy() if network is None else network, block, **settings, **more)


def sums(scores):
    return [score.blocks for score in scores]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_with_all_sets_it_is_the_exact_value_and_with_fewer_the_bound_is_below(sampler):
    exact = made(sampler).log_prob(WINDOWS)
    every = made(sampler, **({"beam": 4095} if "two" in sampler else {"tolerance": 1e-9})).log_prob(WINDOWS)
    for score, known, of in zip(every, exact, sums(every), strict=True):
        assert score.log_prob == pytest.approx(known.log_prob, abs=1e-9) and of.exact == of.count
        assert of.bound == pytest.approx(score.log_prob, abs=1e-9) and score.is_greedy == known.is_greedy
        assert score.nfe == known.nfe and score.stderr is known.stderr is None
        assert score.kind is known.kind is Kind.LIKELIHOOD
    few = made(sampler, beam=16).log_prob(WINDOWS)
    assert all(of.bound <= known.log_prob + 1e-9 for of, known in zip(sums(few), exact, strict=True))
    assert any(of.bound < known.log_prob - 1e-6 for of, known in zip(sums(few), exact, strict=True))
    assert {(score.kind, of.bounded > 0) for score, of in zip(few, sums(few), strict=True)} == BOTH


LONG = [Window((1,), text, (2,)) for text in strings(3, 10)[3**10 // 16 :: 3**10 // 8]]  # 8 texts, blocks of 10
NETWORKS = {
    "all-mask start": (lambda: Rotary(length=14, seed=5), Window((), TEXTS[0])),
    "block-causal": (lambda: BlockCausal(block=8, length=16, seed=2), Window((1,), TEXTS[0][:7])),
    "dual cache": (lambda: Cached(Attends(length=14), "dual"), Window((1,), TEXTS[0])),
    "grid of rows": (toy, Window((1, 0, 2), TEXTS[2])),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_and_grid(name):
    network, window = NETWORKS[name]
    grid = "row" if name in ("block-causal", "grid of rows") else "auto"
    [exact] = made("two a step", network(), grid=grid).log_prob([window])
    [every] = made("two a step", network(), grid=grid, beam=4095).log_prob([window])
    [few] = made("two a step", network(), grid=grid, beam=16).log_prob([window])
    assert every.log_prob == pytest.approx(exact.log_prob, abs=1e-9)
    assert few.blocks.bound <= exact.log_prob + 1e-9


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


def check_unbiased(found, errors):
    """The mean is one within 4 standard errors, and the errors that are told have the size of the spread."""
    assert abs(statistics.mean(found) - 1) < 4 * statistics.stdev(found) / math.sqrt(len(found))
    told, spread = math.sqrt(statistics.mean(error**2 for error in errors)), statistics.stdev(found)
    assert 0.7 < told / spread < 1.4


SOME = [Window((1,), text, (2,)) for text in strings(3, 8)[:: 3**8 // 25]]


@pytest.mark.parametrize("sampler", slow_but(["one a step", "threshold", "origin"], ["one a step"]))
def test_the_estimate_of_the_probability_is_unbiased(sampler, monkeypatch):
    check_unbiased(*ratios(sampler, 8, SOME[:12], monkeypatch))


def test_neither_company_nor_batch_size_changes_a_number():
    """Law 8. Equal windows have equal values, and other seeds other ones."""
    together = made("one a step", beam=16, seed=5).log_prob([*WINDOWS, WINDOWS[0]])
    assert together[0] == together[-1]
    for window, score in [*zip(WINDOWS, together, strict=False)][2:4]:
        [alone] = made("one a step", beam=16, seed=5, batch_size=1).log_prob([window])
        assert alone.log_prob == pytest.approx(score.log_prob, abs=1e-12)
        assert vars(alone.blocks) == pytest.approx(vars(score.blocks), abs=1e-12)
    [other] = made("one a step", beam=16, seed=6).log_prob(WINDOWS[:1])
    assert other.blocks.bound != together[0].blocks.bound


def test_sets_double_until_the_tolerance_and_are_not_evaluated_again():
    windows = LONG[:1]
    exact = made("random", block=10).log_prob(windows)
    estimator = made("random", block=10, tolerance=0.3)
    scores = estimator.log_prob(windows)
    for score, known, of in zip(scores, exact, sums(scores), strict=True):
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
        for score, known, of in zip(scores, exact, sums(scores), strict=True):
            assert of.bound <= known.log_prob + 1e-9 and of.bound == pytest.approx(known.log_prob, abs=0.1)
            assert of.bounded or score.log_prob == pytest.approx(known.log_prob, abs=1e-9)


def covered(exact, scores):
    """Of the blocks that have converged: whether a 95 % interval holds the exact value."""
    return [
        abs(score.log_prob - known.log_prob) <= 1.96 * score.stderr
        for score, known in zip(scores, exact, strict=True)
        if score.kind is Kind.ESTIMATE
    ]


@pytest.mark.parametrize("sampler", slow_but(["random", "entropy"], ["random"]))
def test_a_told_error_covers(sampler):
    """Law 20, where the first two beams are off by nats, the standard error of their repetitions by a third of one."""
    network = Toy(length=14, seed=3, scale=1.0)
    exact = made(sampler, network, block=10).log_prob(LONG)
    held = []
    for seed in range(2):
        scores = made(sampler, network, block=10, tolerance=3, seed=seed).log_prob(LONG)
        assert all((score.stderr or 0.0) <= 3 for score in scores)
        held += covered(exact, scores)
    assert len(held) >= len(LONG) and sum(held) >= 0.9 * len(held)


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["one a step", "random"])
def test_a_told_error_covers_on_texts(sampler):
    """Law 20 on demo-mdm. In blocks of 8 the third beam has nearly all sets, so that they would prove nothing."""
    text = " ".join(Path(rules.__file__).read_text(encoding="utf-8").split())
    tokens = AutoTokenizer.from_pretrained(str(Path(lm_eval_duel.__file__).parent / "demo/demo-mdm"))(text)["input_ids"]
    windows = [Window(tuple(tokens[n : n + 12]), tuple(tokens[n + 12 : n + 22])) for n in range(0, 100, 25)]
    network = load("demo-mdm")
    exact = made(sampler, network, block=10).log_prob(windows)
    scores = made(sampler, network, block=10, tolerance=1).log_prob(windows)
    held = covered(exact, scores)
    assert len(held) >= 2 and sum(held) >= 0.9 * len(held)


def test_an_estimate_is_not_below_its_own_bound():
    """On this network the mean of the repetitions is, by up to 0.9 nats."""
    scores = made("random", Toy(length=14, seed=3, scale=3.0), block=10, tolerance=6).log_prob(LONG)
    assert sum(score.kind is Kind.ESTIMATE for score in scores) > len(LONG) / 2
    assert all(score.log_prob >= score.blocks.bound - 1e-9 for score in scores)


def test_a_converged_block_above_12_positions_is_not_proven():
    network, text = Toy(length=15, seed=3, scale=0.3), (0, 2, 1, 1, 2, 0, 1, 1, 2, 0, 1, 2, 2)
    estimator = made("random", network, block=13, tolerance=50, beam=128)
    scores = estimator.log_prob([Window((1,), text), Window((1,), text[:10])])
    assert [(of.converged, of.unproven) for of in sums(scores)] == [(1, 1), (1, 0)]


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
    read = read_request(request_record(scores, estimator), 3, estimator)
    assert Total.from_scores(WINDOWS[:3], read, estimator.name).blocks == total.blocks
    assert total.beam.only_bounded and total.stderr is None and total.describe()["stderr"] is None
    assert total.beam == sum(sums(scores), BeamBlocks())
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


def test_what_it_refuses():
    with pytest.raises(DuelError, match="at most 12 positions"):
        SampledConfidence(toy(), 16)
    with pytest.raises(DuelError, match="at most 48 positions"):
        SampledConfidence(toy(), 64, beam=16)
    with pytest.raises(DuelError, match="'beam'"):
        SampledConfidence(toy(), 8, beam=15)
    with pytest.raises(DuelError, match="two sets for each repetition"):
        SampledOrder(toy(), 8, beam=16, repetitions=9)
    with pytest.raises(DuelError, match="'repetitions'"):
        SampledOrder(toy(), 8, repetitions=16)
    assert Options.parse({"pretrained": "x", "estimator": "sampled_confidence", "block": 32, "tolerance": 0.1})
    for block in (16, None):
        with pytest.raises(DuelError):
            Options.parse({"pretrained": "x", "estimator": "sampled_confidence", "block": block})
