"""The real harness in a subprocess: what it prints and writes; and `inspect`."""

import math
import re

import dit_reference
import pytest
from harness_requests import choice_answers, text_log_prob
from harness_runs import evaluate, lm_eval, read

from lm_eval_duel.cli.main import main

pytestmark = pytest.mark.usefixtures("one_load")
LIMIT = 1


@pytest.mark.slow
def test_the_command_prints_and_writes_perplexities_and_which_law_they_are_of(tmp_path):
    arguments = ["--model_args", "rule=greedy,block=32", "--tasks", "sotu", "--limit", str(LIMIT), "--device", "cpu"]

    done = lm_eval("run", *arguments, "--output_path", str(tmp_path), "--log_samples", module="lm_eval_duel")

    results, samples = read(tmp_path, "sotu")
    nats = math.fsum(map(text_log_prob, samples))
    tokens = 0
    words = 0
    size = 0
    for sample in samples:
        text = sample["doc"]["text"]
        tokens += sample["doc"]["duel_tokens"]
        words += len(text.split())
        size += len(text.encode())
    table = results["results"]["sotu"]
    assert table["token_perplexity,none"] == pytest.approx(math.exp(-nats / tokens))
    assert table["word_perplexity,none"] == pytest.approx(math.exp(-nats / words))
    assert table["byte_perplexity,none"] == pytest.approx(math.exp(-nats / size))
    assert table["bits_per_byte,none"] == pytest.approx(-nats / size / math.log(2))

    for metric in ("token_perplexity", "byte_perplexity", "bits_per_byte"):
        assert metric in done.stdout
    assert "scoring with demo-mdm" in done.stderr

    config = results["config"]
    assert re.fullmatch("[0-9a-f]{12}", config["fingerprint"])
    assert config["spec"]["rule"] == "greedy:k=1"
    assert config["spec"]["block"] == "32"
    assert config["duel"]["tokens"] == tokens
    assert config["duel"]["nfe"] == tokens
    assert config["duel"]["all_mask_starts"] == LIMIT


@pytest.mark.slow
def test_multiple_choice_and_a_rule_in_one_word():
    results = evaluate("sotu_choice", "rule=klass:mu=0.05:nu=9", limit=1)

    assert results["config"]["spec"]["rule"] == "klass:mu=0.05:nu=9.0:history=1:kl=paper"
    [sample] = results["samples"]["sotu_choice"]
    nats = [log_prob for log_prob, _ in choice_answers(sample)]
    chosen = nats.index(max(nats))
    assert len(nats) == 4
    assert sample["acc"] == (chosen == sample["doc"]["label"])


def test_inspect_shows_every_guess(capsys):
    main(["inspect", "demo-mdm"])

    shown = {}
    for line in capsys.readouterr().out.strip().splitlines():
        label, text = re.split(r"  +", line, maxsplit=1)
        shown[label] = text
    assert shown["family"] == "masked-lm (ModernBertForMaskedLM)"
    assert shown["parameters"] == "3,215,872"
    assert shown["vocabulary"] == "2047 of 2048 columns are tokens"
    assert shown["mask"] == "2 '<|mask|>'"
    assert shown["attention"] == "bidirectional"
    assert shown["block"] == "32, counted from the first scored position (grid=target)"
    assert shown["max length"] == "128 positions"
    assert shown["special tokens"] == "none (bos=none)"
    assert "greedy:k=1, 11 steps" in shown["one text"]
    assert shown["one text"].endswith(" s")


def test_inspect_calls_a_network_of_random_tokens_no_autoregressive_one(tmp_path, capsys):
    folder, _ = dit_reference.write(tmp_path, "duo")
    dit_reference.words(dit_reference.VOCABULARY).save_pretrained(tmp_path)

    main(["inspect", folder, "--model_args", "estimator=noised_elbo,mc_samples=8", "--device", "cpu"])

    shown = capsys.readouterr().out
    assert "random tokens" in shown
    assert "autoregressive" not in shown
    assert "all-mask starts" not in shown
