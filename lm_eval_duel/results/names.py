"""File names of a report: safe on any file system, and unique."""

from __future__ import annotations

import re
from collections.abc import Iterable

MAX_LENGTH = 100  # characters of a task's name in a file name


def safe_name(name: str) -> str:
    """A task's name as part of a file name."""
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in name)[:MAX_LENGTH]


def free(stem: str, suffix: str, taken: Iterable[str]) -> str:
    """A file name that is not taken, ignoring case: replacing characters may make two tasks' names equal."""
    used = {name.casefold() for name in taken}
    number, name = 1, f"{stem}{suffix}"
    while name.casefold() in used:
        number += 1
        name = f"{stem}_{number}{suffix}"
    return name


def subject(title: str) -> str:
    """A title such as `demo-mdm, block 4, cache=dual` as part of a file name: `demo-mdm_block_4_cache_dual`."""
    return safe_name(re.sub(r"[\s,:=/]+", "_", title))
