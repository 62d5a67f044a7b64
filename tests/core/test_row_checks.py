"""Rows evaluated again alone during a run: what is found, what is not stopped, and what it costs."""

import itertools
import math
from functools import partial

import pytest
import torch
from laws import slow_but
from toys import BlockCausal, Causal, CausalPrefix, Rotary, Small, Toy

from lm_eval_duel import Duel
from lm_eval_duel.core.float_noise import FLOAT32
from lm_eval_duel.core.lanes import Lanes, Rows
from lm_eval_duel.core.row_checks import FIRST, SHARE, RowChecks, checks_among, choose_lanes
from lm_eval_duel.core.scores import Counts
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.filters import warped
from lm_eval_duel.errors import InconsistentOutput
from lm_eval_duel.estimators import trajectories
from lm_eval_duel.estimators.arguments import ElboArguments
from lm_eval_duel.estimators.duel import Autoregressive, DuelEstimator
from lm_eval_duel.estimators.elbo import Elbo
from lm_eval_duel.estimators.lattice import Lattice

pytestmark = pytest.mark.row_checks


class Faulty(Toy):
    """What a row's predictions are multiplied by, given the flat position of its tokens in the call."""

    coarse = False
    calls = 0

    def factor(self, row, rows, token):
        return torch.ones_like(token)

    def features(self, ids, real):
        self.calls += 1
        token = torch.arange(ids.numel()).view(ids.shape)  # (R, L)
        return super().features(ids, real) * self.factor(token[:, :1] // ids.shape[1], len(ids), token)[..., None]


class Capacity(Faulty):
    def factor(self, row, rows, token):
        return torch.where(token < 128, 1.0, 0.5)


class Crowd(Faulty):
    def factor(self, row, rows, token):
        return torch.full(token.shape, 0.9 if rows > 16 else 1.0)


class Counter(Faulty):
    def factor(self, row, rows, token):
        return torch.full(token.shape, 0.9 if self.calls > 40 else 1.0)


class Neighbour(Faulty):
    """The last row of a call of several depends on the others."""

    def factor(self, row, rows, token):
        return torch.where((row == rows - 1) & (rows > 1), 0.9, 1.0).expand(token.shape)


class Offset(Crowd):
    """Logits with a large common part, which cancels."""

    def features(self, ids, real):
        return super().features(ids, real) + 1000


class Border(Toy):
    """Float noise, of calls with several rows, in distributions at the border of top_p=0.8."""

    coarse = False

    def features(self, ids, real):
        p = torch.tensor([0.5, 0.3, 0.2, 0.0], dtype=torch.float64)
        noise = torch.tensor([0, 0, 1e-9 if len(ids) > 1 else -1e-9, 0], dtype=torch.float64)
        return (p.clamp(min=1e-30).log() + noise).expand(*ids.shape, 4).clone()


def windows(count, length=8, tokens=3, context=0, seed=0):
    drawn = torch.randint(tokens, (count, length), generator=torch.Generator().manual_seed(seed)).tolist()
    return [Window(row[:context], row[context:]) for row in drawn]


def test_the_places_checked_differ_with_the_window():
    rows = Rows.from_windows(windows(1), torch.device("cpu"))
    lanes = Lanes.fresh(rows, torch.zeros(4, dtype=torch.int64), torch.arange(0, 8, 2), torch.full((4,), 2))

    chosen = set()
    for window in range(40):
        chosen.update(choose_lanes(lanes, 1, [window]))

    assert chosen == {0, 1, 2, 3}


FAULTS = [(Capacity, None), (Crowd, None), (Counter, 2), (Neighbour, 8)]


@pytest.mark.parametrize(("fault", "batch_size"), FAULTS)
def test_rows_that_others_or_earlier_calls_change_end_a_run(fault, batch_size):
    estimator = DuelEstimator(fault(), "greedy", 4, batch_size=batch_size)
    finished = {}
    with pytest.raises(InconsistentOutput) as raised:
        for index, score in estimator.stream(windows(40)):
            finished[index] = score
    assert raised.value.window is not None
    assert f"Window {raised.value.window}," in str(raised.value)
    assert estimator.counts.rows_differing == 1
    for score in finished.values():
        assert math.isfinite(score.log_prob)


@pytest.mark.parametrize(("fault", "batch_size"), FAULTS)
def test_with_coarse_numbers_they_are_counted(fault, batch_size, monkeypatch):
    monkeypatch.setattr(fault, "coarse", True)
    estimator = DuelEstimator(fault(), "greedy", 4, batch_size=batch_size)
    assert len(estimator.log_prob(windows(40))) == 40
    assert 0 < estimator.counts.rows_differing <= estimator.counts.rows_checked


@pytest.fixture
def tf32_products():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


def test_with_products_in_tf32_they_are_counted(tf32_products):
    estimator = DuelEstimator(Crowd(), "greedy", 4)
    assert len(estimator.log_prob(windows(40))) == 40
    assert 0 < estimator.counts.rows_differing <= estimator.counts.rows_checked


def filtered(**more):
    DuelEstimator(warped(Crowd(), **more), "left_to_right", 4).log_prob(windows(20))


@pytest.mark.parametrize(
    "call",
    [
        lambda: Elbo(Crowd(), ElboArguments(64)).log_prob(windows(20)),
        lambda: Lattice(Crowd(), block=4).log_prob(windows(20)),
        lambda: DuelEstimator(Crowd(), "left_to_right", 4).log_prob(windows(20)),
        lambda: DuelEstimator(Offset(), "greedy", 4).log_prob(windows(20)),
        lambda: DuelEstimator(Crowd(), "greedy", 4).sample([window.target for window in windows(30, length=4)], 4),
        lambda: DuelEstimator(Crowd(), "greedy", 4).replay(windows(20), [(0, 1, 2, 3) * 2] * 20),
        partial(filtered, temperature=0.5),
        partial(filtered, top_k=2),
        partial(filtered, top_p=0.9),
    ],
)
def test_every_way_through_a_network_is_checked(call):
    with pytest.raises(InconsistentOutput):
        call()


@pytest.mark.parametrize("rule", ["greedy:k=4", "left_to_right:k=4", "greedy:k=1"])
def test_something_was_compared_and_nothing_waits(rule):
    """At the end of each call, also of one that takes a single step."""
    estimator = DuelEstimator(Toy(), rule, 4)
    for call in (
        lambda duel: duel.log_prob(windows(1, length=4)),
        lambda duel: duel.replay(windows(1, length=4), [(0, 0, 0, 0)]),
        lambda duel: duel.sample([(1,)], 4),
        lambda duel: trajectories.follow(duel, windows(1, length=4), [(0, 0, 0, 0)], None),
    ):
        duel = estimator.with_counts(Counts())
        call(duel)
        assert duel.counts.lane_steps
        assert duel.counts.rows_checked >= 1
        assert not duel.row_checks.waiting


def test_a_token_at_the_border_of_top_p_stops_no_run():
    network = warped(Border(), top_p=0.8)
    [top_p] = network.filters

    def left_out(rows):
        """How many tokens have no probability in the first row of so many."""
        features = Border().features(torch.zeros(rows, 1), None)
        return top_p(network.head(features[:1, 0]), None).isinf().sum()

    assert left_out(2) != left_out(1)
    estimator = DuelEstimator(network, "left_to_right", 4)
    estimator.log_prob(windows(20, tokens=2))
    assert estimator.counts.rows_checked >= FIRST
    assert estimator.counts.rows_differing == 0


def ordinary():
    """Estimators of every kind of view, and windows of two lengths."""
    ragged = [*windows(6), *windows(4, length=5, seed=1)]
    prefixed = [Window((0,), window.target) for window in windows(5, length=7)]
    toys = (Toy(), Toy(honours_padding=False), Rotary(), BlockCausal(4, length=8), Small(3))
    for toy in toys:
        yield DuelEstimator(toy, "greedy", 4), ragged
    yield DuelEstimator(Rotary(), "threshold:mu=0.5", 4, batch_size=2), ragged
    yield DuelEstimator(Toy(), "random", 4), ragged
    yield Autoregressive(Causal()), ragged
    yield DuelEstimator(CausalPrefix(length=8), "greedy", "auto"), prefixed
    yield Elbo(Toy(), ElboArguments(32)), ragged
    yield Lattice(Toy(), block=4), ragged


def test_ordinary_networks_never_differ(subtests):
    for estimator, scored in ordinary():
        with subtests.test(f"{type(estimator.denoiser).__name__} {estimator.describe()}"):
            estimator.log_prob(scored)
            counts = estimator.counts
            assert counts.rows_checked >= min(FIRST, counts.lane_steps)
            assert counts.rows_differing == 0


def test_a_training_run_may_change_the_weights_between_steps():
    toy = Toy()
    toy.fixed_weights = False
    estimator = DuelEstimator(toy, "greedy", 4, batch_size=1)
    for _ in estimator.stream(windows(8)):
        toy.out = toy.out * 1.1
    assert estimator.counts.rows_checked >= FIRST


class Planted:
    """A function in float32, as `from_model` takes it, whose logits are multiplied by a factor that grows."""

    vocabulary = 20
    length = 24
    width = 16

    def __init__(self, fault=lambda calls, rows: 1.0):
        generator = torch.Generator().manual_seed(0)
        self.embed = torch.randn(self.vocabulary + 1, self.width, generator=generator)
        self.mix = torch.randn(self.length, self.length, generator=generator) / self.length**0.5
        self.out = torch.randn(self.width, self.vocabulary + 1, generator=generator)
        self.calls = 0
        self.fault = fault

    def __call__(self, ids, real):
        self.calls += 1
        x = self.mix[: ids.shape[1], : ids.shape[1]] @ self.embed[ids]  # (R, L, D)
        return torch.tanh(x) @ self.out * self.fault(self.calls, len(ids))

    def duel(self, rule="greedy", **more):
        """A `Duel` on it whose calls count from 0; the self-tests see no fault."""
        fault = self.fault
        self.fault = lambda calls, rows: 1.0
        duel = Duel.from_model(self, mask_token_id=self.vocabulary, max_length=self.length, rule=rule, **more)
        self.calls = 0
        self.fault = fault
        return duel


def late(calls, rows):
    return 1.05 if calls > 60 else 1.0


def by_calls(calls, rows):
    return 1 + 1e-5 * calls


def by_rows(calls, rows):
    return 1 + 1e-4 * math.log(rows)


def drifting(duel, method):
    prompts = [window.target[:12] for window in windows(40, 12, 20)]
    if method == "log_prob":
        duel.log_prob(windows(40, 24, 20))
    elif method == "sample":
        duel.sample(prompts, 12)
    else:
        duel.replay(windows(40, 24, 20), [range(24)] * 40)


DRIFTS = [*itertools.product((late, by_calls), ("log_prob", "sample", "replay"))]


@pytest.mark.parametrize(("fault", "method"), slow_but(DRIFTS, [(late, "sample"), (by_calls, "log_prob"), DRIFTS[5]]))
def test_a_network_in_memory_that_changes_during_a_run_is_found(fault, method):
    duel = Planted(fault).duel("greedy", block=24, batch_size=4)
    with pytest.raises(InconsistentOutput):
        drifting(duel, method)


def test_in_one_step_for_each_window_too():
    duel = Planted(late).duel("greedy:k=24", block=24, batch_size=1)
    with pytest.raises(InconsistentOutput):
        duel.log_prob(windows(80, 24, 20, context=4))


def test_a_later_run_of_the_same_duel_is_repeated_at_its_end():
    network = Planted()
    duel = network.duel("greedy", block=24, batch_size=4)
    duel.log_prob(windows(16, 24, 20))
    network.calls = 0
    network.fault = lambda calls, rows: 1.05 if calls > 20 else 1.0
    with pytest.raises(InconsistentOutput):
        duel.log_prob(windows(4, 24, 20))


def test_a_small_change_that_all_lanes_have_in_common_is_found():
    duel = Planted(by_rows).duel("greedy", block=24, batch_size=16)
    with pytest.raises(InconsistentOutput, match=r"those of the \d+ lanes before") as raised:
        duel.log_prob(windows(64, 24, 20, context=4))
    assert duel.estimator.row_checks.drift.significant
    assert f" {duel.counts.rows_checked - 1} lanes" in str(raised.value)


def test_a_drift_of_coarse_numbers_is_counted(monkeypatch):
    duel = Planted(by_rows).duel("greedy", block=24, batch_size=16)
    monkeypatch.setattr(type(duel.denoiser), "coarse", True)
    duel.log_prob(windows(64, 24, 20, context=4))
    assert duel.counts.rows_differing == 1


class LastRow(Planted):
    """The last row of a call of several differs by less than float noise may differ at the very most."""

    def __call__(self, ids, real):
        logits = super().__call__(ids, real)
        if len(ids) > 1 and self.calls > 10:
            logits[-1] *= 1 + FLOAT32 / 10
        return logits


def test_a_difference_far_above_the_noise_of_the_call_is_found():
    network = LastRow()
    duel = network.duel("greedy", block=24, batch_size=4)
    network.calls = 10
    with pytest.raises(InconsistentOutput):
        duel.log_prob(windows(40, 24, 20, context=4))


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_an_ordinary_network_in_memory_has_neither_differences_nor_a_drift(scale):
    network = Planted()
    network.out *= scale
    duel = network.duel("greedy", block=24, batch_size=16)
    duel.log_prob(windows(32, 24, 20))
    assert duel.counts.rows_checked > 2 * FIRST
    assert duel.counts.rows_differing == 0


def test_the_share_of_a_long_run_is_small():
    checks = RowChecks()
    counts = Counts()
    lanes_per_row = 1.0
    for _ in range(20_000):
        counts.rows_checked += checks.number_due(counts, 10, lanes_per_row)
        counts.lane_steps += 10
    assert SHARE <= counts.rows_checked / counts.lane_steps < 1.05 * SHARE
    assert counts.rows_checked == int(FIRST + checks_among(200_000))

    few = Counts()
    assert checks.number_due(few, 3, lanes_per_row) == 3
    assert checks.number_due(few, 50, 10 * lanes_per_row) >= FIRST
