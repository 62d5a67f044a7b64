"""`estimator=two_phase` in the harness: answers, statistics, response cache, trace, verify, refusals."""

import json
import math
from pathlib import Path

import pytest
import tiny
from harness_requests import ask
from harness_runs import TORCHRUN, evaluate, launch
from lm_eval.api.model import CachingLM

import lm_eval_duel
from lm_eval_duel.errors import DuelError, UsageError
from lm_eval_duel.harness import trace, versions
from lm_eval_duel.harness.lm import DuelMDM
from lm_eval_duel.tasks.bundled import task_folder

TEXTS = [
    ("a b c d e f g h i j k l m n o p q r s t",),
    ("d e f g h i j",),
    ("",),
    ("a b c d e f g h i j k l",),
    ("z y x",),
]
MORE = [(" ".join(chr(97 + (n * k) % 26) for k in range(14)),) for n in range(1, 12)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.checkpoint(tmp_path_factory.mktemp("bert"), "bert", length=16)


@pytest.fixture
def model(folder):
    def make(**other):
        arguments = {"pretrained": folder, "block": 4, "device": "cpu", "dtype": "float64", "estimator": "two_phase"}
        return DuelMDM(**{**arguments, "sample": 0.5, **other})

    return make


def rolling(model, texts):
    return [float(value) for value in model.loglikelihood_rolling(ask("loglikelihood_rolling", *texts))]


def in_tasks(**tasks):
    """The requests of several tasks, each a list of texts."""
    requests = []
    for name, texts in tasks.items():
        requests += [versions.request("loglikelihood_rolling", {}, text, name, n) for n, text in enumerate(texts)]
    return requests


def parts(model):
    """What is special to two-phase estimates in the results of each task, and the run's own costs."""
    duel = model.get_model_info()["duel"]
    return {name: task["values"]["two_phase"]["two_phase"] for name, task in duel["tasks"].items()}, duel["phases"]


def results(model):
    duel = model.get_model_info()["duel"]
    (task,) = duel["tasks"].values()
    return task["values"]["two_phase"], duel


def test_with_every_block_answers_are_exact(model, folder):
    exact = DuelMDM(pretrained=folder, block=4, device="cpu", dtype="float64")
    full = model(sample=1)
    assert rolling(full, TEXTS) == pytest.approx(rolling(exact, TEXTS), abs=1e-9)
    assert results(full)[0]["stderr"] == 0
    assert full.fingerprint != exact.fingerprint != model(sample=0.5).fingerprint


def test_the_results_hold_the_estimate_and_what_it_cost(model, folder):
    lm = model()
    values = rolling(lm, [*TEXTS, *MORE])
    value, duel = results(lm)
    assert value["log_prob"] == pytest.approx(math.fsum(values), abs=1e-9) and value["stderr"] > 0
    two_phase = value["two_phase"]
    assert 0 < two_phase["sampled_blocks"] < two_phase["blocks"]
    assert -1 <= two_phase["correlation"] <= 1
    cached = DuelMDM(pretrained=folder, block=4, device="cpu", dtype="float64", cache="dual")
    assert two_phase["cached_log_prob"] == pytest.approx(math.fsum(rolling(cached, [*TEXTS, *MORE])), abs=1e-9)
    assert two_phase["uncached"]["token_rows"] < two_phase["all_uncached"]["token_rows"]
    for phase in ("cached", "uncached"):
        assert duel["phases"][phase]["rows"] > 0 and duel["phases"][phase]["seconds"] > 0
    assert sum(phase["forwards"] for phase in duel["phases"].values()) == duel["forwards"]
    assert lm.spec["cheap_cache"] == "dual" and "cache" not in lm.spec and lm.denoiser.cache is None


@pytest.mark.parametrize("alone", ["first", "second"])
def test_rows_of_a_task_are_those_of_the_task_alone(model, alone):
    tasks = {"first": TEXTS, "second": [*MORE, *TEXTS[3:]]}
    lm, other = model(), model()
    lm.loglikelihood_rolling(in_tasks(**tasks))
    other.loglikelihood_rolling(in_tasks(**{alone: tasks[alone]}))
    each, single = parts(lm)[0][alone], parts(other)[0][alone]
    for name, value in single.items():
        assert each[name] == (pytest.approx(value) if isinstance(value, float) else value), name


def test_prefix_is_the_cheap_phase_if_named(model):
    lm = model(cache="prefix")
    assert lm.spec["cheap_cache"] == "prefix" and lm.denoiser.cache is None


def test_a_resumed_run_is_the_uninterrupted_one(model, tmp_path):
    texts = [*TEXTS, *MORE]
    whole = model(sample=0.4)
    values = rolling(whole, texts)

    def cached():
        return CachingLM(model(sample=0.4), str(tmp_path / "c_rank0.db"))

    rolling(cached(), texts[:5])
    again = cached()
    assert rolling(again, texts) == pytest.approx(values, abs=1e-9)
    (mine, duel), (theirs, _) = results(again), results(whole)
    for key in ("log_prob", "stderr", "window_stderr"):
        assert mine[key] == pytest.approx(theirs[key], abs=1e-9), key
    assert mine["two_phase"]["sampled_blocks"] == theirs["two_phase"]["sampled_blocks"]
    assert mine["two_phase"]["correlation"] == pytest.approx(theirs["two_phase"]["correlation"], abs=1e-9)
    last = cached()
    assert rolling(last, texts) == pytest.approx(values, abs=1e-9) and last.lm.estimator.counts.rows == 0
    assert duel["answers_from_cache"] == 5


def test_trace_and_verify(model, tmp_path):
    lm = model(trace=str(tmp_path / "t.jsonl"), verify=3)
    rolling(lm, TEXTS)
    lines = trace.read(tmp_path / "t.jsonl")
    for line in lines:
        parts = line["two_phase"]
        chosen = [g for g, weight in zip(parts["cached"], parts["weights"], strict=True) if weight]
        corrections = [2 * (f - g) for f, g in zip(parts["uncached"], chosen, strict=True)]
        assert line["log_prob"] == pytest.approx(sum(parts["cached"]) + sum(corrections), abs=1e-9)
        assert len(parts["cached"]) == len(line["starts"])
    verified = results(lm)[1]["verify"]
    assert verified["windows"] == 3 and verified["largest_difference"] < 1e-6


def test_options_are_not_compared(model):
    with pytest.raises(DuelError, match="Use estimator=duel for this task, without cache or with cache=dual"):
        model().loglikelihood(ask("loglikelihood", ("a b", " c")))


def test_texts_are_generated_without_the_cache(model, folder):
    settings = {"until": [], "max_gen_toks": 4}
    texts = model().generate_until(ask("generate_until", ("a b c", settings)))
    exact = DuelMDM(pretrained=folder, block=4, device="cpu", dtype="float64")
    assert texts == exact.generate_until(ask("generate_until", ("a b c", settings)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sample": 0}, "'sample' is a share of blocks above 0, at most 1; got '0'"),
        ({"top_k": 3}, "does not support top_k.*Use estimator=duel"),
        ({"compile": True}, "does not support compile.*Use estimator=duel"),
        ({"backend": "remote", "trust_remote_code": True}, "backend=remote.*Use estimator=duel"),
        ({"cache": "none"}, "'cache' is its first phase, dual or prefix. Leave cache out, or use estimator=duel"),
        ({"estimator": "duel"}, "'sample' is read by estimator=two_phase only"),
    ],
    ids=str,
)
def test_refused_before_anything_is_loaded(model, arguments, message):
    with pytest.raises(UsageError, match=message):
        model(pretrained="/no/such/folder", **arguments)


PASSAGES = (
    "include: {shipped}\ntask: again\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\n"
    "dataset_name: null\ndoc_to_target: text\n"
)


@pytest.mark.slow
def test_two_ranks_print_what_one_prints(tmp_path):
    """In float64, and a second task whose documents are the first one's, on the other rank or twice."""
    shipped = Path(task_folder()) / "sotu"
    lines = (Path(lm_eval_duel.__file__).parent / "demo" / "text" / "sotu.jsonl").read_text().splitlines()
    (tmp_path / "again.jsonl").write_text("\n".join([*lines[1:5], *lines[1:4]]) + "\n")
    (tmp_path / "again.yaml").write_text(
        PASSAGES.format(shipped=shipped / "_perplexity.yaml", data=tmp_path / "again.jsonl")
    )
    arguments = ["lm_eval", "--model", "duel-mdm", "--tasks", f"{shipped / 'sotu.yaml'},{tmp_path / 'again.yaml'}"]
    arguments += ["--limit", "7"]
    model = "rule=greedy:k=2,block=4,dtype=float64,estimator=two_phase,sample=0.3"
    options = ["--device", "cpu", "--model_args", model, "--output_path", str(tmp_path / "two")]
    (status,), said = launch(TORCHRUN, 2, *arguments, *options)
    assert status == 0, said[-3000:]
    (path,) = (tmp_path / "two").glob("**/results_*.json")
    runs = [evaluate(["sotu", "again"], model, folders=[str(tmp_path)], limit=7), json.loads(path.read_text())]
    runs = [run["config"]["duel"] for run in runs]
    values = [{name: task["values"]["two_phase"] for name, task in run["tasks"].items()} for run in runs]
    for name, one in values[0].items():
        two = values[1][name]
        assert two["log_prob"] == pytest.approx(one["log_prob"], abs=1e-8), name
        assert two["stderr"] == pytest.approx(one["stderr"], abs=1e-8) and one["stderr"] > 0, name
        for key in ("blocks", "sampled_blocks", "cached", "uncached", "all_uncached"):
            assert two["two_phase"][key] == one["two_phase"][key], key
        assert one["two_phase"]["sampled_blocks"] < one["two_phase"]["blocks"]
