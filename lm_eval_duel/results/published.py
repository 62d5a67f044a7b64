"""Figures of others, from a CSV file. They are never ranked, averaged or subtracted, and have columns of their own.

    model,estimator,rule,block,cache,task,metric,value,stderr,source,note
    MDLM,duel,greedy,4,,duel_ptb_wrapped,token_perplexity,87.57,,"Turok et al. (2026), zero-shot",

The columns model, estimator, task, metric, value and source are needed. An estimator is one of `estimator=`, or its
name in tables (DUEL, ELBO, AR); it says whether a figure is a bound. `recipes`, separated by spaces, are rows of
examples/paper.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lm_eval_duel.core.scores import METRICS
from lm_eval_duel.errors import DuelError, nearest, unknown
from lm_eval_duel.estimators import registry
from lm_eval_duel.results.columns import WHOLE_TARGET, interval_with_remark, names_of_compared, value_with_remark
from lm_eval_duel.results.compare import Comparison
from lm_eval_duel.results.read import reading
from lm_eval_duel.results.table import LEVEL, WORDS, Cell, Columns, Head, Note, Table, number
from lm_eval_duel.rules import ALIASES, RULES
from lm_eval_duel.rules.presets import PRESETS

PAPER = "paper"  # on the command line: the paper's tables, which come with the package
PAPER_FILE = Path(__file__).resolve().with_name("published.csv")
NEEDED = ("model", "estimator", "task", "metric", "value", "source")
NAMES = ("model", "estimator", "rule", "block", "cache", "note")  # what a row is
COLUMNS = ("model", "estimator", "rule", "block", "cache", "task", "metric", "value", "stderr", "source", "note")
RECIPES = "recipes"  # a column of the paper's file
PUBLISHED = "published"
MEASURED = "measured here"
ONLY_PERPLEXITIES = (
    "Only perplexities and bits per byte can be given: no accuracies, and of a log-probability in nats exp(-nats / "
    "tokens)."
)
UNCHECKED = (
    "Published figures, as their sources print them. They were not measured here, and their documents and windows were "
    "not checked against those of this report."
)


def read(names: Iterable[str]) -> list[dict[str, Any]]:
    """The figures of CSV files; raises DuelError that names the file and line of a wrong one."""
    figures = []
    for name in names:
        file = PAPER_FILE if name == PAPER else Path(name)
        if not file.exists():
            raise DuelError(f"There is no {name}; --published takes CSV files of figures, or {PAPER}.")
        with reading(file, f"what --published takes, a CSV file of figures or {PAPER!r}"):
            reader = csv.DictReader(file.read_text(encoding="utf-8-sig").splitlines())
            missing = [column for column in NEEDED if column not in (reader.fieldnames or ())]
            if missing:
                raise DuelError(f"{name} has no column {', '.join(missing)}; needed are {', '.join(NEEDED)}.")
            for column in reader.fieldnames:
                if column and column not in (*COLUMNS, RECIPES):  # a spreadsheet may write empty columns
                    raise DuelError(f"{name}: {unknown('column', column, COLUMNS)}")
            for line in reader:
                if not any(line.values()):  # a spreadsheet may write empty rows, too
                    continue
                try:
                    figures.append({**_figure(line), "file": str(name)})
                except DuelError as error:
                    raise DuelError(f"{name}, line {reader.line_num}: {error}") from None
    return figures


def _figure(line: Mapping[str, str | None]) -> dict[str, Any]:
    """A figure of a line, with the title of its estimator and whether it is a bound."""
    figure: dict[str, Any] = {}
    for key in (*NAMES, *NEEDED, "stderr"):
        figure[key] = (line.get(key) or "").strip()
        if key in NEEDED and not figure[key]:
            raise DuelError(f"the column {key} is empty; needed are {', '.join(NEEDED)}.")
    is_block = figure["block"].isdecimal() and int(figure["block"]) > 0
    if not is_block and figure["block"] not in ("", "none"):
        raise DuelError(f"the column block takes a whole number from 1 on, or none; got {figure['block']!r}.")
    if figure["metric"] not in METRICS:
        raise DuelError(f"{unknown('metric', figure['metric'], METRICS)} {ONLY_PERPLEXITIES}")
    _require_no_typo(figure["rule"])
    entry = _estimator(figure["estimator"])
    figure["estimator"] = entry.name
    figure["display"] = entry.title
    figure["bound"] = entry.kind.is_bound
    figure["decimals"] = max(_decimals(figure["value"]), _decimals(figure["stderr"]))
    figure["value"] = _number("value", figure["value"])
    _require_possible(figure["metric"], figure["value"])
    figure["stderr"] = _number("stderr", figure["stderr"]) if figure["stderr"] else None
    if figure["stderr"] is not None and figure["stderr"] < 0:
        raise DuelError(f"the column stderr takes a standard error, at least 0; got {figure['stderr']:g}.")
    return figure


def _require_no_typo(rule: str) -> None:
    """Raise DuelError for a rule that is no rule or preset of this package, but near one. A paper may have others."""
    name, *_ = rule.split(":")
    known = [*RULES, *ALIASES, *PRESETS]
    near = nearest(name, known)
    if name not in known and near:
        raise DuelError(
            f"Unknown rule '{name}'. Did you mean {near[0]}? If it is another rule, give it a name that is not so "
            "near one of this package."
        )


def _require_possible(metric: str, value: float) -> None:
    """Raise DuelError for a value that no distribution over texts has: an accuracy, or nats."""
    least = 0 if metric == "bits_per_byte" else 1
    if value >= least:
        return
    raise DuelError(f"the column value takes {WORDS[metric]}, at least {least}; got {value:g}. {ONLY_PERPLEXITIES}")


def _number(column: str, text: str) -> float:
    """The number in a cell; raises DuelError, which names its column, for anything else."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise DuelError(f"the column {column} takes a number; got {text!r}.")
    return value


def _decimals(text: str) -> int:
    """The decimals of a number as it is written."""
    _, _, decimals = text.partition(".")
    return sum(character.isdigit() for character in decimals.lower().partition("e")[0])


def _estimator(name: str) -> registry.Entry:
    """An estimator by its name in `estimator=`, or by the one that tables print; raises DuelError for any other."""
    for entry in registry.ENTRIES:
        if name.casefold() in (entry.title.casefold(), entry.display.casefold()):
            return entry
    return registry.find(name)


def without_results(figures: Iterable[Mapping[str, Any]], tasks: Iterable[str]) -> list[Note]:
    """A note for each file of a user's with figures of tasks that no result has, and the nearest that one has."""
    missing: dict[str, dict[str, None]] = {}  # tasks by file
    known = [*tasks]
    for figure in figures:
        if figure["task"] not in known and figure["file"] != PAPER:  # the paper's are for every report
            missing.setdefault(figure["file"], {})[figure["task"]] = None
    notes = []
    for file, names in missing.items():
        listed = []
        for name in names:
            near = nearest(name, known)
            listed.append(f"{name} (did you mean {near[0]}?)" if near else name)
        notes.append(Note(advice=f"--published {file}: no result has the task {', '.join(listed)}"))
    return notes


def in_other_units(figures: Iterable[Mapping[str, Any]], tasks: Mapping[str, Comparison]) -> list[Note]:
    """Notes on the figures of a user's files that would stand beside the results with another --metric, each once."""
    notes: dict[Note, None] = {}
    for figure in figures:
        metric = figure["metric"]
        has_metric = all(metric in each.row.metrics for task in tasks.values() for each in task.rows)
        if figure["file"] == PAPER or not has_metric:
            continue
        for label, task in tasks.items():
            if metric == task.metric or not _is_of(figure, label, task):
                continue
            stands = f"{WORDS[metric]} of {label} stands beside the results with --metric {metric}"
            notes[Note(advice=f"--published {figure['file']}: {stands}")] = None
    return list(notes)


def by_source(figures: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The figures of each source and metric."""
    sources: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for figure in figures:
        sources.setdefault((figure["source"], figure["metric"]), []).append(figure)
    listed = []
    for (source, metric), of_source in sources.items():
        listed.append({"source": source, "metric": metric, "figures": of_source})
    return listed


def table(source: Mapping[str, Any]) -> Table:
    """A source's figures: a column for each task, a row for each model, estimator, rule, block and cache.

    A second figure of the same names and task has a row of its own.
    """
    tasks: dict[str, None] = {}
    rows: list[dict[str, str]] = []
    for figure in source["figures"]:
        task = figure["task"]
        names = _names(figure)
        for row in rows:
            if names.items() <= row.items() and task not in row:
                break
        else:  # no row of these names is free in this task
            row = names
            rows.append(row)
        row[task] = _value(figure)
        tasks[task] = None

    unit = WORDS[source["metric"]]
    *names_before, note = NAMES  # the note stands behind the tasks
    columns = _by_head(names_before)
    for task in tasks:
        head = Head(f"{task}, {unit}", f"{PUBLISHED}, {unit}", task)
        columns[head] = lambda row, task=task: row.get(task, "")  # bound now: `task` changes with the loop
    columns |= _by_head([note])
    return Table.from_records(f"{source['source']}: {unit}", rows, columns, UNCHECKED)


def _is_of(figure: Mapping[str, Any], label: str, task: Comparison) -> bool:
    """True if a figure is of a task, which it names as the tables do or by its own name."""
    return figure["task"] in (label, task.name)


def beside(label: str, task: Comparison, sources: Iterable[Mapping[str, Any]]) -> Table | None:
    """The rows of a task, and below them the published figures of its metric, which have a column of their own.

    `label`: its name in tables. None if no source has a figure of the task.
    """
    figures = []
    for source in sources:
        for figure in source["figures"]:
            if figure["metric"] == task.metric and _is_of(figure, label, task):
                figures.append(figure)
    if not figures:
        return None

    unit = WORDS[task.metric]
    published = Head(f"{PUBLISHED}, {unit}", unit, PUBLISHED)
    measured: Columns = {
        **names_of_compared(task.rows),
        Head(f"{MEASURED}, {unit}", unit, MEASURED): lambda each: value_with_remark(each.row),
        Head(LEVEL, unit, LEVEL): interval_with_remark,
    }
    rows: list[dict[str, Cell]] = []
    for each in task.rows:
        rows.append({head: cell(each) for head, cell in measured.items()})
    for figure in figures:
        remark = ", ".join(filter(None, [f"published: {figure['source']}", figure["note"]]))
        rows.append({**_names(figure), published: (_value(figure), remark)})
    columns = _by_head([*measured, published])
    return Table.from_records(f"Measured here and published, {unit}", rows, columns, UNCHECKED)


def _by_head(heads: Iterable[str]) -> Columns:
    """The columns of rows that hold their cells by these heads; a row may lack some."""
    columns: Columns = {}
    for head in heads:
        columns[head] = lambda row, head=head: row.get(head, "")  # bound now: `head` changes with the loop
    return columns


def _names(figure: Mapping[str, Any]) -> dict[str, str]:
    """The cells that name a figure."""
    names = {key: figure[key] for key in NAMES}
    names["estimator"] = figure["display"]
    if names["block"] == "none":
        names["block"] = WHOLE_TARGET
    return names


def _value(figure: Mapping[str, Any]) -> str:
    return number(figure["value"], f".{figure['decimals']}f", figure["stderr"], figure["bound"])


def lines(sources: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The lines of report.csv. They have no `value`: a program that reads this column meets no figure of others."""
    for source in sources:
        for figure in source["figures"]:
            yield {
                "model": figure["model"],
                "estimator": figure["estimator"],
                "kind": "published bound" if figure["bound"] else PUBLISHED,
                **{key: figure[key] for key in ("rule", "block", "cache", "task", "metric")},
                "published": figure["value"],
                "published_stderr": figure["stderr"],
                "published_note": figure["note"],
                "source": figure["source"],
            }
