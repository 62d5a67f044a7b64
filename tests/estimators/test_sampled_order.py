"""Samplers that draw the positions: against the enumeration of all sequences of positions, and against frequencies."""

import itertools
import math

import pytest
import torch
from attends import Attends
from drawn_reference import dream, llada, order_probabilities, p_value
from laws import strings, total
from toys import BlockCausal, Causal, Rotary, Small, Toy

from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.cached.denoiser import Cached
from lm_eval_duel.denoisers.wrappers.warpers import Warped
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.duel import DuelEstimator
from lm_eval_duel.estimators.subsets.lattice import Lattice
from lm_eval_duel.estimators.subsets.moves import Level, in_turn
from lm_eval_duel.estimators.subsets.sampled_order import SampledOrder
from lm_eval_duel.options import Options

SAMPLERS = {
    "origin": {"alg": "origin", "steps": 3},
    "origin, at once": {"alg": "origin", "steps": 1},
    "entropy": {"alg": "entropy", "steps": 3, "alg_temp": 0.3},
    "entropy, two steps": {"alg": "entropy", "steps": 2, "alg_temp": 2.0},
    "topk_margin": {"alg": "topk_margin", "steps": 4, "alg_temp": 0.2},
    "random": {"alg": "random", "steps": 2},
    "random, many steps": {"alg": "random", "steps": 7},
}
NETWORKS = {
    "bidirectional": lambda: Toy(length=8, seed=3),
    "all-mask start": lambda: Rotary(length=8, seed=5),
    "block-causal": lambda: BlockCausal(block=3, length=8, seed=2),
}
CASES = [("bidirectional", sampler) for sampler in SAMPLERS]
CASES += [("all-mask start", "entropy"), ("block-causal", "topk_margin"), ("block-causal", "origin")]


def log_probs(estimator, windows):
    return [score.log_prob for score in estimator.log_prob(windows)]


def every(estimator, length, context=(), suffix=()):
    """The probability of every text of a length."""
    texts = strings(3, length)
    values = log_probs(estimator, [Window(context, text, suffix) for text in texts])
    return dict(zip(texts, map(math.exp, values), strict=True))


@pytest.mark.parametrize(("network", "sampler"), CASES)
def test_it_is_the_sum_over_all_sequences_of_positions(network, sampler):
    """Blocks of three and of two, at a temperature."""
    toy = NETWORKS[network]()
    context, suffix = {"all-mask start": ((), ()), "block-causal": ((1,), ())}.get(network, ((1,), (2,)))
    within = 1e-6 if network == "all-mask start" else 1e-12
    estimator = SampledOrder(Warped(toy, 0.7), 3, **SAMPLERS[sampler])
    place = estimator.blocks(Window(context, (0,) * 5, suffix))
    reference = order_probabilities(toy, context, 5, suffix, place, temperature=0.7, **SAMPLERS[sampler])
    scored = every(estimator, 5, context, suffix)
    assert math.fsum(scored.values()) == pytest.approx(1, abs=within)
    assert all(abs(p - reference[text]) < within for text, p in scored.items())


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_sums_to_one_with_grids_and_tails(sampler):
    for grid in ("target", "row"):
        estimator = SampledOrder(Toy(length=8, seed=1), 2, grid, **SAMPLERS[sampler])
        assert total(estimator, 3, (1,), (2, 0)) == pytest.approx(1, abs=1e-12)
    assert total(estimator, 3, (0,), (1,), tail=2) == pytest.approx(1, abs=1e-12)
    cached = SampledOrder(Cached(Attends(length=8), "dual"), 2, **SAMPLERS[sampler])
    assert total(cached, 4, (1,)) == pytest.approx(1, abs=1e-9)


WINDOWS = [Window((1,), (0, 2, 1, 1, 2)), Window((), (0, 2, 1, 2, 2)), Window((2, 1), (1,), (0,))]


def test_a_random_cell_at_each_step_is_the_mixture():
    toy = Toy(length=8, seed=3)
    mixture = log_probs(Lattice(toy, 3, value="mixture"), WINDOWS)
    assert log_probs(SampledOrder(toy, 3, alg="random", steps=9), WINDOWS) == pytest.approx(mixture, abs=1e-12)
    near = log_probs(SampledOrder(toy, 3, alg="origin", steps=1000), WINDOWS[:1])  # hardly ever two at a step
    assert near == pytest.approx(mixture[:1], abs=1e-2)


@pytest.mark.parametrize("alg", ["entropy", "topk_margin"])
def test_alg_temp_near_zero_is_the_rule_and_a_large_alg_temp_is_random(alg):
    toy = Toy(length=8, seed=3)
    rule = log_probs(DuelEstimator(toy, f"dream:alg={alg}:steps=4", 3), WINDOWS)
    cold = SampledOrder(toy, 3, alg=alg, steps=4, alg_temp=1e-5)
    assert log_probs(cold, WINDOWS) == pytest.approx(rule, abs=1e-9)
    hot = SampledOrder(toy, 2, alg=alg, steps=2, alg_temp=1e9)  # Dream reveals two of two positions at its last step
    at_once = log_probs(DuelEstimator(toy, "greedy:k=2", 2), WINDOWS)
    assert log_probs(hot, WINDOWS) == pytest.approx(at_once, abs=1e-9)
    hot, even = SampledOrder(toy, 3, alg=alg, steps=3, alg_temp=1e9), SampledOrder(toy, 3, alg="random", steps=2)
    # of three positions Dream reveals one and then two, LLaDA two and then one
    assert log_probs(hot, WINDOWS[2:]) == pytest.approx(log_probs(even, WINDOWS[2:]), abs=1e-9)


def test_all_at_once_and_one_token_targets():
    """Law 12."""
    toy = Toy(length=8, seed=3)
    at_once = log_probs(DuelEstimator(toy, "greedy:k=3", 3), WINDOWS)
    for alg in ("origin", "random"):
        assert log_probs(SampledOrder(toy, 3, alg=alg, steps=1), WINDOWS) == pytest.approx(at_once, abs=1e-12)
    short = [Window((1,), (t,)) for t in range(3)]
    for settings in SAMPLERS.values():
        scored = log_probs(SampledOrder(toy, 3, **settings), short)
        assert scored == pytest.approx(log_probs(DuelEstimator(toy, "greedy", 3), short), abs=1e-9)


@pytest.mark.parametrize("sampler", ["origin", "entropy"])
def test_neither_company_nor_batch_size_changes_a_number(sampler):
    """Law 8."""
    windows = [*WINDOWS, Window((), ())]
    together = log_probs(SampledOrder(Toy(length=9), 3, **SAMPLERS[sampler]), windows)
    for window, value in zip(windows, together, strict=True):
        alone = SampledOrder(Toy(length=9), 3, **SAMPLERS[sampler])
        assert log_probs(alone, [window]) == pytest.approx([value], abs=1e-12)
    for toy, batch in ((Toy(length=9), 1), (Small(5, length=9), 8), (Toy(length=9, honours_padding=False), 3)):
        pieces = SampledOrder(toy, 3, batch_size=batch, **SAMPLERS[sampler])
        assert log_probs(pieces, windows) == pytest.approx(together, abs=1e-12)


@pytest.mark.parametrize(("sampler", "rows"), [("origin", 15 + 3), ("entropy", 1 + 4 + 6 + 1), ("random", 1 + 6 + 3)])
def test_states_that_are_reached_are_evaluated_once_each(sampler, rows):
    estimator = SampledOrder(Toy(length=9), 4, **SAMPLERS[sampler])
    estimator.log_prob([Window((), (0, 2, 1, 1, 2, 0))] * 2)
    assert estimator.counts.rows == rows


def test_the_order_of_cells_that_are_drawn_without_replacement():
    """Against the sum over all sequences, and of each size all subsets sum to one."""
    score = torch.tensor([[0.3, -1.0, 0.8, 300.0, 0.0]], dtype=torch.float64)
    everything = torch.ones(1, 5, dtype=torch.bool)
    one = torch.ones(1, dtype=torch.int64)
    level = Level(0 * one, 5 * one, everything, torch.zeros(1, 1, 1, dtype=torch.float64))
    weights = (score[0] - 300).exp().tolist()
    for size in range(1, 6):
        moves = in_turn(level, torch.zeros_like(score), score, size * one, lambda moves: (moves, slice(None)))
        log_p = dict(zip(moves.chosen.tolist(), moves.log_p[:, 0].tolist(), strict=True))
        subsets = list(itertools.combinations(range(5), size))
        assert math.fsum(map(math.exp, log_p.values())) == pytest.approx(1, abs=1e-12) and len(log_p) == len(subsets)
        for subset in subsets:
            share = 0.0
            for sequence in itertools.permutations(subset):
                left = [math.fsum(weights[c] for c in range(5) if c not in sequence[:at]) for at in range(size)]
                share += math.prod(weights[c] / rest for c, rest in zip(sequence, left, strict=True))
            assert math.exp(log_p[sum(1 << c for c in subset)]) == pytest.approx(share, abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "settings", "temperature"),
    [
        (3, {"alg": "origin"}, 1.0),
        (6, {"alg": "origin"}, 0.7),
        (3, {"alg": "entropy", "alg_temp": 0.3}, 0.7),
        (4, {"alg": "topk_margin", "alg_temp": 0.2}, 1.0),
    ],
)
def test_the_loop_of_dream_has_this_distribution(steps, settings, temperature):
    toy = Toy(length=4, seed=3, scale=1.0)
    generator = torch.Generator().manual_seed(1)
    texts = dream(toy, 20_000, 4, steps, settings["alg"], temperature, settings.get("alg_temp"), generator)
    assert p_value(texts, every(SampledOrder(Warped(toy, temperature), 4, steps=steps, **settings), 4)) > 1e-4
    control = every(SampledOrder(toy, 4, alg="random", steps=1), 4)
    assert p_value(texts, control) < 1e-9


@pytest.mark.slow
def test_the_loop_of_llada_with_random_remasking_has_this_distribution():
    toy = Toy(length=8, seed=3, scale=1.0)
    texts = llada(toy, 10_000, 4, 4, 3, 0.7, torch.Generator().manual_seed(1), remasking="random")
    assert p_value(texts, every(SampledOrder(Warped(toy, 0.7), 4, alg="random", steps=3), 4)) > 1e-4


def test_what_it_refuses():
    with pytest.raises(DuelError, match="estimator=sampled_order evaluates all revealed sets of a block"):
        SampledOrder(Toy())
    with pytest.raises(DuelError, match="An autoregressive network has one order: use estimator=ar"):
        SampledOrder(Causal(), 1)
    for settings, words in (
        ({"steps": 0}, "'steps' .*got '0'"),
        ({"alg": "origins"}, "Unknown value of alg 'origins'. Did you mean origin?"),
        ({"alg": "entropy"}, "alg=entropy draws positions at a temperature, .*,rule=dream:alg=entropy:steps="),
        ({"alg_temp": 0.2}, r"'alg_temp' \(got 0.2\) is read with alg=entropy and alg=topk_margin only"),
        ({"alg": "entropy", "alg_temp": 0.0}, "'alg_temp' is a number above 0; got '0"),
        ({"alg": "maskgit_plus"}, "estimator=sampled_confidence,confidence=tempered,schedule=dream,steps=<number>"),
    ):
        with pytest.raises(DuelError, match=words):
            SampledOrder(Toy(), 2, **settings)
        with pytest.raises(DuelError):
            Options.parse({"estimator": "sampled_order", "block": 2, **settings})
    estimator = SampledOrder(Toy(), 2)
    assert not estimator.decodes and estimator.describe()["steps"] == 512
