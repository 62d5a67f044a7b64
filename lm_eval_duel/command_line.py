"""What all subcommands share: how arguments are read, and how a command ends.

Exit codes: 0 on success; 1 if the command failed; 2 if an argument is wrong, which is checked before torch,
transformers or a data set is loaded; 130 after Ctrl-C. Messages go to stderr, as one line.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from lm_eval_duel.arguments import number
from lm_eval_duel.errors import DuelError, UsageError, about_file, unknown

PROGRAM = "lm-eval-duel"
FIGURES = ("png", "svg", "pdf")
WIDTHS = 3.0, 30.0  # inches of a figure
FAILED, WRONG, INTERRUPTED, UNREAD = 1, 2, 130, 141  # the last two as a shell reports SIGINT and SIGPIPE
NO_MEMORY = (  # in the RuntimeError that torch raises
    "out of memory",
    "can't allocate memory",
    "Storage size calculation overflowed",
)


def process() -> tuple[int, int]:
    """(number of this process, how many there are) in a launch by torchrun or accelerate; (0, 1) without one."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    return (int(os.environ.get("RANK", "0")), processes) if processes > 1 else (0, 1)


class Exit(SystemExit):
    """The end of a command. `code` is the exit status; its text is the message, which has been printed."""

    def __init__(self, code: int, message: str):
        super().__init__(message)
        self.code = code


@contextlib.contextmanager
def ends(own: bool = True) -> Iterator[None]:
    """Turn the errors of a command into one line on stderr and an exit code.

    `own`: the command is this package's, so an OSError concerns a file that the user named. In lm_eval's own command it
    may come from anywhere, and keeps its traceback.
    """
    try:
        yield
        sys.stdout.flush()
    except DuelError as error:
        _stop(WRONG if isinstance(error, UsageError) else FAILED, str(error))
    except KeyboardInterrupt:
        _stop(INTERRUPTED, "stopped.")
    except BrokenPipeError:  # the reader has closed the pipe, as in `show ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise Exit(UNREAD, "") from None
    except OSError as error:
        if not own:
            raise
        _stop(FAILED, about_file(error))
    except (MemoryError, RuntimeError) as error:
        if not own or not (isinstance(error, MemoryError) or any(words in str(error) for words in NO_MEMORY)):
            raise
        _stop(FAILED, f"Not enough memory. {str(error).strip().partition(chr(10))[0]}".strip())


def _stop(code: int, message: str) -> NoReturn:
    if os.environ.get("LMEVAL_LOG_LEVEL", "").upper() == "DEBUG":
        traceback.print_exc()
    message = f"{PROGRAM}: {message}"
    print(message, file=sys.stderr, flush=True)
    raise Exit(code, message) from None


FLAGS: dict[str, dict[str, Any]] = {  # of several commands, as for argparse
    "model_args": {
        "default": "",
        "help": "as for lm_eval: pretrained=demo-mdm,rule=greedy,block=32, or demo-mdm,rule=...",
    },
    "device": {"help": "cpu, cuda, ... (a GPU if there is one)"},
    "batch_size": {"default": "auto", "help": "rows of max_length per network call (auto)"},
    "limit": {"help": "only the first documents of each task"},
    "include_path": {"metavar": "DIR", "help": "a folder of your own task files"},
    "metadata": {"default": "", "help": "metadata of the tasks, as for lm_eval: length=...,data_dir=..."},
    "quiet": {"action": "store_true", "help": "print results, warnings and errors only"},
}


def documentation() -> str:
    """Where the documentation is: in the installed package, or beside the package in a checkout."""
    package = Path(__file__).resolve().parent
    return str(next((folder for folder in (package / "docs", package.parent / "docs") if folder.is_dir()), "docs/"))


class Parser(argparse.ArgumentParser):
    """The arguments of a subcommand. A wrong one is a UsageError that suggests the nearest name.

    `--batch-size` is read as `--batch_size`: lm_eval spells its arguments with underscores.
    """

    def __init__(self, command: str, description: str, prints: str, example: str):
        super().__init__(
            prog=f"{PROGRAM} {command}",
            description=description,
            epilog=f"{prints.strip()}\n\nexample:\n  {PROGRAM} {command} {example}\n\ndocumentation: {documentation()}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.command = command
        self.add("quiet")

    def add(self, *names: str, **defaults: Any) -> None:
        """Flags of `FLAGS`, which have the same name and help in every command; `defaults`: of some of them."""
        for name in names:
            self.add_argument(
                f"--{name}", **{**FLAGS[name], **({"default": defaults[name]} if name in defaults else {})}
            )

    def parse_known_args(
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        spelled = [*(sys.argv[1:] if args is None else args)]
        for n, word in enumerate(spelled):
            if word == "--":
                break
            if word.startswith("--"):
                spelled[n] = self._spelled(word)
        parsed, rest = super().parse_known_args(spelled, namespace)
        if vars(parsed).pop("quiet"):
            os.environ.update({"LMEVAL_LOG_LEVEL": "WARNING", "TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"})
        return parsed, rest

    def _spelled(self, word: str) -> str:
        """A flag as it was declared; raises UsageError for an unknown one."""
        name, equals, value = word.partition("=")
        if value == "--":  # argparse takes it for the end of the flags and hands over an empty list
            self.error(f"argument {name}: '--' is not a value")
        known = {flag.replace("-", "_"): flag for flag in self._option_string_actions if flag.startswith("--")}
        like = name.replace("-", "_")
        if like in known:
            return known[like] + equals + value
        matches = [flag for plain, flag in known.items() if plain.startswith(like)]  # argparse accepts a prefix
        if not matches:
            raise UsageError(f"{self.command}: {unknown('argument', name, known.values())}")
        return (matches[0] if len(matches) == 1 else name) + equals + value

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.command}: {message}. See {self.prog} --help.")


def folder_to_write(flag: str, text: str) -> Path:
    """The folder of an argument, which is created later if it does not exist; raises UsageError if it cannot be."""
    folder = Path(text)
    existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(parent))
    if not text or not existing.is_dir():
        what = f"{existing} is a file" if text else "it is empty"
        raise UsageError(f"{flag} {text}: {what}; name a folder, which is created if it does not exist.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UsageError(f"{flag} {text}: {existing} cannot be written to; name another folder.")
    return folder


def file_to_write(flag: str, text: str) -> Path:
    """The file of an argument, in an existing folder; raises UsageError for a folder, or if it cannot be written."""
    file = Path(text)
    if not text or file.is_dir():
        raise UsageError(f"{flag} {text}: {'that is a folder' if text else 'it is empty'}; name a file.")
    if not file.absolute().parent.is_dir():
        raise UsageError(
            f"{flag} {text}: there is no folder {file.absolute().parent}; create it, or name another file."
        )
    if not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
        raise UsageError(f"{flag} {text} cannot be written; name another file.")
    return file


def add_figures(parser: Parser) -> None:
    """The arguments `--figures` and `--width` of a command that draws."""
    parser.add_argument(
        "--figures", nargs="+", choices=FIGURES, default=["png"], metavar="FORMAT", help="png, svg and pdf (png)"
    )
    parser.add_argument("--width", metavar="INCHES", help="width of every figure, such as that of a column: 5.5")


def figure_width(text: str | None) -> float | None:
    """The value of `--width`; raises DuelError for other than a width that holds a figure."""
    least, most = WIDTHS
    return number(f"a number of inches from {least:g} to {most:g}", lambda n: least <= n <= most)("--width", text)
