"""`estimator=two_phase` in the harness: answers, statistics, trace, verify, refusals."""

import math

import pytest
from harness_requests import ask

from lm_eval_duel.errors import DuelError
from lm_eval_duel.harness.lm import DuelMDM
from lm_eval_duel.results import trace

LETTERS = "a b c d e f g h i j k l m n o p q r s t"
TEXTS = [(LETTERS,), (LETTERS[6:19],), ("",), (LETTERS[:23],), ("z y x",)]
MORE = []
for n in range(1, 12):
    letters = [chr(ord("a") + (n * k) % 26) for k in range(14)]
    MORE.append((" ".join(letters),))


@pytest.fixture
def model(folder):
    def make(**other):
        arguments = {"pretrained": folder, "block": 4, "device": "cpu", "dtype": "float64", "estimator": "two_phase"}
        return DuelMDM(**{**arguments, "sample": 0.5, **other})

    return make


def rolling(model, texts):
    return [float(value) for value in model.loglikelihood_rolling(ask("loglikelihood_rolling", *texts))]


def results(model):
    duel = model.get_model_info()["duel"]
    (task,) = duel["tasks"].values()
    return task["values"]["two_phase"], duel


def test_the_results_hold_the_estimate_and_what_it_cost(model, folder):
    lm = model()
    values = rolling(lm, [*TEXTS, *MORE])
    value, duel = results(lm)
    assert value["log_prob"] == pytest.approx(math.fsum(values), abs=1e-9)
    assert value["stderr"] > 0

    two_phase = value["two_phase"]
    assert 0 < two_phase["sampled_blocks"] < two_phase["blocks"]
    assert -1 <= two_phase["correlation"] <= 1
    cached = DuelMDM(pretrained=folder, block=4, device="cpu", dtype="float64", cache="dual")
    assert two_phase["cached_log_prob"] == pytest.approx(math.fsum(rolling(cached, [*TEXTS, *MORE])), abs=1e-9)
    forwards = 0
    for phase in ("cached", "uncached"):
        assert duel["phases"][phase]["rows"] > 0
        assert duel["phases"][phase]["seconds"] > 0
        forwards += duel["phases"][phase]["forwards"]
    assert duel["forwards"] == forwards

    assert lm.spec["cheap_cache"] == "dual"
    assert "cache" not in lm.spec
    assert lm.denoiser.cache is None


def test_trace_and_verify(model, tmp_path):
    lm = model(trace=str(tmp_path / "t.jsonl"), verify=3)
    rolling(lm, TEXTS)
    lines = trace.read(tmp_path / "t.jsonl")
    for line in lines:
        parts = line["two_phase"]
        uncached = iter(parts["uncached"])  # of the drawn blocks alone
        estimate = 0.0
        for cached, weight in zip(parts["cached"], parts["weights"], strict=True):
            estimate += cached
            if weight:
                estimate += 2 * (next(uncached) - cached)  # half of the blocks are drawn
        assert line["log_prob"] == pytest.approx(estimate, abs=1e-9)
        assert len(parts["cached"]) == len(line["starts"])

    _, duel = results(lm)
    assert duel["verify"]["windows"] == 3
    assert duel["verify"]["largest_difference"] < 1e-6


def test_options_are_not_compared(model):
    with pytest.raises(DuelError, match="Use estimator=duel for this task, without cache or with cache=dual"):
        model().loglikelihood(ask("loglikelihood", ("a b", " c")))
