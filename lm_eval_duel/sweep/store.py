"""Finished work on disk: journal lines as they come, settings once they are complete."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lm_eval_duel import journal
from lm_eval_duel.engine.windows import Window
from lm_eval_duel.fingerprint import digest


class Journal(journal.Journal):
    """A journal of JSON lines in `folder`, with the `lines` that it holds.

    `about` is everything that defines the numbers; a different `about` has a different file.
    """

    def __init__(self, folder: Path, kind: str, about: Mapping[str, object]):
        path = folder / "parts" / f"{kind}_{digest(about)}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        super().__init__(path)
        self.lines: list[dict[str, Any]] = [loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

    def add(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        self.write([dumps(line)])


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
