"""Near ties: margins of decisions, parameters a hair from another pick, and values at a bound."""

import dataclasses
import itertools
import math

import pytest
import torch
from published import STATE_ONLY
from random_lanes import TOKENS, WIDTH, decided, random_case
from toys import Toy

from lm_eval_duel import Duel, rules
from lm_eval_duel.core.windows import Window
from lm_eval_duel.estimators.arguments import LatticeArguments
from lm_eval_duel.estimators.lattice import Lattice

BOUNDS = {  # a rule with one parameter left open, and values between which its picks differ
    "threshold:mu={}": (0.0, 1.0),
    "threshold:strict=True:mu={}": (0.0, 1.0),
    "klass:nu=0.5:mu={}": (0.0, 1.0),
    "klass:mu=0.3:nu={}": (0.0, 2.0),
    "entropy_threshold:tau={}": (0.0, 2.0),
    "entropy_bound:gamma={}": (0.0, 5.0),
    "entropy_bound:inclusive=True:gamma={}": (0.0, 5.0),
    "factor:f={}": (0.01, 5.0),
    "factor:variant=b:f={}": (0.01, 5.0),
    "factor:variant=c:f={}": (0.01, 5.0),
    "hierarchy:tau=0.9:low={}": (0.0, 0.9),
    "hierarchy:low=0.2:tau={}": (0.2, 1.0),
    "dinfer_threshold:mu={}": (0.0, 1.0),
    "high_or_topk:n=2:tau={}": (0.0, 1.0),
    "dream:alg=confidence_threshold:steps=1:tau={}": (0.0, 1.0),
}


def test_a_parameter_a_hair_from_another_pick_is_a_near_tie(subtests):
    """Where a parameter a hair larger gives another pick, on both sides float noise could do the same."""
    for text, (low, high) in BOUNDS.items():
        border = None
        for seed in range(6):
            case = random_case(100 + seed, 1)
            border = border_of_picks(text, low, high, *case)
            if border:
                break
        assert border, text

        below, above = border
        with subtests.test(text, seed=seed, value=above):
            assert bool(decision(text, below, *case).near_tie)
            assert bool(decision(text, above, *case).near_tie)


def decision(text, value, logits, masked):
    """That of a rule with this value of its open parameter; of KLASS at its second step."""
    rule = text.format(value)
    if not text.startswith("klass"):
        return decided(rule, logits, masked)
    before = (logits.roll(1, 1) * 0.2 + logits).log_softmax(2)
    return decided(rule, logits, masked, 1, (before, torch.zeros_like(masked, dtype=torch.int64)))


def border_of_picks(text, low, high, logits, masked):
    """Two values of the parameter, 1e-9 apart, between which the pick changes; None if it is the same at all."""

    def pick(value):
        return decision(text, value, logits, masked).pick

    grid = torch.linspace(low, high, 6, dtype=torch.float64).tolist()
    for below, above in itertools.pairwise(grid):
        of_below = pick(below)
        if torch.equal(of_below, pick(above)):
            continue
        while above - below > 1e-9:
            middle = (below + above) / 2
            if torch.equal(pick(middle), of_below):
                below = middle
            else:
                above = middle
        return below, above
    return None


def test_a_threshold_a_hair_above_the_most_probable_token_is_a_near_tie():
    """Which position is revealed does not change there, but whether it was sure does."""
    logits = torch.tensor([[[2.0, 0, 0, 0, 0], [1.0, 0, 0, 0, 0], *[[0.5, 0, 0, 0, 0]] * 5]], dtype=torch.float64)
    masked = torch.ones(1, WIDTH, dtype=torch.bool)
    p = float(logits[0, 0].softmax(0).max())

    for mu, is_near in ((p + 1e-6, True), (p - 1e-6, True), (p + 0.01, False)):
        found = decided(f"threshold:mu={mu}", logits, masked)
        assert found.pick.nonzero().tolist() == [[0, 0]]
        assert bool(found.near_tie) == is_near


def test_positions_that_come_last_are_not_near_ties():
    """With eos=conf they tie by definition: only another most probable token changes the order."""
    logits = torch.tensor([3.0, 0.0, 1.0, -1.0, 0.5], dtype=torch.float64).repeat(1, WIDTH, 1)
    logits[0, 2, 0] = 1.75  # it leads by 0.75
    masked = torch.ones(1, WIDTH, dtype=torch.bool)
    rule = f"quota:steps={WIDTH}:eos=conf:eos_id=0"

    first = decided(rule, logits, masked)
    assert first.pick[0].nonzero().tolist() == [[0]]
    assert first.decision_margin.tolist() == [pytest.approx(0.375)]

    logits[0, 4, 2] = 6.0  # the only one of another token: it is first
    second = decided(rule, logits, masked)
    assert second.pick[0].nonzero().tolist() == [[4]]
    assert second.decision_margin.tolist() == [pytest.approx(0.375)]


@dataclasses.dataclass(frozen=True)
class FirstTwo(rules.Rule):
    """A rule that does not know by how much its picks are decided."""

    state_only = True

    def __call__(self, predictions, lanes):
        return lanes.masked & (lanes.masked.cumsum(1) <= 2)


def test_near_ties_of_a_rule_without_margins_are_not_known():
    window = Window((1,), (0, 2, 1, 1))
    [scored] = Duel(Toy(), FirstTwo(), 4).log_prob([window])
    assert scored.near_ties is None

    [scored] = Lattice(Toy(), 4, LatticeArguments([FirstTwo(), "greedy:k=1"])).log_prob([window])
    *_, of_first_two, of_greedy = scored.others.values()
    assert of_first_two.near_ties is None
    assert of_greedy.near_ties is not None


@dataclasses.dataclass(frozen=True)
class KnowsTheLast(rules.Rule):
    """From left to right; it knows by how much a pick is decided only where there is no other."""

    state_only = True

    def __call__(self, predictions, lanes):
        first = lanes.masked & (lanes.masked.cumsum(1) <= 1)
        if torch.equal(lanes.masked, first):
            return rules.Decision.certain(first)
        return rules.Decision(first)


def test_near_ties_are_not_known_if_those_of_one_step_are_not():
    [scored] = Duel(Toy(), KnowsTheLast(), 4).log_prob([Window((1,), (0, 2, 1, 1))])

    assert scored.near_ties is None


class Flat(Toy):
    """All positions tie."""

    def features(self, ids, real):
        return torch.zeros_like(super().features(ids, real))


@pytest.mark.parametrize(("rule", "choices"), [("greedy", 3), ("greedy:seed_first=true", 2), ("greedy:k=2", 1)])
def test_a_step_without_a_choice_is_no_near_tie(rule, choices):
    """Where everything ties, near ties are the steps that choose: not the last, and not a first position alone."""
    [scored] = Duel(Flat(), rule, 4).log_prob([Window((1,), (0, 2, 1, 1))])

    assert scored.near_ties == choices


EVEN = [0.0, 0.0, -math.inf, -math.inf, -math.inf]  # P1 = 1/2
SURE = [0.0, -math.inf, -math.inf, -math.inf, -math.inf]  # P1 = 1
AT_THE_BOUND = {  # the picks of positions that are all even, or all sure
    "threshold:mu=0.5": (EVEN, WIDTH),
    "threshold:mu=0.5:strict=true": (EVEN, 1),
    "entropy_bound:gamma=0.0": (SURE, WIDTH),
    "entropy_bound:gamma=0.0:inclusive=true": (SURE, 1),
}


@pytest.mark.parametrize("rule", AT_THE_BOUND)
def test_a_value_at_the_bound(rule):
    row, count = AT_THE_BOUND[rule]
    masked = torch.ones(1, WIDTH, dtype=torch.bool)
    logits = torch.tensor(row, dtype=torch.float64).expand(1, WIDTH, TOKENS)

    found = decided(rule, logits, masked)

    if row is EVEN and math.log(0.5) != math.log1p(-0.5):
        # where logarithms are rounded otherwise, as under LM_EVAL_DUEL_PERTURB, the bound is a hair beside 1/2
        assert bool(found.near_tie)
    else:
        assert int(found.pick.sum()) == count


SCORES = ["greedy", "greedy:k=2", "margin", "log_margin", "entropy:k=2", "threshold:mu=0.5", "entropy_bound:gamma=0.5"]
QUOTAS = ["quota:steps=3", "dream:alg=maskgit_plus:steps=3", "quota:steps=3:eos=conf:eos_id=2"]


def test_near_ties_are_counted():
    """A pick that moves under noise of 1e-4 was counted as near."""
    logits, masked = random_case(7, 400)
    noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(8), dtype=torch.float64) * 2e-5
    for text in [*STATE_ONLY, *SCORES, *QUOTAS]:
        first = decided(text, logits, masked)
        second = decided(text, logits + noise, masked)
        moved = (first.pick != second.pick).any(1)  # (R,)
        counted = torch.minimum(first.decision_margin, second.decision_margin) <= 1e-4
        assert not (moved & ~counted).any(), text


CHANGE = 1e-3  # of each logit: far above rounding, and so small that scores change linearly


def changes(logits, picked):
    """The logits (R, W, V), each changed by at most `CHANGE`, in the directions that move a pick (R, W) most."""
    log_p = logits.log_softmax(2)
    top = torch.nn.functional.one_hot(logits.argmax(2), TOKENS)
    mean = (log_p.exp() * log_p).sum(2, keepdim=True)  # (R, W, 1)
    of_odds = 2 * top - 1
    of_entropy = (log_p - mean).sign()
    for direction in (top, of_odds, of_entropy):
        for for_picked, for_others in itertools.product((1, -1), repeat=2):
            yield logits + CHANGE * torch.where(picked, for_picked, for_others)[:, :, None] * direction


def test_a_margin_is_no_larger_than_the_change_that_moves_the_pick(subtests):
    """Than twice the change: a margin is a gap in units of one position's score, and two positions may move apart."""
    logits, masked = random_case(11, 1500)
    for text in [*STATE_ONLY, *SCORES, *QUOTAS, "cumulative_error:mu=0.1"]:
        if text == "cumulative_error:mu=0.0":  # which reveals all, whatever the network says
            continue
        first = decided(text, logits, masked)
        moved = torch.zeros(len(logits), dtype=torch.bool)  # (R,)
        for changed in changes(logits, first.pick):
            moved |= (decided(text, changed, masked).pick != first.pick).any(1)
        with subtests.test(text):
            assert moved.sum() > 10
            assert float(first.decision_margin[moved].max()) < 2.01 * CHANGE
