"""The columns of the page, their cells, and the remarks that cells and heads refer to."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from lm_eval_duel.results import columns, gaps, ranks, run_tables
from lm_eval_duel.results.compare import ComparedRow, Comparison
from lm_eval_duel.results.gaps import CLOSE, EXACT, MONTE_CARLO, Pair
from lm_eval_duel.results.ranks import TIED
from lm_eval_duel.results.runs import Run, size_in_words
from lm_eval_duel.results.standings import Standing, Standings
from lm_eval_duel.results.stats import UNCLEAR
from lm_eval_duel.results.table import MINUS, Cell, Note, number, split

if TYPE_CHECKING:
    from lm_eval_duel.results.report import Report

PLAIN = ("model", "estimator", "rule", "cache", "device", "fingerprint", "date")  # columns of no numbers
NFE = "network evaluations of the rule, over tokens"
WHOSE_GAP = {EXACT: "of the exact ELBO's gap", MONTE_CARLO: "an estimate, of a Monte Carlo ELBO's gap"}


@dataclasses.dataclass(frozen=True)
class Column:
    """A head, and the cell of a method below it.

    `group`: of columns that the page can hide together. `below`: the interval that stands below a cell. `about`: a
    remark on the whole column. `counts`: the number of documents and tokens that its values are over, which stands
    below the head.
    """

    head: str
    cell: Callable[[Standing], Cell]
    group: str = "name"
    below: Callable[[Standing], str] = lambda row: ""
    about: str = ""
    counts: str = ""

    @property
    def classes(self) -> str:
        """Its classes in style.css and table.js: the group, or for a name the head, and whether it holds numbers."""
        key = f"g-{self.group}"
        if self.group == "name":
            key = f"k-{self.head.replace('#', 'rank')}"
        return key if self.head in PLAIN else f"{key} number"


@dataclasses.dataclass(frozen=True)
class PageCell:
    """A cell of a row: its text, the text of its remark, and what stands below."""

    column: Column
    text: str
    remark: str
    below: str


@dataclasses.dataclass(frozen=True)
class Remark:
    """A remark below the table. `groups`: of the columns that refer to it; it is hidden with them."""

    mark: str
    text: str
    groups: list[str]


# ---------------------------------------------------------------- columns


def columns_of(report: Report) -> list[Column]:
    """The columns of the page, empty ones included: of names, means, each task, cost and source."""
    standings = report.standings
    names = columns.names_of_rows([row.method.named for row in standings.rows])
    shown = [Column("#", columns.rank, below=lambda row: _below_rank(standings, row))]
    names["cache"] = lambda row: row.cache if row.run.has_cache else ""  # which some networks have no argument for
    for head, cell in names.items():
        shown.append(Column(head, lambda row, cell=cell: cell(row.method.named)))  # bound now: `cell` changes
    if standings.mean_of:
        shown.append(Column(columns.mean_title(standings), lambda row: columns.mean(standings, row), "mean"))
        shown.append(Column("mean rank", columns.mean_rank, "mean"))
    for of_task in (_value_column, _next_lower_column, _lowest_column, _bits_column, _gap_column, _closed_column):
        for name, task in report.tasks.items():
            shown.append(of_task(name, task))
    for name in report.scored:
        for metric in run_tables.metrics_of(name, report.runs):
            shown.append(_average_column(name, metric, report.runs))
    return [
        *shown,
        Column("NFE per token", lambda row: number(row.method.nfe_per_token, ".3f"), "cost", about=NFE),
        Column("seconds per token", _seconds, "time", about=run_tables.WALL_TIME),
        Column("device", lambda row: row.method.device, "source"),
        Column("parameters", lambda row: number(row.method.parameters, ",d"), "source"),
        Column("fingerprint", lambda row: row.method.fingerprint, "source"),
        Column("date", lambda row: row.method.date[:10], "source"),
    ]


def _value_column(name: str, task: Comparison) -> Column:
    tokens = f"{task.tokens:,}\u00a0tokens" if task.tokens else ""  # a line may break before it, not in it
    return Column(
        f"{name} {columns.SHORT[task.metric]}",
        columns.on_task(name, _value),
        "value",
        below=columns.on_task(name, columns.interval),
        counts=", ".join(filter(None, [task.size, tokens])),
    )


def _next_lower_column(name: str, task: Comparison) -> Column:
    return _place_column(f"{name} from next lower", "next", name, task, "next_lower")


def _lowest_column(name: str, task: Comparison) -> Column:
    return _place_column(f"{name} from lowest", "lowest", name, task, "lowest")


def _place_column(head: str, group: str, name: str, task: Comparison, attribute: str) -> Column:
    """The paired differences of a task's rows from another row, with the intervals that say which are tied.

    `attribute`: of `Place`, the pair with that row.
    """
    difference = columns.of_other_row(attribute, _difference)
    interval = columns.of_other_row(attribute, _interval)
    differences = f"paired differences of {MINUS}log p over documents, in {gaps.difference_unit(task.metric)}"
    about = f"{differences}: above 0 the row is worse. {columns.SINGLE}"
    return Column(head, columns.on_task(name, difference), group, columns.on_task(name, interval), about)


def _difference(pair: Pair) -> Cell:
    is_decided = pair.better or ranks.is_tied(pair)
    no_verdict = Note("" if is_decided else pair.verdict)
    return number(pair.difference, "+.4f"), Note.joined([no_verdict, pair.reason])


def _interval(pair: Pair) -> str:
    tied = f"{TIED}: " if ranks.is_tied(pair) else ""
    return tied + columns.interval_of(pair)


def _below_rank(standings: Standings, row: Standing) -> str:
    """That a row is tied with the next lower one, or why it is not known to differ from it.

    Empty for ranks by a mean, which no interval is known of.
    """
    each = row.method.rows.get(standings.by)
    if not row.rank or each is None or each.place is None:
        return ""
    next_lower = each.place.next_lower
    if next_lower is None or next_lower.better:
        return ""
    if each.place.is_tied:
        return TIED
    return "no verdict" if next_lower.interval else "no interval"


def _seconds(row: Standing) -> str:
    return number(row.method.seconds_per_token, ".2g")


def _bits_column(name: str, task: Comparison) -> Column:
    return Column(f"{name} bits/byte", columns.on_task(name, _bits), "bits")


def _gap_column(name: str, task: Comparison) -> Column:
    return Column(f"{name} gap", columns.on_task(name, _gap), "gap", columns.on_task(name, columns.gap_interval))


def _closed_column(name: str, task: Comparison) -> Column:
    """Gaps closed; empty, and so left out, if there is no ELBO to close a gap of."""
    head = f"{name} gap closed, %"
    if not any(each.closed.distinguishable is not None for each in task.rows):
        return Column(head, lambda row: "", "closed")
    about = "the share of the ELBO's gap to the baseline that DUEL closes"
    return Column(head, columns.on_task(name, _closed), "closed", columns.on_task(name, columns.closed_interval), about)


def _value(each: ComparedRow) -> Cell:
    """A value. Its remark says what puts it in doubt, why it has no error or interval, or that documents are few."""
    about_interval = each.about_interval
    if each.interval is None:
        about_interval = about_interval.after("no interval: ")
    return columns.value(each.row), Note.joined([each.row.about_value, about_interval])


def _bits(each: ComparedRow) -> str:
    """Bits per byte, unless they are the value."""
    return "" if each.row.metric == "bits_per_byte" else columns.value(each.row, "bits_per_byte")


def _gap(each: ComparedRow) -> Cell:
    return columns.gap(each.row, each.gap), each.about_gap


def _closed(each: ComparedRow) -> Cell:
    text = columns.closed(each)
    if text == UNCLEAR:
        return "unclear", CLOSE  # short: the column is narrow
    whose_gap = WHOSE_GAP.get(each.closed.of, "") if text else ""
    return text, Note.joined([Note(whose_gap), each.closed.reason])


def _average_column(name: str, metric: str, runs: Sequence[Run]) -> Column:
    """An average other than a perplexity. If runs have different documents, each cell says how many."""
    sizes: dict[str, None] = {}
    for run in runs:
        if metric in run.scores(name):
            sizes[_size(run, name)] = None
    is_shared = len(sizes) == 1

    def cell(row: Standing) -> Cell:
        run = row.method.scored.get(name)
        if run is None:
            return ""
        text, remark = split(run_tables.average_with_doubts(run, name, metric, runs))
        if is_shared or not text:
            return text, remark
        return text, Note.joined([Note(_size(run, name)), remark])

    return Column(f"{name} {metric}", cell, "average", counts=next(iter(sizes)) if is_shared else "")


def _size(run: Run, name: str) -> str:
    task = run.every_task[name]
    return size_in_words(task.size, task.available)


# ---------------------------------------------------------------- cells


def cells_of(
    rows: Sequence[Standing], columns_of_page: Iterable[Column]
) -> tuple[list[Column], dict[Standing, list[PageCell]]]:
    """The columns in which any row has a text or a remark, and the cells of each row in their order."""
    shown = []
    cells: dict[Standing, list[PageCell]] = {row: [] for row in rows}
    for column in columns_of_page:
        cells_of_column = [_cell(column, row) for row in rows]
        if not any(cell.text or cell.remark for cell in cells_of_column):
            continue
        shown.append(column)
        for row, cell in zip(rows, cells_of_column, strict=True):
            cells[row].append(cell)
    return shown, cells


def _cell(column: Column, row: Standing) -> PageCell:
    text, note = split(column.cell(row))
    text = text.replace("≤ ", "≤\u00a0").replace("± ", "±\u00a0")  # a line may break before an error only
    return PageCell(column, text, note.fact, column.below(row))


# ---------------------------------------------------------------- remarks


def remarks_of(
    shown: Sequence[Column], rows: Iterable[Sequence[PageCell]], hidden: Collection[str]
) -> dict[str, Remark]:
    """The remarks on columns and on the cells of rows, each once, by its text.

    They are numbered as they are first referred to. Columns of `hidden` groups come last, so that no number is missing
    before the reader shows them.
    """
    remarks: dict[str, Remark] = {}

    def add(text: str, group: str) -> None:
        if not text:
            return
        remark = remarks.setdefault(text, Remark(f"[{len(remarks) + 1}]", text, []))
        if group not in remark.groups:
            remark.groups.append(group)

    cells = list(itertools.chain.from_iterable(rows))
    for are_hidden in (False, True):
        for column in shown:
            if (column.group in hidden) == are_hidden:
                add(column.about, column.group)
        for cell in cells:
            if (cell.column.group in hidden) == are_hidden:
                add(cell.remark, cell.column.group)
    return remarks


def marked(text: str, remark: str, remarks: Mapping[str, Remark]) -> str:
    """A text with the mark of its remark; without one, the text."""
    return f"{text}\u00a0{remarks[remark].mark}".strip() if remark else text


HYPHEN = re.compile(r"(?<![\w.])-(?=\d)")  # before a number; not the one inside a name or a date


def with_minus_signs(text: str) -> str:
    """A text whose negative numbers have the minus sign of type."""
    return HYPHEN.sub(MINUS, text)
