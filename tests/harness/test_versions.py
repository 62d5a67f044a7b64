"""A whole text is (text,) in lm-eval 0.4.13 and ("", text) in 0.5: the numbers and records are the same."""

import hashlib
import json

import pytest
from lm_eval.api.model import CachingLM

from lm_eval_duel.harness.lm import DuelMDM
from lm_eval_duel.harness.requests import WHOLE_TEXT, make_request, random_order
from lm_eval_duel.results import samples
from lm_eval_duel.tasks.metrics import perplexity, token_perplexity

pytestmark = pytest.mark.usefixtures("one_load")

TEXTS = ("a b c d e f g", "h i", "", "a b c")
OLD = [make_request(WHOLE_TEXT, {"text": text}, (text,), "toy", n) for n, text in enumerate(TEXTS)]
NEW = [make_request(WHOLE_TEXT, {"text": text}, ("", text), "toy", n) for n, text in enumerate(TEXTS)]


def model(folder):
    return DuelMDM(pretrained=folder, rule="greedy", block=4, device="cpu")


def test_each_release_gets_the_answers_it_expects(folder):
    numbers, pairs = (model(folder).loglikelihood_rolling(requests, disable_tqdm=True) for requests in (OLD, NEW))
    assert all(isinstance(number, float) and number < 0 for number, text in zip(numbers, TEXTS, strict=True) if text)
    assert pairs == [(number, False) for number in numbers]
    assert [pair[0].text for pair in pairs] == [*TEXTS], "tasks count the units of the text in the answer"


def test_a_run_is_resumed_under_the_other_release(folder, tmp_path):
    """Keys and records of the response cache, and the order of order=random, are those of 0.4.13."""
    path = str(tmp_path / "c_rank0.db")
    first, second = (CachingLM(model(folder), path) for _ in range(2))
    numbers = first.loglikelihood_rolling(OLD[:2], disable_tqdm=True)
    pairs = second.loglikelihood_rolling(NEW, disable_tqdm=True)
    assert pairs[:2] == [(number, False) for number in numbers]
    assert second.lm.estimator.counts.windows == 1, "only the last text was new"
    assert random_order(OLD, 3) == random_order(NEW, 3)


@pytest.mark.parametrize("function", [perplexity, token_perplexity])
def test_tasks_read_both_answers(function):
    doc = {"text": "ACD", "duel_tokens": 3, "words": 1, "bytes": 3}
    assert function(doc, [-2.5]) == function(doc, [(-2.5, False)])


def test_samples_of_both_releases_are_the_same_documents(tmp_path):
    """0.5 logs 0 as the target of a text. The right option of a multiple choice, which may be 0, stays as it is."""

    def logged(target, *requests):
        record = {
            "doc_id": 0,
            "doc_hash": "d",
            "prompt_hash": "p",
            "target_hash": hashlib.sha256(str(target).encode()).hexdigest(),
            "arguments": {
                f"gen_args_{n}": {f"arg_{i}": part for i, part in enumerate(request)}
                for n, request in enumerate(requests)
            },
            "bits_per_byte": [-2.0, 3],
        }
        file = tmp_path / "samples.jsonl"
        file.write_text(json.dumps(record))
        return [samples.documents(file, rolling)[0].key for rolling in (True, False)]

    assert logged("a b", ("a b",)) == logged(0, ("", "a b")) != logged(0, ("", "a c"))
    assert logged("b", ("a", "b")) == logged(0, ("a", "b"))
    assert logged(0, ("a", "b"), ("a", "c")) == logged(0, ("a", "x"), ("a", "y"))
