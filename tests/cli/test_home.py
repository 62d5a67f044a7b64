"""`~` is the home folder in every path, also where a shell leaves it as it is: behind a comma or an equals sign."""

import json

import pytest

from lm_eval_duel.arguments import CHECKPOINT, OPTIONAL_PATH, declared
from lm_eval_duel.cli import generate, inspect, run, score
from lm_eval_duel.console import command_line
from lm_eval_duel.console.command_line import FLAGS
from lm_eval_duel.options import MODEL_ARGUMENTS, Options
from lm_eval_duel.tasks import files
from lm_eval_duel.tasks.metadata import TaskMetadata


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A home folder with a text, in which no command runs."""
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "a.txt").write_text("a\n")
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.chdir(tmp_path)
    return folder


def test_every_type_of_a_path_knows_it(home):
    for kind in (command_line.PATH, command_line.MODEL_NAME, command_line.FILE, CHECKPOINT, OPTIONAL_PATH):
        assert kind("x", "~/new") == f"{home}/new"
    for kind in (command_line.EXISTING, command_line.FOLDER):
        assert kind("x", "~") == str(home)
    assert command_line.NAMES("x", "sotu,~/a.txt") == ["sotu", f"{home}/a.txt"]
    for kind in (command_line.FILE, command_line.PATH):
        assert kind("x", "a~b") == "a~b"


def test_model_args_and_metadata(home):
    names = [name for name, arg in MODEL_ARGUMENTS.items() if arg.kind in (CHECKPOINT, OPTIONAL_PATH)]
    assert {"pretrained", "tokenizer", "peft", "trace"} <= {*names}
    for name in names:
        assert getattr(Options.parse({name: "~/x"}), name) == f"{home}/x", name
    assert Options.parse({"trace": "none"}).trace is None
    assert TaskMetadata(data_dir="~/x").data_dir == f"{home}/x"
    assert declared(TaskMetadata)["data_dir"].kind is OPTIONAL_PATH


def test_files_of_texts(home):
    for pattern in ("~/a.txt", "~/*.txt", "~"):
        assert files.find([pattern]) == [home / "a.txt"]
        assert [text.text for text in files.texts([pattern])] == ["a"]


def test_commands(home):
    options = score.parse(["~/a.txt", "--model_args", "demo-bd,trace=~/t.jsonl", "--json=~/o.json", "--csv=~/o.csv"])
    assert options.file == [f"{home}/a.txt"]
    assert options.models[0].args["pretrained"] == "demo-bd"
    assert options.json == f"{home}/o.json"
    assert options.csv == f"{home}/o.csv"
    assert generate.parse(["--prompts=~/a.txt", "--out=~/o.jsonl"]).out == f"{home}/o.jsonl"
    assert inspect.parse(["~/net", "--files=~/a.txt"]).model["pretrained"] == f"{home}/net"
    assert FLAGS["ar"].read("--ar", "~/results") == f"{home}/results"


def test_run(home, monkeypatch):
    from lm_eval._cli import HarnessCLI

    given = {}
    monkeypatch.setattr(HarnessCLI, "execute", lambda self, args: given.update(vars(args)))
    words = ["~/net", "--tasks", "sotu,~/a.txt", "--output_path=~/out", "--use_cache=~/cache"]

    run.main(words)

    assert given["output_path"] == f"{home}/out"
    assert given["use_cache"] == f"{home}/cache"
    assert given["metadata"]["files"] == [f"{home}/a.txt"]
    assert f"{home}/net" in json.dumps(given["model_args"])
