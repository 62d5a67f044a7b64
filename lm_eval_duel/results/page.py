"""index.html: a report on one page to sort, filter and send.

The page loads nothing from a network, and has no markup but ours: Jinja2 escapes every text. Its content security
policy names our style and script by their hashes, so a browser runs and fetches nothing else, even if a name found its
way into markup. It is for readers: what the person at the console should do is not on it.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime
import hashlib
import itertools
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_eval_duel.console import command_line
from lm_eval_duel.console.command_line import one_line
from lm_eval_duel.results import columns, files, published
from lm_eval_duel.results.compare import ComparedRow, Comparison
from lm_eval_duel.results.gaps import EXACT, MONTE_CARLO
from lm_eval_duel.results.runs import common_folder, is_limited
from lm_eval_duel.results.standings import AR, KINDS, MEAN, RankedMethod, Standing, Standings
from lm_eval_duel.results.stats import UNCLEAR
from lm_eval_duel.results.table import WORDS, Cell, Note, Table, number, split

if TYPE_CHECKING:
    from lm_eval_duel.results.report import Report

ASSETS = Path(__file__).resolve().parent / "assets"
SCRIPTS = ("table.js", "documents.js")
HIDDEN = ("source",)  # groups of columns that are hidden until the reader shows them
HIDDEN_OF_SEVERAL = (*HIDDEN, "bits", "gap", "closed")  # the same with several tasks, which have many columns
PLAIN = ("model", "estimator", "rule", "cache", "device", "fingerprint", "versions", "date")  # columns of no numbers
CLOSE = (
    f"{UNCLEAR}: the ELBO is within two standard errors of the value"  # for a gap closed that is not distinguishable
)
WHOSE_GAP = {EXACT: "of the exact ELBO's gap", MONTE_CARLO: "an estimate, of a Monte Carlo ELBO's gap"}
WIDTH = 140.0  # pixels of a plot
MARGIN = 9.0
MOST_TICKS = 5
MANTISSAS = ((1, 1.5, 2, 3, 4, 5, 7), (1, 2, 3, 5), (1, 3), (1,))  # of ticks: the first set with few enough
STEPS = (1, 2, 5)  # of even ticks
MOST_PAIRS = 20  # of a task that are shown at once; more are folded


@dataclasses.dataclass(frozen=True)
class Column:
    """A head, and the cell of a method below it.

    `group`: of columns that the page can hide together. `below`: the interval that stands below a cell.
    """

    head: str
    cell: Callable[[Standing], Cell]
    group: str = "name"
    below: Callable[[Standing], str] = lambda row: ""

    @property
    def classes(self) -> str:
        """Its classes in style.css and table.js: the group, or for a name the head, and whether it holds numbers."""
        key = f"g-{self.group}"
        if self.group == "name":
            key = f"k-{self.head.replace('#', 'rank')}"
        return key if self.head in PLAIN else f"{key} number"


@dataclasses.dataclass(frozen=True)
class Remark:
    """A remark below the table. `groups`: of the columns that refer to it; it is hidden with them."""

    mark: str
    text: str
    groups: list[str]


def html(report: Report, title: str | None) -> str:
    """The page of a report."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    style = _asset("style.css")
    script = "\n".join(map(_asset, SCRIPTS))
    standings = report.standings
    groups = standings.groups()
    rows: list[Standing] = []
    for _, members in groups:
        rows += members
    shown = [column for column in columns_of(report) if _is_filled(column, rows)]
    texts, remarks = _texts(rows, shown)
    folder = common_folder(report.runs)
    tables_of_others = []
    for source in report.published:
        tables_of_others.append((source, published.table(source)))
    environment = Environment(
        autoescape=True,
        loader=FileSystemLoader(ASSETS),
        undefined=StrictUndefined,
        trim_blocks=True,
        finalize=lambda value: one_line(value) if type(value) is str else value,  # Markup, a subclass, is ours
    )
    return environment.get_template("page.html").render(
        title=title or ("Perplexity leaderboard" if report.tasks else "Accuracies"),
        about=about(report),
        style=style,
        script=script,
        policy=f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {_hash(script)}",
        kinds=_legend(rows),
        switches=_switches(report),
        hidden=HIDDEN if len(report.tasks) < 2 else HIDDEN_OF_SEVERAL,
        columns=shown,
        groups=groups,
        texts=texts,
        remarks=remarks,
        differences=_differences(report),
        most_pairs=MOST_PAIRS,
        single=columns.SINGLE,
        plot=_plot(standings, report.tasks),
        details={row: _details(row.method, folder) for row in rows},
        published=tables_of_others,
        unchecked=published.UNCHECKED,
        documents=command_line.finite(report.documents),
        notes=notes(report),
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    )


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    """The hash of a style or script, as a content security policy names it."""
    digest = hashlib.sha256(content.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


# ---------------------------------------------------------------- sentences for readers


def about(report: Report) -> str:
    """A description of the numbers, and of what they are ranked by."""
    standings = report.standings
    if not report.tasks:
        count = len(report.scored)
        tasks = "one task" if count == 1 else f"{count} tasks"
        error = " ± is the standard error over documents." if report.scored else ""
        return f"Averages of {tasks}, without a rank: no result has a perplexity.{error}"
    if standings.by == MEAN:
        by = f"the {standings.mean_kind} of {WORDS[standings.metric]} over {len(standings.mean_of)} tasks"
    else:
        by = f"{WORDS[report.tasks[standings.by].metric]} on {standings.by}"
    sentences = [
        f"{', '.join(_units(report)).capitalize()}: lower is better.",
        f"Likelihoods and estimates are ranked by {by}; bounds (≤) and the oracle have no rank.",
    ]
    if any(task.pairs for task in report.tasks.values()):
        sentences.append(
            "Ranks are by value: rows next to each other may not differ. The pairs below say which of those compared "
            "there do."
        )
    if report.baselines:
        sentences.append(f"Gaps are to {_baseline_names(report)}.")
    sentences.append(
        "Intervals are 95 % intervals over documents. ± is the standard error of a Monte Carlo or sampled estimate."
    )
    if report.scored:
        sentences.append("Of accuracies, ± is the standard error over documents.")
    return " ".join(sentences)


def _units(report: Report) -> list[str]:
    """The units of the perplexities of tasks, each once."""
    return list(dict.fromkeys(WORDS[task.metric] for task in report.tasks.values()))


def _baseline_names(report: Report) -> str:
    return ", ".join(dict.fromkeys(run.label for run in report.baselines))


def _legend(rows: Sequence[Standing]) -> dict[str, str]:
    """The kinds of results that are on the page, and what each means."""
    kinds = set()
    for row in rows:
        if row.method.rows:
            kinds.add(row.method.kind)
        if row.method.named.run.config.autoregressive:
            kinds.add(AR)
    return {kind: meaning for kind, meaning in KINDS.items() if kind in kinds}  # in their order


def notes(report: Report) -> list[str]:
    """The notes for readers, each once; one that does not hold for all tasks says for which it does."""
    tasks_of_notes: dict[str, list[str]] = {}
    for name, task in report.tasks.items():
        for text in dict.fromkeys([*task.differences, *task.notes]):
            tasks_of_notes.setdefault(text, []).append(name)

    texts = []
    for note in report.notes:
        if note.fact:
            texts.append(note.fact)
    for name, task in report.tasks.items():
        if is_limited(task.documents, task.available):
            texts.append(f"{name}: {task.size}")
    for text, names in tasks_of_notes.items():
        holds_for_all = len(names) == len(report.tasks)
        texts.append(text if holds_for_all else f"{', '.join(names)}: {text}")

    folder = common_folder(report.runs)
    for run in report.runs:  # the page may be sent to others: relative names of files tell no home folder
        relative = os.path.relpath(run.name, folder)
        texts = [text.replace(run.name, relative) for text in texts]
    return texts


def _differences(report: Report) -> dict[str, Table]:
    """The paired differences of each task that has any, as in report.md."""
    return {name: columns.differences(task) for name, task in report.tasks.items() if task.pairs}


def _details(method: RankedMethod, folder: str) -> dict[str, Any]:
    """The commands, the spec and the files that a row opens to."""
    spec = ", ".join(f"{key}={value}" for key, value in method.named.run.spec.items())
    names = ", ".join(os.path.relpath(run.name, folder) for run in method.runs)
    return {"commands": files.commands(method), "spec": spec, "files": names}


# ---------------------------------------------------------------- columns


def columns_of(report: Report) -> list[Column]:
    """The columns of the page, empty ones included: of names, means, each task, cost and source."""
    standings = report.standings
    names = columns.names_of_rows([row.method.named for row in standings.rows])
    shown = [Column("#", columns.rank)]
    names["cache"] = lambda row: row.cache if row.run.has_cache else ""  # which some networks have no argument for
    for head, cell in names.items():
        shown.append(Column(head, lambda row, cell=cell: cell(row.method.named)))  # bound now: `cell` changes
    if standings.mean_of:
        shown.append(Column(columns.mean_title(standings), lambda row: columns.mean(standings, row), "mean"))
        shown.append(Column("mean rank", columns.mean_rank, "mean"))
    for of_task in (_value_column, _bits_column, _gap_column, _closed_column):
        for name, task in report.tasks.items():
            shown.append(of_task(name, task))
    for name in report.scored:
        for metric in columns.metrics_of(name, report.runs):
            shown.append(_average_column(name, metric))
    return [
        *shown,
        Column("NFE per token", lambda row: number(row.method.nfe_per_token, ".3f"), "cost"),
        Column("seconds per token", lambda row: number(row.method.seconds_per_token, ".2g"), "cost"),
        Column("device", lambda row: row.method.device, "source"),
        Column("parameters", lambda row: number(row.method.parameters, ",d"), "source"),
        Column("fingerprint", lambda row: row.method.fingerprint, "source"),
        Column("versions", _versions, "source"),
        Column("date", lambda row: row.method.date[:10], "source"),
    ]


def _value_column(name: str, task: Comparison) -> Column:
    head = f"{name} {columns.SHORT[task.metric]}"
    return Column(head, columns.on_task(name, _value), "value", columns.on_task(name, columns.interval))


def _bits_column(name: str, task: Comparison) -> Column:
    return Column(f"{name} bits/byte", columns.on_task(name, _bits), "bits")


def _gap_column(name: str, task: Comparison) -> Column:
    return Column(f"{name} gap", columns.on_task(name, _gap), "gap", columns.on_task(name, columns.gap_interval))


def _closed_column(name: str, task: Comparison) -> Column:
    """Gaps closed; empty, and so left out, if there is no ELBO to close a gap of."""
    head = f"{name} gap closed, %"
    if not any(each.closed.distinguishable is not None for each in task.rows):
        return Column(head, lambda row: "", "closed")
    return Column(head, columns.on_task(name, _closed), "closed", columns.on_task(name, columns.closed_interval))


def _value(each: ComparedRow) -> Cell:
    """A value. Its remark says why it has no error or interval, or that its interval is from few documents."""
    no_error = Note(each.row.stderr_reason)
    about_interval = each.about_interval
    if each.interval is None:
        about_interval = about_interval.after("no interval: ")
    return columns.value(each.row), Note.joined([no_error, about_interval])


def _bits(each: ComparedRow) -> str:
    """Bits per byte, unless they are the value."""
    return "" if each.row.metric == "bits_per_byte" else columns.value(each.row, "bits_per_byte")


def _gap(each: ComparedRow) -> str:
    return columns.gap(each.row, each.gap)


def _closed(each: ComparedRow) -> Cell:
    text = columns.closed(each)
    if text == UNCLEAR:
        return "unclear", CLOSE  # short: the column is narrow
    whose_gap = WHOSE_GAP.get(each.closed.of, "") if text else ""
    return text, Note.joined([Note(whose_gap), each.closed.reason])


def _average_column(name: str, metric: str) -> Column:
    """An average other than a perplexity."""

    def cell(row: Standing) -> Cell:
        run = row.method.scored.get(name)
        return "" if run is None else columns.average(run, name, metric)

    return Column(f"{name} {metric}", cell, "average")


def _versions(row: Standing) -> str:
    return ", ".join(f"{name} {version}" for name, version in row.method.versions.items())


def _switches(report: Report) -> dict[str, str]:
    """The groups of columns that can be hidden, and what each is called."""
    units = _units(report)
    return {
        "mean": "means",
        "value": units[0] if len(units) == 1 else "perplexities",
        "bits": "bits per byte",
        "gap": f"gap to {_baseline_names(report)}",
        "closed": "gap closed",
        "average": "accuracies and other averages",
        "cost": "cost",
        "source": "provenance",
    }


def _is_filled(column: Column, rows: Iterable[Standing]) -> bool:
    """True if a cell of the column has a text or a remark."""
    for row in rows:
        text, note = split(column.cell(row))
        if text or note.fact:
            return True
    return False


def _texts(rows: Iterable[Standing], columns: Sequence[Column]) -> tuple[dict[Standing, list[str]], list[Remark]]:
    """The text of each cell, and the remarks that their marks refer to."""
    remarks: dict[str, Remark] = {}
    texts: dict[Standing, list[str]] = {}
    for row in rows:
        texts[row] = []
        for column in columns:
            text, note = split(column.cell(row))
            text = text.replace("≤ ", "≤\u00a0").replace("± ", "±\u00a0")  # a line may break before an error only
            if note.fact:
                if note.fact not in remarks:
                    remarks[note.fact] = Remark(f"[{len(remarks) + 1}]", note.fact, [])
                remark = remarks[note.fact]
                if column.group not in remark.groups:
                    remark.groups.append(column.group)
                text = f"{text}\u00a0{remark.mark}".strip()
            texts[row].append(text)
    return texts, list(remarks.values())


# ---------------------------------------------------------------- the plot


def _plot(standings: Standings, tasks: Mapping[str, Comparison]) -> dict[str, Any] | None:
    """The plot of the values that rows are ranked by: ticks, rows and the baseline, in pixels from the left.

    A row has its value, and the ends of its interval if it has one. None if there is nothing to show.
    """
    rows: dict[Standing, list[float]] = {}
    for row in standings.rows:
        if row.main is None:
            continue
        rows[row] = [row.main]
        if standings.by in row.method.rows:  # a mean over tasks has no interval
            interval = row.method.rows[standings.by].interval
            if interval and all(map(math.isfinite, interval)):
                rows[row] += interval
    shown = list(itertools.chain.from_iterable(rows.values()))
    if not shown or min(shown) == max(shown):
        return None
    low = min(shown)
    high = max(shown)
    metric = standings.metric if standings.by == MEAN else tasks[standings.by].metric
    is_logarithmic = metric != "bits_per_byte" and low > 0
    scale = math.log if is_logarithmic else float

    def pixel(value: float) -> float:
        share = (scale(value) - scale(low)) / (scale(high) - scale(low))
        return round(MARGIN + share * (WIDTH - 2 * MARGIN), 1)

    base = None
    pixels_of_rows = {}
    for row, values in rows.items():
        pixels_of_rows[row] = list(map(pixel, values))
        if any(each.row.ar for each in row.method.rows.values()):
            base = pixel(row.main)
    ticks = []
    for tick in _ticks(low, high):
        ticks.append((pixel(tick), number(tick, "g")))
    return {"width": WIDTH, "ticks": ticks, "rows": pixels_of_rows, "base": base}


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers between two values, five at most, and two at least if they are far enough apart."""
    for mantissas in MANTISSAS:
        ticks = _mantissas_between(low, high, mantissas)
        if len(ticks) <= MOST_TICKS:
            break
    if len(ticks) > 1:
        stride = math.ceil(len(ticks) / MOST_TICKS)  # 1, unless the values span more powers of ten than ticks fit
        return ticks[::stride]

    power = 10.0 ** math.floor(math.log10(high - low))  # close together: even steps
    for mantissa in STEPS:
        step = mantissa * power
        ticks = _multiples_between(low, high, step)
        if len(ticks) <= MOST_TICKS:
            break
    return ticks


def _mantissas_between(low: float, high: float, mantissas: Sequence[float]) -> list[float]:
    """The numbers between two that are one of `mantissas` times a power of ten."""
    first = math.floor(math.log10(low)) if low > 0 else -6
    last = math.ceil(math.log10(high))
    numbers = []
    for power in range(first, last + 1):
        for mantissa in mantissas:
            candidate = mantissa * 10.0**power
            if low <= candidate <= high:
                numbers.append(candidate)
    return numbers


def _multiples_between(low: float, high: float, step: float) -> list[float]:
    first = math.ceil(low / step)
    last = math.floor(high / step)
    return [n * step for n in range(first, last + 1)]
