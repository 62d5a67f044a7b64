"""Finished work on disk: journal lines as they come, settings once they are complete."""

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

ALONE = Ranks()


class Journal:
    """The lines of a file of JSON lines in `folder`. All ranks open and merge it together.

    `about` is everything that defines the numbers; a different `about` has a different file. Each rank writes what it
    computes to a file of its own; `merge` moves it to the file that a single process writes, the first rank's. What is
    left of ranks that were stopped before is moved when the journal is opened, by any number of processes.
    """

    def __init__(self, folder: Path, kind: str, about: Mapping[str, object], ranks: Ranks = ALONE):
        self.path, self.ranks = folder / "parts" / f"{kind}_{digest(about)}.jsonl", ranks
        self.added: list[dict[str, Any]] = []  # by this rank
        self._file: journal.Journal | None = None
        lines = [] if ranks.rank else self._collect()
        self.lines: list[dict[str, Any]] = ranks.all_gather_object(lines)[0]  # a rank that is ahead writes only later

    def add(self, line: dict[str, Any]) -> None:
        """Write a line."""
        if self._file is None:
            own = f"{self.path.stem}.rank{self.ranks.rank}.jsonl" if self.ranks.rank else self.path.name
            self._file = _open(self.path.with_name(own))
        self.lines.append(line)
        self.added.append(line)
        self._file.write([dumps(line)])

    def merge(self) -> list[dict[str, Any]]:
        """The lines that the other ranks have added, when all have added theirs. Nothing can be added afterwards."""
        shares = self.ranks.all_gather_object(self.added)
        theirs = [line for rank, lines in enumerate(shares) if rank != self.ranks.rank for line in lines]
        if self.ranks.rank == 0:
            self._take([dumps(line) for line in theirs], self._of_ranks())
        self.lines += theirs
        return theirs

    def _collect(self) -> list[dict[str, Any]]:
        """All lines on disk, in the file of the first rank; none twice."""
        files = self._of_ranks()
        if files or self.path.exists():
            self._file = _open(self.path)
        self._take([line for file in files for line in _whole_lines(file)], files)
        return [] if self._file is None else [loads(line) for line in dict.fromkeys(_whole_lines(self.path))]

    def _take(self, lines: list[str], files: list[Path]) -> None:
        """Add lines to the first rank's file and remove the `files` of other ranks that hold them."""
        if lines:
            self._file = self._file or _open(self.path)
            self._file.write(lines)
        if self._file is None or not self._file.waiting:  # else the disk is full
            for file in files:
                file.unlink(missing_ok=True)

    def _of_ranks(self) -> list[Path]:
        return sorted(self.path.parent.glob(f"{self.path.stem}.rank*.jsonl"))


def _open(path: Path) -> journal.Journal:
    path.parent.mkdir(parents=True, exist_ok=True)
    return journal.Journal(path)


def _whole_lines(path: Path) -> list[str]:
    """The lines of a file, without a last one that was cut off."""
    return path.read_text(encoding="utf-8").split("\n")[:-1]


def dumps(value: Any, indent: int | None = None) -> str:
    """Strict JSON; an infinite number becomes {"float": "inf"}, which `loads` restores."""
    return json.dumps(_named(value), indent=indent, allow_nan=False)


def loads(text: str) -> Any:
    """Read the output of `dumps`."""
    return json.loads(text, object_hook=lambda entry: float(entry["float"]) if entry.keys() == {"float"} else entry)


def _named(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _named(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_named(part) for part in value]
    return {"float": str(value)} if isinstance(value, float) and not math.isfinite(value) else value


def setting_file(folder: Path, inputs: Mapping[str, object]) -> Path:
    """The file of the finished setting with these inputs."""
    return folder / "settings" / f"{digest(inputs)}.json"


def finished(folder: Path, inputs: Mapping[str, object]) -> dict[str, Any] | None:
    """The finished setting with these inputs, if there is one."""
    file = setting_file(folder, inputs)
    return loads(file.read_text(encoding="utf-8")) if file.exists() else None


def write(file: Path, text: str) -> None:
    """Write a file atomically."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, file)


def of_windows(windows: list[Window]) -> str:
    """A digest of windows."""
    return digest({str(n): (w.context, w.target, w.suffix, w.tail) for n, w in enumerate(windows)})
