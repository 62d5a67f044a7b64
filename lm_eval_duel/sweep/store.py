"""Finished work on disk: lines of JSON as they come, which the ranks of a launch share."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lm_eval_duel import journal
from lm_eval_duel.core.windows import Window
from lm_eval_duel.fingerprint import digest
from lm_eval_duel.harness.distributed import Ranks

Line = dict[str, Any]


class Journal:
    """The lines of one kind of work in `folder`. All ranks open it together, and share what they add.

    `about` is everything that defines the numbers; a different `about` has different files. Each rank writes to a file
    of its own. All files are read when the journal is opened, by any number of ranks on any number of machines.
    """

    def __init__(self, folder: Path, kind: str, about: Mapping[str, object], ranks: Ranks):
        self.ranks, stem = ranks, f"{kind}_{digest(about)}"
        self.path = folder / "parts" / (f"{stem}.rank{ranks.rank}.jsonl" if ranks.rank else f"{stem}.jsonl")
        self.added: list[Line] = []  # by this rank
        self._file: journal.Journal | None = None
        files = sorted(self.path.parent.glob(f"{stem}.*jsonl"))  # on this machine
        lines = [line for file in files for line in file.read_text(encoding="utf-8").split("\n")[:-1]]  # uncut ones
        every = dict.fromkeys(line for found in ranks.all_gather_object(lines) for line in found)
        self.lines: list[Line] = [loads(line) for line in every]

    def add(self, line: Line) -> None:
        """Write a line."""
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = journal.Journal(self.path)
        self.added.append(line)
        self._file.write([dumps(line)])

    def all(self) -> list[Line]:
        """The lines that were there and those that the ranks have added, when all have added theirs."""
        return [*self.lines, *(line for lines in self.ranks.all_gather_object(self.added) for line in lines)]


def dumps(value: Any) -> str:
    """Strict JSON; an infinite number becomes {"float": "inf"}, which `loads` restores."""
    return json.dumps(_named(value), allow_nan=False)


def loads(text: str) -> Any:
    """Read the output of `dumps`."""
    return json.loads(text, object_hook=lambda entry: float(entry["float"]) if entry.keys() == {"float"} else entry)


def _named(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _named(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_named(part) for part in value]
    return {"float": str(value)} if isinstance(value, float) and not math.isfinite(value) else value


def write(file: Path, text: str) -> None:
    """Write a file atomically."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, file)


def of_windows(windows: list[Window]) -> str:
    """A digest of windows."""
    return digest({str(n): (w.context, w.target, w.suffix, w.tail) for n, w in enumerate(windows)})
