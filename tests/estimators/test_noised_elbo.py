"""Laws of the bound under noise that is not masks, on toys that can be enumerated."""

import itertools
import math

import pytest
import torch
from laws import slow_but
from noised_toys import Conditioned, NoisyToy, bound, sampled
from toys import Toy

from lm_eval_duel import Duel
from lm_eval_duel.core import noise as noises
from lm_eval_duel.core.row_checks import FIRST
from lm_eval_duel.core.windows import Window
from lm_eval_duel.errors import DuelError, InconsistentOutput, NotFinite
from lm_eval_duel.estimators.arguments import NoisedElboArguments
from lm_eval_duel.estimators.lattice import Lattice
from lm_eval_duel.estimators.noised_elbo import NoisedElbo

TOYS = {
    "uniform plugin": NoisyToy(),
    "uniform denoiser": NoisyToy(prediction="denoiser"),
    "hybrid plugin": NoisyToy(share=0.2),
    "hybrid denoiser": NoisyToy(share=0.2, prediction="denoiser"),
    "masks": NoisyToy(share=0.0),
    "conditioned": Conditioned(),
    "conditioned denoiser": Conditioned(prediction="denoiser"),
}
TEXT = (1, 2)
PROCESSES = [  # a toy, and the self-conditioning of the process
    ("uniform plugin", "none"),
    ("uniform denoiser", "none"),
    ("hybrid plugin", "none"),
    ("hybrid denoiser", "none"),
    ("masks", "none"),
    ("conditioned", "none"),
    ("conditioned", "twice"),
    ("conditioned", "chain"),
    ("conditioned denoiser", "none"),
    ("conditioned denoiser", "twice"),
    ("conditioned denoiser", "chain"),
]
FAST = [
    ("uniform plugin", "none"),
    ("hybrid denoiser", "none"),
    ("conditioned", "twice"),
    ("conditioned denoiser", "chain"),
]


def step_level(noise, step, steps):
    """The noise level after a step, for a plane (1, 1)."""
    t = torch.tensor([[step / steps]], dtype=torch.float64)
    rest = torch.tensor([[(steps - step) / steps]], dtype=torch.float64)
    return noise.level(t, rest)


@pytest.mark.parametrize(("name", "conditioning"), slow_but(PROCESSES, FAST))
def test_the_process_is_a_distribution_and_the_bound_is_one(name, conditioning):
    """The probabilities of all texts sum to 1, and the bound of each is at least -log p (law 24)."""
    toy = TOYS[name]
    steps = 2
    texts = list(itertools.product(range(3), repeat=2))

    p = sampled(toy, 2, steps, conditioning)

    assert math.fsum(p[text] for text in texts) == pytest.approx(1, abs=1e-12)
    for text in texts:
        assert bound(toy, text, steps, conditioning) >= -math.log(p[text]) - 1e-12


@pytest.mark.parametrize(("name", "conditioning"), slow_but(PROCESSES, FAST))
def test_the_estimate_is_within_its_errors_and_they_cover(name, conditioning):
    """A right estimate is beyond 4 errors once in 1,000 (16 replicates)."""
    toy = TOYS[name]
    steps = 3 if conditioning == "none" else 2
    exact = bound(toy, TEXT, steps, conditioning)
    arguments = NoisedElboArguments(2048, steps, self_conditioning=conditioning)

    distances = []  # from the exact value, in standard errors
    for seed in range(5):
        [score] = NoisedElbo(toy, arguments, draw_seed=seed).log_prob([Window((), TEXT)])
        assert math.fsum(score.token_logprobs) == pytest.approx(score.log_prob, abs=1e-9)
        distances.append((score.log_prob + exact) / score.stderr)

    distances = torch.tensor(distances)
    assert distances.abs().max() < 4
    assert 0.3 < distances.std() < 2


@pytest.mark.slow
@pytest.mark.parametrize("steps", [16, math.inf])
def test_the_told_error_is_that_of_the_estimate(steps):
    """Its variance over seeds; draws at different times differ by more than those at one time, in a long text."""
    toy = NoisyToy(length=16)
    window = Window((), tuple(n * n % 3 for n in range(16)))

    values = []
    errors = []
    for seed in range(60):
        [score] = NoisedElbo(toy, NoisedElboArguments(16, steps), draw_seed=seed).log_prob([window])
        values.append(score.log_prob)
        errors.append(score.stderr)

    ratio = torch.tensor(values).var() / torch.tensor(errors).square().mean()
    assert 0.5 < float(ratio) < 2  # its spread is about 0.2


@pytest.mark.slow
@pytest.mark.parametrize("share", [None, 0.0, 0.2])
@pytest.mark.parametrize("steps", [48, math.inf])
def test_intervals_cover(share, steps):
    """Law 20, with the default number of draws, over networks of several sharpnesses.

    With uniform steps they held 38 to 55 % of the sharper ones; the exact value is a mean of 100 times the draws.
    """
    windows = []
    for k in range(2):
        target = [(3 * n * n + 5 * n * k + k) % 9 for n in range(12)]
        windows.append(Window((), target))

    covered = []
    for scale in (0.7, 2.0, 4.0):
        toy = NoisyToy(tokens=9, length=12, share=share, scale=scale)
        exact = NoisedElbo(toy, NoisedElboArguments(1 << 14, steps), draw_seed=987).log_prob(windows)
        for seed in range(20):
            scores = NoisedElbo(toy, NoisedElboArguments(steps=steps), draw_seed=seed).log_prob(windows)
            for score, value in zip(scores, exact, strict=True):
                covered.append(abs(score.log_prob - value.log_prob) <= 1.96 * score.stderr)

    assert sum(covered) >= 0.9 * len(covered)


def test_the_draws_of_steps_and_times_have_the_density_that_weights_them():
    """The mean of the weights below a border is the border's own share: unbiased for every integrand."""
    v = (torch.arange(1 << 16, dtype=torch.float64)[:, None] + 0.5) / (1 << 16)
    bound = NoisedElbo(TOYS["uniform plugin"], NoisedElboArguments(16, 7))
    step, weight = bound.step_from_uniform(v)
    for i in range(1, 8):
        assert float((weight * (step == i)).mean()) == pytest.approx(1, abs=1e-3)
    for noise in (noises.Uniform(3), noises.Hybrid(3, 0.2), noises.Hybrid(3, 0.0)):
        t, rest, weight = noise.time_from_uniform(v)
        assert torch.allclose(t + rest, torch.ones_like(t), atol=1e-12)
        for border in (1e-4, 1e-2, 0.3, 0.9, 0.999):
            assert float((weight * (t < border)).mean()) == pytest.approx(border, rel=1e-2)


@pytest.mark.parametrize("name", ["uniform plugin", pytest.param("hybrid plugin", marks=pytest.mark.slow)])
def test_many_steps_approach_the_limit(name):
    toy = TOYS[name]
    x = (2, 1)
    [limit] = NoisedElbo(toy, NoisedElboArguments(4096, math.inf)).log_prob([Window((), x)])
    distance_of_few = abs(bound(toy, x, 4) + limit.log_prob)
    distance_of_many = abs(bound(toy, x, 64) + limit.log_prob)
    assert limit.stderr < 0.1 * distance_of_few
    assert distance_of_many < 4 * limit.stderr + 0.1 * distance_of_few


@pytest.mark.parametrize(("noise", "within"), [(None, 0), (noises.Hybrid(3, 1e-9), 1e-2)])
def test_masks_alone_give_the_mean_over_all_orders(noise, within):
    """And so does GIDD whose share of uniform noise vanishes."""
    windows = [Window((), TEXT)]
    toy = NoisyToy(share=0.0, timed=False, scale=0.3)
    if noise is not None:
        toy.noise_training = toy.noise_training._replace(noise=noise)
    masked = NoisyToy(share=0.0, timed=False, scale=0.3)
    masked.noise_training = None

    [score] = NoisedElbo(toy, NoisedElboArguments(1 << 13, math.inf)).log_prob(windows)
    [expected] = Lattice(masked, 2, estimator="elbo_exact").log_prob(windows)

    assert score.stderr < 0.05
    assert abs(score.log_prob - expected.log_prob) < 4 * score.stderr + within


def test_float32_is_enough_for_a_large_vocabulary():
    tokens = 262_144
    noise = noises.Uniform(tokens)
    generator = torch.Generator().manual_seed(1)
    logits = 4 * torch.randn(3, tokens, generator=generator, dtype=torch.float64)
    clean = torch.tensor([7, 8, 9])
    noisy = torch.tensor([7, 5, logits[2].argmax()])
    observed = noises.Observed((noisy == clean)[None], torch.zeros(1, 3, dtype=torch.bool))
    for step in (1, 2, 24, 48):
        before = step_level(noise, step - 1, 48)
        now = step_level(noise, step, 48)
        ratio = torch.where(before.u > 0, before.a / before.u, 0.0)[0].expand(3)
        shift = noises.as_plugin(now, observed.masked)[0]

        def term(dtype):
            values = noises.statistics(logits.to(dtype), clean, noisy, shift, ratio)  # noqa: B023
            of_one_row = noises.Statistics(*(value[None] for value in values))
            return noises.step_kl(before, now, of_one_row, observed)  # noqa: B023

        assert torch.allclose(term(torch.float32), term(torch.float64), rtol=0, atol=2e-6)


def test_a_wrong_reading_of_the_output_is_another_process():
    """Both are bounds; they are told apart."""
    toy = NoisyToy(prediction="plugin")
    bounds = {"plugin": bound(toy, TEXT, 4), "denoiser": bound(NoisyToy(prediction="denoiser"), TEXT, 4)}
    assert abs(bounds["plugin"] - bounds["denoiser"]) > 0.1

    for prediction, exact in bounds.items():
        arguments = NoisedElboArguments(1024, 4, prediction=prediction)
        [score] = NoisedElbo(toy, arguments).log_prob([Window((), TEXT)])
        assert abs(score.log_prob + exact) < 4 * score.stderr


def test_canvases_add_up():
    toy = NoisyToy(length=4)
    toy.block = 2
    estimator = NoisedElbo(toy, NoisedElboArguments(2048, 2))

    [whole] = estimator.log_prob([Window((0,), (1, 2, 1))])
    first, second = estimator.log_prob([Window((0,), (1, 2)), Window((0, 1, 2), (1,))])

    error = math.hypot(whole.stderr, first.stderr, second.stderr)
    assert abs(whole.log_prob - (first.log_prob + second.log_prob)) < 4 * error


@pytest.mark.row_checks
@pytest.mark.parametrize("conditioning", ["none", "chain"])
def test_rows_that_others_change_end_a_run(conditioning):
    toy = Conditioned(length=6)
    plain = toy.features
    windows = [Window((), (1, 2, 0, n % 3)) for n in range(3)]
    arguments = NoisedElboArguments(32, 4, self_conditioning=conditioning)
    ordinary = NoisedElbo(toy, arguments)
    ordinary.log_prob(windows)
    assert ordinary.counts.rows_checked >= FIRST
    assert ordinary.counts.rows_differing == 0

    toy.features = lambda ids, *args, **more: plain(ids, *args, **more) * (1 + (len(ids) > 4))
    with pytest.raises(InconsistentOutput):
        NoisedElbo(toy, arguments).log_prob(windows)


def test_nan_names_its_window():
    class Poisoned(NoisyToy):
        def features(self, ids, real, t=None):
            return super().features(ids, real, t).masked_fill((ids[:, :1] == 2)[:, :, None], math.nan)

    windows = [Window((1,), (0, 1)), Window((2,), (0, 1))]
    with pytest.raises(NotFinite, match=r"Window 1, ") as raised:
        NoisedElbo(Poisoned(), NoisedElboArguments(16)).log_prob(windows)
    assert raised.value.window == 1


def test_a_tail_is_refused_because_the_noise_has_no_masks():
    """Not for a block border, which such a network does not have."""
    with pytest.raises(DuelError, match="noise") as raised:
        NoisedElbo(TOYS["uniform plugin"]).log_prob([Window((), TEXT), Window((), TEXT, tail=1)])
    assert raised.value.window == 1


@pytest.mark.parametrize(
    ("network", "arguments", "named"),
    [
        (NoisyToy(share=0.2), {"estimator": "noised_elbo", "block": 2, "grid": "row"}, ["block", "grid"]),
        (Toy(), {"estimator": "elbo", "mc_samples": 16, "rule": "margin", "grid": "row"}, ["rule", "grid"]),
        (Toy(), {"block": None, "grid": "row"}, ["grid"]),
        (Toy(), {"block": 2, "grid": "row"}, []),
        (Toy(), {"draw_seed": 3}, ["draw_seed"]),
        (Toy(), {"estimator": "mixture", "block": 2, "draw_seed": 3}, ["draw_seed"]),
        (NoisyToy(), {"draw_seed": 3, "self_conditioning": "none"}, ["draw_seed", "self_conditioning"]),
        (NoisyToy(), {"estimator": "noised_elbo", "self_conditioning": "none"}, ["self_conditioning"]),
        (NoisyToy(), {"estimator": "duel_seeds", "noise_seeds": 2, "draw_seed": 3}, ["draw_seed"]),
    ],
)
def test_arguments_that_change_nothing_are_named(network, arguments, named, caplog):
    without = {key: value for key, value in arguments.items() if key not in named}
    windows = [Window((), TEXT)]

    [score] = Duel(network, **arguments).log_prob(windows)
    [expected] = Duel(network, **without).log_prob(windows)

    assert score.log_prob == pytest.approx(expected.log_prob, abs=1e-12)
    assert len(caplog.messages) == bool(named)
    for name in named:
        assert name in caplog.text


def test_arguments_that_are_read_are_not_named(caplog):
    Duel(Toy(), estimator="elbo", draw_seed=3)
    Duel(Conditioned(), self_conditioning="none")
    assert not caplog.messages
