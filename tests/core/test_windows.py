"""Windows and lanes: every token in one target, blocks, groups, padding."""

import random

import pytest
import torch
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from toys import Toy

from lm_eval_duel.core.budget import Budget
from lm_eval_duel.core.lanes import Lanes, Rows
from lm_eval_duel.core.windows import Window, conditional, independent, rolling
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.duel import DuelEstimator


def test_context_is_cut_from_the_left():
    window, cut = conditional((1, 2, 3, 4), (7, 8), 5, (90,), (91,))
    assert (window.context, window.target, window.suffix, cut) == ((90, 4), (7, 8), (91,), 3)
    window, cut = conditional((1, 2), (7,), 5)
    assert (window.context, cut) == ((1, 2), 0)


def test_a_target_is_never_cut():
    with pytest.raises(DuelError, match=r"max_length=5"):
        conditional((1,), range(6), 5, (90,))
    with pytest.raises(DuelError, match="max_length=2"):
        independent([1], 2, (90,), (91,))
    with pytest.raises(DuelError, match="tail"):
        Window((), (1,), (), -1)


def test_budget_holds_both_limits():
    budget = Budget(tokens=1000, values=10_000)
    assert budget.rows(cost=100) == 10
    assert budget.rows(cost=100, values=5000) == 2
    assert budget.rows(cost=100_000, values=20_000) == 1


def test_a_batch_is_what_was_asked_for_and_never_more_than_the_most():
    def tokens(**arguments):
        return DuelEstimator(Toy(length=8), **arguments).budget.tokens

    assert (tokens(), tokens(batch_size=2), tokens(max_batch_size=9)) == (2048, 16, 72)
    assert tokens(batch_size=9, max_batch_size=3) == 24


def test_fresh_lanes_show_context_inside_their_block():
    rows = Rows.from_windows([Window((7, 8, 9), (1, 2, 3)), Window((5,), (4,), (6,))], torch.device("cpu"))
    assert rows.ids.tolist() == [[7, 8, 9, 1, 2, 3], [5, 4, 6, 0, 0, 0]]
    assert rows.visible.tolist() == [[True] * 3 + [False] * 3, [True, False, True] + [False] * 3]
    lanes = Lanes.fresh(rows, torch.tensor([0, 1]), torch.tensor([2, 0]), torch.tensor([4, 2]))
    assert lanes.tokens.tolist() == [[9, -1, -1, -1], [5, -1, -1, -1]]
    assert lanes.masked.tolist() == [[False, True, True, True], [False, True, False, False]]


def test_lanes_carry_everything_along():
    rows = Rows.from_windows([Window((), (1, 2, 3)), Window((), (4, 5))], torch.device("cpu"))
    wide = Lanes.fresh(rows, torch.tensor([0]), torch.tensor([0]), torch.tensor([3]))
    narrow = Lanes.fresh(rows, torch.tensor([1]), torch.tensor([0]), torch.tensor([2]))
    pick = torch.tensor([[True, False]])
    narrow = narrow.reveal(pick, torch.tensor([[4, -1]]), (torch.ones(1, 2, 6),))
    both = narrow.concat(wide)
    assert both.masked.tolist() == [[False, True, False], [True, True, True]]
    assert both.tokens.tolist() == [[4, -1, -1], [-1, -1, -1]]
    assert both.step.tolist() == [1, 0]
    assert both.memory[0].shape == (2, 3, 6)
    assert both.memory[0].sum((1, 2)).tolist() == [12, 0]
    assert torch.equal(both.select(torch.tensor([True, False])).memory[0][:, :2], narrow.memory[0])
    assert wide.concat(narrow).memory[0].sum((1, 2)).tolist() == [0, 12]


def test_rolling_windows_are_those_of_lm_eval():
    chance = random.Random(0)
    for _ in range(50):
        ids = [chance.randrange(90) for _ in range(chance.randrange(40))]
        capacity = chance.randint(1, 12)
        theirs = map(make_disjoint_window, get_rolling_token_windows(ids, 99, capacity, context_len=1))
        windows = rolling(ids, 99, capacity, (98,))
        assert windows == [Window(context, target, (98,)) for context, target in theirs]
        assert [token for window in windows for token in window.target] == ids
