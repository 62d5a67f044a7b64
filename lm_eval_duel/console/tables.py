"""Aligned tables for the terminal.

Columns of numbers are right-aligned. Columns without a single value are left out. `csv_cell` makes cells of CSV files.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

NUMBER_SIGNS = "≤~*+-. ["  # may precede the digits of a number: bounds, bold, signs, footnotes
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet reads a text that starts like this as a formula


def one_line(text: str) -> str:
    """`text` with line ends, control characters and lone surrogates replaced by spaces."""
    return "".join(" " if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") else c for c in str(text))


def csv_cell(value: Any) -> Any:
    """A cell of CSV: no text that a spreadsheet would run as a formula; numbers as they are."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, str):
        return value
    return one_line(f"'{value}" if value.startswith(FORMULA) else value)


def plain_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns separated by spaces. `header` may be empty."""
    aligned = [_aligned(column) for column in _columns(header or [""] * len(rows[0]), rows)]
    lines = ["  ".join(line).rstrip() for line in zip(*aligned, strict=True)]
    return "\n".join(lines if header else lines[1:])


def _columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """The columns with a value, each with its head, as lines of text."""
    columns = [list(map(one_line, column)) for column in zip(header, *rows, strict=True)]
    return [column for column in columns if any(column[1:])]


def _aligned(column: Sequence[str]) -> list[str]:
    """The cells of a column in its width: numbers to the right."""
    width, right = max(map(_width, column)), is_numeric(column[1:])
    spaces = [" " * (width - _width(cell)) for cell in column]
    return [space + cell if right else cell + space for cell, space in zip(column, spaces, strict=True)]


def _width(text: str) -> int:
    """The width of a text in terminal columns."""
    return sum(0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF") for c in text)


def is_numeric(cells: Iterable[str]) -> bool:
    """True if every non-empty cell starts with a number."""
    return all(cell.strip(NUMBER_SIGNS)[:1].isdigit() for cell in cells if cell)
