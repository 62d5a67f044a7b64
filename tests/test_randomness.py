"""Law 23: random numbers that should be independent are, and those that are shared are added up.

Every test states a statistic of n draws that has the mean 0 and about the variance 1 if draws are independent, and
fails beyond 4 standard errors: a right package fails for one seed in ten thousand, and the seeds are fixed.
"""

import itertools
import math
import random
from functools import partial

import pytest
import torch
from attends import Attends
from laws import slow_but
from noised_toys import NoisyToy
from toys import Toy

from lm_eval_duel import Duel
from lm_eval_duel.core.hashing import hashed, uniform
from lm_eval_duel.core.windows import Window
from lm_eval_duel.estimators.arguments import ElboArguments, NoisedElboArguments, TwoPhaseArguments
from lm_eval_duel.estimators.elbo import Elbo
from lm_eval_duel.estimators.noised_elbo import NoisedElbo
from lm_eval_duel.estimators.totals import Total
from lm_eval_duel.estimators.two_phase import TwoPhase


def texts(count, length, tokens=3, seed=0):
    """Windows of different random texts."""
    draw = random.Random(seed)
    drawn = set()
    for _ in range(2 * count):
        drawn.add(tuple(draw.randrange(tokens) for _ in range(length)))
    return [Window((), text) for text in sorted(drawn)[:count]]


def require_independent(one, other, what):
    """Fail if the products of two series of standardised numbers (n,) have another mean than 0."""
    mean = float((one * other).mean())
    assert abs(mean) < 4 / math.sqrt(len(one)), f"{what}: the correlation of {len(one)} pairs is {mean:.2f}"


# ---------------------------------------------------------------- uniform numbers


def test_a_number_depends_on_each_of_its_keys():
    """Of (window, seed, kind, draw), each changed alone gives numbers that are independent of the others."""
    keys = torch.arange(2000)
    numbers = {}
    for name, arguments in {
        "one": (keys, 0, 1, 0),
        "another window": (keys + 1, 0, 1, 0),
        "another seed": (keys, 1, 1, 0),
        "another kind": (keys, 0, 2, 0),
        "another draw": (keys, 0, 1, 1),
        "seed and draw swapped": (keys, 1, 1, 1),
    }.items():
        u = uniform(*arguments)
        assert float(u.min()) >= 0
        assert float(u.max()) < 1
        standardised = (u - 0.5) * math.sqrt(12)
        assert abs(float(standardised.mean())) < 4 / math.sqrt(len(u)), name
        assert abs(float((standardised**2).mean()) - 1) < 4 * math.sqrt(0.8 / len(u)), name
        numbers[name] = standardised
    for one, other in itertools.combinations(numbers, 2):
        require_independent(numbers[one], numbers[other], f"{one} and {other}")
    assert len(hashed(keys, 0).unique()) == len(keys)


def splitmix(state):
    """The next output of SplitMix64 from a state, in plain integers."""
    z = (state + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


@pytest.mark.parametrize("keys", [(0,), (3, 0), (-1, 2**62, 5), (-(2**63), 0, 7, 7)])
def test_a_hash_is_that_of_plain_integers(keys):
    """Whichever of the keys are tensors, of whatever shape."""
    assert splitmix(0) == 0xE220A8397B1DCDAF  # as published
    state = 0
    for key in keys:
        state = splitmix(state ^ splitmix(key % 2**64))
    for shapes in itertools.product([None, (), (1, 2), (3, 1)], repeat=len(keys)):
        shapes_of_tensors = [shape for shape in shapes if shape is not None]
        if not shapes_of_tensors:
            continue
        mixed = []  # plain integers and tensors
        for key, shape in zip(keys, shapes, strict=True):
            mixed.append(key if shape is None else torch.full(shape, key))

        hashes = hashed(*mixed)

        assert hashes.shape == torch.broadcast_shapes(*shapes_of_tensors)
        assert (hashes == state >> 1).all()


# ---------------------------------------------------------------- drawn blocks


@pytest.mark.parametrize("share", [0.2, 0.7])
def test_blocks_are_drawn_independently_with_the_same_share(share):
    """Of a block: P(drawn) = share. Of two blocks, of one window or of two, under one seed or two: share squared."""
    windows = texts(700, 12, seed=1)
    drawn = {}
    for seed in (0, 1):
        estimator = TwoPhase(Attends(length=12), "greedy", 3, TwoPhaseArguments(share), draw_seed=seed)
        weights = estimator.weights(windows)  # (N, 4)
        assert set(weights.unique().tolist()) == {0.0, 1 / share}
        z = ((weights > 0).double() - share) / math.sqrt(share * (1 - share))  # (N, 4)
        assert abs(float(z.mean())) < 4 / math.sqrt(z.numel()), "the share of drawn blocks"
        drawn[seed] = z
    z = drawn[0]
    for one, other in itertools.combinations(range(4), 2):
        require_independent(z[:, one], z[:, other], f"blocks {one} and {other} of a window")
    require_independent(z.flatten(), z.roll(1, 0).flatten(), "blocks of two windows")
    require_independent(z.flatten(), drawn[1].flatten(), "blocks under two seeds")


# ---------------------------------------------------------------- draws of bounds

BOUNDS = {
    "elbo": partial(Elbo, Toy(length=6), ElboArguments(16)),
    "elbo in blocks": partial(Elbo, Toy(length=6), ElboArguments(16, elbo_block=3)),
    "elbo by ratio": partial(Elbo, Toy(length=6), ElboArguments(16, "ratio")),
    "random tokens": partial(NoisedElbo, NoisyToy(length=6), NoisedElboArguments(16)),
}


@pytest.mark.parametrize("name", slow_but(BOUNDS, ("elbo in blocks", "random tokens")))
def test_errors_of_two_windows_and_of_two_seeds_are_independent(name):
    """Deviations from the mean over seeds, of windows that differ in one token."""
    windows = texts(24, 6, seed=2)
    rows = []
    for seed in range(12):
        scores = BOUNDS[name](draw_seed=seed).log_prob(windows)
        rows.append([score.log_prob for score in scores])
    values = torch.tensor(rows, dtype=torch.float64)  # (S, N)

    deviation = values - values.mean(0)
    z = deviation / deviation.std(0)  # (S, N)
    require_independent(z.flatten(), z.roll(1, 1).flatten(), "errors of two windows")
    # within a window, deviations from their mean over S seeds have the correlation -1 / (S - 1)
    require_independent(z[1:].flatten(), z[:-1].flatten(), "errors of two seeds")

    stderrs = [score.stderr for score in BOUNDS[name](draw_seed=0).log_prob(windows)]
    sums = deviation.sum(1)  # (S,)
    assert 0.5 < float(sums.std()) / math.hypot(*stderrs) < 1.7, "the error of a sum is the hypot of its windows'"


def test_replicates_of_a_bound_are_independent():
    """Their spread is the error of the mean, which draws with one shift in common would make too small."""
    elbo = Elbo(Toy(length=6), ElboArguments(16))
    windows = texts(60, 6, seed=8)
    group = elbo.open(windows, list(range(len(windows))))
    spans = group.fresh(elbo.block_spans(group))

    strata = []  # the first draw of each replicate
    for draw_index in range(elbo.replicates):
        strata.append(elbo.strata(group, spans, torch.full_like(spans.row, draw_index)))

    z = (torch.stack(strata) - 0.5) * math.sqrt(12)  # (S, N) uniform numbers, standardised
    require_independent(z[1:].flatten(), z[:-1].flatten(), "strata of two replicates")


def test_shared_and_independent_errors_add_up_as_they_should():
    """Copies of a window have one draw, so its error counts as often as the window; other windows add as hypot."""
    duel = Duel(Toy(length=6), estimator="elbo", mc_samples=16)
    one, two, *_ = texts(3, 6)
    windows = [one, two, one, one]
    scores = duel.log_prob(windows)

    total = Total.from_scores(windows, scores, "elbo")
    assert total.stderr == pytest.approx(math.hypot(3 * scores[0].stderr, scores[1].stderr))

    first = Total.from_scores(windows[:2], scores[:2], "elbo")
    second = Total.from_scores(windows[2:], scores[2:], "elbo")
    assert Total.from_parts([first, second]).stderr == pytest.approx(total.stderr)


@pytest.mark.parametrize("block", [pytest.param(None, marks=pytest.mark.slow), 3])
def test_an_elbo_masks_every_number_and_every_place_equally_often(block):
    """n uniform on 1..m, each set of n positions equally likely, also of a block that is shorter."""
    windows = texts(24, 8, seed=5)
    counts = {}  # by block: of each draw, how many positions it masks
    places = {}  # by block: all masked positions of all draws
    for window in windows:
        for draw in Elbo(Toy(length=8), ElboArguments(16, elbo_block=block), draw_seed=7).draws(window):
            for n, (masked, _) in enumerate(draw):
                counts.setdefault(n, []).append(len(masked))
                places.setdefault(n, []).extend(masked)

    for n, numbers in counts.items():
        size = max(numbers)
        expected = len(numbers) / size
        spread = 0.0  # Pearson's statistic, with size - 1 degrees of freedom
        for k in range(1, size + 1):
            spread += (numbers.count(k) - expected) ** 2 / expected
        assert spread < size - 1 + 4 * math.sqrt(2 * size), f"numbers of masked positions of block {n}"
        seen = [places[n].count(place) for place in sorted(set(places[n]))]
        assert len(seen) == size
        assert max(seen) - min(seen) < 8 * math.sqrt(len(numbers) / 4), f"places of block {n}"
