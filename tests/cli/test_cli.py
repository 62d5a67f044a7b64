"""The real harness in a subprocess, and its numbers against the textbook loop over the same checkpoint."""

import math
import os
import re
import subprocess
import sys

import pytest
import torch
from demo_reference import agrees
from harness_requests import choice_answers, text_log_prob
from harness_runs import evaluate, free_port, lm_eval, read
from transformers import AutoModelForCausalLM, AutoTokenizer

from lm_eval_duel import demo
from lm_eval_duel.cli.main import main
from lm_eval_duel.errors import DuelError
from lm_eval_duel.harness import trace
from lm_eval_duel.tasks import task_folder

LIMIT = 2


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The README's command on the first documents, with its results file."""
    out = tmp_path_factory.mktemp("out")
    arguments = ["--model", "duel-mdm", "--model_args", "rule=greedy,block=32", "--include_path", task_folder()]
    done = lm_eval(
        *arguments,
        "--tasks",
        "sotu",
        "--limit",
        str(LIMIT),
        "--output_path",
        str(out),
        "--log_samples",
        "--device",
        "cpu",
    )
    return done, *read(out, "sotu")


def test_the_harness_prints_token_word_and_byte_perplexity(run):
    done, results, samples = run
    table = results["results"]["sotu"]
    nats = math.fsum(text_log_prob(s) for s in samples)
    tokens = sum(s["doc"]["duel_tokens"] for s in samples)
    size = sum(len(s["doc"]["text"].encode()) for s in samples)
    words = sum(len(s["doc"]["text"].split()) for s in samples)
    assert table["token_perplexity,none"] == pytest.approx(math.exp(-nats / tokens))
    assert table["word_perplexity,none"] == pytest.approx(math.exp(-nats / words))
    assert table["byte_perplexity,none"] == pytest.approx(math.exp(-nats / size))
    assert table["bits_per_byte,none"] == pytest.approx(-nats / size / math.log(2))
    for metric in ("token_perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte"):
        assert metric in done.stdout
    assert "scoring with demo-mdm" in done.stderr
    assert f"the lowest is first: {LIMIT}" in done.stderr


def test_the_results_file_says_which_law(run):
    _, results, _ = run
    config = results["config"]
    assert re.fullmatch("[0-9a-f]{12}", config["fingerprint"])
    assert config["spec"]["rule"] == "greedy:k=1" and config["spec"]["block"] == "32"
    assert config["duel"]["tokens"] == config["duel"]["nfe"] == sum(s["doc"]["duel_tokens"] for s in run[2])
    assert config["duel"]["all_mask_starts"] == LIMIT


def test_the_numbers_are_those_of_the_textbook_loop(run):
    _, _, samples = run
    samples = sorted(samples, key=lambda s: s["doc_id"])
    compared = agrees([s["doc"]["text"] for s in samples], [text_log_prob(s) for s in samples], "greedy", 32)
    assert compared  # the slow test_golden.py has more


def test_multiple_choice_and_a_rule_in_one_word():
    results = evaluate("sotu_choice", "rule=klass:mu=0.9:nu=0.01", limit=2)
    assert results["config"]["spec"]["rule"] == "klass:mu=0.9:nu=0.01:history=1:kl=paper"
    assert len(results["samples"]["sotu_choice"]) == 2
    for sample in results["samples"]["sotu_choice"]:
        nats = [answer[0] for answer in choice_answers(sample)]
        assert len(nats) == 4 and sample["acc"] == (nats.index(max(nats)) == sample["doc"]["label"])
        assert all(isinstance(answer[1], bool) for answer in choice_answers(sample))


def test_the_autoregressive_twin_runs_the_same_tasks():
    folder = demo.resolve("demo-ar")
    results = evaluate("sotu", f"pretrained={folder},dtype=float32", model="hf", limit=1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    words = AutoTokenizer.from_pretrained(folder)
    for sample in results["samples"]["sotu"]:
        ids = words(sample["doc"]["text"])["input_ids"]
        assert len(ids) == sample["doc"]["duel_tokens"]
        with torch.inference_mode():
            logs = model(input_ids=torch.tensor([[words.bos_token_id, *ids[:-1]]])).logits[0].log_softmax(-1)
        by_hand = float(logs.gather(1, torch.tensor(ids)[:, None]).double().sum())
        assert text_log_prob(sample) == pytest.approx(by_hand, abs=2e-3)
    assert "token_perplexity,none" in results["results"]["sotu"]


def test_where(capsys):
    for name, file in (
        ("tasks", "sotu/sotu.yaml"),
        ("demo-mdm", "config.json"),
        ("demo-bd", "config.json"),
        ("demo-ar", "config.json"),
    ):
        main(["tools", "where", name])
        path = capsys.readouterr().out.strip()
        assert os.path.isabs(path) and os.path.exists(os.path.join(path, file))


def test_inspect_shows_every_guess(capsys):
    main(["inspect", "demo-mdm"])
    shown = dict(re.split(r"  +", line, maxsplit=1) for line in capsys.readouterr().out.strip().splitlines())
    assert shown["family"] == "masked-lm (ModernBertForMaskedLM)"
    assert shown["parameters"] == "3,215,872"
    assert shown["vocabulary"] == "2047 of 2048 columns are tokens"
    assert shown["mask"] == "2 '<|mask|>'"
    assert shown["attention"] == "bidirectional"
    assert shown["block"] == "32 (grid target)"
    assert shown["max length"] == "128"
    assert shown["special tokens"] == "bos=none: text"
    assert shown["one text"].endswith(" s") and "greedy:k=1, 11 steps" in shown["one text"]
    main(["inspect", "demo-mdm", "--model_args", "block=4,rule=margin,bos=given,cfg_scale=0.5,max_length=64"])
    shown = dict(re.split(r"  +", line, maxsplit=1) for line in capsys.readouterr().out.strip().splitlines())
    assert (shown["block"], shown["max length"]) == ("4 (grid target)", "64")
    assert shown["special tokens"] == "bos=given: 1 '<|endoftext|>' text"
    assert shown["guidance"] == "classifier-free, cfg_scale=0.5"
    with pytest.raises(SystemExit, match=r"lm-eval-duel: Unknown model arg 'blok'\. Did you mean block\?"):
        main(["inspect", "demo-mdm", "--model_args", "blok=4"])


def test_a_response_cache_is_used_again_and_guarded(tmp_path):
    cache = str(tmp_path / "cache")
    first = evaluate("sotu", "rule=l2r", limit=2, use_cache=cache)
    again = evaluate("sotu", "rule=l2r", limit=2, use_cache=cache)
    assert again["results"] == first["results"]
    assert first["config"]["duel"]["windows"] == 2 and again["config"]["duel"]["windows"] == 0
    with pytest.raises(DuelError, match=r"rule: this run margin:k=1, the other left_to_right:k=1\. Name another file"):
        evaluate("sotu", "rule=margin", limit=2, use_cache=cache)


@pytest.mark.slow
def test_two_ranks_print_what_one_prints(tmp_path):
    """Three documents on two CPU ranks (gloo): the harness pads the second rank's requests, and nobody hangs."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", free_port()]
    traced = f"rule=greedy,block=32,trace={tmp_path}/t.jsonl"
    arguments = ["-m", "lm_eval_duel", "run", "--model_args", traced, "--tasks", "sotu", "--limit", "3"]
    done = subprocess.run(
        [*command, *arguments, "--device", "cpu", "--output_path", str(tmp_path), "--log_samples"],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results, samples = read(tmp_path, "sotu")
    alone = evaluate("sotu", f"rule=greedy,block=32,trace={tmp_path}/alone.jsonl", limit=3)
    cost, one = results["config"]["duel"], alone["config"]["duel"]
    assert (cost["ranks"], one["ranks"]) == (2, 1)
    for name in ("windows", "tokens", "rows", "nfe", "near_ties", "all_mask_starts", "longest_document"):
        assert cost[name] == one[name], name
    totals, ones = cost["tasks"]["sotu"], one["tasks"]["sotu"]
    assert totals["documents"] == 3 and totals["tokens"] == ones["tokens"]
    assert totals["values"]["duel"]["log_prob"] == pytest.approx(ones["values"]["duel"]["log_prob"], abs=1e-3)
    both, single = trace.read(tmp_path / "t.jsonl"), trace.read(tmp_path / "alone.jsonl")
    assert [(r["doc"], r["ids"], r["reveal_steps"]) for r in both] == [
        (r["doc"], r["ids"], r["reveal_steps"]) for r in single
    ]
    assert results["config"]["fingerprint"] == alone["config"]["fingerprint"]
    ours = {s["doc_id"]: text_log_prob(s) for s in samples}
    theirs = {s["doc_id"]: s["filtered_resps"][0] for s in alone["samples"]["sotu"]}
    assert ours == pytest.approx(theirs, abs=1e-4)
    assert results["results"]["sotu"]["token_perplexity,none"] == pytest.approx(
        alone["results"]["sotu"]["token_perplexity,none"], rel=1e-6
    )
