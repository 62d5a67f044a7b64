"""Tables as data, and their forms: text for the terminal, Markdown, LaTeX (booktabs), CSV, and parts of cells for HTML.

A number is formatted here and nowhere else, and each form escapes text in one place.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lm_eval_duel.console.tables import csv_cell, markdown_table, one_line, plain_table
from lm_eval_duel.rules.tables import adaptive, kind, label, without_defaults

WORDS = {
    "token_perplexity": "perplexity per token",
    "perplexity": "perplexity",
    "word_perplexity": "perplexity per word",
    "byte_perplexity": "perplexity per byte",
    "bits_per_byte": "bits per byte",
}
LEVEL = "95 % interval"
TEXT, CODE, RULE = "text", "code", "rule"  # of columns without numbers
Value = float | int | str | None

# ---------------------------------------------------------------- numbers


def form_of(metric: str) -> str:
    """The format of a metric's values: enough decimals to tell models apart."""
    return ".4f" if metric in ("bits_per_byte", "byte_perplexity") else ".2f"


def number(value: float, form: str = ".2f") -> str:
    """A number in a format such as `.2f`, `+.4f`, `.3g` or `,d`, without negative zero; `si`: as 3.22 M."""
    if form == "si":
        scale, unit = next(((s, u) for s, u in ((10**9, " B"), (10**6, " M")) if value >= s), (1, ""))
        return f"{value / scale:.3g}{unit}" if unit else str(value)
    if form[-1] == "f":
        value = round(value, int(form[:-1].rpartition(".")[2])) + 0.0
    return format(value, form)


def error(value: float, form: str) -> str:
    """A standard error in the format of its value; with one digit if it is smaller than the shown decimals."""
    text = number(value, form.lstrip("+"))
    return text if text.strip("0.") else format(value, ".1g")


def plus_minus(value: float | None, metric: str) -> str:
    """` +- ` and a standard error of a metric, for sentences; empty if there is none."""
    return "" if value is None else f" +- {error(value, form_of(metric))}"


# ---------------------------------------------------------------- the model


@dataclasses.dataclass(frozen=True)
class Column:
    """A column. `form`: the format of its numbers, or `text`, `code` or `rule`. `unit` stands behind each number.

    `cell`: what it shows of a record, for `Table.from_records`.
    """

    title: str
    form: str = TEXT
    unit: str = ""
    cell: Callable[[Any], Cell | Value] = lambda record: None

    @property
    def numeric(self) -> bool:
        return self.form not in (TEXT, CODE, RULE)


@dataclasses.dataclass(frozen=True)
class Cell:
    """A value with what must not be separated from it.

    `bound`: the true value is at or below it; `unsure`: it has an error that is not known; `prose`: text in a column of
    code; `note`: a remark below the table; `instead`: what stands in the place of an interval.
    """

    value: Value = None
    interval: Sequence[float] | None = None
    stderr: float | None = None
    bound: bool = False
    best: bool = False
    unsure: bool = False
    prose: bool = False
    note: str = ""
    instead: str = ""


@dataclasses.dataclass(frozen=True)
class Table:
    """Columns and rows of cells. A plain value in a row is a cell without error. `inline`: intervals stand in
    brackets behind their values, not in a column of their own."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Any]]
    title: str = ""
    inline: bool = False

    def __post_init__(self) -> None:
        rows = [[value if isinstance(value, Cell) else Cell(value) for value in row] for row in self.rows]
        object.__setattr__(self, "rows", rows)

    @classmethod
    def from_records(
        cls, records: Iterable[Any], columns: Sequence[Column], title: str = "", inline: bool = False
    ) -> Table:
        """A row for each record."""
        return cls(columns, [[column.cell(record) for column in columns] for record in records], title, inline)


# ---------------------------------------------------------------- forms


MARKUP = re.compile(  # emphasis, code, formulas, tags, entities, links; the start of a list or heading, or its end
    r"[`*~\\$]|(?<![^\W_])_|_(?![^\W_])|<(?=[A-Za-z/!?])|&(?=#?\w+;)|(?<=\])[(\[:]|^(?=[#>+-])|(?<!^)#(?=#*\s*$)"
)
NUMBERED = re.compile(r"^(\d+)(?=[.)](\s|$))")  # the start of a numbered list
ENTITIES = {"<": "&lt;", "&": "&amp;"}
DAGGER = r"$^\dagger$"  # adaptive NFE
GREEK = {"mu": r"\mu", "nu": r"\nu", "gamma": r"\gamma"}
SPECIAL = {
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "`": r"\textasciigrave{}"},
    **{"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}"},
    **{"[": "{[}", "*": "{*}"},  # arguments of the \\ that ends the row before
}
AS_PRINTED = {"DUEL": r"\textsc{DUEL}", "DUEL estimate": r"\textsc{DUEL} estimate"}  # as the paper prints them


class Form:
    """How one form writes signs and text. This one is for the terminal."""

    at_most, plus, unknown, to = "<= ", " +- ", "?", " to "

    def escape(self, text: str) -> str:
        return one_line(text)

    def code(self, text: str) -> str:
        return self.escape(text)

    def rule(self, text: str) -> str:
        return self.code(without_defaults(text))

    def bold(self, text: str) -> str:
        return text

    def number(self, value: float, form: str) -> str:
        return number(value, form)

    def brackets(self, low: str, high: str) -> str:
        return f"{low}{self.to}{high}"

    def value(self, cell: Cell, column: Column) -> str:
        """A cell's value with its bound and its error."""
        value = cell.value
        if value is None or value == "":
            return ""
        if isinstance(value, str):
            forms = {CODE: self.code, RULE: self.rule}
            return self.escape(value) if cell.prose else forms.get(column.form, self.escape)(value)
        text = self.number(value, column.form) if column.numeric else str(value)
        if column.numeric and cell.stderr is not None:
            text += self.plus + error(cell.stderr, column.form)
        elif cell.unsure:
            text += self.plus + self.unknown
        text = (self.at_most if cell.bound else "") + text + self.escape(column.unit)
        return self.bold(text) if cell.best else text

    def interval(self, cell: Cell, column: Column) -> str:
        """A cell's interval, or what stands instead of it."""
        if cell.interval is None:
            return self.escape(cell.instead)
        low, high = (self.number(end, column.form) for end in cell.interval)
        return self.brackets(low, high) + self.escape(column.unit)


class Markdown(Form):
    """Names are text, never markup."""

    def escape(self, text: str) -> str:
        text = MARKUP.sub(lambda match: ENTITIES.get(match[0], f"\\{match[0]}"), one_line(text))
        return NUMBERED.sub(r"\1\\", text)

    def code(self, text: str) -> str:
        """Text as code, or as escaped text if it holds a character that would end the code."""
        return f"`{text}`" if text == one_line(text) and not set(text) & set("`|\\<") else self.escape(text)

    def bold(self, text: str) -> str:
        return f"**{text}**"


class Html(Form):
    """The template escapes text."""

    at_most, plus = "≤ ", " ± "


class Latex(Form):
    r"""For tables with booktabs and multirow. Rules are named as the paper prints them."""

    at_most, plus = r"$\leq$", r" $\pm$ "

    def escape(self, text: str) -> str:
        name, bracket, rest = text.partition(" (")
        if name in AS_PRINTED:
            return AS_PRINTED[name] + (self.escape(bracket + rest) if rest else "")
        return "".join(SPECIAL.get(c, f"\\{c}" if c in "&%$#_{}" else c) for c in one_line(text))

    def rule(self, text: str) -> str:
        _, *parameters = without_defaults(text).split(":")
        if not kind(text).label:  # module:Name
            return self.escape(text)
        pairs = [parameter.partition("=") for parameter in parameters]
        # one letter stands in formulas as it is
        letters = {
            key: f"${GREEK.get(key, key)}$" for key, _, _ in pairs if key in GREEK or re.fullmatch("[A-Za-z]", key)
        }
        shown = [f"{letters.get(key, self.escape(key))}={self.escape(value)}" for key, _, value in pairs]
        return ", ".join([label(text) + (DAGGER if adaptive(text) else ""), *shown])

    def bold(self, text: str) -> str:
        return rf"\textbf{{{text}}}"

    def number(self, value: float, form: str) -> str:
        return number(value, form).replace("-", "$-$")

    def brackets(self, low: str, high: str) -> str:
        """Braces keep LaTeX from reading it as an option of the line break before it."""
        return f"{{[{low}, {high}]}}"


PLAIN, MARKDOWN, LATEX, HTML = Form(), Markdown(), Latex(), Html()


def _grid(table: Table, form: Form, remarks: dict[str, str] | None = None) -> tuple[list[str], list[list[str]]]:
    """The heads and texts of a table; columns of intervals beside those of their values, none without a value.

    `remarks`: gets the notes of cells, with their marks; None: there are no marks.
    """
    heads: list[str] = []
    columns: list[list[str]] = []
    for n, column in enumerate(table.columns):
        values, intervals = [], []
        for cell in (row[n] for row in table.rows):
            value, interval = form.value(cell, column), form.interval(cell, column)
            if table.inline and interval:
                value, interval = f"{value} ({interval})".strip(), ""
            if cell.note and remarks is not None:
                mark = remarks.setdefault(form.escape(cell.note), f"[{len(remarks) + 1}]")
                value, interval = (value, f"{interval} {mark}") if interval else (f"{value} {mark}".strip(), "")
            values.append(value)
            intervals.append(interval)
        heads += [form.escape(column.title), form.escape(LEVEL)]
        columns += [values, intervals]
    kept = [n for n, column in enumerate(columns) if any(column)]
    return [heads[n] for n in kept], [[columns[n][row] for n in kept] for row in range(len(table.rows))]


def plain(table: Table) -> str:
    """A table for the terminal."""
    return _with_remarks(table, PLAIN, plain_table, "\n")


def markdown(table: Table) -> str:
    """A table in Markdown, with its remarks below."""
    return _with_remarks(table, MARKDOWN, markdown_table, "  \n")


def _with_remarks(table: Table, form: Form, aligned: Callable[..., str], end: str) -> str:
    remarks: dict[str, str] = {}
    text = aligned(*_grid(table, form, remarks))
    return "\n\n".join(filter(None, [text, end.join(f"{mark} {remark}" for remark, mark in remarks.items())]))


def latex(table: Table) -> str:
    r"""The rows between \toprule and \bottomrule; the first line is a comment that names the columns.

    Rows with one first cell, such as those of a model, form a group, between \midrule if there are several rows.
    """
    heads, rows = _grid(table, LATEX)
    groups = [list(group) for _, group in itertools.groupby(rows, key=lambda row: row[0])]
    several = any(len(group) > 1 for group in groups)
    about = f"   ({LATEX.escape(table.title)})" if table.title else ""
    bodies = []
    for group in groups:
        first = group[0][0] if len(group) == 1 else rf"\multirow{{{len(group)}}}{{*}}{{{group[0][0]}}}"
        lines = [[" " if n else first, *row[1:]] for n, row in enumerate(group)]
        bodies.append("\n".join(rf"{' & '.join(line)} \\" for line in lines))
    return f"% {' & '.join(heads)}{about}\n" + ("\n\\midrule\n" if several else "\n").join(bodies) + "\n"


def comma_separated(table: Table) -> str:
    """A table as CSV: unrounded numbers, each with its error and the ends of its interval if its column has them."""
    columns: list[list[Any]] = []
    for n, column in enumerate(table.columns):
        cells = [row[n] for row in table.rows]
        columns.append([column.title, *(cell.value for cell in cells)])
        if any(cell.interval is not None for cell in cells):
            for end, name in enumerate(("low", "high")):
                ends = [None if cell.interval is None else cell.interval[end] for cell in cells]
                columns.append([f"{column.title} 95 % {name}", *ends])
        if any(cell.stderr is not None for cell in cells):
            columns.append([f"{column.title} standard error", *(cell.stderr for cell in cells)])
    out = io.StringIO()
    lines = ([csv_cell(value) for value in line] for line in zip(*columns, strict=True))
    csv.writer(out, lineterminator="\n").writerows(lines)
    return out.getvalue()


# ---------------------------------------------------------------- Markdown pages


def bullets(notes: Iterable[str]) -> str:
    """A list of escaped sentences."""
    return "\n".join(f"- {MARKDOWN.escape(note)}" for note in notes)


def spaced(parts: Iterable[str]) -> str:
    """Paragraphs separated by blank lines."""
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"
