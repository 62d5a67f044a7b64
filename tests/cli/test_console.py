"""What every command prints with: JSON without infinities, tables, cells of CSV; its flags, and how it ends."""

import json
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from lm_eval_duel.arguments import COUNT, MISSING, TEXT, TRUTH, whole
from lm_eval_duel.cli import main as program
from lm_eval_duel.console import command_line, exits
from lm_eval_duel.console.command_line import FLAGS, Flag, Parser
from lm_eval_duel.console.exits import Exit, errors_as_exit_codes
from lm_eval_duel.errors import DuelError, UsageError

# ---------------------------------------------------------------- JSON


def test_every_number_that_json_lacks_is_null_and_named():
    content = {
        "a": [1.0, math.inf, {"b": -math.inf}],
        "c": {"d": (math.nan, 2), "e": True},
        "f": None,
        "g": "inf",
        "h": 10**400,
    }

    in_json = json.loads(command_line.dumps(content), parse_constant=pytest.fail)

    reasons = in_json.pop("nulls")
    assert in_json == {
        "a": [1.0, None, {"b": None}],
        "c": {"d": [None, 2], "e": True},
        "f": None,
        "g": "inf",
        "h": 10**400,
    }
    assert list(reasons) == ["a.1", "a.2.b", "c.d.0"]
    assert reasons["a.1"].startswith("infinite")
    assert reasons["a.2.b"].startswith("minus infinity")
    assert reasons["c.d.0"] == "not a number"

    assert "nulls" not in json.loads(command_line.dumps({"a": 1.0}))


def test_json_is_written_or_printed(tmp_path, capsys):
    content = {"a": "\u00e9"}

    command_line.write_json(str(tmp_path / "a.json"), content)
    assert capsys.readouterr().out == ""
    assert json.loads((tmp_path / "a.json").read_text()) == content

    command_line.write_json(command_line.STDOUT, content)
    assert json.loads(capsys.readouterr().out) == content


# ---------------------------------------------------------------- tables


def test_numbers_are_to_the_right_and_texts_to_the_left():
    rows = [("one", "≤ 9.5", "", "a"), ("three", "12.25", "", ""), ("five and", "", "", "1")]
    assert command_line.plain_table(["name", "number", "empty", "mixed"], rows).splitlines() == [
        "name      number  mixed",
        "one        ≤ 9.5  a",
        "three      12.25",
        "five and          1",
    ]
    assert command_line.plain_table([], [("a", "1"), ("bcd", "22")]).splitlines() == ["a     1", "bcd  22"]


def test_a_width_is_that_of_the_terminal():
    """Wide characters take two columns, combining ones none; what breaks a line is a space."""
    rows = [("\u6f22\uff21", "x"), ("e\u0301", "y"), ("a\nb\u2028", "z")]
    assert command_line.plain_table([], rows).splitlines() == ["\u6f22\uff21  x", "e\u0301     y", "a b   z"]
    for character in "\n\r\t\x00\x1b\x7f\u2028\u2029\ud83d":
        assert command_line.one_line(f"a{character}b") == "a b", repr(character)


@pytest.mark.parametrize(
    ("value", "cell"),
    [
        ("=1+1", "'=1+1"),
        ("+1", "'+1"),
        ("-1", "'-1"),
        ("@x", "'@x"),
        ("\tx", "' x"),
        ("\rx", "' x"),
        ("a=1", "a=1"),
        ("", ""),
        ("a\nb", "a b"),
        (None, ""),
        (True, "yes"),
        (False, "no"),
        (0, 0),
        (-1.5, -1.5),
    ],
)
def test_cells_of_csv(value, cell):
    assert repr(command_line.csv_cell(value)) == repr(cell)


@pytest.mark.parametrize(
    ("cells", "numeric"),
    [
        (["1", "≤ 2.5 ± 1", "**3**"], True),
        (["-1", "+2"], True),
        (["[1] 2", "~ 3", ".5"], True),
        (["", ""], True),
        (["1", "none"], False),
        (["-"], False),
    ],
)
def test_columns_of_numbers(cells, numeric):
    assert command_line.is_numeric(cells) == numeric


# ---------------------------------------------------------------- flags


class Example(Parser):
    """A command with a flag of each kind."""

    def __init__(self):
        super().__init__(
            "x", "what it does", "what it prints", "example",
            *("NAME", "model_args", "json"),
            count=Flag(COUNT, 3, "a count of 5 %", shows="N"),
            counts=Flag(COUNT, (1, 2), "counts", many=True),
            zero=Flag(whole(0), 0, "none at all"),
            truth=Flag(TRUTH, False, "a truth"),
            text=Flag(TEXT, None, "a text", unset="what is there"),
            formats=Flag(TEXT, ("png",), "formats", many=True, unset="one"),
            needed=Flag(TEXT, MISSING, "a text that must be given"),
        )  # fmt: skip


class Reader(Parser):
    """A command of files that must be given, with flags that take several words."""

    def __init__(self):
        super().__init__(
            "x", "what it does", "what it prints", "example",
            *("RESULTS", "figures", "traces", "json"),
            out=Flag(TEXT, None, "a text"),
        )  # fmt: skip


def values(*words):
    return vars(Example().parse_args(["--needed", "x", *words]))


@pytest.mark.parametrize("words", ["--figures none a", "--out o --figures none a", "--figures none a --out o"])
def test_a_file_behind_a_list_of_choices_is_a_file(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a").touch()
    Path("b").touch()
    assert Reader().parse_args(words.split()).results == ["a"]
    assert Reader().parse_args(words.split()).figures == []
    assert Reader().parse_args(["b", *words.split()]).results == ["b", "a"]


@pytest.mark.parametrize(
    ("words", "works"),
    [
        ("--traces t a --out o", "x a --traces t --out o"),
        ("--traces t --out o", "x RESULTS --traces t --out o"),
        ("--figures none --traces t a", "x a --figures none --traces t"),
        ("--traces t a --figures none", "x a --traces t --figures none"),
        ("--json a", "x a --json"),
    ],
)
def test_a_flag_that_took_the_files_is_named_with_the_command_that_works(words, works):
    with pytest.raises(UsageError, match=re.escape(works)):
        Reader().parse_args(words.split())


def test_a_file_that_is_not_there_is_a_wrong_choice(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a").touch()
    with pytest.raises(DuelError, match="svh"):
        Reader().parse_args(["a", "--figures", "png", "svh"])


def test_flags_have_their_values():
    assert values() == {
        "name": None,
        "model_args": {},
        "json": None,
        "count": 3,
        "counts": [1, 2],
        "truth": False,
        "formats": ["png"],
        "zero": 0,
        "text": None,
        "needed": "x",
    }

    given = values("demo-mdm", "--count", "7", "--counts", "5", "6", "--truth", "--text", "t", "--json")
    assert given["name"] == "demo-mdm"
    assert given["count"] == 7
    assert given["counts"] == [5, 6]
    assert given["truth"] is True
    assert given["text"] == "t"
    assert given["json"] == command_line.STDOUT

    assert values("--json", "a.json")["json"] == "a.json"
    assert values("--tex=a=b")["text"] == "a=b"
    assert values("--trut")["truth"] is True
    assert values("--model-args", "block=4")["model_args"] == {"block": 4}
    assert values("--", "--odd")["name"] == "--odd"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--cou", "4"], "--cou"),  # of two flags
        (["--count", "4", "--count", "4"], "--count is given twice"),
        (["--truth", "--truth"], "--truth is given twice"),
        (["--count=4", "--cou-nt=5"], "cou-nt"),
        (["--model_args", "a=1", "--model-args", "a=1"], "--model_args is given twice"),
        (["--contu", "4"], "Did you mean --count"),
        (["--count", "0"], "'--count'"),
        (["--counts", "1", "0"], "'--counts'"),
        (["--counts"], "--counts"),
        (["--count="], "'--count'"),
        (["--count=--"], "--count"),
        (["a", "b"], "b"),
    ],
)
def test_wrong_words_are_named(words, named):
    with pytest.raises(UsageError, match=named):
        values(*words)


def test_a_flag_that_is_needed_is_asked_for():
    with pytest.raises(UsageError, match="--needed"):
        Example().parse_args([])


def test_help_has_every_flag_with_its_default():
    shown = " ".join(Example().format_help().split())
    for part in (
        "--count N a count of 5 % (default: 3)",
        "counts (default: (1, 2))",
        "a truth --",
        "a text (default: what is there)",
        "formats (default: one)",
        "none at all (default: 0)",
        "a text that must be given --",
        "[NAME]",
        "[--json [FILE]]",
        "example: lm-eval-duel x example",
        "what it prints",
    ):
        assert part in shown, part


def test_widths_of_figures():
    assert FLAGS["width"].read("--width", "3") == 3.0
    assert FLAGS["width"].read("--width", "30") == 30.0
    for written in ("2.9", "31", "nan"):
        with pytest.raises(DuelError):
            FLAGS["width"].read("--width", written)


def test_files_and_folders_to_write(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "file").chmod(0o755)
    (tmp_path / "folder").mkdir()
    new = tmp_path / "a" / "b" / "c"

    for kind, name in (
        (command_line.FOLDER, tmp_path / "folder"),
        (command_line.FOLDER, new),
        (command_line.FILE, tmp_path / "file"),
        (command_line.FILE, tmp_path / "new"),
        (command_line.FILE, command_line.STDOUT),
        (command_line.EXISTING, tmp_path / "folder"),
    ):
        assert kind("out", str(name)) == str(name)

    for kind, name in (
        (command_line.FOLDER, tmp_path / "file"),
        (command_line.FOLDER, tmp_path / "file" / "below"),
        (command_line.FOLDER, ""),
        (command_line.FILE, tmp_path / "folder"),
        (command_line.FILE, new),
        (command_line.FILE, ""),
        (command_line.EXISTING, tmp_path / "file"),
    ):
        with pytest.raises(DuelError):
            kind("out", str(name))


def test_what_cannot_be_written_to(tmp_path, monkeypatch):
    """As another user's: the permissions of files bind everyone but root."""
    monkeypatch.setattr(command_line.os, "access", lambda *_: False)
    for kind in (command_line.FOLDER, command_line.FILE):
        with pytest.raises(DuelError, match="out"):
            kind("out", str(tmp_path / "x"))


def test_a_folder_whose_name_looks_like_model_args_is_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = "net,block=4"
    with pytest.raises(DuelError, match="model_args"):
        FLAGS["NAME"].read("NAME", name)
    (tmp_path / name).mkdir()
    assert FLAGS["NAME"].read("NAME", name) == name


# ---------------------------------------------------------------- processes, and ends


@pytest.mark.parametrize(
    ("size", "rank", "expected"), [(None, None, (0, 1)), ("1", "3", (0, 1)), ("2", "1", (1, 2)), ("4", None, (0, 4))]
)
def test_processes(size, rank, expected, monkeypatch):
    for name, value in (("WORLD_SIZE", size), ("RANK", rank)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert command_line.process() == expected


@pytest.mark.parametrize("name", program.COMMANDS)
def test_only_some_commands_take_part_in_a_launch(name, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    if name in ("run", "score"):
        with pytest.raises(SystemExit):
            program.main([name, "--help"])
    else:
        program.main([name, "--help"])
    assert (capsys.readouterr().out == "") == (name not in ("run", "score"))


@pytest.mark.parametrize("name", [*program.COMMANDS, "", "--help", "-h", "--version"])
def test_what_a_command_raises_is_its_own_but_in_lm_evals(name, monkeypatch):
    """A file that cannot be read in lm-eval's command may be anything: it keeps its traceback.

    A code of 1 from `audit` says that something differs, so an audit that could not be made ends with 2.
    """

    def failing(*_):
        raise FileNotFoundError(2, "No such file", "x")

    monkeypatch.setattr(program.importlib, "import_module", lambda _: SimpleNamespace(main=failing))

    if name not in program.COMMANDS:
        program.main([name] if name else [])
    elif name == "run":
        with pytest.raises(FileNotFoundError):
            program.main([name])
    else:
        with pytest.raises(Exit) as ended:
            program.main([name])
        assert ended.value.code == (exits.WRONG if name == "audit" else exits.FAILED)
        assert "x" in str(ended.value)


def test_versions_are_those_that_numbers_depend_on(capsys, monkeypatch):
    monkeypatch.setattr(program, "_version_of", {"lm_eval_duel": "1", "torch": "2", "lm_eval": "3"}.get)
    program.main(["--version"])
    python = ".".join(map(str, sys.version_info[:3]))
    expected = f"lm-eval-duel 1 (lm_eval 3, torch 2, transformers None, Python {python}"
    assert capsys.readouterr().out.startswith(expected)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (MemoryError(), 1),
        (MemoryError("8 bytes"), 1),
        (RuntimeError("CUDA out of memory. Tried"), 1),
        (RuntimeError("Storage size calculation overflowed"), 1),
        (RuntimeError("another"), None),
        (BrokenPipeError(), 141),
    ],
    ids=repr,
)
@pytest.mark.parametrize("own", [True, False])
def test_errors_of_memory(error, code, own, monkeypatch):
    """In lm-eval's command, too, Ctrl-C and a reader that left are ends; an error of memory keeps its traceback."""
    monkeypatch.setattr(exits.os, "dup2", lambda *_: None)
    keeps_its_traceback = code is None or (not own and code == 1)

    if keeps_its_traceback:
        with pytest.raises(type(error)), errors_as_exit_codes(own):
            raise error
    else:
        with pytest.raises(Exit) as ended, errors_as_exit_codes(own):
            raise error
        assert ended.value.code == code
