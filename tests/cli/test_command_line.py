"""Commands end with one line and an exit code. A wrong argument is one before anything heavy is imported.

What is measured are specs, not times: which modules a refused command has imported, its exit code, its lines on stderr.
"""

import copy
import importlib
import json
import os
import subprocess
import sys

import lm_eval.evaluator  # noqa: F401  as in its own command
import pytest
from lm_eval.tasks import TaskManager
from lm_eval.utils import simple_parse_args_string

from lm_eval_duel.arguments import MISSING, TEXT
from lm_eval_duel.cli import main as program
from lm_eval_duel.cli import run
from lm_eval_duel.cli.listing import TABLES
from lm_eval_duel.console import command_line, exits
from lm_eval_duel.console.command_line import PATH, Flag, Parser
from lm_eval_duel.console.exits import Exit, errors_as_exit_codes
from lm_eval_duel.errors import DuelError, UsageError
from lm_eval_duel.harness.lm import DuelMDM
from lm_eval_duel.options import model_args_of, model_of
from lm_eval_duel.tasks import named as tasks_named
from lm_eval_duel.tasks import task_folder

HEAVY = ("torch", "transformers", "datasets")


def refused(*words):
    """The message of a command that is refused in this process; it must be a wrong argument."""
    with pytest.raises(Exit) as ended:
        program.main(list(words))
    assert ended.value.code == exits.WRONG, ended.value
    return str(ended.value)


# ---------------------------------------------------------------- before anything is loaded

TYPOS = [
    (["run", "--model_args", "rule=gredy", "--tasks", "sotu"], "Unknown unmasking rule 'gredy'. Did you mean greedy?"),
    (["run", "--model_args", "blok=4", "--tasks", "sotu"], "Unknown model arg 'blok'. Did you mean block?"),
    (["run", "--model_args", '{"a', "--tasks", "sotu"], "a JSON object"),
    (["run", "--modle", "hf", "--tasks", "sotu"], "unrecognized arguments: --modle hf. Did you mean --model?"),
    (["run", "--model", "duel-mdn", "--tasks", "sotu"], "Unknown --model 'duel-mdn'. Did you mean duel-mdm?"),
    (["run", "--model_args", "rule=greedy"], "No task to run"),
    (["run", "--tasks", "sotu", "--model_args", "batch_size=4"], "--batch_size VALUE"),
    (["run", "--tasks", "sotu", "--include_path", "nosuch"], "'--include_path' is a folder that exists; got 'nosuch'."),
    (["run", "--tasks", "sotu", "--config", "nosuch.yaml"], "--config nosuch.yaml: Config file not found"),
    (["inspect", "demo-mdm", "--model_arg", "blok=4"], "Unknown model arg 'blok'"),  # a beginning that is clear
    (["inspect", "demo-mdm", "--limit", "long"], "'--limit' is a whole number, at least 1; got 'long'."),
    (["score", "a.txt", "--use_cache", "x"], "lm-eval-duel run takes it"),
    (["score", "--files", "a.txt"], "score FILE"),
    (["score", "--tasks", "a.txt"], "lm-eval-duel run takes it"),
    (["report", "--results", "a"], "report RESULTS"),
    (["run", "--tasks", ","], "No task to run"),
    (["score", "a.txt", "--lines", "demo-bd"], "unrecognized arguments: demo-bd. A model is named by --model_args."),
    (["score", "a.txt", "--model_args", "demo-bd", "rule=gredy"], "Did you mean greedy?"),
    (["score", "pretrained=demo-bd"], "--model_args NAME,rule=margin"),
    (["score", "a.txt", "--model_args", "demo-bd", "--compare", "rule=margin block=2"], "rule=margin,block=2"),
    (["inspect", "demo-mdm", "--files", "nosuch.txt"], "nosuch.txt matches no file"),
    (["report", "nosuch", "--out", "o"], "No file or folder nosuch"),
    (["list", "task"], "Unknown value of WHAT 'task'"),
    (["list", "rules", "gredy"], "Did you mean greedy?"),
    (["inspct", "demo-mdm"], "Unknown command 'inspct'. Did you mean inspect?"),
    (["--model_args", "rule=greedy"], "comes after a command: lm-eval-duel run --model_args ..."),
]


EVERY_TYPO = f"""
import contextlib, io, json, sys
from lm_eval_duel.cli.main import main
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            code = main(words)
        except SystemExit as ended:
            code = ended.code
    print(json.dumps([code, said.getvalue(), [name for name in {HEAVY} if name in sys.modules]]))
"""


def test_a_typo_is_answered_before_anything_heavy_is_imported(tmp_path, subtests):
    every = json.dumps([words for words, _ in TYPOS])
    done = subprocess.run(
        [sys.executable, "-c", EVERY_TYPO, every], capture_output=True, text=True, check=True, cwd=tmp_path
    )

    for (words, message), line in zip(TYPOS, done.stdout.splitlines(), strict=True):
        code, on_stderr, heavy = json.loads(line)
        with subtests.test(" ".join(words)):
            assert code == 2
            assert heavy == []
            assert on_stderr.startswith("lm-eval-duel: ")
            assert message in on_stderr
            assert "Traceback" not in on_stderr
            assert len(on_stderr.splitlines()) <= 3
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- what tells a user about the commands


def test_help_says_what_is_printed_with_an_example(capsys):
    for name in program.COMMANDS:
        with pytest.raises(SystemExit) as ended:
            program.main([*name.split(), "--help"])
        out = capsys.readouterr().out
        assert ended.value.code == 0
        assert f"\n  lm-eval-duel {name} " in out, name
        assert "default: hf" not in out


@pytest.mark.slow
@pytest.mark.parametrize("name", program.COMMANDS)
def test_the_example_of_a_help_works_as_it_is_printed(name, tmp_path, capsys):
    with pytest.raises(SystemExit):
        program.main([name, "--help"])
    _, _, from_example = capsys.readouterr().out.partition("example:\n")
    line, *_ = from_example.splitlines()
    environment = os.environ | {"PATH": f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}"}

    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, env=environment)

    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout


def test_what_needs_one_process_runs_in_the_first(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "3")

    monkeypatch.setenv("RANK", "0")
    program.main(["list", "presets"])
    of_first = capsys.readouterr()
    assert "llada" in of_first.out
    assert of_first.err == ""

    monkeypatch.setenv("RANK", "2")
    program.main(["list", "presets"])
    of_third = capsys.readouterr()
    assert of_third.out == ""
    assert of_third.err == "lm-eval-duel: process 2 of 3 has nothing to do: the first does it.\n"


# ---------------------------------------------------------------- how a command ends


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (UsageError("a"), 2, "a"),
        (DuelError("b"), 1, "b"),
        (KeyboardInterrupt(), 130, "stopped."),
        (OSError("no connection\nmore"), 1, "no connection."),
        (RuntimeError("can't allocate memory: 8 bytes\nmore"), 1, "Not enough memory. can't allocate memory: 8 bytes"),
    ],
    ids=str,
)
def test_ends(error, code, message, capsys):
    with pytest.raises(SystemExit) as ended, errors_as_exit_codes():
        raise error

    assert ended.value.code == code
    assert str(ended.value) == f"lm-eval-duel: {message}"
    assert capsys.readouterr().err == f"lm-eval-duel: {message}\n"


def test_an_interrupt_during_the_imports_of_a_command_ends_it_with_one_line():
    code = (
        "import signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a job in the background ignores it
        "class Interrupt:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'lm_eval_duel.console.command_line':\n"
        "            signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "from lm_eval_duel.__main__ import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert done.returncode == 130
    assert done.stderr == "lm-eval-duel: stopped.\n"


@pytest.mark.parametrize(("error", "own"), [(ValueError("a bug"), True), (OSError("of lm_eval"), False)])
def test_what_is_no_error_of_ours_keeps_its_traceback(error, own):
    with pytest.raises(type(error)), errors_as_exit_codes(own):
        raise error


def test_a_reader_that_left_is_no_error():
    code = (
        "import os, sys; sys.stdout = os.fdopen(os.open('/dev/full', os.O_WRONLY), 'w')\n"
        "from lm_eval_duel.console.exits import errors_as_exit_codes\n"
        "with errors_as_exit_codes():\n    raise BrokenPipeError(32, 'Broken pipe')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 141
    assert done.stderr == ""


@pytest.mark.parametrize("encoding", ["cp1252", "ascii", "shift_jis"])
def test_a_console_shows_what_its_encoding_can(encoding):
    """Each character that it lacks is replaced, none ends the command."""
    code = "from lm_eval_duel.console.exits import *; print_on_any_console(); print('≤ 1 ± 2 \\ud83d ア')"
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, check=True)
    shown = {"cp1252": "<= 1 ± 2 ? ?", "ascii": "<= 1 +- 2 ? ?", "shift_jis": "<= 1 ± 2 ? ア"}
    assert done.stdout.decode(encoding).strip() == shown[encoding]


@pytest.mark.parametrize(("command", "shown"), [("/bin/lm_eval", "lm_eval: a\n"), ("my_evaluation.py", "Traceback")])
def test_lm_evals_own_command_prints_one_line(command, shown, monkeypatch, capsys):
    importlib.import_module("lm_eval.evaluator")  # as in lm_eval's command
    monkeypatch.setattr(sys, "argv", [command, "--use_cache", "runs/answers"])
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    with pytest.raises(DuelError):
        DuelMDM(rule="gredy")  # before anything is loaded
    for error, begins in ((DuelError("a"), shown), (KeyError("a"), "Traceback"), (KeyboardInterrupt(), shown[:9])):
        try:
            raise error
        except BaseException:
            sys.excepthook(*sys.exc_info())
        printed = capsys.readouterr().err
        assert printed.startswith(begins)
        is_of_the_run = isinstance(error, KeyboardInterrupt) and "Traceback" not in shown
        assert ("runs/answers_rank" in printed) == is_of_the_run, "where the finished answers are"


# ---------------------------------------------------------------- whatever is named


VALUES = (
    "1",
    "-1",
    "+3",
    "1.5",
    "1e3",
    "inf",
    "True",
    "none",
    "'12'",
    "a",
    "",
    "1_000",
    "++3",
    "½",
    "a b",
    " 5 ",
    "'a",
    "a'",
    "'",
    '"b"',
    "'c\"",
)


MODEL = ("NAME", "model_args", "device", "batch_size")


def test_key_values_are_those_of_lm_eval():
    for value in VALUES:
        text = f"a={value},b=x=y,,c={value}"
        assert repr(command_line.key_values(text)) == repr(simple_parse_args_string(text)), value


@pytest.mark.parametrize(
    "words",
    [
        ["--model_args", "demo-bd,block=8,block=16"],
        ["--model_args", '{"block": 8, "block": 16}'],
        ["--model_args", "block=8", "--model_args", "block=16"],
        ["demo-bd", "--model_args", "pretrained=demo-bd"],
    ],
)
def test_what_is_given_twice_is_an_error_that_names_both_values(words, monkeypatch):
    with pytest.raises(DuelError, match=r"block=8 and block=16|model_args is given twice|pretrained=demo-bd"):
        model_of(Parser("x", "", "", "", *MODEL).parse_args(words))
    with pytest.raises(DuelError, match=r"block=8 and block=16|pretrained=demo-bd"):
        run._named(words)
    words_of_lm_eval = words[1:] if words[0] == "demo-bd" else words
    monkeypatch.setattr(sys, "argv", ["/bin/lm_eval", "run", *words_of_lm_eval, "--tasks", "x=1,x=2"])
    if words[0] != "demo-bd":
        with pytest.raises(DuelError, match="block=8 and block=16"):
            DuelMDM(pretrained="demo-bd", block=16)
    with pytest.raises(DuelError, match="block=8 and block=16"):
        DuelMDM.create_from_arg_string("pretrained=demo-bd,block=8,block=16")


@pytest.mark.parametrize("key", ["batch_size", "max_batch_size", "device"])
def test_a_model_arg_that_is_also_a_flag_of_lm_eval_is_a_usage_error(key):
    values = {"batch_size": 2, "max_batch_size": 2, "device": "cpu"}
    not_given = dict.fromkeys(values)
    flags = {**not_given, key: values[key]}

    with pytest.raises(UsageError, match=f"--{key}"):
        DuelMDM.create_from_arg_string(f"pretrained=demo-bd,{key}={values[key]}", flags)
    with pytest.raises(UsageError, match=f"--{key}"):
        DuelMDM.create_from_arg_obj({"pretrained": "demo-bd", key: values[key]}, flags)
    # in one place alone it is taken
    model = DuelMDM.create_from_arg_obj({"pretrained": "demo-bd", key: values[key]}, not_given)
    assert getattr(model.options, key) == values[key]


@pytest.mark.parametrize("name", ["run", "inspect", "generate", "audit"])
def test_model_args_behind_a_name_are_sent_to_their_flag(name):
    words = [name, "demo-mdm,rule=greedy"]
    if name != "generate":
        words += ["--tasks", "sotu"]

    with pytest.raises(Exit, match="--model_args") as raised:
        program.main(words)

    assert raised.value.code == 2


def test_the_model_is_named_alike_in_every_command():
    expected = {"pretrained": "demo-bd", "block": 4, "rule": "margin"}
    for words in (
        ["demo-bd", "--model_args", "block=4,rule=margin"],
        ["demo-bd", "--model_args", "block=4", "rule=margin"],
        ["--model_args=demo-bd,block=4,rule=margin"],
        ["--model_args", "demo-bd", "block=4", "rule=margin"],
        ["--model_args", "pretrained=demo-bd", '{"block": 4, "rule": "margin"}'],
        ["--model_args", '{"pretrained": "demo-bd", "block": 4}', "rule=margin"],
    ):
        flags = Parser("x", "", "", "", *MODEL).parse_args(words)
        before = copy.deepcopy(vars(flags))
        assert model_of(flags) == {**expected, "device": None, "batch_size": "auto"}
        assert model_args_of(flags) == expected
        assert vars(flags) == before
        (*_, model_args_of_run), _ = run._named(words)
        assert json.loads(model_args_of_run) == expected


def test_words_behind_model_args_that_are_no_model_args_are_what_they_were():
    """A file or a name may follow them, and so may those that another flag takes."""
    own = {"FILE": Flag(PATH, MISSING, "", many=True), "compare": Flag(TEXT, None, "", many=True)}
    parser = Parser("x", "", "", "", "model_args", "metadata", **own)
    given = vars(parser.parse_args(["--model_args", "demo-bd", "block=4", "a.txt", "./b=c.txt"]))
    assert given["model_args"] == {"pretrained": "demo-bd", "block": 4}
    assert given["file"] == ["a.txt", "./b=c.txt"]

    of_models = ["--model_args", "demo-bd", "--compare", "rule=greedy", "k=2"]
    words = ["a.txt", "--metadata", "lines=true", "rows=3", *of_models]
    given = vars(parser.parse_args(words))
    assert given["metadata"] == {"lines": True, "rows": 3}
    assert given["model_args"] == {"pretrained": "demo-bd"}
    assert given["compare"] == ["rule=greedy", "k=2"]


# ---------------------------------------------------------------- run


def arguments(tmp_path, words, config=None):
    """lm-eval's arguments as `run` completes them."""
    from lm_eval._cli import HarnessCLI

    if config is not None:
        (tmp_path / "c.yaml").write_text(json.dumps(config))
        words = ["--config", str(tmp_path / "c.yaml"), *words]
    sys.argv = ["lm-eval", "run", *words]
    args = run._parsed(HarnessCLI())
    run._complete(args)
    return args


def test_what_a_config_file_says_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", [])
    ours = task_folder()
    here = str(tmp_path)
    there = str(tmp_path.parent)
    assert arguments(tmp_path, ["--tasks", "sotu"]).model == "duel-mdm"
    assert arguments(tmp_path, [], {"tasks": "sotu"}).model == "duel-mdm"
    assert arguments(tmp_path, [], {"tasks": "sotu", "model": "hf"}).model == "hf"
    assert arguments(tmp_path, ["-Mhf"], {"tasks": "sotu", "model": "vllm"}).model == "hf"
    for config, words, paths in (
        ({}, [], [ours]),
        ({"include_path": here}, [], [ours, here]),
        ({"include_path": [here, there]}, [], [ours, here, there]),
        ({"include_path": here}, ["--include_path", there], [ours, there]),
    ):
        assert arguments(tmp_path, words, config).include_path == paths


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"modle": "x"}, ["'modle'", "Did you mean model?"]),
        ({"tasks": 5}, ["'tasks'"]),
        ({"tasks": "sotu", "model_args": {"rule": "gredy"}}, ["Did you mean greedy?"]),
        ([1], ["mapping"]),
    ],
    ids=str,
)
def test_a_wrong_config_file_is_named(config, named, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", [])
    (tmp_path / "c.yaml").write_text(json.dumps(config))
    message = refused("run", "--config", str(tmp_path / "c.yaml"))
    for words in named:
        assert words in message


def test_task_files_of_lm_eval_are_read_only_if_they_may_be_named(tmp_path):
    files = {
        "mine": {"task": "mine", "tag": "tagged"},
        "members": {"group": "members", "task": ["mine", {"task": "sotu", "num_fewshot": 0}, "duel_zero_shot"]},
        "nested": {"group": "nested", "task": [{"group": "members"}, "tagged"]},
        "theirs": {"group": "theirs", "task": ["mine", {"group": "inline", "task": ["wikitext"]}]},
        "outside": {"group": "outside", "task": ["nested", "wikitext"]},
    }
    for name, config in files.items():
        (tmp_path / f"{name}.yaml").write_text(json.dumps(config))
    ours = [task_folder()]
    both = [*ours, str(tmp_path)]
    before = TaskManager.__init__

    for names, folders in ((["sotu", "duel_zero_shot"], ours), (["sotu", "mine", "tagged", "members", "nested"], both)):
        with run._task_files(names, folders):
            assert not TaskManager().all_tasks
            assert set(names) <= set(TaskManager(include_path=folders).all_tasks)
        assert TaskManager.__init__ is before
        assert "wikitext" not in tasks_named.task_manager(names, None, *folders[1:]).all_tasks

    elsewhere = [["sotu", "wikitext"], ["sotu*"], ["theirs"], ["outside"], [str(tmp_path / "mine.yaml")]]
    for names in elsewhere:
        with run._task_files(names, both):
            assert TaskManager.__init__ is before, names


def test_list_alone_prints_what_there_is_to_list(capsys):
    program.main(["list"])
    names = {line.split()[0] for line in capsys.readouterr().out.splitlines()}
    assert set(TABLES) <= names


def test_a_reader_that_stops_reading_is_no_error():
    """As `lm-eval-duel list args | head -1`."""
    script = "import sys; from lm_eval_duel.cli.main import main; main(['list', 'args'])"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""


def test_run_takes_the_flags_of_texts_as_metadata(monkeypatch):
    """--lines and --field, as in `score`; they join the metadata that the command gives, too."""
    from lm_eval._cli import HarnessCLI

    words, of_texts = run._named(["--tasks", "a.jsonl", "--metadata", "rows=3", "--lines", "--field", "body"])
    assert of_texts == {"lines": True, "field": "body"}
    monkeypatch.setattr(sys, "argv", ["lm-eval", "run", *words])
    args = run._parsed(HarnessCLI())
    assert args.metadata == {"rows": 3, "lines": True, "field": "body"}
