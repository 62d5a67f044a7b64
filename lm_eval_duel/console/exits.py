"""The end of a command: its exit code, and one line on stderr.

    0    done; of `audit`, PASS
    1    begun, and failed; of `audit`, FAIL
    2    not begun: an argument, a path, a checkpoint or a data set is wrong; of `audit`, what kept it from a verdict
    3    of `audit`: nothing could be checked
    130  Ctrl-C

What is not begun raises UsageError. Arguments and paths are checked before torch, transformers or a data set is loaded.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import sys
import traceback
from collections.abc import Iterator
from typing import NoReturn

from lm_eval_duel.errors import DuelError, UsageError, about_file

PROGRAM = "lm-eval-duel"
FAILED = 1
WRONG = 2
INTERRUPTED = 130  # as a shell reports SIGINT
UNREAD = 141  # as a shell reports SIGPIPE
NO_MEMORY = (  # in the RuntimeError that torch raises
    "out of memory",
    "can't allocate memory",
    "Storage size calculation overflowed",
)


class Exit(SystemExit):
    """The end of a command. `code` is the exit status; its text is the message, which has been printed."""

    def __init__(self, code: int, message: str):
        super().__init__(message)
        self.code = code


PLAIN = {"≤": "<=", "≥": ">=", "±": "+-", "\u2212": "-", "→": "->", "…": "...", "“": '"', "”": '"'}


def print_on_any_console() -> None:
    """Let stdout and stderr print every text: a character that the console's encoding lacks is replaced.

    Our signs get an ASCII form (`≤` becomes `<=`), other characters become `?`. Nothing changes on a UTF-8 console, and
    files are always UTF-8.
    """
    codecs.register_error(PROGRAM, _replace)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=PROGRAM)


def _replace(error: UnicodeError) -> tuple[str, int]:
    """The replacement of characters that cannot be encoded, and where to go on, as `codecs.register_error` wants."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(PLAIN.get(character, "?") for character in lacking), error.end


@contextlib.contextmanager
def errors_as_exit_codes(own: bool = True, failed: int = FAILED) -> Iterator[None]:
    """Turn the errors of a command into one line on stderr and an exit code.

    `own`: the command is this package's, so an OSError concerns a file that the user named. In lm_eval's own command it
    may come from anywhere, and keeps its traceback. `failed`: the exit code of a command that could not do its work,
    with a traceback, too, for which Python's is 1.
    """
    try:
        yield
        sys.stdout.flush()
    except DuelError as error:
        stop(WRONG if isinstance(error, UsageError) else failed, str(error))
    except KeyboardInterrupt:
        stop(INTERRUPTED, "stopped.")
    except BrokenPipeError:  # the reader has closed the pipe, as in `list args | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise Exit(UNREAD, "") from None
    except OSError as error:
        if not own:
            raise
        stop(failed, about_file(error))
    except Exception as error:
        if own and _is_of_memory(error):
            first_line, _, _ = str(error).strip().partition("\n")
            stop(failed, f"Not enough memory. {first_line}".strip())
        if failed == FAILED:  # which is Python's own exit code after a traceback
            raise
        traceback.print_exc()
        raise Exit(failed, f"{PROGRAM}: {error!r}") from None


def _is_of_memory(error: Exception) -> bool:
    if isinstance(error, RuntimeError):
        return any(words in str(error) for words in NO_MEMORY)
    return isinstance(error, MemoryError)


def stopped(use_cache: str | None) -> str:
    """The message of a run that Ctrl-C has ended before or after its scoring. `use_cache`: the path of --use_cache."""
    if not use_cache:
        return "stopped."
    return f"stopped. Finished answers, if any, are in {use_cache}_rank*.db: run the same command to resume."


def stop(code: int, message: str) -> NoReturn:
    """End a command with one line on stderr and an exit code."""
    handles_an_error = sys.exc_info()[0] is not None
    if handles_an_error and os.environ.get("LMEVAL_LOG_LEVEL", "").upper() == "DEBUG":
        traceback.print_exc()
    message = f"{PROGRAM}: {message}"
    print(message, file=sys.stderr, flush=True)
    raise Exit(code, message) from None
