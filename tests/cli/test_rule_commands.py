"""`presets` and `frequencies`: what they print and write, and what they refuse."""

import json
from types import SimpleNamespace

import pytest

from lm_eval_duel import denoisers
from lm_eval_duel.cli import frequencies
from lm_eval_duel.cli.main import main
from lm_eval_duel.errors import DuelError, UsageError
from lm_eval_duel.rules.pc import COUNTS, TOTAL, read_table
from lm_eval_duel.rules.presets import ENTRIES
from lm_eval_duel.tasks import named


def test_presets_prints_the_table(capsys):
    main(["presets"])
    printed = " ".join(capsys.readouterr().out.split())
    assert all(preset.name in printed and preset.written_out in printed for preset in ENTRIES)
    main(["presets", "llada2", "llada"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "From ML-GSAI/LLaDA@b7e6c35 generate.py L44-121 (steps may be changed)" in printed
    assert "dparallel" not in printed
    with pytest.raises(SystemExit, match="Did you mean llada2"):
        main(["presets", "lada2"])


def test_frequencies_counts_the_tokens_of_a_file(tmp_path, capsys):
    (tmp_path / "one.txt").write_text("We the people of the United States")
    (tmp_path / "two.jsonl").write_text('{"text": "We the people"}\n\n{"text": " of the United States"}\n')
    ids = denoisers.load_tokenizer({"tokenizer": "demo-mdm"})("We the people of the United States")["input_ids"]
    for name in ("one.txt", "two.jsonl"):
        out = tmp_path / f"{name}.json"
        main(["tools", "frequencies", "--tokenizer", "demo-mdm", "--tasks", str(tmp_path / name), "--out", str(out)])
        total, counts = read_table(str(out))
        assert total == sum(counts.values()) == json.loads(out.read_text())[TOTAL]
        assert counts == {token: ids.count(token) for token in counts} or name == "two.jsonl"
    assert "written to" in capsys.readouterr().out


@pytest.mark.slow
def test_frequencies_counts_the_tokens_of_a_task():
    texts = [request.args[-1] for request in named.requests(["sotu"], {})]
    assert len(texts) == 36 and all(texts)
    tokenizer = denoisers.load_tokenizer({"tokenizer": "demo-mdm"})
    table = frequencies.count_tokens(texts, tokenizer)
    assert table[TOTAL] == 4053 and sum(table[COUNTS].values()) == 4053
    with pytest.raises(DuelError, match="nowhere"):
        named.requests(["nowhere"], {})


def test_what_frequencies_refuses(tmp_path, monkeypatch):
    (tmp_path / "bad.jsonl").write_text('{"words": "a"}\n')
    out = ["--tokenizer", "demo-mdm", "--out", str(tmp_path / "out.json")]
    with pytest.raises(DuelError, match=r"bad\.jsonl:1: Unknown column 'text'. Known: words"):
        frequencies.main([*out, "--tasks", str(tmp_path / "bad.jsonl")])
    with pytest.raises(DuelError, match="has no tokens"):
        frequencies.count_tokens([], denoisers.load_tokenizer({"tokenizer": "demo-mdm"}))
    for arguments, message in (
        (["--tasks", "nowhere.txt", "--out", str(tmp_path / "x")], "nowhere.txt matches no file"),
        (["--out", str(tmp_path / "x")], "--tasks"),
        (["--tasks", "sotu", "--out", str(tmp_path)], "'--out' is a file"),
    ):
        with pytest.raises(UsageError, match=message):
            frequencies.main(["--tokenizer", "demo-mdm", *arguments])
    monkeypatch.setattr(
        named,
        "load_all",
        lambda *_: [SimpleNamespace(OUTPUT_TYPE="generate_until", config=SimpleNamespace(task="gsm8k"))],
    )
    with pytest.raises(DuelError, match="The task gsm8k generates text"):
        named.requests(["gsm8k"], {})
