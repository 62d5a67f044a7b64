"""Samplers with many orders (law 17): those that select after sampling and those that draw the positions, against the
enumeration of all draws and all sequences of positions, against the authors' loops, and against frequencies.
"""

import math

import pytest
import torch
from attends import Attends
from drawn_reference import DIGITS, dream, llada, order_probabilities, p_value, probabilities, sdar
from laws import strings, total
from toys import BlockCausal, Causal, Rotary, Small, Toy

from lm_eval_duel.core import predictions
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.cached.denoiser import Cached
from lm_eval_duel.denoisers.wrappers import Warped
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.subsets.lattice import Lattice
from lm_eval_duel.estimators.subsets.sampled_confidence import SampledConfidence
from lm_eval_duel.estimators.subsets.sampled_order import SampledOrder

KEPT = {  # settings of sampled_confidence, and the temperature
    "LLaDA, T=1": ({}, 1.0),
    "LLaDA, T=0.6": ({}, 0.6),
    "LLaDA, two a step": ({"n": 2}, 0.7),
    "all at once": ({"n": 4}, 0.7),
    "SDAR, dynamic": ({"tau": 0.5, "confidence": "tempered"}, 1.3),
    "at least two": ({"n": 2, "tau": 0.45, "confidence": "tempered"}, 0.7),
    "Fast-dLLM": ({"tau": 0.4, "strict": False}, 0.5),
    "LLaDA, two steps": ({"steps": 2}, 0.7),
    "LLaDA, more steps than positions": ({"steps": 5}, 0.7),
    "Dream": ({"steps": 3, "schedule": "dream", "confidence": "tempered"}, 0.7),
}
ORDERS = {  # settings of sampled_order
    "origin": {"alg": "origin", "steps": 3},
    "origin, at once": {"alg": "origin", "steps": 1},
    "entropy": {"alg": "entropy", "steps": 3, "alg_temp": 0.3},
    "entropy, two steps": {"alg": "entropy", "steps": 2, "alg_temp": 2.0},
    "topk_margin": {"alg": "topk_margin", "steps": 4, "alg_temp": 0.2},
    "random": {"alg": "random", "steps": 2},
    "random, many steps": {"alg": "random", "steps": 7},
}


class Tied(Toy):
    """Few distributions, so that draws of different positions tie exactly and often."""

    codes = torch.tensor([[0.0, 0.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0]], dtype=torch.float64)


NETWORKS = {
    "bidirectional": lambda: Toy(length=8, seed=3),
    "all-mask start": lambda: Rotary(length=8, seed=5),
    "block-causal": lambda: BlockCausal(block=3, length=8, seed=2),
    "tied": lambda: Tied(length=8, seed=3),
}
WINDOWS = [Window((1,), (0, 2, 1, 1, 2)), Window((), (0, 2, 1, 2, 2)), Window((2, 1), (1,), (0,)), Window((), ())]


def made(sampler, toy, block=3, **more):
    if sampler in ORDERS:
        return SampledOrder(Warped(toy, 0.7), block, **ORDERS[sampler], **more)
    settings, temperature = KEPT[sampler]
    return SampledConfidence(toy if temperature == 1 else Warped(toy, temperature), block, **settings, **more)


def log_probs(estimator, windows):
    return [score.log_prob for score in estimator.log_prob(windows)]


def every(estimator, length, context=(), suffix=()):
    """The probability of every text of a length."""
    texts = strings(3, length)
    values = log_probs(estimator, [Window(context, text, suffix) for text in texts])
    return dict(zip(texts, map(math.exp, values), strict=True))


# ---------------------------------------------------------------- against enumeration

CASES = [(sampler, [*NETWORKS][n % 4]) for n, sampler in enumerate(KEPT)]
CASES += [(sampler, "bidirectional") for sampler in ORDERS]
CASES += [("entropy", "all-mask start"), ("topk_margin", "block-causal"), ("origin", "block-causal")]


@pytest.mark.parametrize(("sampler", "network"), CASES)
def test_it_is_the_sum_over_all_draws(sampler, network):
    """Blocks of three and of two. No context in an all-mask start; a block-causal target ends on a border."""
    toy = NETWORKS[network]()
    context, suffix = {"all-mask start": ((), ()), "block-causal": ((1,), ())}.get(network, ((1,), (2,)))
    digits, within = (5, 1e-6) if network == "all-mask start" else (DIGITS, 1e-12)
    estimator = made(sampler, toy)
    place = toy, context, 5, suffix, estimator.blocks(Window(context, (0,) * 5, suffix))
    if sampler in ORDERS:
        reference = order_probabilities(*place, temperature=0.7, **ORDERS[sampler])
    else:
        settings, temperature = KEPT[sampler]
        counts = {key: value for key, value in settings.items() if key != "confidence"}
        tempered = settings.get("confidence") == "tempered"
        reference = probabilities(*place, temperature=temperature, tempered=tempered, digits=digits, **counts)
    scored = every(estimator, 5, context, suffix)
    assert math.fsum(scored.values()) == pytest.approx(1, abs=within)
    assert all(abs(p - reference.get(text, 0.0)) < within for text, p in scored.items())


@pytest.mark.parametrize("sampler", ["at least two", "origin", "entropy, two steps", "random"])
def test_sums_to_one_with_grids_tails_and_caches(sampler):
    toy = Toy(length=8, seed=1)
    for grid in ("target", "row"):
        assert total(made(sampler, toy, 2, grid=grid), 3, (1,), (2, 0)) == pytest.approx(1, abs=1e-12)
    assert total(made(sampler, toy, 2), 4, (0,), (1,), tail=2) == pytest.approx(1, abs=1e-12)
    assert total(made(sampler, Cached(Attends(length=8), "dual"), 2), 4, (1,)) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_a_cache_changes_nothing_in_one_block_that_is_the_whole_row(cache):
    """Law 15."""
    toy = Attends(length=8)
    whole, plain = (every(SampledConfidence(network, 4), 4) for network in (Cached(toy, cache), toy))
    assert list(whole.values()) == pytest.approx(list(plain.values()), abs=1e-9)


@pytest.mark.parametrize("sampler", ["SDAR, dynamic", "entropy"])
def test_neither_company_nor_batch_size_changes_a_number(sampler, monkeypatch):
    """Law 8."""
    together = made(sampler, Toy(length=9)).log_prob(WINDOWS)
    expected = pytest.approx([score.log_prob for score in together], abs=1e-12)
    for window, score in zip(WINDOWS, together, strict=True):
        [alone] = made(sampler, Toy(length=9)).log_prob([window])
        assert alone.log_prob == pytest.approx(score.log_prob, abs=1e-12) and alone.is_greedy == score.is_greedy
    for toy, batch in ((Toy(length=9), 1), (Small(5, length=9), 8), (Toy(length=9, honours_padding=False), 3)):
        assert log_probs(made(sampler, toy, batch_size=batch), WINDOWS) == expected
    monkeypatch.setattr(predictions, "CPU_ROWS", 8)
    monkeypatch.setattr(predictions, "CPU_VALUES", 8)
    assert log_probs(made(sampler, Toy(length=9)), WINDOWS) == expected


# ---------------------------------------------------------------- special cases


def test_a_random_position_at_each_step_is_the_mixture():
    toy = Toy(length=8, seed=3)
    mixture = log_probs(Lattice(toy, 3, value="mixture"), WINDOWS)
    assert log_probs(SampledOrder(toy, 3, alg="random", steps=9), WINDOWS) == pytest.approx(mixture, abs=1e-12)
    near = log_probs(SampledOrder(toy, 3, alg="origin", steps=1000), WINDOWS[:1])  # hardly ever two at a step
    assert near == pytest.approx(mixture[:1], abs=1e-2)


# ---------------------------------------------------------------- samples


@pytest.mark.parametrize("sampler", ["at least two", "SDAR, dynamic"])
def test_samples_have_the_log_probability_of_their_text_and_argmax_writes_what_is_greedy(sampler):
    """Laws 2, 3 and 8."""
    estimator = made(sampler, Toy(length=8, seed=3))
    contexts = [(1,), (), (2, 0)] * 3
    drawn = estimator.sample(contexts, 4, seed=7, suffixes=[(1,)] * len(contexts))
    assert estimator.counts.windows == 9
    scored = estimator.log_prob([Window(c, d.tokens, (1,)) for c, d in zip(contexts, drawn, strict=True)])
    for sample, score in zip(drawn, scored, strict=True):
        assert sample.log_prob == pytest.approx(score.log_prob, abs=1e-12) and sample.is_greedy == score.is_greedy
        assert sample.token_logprobs == () and len(sample.reveal_steps) == 4
    [(_, unscored)] = estimator.stream_samples([(1,)], 4, seed=7, suffixes=[(1,)], scored=False)
    assert unscored.tokens == drawn[0].tokens and math.isnan(unscored.log_prob)
    few = made(sampler, Toy(length=8, seed=3), batch_size=1).sample(contexts[:3], 4, seed=7, suffixes=[(1,)] * 3)
    assert [s.tokens for s in few] == [s.tokens for s in drawn[:3]]
    [decoded] = estimator.sample([(1,)], 4, do_sample=False)
    scored = estimator.log_prob([Window((1,), text) for text in strings(3, 4)])
    assert [score.is_greedy for score in scored] == [text == decoded.tokens for text in strings(3, 4)]


def test_samples_follow_the_distribution():
    """Pearson's statistic of 3,000 samples (the seed is fixed, so it does not flicker)."""
    estimator = made("SDAR, dynamic", Toy(length=3, seed=2))
    samples = estimator.stream_samples([()] * 3_000, 3, seed=1, scored=False)
    assert p_value([sample.tokens for _, sample in samples], every(estimator, 3)) > 1e-4


SHARP, OF_TWO = Toy(length=8, seed=3, scale=1.0), BlockCausal(block=2, length=8, seed=3)
KEEP, TEMPERED = SampledConfidence, {"confidence": "tempered"}
LOOPS = {  # the loop's own arguments, temperature, and the estimator with its settings
    "llada, one a step": (llada, (4, 4, 4), 1.0, KEEP, {}),
    "llada, two a step": (llada, (4, 4, 2), 0.7, KEEP, {"n": 2}),
    "llada, three steps": (llada, (4, 4, 3), 0.7, KEEP, {"steps": 3}),
    "llada, random": (llada, (4, 4, 3), 0.7, SampledOrder, {"alg": "random", "steps": 3}),
    "sdar, static": (sdar, (4, 2, 1, None), 1.0, KEEP, {"n": 1, **TEMPERED}),
    "sdar, dynamic": (sdar, (4, 2, 1, 0.6), 0.8, KEEP, {"n": 1, "tau": 0.6, **TEMPERED}),
    "dream, maskgit_plus": (dream, (4, 3, "maskgit_plus"), 1.0, KEEP, {"steps": 3, "schedule": "dream", **TEMPERED}),
    "dream, six steps": (dream, (4, 6, "maskgit_plus"), 0.5, KEEP, {"steps": 6, "schedule": "dream", **TEMPERED}),
    "dream, origin": (dream, (4, 6, "origin"), 0.7, SampledOrder, {"alg": "origin", "steps": 6}),
    "dream, entropy": (dream, (4, 3, "entropy"), 0.7, SampledOrder, {"alg": "entropy", "steps": 3, "alg_temp": 0.3}),
    "dream, topk_margin": (
        *(dream, (4, 4, "topk_margin"), 1.0, SampledOrder),
        {"alg": "topk_margin", "steps": 4, "alg_temp": 0.2},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_the_authors_loop_has_this_distribution(name):
    """And not another one that is near."""
    loop, arguments, temperature, kind, settings = LOOPS[name]
    toy, generator = OF_TWO if loop is sdar else SHARP, torch.Generator().manual_seed(1)
    more = {"generator": generator, **({"remasking": "random"} if name == "llada, random" else {})}
    if loop is dream:
        more["alg_temp"] = settings.get("alg_temp")
    texts = loop(toy, 3_000, *arguments, temperature=temperature, **more)
    estimator = kind(Warped(toy, temperature), 2 if loop is sdar else 4, **settings)
    assert p_value(texts, every(estimator, 4)) > 1e-4
    control = SampledOrder(toy, 2 if loop is sdar else 4, alg="random", steps=1)
    assert p_value(texts, every(control, 4)) < 1e-9


# ---------------------------------------------------------------- what is refused


def test_what_is_refused():
    truncated = Warped(Toy(), 0.7, top_k=2)
    for named, kind, network, block, settings in (
        ("sampled_confidence", KEEP, Toy(), "auto", {}),
        ("estimator=ar", KEEP, Causal(), 1, {}),
        ("confidence=untempered", KEEP, truncated, 2, {}),
        ("'steps' .* 'n'", KEEP, Toy(), 2, {"steps": 2, "n": 2}),
        ("'steps' .* 'tau'", KEEP, Toy(), 2, {"steps": 2, "tau": 0.5}),
        ("schedule=dream .*steps=", KEEP, Toy(), 2, {"schedule": "dream"}),
        ("sampled_order", SampledOrder, Toy(), "auto", {}),
        ("estimator=ar", SampledOrder, Causal(), 1, {}),
        ("rule=dream:alg=entropy", SampledOrder, Toy(), 2, {"alg": "entropy"}),
        ("'alg_temp' .*alg=entropy", SampledOrder, Toy(), 2, {"alg_temp": 0.2}),
        ("estimator=sampled_confidence", SampledOrder, Toy(), 2, {"alg": "maskgit_plus"}),
    ):
        with pytest.raises(DuelError, match=named):
            kind(network, block, **settings)
    assert total(SampledConfidence(truncated, 2, confidence="tempered"), 3) == pytest.approx(1)
    estimator = SampledConfidence(Toy(), 2)
    with pytest.raises(DuelError, match="confidence=untempered"):
        estimator.with_denoiser(truncated)
    with pytest.raises(DuelError, match=r"Duel\.replay"):
        estimator.replay([Window((), (0,))], [(0,)])
