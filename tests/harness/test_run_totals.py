"""Sums over windows, documents and ranks, from scores that finish in any order."""

import math

import pytest

from lm_eval_duel import Window
from lm_eval_duel.core.scores import Score
from lm_eval_duel.estimators.totals import Total, TwoPhaseBlocks, Unfinished, score_documents

WINDOWS = [Window((), (1,) * (n + 1)) for n in range(3)]


def test_scores_of_a_document_are_in_the_order_of_its_windows():
    documents = [WINDOWS, [], WINDOWS[1:]]
    scores = {window: Score(-len(window.target)) for window in WINDOWS}
    first, second, third = scores.values()
    expected = {0: [first, second, third], 1: [], 2: [second, third]}

    def backwards(windows):
        for n in reversed(range(len(windows))):
            yield n, scores[windows[n]]

    assert dict(score_documents(documents, backwards)) == expected

    known = WINDOWS[2]
    unfinished = Unfinished(dict(enumerate(documents)), {known: scores[known]})
    finished = dict(unfinished.complete())
    for n, place in reversed(unfinished.missing):
        window = documents[n][place]
        assert window != known
        complete = unfinished.add(n, place, scores[window])
        if complete is not None:
            finished[n] = complete
    assert finished == expected


def test_a_sum_over_windows_has_no_values_of_single_blocks():
    blocks = TwoPhaseBlocks(count=2, sampled=1, cached=(-1.0, -2.0), weights=(0.0, 2.0), uncached=(-2.5,))
    assert blocks + blocks == TwoPhaseBlocks(count=4, sampled=2)


def test_an_infinite_sum_has_no_error_over_windows():
    total = Total.from_scores(WINDOWS[:2], [Score(-1.0), Score(-math.inf)], "duel")
    assert total.log_prob == -math.inf
    assert total.window_stderr is None


def test_drawn_blocks_of_copies_count_once():
    """Eight blocks make an error, one block eight times does not."""

    def total(windows):
        blocks = TwoPhaseBlocks(count=4, sampled=1, drawn=1, variance=0.01)
        return Total.from_scores(windows, [Score(-3.0, blocks=blocks)] * len(windows), "two_phase")

    windows = [Window((), (n, 1)) for n in range(8)]
    assert total(windows).stderr == pytest.approx(0.1 * 8**0.5)

    copies = total(windows[:1] * 8)
    copies.merge(total(windows[:1]))
    assert copies.stderr is None
    assert copies.blocks.drawn == 1
    assert copies.blocks.sampled == 9
