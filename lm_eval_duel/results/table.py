"""Tables of text, for the terminal and in Markdown. Numbers are formatted here."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tabulate import tabulate

from lm_eval_duel.console.command_line import LARGE, csv_cell, is_numeric, one_line, plain_table

WORDS = {
    "token_perplexity": "perplexity per token",
    "perplexity": "perplexity",
    "word_perplexity": "perplexity per word",
    "byte_perplexity": "perplexity per byte",
    "bits_per_byte": "bits per byte",
}
LEVEL = "95 % interval"

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
        value = round(value, int(form[:-1].rpartition(".")[2])) + 0.0
    text = f"{'≤ ' if bound else ''}{value:{form}}"
    return f"{text} ± ?" if unsure and error is None else text + plus_minus(error, form)


def plus_minus(error: float | None, form: str = ".2f") -> str:
    """` ± ` and a standard error in the format of its value; one digit if it is smaller than the shown decimals."""
    if error is None:
        return ""
    text = number(error, form.lstrip("+"))
    return f" ± {text if text.strip('0.') else format(error, '.1g')}"


def span(interval: Sequence[float] | None, form: str) -> str:
    """The ends of an interval; empty without one."""
    return "" if interval is None else " to ".join(number(end, form) for end in interval)


# ---------------------------------------------------------------- tables


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
        notes = [note for note in notes if note]
        facts = [note.fact for note in notes if note.fact]
        advice = [note.advice for note in notes if note.advice]
        return cls("; ".join(facts), "; ".join(advice))


Cell = str | tuple[str, Note | str] | None  # a text, or a text and a remark for below the table


def split(cell: Cell) -> tuple[str, Note]:
    """The text and the remark of a cell."""
    text, remark = cell if isinstance(cell, tuple) else (cell or "", "")
    return text, remark if isinstance(remark, Note) else Note(remark)


@dataclasses.dataclass(frozen=True)
class Table:
    """Heads and rows of text. `remarks`: the remarks of cells by their mark, which the cells end with."""

    title: str
    heads: list[str]
    rows: list[list[str]]
    remarks: dict[str, Note]

    @classmethod
    def of(cls, title: str, records: Iterable[Any], columns: Mapping[str, Callable[[Any], Cell]]) -> Table:
        """A row for each record; a column says what it shows of one. Columns without a single text are left out."""
        marks: dict[Note, str] = {}
        rows: list[list[str]] = []
        for record in records:
            rows.append([])
            for column in columns.values():
                text, remark = split(column(record))
                mark = marks.setdefault(remark, f"[{len(marks) + 1}]") if remark else ""
                rows[-1].append(type(text)(one_line(f"{text} {mark}".strip())))
        kept = [n for n in range(len(columns)) if any(row[n] for row in rows)]
        heads = list(columns)
        return cls(
            title,
            [heads[n] for n in kept],
            [[row[n] for n in kept] for row in rows],
            {mark: remark for remark, mark in marks.items()},
        )

    def drawn(self, form: str, cell: Callable[[str], str]) -> str:
        """The table in a form of `tabulate`, numbers to the right. `cell`: a text in that form."""
        if not self.rows:
            return ""
        rows = [list(map(cell, row)) for row in self.rows]
        align = ["right" if is_numeric(column) else "left" for column in zip(*self.rows, strict=True)]
        return tabulate(rows, list(map(cell, self.heads)), form, disable_numparse=True, colalign=align)

    def text(self) -> str:
        """The table for the terminal."""
        remarks = "\n".join(f"{mark} {remark}" for mark, remark in self.remarks.items())
        return "\n\n".join(filter(None, [plain_table(self.heads, self.rows), remarks]))

    def markdown(self) -> str:
        """Names are text, never markup."""
        shown = self.drawn("pipe", lambda text: f"**{_cell(text)}**" if isinstance(text, Bold) else _cell(text))
        remarks = "  \n".join(f"{mark} {escape(str(remark))}" for mark, remark in self.remarks.items())
        return "\n\n".join(filter(None, [shown, remarks]))


def csv_text(lines: Sequence[Mapping[str, Any]]) -> str:
    """CSV with a column for each key of any line; numbers are unrounded."""
    out, heads = io.StringIO(), dict.fromkeys(key for line in lines for key in line)
    writer = csv.DictWriter(out, list(heads), lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: csv_cell(value) for key, value in line.items()} for line in lines)
    return out.getvalue()


# ---------------------------------------------------------------- Markdown

MARKUP = re.compile(  # emphasis, code, formulas, tags, entities, links; the start of a list or heading, or its end
    r"[`*~\\$]|(?<![^\W_])_|_(?![^\W_])|<(?=[A-Za-z/!?])|&(?=#?\w+;)|(?<=\])[(\[:]|^(?=[#>+-])|(?<!^)#(?=#*\s*$)"
)
NUMBERED = re.compile(r"^(\d+)(?=[.)](\s|$))")  # the start of a numbered list
ENTITIES = {"<": "&lt;", "&": "&amp;"}


def escape(text: str) -> str:
    """Text with the characters escaped that Markdown would interpret."""
    text = MARKUP.sub(lambda match: ENTITIES.get(match[0], f"\\{match[0]}"), one_line(text))
    return NUMBERED.sub(r"\1\\", text)


def _cell(text: str) -> str:
    return re.sub(r"^\\(?=[+-]\d)", "", escape(text)).replace("|", r"\|")


def bullets(notes: Iterable[str]) -> str:
    """A list of escaped sentences."""
    return "\n".join(f"- {escape(note)}" for note in notes)


def spaced(parts: Iterable[str]) -> str:
    """Paragraphs separated by blank lines."""
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"
