"""From raw text to the printed number: a window with too few targets is found, whichever positions a row scores."""

import dataclasses

import pytest

from lm_eval_duel.audit.from_text import FromText
from lm_eval_duel.core.windows import from_row, independent
from lm_eval_duel.tasks.data import TOKENS
from lm_eval_duel.text.annotated import TokenText

IDS = list(range(10, 21))
B = [1]
E = [2]


def problems(bos, text, windows, prefix=(), suffix=()):
    of_task = FromText("task", lambda text, **_: {"input_ids": IDS}, bos, 6, prefix, suffix)
    of_task.add("document 0", {"text": "a b"}, text, windows, -1.0)
    return of_task.problems


@pytest.mark.parametrize("bos", ["given", "official", "scored", "none", "first"])
@pytest.mark.parametrize("kind", ["text", "row"])
def test_a_dropped_target_is_a_problem(bos, kind):
    special = ((), ())
    if kind == "row":
        text = TokenText("a b", [*B, *IDS, *E], (1, 1))
        windows = [from_row(text.token_ids, 1, 1, bos)]
    else:
        if bos in ("given", "official", "scored"):
            special = (B, E)
        text = "a b"
        windows = independent(IDS, 6, *special, bos)
    assert not problems(bos, text, windows, *special)

    *first, last = windows
    shorter = dataclasses.replace(last, target=last.target[:-1])
    assert problems(bos, text, [*first, shorter], *special)


def test_words_are_counted_in_the_text():
    """A user's own column of that name does not count; a task's own count is said to be one."""
    for column, words in (("own", 2), (TOKENS, 9)):
        of_task = FromText("task", lambda text, **_: {"input_ids": IDS}, "none", 6)
        doc = {"text": "a b", column: 11, "words": 9, "bytes": 3}
        of_task.add("document 0", doc, "a b", independent(IDS, 6, bos="none"), -1.0)

        assert of_task.words == words
        assert of_task.counted_before == (column == TOKENS)
