"""Markdown text: escaped names, lists, and footnotes under tables. Names are text, never markup."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from lm_eval_duel.tables import one_line

MARKUP = re.compile(  # emphasis, code, formulas, tags, entities, links; the start of a list or heading, the end of one
    r"[`*~\\$]|(?<![^\W_])_|_(?![^\W_])|<(?=[A-Za-z/!?])|&(?=#?\w+;)|(?<=\])[(\[:]|^(?=[#>+-])|(?<!^)#(?=#*\s*$)"
)
NUMBERED = re.compile(r"^(\d+)(?=[.)](\s|$))")  # the start of a numbered list
ENTITIES = {"<": "&lt;", "&": "&amp;"}


def plain(text: str) -> str:
    """Escape the characters of a text that Markdown would read as markup."""
    text = MARKUP.sub(lambda match: ENTITIES.get(match[0], f"\\{match[0]}"), one_line(text))
    return NUMBERED.sub(r"\1\\", text)


def code(text: str) -> str:
    """Text as code, or as escaped text if it holds a character that would end the code."""
    return f"`{text}`" if text == one_line(text) and not set(text) & set("`|\\<") else plain(text)


class Footnotes:
    """Numbered remarks that table cells refer to, each printed once."""

    def __init__(self) -> None:
        self.remarks: list[str] = []

    def mark(self, remark: str) -> str:
        """`[n]` for a remark; empty for an empty one."""
        if not remark:
            return ""
        remark = plain(remark)
        if remark not in self.remarks:
            self.remarks.append(remark)
        return f"[{self.remarks.index(remark) + 1}]"

    def under(self, table: str) -> str:
        """The table followed by its footnotes."""
        notes = "  \n".join(f"[{n}] {remark}" for n, remark in enumerate(self.remarks, 1))
        return f"{table}\n\n{notes}" if notes else table


def bullets(notes: Sequence[str]) -> str:
    """A list of escaped sentences."""
    return listed(map(plain, notes))


def listed(lines: Iterable[str]) -> str:
    """A list of Markdown lines."""
    return "\n".join(f"- {line}" for line in lines)


def spaced(parts: Sequence[str]) -> str:
    """Paragraphs separated by blank lines."""
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"
