"""The real harness in a subprocess, and its numbers against the textbook loop over the same checkpoint."""

import math
import re

import pytest
from harness_requests import choice_answers, text_log_prob
from harness_runs import evaluate, lm_eval, read

from lm_eval_duel.cli.main import main
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


def test_multiple_choice_and_a_rule_in_one_word():
    results = evaluate("sotu_choice", "rule=klass:mu=0.9:nu=0.01", limit=2)
    assert results["config"]["spec"]["rule"] == "klass:mu=0.9:nu=0.01:history=1:kl=paper"
    assert len(results["samples"]["sotu_choice"]) == 2
    for sample in results["samples"]["sotu_choice"]:
        nats = [answer[0] for answer in choice_answers(sample)]
        assert len(nats) == 4 and sample["acc"] == (nats.index(max(nats)) == sample["doc"]["label"])
        assert all(isinstance(answer[1], bool) for answer in choice_answers(sample))


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
