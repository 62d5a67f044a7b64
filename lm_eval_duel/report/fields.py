"""Entries of a JSON file that somebody may have edited: each is checked as it is read.

A wrong one is a DuelError that names the file and the entry: `x.json: config.duel.seconds is "fast", not a number`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lm_eval_duel.errors import DuelError

SHOWN = 60  # characters of a wrong value


def load(file: Path, what: str) -> Any:
    """The JSON of a file; raises DuelError where there is none. `what` it should be, for the message."""
    try:
        return parse(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DuelError(f"{file} is not {what} ({type(error).__name__}: {error}).") from None


def parse(text: str) -> Any:
    """JSON; raises ValueError for anything else, nesting without end and numbers of thousands of digits included."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


class Fields(Mapping[str, Any]):
    """A JSON object of a file. `place`: where it stands in the file, for messages.

    `text`, `number`, `count`, `object` return an entry that is of that kind, or None (an empty object) where it is
    null or not there. Anything else raises DuelError.
    """

    def __init__(self, found: Any, file: str, place: str = ""):
        self.file, self.place = file, place
        if not isinstance(found, dict):
            raise self.wrong(None, found, "an object")
        self.found = found

    def __getitem__(self, key: str) -> Any:
        return self.found[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.found)

    def __len__(self) -> int:
        return len(self.found)

    def wrong(self, key: str | None, value: Any, wanted: str) -> DuelError:
        """The error for an entry that is not `wanted`."""
        said = json.dumps(value, default=str)
        said = said if len(said) <= SHOWN else f"{said[:SHOWN]}..."
        place = ".".join(filter(None, [self.place, key])) or "the file"
        return DuelError(f"{self.file}: {place} is {said}, not {wanted}. Write the file again, or leave it out.")

    def object(self, key: str) -> Fields:
        found = self.found.get(key)
        place = f"{self.place}.{key}" if self.place else key
        return Fields({} if found is None else found, self.file, place)

    def text(self, key: str) -> str | None:
        """A string; a number or truth value as its text."""
        found = self.found.get(key)
        if found is not None and not isinstance(found, str | int | float):
            raise self.wrong(key, found, "text")
        return None if found is None else str(found)

    def number(self, key: str) -> float | None:
        """A number that may be infinite; lm_eval writes some as text."""
        found = self.found.get(key)
        try:
            number = math.nan if isinstance(found, bool) else float(math.nan if found is None else found)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if found is not None and math.isnan(number):
            raise self.wrong(key, found, "a number")
        return None if found is None else number

    def finite(self, key: str, least: float = -math.inf) -> float | None:
        """A finite number that is not below `least`."""
        found = self.number(key)
        if found is not None and not (math.isfinite(found) and found >= least):
            raise self.wrong(key, self.found[key], "a finite number" if least < 0 else f"a number from {least:g} up")
        return found

    def count(self, key: str) -> int | None:
        """A whole number, at least 0."""
        found = self.finite(key, 0)
        if found is None:
            return None
        if found != int(found):
            raise self.wrong(key, self.found[key], "a whole number")
        return int(found)
