"""`lm-eval-duel generate`: JSON lines whose log-probs are those of scoring."""

import json

import pytest

from lm_eval_duel import Duel, Window
from lm_eval_duel.cli.generate import in_order, parse
from lm_eval_duel.cli.main import main
from lm_eval_duel.errors import UsageError

pytestmark = pytest.mark.usefixtures("one_load")


def lines(capsys, *arguments):
    main(["generate", "demo-mdm", "--model_args", "block=4", "--device", "cpu", "--max_new_tokens", "6", *arguments])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_samples_are_written_with_their_log_probs(tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text("The state of\nWe the\n")
    arguments = ("--prompts", str(tmp_path / "prompts.txt"), "--suffix", " strong.", "--seed", "3")

    samples = lines(capsys, *arguments, "--num", "2")

    origins = [(line["prompt"], line["sample"], line["context"]) for line in samples]
    assert origins == [(0, 0, "The state of"), (0, 1, "The state of"), (1, 0, "We the"), (1, 1, "We the")]

    duel = Duel.from_pretrained("demo-mdm", rule="greedy", block=4, device="cpu")
    windows = [Window(**line["window"]) for line in samples]
    for line, score in zip(samples, duel.log_prob(windows), strict=True):
        assert line["log_prob"] == pytest.approx(score.log_prob, abs=1e-4)
        assert line["kind"] == "exact"
        assert line["rule"] == "greedy:k=1"
        assert line["block"] == 4
        assert line["seed"] == 3
        assert line["fingerprint"] == duel.fingerprint
        assert len(line["tokens"]) == len(line["reveal_steps"]) == 6

    first_of_0, _, first_of_1, _ = samples
    alone = lines(capsys, *arguments)
    assert [line["text"] for line in alone] == [first_of_0["text"], first_of_1["text"]], "however many there are"


def test_prompts_of_a_table_and_the_argmax(tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text('{"ask": "We the"}\n')
    arguments = ("--prompts", str(tmp_path / "rows.jsonl"), "--field", "ask", "--temperature", "0", "--num", "2")

    first, second = lines(capsys, *arguments)

    assert first["text"] == second["text"]
    with pytest.raises(SystemExit, match="--prompts"):
        lines(capsys, *arguments, "--prompt", "a")


def test_a_file_is_not_overwritten_and_a_setting_is_not_given_twice(tmp_path):
    (tmp_path / "old.jsonl").write_text("finished work")
    words = ["demo-mdm", "--model_args", "temperature=0.5,top_k=3"]

    for flag, value, named in (
        ("--out", str(tmp_path / "old.jsonl"), "old.jsonl exists"),
        ("--temperature", "0.7", "temperature=0.5"),
        ("--top_k", "3", "top_k=3"),
    ):
        with pytest.raises(UsageError, match=named):
            parse([*words, flag, value])
    parse([*words, "--top_p", "0.9", "--out", str(tmp_path / "new.jsonl")])


def test_a_line_names_what_its_numbers_depend_on(capsys):
    args = "block=4,cache=dual,temperature=0.5"

    main(["generate", "demo-mdm", "--model_args", args, "--device", "cpu", "--max_new_tokens", "4"])

    [line] = map(json.loads, capsys.readouterr().out.splitlines())
    assert line["cache"] == "dual"
    assert line["grid"] == "target"
    assert line["temperature"] == 0.5
    assert line["top_k"] is None


def test_lines_are_in_order_and_none_is_lost_on_the_way_to_an_error():
    def finished():
        yield from [(1, "b"), (0, "a"), (3, "d")]
        raise ValueError("stopped")

    written = []
    with pytest.raises(ValueError, match="stopped"):
        for number_and_line in in_order(finished()):
            written.append(number_and_line)

    assert written == [(0, "a"), (1, "b"), (3, "d")]
    assert list(in_order([(2, "c"), (1, "b"), (0, "a")])) == [(0, "a"), (1, "b"), (2, "c")]
