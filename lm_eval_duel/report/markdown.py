"""Markdown tables, and footnotes under them. Names that others chose are text in them, never markup."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence

MARKUP = re.compile(  # what would be markup: also a tag, an entity, a link, and a line of a list or heading
    r"[`*~\\]|(?<![^\W_])_|_(?![^\W_])|<(?=[A-Za-z/!?])|&(?=#?\w+;)|(?<=\])[(\[:]|^(?=[#>+-])"
)
ENTITIES = {"<": "&lt;", "&": "&amp;"}


def one_line(text: str) -> str:
    """Text without line ends and control characters."""
    return "".join(" " if unicodedata.category(c) in ("Cc", "Zl", "Zp") else c for c in str(text))


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


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A markdown table; columns of numbers are right-aligned, columns without a cell are left out."""
    cells = [[one_line(cell).replace("|", "\\|") for cell in line] for line in (head, *lines)]
    columns = [column for column in zip(*cells, strict=True) if any(column[1:])]
    wide = [max(3, *map(len, column)) for column in columns]
    right = [all(cell.strip("<=*+-. [")[:1].isdigit() for cell in column[1:] if cell) for column in columns]

    def line(cells: Sequence[str]) -> str:
        aligned = [f"{cell:{'>' if r else '<'}{w}}" for cell, w, r in zip(cells, wide, right, strict=True)]
        return f"| {' | '.join(aligned)} |"

    rule = [f"{'-' * (w - 1)}:" if r else "-" * w for w, r in zip(wide, right, strict=True)]
    first, *rest = zip(*columns, strict=True)
    return "\n".join([line(first), line(rule), *map(line, rest)])


def bullets(notes: Sequence[str]) -> str:
    """A list of sentences without markup."""
    return listed(map(plain, notes))


def listed(lines: Iterable[str]) -> str:
    """A list of markdown."""
    return "\n".join(f"- {line}" for line in lines)


def spaced(parts: Sequence[str]) -> str:
    """Paragraphs, one blank line between any two."""
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"
