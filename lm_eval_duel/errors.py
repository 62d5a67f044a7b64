"""The errors a user can meet, and the nearest name for a misspelt one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DuelError(ValueError):
    """Something the user asked for cannot be done; the message says what to do instead.

    `window`: the number of the window that it is about, if it is about one.
    """

    def __init__(self, message: str, window: int | None = None):
        super().__init__(message)
        self.window = window


class RuleStalled(DuelError):
    """A rule picked nothing, or picked a position that is not hidden."""


class NotFinite(DuelError):
    """The network returned NaN or infinite logits; `lane` is the lane's number in its batch."""

    def __init__(self, message: str, window: int | None = None, lane: int | None = None):
        super().__init__(message, window)
        self.lane = lane


def another_block(trained: int, block: object) -> DuelError:
    """The error for a block that is not the one a block-causal network was trained on."""
    return DuelError(
        f"This network is block-causal, trained on blocks of {trained}: a cell sees its own block and those before it, "
        f"so block={block} would be another network. Use block={trained} or block=auto."
    )


def unknown(what: str, name: object, known: Iterable[str]) -> DuelError:
    """The error for a name that is not known: the nearest one and the whole list."""
    known = sorted(known)
    near = difflib.get_close_matches(str(name), known, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    return DuelError(f"Unknown {what} '{name}'.{hint} Known: {', '.join(known)}.")
