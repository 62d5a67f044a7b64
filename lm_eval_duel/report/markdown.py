"""Markdown tables, and footnotes under them. Names that others chose are text in them, never markup."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from lm_eval_duel.tables import one_line

MARKUP = re.compile(  # what would be markup: also a tag, an entity, a link, and a line of a list or heading
    r"[`*~\\]|(?<![^\W_])_|_(?![^\W_])|<(?=[A-Za-z/!?])|&(?=#?\w+;)|(?<=\])[(\[:]|^(?=[#>+-])"
)
ENTITIES = {"<": "&lt;", "&": "&amp;"}


def plain(text: str) -> str:
    """Text with the characters escaped that would be markup where they stand."""
    return MARKUP.sub(lambda found: ENTITIES.get(found[0], f"\\{found[0]}"), one_line(text))


def code(text: str) -> str:
    """Text as code; as plain text where it holds what ends code in a table."""
    return f"`{text}`" if text == one_line(text) and not set(text) & set("`|\\<") else plain(text)


class Footnotes:
    """Remarks that cells refer to by number, each written once."""

    def __init__(self) -> None:
        self.remarks: list[str] = []

    def mark(self, remark: str) -> str:
        """`[n]`, or nothing where there is nothing to say."""
        if not remark:
            return ""
        remark = plain(remark)
        if remark not in self.remarks:
            self.remarks.append(remark)
        return f"[{self.remarks.index(remark) + 1}]"

    def under(self, table: str) -> str:
        """A table with its footnotes."""
        notes = "  \n".join(f"[{n}] {remark}" for n, remark in enumerate(self.remarks, 1))
        return f"{table}\n\n{notes}" if notes else table


def bullets(notes: Sequence[str]) -> str:
    """A list of sentences without markup."""
    return listed(map(plain, notes))


def listed(lines: Iterable[str]) -> str:
    """A list of markdown."""
    return "\n".join(f"- {line}" for line in lines)


def spaced(parts: Sequence[str]) -> str:
    """Paragraphs, one blank line between any two."""
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"
