"""What is printed about the bundled results, to the last digit: five runs of the commands, as files in golden/.

LM_EVAL_DUEL_RECORD=1 writes the files anew.
"""

import json
import os
import re
from pathlib import Path

import pytest

from lm_eval_duel import demo
from lm_eval_duel.cli.main import main
from lm_eval_duel.results import figures
from lm_eval_duel.sweep import tables as sweep

GOLDEN = Path(__file__).parent / "golden"
RESULTS = demo.FOLDER / "results"
TRACES = [str(path) for path in sorted((RESULTS / "traces").glob("*.jsonl"))]
RUNS = {
    "report": ["report", RESULTS, "--trace", *TRACES],
    "words": ["report", RESULTS / "demo-mdm", RESULTS / "demo-ar", "--pairs", "all", "--metric", "word_perplexity"],
    "bits": ["report", RESULTS / "demo-bd", "--pairs", "none", "--metric", "bits_per_byte"],
    "leaderboard": ["leaderboard", RESULTS, "--trace", *TRACES, "--published", "paper"],
}
DATE = re.compile(r"\d{4}-\d\d-\d\dT\S+|[Bb]elow .*|wrote to .*")


def check(name, text):
    file = GOLDEN / name
    text = DATE.sub("...", text.replace(str(RESULTS), "RESULTS"))
    if os.environ.get("LM_EVAL_DUEL_RECORD"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8"), name


@pytest.mark.parametrize("name", RUNS)
def test_what_is_printed_and_written(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(figures, "available", lambda: False)
    main([*map(str, RUNS[name]), "--out", str(tmp_path / "out")])
    check(f"{name}.txt", capsys.readouterr().out)
    for file in sorted((tmp_path / "out").iterdir()):
        if file.suffix in (".md", ".tex", ".csv"):
            check(f"{name}_{file.name}", file.read_text(encoding="utf-8"))


def test_the_tables_of_the_bundled_sweep():
    report = json.loads((demo.FOLDER / "sweep" / "sweep.json").read_text())
    check("sweep.md", sweep.markdown(report))
