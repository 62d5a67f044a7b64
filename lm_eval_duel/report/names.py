"""Names of a report's files: safe for any file system, each given once."""

from __future__ import annotations

from collections.abc import Iterable

LONGEST = 100  # characters of a task's name in a file name


def safe_name(name: str) -> str:
    """A task's name as part of a file name."""
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in name)[:LONGEST]


def free(stem: str, suffix: str, taken: Iterable[str]) -> str:
    """A file name that is not taken yet, capitals aside: two tasks may be one name where characters are replaced."""
    used = {name.casefold() for name in taken}
    number, name = 1, f"{stem}{suffix}"
    while name.casefold() in used:
        number += 1
        name = f"{stem}_{number}{suffix}"
    return name
