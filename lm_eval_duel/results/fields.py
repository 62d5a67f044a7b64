"""Checked access to the entries of a JSON file, which somebody may have edited.

A wrong entry raises a DuelError that names the file and the entry:
`x.json: config.duel.seconds is "fast", not a number`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lm_eval_duel.errors import DuelError

MAX_SHOWN = 60  # characters of a wrong value in a message


def load(file: Path, what: str) -> Any:
    """The JSON of a file; raises DuelError if it cannot be read. `what`: what the file should be, for the message."""
    try:
        return parse(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DuelError(f"{file} is not {what} ({type(error).__name__}: {error}).") from None


def parse(text: str) -> Any:
    """Parse JSON; raises ValueError for anything else, including endless nesting and numbers of thousands of digits."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


class Fields(Mapping[str, Any]):
    """A JSON object in a file. `place`: its path in the file, for messages.

    `text`, `number`, `count` and `object` return an entry of that type, or None (an empty object) if it is null or
    missing. Anything else raises DuelError.
    """

    def __init__(self, value: Any, file: str, place: str = ""):
        self.file, self.place = file, place
        if not isinstance(value, dict):
            raise self.wrong(None, value, "an object")
        self.entries = value

    def __getitem__(self, key: str) -> Any:
        return self.entries[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def wrong(self, key: str | None, value: Any, wanted: str) -> DuelError:
        """The error for an entry that is not `wanted`."""
        shown = json.dumps(value, default=str)
        shown = shown if len(shown) <= MAX_SHOWN else f"{shown[:MAX_SHOWN]}..."
        place = ".".join(filter(None, [self.place, key])) or "the file"
        return DuelError(f"{self.file}: {place} is {shown}, not {wanted}. Write the file again, or leave it out.")

    def object(self, key: str) -> Fields:
        value = self.entries.get(key)
        place = f"{self.place}.{key}" if self.place else key
        return Fields({} if value is None else value, self.file, place)

    def list(self, key: str) -> list[Any]:
        value = self.entries.get(key)
        if value is not None and not isinstance(value, list):
            raise self.wrong(key, value, "a list")
        return value or []

    def text(self, key: str) -> str | None:
        """A string; numbers and booleans are converted."""
        value = self.entries.get(key)
        if value is not None and not isinstance(value, str | int | float):
            raise self.wrong(key, value, "text")
        return None if value is None else str(value)

    def number(self, key: str) -> float | None:
        """A number that may be infinite; lm_eval writes some as text."""
        value = self.entries.get(key)
        if value is None:
            return None
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if math.isnan(number):
            raise self.wrong(key, value, "a number")
        return number

    def finite(self, key: str, least: float = -math.inf) -> float | None:
        """A finite number, `least` or more."""
        value = self.number(key)
        if value is not None and not (math.isfinite(value) and value >= least):
            raise self.wrong(key, self.entries[key], "a finite number" if least < 0 else f"a number from {least:g} up")
        return value

    def count(self, key: str) -> int | None:
        """An integer, 0 or more."""
        value = self.finite(key, 0)
        if value is None:
            return None
        if value != int(value):
            raise self.wrong(key, self.entries[key], "a whole number")
        return int(value)
