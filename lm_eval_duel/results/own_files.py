"""Files: JSON that is read or refused with a reason, and folders in which a command replaces only its earlier files."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm_eval_duel.console import strict_json
from lm_eval_duel.errors import DuelError

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


def load(file: Path, what: str) -> Any:
    """The JSON of a file; raises DuelError if it cannot be read. `what`: what the file should be, for the message."""
    with reading(file, what):
        return json.loads(file.read_text(encoding="utf-8"))


def number(value: Any) -> float | None:
    """A number, which lm_eval may have written as text, or None for null; raises ValueError for NaN."""
    if value is not None and math.isnan(value := float(value)):
        raise ValueError("a number is NaN")
    return value


def stems(found: Iterable[tuple[str, str, str]]) -> Iterator[str]:
    """File names of tables and figures, from (task, kind, title), each different even where case is ignored."""
    found = list(found)
    used: set[str] = set()
    for name, kind, title in found:
        several = sum((name, kind) == (other, its_kind) for other, its_kind, _ in found) > 1
        subject = re.sub(r"[\s,:=/]+", "_", title.partition(": ")[2]) if several else ""
        safe = (re.sub(r"[^\w.-]", "_", part)[:MAX_LENGTH] for part in (kind, name, subject) if part)
        stem = "_".join(safe)
        numbered = (f"{stem}{'' if n == 1 else f'_{n}'}" for n in itertools.count(1))
        stem = next(name for name in numbered if name.casefold() not in used)
        used.add(stem.casefold())
        yield stem


@dataclass(frozen=True)
class OwnFiles:
    """The files that a command wrote in `folder`, which report.json or leaderboard.json lists under "files".

    `format`: the listing's entry of that name, "lm_eval_duel report" or "lm_eval_duel leaderboard".
    """

    folder: str | Path
    format: str

    @property
    def listing(self) -> str:
        return f"{self.format.split()[-1]}.json"

    def earlier(self) -> set[str]:
        """The files of an earlier run; raises DuelError if `listing` is a file of another program."""
        file = Path(self.folder, self.listing)
        if not file.exists():
            return set()
        files: list[Path] = []
        with contextlib.suppress(DuelError, LookupError, TypeError):
            content = load(file, "a listing")
            files = [Path(str(name)) for name in content["files"] if content["format"] == self.format]
        if not files:
            raise DuelError(
                f'{file} was not written by this command (it has no "format": "{self.format}"), so --out '
                f"{self.folder} was left unchanged. Name another folder, or move this file."
            )
        return {file.name for file in files if len(file.parts) == 1 and file.suffix in SUFFIXES}

    def write(self, content: Mapping[str, Any], others: Mapping[str, str | bytes]) -> list[str]:
        """Write `content` as the listing, and what it names; remove other files of an earlier run; return the names.

        Raises DuelError, and leaves the folder unchanged, if a file there does not belong to an earlier run.
        """
        names, earlier = [self.listing, *others], self.earlier()
        if foreign := [name for name in names if name not in earlier and Path(self.folder, name).exists()]:
            raise DuelError(
                f"--out {self.folder} holds {', '.join(foreign)}, which no {self.format.split()[-1]} there lists as "
                "its own: nothing was written. Name another folder, or move these files."
            )
        Path(self.folder).mkdir(parents=True, exist_ok=True)
        listing = strict_json.dumps({"format": self.format, **content, "files": names}) + "\n"
        for name, text in {self.listing: listing, **others}.items():
            part = Path(self.folder, f"{name}.part")
            part.write_bytes(text if isinstance(text, bytes) else text.encode())
            part.replace(Path(self.folder, name))  # a kill leaves no half file
        for name in earlier - set(names):
            Path(self.folder, name).unlink(missing_ok=True)
        return names
