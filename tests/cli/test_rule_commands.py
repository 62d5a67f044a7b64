"""`presets` and `frequencies`: what they print and write, and what they refuse."""

import json

import pytest

from lm_eval_duel import denoisers
from lm_eval_duel.cli.main import main
from lm_eval_duel.rules.pc import TOTAL, read_table
from lm_eval_duel.rules.presets import ENTRIES


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
