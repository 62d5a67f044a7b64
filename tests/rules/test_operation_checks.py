"""The numbers of a user's rule are the same when it is asked again, and do not change with other lanes."""

import dataclasses
import math
import random

import numpy as np
import pytest
import torch
from laws import AROUND, RULES
from test_users import LINE, rule_with, written
from toys import Toy

from lm_eval_duel import Duel, Window, rules
from lm_eval_duel.errors import InconsistentOutput
from lm_eval_duel.rules.checked import Checked
from lm_eval_duel.rules.wrappers import Around

WINDOWS = [Window((), (0, 1, 0, 1, 2, 1)), Window((1,), (0, 1, 0)), Window((), (2, 1, 0, 1, 1, 2))]


def best(score, lanes):
    """The position of each lane with the largest score."""
    return lanes.masked & (rules.rank(torch.where(lanes.masked, -score, math.inf)) < 1)


def seeded(predictions):
    generator = torch.Generator().manual_seed(0)
    return torch.rand(predictions.confidence.shape, generator=generator)


NOISE = {  # in the scores of a rule, too small to change a pick
    "rand": lambda predictions: torch.rand_like(predictions.confidence),
    "normal": lambda predictions: torch.empty_like(predictions.confidence).normal_(),
    "dropout": lambda predictions: torch.nn.functional.dropout(predictions.margin, training=True),
    "multinomial": lambda predictions: torch.ones(64).multinomial(8)[0],
    "an unseeded generator": lambda predictions: torch.rand(6, generator=GENERATOR)[0],
    "numpy": lambda predictions: torch.from_numpy(np.random.rand(*predictions.confidence.shape)),
    "Python": lambda predictions: random.random(),
    "a counter": lambda predictions: next(COUNTER),
}
GENERATOR = torch.Generator().manual_seed(0)
COUNTER = iter(range(10**6))


@dataclasses.dataclass(frozen=True)
class Noisy(rules.Rule):
    """The most confident position, by a score with noise that changes no pick."""

    of: str = "rand"

    def __call__(self, predictions, lanes):
        noise = seeded(predictions) if self.of == "seeded" else NOISE[self.of](predictions)
        return best(predictions.confidence + 1e-12 * noise, lanes)


@pytest.mark.parametrize("of", NOISE)
def test_numbers_that_change_when_a_rule_is_asked_again_are_found_without_another_pick(of):
    with pytest.raises(InconsistentOutput, match=r"asked again.*hash"):
        Duel(Toy(length=6), Noisy(of), 6).log_prob(WINDOWS[:1])


def test_a_generator_that_is_seeded_in_each_call_draws_the_same():
    duel = Duel(Toy(length=6), Noisy("seeded"), 6)
    assert len(duel.log_prob(WINDOWS)) == len(WINDOWS)
    assert duel.counts.decisions_differing == 0


def test_the_error_names_the_operation_and_its_line(tmp_path):
    method = "__call__(self, predictions, lanes): return lanes.masked & (torch.rand_like(predictions.margin) < 2)"
    file = written(tmp_path, rule_with(method), "draws")
    with pytest.raises(InconsistentOutput) as error:
        Duel(Toy(length=6), f"{file}:Mine", 6).log_prob(WINDOWS)
    assert f"{file}, line {LINE}" in str(error.value)
    assert "'rand_like'" in str(error.value)


FILLS = (-1e3, -1e9, torch.finfo(torch.float32).min)  # in place of positions that are not masked


def softmax(c, top):
    weights = torch.exp(c - top)
    return weights / weights.sum(1, keepdim=True)


OF_ALL = {  # all are false everywhere, so that no pick ever changes
    "a maximum": lambda c: c >= c.max() + 1,
    "a maximum at each position": lambda c: c > c.amax(0, keepdim=True) + 1,
    "on the other side": lambda c: c.max() + 1 < c,
    "a mean": lambda c: c > c.mean() + 1e4,
    "a difference": lambda c: c - c.max() > 1,
    "a ratio": lambda c: c / c.max() > 1e9,
    "a softmax": lambda c: softmax(c, c.max()) > 1,  # exp is 0 in a lane far below another
    "a number for each lane": lambda c: (c.amax(1) > c.max() + 1)[:, None],
    "a column": lambda c: c.amax(1, keepdim=True) > c.max() + 1,
    "the other lanes in turn": lambda c: c > c.roll(1, 0) + 1e4,
}


def in_a_loop(c):
    return torch.stack([lane > lane.max() for lane in c])


def pairs_in_a_loop(c):
    return torch.stack([(lane[None] > lane[:, None] + 1e4).any(1) for lane in c])


def with_thresholds_in_a_loop(c):
    levels = torch.linspace(0, 1, 3)[:, None]  # as many as lanes
    return torch.stack([(lane > lane.max() + levels).any(0) for lane in c])


OF_EACH = {
    "a softmax": lambda c: softmax(c, c.amax(1, keepdim=True)) > 1,
    "a maximum": lambda c: c > c.amax(1, keepdim=True),
    "a mean": lambda c: c > c.mean(1, keepdim=True) + 1e4,
    "a difference": lambda c: c - c.amax(1, keepdim=True) > 0,
    "a number of all": lambda c: c > c.numel() + 1e4,
    "a sum over all that decides nothing": lambda c: (c > 1e4) & (c.sum() > -math.inf),
    "a loop over lanes": in_a_loop,
    "pairs in a loop": pairs_in_a_loop,
    "thresholds in a loop": with_thresholds_in_a_loop,
}


@dataclasses.dataclass(frozen=True)
class Above(rules.Rule):
    """The most confident position, and those for which a function of all lanes is True."""

    name: str
    of: str = "all"
    fill: float = FILLS[0]

    def __call__(self, predictions, lanes):
        functions = OF_ALL if self.of == "all" else OF_EACH
        above = functions[self.name](predictions.confidence.masked_fill(~lanes.masked, self.fill))
        return best(predictions.confidence, lanes) | (lanes.masked & above)


@pytest.mark.parametrize("name", OF_ALL)
def test_numbers_of_other_lanes_are_found_without_another_pick(name):
    with pytest.raises(InconsistentOutput, match=r"other lanes.*dim=1") as error:
        Duel(Toy(length=12), Above(name), 6).log_prob(WINDOWS)
    assert __file__ in str(error.value)


@pytest.mark.parametrize("fill", FILLS[1:])
@pytest.mark.parametrize("name", ["a maximum", "a difference"])
def test_a_large_constant_in_other_positions_hides_nothing(name, fill):
    with pytest.raises(InconsistentOutput, match="other lanes"):
        Duel(Toy(length=12), Above(name, fill=fill), 6).log_prob(WINDOWS)


@pytest.mark.parametrize(("lanes", "length"), [(3, 4), (3, 6), (4, 4), (6, 6)])  # with as many lanes as positions, too
@pytest.mark.parametrize("name", OF_EACH)
def test_numbers_of_each_lane_are_not(name, lanes, length):
    windows = []
    for n in range(lanes):
        target = tuple((n * (i + 1) + i * i) % 3 for i in range(length))
        windows.append(Window((), (n % 3, n // 3, *target[2:])))
    duel = Duel(Toy(length=12), Above(name, of="each"), length)
    duel.log_prob(windows)
    assert duel.counts.decisions_differing == 0


def test_a_statistic_that_is_computed_when_it_is_read_hides_nothing(tmp_path):
    """The operations of a margin come between those of the rule, if other predictions have yet to compute it."""
    above = "predictions.margin > predictions.margin.nan_to_num(0.0).max() + 1"
    first = "lanes.masked & (lanes.masked.cumsum(1) == 1)"
    method = f"__call__(self, predictions, lanes): return {first} | lanes.masked & ({above})"
    file = written(tmp_path, rule_with(method), "reads_margin")
    with pytest.raises(InconsistentOutput, match="other lanes"):
        Duel(Toy(length=12), f"{file}:Mine", 6).log_prob(WINDOWS)


def checked(rule, counts, network):
    if isinstance(rule, Around):
        return dataclasses.replace(rule, rule=checked(rule.rule, counts, network))
    return Checked(rule, counts, network)


@pytest.mark.parametrize("text", [*RULES, *AROUND])
def test_no_rule_of_the_package_is_refused(text, monkeypatch):
    windows = [*WINDOWS, *(Window((n,), (n, 0, 1, 2, n, 1)) for n in range(3))]  # as many lanes as positions
    expected = Duel(Toy(length=12), text, 6).log_prob(windows)
    monkeypatch.setattr(rules, "with_checks", checked)
    duel = Duel(Toy(length=12), text, 6)
    for score, each in zip(duel.log_prob(windows), expected, strict=True):
        assert score.reveal_steps == each.reveal_steps
    assert duel.counts.decisions_differing == 0
