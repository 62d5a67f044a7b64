"""A file of lines that is only appended to: an interrupted run continues it, and a full disk loses nothing."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

log = logging.getLogger("lm_eval.duel_mdm")  # lm-eval prints its own loggers only

CHUNK = 1 << 16  # bytes


class Journal:
    """Lines appended to `path`. If the file exists, a last line that was cut off is dropped first.

    Lines are written whole, so two journals may share a file. While the disk is full, lines wait in memory.
    """

    def __init__(self, path: Path):
        self.path = path
        if path.exists():
            with path.open("r+b") as file:
                file.truncate(_end_of_lines(file))
        self.file = path.open("ab", buffering=0)
        self.waiting: deque[bytes] = deque()

    def write(self, lines: Iterable[str]) -> None:
        """Append lines, after the lines that wait."""
        was_full = bool(self.waiting)
        self.waiting.extend(f"{line}\n".encode() for line in lines)
        try:
            while self.waiting:
                line = self.waiting[0]
                self.waiting[0] = line[self.file.write(line) :]
                if not self.waiting[0]:
                    self.waiting.popleft()
        except OSError as error:
            if not was_full:
                log.error(
                    "%s cannot be written (%s): the run continues, and lines wait in memory until there is room",
                    self.path,
                    error,
                )

    def flush(self) -> None:
        """Write the lines that wait, or log how many are lost if the run ends now."""
        self.write([])
        if self.waiting:
            log.error("%d lines could not be written to %s", len(self.waiting), self.path)


def _end_of_lines(file: BinaryIO) -> int:
    """The offset after the last complete line."""
    end = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - CHUNK)
        file.seek(start)
        if (newline := file.read(end - start).rfind(b"\n")) >= 0:
            return start + newline + 1
        end = start
    return 0
