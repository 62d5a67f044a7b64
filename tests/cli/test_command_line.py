"""Commands end with one line and an exit code: 2 for a wrong argument, before anything heavy is imported; 1 otherwise.

What is measured are specs, not times: which modules a refused command has imported, its exit code, its lines on stderr.
"""

import contextlib
import dataclasses
import errno
import json
import re
import subprocess
import sys
import traceback

import pytest
from harness_requests import IS_0_5
from lm_eval.tasks import TaskManager
from lm_eval.utils import simple_parse_args_string

from lm_eval_duel import command_line
from lm_eval_duel.bench.options import parse as parse_bench
from lm_eval_duel.cli import main as program
from lm_eval_duel.cli import run
from lm_eval_duel.command_line import FLAGS, Exit, Parser, ends
from lm_eval_duel.errors import DuelError, UsageError, unchained, usage
from lm_eval_duel.harness import trace
from lm_eval_duel.harness.lm import DuelMDM
from lm_eval_duel.options import Options, model_of
from lm_eval_duel.tasks import named as tasks_named

HEAVY = ("torch", "transformers", "datasets")
WATCHED = (
    "import atexit, sys\n"
    f"atexit.register(lambda: print('HEAVY', [name for name in {HEAVY} if name in sys.modules]))\n"
    "from lm_eval_duel.__main__ import main\n"
    "main()\n"
)


def command(*words, cwd=None):
    """A command in a process of its own; stdout ends with what it has imported."""
    return subprocess.run(
        [sys.executable, "-c", WATCHED, *words], capture_output=True, text=True, check=False, cwd=cwd, timeout=300
    )


def refused(*words):
    """The message of a command that is refused in this process; it must be a wrong argument."""
    with pytest.raises(Exit) as ended:
        program.main(list(words))
    assert ended.value.code == command_line.WRONG, ended.value
    return str(ended.value)


# ---------------------------------------------------------------- before anything is loaded

TYPOS = [
    (["run", "--model_args", "rule=gredy", "--tasks", "sotu"], "Unknown unmasking rule 'gredy'. Did you mean greedy?"),
    (["run", "--model_args", "blok=4", "--tasks", "sotu"], "Unknown model arg 'blok'. Did you mean block?"),
    (["run", "--model_args", "rule=gredy", "--tasks", "sotu", "--trust_remote_code"], "Did you mean greedy?"),
    (["run", "--model_args", '{"a', "--tasks", "sotu"], "a JSON object"),
    (["run", "--modle", "hf", "--tasks", "sotu"], "unrecognized arguments: --modle hf. Did you mean --model?"),
    (["run", "--model", "duel-mdn", "--tasks", "sotu"], "Unknown --model 'duel-mdn'. Did you mean duel-mdm?"),
    (["run", "--model_args", "rule=greedy"], "No task to run"),
    (["run", "--tasks", "sotu", "--batch_size", "many"], "'batch_size' is a number of rows"),
    (["run", "--tasks", "sotu", "--model_args", "batch_size=4"], "--batch_size VALUE"),
    (["run", "--tasks", "sotu", "--include_path", "nosuch"], "--include_path nosuch: there is no such folder."),
    (["run", "--tasks", "sotu", "--config", "nosuch.yaml"], "--config nosuch.yaml: Config file not found"),
    (["run", "--tasks", "sotu", "--seed", "x"], "argument --seed: invalid value: 'x'"),
    (["inspect", "demo-mdm", "--model_args", "blok=4"], "Unknown model arg 'blok'. Did you mean block?"),
    (["inspect", "demo-mdm", "--model_arg", "blok=4"], "Unknown model arg 'blok'"),  # a beginning that is clear
    (["bench", "--model_args", "rule=gredy"], "Did you mean greedy?"),
    (["bench", "--batch_sise", "3"], "Unknown argument '--batch_sise'. Did you mean --batch_size?"),
    (["bench", "--length", "long"], "'--length' is a whole number, at least 1; got 'long'."),
    (["tools", "data", "check", "duel_ptp"], "Unknown benchmark task 'duel_ptp'. Did you mean duel_ptb?"),
    (["show", "nosuch.jsonl"], "There is no trace nosuch.jsonl"),
    (["report", "nosuch", "--out", "o"], "No file or folder nosuch"),
    (["sweep", "--tasks", "sotu", "--out", "o", "--rules", "gredy"], "Did you mean greedy?"),
    (["sweep", "--tasks", "sotu", "--out", "o", "--rules", "greedy", "--model_args", "blok=4"], "Did you mean block?"),
    (["tools", "where", "task"], "Unknown value of WHAT 'task'"),
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
        code, said, heavy = json.loads(line)
        with subtests.test(" ".join(words)):
            assert (code, heavy) == (2, []) and message in said and said.startswith("lm-eval-duel: ")
            assert len(said.splitlines()) <= 3 and "Traceback" not in said
    assert not list(tmp_path.iterdir())


def test_what_fails_while_a_command_works_is_one_line_and_code_1(tmp_path, capsys):
    with pytest.raises(Exit) as ended:
        program.main(["inspect", str(tmp_path)])
    said = capsys.readouterr().err
    assert ended.value.code == 1 and len(said.splitlines()) == 1
    assert said.startswith(f"lm-eval-duel: {tmp_path} has no config.json")


@pytest.mark.slow
def test_a_task_that_there_is_not():
    done = command("run", "--tasks", "sotuu")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("lm-eval-duel: Tasks not found: sotuu. Did you mean sotu? All: ")


# ---------------------------------------------------------------- what tells a user about the commands


def test_the_version_is_told_without_an_import():
    done = command("--version")
    assert done.returncode == 0 and done.stdout.endswith("HEAVY []\n")
    assert re.match(
        r"lm-eval-duel \d[\w.]* \(lm_eval \d[\w.]*, torch \d\S*, transformers \d[\w.]*, Python 3", done.stdout
    )


def test_the_bare_command_lists_all_commands(capsys):
    for words in ([], ["--help"], ["-h"]):
        with contextlib.suppress(SystemExit):
            program.main(words)
        out = capsys.readouterr().out
        for name in program.COMMANDS:
            assert len(re.findall(rf"^  {name} +\w.*$", out, re.MULTILINE)) == 1, name


def test_help_says_what_is_printed_with_an_example(capsys):
    for name in program.COMMANDS:
        with pytest.raises(SystemExit) as ended:
            program.main([*name.split(), "--help"])
        out = capsys.readouterr().out
        assert ended.value.code == 0
        assert "Prints " in out and f"example:\n  lm-eval-duel {name} " in out, name
        if name != "run":  # lm-eval's own
            assert not re.findall(r"--[a-z]+-[a-z-]+", out.replace("lm-eval-duel", "")), name


def test_what_needs_one_process_runs_in_the_first(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "3")
    printed = []
    for rank in ("0", "2"):
        monkeypatch.setenv("RANK", rank)
        program.main(["presets"])
        printed.append(capsys.readouterr())
    assert "llada" in printed[0].out and not printed[0].err
    assert printed[1].out == ""
    assert printed[1].err == "lm-eval-duel: process 2 of 3 has nothing to do: the first does it.\n"


def test_hyphens_are_read_as_underscores():
    one, other = (
        vars(parse_bench(words)) for words in (["--batch-size=3", "--no-memory"], ["--batch_size=3", "--no_memory"])
    )
    assert one | {"words": 0} == other | {"words": 0} and (one["batch_size"], one["no_memory"]) == ("3", True)


def test_a_flag_of_several_commands_has_one_declaration(monkeypatch):
    """The same values and help, whatever its default and whether it must be given."""
    declared = {}

    def collected(self, *args):
        for name, flag in self.flags.items():
            declared.setdefault(name, {})[self.command] = flag
        raise UsageError("read")

    monkeypatch.setattr(Parser, "parse_known_args", collected)
    for name in program.COMMANDS:
        if name != "run":
            with pytest.raises(SystemExit):
                program.main([*name.split()])
    assert {len(commands) > 1 for commands in declared.values()} == {True, False}
    own = {
        "out": {"tools frequencies"},
        "tasks": {"paper"},
    }
    for name, commands in declared.items():
        if len(commands) > 1:
            for command in commands.keys() - own.get(name, set()):
                changed = dataclasses.replace(commands[command], default=0, unset="")
                assert changed == dataclasses.replace(FLAGS[name], default=0, unset=""), (name, command)


# ---------------------------------------------------------------- how a command ends


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (UsageError("a"), 2, "a"),
        (DuelError("b"), 1, "b"),
        (KeyboardInterrupt(), 130, "stopped."),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), 1, "/x: Permission denied."),
        (OSError("no connection\nmore"), 1, "no connection."),
        (MemoryError(), 1, "Not enough memory."),
        (RuntimeError("can't allocate memory: 8 bytes\nmore"), 1, "Not enough memory. can't allocate memory: 8 bytes"),
    ],
    ids=str,
)
def test_ends(error, code, message, capsys):
    with pytest.raises(SystemExit) as ended, ends():
        raise error
    assert ended.value.code == code and str(ended.value) == f"lm-eval-duel: {message}"
    assert capsys.readouterr().err == f"lm-eval-duel: {message}\n"


@pytest.mark.parametrize(
    ("error", "own"), [(RuntimeError("a bug"), True), (ValueError("a bug"), True), (OSError("of lm_eval"), False)]
)
def test_what_is_no_error_of_ours_keeps_its_traceback(error, own):
    with pytest.raises(type(error)), ends(own):
        raise error


def test_a_traceback_can_be_had(monkeypatch, capsys):
    monkeypatch.setenv("LMEVAL_LOG_LEVEL", "debug")
    with pytest.raises(SystemExit), ends():
        raise DuelError("a")
    err = capsys.readouterr().err
    assert err.startswith("Traceback") and err.endswith("\nlm-eval-duel: a\n")


def test_a_reader_that_left_is_no_error():
    code = (
        "import os, sys; sys.stdout = os.fdopen(os.open('/dev/full', os.O_WRONLY), 'w')\n"
        "from lm_eval_duel.command_line import ends\n"
        "with ends():\n    raise BrokenPipeError(32, 'Broken pipe')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (141, "")


def test_errors_while_arguments_are_read_are_of_usage():
    for error in (DuelError("a"), FileNotFoundError(2, "No such file", "a")):
        with pytest.raises(UsageError) as found, usage():
            raise error
        assert found.value.__suppress_context__ and found.value.__cause__ is None
    with pytest.raises(UsageError):
        Options.parse({"rule": "gredy"})


@pytest.mark.parametrize(
    ("command", "shown"),
    [("/bin/lm_eval", "lm_eval: a\n"), ("lm_eval/__main__.py", "lm_eval: a\n"), ("my_evaluation.py", "Traceback")],
)
def test_lm_evals_own_command_prints_one_line(command, shown, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [command])
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    with pytest.raises(DuelError):
        DuelMDM(rule="gredy")  # before anything is loaded
    for error, begins in ((DuelError("a"), shown), (KeyError("a"), "Traceback")):
        try:
            raise error
        except Exception:
            sys.excepthook(*sys.exc_info())
        err = capsys.readouterr().err
        assert err == begins or (begins == "Traceback" and err.startswith(begins))


def test_lm_eval_prints_one_traceback_and_the_message_last(tmp_path):
    """Without ours before it: lm_eval prints the whole chain."""
    (tmp_path / "config.json").write_text('{"model_type')
    for given in ({"rule": "gredy"}, {"pretrained": str(tmp_path)}, {"tokenizer": str(tmp_path)}):
        with pytest.raises(DuelError) as error:
            DuelMDM(device="cpu", **given)
        shown = "".join(traceback.format_exception(error.value))
        assert shown.count("Traceback (most recent call last)") == 1
        assert shown.splitlines()[-1].endswith(str(error.value))
    with pytest.raises(DuelError) as error, unchained():
        raise DuelError("a") from ValueError("b")
    assert error.value.__cause__ is None and error.value.__suppress_context__


# ---------------------------------------------------------------- whatever is named


@pytest.fixture
def places(tmp_path, monkeypatch):
    """A folder with things that are no result, trace or checkpoint."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for name, content in (("binary", bytes(range(256))), ("empty", b""), ("null", b"null"), ("list", b"[1]")):
        (tmp_path / name).write_bytes(content)
    return tmp_path


PLACES = ("", "nosuch/deep", "folder", "binary", "null", "list", "/dev/null/x", "x" * 300, "\udcff")
NUMBERS = ("", "-1", "nan", "1e400", "9" * 5000, "\N{SUPERSCRIPT TWO}", "--")


@pytest.mark.parametrize("place", PLACES, ids=ascii)
def test_any_place_is_answered_in_words(place, places):
    refused("show", place)
    refused("report", place, "--out", "out")
    refused("report", "binary", "--ar", place, "--out", "out")
    if place != "folder":
        refused("report", "null", "--traces", place, "--out", "out")
    if place not in ("", "folder"):
        refused("run", "--tasks", "sotu", "--include_path", place)
    refused("run", "--tasks", "sotu", "--config", place)
    refused("tools", "where", place)
    refused(place)
    assert sorted(path.name for path in places.iterdir()) == ["binary", "empty", "folder", "list", "null"]


def test_an_output_that_cannot_be_is_refused_before_the_work(places):
    sweep = ["sweep", "--tasks", "sotu", "--rules", "greedy", "--out"]
    for place in ("", "binary", "binary/x", "/dev/null/x"):
        assert "'--out' is a folder" in refused(*sweep, place)
    for place in ("folder", "nosuch/x.json", "/dev/null/x"):
        assert "'--json' is a file" in refused("bench", "--json", place)


@pytest.mark.parametrize("number", NUMBERS, ids=ascii)
def test_any_number_is_answered_in_words(number, places):
    for name in ("layers", "hidden_size", "vocab", "length", "windows", "repeats", "batch_size") if number else ():
        assert f"{name}" in refused("bench", f"--{name}={number}")
    for name in ("k", "length", "limit", "samples", "elbo"):
        if number and (name, number) != ("samples", "0"):
            refused("sweep", "--tasks", "sotu", "--rules", "greedy", "--out", "o", f"--{name}={number}")
    if number:
        for name in ("rows", "length"):
            refused("tools", "data", "check", "duel_ptb", "--metadata", f"{name}={number}")
    refused("show", "binary", f"--doc={number}")


def test_sizes_that_make_no_network_are_refused(capsys):
    small = [
        "bench",
        "--layers",
        "1",
        "--hidden_size",
        "64",
        "--vocab",
        "50",
        "--length",
        "1",
        "--windows",
        "1",
        "--repeats",
    ]
    for name, size, message in (
        ("vocab", "1", "'--vocab' is a number of tokens, at least 2"),
        ("seed", str(2**63), "'--seed' is a whole number"),
        ("layers", str(10**9), "needs at least 183,105 GiB and cpu has"),
        ("hidden_size", "64" + "0" * 17, "needs at least .* GiB and"),
        ("vocab", "6" * 18, "needs at least .* GiB and"),
        ("length", "64" + "0" * 17, "Not enough memory."),
    ):
        with pytest.raises(SystemExit, match=message):
            program.main([*small, "1", f"--{name}", size])
    program.main([*small, "1", "--no_memory"])  # of one position
    assert "1 x 1 positions" in capsys.readouterr().out


VALUES = [
    "1",
    "-1",
    "+3",
    "1.5",
    "1e3",
    "inf",
    "True",
    "none",
    "'12'",
    '"a"',
    "a",
    "",
    "1_000",
    "++3",
    "½",
    "a b",
    " 5 ",
]


MODEL = ("NAME", "model_args", "device", "batch_size")


def test_key_values_are_those_of_lm_eval():
    for value in VALUES:
        text = f"a={value},b=x=y,,c={value}"
        assert repr(command_line.key_values(text)) == repr(simple_parse_args_string(text)), value


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("k=2,rule=greedy", {"k": 2, "rule": "greedy"}),
        (' {"k": 2}', {"k": 2}),
        ("demo-bd", {"pretrained": "demo-bd"}),
        ("demo-bd,k=2", {"pretrained": "demo-bd", "k": 2}),
        ("", {}),
    ],
)
def test_model_args_or_json(text, given):
    assert FLAGS["model_args"].read("--model_args", text) == given
    with pytest.raises(DuelError, match="'--metadata' is"):
        FLAGS["metadata"].read("--metadata", '{"k"')


@pytest.mark.parametrize(
    "words",
    [
        ["demo-bd", "--model_args", "block=4"],
        ["--model_args", "pretrained=demo-bd,block=4"],
        ["--model_args=demo-bd,block=4"],
        ["--model_args", '{"pretrained": "demo-bd", "block": 4}'],
    ],
    ids=str,
)
def test_the_model_is_named_alike_in_every_command(words):
    flags = Parser("x", "", "", "", *MODEL).parse_args(words)
    assert model_of(flags) == {"pretrained": "demo-bd", "block": 4, "device": None, "batch_size": "auto"}
    assert json.loads(run._named(words)[1]) == flags.model_args == {"pretrained": "demo-bd", "block": 4}


@pytest.mark.parametrize("words", [["demo-bd", "--model_args", "demo-mdm"], ["--model_args", "device=cpu"]], ids=str)
def test_what_is_given_twice(words):
    with pytest.raises(UsageError):
        model_of(Parser("x", "", "", "", *MODEL).parse_args(words))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[(name, None) for name in ("ids", "reveal_steps", "values")],
        *[(name, "x") for name in ("task", "doc", "ids", "token_logprobs", "margin", "values")],
        *[("task", []), ("doc", {}), ("ids", [None]), ("reveal_steps", [1]), ("values", {"duel": "x"})],
    ],
    ids=str,
)
def test_a_damaged_trace_is_answered_in_words(name, value, tmp_path, capsys):
    header = {"duel_trace": trace.FORMAT, "fingerprint": "f", "spec": {}, "tokenizer": "demo-mdm"}
    window = {"task": "toy", "doc": 0, "request": 0, "window": 0, "context": 0, "ids": [5, 7], "starts": [0]}
    window |= {"reveal_steps": [0, 1], "token_logprobs": [-1.0, -2.0], "confidence": [], "margin": [], "entropy": []}
    window |= {"nfe": 2, "near_ties": 0, "log_prob": -3.0, "values": {"duel": -3.0}}

    def shown(window):
        path = tmp_path / "t.jsonl"
        path.write_text("".join(f"{json.dumps(line)}\n" for line in (header, window)))
        program.main(["show", str(path)])

    shown(window)
    assert "document 0 of toy, window 0: 2 tokens" in capsys.readouterr().out
    del window[name]
    if name == "task" and value == "x":
        value = 5
    with pytest.raises(Exit) as ended:
        shown(window if value is None else window | {name: value})
    assert ended.value.code == 1 and ("is not a window of a trace" in str(ended.value) or "has no" in str(ended.value))


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
    ours, (here, there) = run.task_folder(), (str(tmp_path), str(tmp_path.parent))
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


CHECKS_SEEDS = pytest.mark.skipif(IS_0_5, reason="lm-eval 0.5.0.dev1 does not check seeds")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"modle": "x"}, "Unknown key of --config .*'modle'. Did you mean model?"),
        ({"tasks": 5}, "'tasks' must be a string or a list of strings; got 5."),
        ({"tasks": [5]}, "'tasks' must be a string or a list of strings; got [5]."),
        ({"tasks": "sotu", "model": ["x"]}, "'model' must be a string; got ['x']."),
        ({"tasks": "sotu", "model_args": ["x"]}, "'model_args' must be a mapping or key=value,...; got ['x']."),
        ({"tasks": "sotu", "model_args": {"rule": "gredy"}}, "Did you mean greedy?"),
        ({"tasks": "sotu", "model_args": "rule=gredy"}, "Did you mean greedy?"),
        pytest.param({"tasks": "sotu", "seed": "x"}, "seed values must be integers", marks=CHECKS_SEEDS),
        ([1], "YAML root must be a mapping"),
    ],
    ids=str,
)
def test_a_wrong_config_file_is_answered_in_words(config, message, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", [])
    (tmp_path / "c.yaml").write_text(json.dumps(config))
    said = refused("run", "--config", str(tmp_path / "c.yaml"))
    assert all(part in said for part in message.split(".*"))


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
    ours, both = [run.task_folder()], [run.task_folder(), str(tmp_path)]
    before = TaskManager.__init__
    for names, folders in ((["sotu", "duel_zero_shot"], ours), (["sotu", "mine", "tagged", "members", "nested"], both)):
        with run._task_files(names, folders):
            assert not TaskManager().all_tasks and set(names) <= set(TaskManager(include_path=folders).all_tasks)
        assert TaskManager.__init__ is before
        assert set(tasks_named.task_manager(names, None, *folders[1:]).all_tasks).isdisjoint({"wikitext"})
    elsewhere = [["sotu", "wikitext"], ["sotu*"], ["theirs"], ["outside"], [str(tmp_path / "mine.yaml")]]
    for names in elsewhere:
        with run._task_files(names, both):
            assert TaskManager.__init__ is before, names
