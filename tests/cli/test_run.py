"""`lm-eval-duel run`: what of its command line reaches lm-eval and the checks of model args, in this process."""

import contextlib
import json
import os
import sys
from types import SimpleNamespace

import pytest

from lm_eval_duel.cli import audit, inspect, run, score
from lm_eval_duel.console import command_line
from lm_eval_duel.errors import UsageError
from lm_eval_duel.options import Options

QUIET = {"LMEVAL_LOG_LEVEL": "WARNING", "TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


@pytest.fixture
def checked(monkeypatch):
    """The model args that are checked."""
    asked = []

    def parse(given):
        asked.append(dict(given))

    monkeypatch.setattr(Options, "parse", parse)
    return asked


NAMED = [  # words, what lm-eval gets of them, and whether the model args are checked
    (["demo-bd", "--tasks", "t"], ["--model_args", {"pretrained": "demo-bd"}, "--tasks", "t"], True),
    (["--tasks", "t"], ["--tasks", "t"], False),
    (["-M", "hf", "-a", "blok=4"], ["--model", "hf", "--model_args", {"blok": 4}], False),
    (["-a", "block=0", "--model", "duel-mdm"], ["--model", "duel-mdm", "--model_args", {"block": 0}], True),
    (["demo-bd", "-a", "block=4", "k=2"], ["--model_args", {"pretrained": "demo-bd", "block": 4, "k": 2}], True),
    (["--model_args", "x,k=1", "--limit", "0"], ["--model_args", {"pretrained": "x", "k": 1}, "--limit", "0"], True),
]


@pytest.mark.parametrize(("words", "passed", "is_checked"), NAMED)
def test_what_lm_eval_gets(words, passed, is_checked, checked):
    """Model args of another model than ours are not ours to check."""
    given = []
    for word in run._named(words)[0]:
        given.append(json.loads(word) if word.startswith("{") else word)

    assert given == passed
    model_args = [word for word in passed if isinstance(word, dict)]
    assert checked == (model_args if is_checked else [])


@pytest.fixture
def as_before(monkeypatch):
    """Values of the variables that --quiet sets."""
    values = dict.fromkeys(QUIET, "as before")
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    return values


@pytest.mark.parametrize("words", [["--quiet", "--tasks", "t"], ["demo-bd", "--quiet"], ["--tasks", "t"]])
def test_quiet_is_ours(words, checked, as_before):
    assert "--quiet" not in run._named(words)[0]

    expected = QUIET if "--quiet" in words else as_before
    assert expected.items() <= os.environ.items()


def test_quiet_is_that_of_every_command(as_before):
    command_line.Parser("x", "", "", "").parse_args([])
    assert as_before.items() <= os.environ.items()

    command_line.Parser("x", "", "", "").parse_args(["--quiet"])
    assert QUIET.items() <= os.environ.items()


def parsed(words, config=None, folder=None):
    """lm-eval's arguments as `run` completes them, and the tasks that it checks."""
    from lm_eval._cli import HarnessCLI

    if config is not None:
        (folder / "c.yaml").write_text(json.dumps(config))
        words = ["--config", str(folder / "c.yaml"), *words]
    sys.argv = ["lm-eval", "run", *words]
    args = run._parsed(HarnessCLI())
    run.register()
    run._complete(args)
    return args, run._check(args)


FLAGS = {  # flags of lm-eval that are model args, and how they are checked
    "--batch_size 7": {"batch_size": "7"},
    "--max_batch_size 3": {"max_batch_size": 3},
    "--device cpu": {"device": "cpu"},
    "--trust_remote_code": {"trust_remote_code": True},
    "--limit 2": {},
    "--model hf --batch_size 7": None,
}


@pytest.mark.parametrize("flags", FLAGS)
def test_flags_that_are_model_args_are_checked_with_them(flags, checked, monkeypatch):
    monkeypatch.setattr(sys, "argv", [])

    _, names = parsed(["--tasks", "sotu,t2", "--model_args", "block=4", *flags.split()])

    assert names == ["sotu", "t2"]
    if FLAGS[flags] is None:  # another model
        assert checked == []
        return
    [given] = checked
    for key, value in {"block": 4, **FLAGS[flags]}.items():
        assert str(given[key]) == str(value)
    assert ("trust_remote_code" in given) == ("trust" in flags)


def test_files_of_text_become_one_task_beside_the_others(tmp_path):
    texts = []
    for name in ("one.txt", "two.txt"):
        (tmp_path / name).write_text("a b\n")
        texts.append(str(tmp_path / name))
    args = SimpleNamespace(tasks=f"sotu,{texts[0]},ptb,{texts[1]}", metadata={"length": 8})
    run._take_texts(args)
    assert args.tasks == "sotu,ptb,duel_text"
    assert args.metadata == {"length": 8, "files": texts}

    args = SimpleNamespace(tasks="sotu,ptb", metadata=None)
    run._take_texts(args)
    assert args.tasks == "sotu,ptb"
    assert args.metadata is None

    with pytest.raises(UsageError, match="--metadata"):
        run._take_texts(SimpleNamespace(tasks=texts[0], metadata={"files": []}))


@pytest.mark.parametrize(
    ("key", "value", "takes"),
    [
        ("model", 3, "a string"),
        ("tasks", ["sotu", 3], "a string or a list of strings"),
        ("include_path", 3, "a string or a list of strings"),
        ("model_args", ["a"], "a mapping"),
        ("metadata", 3, "a mapping"),
        ("gen_kwargs", [], "a mapping"),
    ],
)
def test_values_of_a_config_file_have_their_types(key, value, takes, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(json.dumps({key: value}))
    with pytest.raises(UsageError, match=f"'{key}' must be {takes}"):
        run._load_config(str(file))

    empty_of_its_type = {"model": "", "tasks": [], "include_path": []}.get(key, {})
    for empty in (None, empty_of_its_type):
        file.write_text(json.dumps({key: empty}))
        assert run._load_config(str(file))[key] == empty


@pytest.mark.parametrize("cache", [[], ["--use_cache", "runs/answers"]])
def test_ctrl_c_after_the_scoring_ends_with_one_line_that_names_the_answers(cache, monkeypatch, capsys):
    from lm_eval._cli import HarnessCLI

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(HarnessCLI, "execute", interrupted)
    monkeypatch.setattr(sys, "argv", sys.argv)  # `run` replaces it
    with pytest.raises(SystemExit) as end:
        run.main(["demo-mdm", "--tasks", "sotu", *cache])
    assert end.value.code == 130
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert ("runs/answers_rank" in printed) == bool(cache)


READS_THE_NUMBER_OF_LANES = """
import dataclasses

from lm_eval_duel.rules import Decision, Rule


@dataclasses.dataclass(frozen=True)
class Company(Rule):
    def __call__(self, predictions, lanes):
        masked = lanes.masked if len(lanes) > 2 else lanes.masked.flip(1)
        first = masked & (masked.cumsum(1) == 1)
        return Decision(first if len(lanes) > 2 else first.flip(1))
"""


@pytest.mark.parametrize("command", ["run", "score", "compare"])
def test_windows_that_differ_under_verify_end_in_exit_code_1_with_results(command, tmp_path, monkeypatch, capsys):
    (tmp_path / f"company_of_{command}.py").write_text(READS_THE_NUMBER_OF_LANES)
    texts = tmp_path / "texts.txt"
    texts.write_text("We the people of the United States, in order to form a more perfect union.")
    monkeypatch.setattr(sys, "argv", sys.argv)  # `run` replaces it
    odd = f"rule={tmp_path}/company_of_{command}.py:Company,verify=1"
    args = ["--model_args", f"demo-bd,{odd}", "--device", "cpu"]
    if command == "compare":  # the other model of `score`
        args = ["--model_args", "demo-bd,rule=greedy", "--compare", odd, "--device", "cpu"]

    with pytest.raises(SystemExit) as stopped:
        if command == "run":
            run.main([*args, "--tasks", str(texts), "--output_path", str(tmp_path / "out")])
        else:
            score.main([str(texts), *args, "--json", str(tmp_path / "out.json")])

    assert stopped.value.code == 1
    printed = capsys.readouterr()
    if command != "run":  # lm-eval's table is followed by ours in a process of its own
        assert "1 of 1 windows differ" in printed.out
    assert "1 of 1 windows differ" in printed.err.splitlines()[-1]
    assert list(tmp_path.rglob("results_*.json" if command == "run" else "out.json"))


# ---------------------------------------------------------------- files of text

ABOUT_TEXTS = (["--lines"], ["--field", "body"], ["--lines", "--field", "body"])


@pytest.mark.parametrize("flags", ABOUT_TEXTS, ids=" ".join)
@pytest.mark.parametrize("tasks", ["sotu", "duel_infill", "wikitext", "sotu,wikitext"])
def test_flags_of_texts_without_a_text_are_refused(flags, tasks, monkeypatch):
    monkeypatch.setattr(run, "_execute", lambda cli, args: pytest.fail("the command runs"))
    for command in (run.main, audit.parse, inspect.parse):
        with pytest.raises(UsageError, match=flags[0]):
            command(["demo-mdm", "--tasks", tasks, *flags])


def test_flags_of_texts_are_taken_with_a_text_or_a_task_that_may_read_one(tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(run, "_execute", lambda cli, args: ran.append(args.metadata))
    monkeypatch.setattr(run, "_task_files", lambda names, folders: contextlib.nullcontext())
    text = tmp_path / "notes.txt"
    text.write_text("a b\n")
    own = tmp_path / "own.yaml"
    own.write_text("task: own\n")
    of_user = f"own --include_path {tmp_path}"
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "of_tasks"  # without a slash it stands for the task files in it
    folder.mkdir()
    (folder / "own.yaml").write_text("task: own\n")
    of_files = (f"sotu,{text}", f"{tmp_path}", f"{own}", "of_tasks")
    for tasks in (*of_files, "duel_text", "duel_text_wrapped", "duel_*", of_user):
        words = ["demo-mdm", "--lines", "--tasks", *tasks.split()]
        run.main(words)
        assert ran.pop()["lines"] is True
        for command in (audit.parse, inspect.parse):
            assert command(words).metadata["lines"] is True
    inspect.parse(["demo-mdm", "--tasks", "sotu", "--files", str(text), "--lines"])
