r"""Tables and their numbers: how a number is printed, and one table as text, Markdown, LaTeX or CSV.

Numbers are formatted here and nowhere else. The LaTeX is a tabular for booktabs, with the remarks of its cells below
it; columns that belong together stand below a common heading. It takes `\usepackage{booktabs}` and nothing else.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import math
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

from tabulate import tabulate

from lm_eval_duel.console.command_line import LARGE, csv_cell, is_numeric, one_line, plain_table

WORDS = {
    "token_perplexity": "perplexity per token",
    "perplexity": "perplexity per document",
    "word_perplexity": "perplexity per word",
    "byte_perplexity": "perplexity per byte",
    "bits_per_byte": "bits per byte",
}
LEVEL = "95 % interval"
MINUS = "\u2212"  # between the names of a difference

# ---------------------------------------------------------------- numbers


def form_of(metric: str) -> str:
    """The format of a metric's values: enough decimals to distinguish models."""
    return ".4f" if metric in ("bits_per_byte", "byte_perplexity") else ".2f"


def number(
    value: float | None, form: str = ".2f", error: float | None = None, bound: bool = False, unsure: bool = False
) -> str:
    """A number with its bound and standard error, such as `≤ 12.34 ± 0.05`; empty for None.

    `form`: `.2f`, `+.4f`, `.3g`, `,d` ...; there is no negative zero, and only numbers from 1e12 on have an exponent.
    `unsure`: it has an error, which is `± ?` if it is not known.
    """
    if value is None:
        return ""
    if form[-1] != "d" and LARGE <= abs(value) < math.inf:
        form = ".4e"
    if form[-1] == "g" and abs(value) >= 100:
        form = ",.0f"
    if form[-1] == "f":
        _, _, decimals = form[:-1].rpartition(".")
        value = round(value, int(decimals)) + 0.0  # -0.0 + 0.0 is 0.0
    sign = "≤ " if bound else ""
    text = f"{sign}{value:{form}}"
    if unsure and error is None:
        return f"{text} ± ?"
    return text + plus_minus(error, form)


def plus_minus(error: float | None, form: str = ".2f") -> str:
    """` ± ` and a standard error in the format of its value; one digit if it is smaller than the shown decimals."""
    if error is None:
        return ""
    text = number(error, form.lstrip("+"))
    only_zeros = not text.strip("0.")
    if only_zeros:
        text = f"{error:.1g}"
    return f" ± {text}"


def span(interval: Sequence[float] | None, form: str) -> str:
    """The ends of an interval; empty without one."""
    return "" if interval is None else " to ".join(number(end, form) for end in interval)


def percent(share: float) -> str:
    """A share in per cent."""
    return f"{share:.1%}"


# ---------------------------------------------------------------- cells and remarks


class Bold(str):
    """A cell that is printed in bold."""


class Head(str):
    """A heading that shares a line above it, `group`, with its neighbours where there are two rows of headings."""

    group: str
    short: str  # the heading below `group`

    def __new__(cls, text: str, group: str, short: str) -> Head:
        head = super().__new__(cls, text)
        head.group = group
        head.short = short
        return head


def heading(head: str) -> tuple[str, str]:
    """The upper and the lower part of a heading."""
    return (head.group, head.short) if isinstance(head, Head) else ("", head)


@dataclasses.dataclass(frozen=True)
class Note:
    """A remark: a fact for every reader, and advice to the person who runs the command. Either may be empty."""

    fact: str = ""
    advice: str = ""

    def __str__(self) -> str:
        if not (self.fact and self.advice):
            return self.fact or self.advice
        end = "." if self.fact.endswith(".") else ""
        return f"{self.fact.removesuffix('.')} ({self.advice}){end}"

    def __bool__(self) -> bool:
        return bool(self.fact or self.advice)

    def after(self, start: str) -> Note:
        """The same remark, its fact behind another text; nothing stays nothing."""
        return Note(start + self.fact, self.advice) if self else self

    @classmethod
    def joined(cls, notes: Iterable[Note]) -> Note:
        """Several remarks as one."""
        facts = []
        advice = []
        for note in notes:
            facts.append(note.fact)
            advice.append(note.advice)
        return cls("; ".join(filter(None, facts)), "; ".join(filter(None, advice)))


Cell = str | tuple[str, Note | str] | None  # a text, or a text and a remark for below the table
Columns = dict[str, Callable[[Any], Cell]]  # the cells of a table by their heads


def split(cell: Cell) -> tuple[str, Note]:
    """The text and the remark of a cell."""
    if not isinstance(cell, tuple):
        return cell or "", Note()
    text, remark = cell
    return text, remark if isinstance(remark, Note) else Note(remark)


# ---------------------------------------------------------------- tables


@dataclasses.dataclass(frozen=True)
class Table:
    """Heads and rows of text. `remarks`: the remarks of cells by their mark, which the cells end with.

    `about`: a sentence on the whole table, which stands below it. `bold`: what bold cells are.
    """

    title: str
    heads: list[str]
    rows: list[list[str]]
    remarks: dict[str, Note]
    about: str = ""
    bold: str = ""

    @classmethod
    def from_records(
        cls, title: str, records: Iterable[Any], columns: Columns, about: str = "", bold: str = ""
    ) -> Table:
        """A row for each record; a column says what it shows of one. Columns without a single text are left out."""
        marks: dict[Note, str] = {}
        rows: list[list[str]] = []
        for record in records:
            row = []
            for column in columns.values():
                text, remark = split(column(record))
                mark = ""
                if remark:  # equal remarks have one mark
                    mark = marks.setdefault(remark, f"[{len(marks) + 1}]")
                marked = one_line(f"{text} {mark}".strip())
                row.append(type(text)(marked))  # bold stays bold
            rows.append(row)

        filled = [any(texts) for texts in zip(*rows, strict=True)]  # of each column
        heads = list(itertools.compress(columns, filled))
        shown_rows = [list(itertools.compress(row, filled)) for row in rows]
        remarks = {mark: remark for remark, mark in marks.items()}
        return cls(title, heads, shown_rows, remarks, about, bold)

    @property
    def numeric(self) -> list[bool]:
        """For each column, True if it holds numbers, which stand to the right."""
        return [is_numeric(column) for column in zip(*self.rows, strict=True)]

    @property
    def sides(self) -> list[str]:
        """The side of its column that each text stands on."""
        return ["right" if right else "left" for right in self.numeric]

    @property
    def about_with_bold(self) -> str:
        """The sentences below the table, in forms that show bold cells."""
        has_bold = any(isinstance(text, Bold) for text in itertools.chain(*self.rows))
        return " ".join(filter(None, [self.about, self.bold if has_bold else ""]))

    def text(self) -> str:
        """The table for the terminal."""
        remarks = "\n".join(f"{mark} {remark}" for mark, remark in self.remarks.items())
        table = plain_table(self.heads, self.rows)
        return "\n\n".join(filter(None, [table, self.about, remarks]))

    def markdown(self) -> str:
        """The table in Markdown. Names are text, never markup."""
        table = ""
        if self.rows:
            rows = [list(map(_markdown_cell, row)) for row in self.rows]
            heads = list(map(_markdown_cell, self.heads))
            table = tabulate(rows, heads, "pipe", disable_numparse=True, colalign=self.sides)
        remarks = []
        for mark, remark in self.remarks.items():
            remarks.append(f"{mark} {escape(str(remark))}")
        with_breaks = "  \n".join(remarks)  # two spaces before a line end are a line break
        return "\n\n".join(filter(None, [table, escape(self.about_with_bold), with_breaks]))

    def latex(self, sizes: str = "", footnote: str = "") -> str:
        """The file of the table in LaTeX. A model's name stands in its first row.

        `sizes`: of what the table is about, for the comment at its start. `footnote`: a line below the table.
        """
        cells = []
        model = None
        for row in self.rows:
            cells_of_row = [_latex_cell(text, self.remarks) for text in row]
            if row[0] == model:
                cells_of_row[0] = ""
            model = row[0]
            cells.append(cells_of_row)
        columns = "".join(side[0] for side in self.sides)  # l or r
        comment = "; ".join(filter(None, [self.title, sizes]))
        lines = [
            f"% {one_line(comment)}",
            f"\\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            *_latex_headings(self.heads, self.numeric),
            r"\midrule",
            *_latex_rows(cells, self.numeric),
            r"\bottomrule",
            r"\end{tabular}",
            *_latex_footnotes(self.about_with_bold, self.remarks, footnote),
        ]
        return "\n".join(lines) + "\n"


def csv_text(lines: Sequence[Mapping[str, Any]]) -> str:
    """CSV with a column for each key of any line; numbers are unrounded."""
    out = io.StringIO()
    heads = dict.fromkeys(itertools.chain.from_iterable(lines))
    writer = csv.DictWriter(out, list(heads), lineterminator="\n")
    writer.writeheader()
    for line in lines:
        cells = {key: csv_cell(value) for key, value in line.items()}
        writer.writerow(cells)
    return out.getvalue()


# ---------------------------------------------------------------- Markdown

MARKUP = re.compile(
    r"""
    [`*~\\$]                        # code, emphasis, escapes, formulas
    | (?<![^\W_])_ | _(?![^\W_])    # an underscore, unless there are letters on both sides
    | <(?=[A-Za-z/!?])              # a tag
    | &(?=\#?\w+;)                  # an entity
    | (?<=\])[(\[:]                 # a link
    | ^(?=[\#>+-])                  # the start of a heading, a quotation or a list
    | (?<!^)\#(?=\#*\s*$)           # the end of a heading
    """,
    re.VERBOSE,
)
NUMBERED = re.compile(r"^(\d+)(?=[.)](\s|$))")  # the start of a numbered list
ENTITIES = {"<": "&lt;", "&": "&amp;"}


def escape(text: str) -> str:
    """Text with the characters escaped that Markdown would interpret."""
    text = MARKUP.sub(_escaped, one_line(text))
    return NUMBERED.sub(r"\1\\", text)


def _escaped(match: re.Match[str]) -> str:
    """The escape of a character; of an empty match, at the start of a line, a backslash before what follows."""
    return ENTITIES.get(match[0], f"\\{match[0]}")


def _markdown_cell(text: str) -> str:
    # a sign before a number starts no list in a cell, and a bar would end the cell
    shown = re.sub(r"^\\(?=[+-]\d)", "", escape(text)).replace("|", r"\|")
    return f"**{shown}**" if isinstance(text, Bold) else shown


def bullets(notes: Iterable[str]) -> str:
    """A list of escaped sentences."""
    return "\n".join(f"- {escape(note)}" for note in notes)


def spaced(parts: Iterable[str]) -> str:
    """Paragraphs separated by blank lines."""
    paragraphs = []
    for part in parts:
        if part:
            paragraphs.append(part.strip("\n"))
    return "\n\n".join(paragraphs) + "\n"


# ---------------------------------------------------------------- LaTeX

ESCAPED = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    **{"^": r"\^{}", "~": r"\textasciitilde{}", "\\": r"\textbackslash{}"},
    **{"<": r"\ensuremath{<}", ">": r"\ensuremath{>}", "≤": r"$\leq$", "±": r"$\pm$"},
    MINUS: "$-$",
}
MARK = re.compile(r" ?\[(\d+)\]$")  # of a remark, at the end of a cell
SIGN = re.compile(r"(?<![\w.-])(-)(?=\d)")  # a minus before a number


def latex_text(text: str) -> str:
    """A text with the characters escaped that LaTeX would interpret, and with minus signs."""
    shown = []
    for piece in SIGN.split(one_line(text)):
        if piece == "-":
            shown.append("$-$")
            continue
        for character in piece:
            shown.append(ESCAPED.get(character, character))
    return re.sub(r"\bDUEL\b", r"\\textsc{DUEL}", "".join(shown))


def _latex_cell(text: str, remarks: Container[str]) -> str:
    """A cell: its text, in bold if it is so in other forms, and the number of its remark."""
    plain = text
    superscript = ""
    mark = MARK.search(text)
    if mark is not None and mark[0].strip() in remarks:
        plain = text[: mark.start()]
        superscript = f"\\textsuperscript{{{mark[1]}}}"
    shown = latex_text(plain)
    if isinstance(text, Bold):
        shown = f"\\textbf{{{shown}}}"
    return shown + superscript


def _latex_headings(heads: Sequence[str], numeric: Sequence[bool]) -> list[str]:
    """One row of headings, or two if some columns share one."""
    lower = []
    groups = []
    for head, right in zip(heads, numeric, strict=True):
        group, short = heading(head)
        groups.append(group)
        shown = latex_text(short)
        lower.append(f"\\multicolumn{{1}}{{c}}{{{shown}}}" if right else shown)  # centred above numbers
    if not any(groups):
        return [_latex_line(lower)]

    upper = []
    rules = []
    first = 1  # the number of a column, as \cmidrule counts them
    for group, members in itertools.groupby(groups):
        count = len(list(members))
        last = first + count - 1
        if group:
            upper.append(f"\\multicolumn{{{count}}}{{c}}{{{latex_text(group)}}}")
            rules.append(f"\\cmidrule(lr){{{first}-{last}}}")
        else:
            upper += [""] * count
        first = last + 1
    return [_latex_line(upper), " ".join(rules), _latex_line(lower)]


def _latex_rows(cells: Sequence[Sequence[str]], numeric: Sequence[bool]) -> list[str]:
    """The lines of cells, padded to columns."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        padded = []
        for cell, width, right in zip(row, widths, numeric, strict=True):
            padded.append(cell.rjust(width) if right else cell.ljust(width))
        lines.append(_latex_line(padded))
    return lines


def _latex_line(cells: Sequence[str]) -> str:
    text = " & ".join(cells)
    # a bracket or star at its start would be an argument of the \\ before it
    return re.sub(r"^( *)([\[*])", r"\1{\2}", text) + r" \\"


def _latex_footnotes(about: str, remarks: Mapping[str, Note], footnote: str) -> list[str]:
    """The lines below a tabular: what it is about, the facts of its remarks, for readers, and a footnote."""
    texts = []
    if about:
        texts.append(latex_text(about))
    for mark, note in remarks.items():
        mark_number = mark.strip("[]")
        texts.append(f"\\textsuperscript{{{mark_number}}}~{latex_text(note.fact)}")
    if footnote:
        texts.append(latex_text(footnote))
    if not texts:
        return []
    return [
        r"\par\smallskip",
        r"\begin{minipage}{\linewidth}\footnotesize",
        " \\\\\n".join(texts),
        r"\end{minipage}",
    ]
