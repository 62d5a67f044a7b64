"""A perplexity that is too large for a float is infinite: in the table, in JSON with its reason, and in a report."""

import json
import math

import pytest
from lm_eval.utils import make_table

from lm_eval_duel.cli import run, score
from lm_eval_duel.console.command_line import REASONS
from lm_eval_duel.harness import patches
from lm_eval_duel.results import read
from lm_eval_duel.results.table import number

pytestmark = pytest.mark.usefixtures("one_load")
ONE_WORD = "\u65e5\u672c\u8a9e\u306e\u9577\u3044\u6587" * 4  # more than 709 nats without white space
MODEL = "demo-mdm,rule=left_to_right,k=128,block=128"
REASON = REASONS[math.inf]


@pytest.fixture
def texts(tmp_path):
    file = tmp_path / "texts.jsonl"
    file.write_text(json.dumps({"text": ONE_WORD}), encoding="utf-8")
    return str(file)


def test_a_run_ends_with_an_infinite_word_perplexity(texts, tmp_path, capsys):
    run.main(["--model_args", MODEL, "--tasks", texts, "--output_path", str(tmp_path / "out"), "--device", "cpu"])
    table = capsys.readouterr().out
    assert "inf" in table.lower()
    assert "token_perplexity" in table
    assert table.count(REASON) == 1

    [file] = (tmp_path / "out").rglob("results_*.json")
    content = json.loads(file.read_text(encoding="utf-8"), parse_constant=pytest.fail)  # no Infinity
    results = content["results"]["duel_text"]
    assert results["word_perplexity,none"] is None
    assert results["token_perplexity,none"] > 1
    assert content["nulls"] == {"results.duel_text.word_perplexity,none": REASON}

    [read_again] = read.from_file(file)
    assert read_again.tasks["duel_text"].metrics["word_perplexity"] == math.inf


def test_score_says_why_a_value_is_null(texts, tmp_path, capsys):
    out = tmp_path / "out.json"
    score.main([texts, "--model_args", MODEL, "--device", "cpu", "--json", str(out)])
    table = capsys.readouterr().out
    assert " inf " in table
    assert table.count(REASON) == 1
    content = json.loads(out.read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert content["total"]["word_perplexity"] is None
    assert content["nulls"]["total.word_perplexity"] == REASON


IMPOSSIBLE = {"pretrained": "demo-mdm", "top_k": 1}  # texts have probability 0


def test_a_note_explains_each_infinity_once_for_all_rows(tmp_path, capsys):
    """The log-probabilities of two texts and of their total are -inf, and their perplexities inf."""
    for name in ("first", "second"):
        (tmp_path / f"{name}.txt").write_text("We the people", encoding="utf-8")
    arguments = [str(tmp_path), "--model_args", json.dumps(IMPOSSIBLE), "--device", "cpu"]
    score.main(arguments)
    table = capsys.readouterr().out
    for value, reason in REASONS.items():
        assert table.count(reason) == 1
        assert f"\n{value} is {reason}\n" in table

    score.main([*arguments, "--compare", "block=8"])  # perplexities alone
    table = capsys.readouterr().out
    assert table.count(REASONS[math.inf]) == 1
    assert REASONS[-math.inf] not in table


def test_finite_numbers_have_no_note(tmp_path, capsys):
    file = tmp_path / "text.txt"
    file.write_text("We the people", encoding="utf-8")
    score.main([str(file), "--model_args", MODEL, "--device", "cpu"])
    table = capsys.readouterr().out
    for reason in REASONS.values():
        assert reason not in table


def test_large_numbers_have_an_exponent():
    assert number(1.23456789e150) == "1.2346e+150"
    assert number(-3e12, "+.4f") == "-3.0000e+12"
    assert number(1502355685.7) == "1502355685.70"
    assert number(math.inf) == "inf"

    large = patches.LargeNumber(1.5e150)
    table = make_table({"results": {"a": {"word_perplexity,none": large}}, "versions": {}, "group_subtasks": {"a": []}})
    assert large == 1.5e150
    assert "1.5000e+150" in table.lower()
