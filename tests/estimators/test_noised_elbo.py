"""Laws of the bound under noise that is not masks, on toys that can be enumerated."""

import itertools
import math

import numpy
import pytest
import torch
from noised_toys import Conditioned, NoisyToy, bound, noisy, row_term, sampled, states

from lm_eval_duel import Duel, reference
from lm_eval_duel.core import noise as noises
from lm_eval_duel.core.row_checks import FIRST
from lm_eval_duel.core.windows import Window
from lm_eval_duel.errors import DuelError, InconsistentOutput, NotFinite
from lm_eval_duel.estimators.noised_elbo import NoisedElbo
from lm_eval_duel.estimators.subsets.lattice import Lattice

TOYS = {
    "uniform plugin": NoisyToy(),
    "uniform denoiser": NoisyToy(prediction="denoiser"),
    "hybrid plugin": NoisyToy(share=0.2),
    "hybrid denoiser": NoisyToy(share=0.2, prediction="denoiser"),
    "masks": NoisyToy(share=0.0),
    "conditioned": Conditioned(),
    "conditioned denoiser": Conditioned(prediction="denoiser"),
}
PLAIN = [name for name in TOYS if "conditioned" not in name]
TEXT = (1, 2)
PROCESSES = [(name, "none") for name in PLAIN] + [
    (name, kind) for name in ("conditioned", "conditioned denoiser") for kind in ("none", "twice", "chain")
]


def without_noise(toy):
    toy.noise_training = None
    return toy


def times(*values):
    """Times and their rests as planes (1, 1)."""
    return [torch.tensor([[value]], dtype=torch.float64) for value in values]


def observed_and_statistics(toy, x, z, before, now, t, prediction):
    """What the estimator knows about a noisy row `z` of the text `x` at time t."""
    clean = torch.tensor([x])
    number = torch.where(z == toy.mask_id, -1, z) if toy.masks else z
    observed = noises.Observed(number[None] == clean, number[None] < 0)
    shift = noises.as_plugin(now, observed.masked) if prediction == "denoiser" else torch.zeros(1, len(x)).double()
    ratio = torch.where(before.u > 0, before.a / before.u, 0.0).expand(1, len(x))
    noisy = torch.where(observed.masked, clean, number[None])
    values = noises.statistics(toy.logits(z, t), clean[0], noisy[0], shift[0], ratio[0])
    return noises.Statistics(*(value[None] for value in values)), observed


@pytest.mark.parametrize("name", PLAIN)
def test_three_numbers_give_the_terms_of_the_specification(name):
    """Also: a denoiser's kernel, a mixture over x_0, is that of the plug-in which it is converted to."""
    toy, steps = TOYS[name], 3
    prediction, noise = toy.noise_training.prediction, toy.noise_training.noise
    for i in range(1, steps + 1):
        before, now = (noise.level(*times(n / steps, (steps - n) / steps)) for n in (i - 1, i))
        for z in states(toy, 2):
            reached = math.prod(float(noisy(x, *toy.level(i / steps))[token]) for x, token in zip(TEXT, z, strict=True))
            if not reached:
                continue
            stats, observed = observed_and_statistics(toy, TEXT, z, before, now, i / steps, prediction)
            P = reference.log_softmax(toy.logits(z, i / steps)).exp()
            levels = toy.level(i / steps), toy.level((i - 1) / steps)
            wanted = row_term(TEXT, z, P, *levels, prediction == "denoiser")
            assert float(noises.step_kl(before, now, stats, observed).sum()) == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize(("name", "conditioning"), PROCESSES)
def test_the_process_is_a_distribution_and_the_bound_is_one(name, conditioning):
    toy, steps = TOYS[name], 2
    p = sampled(toy, 2, steps, conditioning)
    every_path = sampled(toy, 2, steps, conditioning, merged=False)
    texts = list(itertools.product(range(3), repeat=2))
    assert math.fsum(p[text] for text in texts) == pytest.approx(1, abs=1e-12)
    assert [p[text] for text in texts] == pytest.approx([every_path[text] for text in texts], abs=1e-12)
    assert all(bound(toy, text, steps, conditioning) >= -math.log(p[text]) - 1e-12 for text in texts)


@pytest.mark.parametrize(("name", "conditioning"), PROCESSES)
def test_the_estimate_is_within_its_errors_and_they_cover(name, conditioning):
    """A right estimate is beyond 4 errors once in 1,000 (16 replicates)."""
    toy, steps = TOYS[name], 3 if conditioning == "none" else 2
    exact = bound(toy, TEXT, steps, conditioning)
    distances = []
    for seed in range(5):
        estimator = NoisedElbo(toy, samples=2048, steps=steps, self_conditioning=conditioning, seed=seed)
        [score] = estimator.log_prob([Window((), TEXT)])
        assert math.fsum(score.token_logprobs) == pytest.approx(score.log_prob, abs=1e-9)
        distances.append((score.log_prob + exact) / score.stderr)
    assert max(map(abs, distances)) < 4 and 0.3 < torch.tensor(distances).std() < 2


@pytest.mark.slow
@pytest.mark.parametrize("steps", [16, math.inf])
def test_the_told_error_is_that_of_the_estimate(steps):
    """Its variance over seeds; draws at different times differ by more than those at one time, in a long text."""
    toy, window = NoisyToy(length=16), Window((), tuple(n * n % 3 for n in range(16)))
    scores = [NoisedElbo(toy, samples=8, steps=steps, seed=seed).log_prob([window])[0] for seed in range(60)]
    values, told = (torch.tensor(of) for of in zip(*((score.log_prob, score.stderr) for score in scores), strict=True))
    assert 0.5 < float(values.var() / told.square().mean()) < 2  # its spread is about 0.2


def limit(toy, x):
    """The bound with infinitely many steps: all noisy rows, and Gauss's quadrature over the time's uniform number."""
    noise, total = toy.noise_training.noise, 0.0
    for node, share in zip(*numpy.polynomial.legendre.leggauss(32), strict=True):
        t, rest, weight = noise.time_from_uniform(*times((node + 1) / 2))
        now = noise.level(t, rest)
        a, b = toy.level(float(t))
        for z in states(toy, len(x)):
            chance = math.prod(float(noisy(token, a, b)[seen]) for token, seen in zip(x, z, strict=True))
            if chance:
                stats, observed = observed_and_statistics(toy, x, z, now, now, float(t), toy.noise_training.prediction)
                rate = noises.limit_rate(now, noise.rates(t, rest), stats, observed).sum()
                total += float(weight) * share / 2 * chance * float(rate)
    return total


@pytest.mark.parametrize(("name", "order"), [("uniform plugin", 1), ("hybrid plugin", 0.85), ("masks", 1)])
def test_many_steps_approach_the_limit(name, order):
    toy, x = TOYS[name], (2, 1)
    exact = limit(toy, x)
    first, second = (abs(bound(toy, x, steps) - exact) for steps in (16, 64))
    assert second < 0.1 * exact and first / second == pytest.approx(4**order, rel=0.35)
    [score] = NoisedElbo(toy, samples=1024, steps=math.inf).log_prob([Window((), x)])
    assert abs(score.log_prob + exact) < 4 * score.stderr and score.stderr < 0.05 * exact


def test_masks_alone_give_the_mean_over_all_orders():
    toy, x = NoisyToy(share=0.0, timed=False), (2, 1)
    wanted = (
        Lattice(without_noise(NoisyToy(share=0.0, timed=False)), 2, value="elbo_exact")
        .log_prob([Window((), x)])[0]
        .log_prob
    )
    assert -limit(toy, x) == pytest.approx(wanted, abs=1e-4)
    toy.noise_training = toy.noise_training._replace(
        noise=noises.Hybrid(3, 1e-9)
    )  # GIDD whose share of uniform noise vanishes
    assert -limit(toy, x) == pytest.approx(wanted, abs=1e-2)


def test_a_denoiser_without_the_time_grows_with_the_logarithm_of_the_steps():
    toy = NoisyToy(prediction="denoiser", timed=False, scale=0.3)
    slope = (bound(toy, TEXT, 128) - bound(toy, TEXT, 64)) / math.log(2)
    certain = reference.log_softmax(toy.logits(torch.tensor(TEXT), 0.0)).exp()
    assert slope == pytest.approx(sum(1 - float(certain[ell, x]) for ell, x in enumerate(TEXT)), rel=0.1)
    with pytest.raises(DuelError, match="no limit"):
        NoisedElbo(toy, steps=math.inf)


def test_float32_is_enough_for_a_large_vocabulary():
    tokens = 262_144
    noise, generator = noises.Uniform(tokens), torch.Generator().manual_seed(1)
    logits = 4 * torch.randn(3, tokens, generator=generator, dtype=torch.float64)
    clean, noisy = torch.tensor([7, 8, 9]), torch.tensor([7, 5, logits[2].argmax()])
    observed = noises.Observed((noisy == clean)[None], torch.zeros(1, 3, dtype=torch.bool))
    for step in (1, 2, 24, 48):
        before, now = (noise.level(*times(n / 48, (48 - n) / 48)) for n in (step - 1, step))
        ratio = torch.where(before.u > 0, before.a / before.u, 0.0)[0].expand(3)
        shift = noises.as_plugin(now, observed.masked)[0]
        terms = []
        for dtype in (torch.float32, torch.float64):
            values = noises.statistics(logits.to(dtype), clean, noisy, shift, ratio)
            terms.append(noises.step_kl(before, now, noises.Statistics(*(v[None] for v in values)), observed))
        assert torch.allclose(*terms, rtol=0, atol=2e-6)


def test_a_wrong_reading_of_the_output_is_another_process():
    """Both are bounds; they are told apart."""
    read = {kind: NoisyToy(prediction=kind) for kind in ("plugin", "denoiser")}
    bounds = {kind: bound(toy, TEXT, 4) for kind, toy in read.items()}
    assert abs(bounds["plugin"] - bounds["denoiser"]) > 0.1
    for kind, exact in bounds.items():
        [score] = NoisedElbo(read["plugin"], prediction=kind, samples=1024, steps=4).log_prob([Window((), TEXT)])
        assert abs(score.log_prob + exact) < 4 * score.stderr


def test_canvases_add_up():
    toy = NoisyToy(length=4)
    toy.block = 2
    whole = NoisedElbo(toy, samples=2048, steps=2).log_prob([Window((0,), (1, 2, 1))])[0]
    parts = NoisedElbo(toy, samples=2048, steps=2).log_prob([Window((0,), (1, 2)), Window((0, 1, 2), (1,))])
    error = math.hypot(whole.stderr, *(part.stderr for part in parts))
    assert abs(whole.log_prob - sum(part.log_prob for part in parts)) < 4 * error


def test_numbers_do_not_depend_on_the_batch():
    toy = NoisyToy(length=6, share=0.2)
    windows = [Window((), (1, 2, 0)), Window((2,), (1, 1)), Window((), (1, 2, 0)), Window((0, 1), (2, 2, 1), (0,))]
    together = NoisedElbo(toy, samples=32, steps=4).log_prob(windows)
    alone = [NoisedElbo(toy, samples=32, steps=4, batch_size=1).log_prob([window])[0] for window in windows]
    assert [w.log_prob for w in together] == pytest.approx([w.log_prob for w in alone], abs=1e-9)
    assert [w.stderr for w in together] == pytest.approx([w.stderr for w in alone], abs=1e-9)
    estimator = NoisedElbo(toy, samples=32, steps=4)
    estimator.log_prob(windows)
    assert estimator.counts.rows == 3 * 32  # the equal window once


def test_out_of_memory_halves_the_batch():
    toy = NoisyToy(length=6)
    exact, plain = NoisedElbo(toy, samples=32).log_prob([Window((), (1, 2, 0))])[0], toy.features

    def small(ids, real, t=None):
        if len(ids) > 5:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(ids, real, t)

    toy.features = small
    estimator = NoisedElbo(toy, samples=32)
    assert estimator.log_prob([Window((), (1, 2, 0))])[0].log_prob == pytest.approx(exact.log_prob, abs=1e-9)


@pytest.mark.row_checks
@pytest.mark.parametrize("conditioning", ["none", "chain"])
def test_rows_that_others_change_end_a_run(conditioning):
    toy = Conditioned(length=6)
    plain, windows = toy.features, [Window((), (1, 2, 0, n % 3)) for n in range(3)]
    arguments = {"samples": 32, "steps": 4, "self_conditioning": conditioning}
    ordinary = NoisedElbo(toy, **arguments)
    ordinary.log_prob(windows)
    assert ordinary.counts.rows_checked >= FIRST and ordinary.counts.rows_differing == 0
    toy.features = lambda ids, *args, **more: plain(ids, *args, **more) * (1 + (len(ids) > 4))
    with pytest.raises(InconsistentOutput):
        NoisedElbo(toy, **arguments).log_prob(windows)


REFUSED = [
    ({"self_conditioning": "twice"}, "not among its inputs"),
    ({"steps": 0}, "steps"),
    ({"prediction": "plug"}, "plugin"),
]


@pytest.mark.parametrize(("arguments", "words"), REFUSED)
def test_arguments_that_do_not_apply(arguments, words):
    with pytest.raises(DuelError, match=words):
        NoisedElbo(NoisyToy(), **arguments)


def test_other_estimators_name_the_one_that_fits():
    with pytest.raises(DuelError, match="noised_elbo"):
        Duel(NoisyToy(), "greedy")
    with pytest.raises(DuelError, match="estimator=elbo"):
        NoisedElbo(without_noise(NoisyToy(share=0.0)))
    with pytest.raises(DuelError, match="chain"):
        NoisedElbo(TOYS["conditioned"], steps=math.inf, self_conditioning="chain")
    with pytest.raises(DuelError, match="tail"):
        NoisedElbo(NoisyToy()).log_prob([Window((), (1,), tail=1)])


def test_a_chain_reads_the_output_of_the_step_before():
    toy, text = TOYS["conditioned"], (2, 1)
    chain, none = (bound(toy, text, 2, kind) for kind in ("chain", "none"))
    estimator = NoisedElbo(toy, samples=1 << 13, steps=2, self_conditioning="chain")
    [score] = estimator.log_prob([Window((), text)])
    assert abs(score.log_prob + chain) < 4 * score.stderr < abs(chain - none)


def test_nan_names_its_window():
    class Poisoned(NoisyToy):
        def features(self, ids, real, t=None):
            return super().features(ids, real, t).masked_fill((ids[:, :1] == 2)[:, :, None], math.nan)

    windows = [Window((1,), (0, 1)), Window((2,), (0, 1))]
    with pytest.raises(NotFinite, match=r"Window 1, ") as raised:
        NoisedElbo(Poisoned(), samples=16).log_prob(windows)
    assert raised.value.window == 1
