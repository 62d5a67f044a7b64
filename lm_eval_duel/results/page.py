"""index.html: a report on one page to sort, filter and send.

The page loads nothing from a network, and has no markup but ours: Jinja2 escapes every text. Its content security
policy names our style and script by their hashes, so a browser runs and fetches nothing else, even if a name found its
way into markup. It is for readers: what the person at the console should do is not on it.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import itertools
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_eval_duel.console import command_line
from lm_eval_duel.console.command_line import one_line
from lm_eval_duel.errors import counted
from lm_eval_duel.results import columns, published, rerun, run_tables
from lm_eval_duel.results.compare import Comparison
from lm_eval_duel.results.page_columns import cells_of, columns_of, marked, remarks_of, with_minus_signs
from lm_eval_duel.results.ranks import TIED
from lm_eval_duel.results.runs import common_folder
from lm_eval_duel.results.standings import AR, KINDS, KINDS_OF_AVERAGES, MEAN, RankedMethod, Standing, Standings
from lm_eval_duel.results.table import WORDS, Table, number

if TYPE_CHECKING:
    from lm_eval_duel.results.report import Report

ASSETS = Path(__file__).resolve().parent / "assets"
SCRIPTS = ("table.js", "documents.js")
HIDDEN = ("lowest", "bits", "time", "source")  # groups of columns that are hidden until the reader shows them
HIDDEN_OF_SEVERAL = (*HIDDEN, "next", "gap", "closed")  # the same with several tasks, which have many columns
MOST_OPEN = 5  # rows of a table of differences that is not folded
WIDTH = 140.0  # pixels of a plot
MARGIN = 9.0
MOST_TICKS = 5
MANTISSAS = ((1, 1.5, 2, 3, 4, 5, 7), (1, 2, 3, 5), (1, 3), (1,))  # of ticks: the first set with few enough
STEPS = (1, 2, 5)  # of even ticks


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
    shown, cells = cells_of(rows, columns_of(report))
    hidden = HIDDEN if len(report.tasks) < 2 else HIDDEN_OF_SEVERAL
    remarks = remarks_of(shown, cells.values(), hidden)
    folder = common_folder(report.runs)
    environment = Environment(
        autoescape=True,
        loader=FileSystemLoader(ASSETS),
        undefined=StrictUndefined,
        trim_blocks=True,
        finalize=lambda value: one_line(value) if type(value) is str else value,  # Markup, a subclass, is ours
    )
    environment.filters["minus"] = with_minus_signs
    return environment.get_template("page.html").render(
        title=title or ("Perplexity leaderboard" if report.tasks else "Accuracies and other averages"),
        about=about(report),
        style=style,
        script=script,
        policy=f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {_hash(script)}",
        kinds=_legend(rows),
        estimators=_estimators(rows),
        switches=_switches(report),
        hidden=hidden,
        columns=shown,
        groups=groups,
        cells=cells,
        marked=lambda text, remark: marked(text, remark, remarks),
        remarks=remarks.values(),
        differences=_differences(report),
        most_open=MOST_OPEN,
        plot=_plot(standings, report.tasks),
        baseline=_baseline_names(report),
        details={row: _details(row.method, folder) for row in rows},
        published=list(map(published.table, report.published)),
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
    sentences = [f"{', '.join(_units(report)).capitalize()}: lower is better."]
    if any(row.rank for row in standings.rows):
        sentences.append(columns.ranked_by(standings, report.tasks))
    if any(each.place and each.place.is_tied for task in report.tasks.values() for each in task.rows):
        sentences.append(
            f"Ranks are by value. A row is called {TIED} if it is not distinguishable from the row with the next lower "
            "value: the 95 % interval of their paired difference over documents contains 0."
        )
    if any(task.has_gap for task in report.tasks.values()):
        about_gaps = dict.fromkeys(str(each.about_gap) for task in report.tasks.values() for each in task.rows)
        sentences.append(f"{', '.join(filter(None, [f'Gaps are to {_baseline_names(report)}', *about_gaps]))}.")
    compared = [each for task in report.tasks.values() for each in task.rows]
    if any(each.interval for each in compared):
        sentences.append("Intervals are 95 % intervals over documents.")
    if any(each.row.stderr is not None for each in compared):
        sentences.append("± is the standard error of a Monte Carlo or sampled estimate.")
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
    of_perplexities = set()
    for row in rows:
        kinds_of_row = {row.method.kind}
        if row.method.named.run.config.autoregressive:
            kinds_of_row.add(AR)
        kinds |= kinds_of_row
        if row.method.rows:
            of_perplexities |= kinds_of_row
    meanings = {}
    for kind in KINDS:  # in their order
        if kind in kinds:
            meanings[kind] = (KINDS if kind in of_perplexities else KINDS_OF_AVERAGES)[kind]
    return meanings


def _estimators(rows: Sequence[Standing]) -> dict[str, str]:
    """The estimators on the page by their names in tables, and what each is, unless the kinds of results say so."""
    shown: dict[str, str] = {}
    for row in rows:
        entry = row.method.named.entry
        if row.method.rows and not entry.causal and entry.kind.is_likelihood:
            shown[entry.title] = entry.what.replace("`", "")
    return shown


def _switches(report: Report) -> dict[str, str]:
    """The groups of columns that can be hidden, and what each is called."""
    units = _units(report)
    return {
        "mean": "means",
        "value": units[0] if len(units) == 1 else "perplexities",
        "next": "difference from the next lower",
        "lowest": "difference from the lowest",
        "bits": "bits per byte",
        "gap": f"gap to {_baseline_names(report)}",
        "closed": "gap closed",
        "average": "accuracies and other averages",
        "cost": "NFE",
        "time": "time",
        "source": "provenance",
    }


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
    for text, names in tasks_of_notes.items():
        holds_for_all = len(names) == len(report.tasks)
        texts.append(text if holds_for_all else f"{', '.join(names)}: {text}")

    folder = common_folder(report.runs)
    for run in report.runs:  # the page may be sent to others: relative names of files tell no home folder
        relative = os.path.relpath(run.name, folder)
        texts = [text.replace(run.name, relative) for text in texts]
    return texts


def _differences(report: Report) -> list[tuple[str, str, Table]]:
    """The tables of paired differences of report.md: a heading, what the table has, and itself."""
    tables = []
    for name, task in report.tasks.items():
        for kind, table in columns.of_task(task):
            count = len(table.rows)
            if kind == "cache":
                tables.append((f"{name}: {table.title}", counted(count, "row"), table))
            elif kind == "pairs":
                title = f"{name}: {table.title}"
                tables.append((title, f"{count} of {counted(task.possible_pairs, 'pair')} of rows", table))
    for name, pairs in report.average_pairs.items():
        if pairs:
            table = run_tables.average_differences(name, pairs)
            tables.append((table.title, counted(len(pairs), "row"), table))
    return tables


def _details(method: RankedMethod, folder: str) -> dict[str, Any]:
    """The commands, the spec, the files and the versions that a row opens to."""
    spec = ", ".join(f"{key}={value}" for key, value in method.named.run.spec.items())
    names = ", ".join(os.path.relpath(run.name, folder) for run in method.runs)
    versions = ", ".join(f"{name} {version}" for name, version in method.versions.items())
    return {
        "commands": rerun.commands(method),
        "needed": rerun.needed(method),
        "spec": spec,
        "files": names,
        "versions": versions,
    }


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
