"""Aligned tables, printed by pytablewriter (which lm_eval depends on): Markdown, and plain text for the terminal.

Columns of numbers are right-aligned. Columns without a single value are left out. `csv_cell` makes cells of CSV files.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import Any

NUMBER_SIGNS = "<=*+-. ["  # may precede the digits of a number: bounds, bold, signs, footnotes
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


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table. Pipes in cells are escaped; any other markup is the caller's."""
    from pytablewriter import MarkdownTableWriter

    return _table(MarkdownTableWriter, header, rows, margin=1)


def plain_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns separated by spaces. `header` may be empty."""
    from pytablewriter import SpaceAlignedTableWriter

    return _table(SpaceAlignedTableWriter, header, rows)


def _table(writer_class: type, header: Sequence[str], rows: Sequence[Sequence[str]], **options: int) -> str:
    from pytablewriter.style import Style
    from pytablewriter.typehint import String

    columns = [list(map(one_line, column)) for column in zip(*rows, strict=True)]
    kept = [n for n, column in enumerate(columns) if any(column)]
    styles = [Style(align="right" if _is_numeric(columns[n]) else "left") for n in kept]
    writer = writer_class(
        headers=[one_line(header[n]) for n in kept] if header else [],
        value_matrix=[[columns[n][row] for n in kept] for row in range(len(rows))],
        type_hints=[String] * len(kept),  # cells are printed as they are
        column_styles=styles,
        dequote=False,
        **options,
    )
    writer.add_style_filter(lambda cell, **_: styles[cell.col] if cell.is_header_row() else None)
    return "\n".join(line.rstrip() for line in writer.dumps().splitlines())


def _is_numeric(cells: Sequence[str]) -> bool:
    """Whether every non-empty cell starts with a number."""
    return all(cell.strip(NUMBER_SIGNS)[:1].isdigit() for cell in cells if cell)
