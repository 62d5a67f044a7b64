"""Everything that commands print and write, as files in golden/: `score`, `generate`, `inspect` and its times.

The network has exact weights and runs in float64, so the numbers are the same on every machine.
LM_EVAL_DUEL_RECORD=1 writes the files anew: read what has changed.
"""

import json
import re
from pathlib import Path

import exact
import golden
import pytest

from lm_eval_duel.cli import timing
from lm_eval_duel.cli.main import main

pytestmark = pytest.mark.usefixtures("one_load")
GOLDEN = Path(__file__).parent / "golden"
UNKNOWN = "\u043c\u0438\u0440"
LINES = ["a b c d e", "", "the of and a b c d e f g h i j k l m", "a", f"q {UNKNOWN} r", "z", "a", "x y z"]
MORE = [f"{letter} b {letter} the of" for letter in "cdefghijkl"]
METHODS = {  # of models that score the same texts, the first without a word on the command line
    "exact": "rule=greedy,block=4",
    "drawn": "estimator=elbo,mc_samples=16",
    "few_draws": "estimator=elbo,mc_samples=4",
    "sampled": "estimator=two_phase,block=2,sample=0.7",
    "oracle": "estimator=oracle,block=2",
    "compared": "rule=greedy,block=4 --compare rule=margin estimator=elbo,mc_samples=16 rule=greedy,block=4",
    "documents": "rule=greedy,block=4 --documents --compare block=2",
}
CHANGING = re.compile(r"/\S*/|(?<![.\w])[0-9a-f]{12}(?![.\w])")  # folders, and fingerprints
VOLATILE = (  # what another run or machine changes
    "seconds",
    "tokens_per_second",
    "peak_memory_bytes",
    "peak_memory",
    "versions",
    "weights",
    "fingerprint",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("networks") / "exact"
    place.mkdir()
    return exact.language_model(place, "bert", 12)


@pytest.fixture(autouse=True)
def texts(tmp_path, monkeypatch):
    """Files in the folder where commands run: lines, one of them empty and two equal, and one text."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "few.txt").write_text("\n".join(LINES))
    (tmp_path / "many.txt").write_text("\n".join([*LINES, *MORE]))
    (tmp_path / "copies.txt").write_text("\n".join([*MORE[:9], MORE[0]]))
    (tmp_path / "alone.md").write_text("a b c\nd e\n")


def check(name, *parts):
    golden.check(GOLDEN / name, CHANGING.sub("...", "\n".join(parts)), within=1e-6)


@pytest.mark.parametrize("name", METHODS)
def test_score(folder, tmp_path, capsys, name):
    method, *more = METHODS[name].split(" ")
    model = ["--model_args", f"pretrained={folder},dtype=float64,{method}", *more, "--device", "cpu"]
    file = "many.txt" if more else "few.txt"
    main(["score", file, "--lines", *model, "--json", "out.json", "--csv", "out.csv"])

    printed = capsys.readouterr().out
    table = (tmp_path / "out.csv").read_text()
    content = golden.without(json.loads((tmp_path / "out.json").read_text()), VOLATILE)
    for other in content.get("compared", []):
        del other["documents"]  # as in the CSV file
    check(f"score_{name}.txt", printed, table, json.dumps(content, indent=1))


def test_copies_of_a_text_are_one_document_for_a_verdict(folder, capsys):
    model = ["--model_args", f"pretrained={folder},dtype=float64,rule=greedy,block=4", "--compare", "block=2"]
    main(["score", "copies.txt", "--lines", *model, "--device", "cpu"])
    main(["score", "many.txt", "--lines", "--limit", "11", *model, "--device", "cpu"])
    check("score_copies.txt", capsys.readouterr().out)


def test_one_document_and_a_limit(folder, capsys):
    model = ["--model_args", f"pretrained={folder},dtype=float64,rule=greedy,block=4", "--device", "cpu"]
    main(["score", "alone.md", *model])
    main(["score", "alone.md", "few.txt", "--limit", "3", "--lines", *model])
    check("score_one.txt", capsys.readouterr().out)


def test_generate(folder, capsys):
    model = ["--model_args", f"pretrained={folder},dtype=float64,rule=greedy,block=4", "--device", "cpu"]
    main(["generate", *model, "--prompt", "a b", "z", "--num", "2", "--max_new_tokens", "6", "--seed", "3"])
    main(["generate", *model, "--prompt", "a", "--temperature", "0", "--max_new_tokens", "3", "--suffix", " b c"])
    warped = ["--temperature", "0.5", "--top_k", "2"]
    main(["generate", *model, "--num", "1", *warped, "--max_new_tokens", "8", "--until", "f"])

    lines = []
    for line in capsys.readouterr().out.splitlines():
        lines.append(json.dumps(golden.without(json.loads(line), VOLATILE)))
    check("generate.txt", *lines)


def test_inspect(folder, capsys, monkeypatch):
    """The times are one second for the timed windows, whichever they are."""
    monkeypatch.setattr(timing, "_seconds", lambda estimator, windows: 1.0)
    monkeypatch.setattr(timing, "peak_memory", lambda device: 3 * 2**20 + 2**19)
    words = ["inspect", folder, "--files", "many.txt", "--lines", "--device", "cpu"]
    models = ["rule=greedy,block=4,max_batch_size=2", "rule=threshold:mu=0.5,block=none,bos=none"]
    for model in [*models, "estimator=elbo,mc_samples=16"]:
        arguments = [*words, "--model_args", f"dtype=float64,{model}"]
        main(arguments)
        main([*arguments, "--limit", "2", "--json"])
    printed = re.sub(r", [0-9.e-]+ s\b", ", ... s", capsys.readouterr().out)
    check("inspect.txt", printed)
