"""Sums over windows, documents and ranks, from scores that finish in any order."""

import math

import pytest

from lm_eval_duel import Window
from lm_eval_duel.core.scores import Score
from lm_eval_duel.estimators.blocks import TwoPhaseBlocks
from lm_eval_duel.estimators.documents import score_documents
from lm_eval_duel.estimators.totals import Total
from lm_eval_duel.harness.totals import RunStats

WINDOWS = [Window((), (1,) * (n + 1)) for n in range(3)]


def test_scores_of_a_document_are_in_the_order_of_its_windows():
    documents, scores = [WINDOWS, [], WINDOWS[1:]], {window: Score(-len(window.target)) for window in WINDOWS}

    def backwards(windows):
        assert WINDOWS[2] not in windows  # it has a score already
        yield from ((n, scores[window]) for n, window in reversed([*enumerate(windows)]))

    found = dict(score_documents(documents, backwards, known={WINDOWS[2]: scores[WINDOWS[2]]}))
    assert found == {n: [scores[window] for window in windows] for n, windows in enumerate(documents)}


def test_ranks_add_up_to_one_run():
    """Equal windows of two ranks have one Monte Carlo error; the longest request is the longest of all."""
    ranks = [RunStats(), RunStats()]
    for rank, count in zip(ranks, (2, 1), strict=True):
        rank.add_request(
            "task", rank is ranks[0], Total.from_scores(WINDOWS[:1] * count, [Score(-1.0, stderr=3.0)] * count, "elbo")
        )
    ranks[0].merge(ranks[1])
    assert ranks[0].tasks["task"].stderr == pytest.approx(9) and ranks[0].longest == {"task": 2}


def test_a_sum_over_windows_has_no_values_of_single_blocks():
    blocks = TwoPhaseBlocks(count=2, sampled=1, cached=(-1.0, -2.0), weights=(0.0, 2.0), uncached=(-2.5,))
    assert blocks + blocks == TwoPhaseBlocks(count=4, sampled=2)


def test_an_infinite_sum_has_no_error_over_windows():
    total = Total.from_scores(WINDOWS[:2], [Score(-1.0), Score(-math.inf)], "duel")
    assert total.log_prob == -math.inf and total.window_stderr is None
