"""The parts that all commands share: the JSON and the tables that they write, their flags, and their ranks."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import re
import sys
import tempfile
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from lm_eval_duel.arguments import (
    CHECKPOINT,
    COUNT,
    MISSING,
    TEXT,
    TRUTH,
    ArgumentType,
    at_home,
    choice,
    number,
    path,
    unique_keys,
)
from lm_eval_duel.console.exits import PROGRAM
from lm_eval_duel.console.flags import Flag, positional_first
from lm_eval_duel.core.scores import METRICS
from lm_eval_duel.demo import NAMES as BUNDLED_NAMES
from lm_eval_duel.demo import model_hint
from lm_eval_duel.errors import DuelError, UsageError, documentation, unknown, usage

REASONS = {
    math.inf: "infinite: a text has probability 0, or the number is too large",
    -math.inf: "minus infinity: a text has probability 0",
}
NAN = "not a number"
LARGE = 1e12  # numbers from here on are shown in scientific notation


def dumps(content: Mapping[str, Any]) -> str:
    """A dict as JSON, see `with_nulls`."""
    return json.dumps(with_nulls(content), indent=1, allow_nan=False)


def with_nulls(content: Mapping[str, Any]) -> dict[str, Any]:
    """A dict with null in place of infinities and NaN. Its key `nulls` lists where they were, and what each was."""
    nulls = dict(_nulls(content, ""))
    return finite({**content, "nulls": nulls} if nulls else content)


def finite(value: Any) -> Any:
    """A value with null in place of infinities and NaN."""
    if isinstance(value, Mapping):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return None if _is_nonfinite(value) else value


def _is_nonfinite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _nulls(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """(path, reason) of every number that JSON does not have."""
    parts: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        parts = value.items()
    elif isinstance(value, list | tuple):
        parts = enumerate(value)
    for key, part in parts:
        yield from _nulls(part, f"{path}.{key}" if path else str(key))
    if _is_nonfinite(value):
        yield path, REASONS.get(value, NAN)


def infinities(nulls: Mapping[str, str]) -> dict[float, str]:
    """The infinities among numbers, each with its reason, for a note below their table. `nulls`: see `with_nulls`."""
    reasons = nulls.values()
    return {value: reason for value, reason in REASONS.items() if reason in reasons}


# ---------------------------------------------------------------- tables


NUMBER_SIGNS = "≤≥~*+-. ["  # may precede the digits of a number: bounds, bold, signs, footnotes
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet reads a text that starts like this as a formula


def one_line(text: str) -> str:
    """`text` with line ends, control characters and lone surrogates replaced by spaces."""
    shown = []
    for character in str(text):
        breaks_a_line = unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp")
        shown.append(" " if breaks_a_line else character)
    return "".join(shown)


def csv_cell(value: Any) -> Any:
    """A cell of CSV: no text that a spreadsheet would run as a formula; numbers as they are."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, str):
        return value
    return one_line(f"'{value}" if value.startswith(FORMULA) else value)


def plain_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns separated by spaces. `header` may be empty."""
    columns = []
    for head, *cells in zip(header or [""] * len(rows[0]), *rows, strict=True):
        if any(cells):  # an empty column is left out
            column = list(map(one_line, [head, *cells]))
            columns.append(_aligned(column))
    lines = ["  ".join(line).rstrip() for line in zip(*columns, strict=True)]
    return "\n".join(lines if header else lines[1:])


def _aligned(column: Sequence[str]) -> list[str]:
    """The cells of a column, the head first, in its width: numbers to the right."""
    width = max(map(_width, column))
    right = is_numeric(column[1:])
    aligned = []
    for cell in column:
        space = " " * (width - _width(cell))
        aligned.append(space + cell if right else cell + space)
    return aligned


def _width(text: str) -> int:
    """The width of a text in terminal columns."""
    width = 0
    for character in text:
        if not unicodedata.combining(character):
            width += 2 if unicodedata.east_asian_width(character) in "WF" else 1
    return width


def is_numeric(cells: Iterable[str]) -> bool:
    """True if every non-empty cell starts with a number."""
    return all(cell.strip(NUMBER_SIGNS)[:1].isdigit() for cell in filter(None, cells))


# ---------------------------------------------------------------- commands


FIGURES = ("png", "svg", "pdf")
WIDTHS = 3.0, 30.0  # inches of a figure


def process() -> tuple[int, int]:
    """(number of this process, how many there are) in a launch by torchrun or accelerate; (0, 1) without one."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes < 2:
        return 0, 1
    return int(os.environ.get("RANK", "0")), processes


def is_writable_folder(name: str) -> bool:
    """True for a folder that can be written to, or one that can be made below the nearest folder that exists.

    It is tried with an empty folder, which is removed again: permissions say nothing of a file system that is read
    only, and of names that are too long.
    """
    if not name:
        return False
    wanted = Path(name).absolute()
    folder = wanted
    while not os.path.lexists(folder):
        folder = folder.parent
    if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        return False
    try:
        with tempfile.TemporaryDirectory(dir=folder) as trial:
            Path(trial, wanted.relative_to(folder)).mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError):  # ValueError: a name with a null character
        return False
    return True


def _is_writable_file(name: str) -> bool:
    if name == STDOUT:
        return True
    file = Path(name)
    if not name or file.is_dir() or not file.parent.is_dir():
        return False
    return os.access(file if file.exists() else file.parent, os.W_OK)


def _is_name_alone(text: str) -> bool:
    """False for a name with model args behind it, as --model_args takes them."""
    return bool(text) and (re.search(r",\w+=", text) is None or os.path.lexists(text))


PAIR = re.compile(r"[A-Za-z_]\w*=|\{")  # the start of a word that is key=value, or a JSON object
CONSTANTS = {"true": True, "false": False, "none": None}


def key_values(text: str) -> dict[str, Any]:
    """`key=value,...` or a JSON object as a dict, with values of the types that lm_eval gives them."""
    if text.lstrip().startswith("{"):
        return json.loads(text, object_pairs_hook=unique_keys)
    pairs = []
    for part in filter(None, text.strip().split(",")):
        key, _, value = part.partition("=")
        pairs.append((key, _value(value.strip())))
    return unique_keys(pairs)


def _value(text: str) -> Any:
    """A value as lm_eval reads it: without quotation marks, True, False or None, a number, or the text."""
    is_quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    if is_quoted:
        return text[1:-1]
    if text.lower() in CONSTANTS:
        return CONSTANTS[text.lower()]
    with contextlib.suppress(ValueError):
        if "_" not in text:  # lm_eval reads 1_000 as a float
            return int(text)
    with contextlib.suppress(ValueError):
        return float(text)
    return text


def _names(text: str) -> list[str]:
    return [at_home(name.strip()) for name in text.split(",") if name.strip()]


def _model_args(text: str) -> dict[str, Any]:
    """`pretrained=NAME,...` or `NAME,...`."""
    first, _, _ = text.partition(",")
    begins_with_name = bool(text) and "=" not in first and not first.lstrip().startswith("{")
    return key_values(f"pretrained={text}" if begins_with_name else text)


# flags of `run` that are looked for in other commands
OF_RUN = ("--use_cache", "--output_path", "--log_samples", "--tasks")
STDOUT = "-"
NOTHING_GIVEN = (None, "")
KEY_VALUES = ArgumentType("key=value,... or a JSON object", key_values, nothing=NOTHING_GIVEN)
NAMES = ArgumentType("names, separated by commas", _names)
PATH = path("a path")
MODEL_NAME = path("a folder, a hub name or a bundled name; its model args go to --model_args", _is_name_alone)
EXISTING = path("a folder that exists", lambda name: Path(name).is_dir())
FOLDER = path("a folder that can be written to; it is created if it does not exist", is_writable_folder)
FILE = path("a file that can be written, in a folder that exists", _is_writable_file)
INCHES = number(f"a number of inches from {WIDTHS[0]:g} to {WIDTHS[1]:g}", lambda x: WIDTHS[0] <= x <= WIDTHS[1])
FLAGS: dict[str, Flag] = {  # of several commands: the same name, values and help everywhere
    "NAME": Flag(
        MODEL_NAME,
        None,
        f"the model: a folder, a hub name, or one of {', '.join(BUNDLED_NAMES)}. The same as --model_args NAME",
    ),
    "model_args": Flag(
        dataclasses.replace(KEY_VALUES, convert=_model_args),
        {},
        "the model and its settings, as for lm_eval: pretrained=NAME,rule=greedy,block=32. Spaces may stand for the "
        "commas, outside quotation marks, and NAME alone for pretrained=NAME. All settings: lm-eval-duel list args",
        shows="KEY=VALUE,...",
        continues=True,
    ),
    "device": Flag(TEXT, None, "cpu, cuda, ...", unset="a GPU if there is one"),
    "batch_size": Flag(TEXT, "auto", "rows of max_length in a network call"),
    "tasks": Flag(
        NAMES, MISSING, "names of tasks, their YAML files, or files of text, separated by commas or spaces", many=True
    ),
    "limit": Flag(COUNT, None, "only the first documents of each task", unset="all", shows="N"),
    "include_path": Flag(EXISTING, None, "a folder of your own task files", shows="DIR"),
    "metric": Flag(
        choice(*METRICS),
        None,
        "the perplexity to compare (accuracies are always shown)",
        unset="the first that all results have",
    ),
    "metadata": Flag(
        KEY_VALUES,
        {},
        "metadata of the tasks, as for lm_eval, such as data_dir=FOLDER. All keys: lm-eval-duel list metadata",
        shows="KEY=VALUE,...",
        continues=True,
    ),
    "tokenizer": Flag(CHECKPOINT, None, "a folder, a hub name or a bundled name", shows="NAME"),
    "NAMES": Flag(TEXT, None, "only these", many=True, unset="all"),
    "markdown": Flag(TRUTH, False, "print the table of docs/"),
    "RESULTS": Flag(PATH, MISSING, "results_*.json files, files of score --json, or folders that hold them", many=True),
    "ar": Flag(
        PATH, None, "results of the autoregressive baseline, or its model", unset="the only one found", shows="RESULT"
    ),
    "traces": Flag(PATH, None, "traces, or folders of them, that results do not name", many=True, shows="FILE"),
    "out": Flag(FOLDER, MISSING, "the folder to write to", shows="DIR"),
    "figures": Flag(
        choice(*FIGURES), ("png",), "png, svg and pdf, or none", none=(), unset="png", many=True, shows="FORMAT"
    ),
    "width": Flag(INCHES, None, "width of every figure, for example 5.5 for a column of text", shows="INCHES"),
    "json": Flag(
        FILE, None, "write the figures to FILE as JSON; without FILE, print them instead", alone=STDOUT, shows="FILE"
    ),
    "lines": Flag(TRUTH, False, "each line of a .txt or .md file is a document"),
    "field": Flag(TEXT, "text", "the column of tables that holds the text"),
    "quiet": Flag(TRUTH, False, "print results, warnings and errors only"),
}


class Parser(argparse.ArgumentParser):
    """The arguments of a subcommand. A wrong one is a UsageError that suggests the nearest name.

    `--batch-size` is read as `--batch_size`: lm_eval spells its arguments with underscores.
    """

    def __init__(self, command: str, description: str, prints: str, example: str, *shared: str, **own: Flag):
        """`shared`: names of `FLAGS`; `own`: flags of this command alone, and shared ones with another default."""
        super().__init__(
            prog=f"{PROGRAM} {command}",
            description=description,
            epilog=f"{prints.strip()}\n\nexample:\n  {PROGRAM} {command} {example}\n\ndocumentation: {documentation()}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.command = command
        self.flags = {**{name: FLAGS[name] for name in shared}, **own, "quiet": FLAGS["quiet"]}
        for name, flag in self.flags.items():
            self._add(name, flag)

    def _add(self, name: str, flag: Flag) -> None:
        positional = name.isupper()
        must = flag.default is MISSING
        words: dict[str, Any] = {"help": _help(flag)}  # of argparse's add_argument
        if flag.kind is TRUTH:
            words["action"] = "store_true"
        else:
            one_of = f"{{{','.join(flag.kind.choices)}}}" if flag.kind.choices else ""
            words["metavar"] = flag.shows or one_of or name.upper()
            if flag.many:
                words["nargs"] = "*" if positional and not must else "+"
            elif flag.alone or (positional and not must):
                words["nargs"] = "?"
                words["const"] = flag.alone
            if flag.continues:
                words["action"] = "append"
            if not positional:
                words["required"] = must
        self.add_argument(name.lower() if positional else f"--{name}", **words)

    def parse_known_args(
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        words = sys.argv[1:] if args is None else args
        spelled = positional_first(self.prog, self._all_spelled(words), self.flags)
        parsed, rest = super().parse_known_args(spelled, namespace)
        with usage():
            for name, flag in self.flags.items():
                written = getattr(parsed, name.lower())
                setattr(parsed, name.lower(), _read(name, flag, written))
        if vars(parsed).pop("quiet"):
            be_quiet()
        return parsed, rest

    def _all_spelled(self, words: Sequence[str]) -> list[str]:
        """The command line with flags as they were declared, and `--model_args a=1 b=2` as two of them.

        Raises UsageError for an unknown or repeated flag.
        """
        spelled: list[str] = []
        given = set()
        continued = ""  # the flag to which a word key=value belongs
        awaits_value = False
        for n, word in enumerate(words):
            if word == "--":
                return [*spelled, *words[n:]]
            if word.startswith("--"):
                word = self._spelled(word)
                flag, equals, _ = word.partition("=")
                if flag in given:
                    self.error(f"{flag} is given twice")
                given.add(flag)
                declaration = self.flags.get(flag.removeprefix("--"))
                continued = flag if declaration is not None and declaration.continues else ""
                awaits_value = not equals
            elif awaits_value:
                awaits_value = False
            elif continued and PAIR.match(word):
                spelled.append(continued)
            else:
                continued = ""
            spelled.append(word)
        return spelled

    def _spelled(self, word: str) -> str:
        """A flag as it was declared; raises UsageError for an unknown one."""
        name, equals, value = word.partition("=")
        if value == "--":  # argparse takes it for the end of the flags and hands over an empty list
            self.error(f"argument {name}: '--' is not a value")
        flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
        underscored = name.replace("-", "_")
        matches = []  # the flags that begin so
        for flag in flags:
            spelling = flag.replace("-", "_")
            if spelling == underscored:
                return flag + equals + value
            if spelling.startswith(underscored):
                matches.append(flag)
        if not matches:
            self._require_flag(name)
            of_run = f" {PROGRAM} run takes it, and scores files of text by --tasks FILE." if name in OF_RUN else ""
            raise UsageError(f"{self.command}: {unknown('argument', name, flags)}{of_run}")
        # argparse accepts the beginning of a flag, and has its own error for that of several
        flag = matches[0] if len(matches) == 1 else name
        return flag + equals + value

    def _require_flag(self, name: str) -> None:
        """Raise UsageError for the name of a positional argument with dashes before it, such as --files for FILE."""
        word = name.strip("-").removesuffix("s")
        for positional in filter(str.isupper, self.flags):
            if positional.lower().removesuffix("s") == word:
                raise UsageError(
                    f"{self.command}: Unknown argument '{name}'. {positional} is given without a flag: {self.prog} "
                    f"{positional} ..."
                )

    def error(self, message: str) -> NoReturn:
        hint = model_hint(message.split()) if "model_args" in self.flags else ""
        raise UsageError(f"{self.command}: {message}.{hint} See {self.prog} --help.")


def _help(flag: Flag) -> str:
    """The help of a flag with its default, as argparse takes it."""
    text = flag.help.replace("%", "%%")  # argparse would fill in a name after a single one
    has_default = flag.default is not False and flag.default not in (MISSING, None, "", (), {})
    default = flag.unset or (flag.shown if has_default else "")
    return f"{text} (default: {default})" if default else text


def _read(name: str, flag: Flag, written: Any) -> Any:
    """The value of a flag as its type, or its default. `written`: what argparse found."""
    shown = name if name.isupper() else f"--{name}"
    if flag.kind is NAMES:  # spaces may stand for the commas, as in lm_eval
        return flag.default if written is None else flag.read(shown, ",".join(written))
    if flag.many:
        return _read_several(shown, flag, written or [])
    if flag.continues:
        return flag.default if written is None else read_pairs(name, written)
    if flag.kind is TRUTH:
        return written
    return flag.default if written is None else flag.read(shown, written)


def read_pairs(name: str, texts: Sequence[str]) -> dict[str, Any]:
    """The dict of a flag such as --model_args, of which lm-eval takes several texts.

    Raises DuelError for a key that is given twice.
    """
    pairs: list[tuple[str, Any]] = []
    for text in texts:
        pairs += FLAGS[name].read(f"--{name}", text).items()
    return unique_keys(pairs)


def _read_several(shown: str, flag: Flag, written: Sequence[str]) -> list[Any]:
    """The values of a flag that takes several. `none` stands alone, for no value, as for other flags."""
    values = [flag.kind(shown, each) for each in written]
    if values == [None]:
        none = flag.default if flag.none is ... else flag.none
        return list(none or ())
    if None in values:
        raise DuelError(f"'{shown}' takes none or other values, not both; got {' '.join(written)}. Leave one out.")
    return values or list(flag.default or ())


def be_quiet() -> None:
    """Print results, warnings and errors only, in this process and those that it starts."""
    os.environ.update({"LMEVAL_LOG_LEVEL": "WARNING", "TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"})


def write_json(file: str, figures: Any) -> None:
    """Write the figures of `--json FILE`, or print them."""
    text = dumps(figures)
    if file == STDOUT:
        print(text)
    else:
        Path(file).write_text(f"{text}\n", encoding="utf-8")
