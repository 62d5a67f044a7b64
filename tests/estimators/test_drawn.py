"""Samplers with many orders (law 17), against the authors' loops; their definitions are in test_every_estimator.py."""

import math
from functools import partial

import pytest
import torch
from attends import Attends
from drawn_reference import dream, llada, logits_of, p_value, sdar
from laws import strings, total
from toys import BlockCausal, Toy

from lm_eval_duel.audit import samplers
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.cached.denoiser import Cached
from lm_eval_duel.denoisers.filters import warped
from lm_eval_duel.estimators.arguments import ConfidenceArguments, OrderArguments
from lm_eval_duel.estimators.lattice import Lattice
from lm_eval_duel.estimators.sampled_confidence import SampledConfidence
from lm_eval_duel.estimators.sampled_order import SampledOrder

WARM = warped(Toy(length=8, seed=3), 0.7)
SAMPLERS = {
    "at least two": partial(SampledConfidence, arguments=ConfidenceArguments(n=2, tau=0.45, confidence="tempered")),
    "SDAR, dynamic": partial(SampledConfidence, arguments=ConfidenceArguments(tau=0.5, confidence="tempered")),
    "origin": partial(SampledOrder, arguments=OrderArguments(alg="origin", steps=3)),
    "entropy": partial(SampledOrder, arguments=OrderArguments(alg="entropy", steps=2, alg_temp=2.0)),
    "random": partial(SampledOrder, arguments=OrderArguments(alg="random", steps=2)),
}


def log_probs(estimator, windows):
    return [score.log_prob for score in estimator.log_prob(windows)]


def every(estimator, length):
    """The probability of every text of a length."""
    texts = strings(3, length)
    scores = estimator.log_prob([Window((), text) for text in texts])
    return {text: math.exp(score.log_prob) for text, score in zip(texts, scores, strict=True)}


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_sums_to_one_with_grids_tails_and_caches(sampler):
    make = SAMPLERS[sampler]
    for grid in ("target", "row"):
        assert total(make(WARM, 2, grid=grid), 3, (1,), (2, 0)) == pytest.approx(1, abs=1e-12)
    assert total(make(WARM, 2), 4, (0,), (1,), tail=2) == pytest.approx(1, abs=1e-12)
    assert total(make(Cached(Attends(length=8), "dual"), 2), 4, (1,)) == pytest.approx(1, abs=1e-9)


def test_a_draw_is_judged_without_the_temperature():
    toy = Toy(length=8, tokens=6)
    x = [0, 2, 1, 5, 4]

    def tempered(z):
        return logits_of(toy, z[None])[0] / 3

    [score] = SampledConfidence(warped(toy, 3), 5).log_prob([Window((), x)])

    select = samplers.best_drawn(x, count=lambda *_: 1, scale=3)
    expected = samplers.over_selections(x, [range(5)], tempered, toy.mask_id, select)
    assert score.log_prob == pytest.approx(expected, abs=1e-9)


def test_a_truncated_network_is_sampled_by_its_tempered_confidence():
    truncated = warped(Toy(), 0.7, top_k=2)
    estimator = SampledConfidence(truncated, 2, ConfidenceArguments(confidence="tempered"))
    assert total(estimator, 3) == pytest.approx(1)


# ---------------------------------------------------------------- special cases


def test_a_random_position_at_each_step_is_the_mixture():
    windows = [Window((1,), (0, 2, 1, 1, 2)), Window((2, 1), (1,), (0,))]
    mixture = log_probs(Lattice(WARM, 3, estimator="mixture"), windows)

    one_a_step = SampledOrder(WARM, 3, OrderArguments("random", 9))
    assert log_probs(one_a_step, windows) == pytest.approx(mixture, abs=1e-12)

    hardly_ever_two_a_step = SampledOrder(WARM, 3, OrderArguments("origin", 1000))
    assert log_probs(hardly_ever_two_a_step, windows[:1]) == pytest.approx(mixture[:1], abs=1e-2)


# ---------------------------------------------------------------- samples


@pytest.mark.parametrize("sampler", ["at least two", "SDAR, dynamic"])
def test_samples_have_the_log_probability_of_their_text_and_argmax_writes_what_is_greedy(sampler):
    """Laws 2, 3 and 8."""
    estimator = SAMPLERS[sampler](WARM, 3)
    contexts = [(1,), (), (2, 0)] * 3

    samples = estimator.sample(contexts, 4, seed=7, suffixes=[(1,)] * len(contexts))

    assert estimator.counts.windows == 9
    for context, sample in zip(contexts, samples, strict=True):
        [score] = estimator.log_prob([Window(context, sample.tokens, (1,))])
        assert sample.log_prob == pytest.approx(score.log_prob, abs=1e-12)
        assert sample.is_greedy == score.is_greedy
        assert sample.token_logprobs == ()
        assert len(sample.reveal_steps) == 4

    [(_, unscored)] = estimator.stream_samples([(1,)], 4, seed=7, suffixes=[(1,)], scored=False)
    assert unscored.tokens == samples[0].tokens
    assert math.isnan(unscored.log_prob)

    alone = SAMPLERS[sampler](WARM, 3, batch_size=1).sample(contexts[:3], 4, seed=7, suffixes=[(1,)] * 3)
    assert [sample.tokens for sample in alone] == [sample.tokens for sample in samples[:3]]

    [decoded] = estimator.sample([(1,)], 4, do_sample=False)
    texts = strings(3, 4)
    scores = estimator.log_prob([Window((1,), text) for text in texts])
    for text, score in zip(texts, scores, strict=True):
        assert score.is_greedy == (text == decoded.tokens)


def test_samples_follow_the_distribution():
    """Pearson's statistic of 3,000 samples (the seed is fixed, so it does not flicker)."""
    estimator = SAMPLERS["SDAR, dynamic"](warped(Toy(length=3, seed=2), 1.3), 3)
    samples = estimator.stream_samples([()] * 3_000, 3, seed=1, scored=False)
    assert p_value([sample.tokens for _, sample in samples], every(estimator, 3)) > 1e-4


SHARP = Toy(length=8, seed=3, scale=1.0)
OF_TWO = BlockCausal(block=2, length=8, seed=3)
KEEP = partial(ConfidenceArguments, confidence="tempered")
LOOPS = {  # the loop's own arguments, temperature, and those of the estimator
    "llada, one a step": (llada, (4, 4, 4), 1.0, ConfidenceArguments()),
    "llada, two a step": (llada, (4, 4, 2), 0.7, ConfidenceArguments(n=2)),
    "llada, three steps": (llada, (4, 4, 3), 0.7, ConfidenceArguments(steps=3)),
    "llada, random": (llada, (4, 4, 3), 0.7, OrderArguments("random", 3)),
    "sdar, static": (sdar, (4, 2, 1, None), 1.0, KEEP(n=1)),
    "sdar, dynamic": (sdar, (4, 2, 1, 0.6), 0.8, KEEP(n=1, tau=0.6)),
    "dream, maskgit_plus": (dream, (4, 3, "maskgit_plus"), 1.0, KEEP(steps=3, schedule="dream")),
    "dream, six steps": (dream, (4, 6, "maskgit_plus"), 0.5, KEEP(steps=6, schedule="dream")),
    "dream, origin": (dream, (4, 6, "origin"), 0.7, OrderArguments("origin", 6)),
    "dream, entropy": (dream, (4, 3, "entropy"), 0.7, OrderArguments("entropy", 3, 0.3)),
    "dream, topk_margin": (dream, (4, 4, "topk_margin"), 1.0, OrderArguments("topk_margin", 4, 0.2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_the_authors_loop_has_this_distribution(name):
    """And not another one that is near."""
    loop, loop_arguments, temperature, arguments = LOOPS[name]
    toy = OF_TWO if loop is sdar else SHARP
    block = 2 if loop is sdar else 4
    more = {}
    if name == "llada, random":
        more["remasking"] = "random"
    if loop is dream:
        more["alg_temp"] = getattr(arguments, "alg_temp", None)
    generator = torch.Generator().manual_seed(1)

    texts = loop(toy, 3_000, *loop_arguments, temperature=temperature, generator=generator, **more)

    kind = SampledOrder if isinstance(arguments, OrderArguments) else SampledConfidence
    estimator = kind(warped(toy, temperature), block, arguments)
    assert p_value(texts, every(estimator, 4)) > 1e-4
    control = SampledOrder(toy, block, OrderArguments("random", 1))
    assert p_value(texts, every(control, 4)) < 1e-9
