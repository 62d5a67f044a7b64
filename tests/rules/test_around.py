"""Rules around a rule: what the rule inside sees, and what is checked of a rule that a user wrote."""

import dataclasses
import itertools
import math
import random
from typing import ClassVar

import pytest
import torch
from attends import Attends
from laws import total
from random_lanes import random_case
from toys import Rotary, Toy

from lm_eval_duel import Duel, Window, rules
from lm_eval_duel.core import predictions as predictions_of_core
from lm_eval_duel.errors import DuelError, InconsistentOutput, RuleStalled
from lm_eval_duel.estimators.arguments import LatticeArguments, TwoPhaseArguments
from lm_eval_duel.estimators.duel import DuelEstimator
from lm_eval_duel.estimators.lattice import Lattice
from lm_eval_duel.estimators.two_phase import TwoPhase
from lm_eval_duel.rules.checked import FIRST_CALLS


def largest(lanes, scores):
    """The masked position with the largest of scores (C,), in the order of `masked.nonzero()`."""
    plane = torch.full(lanes.masked.shape, -math.inf, dtype=scores.dtype).masked_scatter(lanes.masked, scores)
    return lanes.masked & (rules.rank(-plane) < 1)


def from_dense(predictions, lanes):
    return largest(lanes, predictions.dense().max(1).values)


def from_features(predictions, lanes):
    logits = predictions.features.clone()
    logits[:, 3:] = -math.inf
    return largest(lanes, logits.log_softmax(1).max(1).values)


def from_apply(predictions, lanes):
    def score(features, entropy):
        assert features.shape[:1] == entropy.shape and entropy.isfinite().all()
        return features[:, :3].log_softmax(1).max(1).values

    return largest(lanes, predictions.apply(score, predictions.entropy)[lanes.masked])


def from_planes(predictions, lanes):
    assert torch.equal(predictions.masked, lanes.masked)
    for name in ("confidence", "margin", "log_margin", "entropy", "log_sum"):
        assert torch.equal(getattr(predictions, name).isfinite(), lanes.masked)
    assert torch.equal(predictions.argmax >= 0, lanes.masked)
    best = predictions.log_prob(predictions.argmax)  # (R, W)
    assert torch.equal(best.isfinite(), lanes.masked)
    return largest(lanes, best[lanes.masked])


def from_lanes(predictions, lanes):
    parts = [logits.log_softmax(1).max(1).values[row] for _, row, logits in predictions.by_lanes()]
    return largest(lanes, torch.cat(parts))


READERS = (from_dense, from_features, from_apply, from_planes, from_lanes)


@dataclasses.dataclass(frozen=True)
class Own(rules.Rule):
    """Greedy by definition, whatever of the predictions it reads."""

    reader: int = 0

    def __call__(self, predictions, lanes):
        return READERS[self.reader](predictions, lanes)


@pytest.mark.parametrize(
    ("reader", "around"),
    [
        *((0, ""), (1, ":sub_block=2"), (2, ":seed_first=true")),
        *((reader, ":sub_block=2:seed_first=true") for reader in (3, 4)),
        *(pytest.param(reader, ":sub_block=2:seed_first=true", marks=pytest.mark.slow) for reader in (0, 1, 2)),
    ],
)
def test_a_rule_inside_sees_the_predictions_at_its_own_positions(reader, around):
    toy = Toy(length=12)
    target = (0, 1, 2, 0, 1, 2, 2, 1)
    windows = [Window((1,), target), Window((), target[:5]), Window((2, 2), target[:7], (1,))]
    own = DuelEstimator(toy, f"test_around:Own:reader={reader}{around}", 8, grid="row")
    built_in = DuelEstimator(toy, f"greedy:k=1{around}", 8, grid="row")

    together = own.log_prob(windows)

    for window, in_batch, expected in zip(windows, together, built_in.log_prob(windows), strict=True):
        [alone] = own.log_prob([window])
        for score in (in_batch, alone):
            assert score.reveal_steps == expected.reveal_steps
            assert score.log_prob == pytest.approx(expected.log_prob, abs=1e-9)


@dataclasses.dataclass(frozen=True)
class Chance(rules.Rule):
    """Negative control: it is no function of what it sees, in one way or another."""

    how: str = "global"
    margin: bool = True  # it gives one
    state_only = True

    def __call__(self, predictions, lanes):
        count, width = lanes.masked.shape
        first = lanes.masked & (lanes.masked.cumsum(1) == 1)
        if self.how == "global":
            score = torch.rand(count, width)
        elif self.how == "seeded":  # the same for the same batch, another one for a lane alone
            score = torch.rand(count, width, generator=torch.Generator().manual_seed(0))
        elif self.how == "batch":  # the least confident position in every other lane
            sign = 1 - 2 * (torch.arange(count) % 2)
            score = predictions.confidence * sign[:, None]
        elif self.how == "width":
            is_fourth_from_the_end = torch.arange(width) == width - 4
            score = predictions.confidence * (is_fourth_from_the_end * 9)
        elif self.how == "array":
            return lanes.masked.numpy()
        elif self.how == "device":
            return lanes.masked.to("meta")
        elif self.how == "lanes":
            lanes.tokens[first] = 0
            return first
        pick = lanes.masked & (rules.rank(torch.where(lanes.masked, -score, math.inf)) < 1)
        return rules.Decision(pick, torch.ones(len(lanes)) if self.margin else None)


@pytest.mark.parametrize(
    ("how", "around"),
    [
        ("global", ""),
        ("seeded", ""),
        ("batch", ""),
        ("width", ""),
        ("lanes", ""),
        ("array", ""),
        ("device", ""),
        ("batch", ":sub_block=3"),
        ("lanes", ":seed_first=true"),
    ],
)
def test_a_rule_that_is_no_function_of_what_it_sees_is_refused(how, around):
    toy = Toy(length=8)
    windows = [Window((1,), (0, 1, 2, 0, 1, 2)), Window((), (0, 0, 2, 1)), Window((2,), (2, 2, 1, 0, 1, 1))]
    duel = DuelEstimator(toy, rules.parse(f"test_around:Chance:how={how}{around}"), 6)

    with pytest.raises(DuelError, match=f"(?i)rule test_around:Chance:how={how}\\b"):
        duel.log_prob(windows)
    if how == "device":  # an error of the pick says that a tensor was taken for it
        with pytest.raises(DuelError, match="plain tensor, not a Decision"):
            duel.log_prob(windows)
    if how == "global" and not around:
        with pytest.raises(DuelError, match="not deterministic"):
            Lattice(toy, 3, LatticeArguments([Chance()])).log_prob(windows)
        with pytest.raises(DuelError, match="not deterministic"):
            DuelEstimator(toy, Chance(), 6).sample([(1,)], 6)


@dataclasses.dataclass(frozen=True)
class CountsCalls(rules.Rule):
    """Negative control: its memory counts its calls."""

    calls: ClassVar = itertools.count()

    def __call__(self, predictions, lanes):
        first = lanes.masked & (lanes.masked.cumsum(1) == 1)
        return rules.Decision(first, memory=(torch.full(lanes.masked.shape, next(self.calls)),))


@dataclasses.dataclass(frozen=True)
class StateOnlyWithMemory(rules.Rule):
    """Negative control: it remembers, although it says that it reads the revealed tokens alone."""

    state_only = True

    def __call__(self, predictions, lanes):
        first = lanes.masked & (lanes.masked.cumsum(1) == 1)
        return rules.Decision(first, memory=(predictions.entropy,))


@pytest.mark.parametrize("around", ["", ":sub_block=3"])
@pytest.mark.parametrize(("name", "named"), [("CountsCalls", "not deterministic"), ("StateOnlyWithMemory", "memory")])
def test_a_memory_that_is_no_function_or_was_not_declared_is_refused(name, named, around):
    duel = DuelEstimator(Toy(length=8), rules.parse(f"test_around:{name}{around}"), 6)
    with pytest.raises(DuelError, match=named):
        duel.log_prob([Window((1,), (0, 1, 2, 0, 1, 2)), Window((), (0, 0, 2, 1))])


@dataclasses.dataclass(frozen=True)
class Sometimes(Own):
    """Negative control: one call in five reveals the first position instead."""

    chance: ClassVar = random.Random(1)

    def __call__(self, predictions, lanes):
        if self.chance.random() < 0.2:
            return lanes.masked & (lanes.masked.cumsum(1) == 1)
        return super().__call__(predictions, lanes)


def test_a_rule_that_is_random_now_and_then_is_found():
    torch.manual_seed(0)
    toy = Toy(length=12)
    windows = [Window((), tuple(torch.randint(3, (12,)).tolist())) for _ in range(30)]

    refused_runs = 0
    for seed in range(6):
        Sometimes.chance.seed(seed)
        try:
            DuelEstimator(toy, Sometimes(), 12, batch_size=1).log_prob(windows)
        except InconsistentOutput as error:
            refused_runs += "Window" in str(error)

    assert refused_runs >= 5


@dataclasses.dataclass(frozen=True)
class ReadsItsStep(rules.Rule):
    """Negative control: the first masked position, then the first two, and so on."""

    state_only: ClassVar[bool] = True

    def __call__(self, predictions, lanes):
        return rules.Decision.certain(lanes.masked & (lanes.masked.cumsum(1) <= lanes.step[:, None] + 1))


@pytest.mark.parametrize("in_a_lattice", [False, True])
def test_a_rule_that_reads_its_step_although_it_says_not_is_found(in_a_lattice):
    toy = Toy(length=8)
    rule = ReadsItsStep()
    estimator = Lattice(toy, 4, LatticeArguments([rule])) if in_a_lattice else DuelEstimator(toy, rule, 4)
    with pytest.raises(InconsistentOutput):
        estimator.log_prob([Window((), (0, 1, 2, 0))])


def test_what_a_rule_decides_differently_is_counted_where_numbers_are_coarse():
    class Coarse(Toy):
        coarse = True

    duel = DuelEstimator(Coarse(length=8), Chance("batch"), 8)
    windows = [Window((), (n, 0, 1, 2, 0, 1, 2, n)) for n in range(3)]

    assert len(duel.log_prob(windows)) == 3
    assert 0 < duel.counts.decisions_differing <= duel.counts.decisions_checked


@pytest.mark.parametrize("how", ["seeded", "batch", "width"])
def test_without_a_margin_a_lane_alone_may_be_a_near_tie(how, caplog):
    windows = [Window((1,), (0, 1, 2, 0, 1, 2)), Window((), (0, 0, 2, 1)), Window((2,), (2, 2, 1, 0, 1, 1))]
    duel = DuelEstimator(Toy(length=8), Chance(how, margin=False), 6)

    assert len(duel.log_prob(windows)) == 3
    assert 0 < duel.counts.decisions_differing <= duel.counts.decisions_checked
    assert "decided otherwise" in caplog.text

    with pytest.raises(InconsistentOutput):
        DuelEstimator(Toy(length=8), Chance(margin=False), 6).log_prob(windows)


@dataclasses.dataclass(frozen=True)
class AboveTheMean(rules.Rule):
    """Negative control: the first masked position, and each with a margin above the mean `of` all lanes, or its own."""

    of: str = "lanes"
    state_only = True

    def __call__(self, predictions, lanes):
        first = lanes.masked & (lanes.masked.cumsum(1) == 1)
        margins = predictions.margin
        mean = margins.nanmean() if self.of == "lanes" else margins.nanmean(1, keepdim=True)
        return rules.Decision(first | (lanes.masked & (margins >= mean)))


@pytest.mark.parametrize("coarse", [False, True])
def test_a_rule_that_reads_other_lanes_is_found_without_a_margin(coarse):
    """Only the predictions of other lanes change, so float noise explains nothing, whatever the dtype."""

    class Network(Toy):
        pass

    Network.coarse = coarse
    toy = Network(length=12)
    windows = []
    for context in itertools.product(range(3), repeat=3):
        windows.append(Window(context, (0, 1, 2, 2, 1, 0, 0, 2, 1)))

    with pytest.raises(InconsistentOutput, match="reads other lanes"):
        DuelEstimator(toy, AboveTheMean(), 12, batch_size=4).log_prob(windows)

    of_each = DuelEstimator(toy, AboveTheMean("lane"), 12, batch_size=4)
    of_each.log_prob(windows)
    assert of_each.counts.decisions_differing == 0


@pytest.mark.parametrize("rows_at_once", [3, 64])
def test_other_predictions_in_other_lanes_change_no_bit_of_a_lane(rows_at_once, monkeypatch):
    monkeypatch.setattr(predictions_of_core, "CPU_VALUES", 1)
    monkeypatch.setattr(predictions_of_core, "CPU_ROWS", rows_at_once)
    logits, masked = random_case(0, 5)
    weights = torch.randn(logits.shape[2], 50)
    inputs = (torch.zeros(5, dtype=torch.bool), logits[masked].float(), torch.arange(int(masked.sum())))
    predictions = predictions_of_core.Predictions(
        masked, *inputs, lambda features: features @ weights, torch.arange(50) == 7
    )

    for lane in range(5):
        others = predictions.with_lane_elsewhere(lane)
        in_lane = masked.nonzero()[:, 0] == lane  # (C,)
        for name in ("confidence", "margin", "log_margin", "entropy", "log_sum", "argmax"):
            plane = getattr(others, name)
            values = getattr(predictions, name)[lane][masked[lane]]
            assert torch.equal(plane[lane][masked[lane]], values)
            assert torch.isin(plane[masked], values).all()
        assert torch.equal(others.dense()[in_lane], predictions.dense()[in_lane])
        assert torch.equal(others.features[in_lane], predictions.features[in_lane])


@dataclasses.dataclass(frozen=True)
class ReadsRow(Own):
    """A rule that prefers late positions in windows with odd numbers."""

    def __call__(self, predictions, lanes):
        is_odd = (lanes.row % 2 == 1)[:, None]
        positions = torch.arange(lanes.masked.shape[1]).double()
        score = torch.where(is_odd, positions, predictions.confidence)
        return lanes.masked & (rules.rank(torch.where(lanes.masked, -score, math.inf)) < 1)


def test_a_rule_does_not_know_the_number_of_a_window():
    windows = [Window((), tuple(torch.randint(3, (8,)).tolist())) for _ in range(6)]
    duel = DuelEstimator(Toy(), ReadsRow(), 8)

    for window, in_batch in zip(windows, duel.log_prob(windows), strict=True):
        [alone] = duel.log_prob([window])
        assert in_batch.log_prob == pytest.approx(alone.log_prob, abs=1e-9)


@dataclasses.dataclass(frozen=True)
class Counts(Own):
    """Negative control: after the first calls of a run, every other one reveals the last position instead."""

    calls: ClassVar = itertools.count()

    def __call__(self, predictions, lanes):
        number = next(self.calls)
        if number > 3 * FIRST_CALLS and number % 2:
            return lanes.masked & (lanes.masked.flip(1).cumsum(1).flip(1) == 1)
        return super().__call__(predictions, lanes)


def test_a_rule_that_counts_its_calls_is_found_at_the_end_of_a_run():
    duel = DuelEstimator(Toy(length=12), Counts(), 12)
    windows = [Window((), (0,) * 12), Window((), (1,) * 12)]

    with pytest.raises(InconsistentOutput):
        duel.log_prob(windows)


@dataclasses.dataclass(frozen=True)
class CountsNearTheEnd(Counts):
    """Negative control: a function of its predictions until three positions of a block are left.

    No first call of a run reaches them, at `start` or later.
    """

    start: int = 0
    state_only: ClassVar[bool] = True

    def __call__(self, predictions, lanes):
        pick = lanes.masked & (lanes.masked.cumsum(1) == 1)
        if next(self.calls) % 2:
            near_the_end = (lanes.masked.sum(1) <= 3) & (lanes.start >= self.start)  # (R,)
            last = lanes.masked & (lanes.masked.flip(1).cumsum(1).flip(1) == 1)
            pick = torch.where(near_the_end[:, None], last, pick)
        return rules.Decision.certain(pick)


def _two_phase(rule):
    return TwoPhase(Attends(length=12), rule, 12, TwoPhaseArguments(1.0))


def _lattice(network):
    return Lattice(network, 3, LatticeArguments([CountsNearTheEnd(start=9)]), batch_size=1)  # 3 + 24 calls


RUNS = {
    "scores": lambda duel, windows: duel.estimator.log_prob(windows),
    "samples": lambda duel, windows: duel.estimator.sample([()], 12),
    "an estimate": lambda duel, windows: _two_phase(duel.rule).log_prob(windows),
    "all orders": lambda duel, windows: _lattice(duel.denoiser).log_prob(windows),
    "a recorded order": lambda duel, windows: duel.follow(windows, [range(12)]),
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_the_call_that_is_repeated_at_the_end_of_a_run_is_its_last(run):
    duel = Duel(Toy(length=12), CountsNearTheEnd(), 12)

    with pytest.raises(InconsistentOutput):
        run(duel, [Window((), (0,) * 12)])


def test_a_rule_is_asked_again_at_the_first_calls_and_the_last():
    duel = DuelEstimator(Toy(length=12), Own(), 12)

    duel.log_prob([Window((), (0,) * 12), Window((), (1,) * 12)])

    assert duel.counts.decisions == 11
    assert duel.counts.decisions_checked == 8 + 1
    assert abs(total(duel, 3) - 1) < 1e-9


@dataclasses.dataclass(frozen=True)
class Wavers(Own):
    """Negative control, without a margin: the first masked position, but the last one of a lane alone."""

    state_only: ClassVar[bool] = True

    def __call__(self, predictions, lanes):
        if len(lanes) == 1:
            return lanes.masked & (lanes.masked.flip(1).cumsum(1).flip(1) == 1)
        return lanes.masked & (lanes.masked.cumsum(1) == 1)


def _orders(network, windows):
    lattice = Lattice(network, 4, LatticeArguments([Wavers(), Wavers()]))
    lattice.log_prob(windows)
    return lattice.counts


def _estimate(network, windows):
    two_phase = TwoPhase(network, Wavers(), 4, TwoPhaseArguments(1.0))
    two_phase.log_prob(windows)
    return two_phase.counts


def _samples(network, windows):
    duel = Duel(network, Wavers(), 4)
    duel.estimator.sample([window.context for window in windows], len(windows[0].target))
    return duel.counts


def _scores(network, windows):
    duel = DuelEstimator(network, Wavers(), 4)
    for _ in range(3):
        duel.log_prob(windows)
    return duel.counts


@pytest.mark.parametrize("length", [1, 2, 5, 11])
@pytest.mark.parametrize("count", [_orders, _estimate, _samples, _scores])
def test_no_more_decisions_are_checked_than_made_and_no_more_differ_than_are_checked(count, length):
    windows = [Window((n,), tuple((n + place) % 3 for place in range(length))) for n in range(3)]
    counts = count(Attends(length=12), windows)

    assert counts.decisions >= counts.decisions_checked >= counts.decisions_differing
    assert counts.decisions_checked >= min(counts.decisions, FIRST_CALLS)
    assert (counts.decisions_differing > 0) == (length > 1)


@dataclasses.dataclass(frozen=True)
class AboveItsMean(rules.Rule):
    """The positions of a lane with at least its mean confidence, less a tolerance, and always the best one."""

    state_only = True
    tolerance: float = 0.0

    def __call__(self, predictions, lanes):
        confidence = predictions.confidence
        best = rules.rank(torch.where(lanes.masked, -confidence, math.inf)) < 1
        mean = confidence.nanmean(1, keepdim=True)
        return lanes.masked & ((confidence >= mean - self.tolerance) | best)


def test_a_rule_that_float_noise_decides_is_counted(caplog):
    """In a row of masks all positions have equal statistics, and rounding decides how they compare with their mean."""
    windows = [Window((), (0,) * length) for length in range(4, 12)]
    for tolerance in (0.0, 1e-3):
        caplog.clear()
        duel = DuelEstimator(Rotary(length=12), AboveItsMean(tolerance), 12)
        duel.log_prob(windows)
        assert (duel.counts.decisions_differing > 0) == (tolerance == 0)
        assert ("float noise" in caplog.text) == (tolerance == 0)


@pytest.mark.parametrize("rows_at_once", [3, 64])
def test_noise_changes_predictions_by_a_millionth_and_keeps_ties(rows_at_once, monkeypatch):
    monkeypatch.setattr(predictions_of_core, "CPU_VALUES", 1)
    monkeypatch.setattr(predictions_of_core, "CPU_ROWS", rows_at_once)
    logits, masked = random_case(0, 5)
    row = torch.arange(int(masked.sum())).clamp(min=4)  # the first five positions have equal distributions
    weights = torch.randn(logits.shape[2], 50, dtype=torch.float64)
    inputs = (torch.zeros(5, dtype=torch.bool), logits[masked].double(), row)
    predictions = predictions_of_core.Predictions(
        masked, *inputs, lambda features: features @ weights, torch.arange(50) == 7
    )
    seen = set()
    for seed in range(3):
        noisy = predictions.with_noise(seed)
        for name in ("confidence", "margin", "log_margin", "entropy", "log_sum"):
            values = getattr(noisy, name)[masked]
            expected = getattr(predictions, name)[masked]
            assert not torch.equal(values, expected)
            assert torch.allclose(values, expected, rtol=1e-4, atol=0)
            assert len(values[:5].unique()) == 1
        assert torch.equal(noisy.argmax, predictions.argmax)
        log_ratios = noisy.dense() - noisy.dense()[:, :1]  # these do not depend on the normalisation
        expected = predictions.dense() - predictions.dense()[:, :1]
        assert not torch.allclose(log_ratios, expected, rtol=1e-9)
        assert torch.allclose(log_ratios, expected, rtol=2e-5, atol=1e-4)
        seen.add(tuple(noisy.confidence[masked].tolist()))
    assert len(seen) == 3


@dataclasses.dataclass(frozen=True)
class CountsPadding(rules.Rule):
    """Negative control: all positions at once, but all save the last one in a lane that is padded."""

    state_only = True

    def __call__(self, predictions, lanes):
        is_padded = lanes.width < lanes.masked.shape[1]  # (R,)
        is_last = lanes.masked.cumsum(1) == lanes.masked.sum(1, keepdim=True)  # (R, W)
        left_out = is_padded[:, None] & is_last & (lanes.masked.sum(1, keepdim=True) > 1)
        return rules.Decision.certain(lanes.masked & ~left_out)


def test_the_narrowest_lane_is_asked_alone():
    """One lane in ten is padded, in one call."""
    windows = [Window((), (0, 1, first, 0, second)) for first in range(3) for second in range(3)]
    duel = DuelEstimator(Toy(length=6), CountsPadding(), 6)
    duel.log_prob(windows)
    with pytest.raises(InconsistentOutput):
        duel.log_prob([*windows, Window((), (0, 1, 2))])


@dataclasses.dataclass(frozen=True)
class Remembers(rules.Rule):
    """The best position by the mean of the last two confidences, which are NaN where nothing was masked."""

    def __call__(self, predictions, lanes):
        confidence = predictions.confidence
        mean = (confidence + lanes.memory[0]) / 2 if lanes.memory else confidence
        best = lanes.masked & (rules.rank(torch.where(lanes.masked, -mean, math.inf)) < 1)
        return rules.Decision(best, memory=(confidence,))


@dataclasses.dataclass(frozen=True)
class Waits(Remembers):
    """Negative control: after the first step it waits for a memory that stays as it is."""

    may_pick_none = True

    def __call__(self, predictions, lanes):
        decision = super().__call__(predictions, lanes)
        return decision if not lanes.memory else decision._replace(pick=torch.zeros_like(lanes.masked))


def test_a_memory_may_have_nan_which_does_not_move_on():
    windows = [Window((), (0, 1, 2)), Window((1,), (0, 1, 2, 0, 1))]
    together = DuelEstimator(Toy(length=6), Remembers(), 6).log_prob(windows)
    for window, score in zip(windows, together, strict=True):
        [alone] = DuelEstimator(Toy(length=6), Remembers(), 6).log_prob([window])
        assert alone.reveal_steps == score.reveal_steps
    with pytest.raises(RuleStalled, match="step 2"):
        DuelEstimator(Toy(length=6), Waits(), 6).log_prob(windows)
