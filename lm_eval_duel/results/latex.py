r"""Tables in LaTeX: a tabular for booktabs, and below it the remarks of its cells.

Columns that belong together stand below a common heading. Rules have the names of the paper. The file takes
`\usepackage{booktabs}` and nothing else.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Container, Sequence

from lm_eval_duel.console.command_line import is_numeric, one_line
from lm_eval_duel.results.table import Bold, Table, heading
from lm_eval_duel.rules.tables import adaptive, kind, label, without_defaults

ESCAPED = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    **{"^": r"\^{}", "~": r"\textasciitilde{}", "\\": r"\textbackslash{}"},
    **{"<": r"\ensuremath{<}", ">": r"\ensuremath{>}", "≤": r"$\leq$", "±": r"$\pm$", "†": r"$^\dagger$"},
}
GREEK = {"mu": "\u03bc", "nu": "\u03bd", "gamma": "\u03b3"}
ESCAPED |= {letter: rf"$\{name}$" for name, letter in GREEK.items()}
MARK = re.compile(r" ?\[(\d+)\]$")  # of a remark, at the end of a cell
MINUS = re.compile(r"(?<![\w.-])-(?=\d)|(?<= )-(?= )")  # a sign, and a difference of two names


def tabular(table: Table) -> str:
    """The file of a table. A model's name stands in its first row."""
    rows = [list(row) for row in table.rows]
    if "rule" in table.heads:
        at = table.heads.index("rule")
        for row in rows:
            row[at] = paper_name(row[at])
    numeric = [is_numeric(column) for column in zip(*table.rows, strict=True)]
    cells = [[_cell(text, table.remarks) for text in row] for row in rows]
    for n in range(len(rows) - 1, 0, -1):
        if rows[n][0] == rows[n - 1][0]:
            cells[n][0] = ""
    lines = [
        f"% {one_line(table.title)}",
        f"\\begin{{tabular}}{{{''.join('r' if right else 'l' for right in numeric)}}}",
        r"\toprule",
        *_headings(table.heads, numeric),
        r"\midrule",
        *_aligned(cells, numeric),
        r"\bottomrule",
        r"\end{tabular}",
    ]
    if table.remarks:
        remarks = [
            f"\\textsuperscript{{{mark.strip('[]')}}}~{escape(note.fact)}" for mark, note in table.remarks.items()
        ]
        lines += [r"\par\smallskip", r"\begin{minipage}{\linewidth}\footnotesize", " \\\\\n".join(remarks)]
        lines += [r"\end{minipage}"]
    return "\n".join(lines) + "\n"


def _headings(heads: Sequence[str], numeric: Sequence[bool]) -> list[str]:
    """One row of headings, or two if some columns share one."""
    groups = [heading(head) for head in heads]
    lower = [_centred(below, right) for (_, below), right in zip(groups, numeric, strict=True)]
    if not any(above for above, _ in groups):
        return [_line(lower)]
    upper, rules, first = [], [], 1
    for above, members in itertools.groupby(group for group, _ in groups):
        count = len(list(members))
        if above:
            upper.append(f"\\multicolumn{{{count}}}{{c}}{{{escape(above)}}}")
            rules.append(f"\\cmidrule(lr){{{first}-{first + count - 1}}}")
        else:
            upper += [""] * count
        first += count
    return [_line(upper), " ".join(rules), _line(lower)]


def _centred(head: str, right: bool) -> str:
    """A heading above a column of numbers is centred."""
    return f"\\multicolumn{{1}}{{c}}{{{escape(head)}}}" if right else escape(head)


def _aligned(cells: Sequence[Sequence[str]], numeric: Sequence[bool]) -> list[str]:
    """The lines of cells, padded to columns."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        padded = []
        for cell, width, right in zip(row, widths, numeric, strict=True):
            padded.append(cell.rjust(width) if right else cell.ljust(width))
        lines.append(_line(padded))
    return lines


def _line(cells: Sequence[str]) -> str:
    text = " & ".join(cells)
    # a bracket or star at its start would be an argument of the \\ before it
    return re.sub(r"^( *)([\[*])", r"\1{\2}", text) + r" \\"


def _cell(text: str, remarks: Container[str]) -> str:
    """A cell: its text, in bold if it is so in other forms, and the number of its remark."""
    mark = MARK.search(text)
    if mark is None or mark[0].strip() not in remarks:
        shown = escape(text)
        return f"\\textbf{{{shown}}}" if isinstance(text, Bold) else shown
    return f"{escape(text[: mark.start()])}\\textsuperscript{{{mark[1]}}}"


def escape(text: str) -> str:
    """A text with the characters escaped that LaTeX would interpret, and with minus signs."""
    pieces = []
    for piece in re.split(f"({MINUS.pattern})", one_line(text)):
        pieces.append("$-$" if piece == "-" else "".join(ESCAPED.get(character, character) for character in piece))
    shown = re.sub(r"\bDUEL\b", r"\\textsc{DUEL}", "".join(pieces))
    return re.sub(r"(?<=, )([a-z])=(?=[\d.])", r"$\1$=", shown)


def paper_name(text: str) -> str:
    """A rule as the paper prints it, with a dagger if its number of steps depends on the text."""
    _, *parameters = without_defaults(text).split(":")
    if not kind(text).label:  # module:Name
        return text
    pairs = (parameter.partition("=") for parameter in parameters)
    shown = [f"{GREEK.get(key, key)}={value}" for key, _, value in pairs]
    return ", ".join([label(text) + ("†" if adaptive(text) else ""), *shown])
