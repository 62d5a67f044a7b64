"""Samplers that select after sampling (law 17): against the enumeration of all draws, and against frequencies."""

import itertools
import math

import pytest
import torch
from attends import Attends
from drawn_reference import DIGITS, dream, llada, p_value, probabilities, sdar
from laws import strings
from toys import BlockCausal, Causal, Rotary, Small, Toy

from lm_eval_duel.core import predictions
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.cached.denoiser import Cached
from lm_eval_duel.denoisers.wrappers.warpers import Warped
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.duel import DuelEstimator
from lm_eval_duel.estimators.subsets.drawn import score_of, scores
from lm_eval_duel.estimators.subsets.sampled_confidence import SampledConfidence

SAMPLERS = {  # settings, and the temperature
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


class Tied(Toy):
    """Few distributions, so that draws of different positions tie exactly and often."""

    codes = torch.tensor([[0.0, 0.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0]], dtype=torch.float64)


NETWORKS = {
    "bidirectional": lambda: Toy(length=8, seed=3),
    "tied": lambda: Tied(length=8, seed=3),
    "all-mask start": lambda: Rotary(length=8, seed=5),
    "block-causal": lambda: BlockCausal(block=3, length=8, seed=2),
}


def made(toy, sampler="LLaDA, T=1", block=3, **more):
    settings, temperature = SAMPLERS[sampler]
    return SampledConfidence(toy if temperature == 1 else Warped(toy, temperature), block, **settings, **more)


def every(estimator, length, context=(), suffix=(), tail=0):
    """The probability of every text of a length."""
    texts = strings(3, length)
    scored = estimator.log_prob([Window(context, text, suffix, tail) for text in texts])
    return {text: math.exp(score.log_prob) for text, score in zip(texts, scored, strict=True)}


OTHERS = [name for name in NETWORKS if name != "tied"]
CASES = [(network, sampler) for n, sampler in enumerate(SAMPLERS) for network in ("tied", OTHERS[n % 3])]


@pytest.mark.parametrize(("network", "sampler"), CASES)
def test_the_lattice_is_the_sum_over_all_draws(sampler, network):
    """Law 17. Two blocks of several positions; no context in an all-mask start. A block-causal target ends on a
    border.
    """
    toy = NETWORKS[network]()
    context, suffix = {"all-mask start": ((), ()), "block-causal": ((1,), ())}.get(network, ((1,), (2,)))
    length, (digits, within) = 5, (5, 1e-6) if network == "all-mask start" else (DIGITS, 1e-12)
    settings, temperature = SAMPLERS[sampler]
    estimator = made(toy, sampler)
    reference = probabilities(
        *(toy, context, length, suffix, estimator.blocks(Window(context, (0,) * length, suffix))),
        temperature=temperature,
        tempered=settings.get("confidence") == "tempered",
        digits=digits,
        **{key: value for key, value in settings.items() if key != "confidence"},
    )
    scored = every(estimator, length, context, suffix)
    assert math.fsum(scored.values()) == pytest.approx(1, abs=within)
    assert all(abs(p - reference.get(text, 0.0)) < within for text, p in scored.items())


def test_sums_to_one_with_grids_and_tails():
    toy = Toy(length=8, seed=1)
    for sampler in ("LLaDA, T=0.6", "at least two"):
        settings, temperature = SAMPLERS[sampler]
        for grid in ("target", "row"):
            estimator = SampledConfidence(Warped(toy, temperature), 2, grid, **settings)
            assert math.fsum(every(estimator, 3, (1,), (2, 0)).values()) == pytest.approx(1, abs=1e-12)
        tailed = every(SampledConfidence(Warped(toy, temperature), 2, **settings), 4, (0,), (1,), tail=2)
        assert math.fsum(tailed.values()) == pytest.approx(1, abs=1e-12)


def test_what_is_selected_after_sampling_is_another_distribution_than_greedy():
    toy = Toy(length=4, seed=3)
    greedy = DuelEstimator(toy, "greedy", 4).log_prob([Window((), text) for text in strings(3, 4)])
    sampled = every(made(toy, block=4), 4).values()
    assert sum(abs(math.exp(score.log_prob) - p) for score, p in zip(greedy, sampled, strict=True)) > 0.1


def test_a_whole_block_at_once_is_greedy_with_k_of_the_block():
    toy = Toy(length=8, seed=3)
    windows = [Window((1,), text) for text in strings(3, 4)]
    plain = DuelEstimator(toy, "greedy:k=2", 2).log_prob(windows)
    scored = SampledConfidence(toy, 2, n=2).log_prob(windows)
    assert [s.log_prob for s in scored] == pytest.approx([s.log_prob for s in plain], abs=1e-12)


@pytest.mark.parametrize("network", NETWORKS)
def test_one_token_targets_are_those_of_every_estimator(network):
    """Law 12."""
    toy = NETWORKS[network]()
    windows = [Window((1,), (t,)) for t in range(3)] + [Window((2, 0, 1), (t,)) for t in range(3)]
    plain = [score.log_prob for score in DuelEstimator(toy, "greedy", 3).log_prob(windows)]
    for more in ({}, {"tau": 0.4}, {"n": 2, "confidence": "tempered"}):
        scored = SampledConfidence(toy, 3, **more).log_prob(windows)
        assert [score.log_prob for score in scored] == pytest.approx(plain, abs=1e-9)


@pytest.mark.parametrize(
    ("rule", "settings"),
    [
        ("greedy:k=1", {}),
        ("greedy:k=2", {"n": 2}),
        ("threshold:mu=0.5", {"tau": 0.5}),
        ("quota:steps=2", {"steps": 2}),
        ("dream:alg=maskgit_plus:steps=3", {"steps": 3, "schedule": "dream"}),
    ],
)
def test_near_temperature_zero_it_writes_what_the_rule_decodes(rule, settings):
    toy = Toy(length=6, seed=4)
    [decoded] = DuelEstimator(toy, rule, 3).sample([(1,)], 5, do_sample=False)
    cold = SampledConfidence(Warped(toy, 1e-3), 3, **settings)
    [score] = cold.log_prob([Window((1,), decoded.tokens)])
    assert score.log_prob == pytest.approx(0, abs=1e-9) and score.is_greedy


@pytest.mark.parametrize("sampler", ["LLaDA, T=0.6", "at least two", "Fast-dLLM"])
def test_is_greedy_iff_argmax_decoding_writes_it(sampler):
    """Law 3."""
    estimator = made(Toy(length=8, seed=3), sampler)
    [decoded] = estimator.sample([(1,)], 4, do_sample=False)
    scored = estimator.log_prob([Window((1,), text) for text in strings(3, 4)])
    assert [score.is_greedy for score in scored] == [text == decoded.tokens for text in strings(3, 4)]


@pytest.mark.parametrize("sampler", ["LLaDA, T=0.6", "SDAR, dynamic"])
def test_neither_company_nor_batch_size_changes_a_number(sampler, monkeypatch):
    """Law 8."""
    windows = [
        Window((1,), (0, 2, 1, 1, 2, 0)),
        Window((), (0, 2, 1, 2, 2)),
        Window((2, 1), (1,), (0,)),
        Window((), ()),
    ]
    together = made(Toy(length=9), sampler).log_prob(windows)
    for window, score in zip(windows, together, strict=True):
        [alone] = made(Toy(length=9), sampler).log_prob([window])
        assert alone.log_prob == pytest.approx(score.log_prob, abs=1e-12) and alone.is_greedy == score.is_greedy
    for toy, batch in ((Toy(length=9), 1), (Small(5, length=9), 8), (Toy(length=9, honours_padding=False), 3)):
        pieces = made(toy, sampler, batch_size=batch).log_prob(windows)
        assert [s.log_prob for s in pieces] == pytest.approx([s.log_prob for s in together], abs=1e-12)
    monkeypatch.setattr(predictions, "CPU_ROWS", 8)
    monkeypatch.setattr(predictions, "CPU_VALUES", 8)
    chunked = made(Toy(length=9), sampler).log_prob(windows)
    assert [s.log_prob for s in chunked] == pytest.approx([s.log_prob for s in together], abs=1e-12)
    drawn = made(Toy(length=9), sampler).sample([(1,)] * 5, 4, seed=3)
    few = made(Toy(length=9), sampler, batch_size=1).sample([(1,)] * 3, 4, seed=3)
    assert [s.tokens for s in few] == [s.tokens for s in drawn[:3]]


@pytest.mark.parametrize(
    ("sampler", "rows"),
    [
        ("LLaDA, T=1", 15 + 3),
        ("at least two", 1 + 6 + 4 + 1),  # with 4, 2 or 1 masked positions
        ("LLaDA, two steps", 1 + 6 + 3),
        ("Dream", 1 + 4 + 6 + 1),  # with 4, 3 or 2
    ],
)
def test_states_that_are_reached_are_evaluated_once_each(sampler, rows):
    """The lattice's forwards, and no more: states of probability 0 are left out."""
    estimator = made(Toy(length=9), sampler, block=4)
    estimator.log_prob([Window((), (0, 2, 1, 1, 2, 0))] * 2)
    assert estimator.counts.rows <= rows


@pytest.mark.parametrize("sampler", ["LLaDA, T=0.6", "SDAR, dynamic"])
def test_samples_have_the_log_probability_of_their_text(sampler):
    estimator = made(Toy(length=8, seed=3), sampler)
    drawn = estimator.sample([(1,), (), (2, 0)] * 3, 4, seed=7, suffix=(1,))
    windows = [Window(c, d.tokens, (1,)) for c, d in zip([(1,), (), (2, 0)] * 3, drawn, strict=True)]
    assert estimator.counts.windows == 9
    for sample, score in zip(drawn, estimator.log_prob(windows), strict=True):
        assert sample.log_prob == pytest.approx(score.log_prob, abs=1e-12) and sample.is_greedy == score.is_greedy
        assert sample.token_logprobs == () and len(sample.reveal_steps) == 4
    [(_, unscored)] = estimator.stream_samples([(1,)], 4, seed=7, suffix=(1,), scored=False)
    assert unscored.tokens == drawn[0].tokens and math.isnan(unscored.log_prob)


@pytest.mark.parametrize("sampler", ["LLaDA, T=0.6", pytest.param("SDAR, dynamic", marks=pytest.mark.slow)])
def test_samples_follow_the_distribution(sampler):
    """Law 17: Pearson's statistic of 20,000 samples (the seed is fixed, so it does not flicker)."""
    estimator = made(Toy(length=3, seed=2), sampler)
    samples = estimator.stream_samples([()] * 20_000, 3, seed=1, scored=False)
    assert p_value([sample.tokens for _, sample in samples], every(estimator, 3)) > 1e-4


EACH = [(sampler, [*NETWORKS][n % 4 if n < 7 else 0]) for n, sampler in enumerate(SAMPLERS)]


@pytest.mark.slow
@pytest.mark.parametrize(("sampler", "network"), EACH)
def test_samples_of_every_network_follow_the_distribution(sampler, network):
    estimator = made(NETWORKS[network](), sampler)
    samples = estimator.stream_samples([()] * 10_000, 4, seed=2, scored=False)
    assert p_value([sample.tokens for _, sample in samples], every(estimator, 4)) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "settings", "temperature"),
    [(4, {}, 1.0), (2, {"n": 2}, 0.7), (4, {"steps": 4}, 0.5), (3, {"steps": 3}, 0.7)],
)
def test_the_loop_of_llada_has_this_distribution(steps, settings, temperature):
    toy = Toy(length=8, seed=3, scale=1.0)
    texts = llada(toy, 10_000, 4, 4, steps, temperature, torch.Generator().manual_seed(1))
    estimator = SampledConfidence(Warped(toy, temperature), 4, **settings)
    assert p_value(texts, every(estimator, 4)) > 1e-4
    greedy = DuelEstimator(toy, f"quota:steps={steps}", 4).log_prob([Window((), text) for text in strings(3, 4)])
    control = dict(zip(strings(3, 4), (math.exp(score.log_prob) for score in greedy), strict=True))
    assert p_value(texts, control) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize(("n", "tau", "temperature"), [(1, None, 1.0), (1, 0.6, 0.8), (2, 0.5, 1.0)])
def test_the_loop_of_sdar_has_this_distribution(n, tau, temperature):
    toy = BlockCausal(block=2, length=8, seed=3)
    texts = sdar(toy, 10_000, 4, 2, n, tau, temperature, torch.Generator().manual_seed(1))
    estimator = SampledConfidence(Warped(toy, temperature), 2, n=n, tau=tau, confidence="tempered")
    assert p_value(texts, every(estimator, 4)) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "temperature"), [(4, 0.7), (3, 1.0), (6, 0.5)])
def test_the_loop_of_dream_has_this_distribution(steps, temperature):
    toy = Toy(length=4, seed=3, scale=1.0)
    texts = dream(toy, 10_000, 4, steps, "maskgit_plus", temperature, None, torch.Generator().manual_seed(1))
    estimator = SampledConfidence(Warped(toy, temperature), 4, steps=steps, schedule="dream", confidence="tempered")
    assert p_value(texts, every(estimator, 4)) > 1e-4


@pytest.mark.parametrize(("steps", "n"), [(1, 4), (2, 2), (4, 1), (9, 1)])
def test_steps_that_divide_a_block_are_n(steps, n):
    toy = Warped(Toy(length=8, seed=3), 0.7)
    windows = [Window((1,), text) for text in strings(3, 4)[::7]]
    by_steps, by_n = (SampledConfidence(toy, 4, **more).log_prob(windows) for more in ({"steps": steps}, {"n": n}))
    assert [score.log_prob for score in by_steps] == pytest.approx([score.log_prob for score in by_n], abs=1e-9)
    assert [score.nfe for score in by_steps] == [score.nfe for score in by_n] == [4 // n] * len(windows)


@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_under_a_cache(cache):
    """Laws 1 and 15: it sums to one, and with one block that is the whole row the cache changes nothing."""
    toy = Attends(length=8)
    scored = every(SampledConfidence(Cached(toy, cache), 2, tau=0.5), 4, (1,))
    assert math.fsum(scored.values()) == pytest.approx(1, abs=1e-9)
    whole, plain = (every(SampledConfidence(network, 4), 4) for network in (Cached(toy, cache), toy))
    assert list(whole.values()) == pytest.approx(list(plain.values()), abs=1e-9)


def test_scores_grow_with_the_probability_and_do_not_saturate():
    logits = torch.tensor([[60.0, 20.0, 0.0], [61.0, 20.0, 0.0], [0.1, 0.0, -1.0]])
    scored = scores(logits, 1.0)
    assert scored[1, 0] > scored[0, 0] > scored[0, 1] > scored[1, 1]
    p = logits[2].double().softmax(0)
    assert scored[2].tolist() == pytest.approx([score_of(float(x)) for x in p])
    ladder = [score_of(p) for p in (0, 1e-9, 0.49, 0.5, 0.51, 1 - 1e-12, 1)]
    assert all(low < high for low, high in itertools.pairwise(ladder))
    assert score_of(0.5) == pytest.approx(score_of(0.5 + 1e-12))


def test_what_it_refuses():
    with pytest.raises(DuelError, match="estimator=sampled_confidence evaluates all revealed sets of a block"):
        SampledConfidence(Toy())
    with pytest.raises(DuelError, match="An autoregressive network has one order: use estimator=ar"):
        SampledConfidence(Causal(), 1)
    truncated = Warped(Toy(), 0.7, top_k=2)
    with pytest.raises(DuelError, match="confidence=untempered is the probability before temperature, and no sampler"):
        SampledConfidence(truncated, 2)
    assert math.fsum(every(SampledConfidence(truncated, 2, confidence="tempered"), 3).values()) == pytest.approx(1)
    estimator = SampledConfidence(Toy(), 2)
    with pytest.raises(DuelError, match="confidence=untempered"):
        estimator.with_denoiser(truncated)
    with pytest.raises(DuelError, match=r"to follow a recorded one, use Duel\.replay"):
        estimator.replay([Window((), (0,))], [(0,)])
    for settings, words in (
        ({"n": 0}, "'n' .*got '0'"),
        ({"tau": 1.5}, "'tau' .*got '1.5'"),
        ({"confidence": "tempred"}, "Unknown value of confidence 'tempred'. Did you mean tempered?"),
        ({"steps": 0}, "'steps' .*got '0'"),
        (
            {"steps": 2, "n": 2},
            "'steps' .got 2. says how many draws are kept at each step, and so does 'n' .got 2.",
        ),
        ({"steps": 2, "tau": 0.5}, "and so does 'tau'"),
        ({"schedule": "dream"}, "schedule=dream spreads a block over a number of steps; pass steps=<number>, too"),
        ({"steps": 2, "schedule": "dreams"}, "Unknown value of schedule 'dreams'. Did you mean dream?"),
    ):
        with pytest.raises(DuelError, match=words):
            SampledConfidence(Toy(), 2, **settings)
