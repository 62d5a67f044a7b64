"""Windows and the budget of a call; blocks and groups are in test_fuzz.py."""

import itertools
import random

import pytest
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from toys import BlockCausal, Causal, Toy

from lm_eval_duel.core.batch_size import Budget
from lm_eval_duel.core.windows import Window, independent, infilled, rolling
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.duel import DuelEstimator


def test_a_target_is_never_cut():
    with pytest.raises(DuelError, match=r"max_length=5"):
        infilled((1,), range(6), (), 5, (90,))
    with pytest.raises(DuelError, match="max_length=2"):
        independent([1], 2, (90,), (91,))
    with pytest.raises(DuelError, match="tail"):
        Window((), (1,), (), -1)


@pytest.mark.parametrize(
    ("toy", "wrong"),
    [  # ids that are none, 5 that is beyond the vocabulary, and 3, the mask
        (Toy(), Window((-1, 0), (0, 1), (0, 1))),
        (Toy(), Window((0, 3), (0, 1), (0, 1))),
        (Toy(), Window((0, 5), (0, 1), (0, 1))),
        (Toy(), Window((0, 1), (-1, 0), (0, 1))),
        (Toy(), Window((0, 1), (0, 3), (0, 1))),
        (Toy(), Window((0, 1), (0, 5), (0, 1))),
        (Toy(), Window((0, 1), (0, 1), (-1, 0))),
        (Toy(), Window((0, 1), (0, 1), (0, 3))),
        (Toy(), Window((0, 1), (0, 1), (0, 5))),
        (Toy(unused=1), Window((), (4, 0))),  # no token; a context may hold it
        (Toy(), Window((), (0,) * 9)),
        (Toy(), Window((), (0, 1, 2), tail=1)),
        (BlockCausal(4), Window((), (0, 1, 2, 0), (0,))),
        (Causal(), Window((), (0, 1), (0,))),
    ],
)
def test_a_window_that_a_network_cannot_score_is_named(toy, wrong):
    block = 2 if toy.attention == "bidirectional" else "auto"
    with pytest.raises(DuelError, match=r"^Window 1 ") as error:
        DuelEstimator(toy, "left_to_right", block).log_prob([Window((), (0, 1)), wrong])
    assert error.value.window == 1


def test_windows_that_differ_in_any_part_have_their_own_random_numbers():
    parts = {"context": (1,), "target": (2, 3, 4), "suffix": (5,), "tail": 1, "known": ()}
    others = {"context": (2,), "target": (2, 3, 5), "suffix": (6,), "tail": 2, "known": (1,)}

    windows = {Window(**parts)}
    for name, other in others.items():
        windows.add(Window(**parts | {name: other}))

    assert len(windows) == 6
    keys = {window.key for window in windows}
    assert len(keys) == 6


def test_budget_holds_both_limits():
    budget = Budget(tokens=1000, values=10_000)
    assert budget.rows(cost=100) == 10
    assert budget.rows(cost=100, values=5000) == 2
    assert budget.rows(cost=100_000, values=20_000) == 1


def test_a_batch_is_what_was_asked_for_and_never_more_than_the_most():
    def tokens(**arguments):
        return DuelEstimator(Toy(length=8), "greedy", 4, **arguments).budget.tokens

    assert tokens() == 2048
    assert tokens(batch_size=2) == 16
    assert tokens(max_batch_size=9) == 72
    assert tokens(batch_size=9, max_batch_size=3) == 24


def test_rolling_windows_are_those_of_lm_eval():
    chance = random.Random(0)
    for _ in range(50):
        length = chance.randrange(40)
        ids = [chance.randrange(90) for _ in range(length)]
        capacity = chance.randint(1, 12)

        windows = rolling(ids, 99, capacity, (98,))

        of_lm_eval = map(make_disjoint_window, get_rolling_token_windows(ids, 99, capacity, context_len=1))
        assert windows == [Window(context, target, (98,)) for context, target in of_lm_eval]
        targets = itertools.chain(*(window.target for window in windows))
        assert [*targets] == ids
