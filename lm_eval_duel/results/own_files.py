"""Files: JSON that is read or refused with a reason, and folders in which a command replaces only its earlier files."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lm_eval_duel.console import command_line as strict_json
from lm_eval_duel.errors import DuelError

LISTING = "report.json"  # names the files of a report
FORMAT = "lm_eval_duel report"  # by which it is known
MAX_LENGTH = 100  # characters of a task's name in a file name
SUFFIXES = (".html", ".md", ".csv", ".json", ".yaml", ".tex", ".png", ".svg", ".pdf")


@contextlib.contextmanager
def reading(file: Path, what: str) -> Iterator[None]:
    """Raise a DuelError that names the file if an entry of it is missing or of another type."""
    try:
        yield
    except DuelError:
        raise
    except (ArithmeticError, AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError) as error:
        raise DuelError(
            f"{file} is not {what}, or is not whole ({type(error).__name__}: {str(error)[:120]}). Write it again, or "
            "leave it out."
        ) from None


def stems(found: Iterable[tuple[str, str, str]]) -> Iterator[str]:
    """File names of tables and figures, from (task, kind, title), each different even where case is ignored."""
    found = list(found)
    counts, used = Counter((name, kind) for name, kind, _ in found), set[str]()
    for name, kind, title in found:
        subject = re.sub(r"[\s,:=/]+", "_", title.partition(": ")[2]) if counts[name, kind] > 1 else ""
        stem = "_".join(re.sub(r"[^\w.-]", "_", part)[:MAX_LENGTH] for part in (kind, name, subject) if part)
        numbered = itertools.chain([stem], (f"{stem}_{n}" for n in itertools.count(2)))
        stem = next(name for name in numbered if name.casefold() not in used)
        used.add(stem.casefold())
        yield stem


@contextlib.contextmanager
def _at(folder: str | Path) -> Iterator[None]:
    """Raise a DuelError that says what is wrong with the folder of --out, in place of an OSError below it."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or type(error).__name__
        if isinstance(error, FileNotFoundError):  # of mkdir: the place exists, but takes no folders, as /proc
            reason = "a folder cannot be made there"
        where = "" if str(error.filename) == str(folder) else f" ({error.filename})"
        raise DuelError(f"Nothing can be written to --out {folder}{where}: {reason}. Name another folder.") from None


def earlier(folder: str | Path) -> set[str]:
    """The files of an earlier report in a folder, as report.json lists them.

    Raises DuelError if report.json is a file of another program.
    """
    listing = Path(folder, LISTING)
    with _at(folder):
        if not listing.exists():
            return set()
    files: list[Path] = []
    with contextlib.suppress(OSError, LookupError, RecursionError, TypeError, ValueError):
        content = json.loads(listing.read_text(encoding="utf-8"))
        files = [Path(str(name)) for name in content["files"] if content["format"] == FORMAT]
    if not files:
        raise DuelError(
            f'{listing} was not written by this command (it has no "format": "{FORMAT}"), so --out {folder} was left '
            "unchanged. Name another folder, or move this file."
        )
    return {file.name for file in files if len(file.parts) == 1 and file.suffix in SUFFIXES}


def write(folder: str | Path, content: Mapping[str, Any], others: Mapping[str, str | bytes]) -> list[str]:
    """Write `content` as report.json, and the other files; remove those of an earlier report; return the names.

    Raises DuelError, and leaves the folder unchanged, if a file there does not belong to an earlier report.
    """
    names, before = [LISTING, *others], earlier(folder)
    if foreign := [name for name in names if name not in before and Path(folder, name).exists()]:
        raise DuelError(
            f"--out {folder} holds {', '.join(foreign)}, which no report there lists as its own: nothing was written. "
            "Name another folder, or move these files."
        )
    listing = strict_json.dumps({"format": FORMAT, **content, "files": names}) + "\n"
    with _at(folder):
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, text in {LISTING: listing, **others}.items():
            part = Path(folder, f"{name}.part")
            part.write_bytes(text if isinstance(text, bytes) else text.encode())
            part.replace(Path(folder, name))  # a kill leaves no half file
        for name in before - set(names):
            Path(folder, name).unlink(missing_ok=True)
    return names
