"""An error in any step of the loop loses no finished request: the next run finds it in the response cache."""

import itertools

import pytest
from close import close_nats
from harness_requests import ask, cached

from lm_eval_duel.audit.verify import Verification
from lm_eval_duel.estimators.totals import Unfinished
from lm_eval_duel.harness.lm import DuelMDM
from lm_eval_duel.harness.progress import Progress, RunningEstimate
from lm_eval_duel.harness.scoring import Evaluation
from lm_eval_duel.harness.stats import RunStats
from lm_eval_duel.harness.store import Answers, ResponseCache
from lm_eval_duel.results.trace import Writer

LETTERS = "b c d e f g h i j k l m n o p q r s t u v w x y z"
REQUESTS = {  # the long texts have two windows each
    "loglikelihood_rolling": [(f"x {LETTERS}",), ("a b c",), ("d e",), (f"y {LETTERS}",), ("f",)],
    "loglikelihood": [("a", " b c"), ("a", " d"), ("b", " e f g")],
    "generate_until": [(letter, {"until": [], "max_gen_toks": 4}) for letter in "abc"],
}
WINDOWS = {"loglikelihood_rolling": 7, "loglikelihood": 3, "generate_until": 3}
ROLLING, PAIRS, TEXTS = REQUESTS
STEPS = [  # kind, class, method, of which call it fails, windows that are lost
    (ROLLING, Answers, "kept", 1, 0),
    (ROLLING, Answers, "keep", 2, 1),  # the one that could not be kept
    (ROLLING, Unfinished, "_take", 2, 1),  # a request of one window
    (ROLLING, ResponseCache, "keep", 3, 1),  # after the spec and a window
    (ROLLING, ResponseCache, "forget", 1, 0),
    (ROLLING, RunStats, "add_request", 2, 0),
    (ROLLING, Verification, "keep", 2, 0),
    (ROLLING, RunningEstimate, "__str__", 1, 0),
    (ROLLING, Progress, "add_window", 2, 1),  # a request of one window
    (ROLLING, Progress, "finish_request", 2, 0),
    (ROLLING, Writer, "write", 3, 0),  # the first writes the header
    (ROLLING, Writer, "flush", 1, 0),
    (ROLLING, Verification, "compare", 1, 0),
    (PAIRS, RunStats, "add_request", 2, 0),
    (PAIRS, Evaluation, "write_trace", 2, 0),
    (TEXTS, ResponseCache, "keep", 3, 1),  # the one that could not be saved
    (TEXTS, Progress, "finish_request", 2, 0),
    (TEXTS, Evaluation, "write_trace", 2, 0),
]


class Broken(Exception):
    """An error that no code expects."""


def make(folder, kept):
    """One row a call, so that windows are finished one after the other, each in a few steps."""
    arguments = {"rule": "greedy:k=4", "block": 4, "device": "cpu", "max_batch_size": 1, "order": "random", "verify": 2}
    return cached(DuelMDM(pretrained=folder, **arguments, trace=str(kept / "t.jsonl")), kept)


@pytest.fixture(scope="module")
def answers(folder, tmp_path_factory):
    whole = make(folder, tmp_path_factory.mktemp("whole"))
    return {kind: getattr(whole, kind)(ask(kind, *texts)) for kind, texts in REQUESTS.items()}


@pytest.mark.parametrize(("kind", "owner", "name", "call", "lost"), STEPS)
def test_a_failure_loses_no_finished_request(folder, tmp_path, monkeypatch, answers, kind, owner, name, call, lost):
    requests = ask(kind, *REQUESTS[kind])
    original = getattr(owner, name)
    calls = itertools.count(1)

    def fails(*arguments, **options):
        if next(calls) == call:
            raise Broken
        return original(*arguments, **options)

    first = make(folder, tmp_path)
    with monkeypatch.context() as patch, pytest.raises(Broken):
        patch.setattr(owner, name, fails)
        getattr(first, kind)(requests)

    again = make(folder, tmp_path)
    resumed = getattr(again, kind)(requests)
    scored = first.lm.estimator.counts.windows + again.lm.estimator.counts.windows
    assert scored - WINDOWS[kind] <= lost
    if kind == TEXTS:
        assert resumed == answers[kind]
    else:
        assert values_of(resumed) == close_nats(values_of(answers[kind]))


def values_of(answers):
    """The log-probabilities of answers, some of which have an `is_greedy` beside it."""
    return [answer[0] if isinstance(answer, tuple) else answer for answer in answers]
