"""The harness under `cache=dual`: traces, verify, resuming, response caches and ranks, as without a cache."""

import math
import os
import re
import signal

import kill
import pytest
import tiny
from harness_requests import ask, text_log_prob
from harness_runs import TORCHRUN, evaluate, launch, read
from lm_eval.api.model import CachingLM

from lm_eval_duel.errors import DuelError
from lm_eval_duel.harness import trace
from lm_eval_duel.harness.lm import DuelMDM

TEXTS = [(" ".join(letter + "bcdefghijkl"),) for letter in "mnopqr"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.checkpoint(tmp_path_factory.mktemp("modernbert"), "modernbert", length=16)


@pytest.fixture
def model(folder):
    """A model under cache=dual unless told otherwise."""
    spec = {"pretrained": folder, "rule": "greedy", "block": 4, "device": "cpu", "cache": "dual"}
    return lambda **other: DuelMDM(**{**spec, **other})


def score(lm):
    return lm.loglikelihood_rolling(requests(), disable_tqdm=True)


def requests():
    return ask("loglikelihood_rolling", *TEXTS)


def test_a_trace_holds_what_was_scored_and_is_refused_under_another_cache(model, tmp_path):
    path = tmp_path / "t.jsonl"
    answers = score(model(trace=str(path)))
    records = trace.read(path)
    assert trace.spec(path)["spec"]["cache"] == "dual"
    for doc, answer in enumerate(answers):
        (record,) = [record for record in records if record["doc"] == doc]
        assert math.fsum(record["token_logprobs"]) == pytest.approx(answer, abs=1e-9)
        assert sorted(record["reveal_steps"]) == [step for step in range(4) for _ in range(3)]  # three blocks of four
    for cache in ("prefix", "none"):
        with pytest.raises(DuelError, match="was written under another spec"):
            score(model(trace=str(path), cache=cache))


def test_verify_scores_again_under_the_same_cache(model):
    exact = model(verify=4)
    values = score(exact)
    found = exact.get_model_info()["duel"]["verify"]
    assert (found["windows"], found["changed_picks"]) == (4, 0) and found["largest_difference"] < 1e-4
    assert values == score(model()) and values != pytest.approx(score(model(cache="none")), abs=1e-3)
    coarse = model(verify=4, dtype="bfloat16")
    score(coarse)
    assert coarse.get_model_info()["duel"]["verify"]["largest_difference"] > 1e-3


def test_answers_of_another_cache_are_refused(model, tmp_path):
    file = str(tmp_path / "c_rank0.db")
    CachingLM(model(), file).loglikelihood_rolling(requests())
    with pytest.raises(DuelError, match="cache: this run prefix, the other dual"):
        CachingLM(model(cache="prefix"), file)
    with pytest.raises(DuelError, match=r"cache: .*the other dual"):
        CachingLM(model(cache="none"), file)
    again = CachingLM(model(), file)
    again.loglikelihood_rolling(requests())
    assert again.lm.estimator.counts.windows == 0


def test_an_interrupted_run_goes_on_and_gives_the_same_numbers(model, tmp_path):
    whole = score(model())
    file = str(tmp_path / "c_rank0.db")
    first = CachingLM(model(max_batch_size=1), file)
    step, calls = first.lm.denoiser.step, []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 14:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(*arguments)

    first.lm.denoiser.step = interrupted
    with pytest.raises(SystemExit):
        first.loglikelihood_rolling(requests())
    again = CachingLM(model(max_batch_size=1), file)
    assert again.loglikelihood_rolling(requests()) == pytest.approx(whole, abs=1e-4)
    assert 0 < again.lm.estimator.counts.windows < len(TEXTS)


# ------------------------------------------------------------ real processes


@pytest.mark.slow
def test_two_ranks_print_what_one_prints(tmp_path):
    """In float64, where every document must agree."""
    one, two = (f"rule=greedy,block=32,cache=dual,dtype=float64,trace={tmp_path}/{ranks}.jsonl" for ranks in (1, 2))
    alone = evaluate("sotu", one, limit=4)
    arguments = ("--tasks", "task_configs/sotu/sotu.yaml", "--device", "cpu", "--log_samples", "--limit", "4")
    model = ("lm_eval", "--model", "duel-mdm", "--model_args", two)
    (status,), said = launch(TORCHRUN, 2, *model, *arguments, "--output_path", str(tmp_path / "out"))
    assert status == 0, said[-3000:]
    totals = []
    for results, samples in ((alone, alone["samples"]["sotu"]), read(tmp_path / "out", "sotu")):
        steps = [(line["doc"], line["reveal_steps"]) for line in trace.read(tmp_path / f"{len(totals) + 1}.jsonl")]
        documents = {int(line["doc_id"]): text_log_prob(line) for line in samples}
        duel = results["config"]["duel"]
        totals.append((documents, steps, [duel[name] for name in ("windows", "tokens", "nfe", "near_ties")]))
    assert totals[1][0] == pytest.approx(totals[0][0], abs=1e-9) and totals[1][1:] == totals[0][1:]


@pytest.mark.slow
def test_kills_change_no_number(tmp_path, capsys):
    assert kill.main([str(tmp_path), "--kills", "1", "--model_args", f"{kill.MODEL},cache=dual"]) == 0
    printed = capsys.readouterr().out
    finished, flying = map(int, re.search(r"scored twice: (\d+) finished, (\d+) in flight", printed).groups())
    assert finished <= 1 and flying <= 1
