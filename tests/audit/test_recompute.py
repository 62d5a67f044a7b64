"""Law 19: what a run computes equals `reference.py`, and a fault in a run does not go unnoticed."""

import dataclasses
import math
from typing import ClassVar

import pytest
import torch
from attends import Attends
from laws import AROUND, RULES
from toys import BlockCausal, Causal, CausalPrefix, Rotary, Toy

from lm_eval_duel import rules
from lm_eval_duel.audit.checked import ALONE, REFERENCE, RUNS_RULE, CheckedWindow, Recomputed
from lm_eval_duel.audit.recompute import recompute
from lm_eval_duel.core import predictions
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.cached import denoiser as cached_view
from lm_eval_duel.denoisers.cached.denoiser import Cached
from lm_eval_duel.denoisers.filters import excluding, warped
from lm_eval_duel.denoisers.wrappers import Guided
from lm_eval_duel.estimators.arguments import ElboArguments, LatticeArguments, OrderArguments
from lm_eval_duel.estimators.duel import Autoregressive
from lm_eval_duel.estimators.duel import DuelEstimator as Duel
from lm_eval_duel.estimators.elbo import Elbo
from lm_eval_duel.estimators.lattice import Lattice
from lm_eval_duel.estimators.sampled_order import SampledOrder
from lm_eval_duel.rules import checked as checked_rules
from lm_eval_duel.rules.base import best
from lm_eval_duel.rules.scores import Greedy, Scored

WINDOWS = [
    Window((1,), (2, 0, 1, 1, 2)),
    Window((1, 2, 0), (2, 1, 0), (1, 0)),
    Window((1, 2, 0), (2, 1, 0), (1, 2)),  # another suffix alone
    Window((0, 2), (0, 0, 1, 2, 1), (2,)),
    Window((2,), (1, 1), tail=2),
    Window((), (0, 1, 2, 0, 1, 0)),
]
GIVEN = [window for window in WINDOWS if window.context]
PLAIN = [window for window in GIVEN if not window.suffix and not window.tail]
ENDS = [Window((1,), (2, 0, 1, 1), (last,)) for last in (0, 2)]  # the suffix is in the last block


NETWORKS = {  # name: (network, windows, block, grid); more toys are in test_fuzz.py
    "bidirectional": (Toy(length=10), WINDOWS, 2, "target"),
    "rotary": (Rotary(length=10), WINDOWS, 2, "target"),
    "prefix cache": (Cached(Attends(length=10), "prefix"), WINDOWS, 2, "target"),
    "prefix cache, blocks of the row": (Cached(Attends(length=10), "prefix"), PLAIN, 3, "row"),
    "dual cache": (Cached(Attends(length=10), "dual"), WINDOWS, 2, "target"),
    "dual cache, blocks of the row": (Cached(Attends(length=10), "dual"), PLAIN, 3, "row"),
    "guided": (Guided(Toy(length=10), 0.7), WINDOWS, 2, "target"),
    "guided under a cache": (Guided(Cached(Attends(length=10), "dual"), 0.7), WINDOWS, 2, "target"),
    "fewer tokens": (excluding(Toy(4, length=10), (3,)), WINDOWS, 2, "target"),
    "warped": (warped(Toy(5, length=10), 0.8, 4, 0.95), WINDOWS, 2, "target"),
    "block-causal": (BlockCausal(length=12), [*PLAIN, *ENDS], "auto", "auto"),
    "causal prefix": (CausalPrefix(length=14), [GIVEN[0], *GIVEN[3:]], "auto", "auto"),
    "causal prefix, first token in the block": (
        CausalPrefix("block", length=14),
        [WINDOWS[0], *WINDOWS[3:]],
        "auto",
        "auto",
    ),
}
PAPER = ["left_to_right:k=2", "greedy:k=1", "margin:k=2", "entropy:k=1", "threshold:mu=0.45", "klass:mu=0.4:nu=0.3"]


def checked(estimator, windows):
    """Each window in the run and once more."""
    entries = []
    for window, score in zip(windows, estimator.log_prob(windows), strict=True):
        again = recompute(estimator, window, score)
        entries.append(CheckedWindow("", window, score.log_prob, again))
    return entries


def some(rules, number):
    """A third of the rules, another one for the next network."""
    return rules[number % 3 :: 3]


CASES = [(name, some(PAPER, n)) for n, name in enumerate(NETWORKS)]
for n, name in enumerate(NETWORKS):
    CASES.append(pytest.param(name, PAPER + some([*RULES, *AROUND], n), marks=pytest.mark.slow))


@pytest.mark.parametrize(("name", "rules"), CASES)
def test_a_run_equals_the_reference(name, rules):
    toy, windows, block, grid = NETWORKS[name]
    noise = 1e-7 if "rotary" in name else 1e-9  # planted in those
    for rule in rules:
        for window in checked(Duel(toy, rule, block, grid=grid), windows):
            assert window.difference < noise, (rule, window)
            assert not window.problems, (rule, window)
            assert window.again.ties == 0, (rule, window)
            assert window.again.route in (REFERENCE, RUNS_RULE), rule


@dataclasses.dataclass(frozen=True)
class FirstOnes(rules.Rule):
    """The first masked position, then the first two, and so on."""

    def __call__(self, predictions, lanes):
        return lanes.masked & (lanes.masked.cumsum(1) <= lanes.step[:, None] + 1)


@dataclasses.dataclass(frozen=True)
class SaysItReadsNoStep(FirstOnes):
    """Negative control: a lattice follows it, and asks it without a step."""

    state_only: ClassVar[bool] = True


@pytest.mark.parametrize(("rule", "is_right"), [("greedy", True), ("margin:k=2", True), (SaysItReadsNoStep(), False)])
def test_rules_that_a_lattice_follows_are_held_to_their_own_runs(rule, is_right, monkeypatch):
    monkeypatch.setattr(checked_rules, "FIRST_CALLS", 0)  # the run itself finds it at once
    monkeypatch.setattr(checked_rules.Checked, "repeat_last", lambda rule: None)
    lattice = Lattice(Toy(), 4, LatticeArguments([rule]))
    windows = [window for window in WINDOWS if not window.tail]

    problems = []
    for window, score in zip(windows, lattice.log_prob(windows), strict=True):
        problems += recompute(lattice, window, score).problems

    assert bool(problems) != is_right


def route(estimator, window):
    [score] = estimator.log_prob([window])
    again = recompute(estimator, window, score)
    assert bool(again.why_alone) == (again.route == ALONE)
    return again.route


def test_routes():
    """The paper's rules by the reference, others by the run's rule; and what only the run can compute."""
    window = WINDOWS[0]

    for rule in ("greedy", "klass:mu=0.4:nu=0.3"):
        assert route(Duel(Toy(), rule, 2), window) == REFERENCE
    for rule in (
        "klass:mu=0.4:nu=0.3:history=2",
        "klass:mu=0.4:nu=0.3:kl=authors:across=true",
        "greedy:seed_first=true",
        "threshold:mu=0.4:strict=true",
        "random",
    ):
        assert route(Duel(Toy(), rule, 2), window) == RUNS_RULE

    assert route(Elbo(Toy(), ElboArguments(8)), window) == REFERENCE
    assert route(Elbo(Toy(), ElboArguments(8, "ratio", elbo_eps=0.1)), window) == ALONE
    assert route(Lattice(Toy(length=8), 8), Window((), (0, 1, 2, 0, 1, 2, 0))) == ALONE
    assert route(SampledOrder(Toy(), 4, OrderArguments("random", 2)), window) == REFERENCE
    assert route(Duel(OwnWay(), "greedy", 2), window) == ALONE


class OwnWay(Toy):
    """A network that opens rows in a way of its own."""

    def open(self, rows, generating=False):
        return super().open(rows, generating)


def test_an_autoregressive_network_takes_one_forward(monkeypatch):
    estimator = Autoregressive(Causal(length=10))
    windows = [window for window in WINDOWS if not window.suffix]
    scores = list(estimator.log_prob(windows))
    features = Causal.features
    calls = []

    def counted(self, ids, real):
        calls.append(ids)
        return features(self, ids, real)

    monkeypatch.setattr(Causal, "features", counted)
    for window, score in zip(windows, scores, strict=True):
        again = recompute(estimator, window, score)
        assert again.log_prob == pytest.approx(score.log_prob, abs=1e-9)
        assert again.route == REFERENCE
    assert len(calls) == len(windows)


# ---------------------------------------------------------------- a fault does not go unnoticed


def least_confident(monkeypatch):
    monkeypatch.setattr(Greedy, "score", staticmethod(lambda p: (-p.confidence, 2.0)))


def reversed_with_margins_of_zero(monkeypatch):
    def decide(self, predictions, lanes):
        score, _ = self.score(predictions)
        return rules.Decision(best(predictions, lanes, -score, self.k)[0], torch.zeros(len(score)))

    monkeypatch.setattr(Scored, "__call__", decide)


def a_thousandth_of_a_nat(monkeypatch):
    log_prob = predictions.Predictions.log_prob
    monkeypatch.setattr(predictions.Predictions, "log_prob", lambda self, tokens: log_prob(self, tokens) + 1e-3)


def keys_of_another_block(monkeypatch):
    monkeypatch.setattr(cached_view.CachedView, "_identity", lambda self, lanes: torch.zeros_like(lanes.row))


FAULTS = [
    (least_confident, "bidirectional"),
    (reversed_with_margins_of_zero, "bidirectional"),
    (a_thousandth_of_a_nat, "dual cache"),
    (keys_of_another_block, "dual cache"),
    (keys_of_another_block, "prefix cache"),
]


@pytest.mark.parametrize(("fault", "name"), FAULTS, ids=lambda value: getattr(value, "__name__", value))
def test_a_fault_of_the_run_differs(fault, name, monkeypatch):
    toy, windows, block, grid = NETWORKS[name]
    duel = Duel(toy, "greedy", block, grid=grid)
    fault(monkeypatch)

    assert any(window.differs for window in checked(duel, windows))


def test_what_differs():
    window = Window((), (1, 2))

    def problems(again=-3.0, run=-3.0, **parts):
        recomputed = Recomputed(again, REFERENCE, **{"other_picks": 0, "ties": 0, **parts})
        return CheckedWindow("", window, run, recomputed).problems

    assert not problems()
    assert not problems(-3.00005)
    assert not problems(ties=1, own_order=-9.0)
    assert not problems(-math.inf, run=-math.inf)

    assert problems(-3.001)
    assert problems(other_picks=1)
    assert problems(problems=("is_greedy is True",))
    assert problems(math.nan)
    assert problems(-math.inf)


def test_each_part_of_a_score_is_checked():
    toy, [window, *_], block, grid = NETWORKS["bidirectional"]
    duel = Duel(toy, "greedy", block, grid=grid)
    [score] = duel.log_prob([window])

    def problems(**values):
        return recompute(duel, window, dataclasses.replace(score, **values)).problems

    first, *rest = score.token_logprobs
    assert not problems()
    assert problems(is_greedy=not score.is_greedy)
    assert problems(nfe=score.nfe + 1)
    assert problems(log_prob=score.log_prob - 0.01)
    assert problems(token_logprobs=(first - 0.01, *rest))
    assert problems(reveal_steps=(-1, *score.reveal_steps[1:]))


def test_whether_a_row_of_masks_ties_is_checked():
    window = Window((), (0, 1, 2, 0, 1, 0))
    for make, claimed in ((Rotary, False), (Toy, True)):
        toy = make(length=10)
        toy.relative_positions = claimed
        [checked_window] = checked(Duel(toy, "greedy", 4), [window])
        assert any("row of masks" in problem for problem in checked_window.problems)


# ---------------------------------------------------------------- ties


@dataclasses.dataclass(frozen=True)
class Nudged(rules.Rule):
    """Greedy, but for positions that are within `by` of the best one: the last of them is picked."""

    by: float = 0.0

    def __call__(self, predictions, lanes):
        score = torch.where(lanes.masked, predictions.confidence, -torch.inf)
        best = score >= score.amax(1, keepdim=True) - self.by
        last = best & (best.flip(1).cumsum(1).flip(1) == 1)
        return rules.Decision(last & lanes.masked, torch.zeros(len(last)))  # every margin is 0, whatever is picked


def test_the_first_wrong_pick_has_its_place():
    window = Window((), (0, 2, 0, 0, 2, 0, 1))
    network = Rotary(length=10)
    [run] = Duel(network, "left_to_right", 4).log_prob([window])
    [greedy] = Duel(network, "greedy", 4).log_prob([window])
    of_run = run.reveal_steps[:4]  # of the first block, whose states are equal until the picks differ
    of_greedy = greedy.reveal_steps[:4]
    step = min(step for step in range(4) if of_run.index(step) != of_greedy.index(step))
    assert step > 0, "at step 0 all positions tie"

    again = recompute(Duel(network, "greedy", 4), window, run)

    place = f"at step {step} of block 0: position {of_run.index(step)} of the target, not {of_greedy.index(step)};"
    assert again.first_other_pick.startswith(place)


@pytest.mark.parametrize(("by", "ties"), [(5e-5, True), (0.5, False)])
def test_a_tie_is_one_of_the_reference(by, ties):
    """The positions of this network differ by 4e-5 in their logits: within a tie, or not by a rule that is far off."""
    toy = Toy(length=10)
    toy.codes = torch.tensor([[1.0, 0, 0.3, 0], [1.00004, 0, 0.3, 0], [0.7, 0.1, 0, 0]], dtype=torch.float64)
    window = Window((1,), (2, 0, 1, 1, 2, 0, 1))
    [score] = Duel(toy, Nudged(by), 4).log_prob([window])

    again = recompute(Duel(toy, "greedy", 4), window, score)

    assert again.log_prob == pytest.approx(score.log_prob, abs=1e-9), "values are those of the run's order"
    assert again.own_order is not None
    if ties:
        assert again.other_picks == 0
        assert again.ties > 0
    else:
        assert again.other_picks != 0
