"""The files of a report: report.md, LaTeX tables, and the text that the command prints."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

from lm_eval_duel.console.tables import one_line
from lm_eval_duel.results import tables
from lm_eval_duel.results.table import MARKDOWN, WORDS, Table, bullets, latex, markdown, plain, spaced

MAX_LENGTH = 100  # characters of a task's name in a file name
SINGLE = "Each 95 % interval is for its pair alone: of twenty pairs of equal rows, about one is called different."
DRAWN = (
    "95 % intervals are over documents, which carry the Monte Carlo errors of their values along: those of estimates "
    "and of the ELBO include it. +- is that error alone."
)
PRINTED = ("methods", "cache", "pairs")  # tables of a task that the command prints
escape = MARKDOWN.escape


def safe_name(name: str) -> str:
    """A name as part of a file name: safe on any file system."""
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in name)[:MAX_LENGTH]


def free(stem: str, suffix: str, taken: Iterable[str]) -> str:
    """A file name that is not taken, ignoring case: replacing characters may make two tasks' names equal."""
    used = {name.casefold() for name in taken}
    names = (f"{stem}{'' if n == 1 else f'_{n}'}{suffix}" for n in itertools.count(1))
    return next(name for name in names if name.casefold() not in used)


def subject(title: str) -> str:
    """A title such as `demo-mdm, block 4, cache=dual` as part of a file name: `demo-mdm_block_4_cache_dual`."""
    return safe_name(re.sub(r"[\s,:=/]+", "_", title))


def page(report: Mapping[str, Any]) -> str:
    """report.md."""
    parts = ["# How far from autoregressive?"]
    parts += ["\n".join(f"- {line}" for task in report["tasks"].values() for line in task.headlines)]
    parts += [bullets(report["notes"])]
    for name, task in report["tasks"].items():
        documents = "" if task.documents is None else f", {task.documents} documents"
        parts += [f"## {escape(name)}: {WORDS[task.metric]}{documents}", markdown(tables.values(task))]
        parts += _figures(report, name, "perplexity")
        if task.differences:
            title = "Compared as published, although these differ" if task.as_published else "These differ"
            parts += [f"**{title}:**", bullets(task.differences)]
        for stem, title, table in tables.task_tables(task):
            parts += [] if stem == "methods" else [f"### {escape(title)}", markdown(table)]
            parts += [SINGLE] if stem == "pairs" else []
        drawn = any(row.interval and row.entry.drawn for row in task.rows)
        parts += [*_figures(report, name, "rules"), "### Notes", bullets([*task.notes, *([DRAWN] if drawn else [])])]
    if len(report["tasks"]) > 1 and (table := tables.averages([*report["tasks"]], report["averages"])):
        parts += ["## Gap closed over tasks, %", markdown(table)]
    for table in itertools.starmap(tables.accuracies, report["accuracies"].items()):
        parts += [f"## {escape(table.title)}", markdown(table)]
    if report["cost"]:
        parts += ["## Cost", markdown(tables.cost(report["cost"]))]
    if report["traces"]:
        parts += ["## Reveal orders, from traces", markdown(tables.traces(report["traces"])), tables.TRACES]
        parts += _figures(report, "traces", "trace")
    table = tables.files(report["results"])
    return spaced([*parts, "## Files", escape(table.title), markdown(table)])


def _figures(report: Mapping[str, Any], about: str, kind: str) -> list[str]:
    figures = [figure for figure in report["figures"] if (figure["about"], figure["kind"]) == (about, kind)]
    return [
        f"{'' if figure['file'].endswith('.pdf') else '!'}[{escape(figure['title'])}]({quote(figure['file'])})"
        for figure in figures
    ]


def bodies(report: Mapping[str, Any]) -> dict[str, str]:
    """The body of every LaTeX table, by file name."""
    every: list[tuple[str, Table | None]] = []
    if len(report["tasks"]) > 1:
        every.append(("perplexity", tables.perplexities(report["tasks"])))
        every.append(("gap_closed", tables.averages([*report["tasks"]], report["averages"])))
    for name, task in report["tasks"].items():
        for stem, title, table in tables.task_tables(task):
            end = f"_{subject(title.partition(': ')[2])}" if stem == "rules" and len(task.rules) > 1 else ""
            every.append((f"{stem}_{safe_name(name)}{end}", table))
    every += [(f"accuracy_{safe_name(n)}", tables.accuracies(n, rows)) for n, rows in report["accuracies"].items()]
    files: dict[str, str] = {}
    for stem, table in every:
        if table is not None:
            files[free(stem, ".tex", files)] = latex(table)
    return files


def console(report: Mapping[str, Any]) -> str:
    """The text that the command prints: headlines, perplexities, differences, and the names of the files."""
    parts = [line.replace("**", "") for task in report["tasks"].values() for line in task.headlines]
    for name, task in report["tasks"].items():
        for stem, title, table in tables.task_tables(task):
            if stem in PRINTED:
                what, comma, unit = title.partition(", ")
                what = f"{what[0].lower()}{what[1:]} on " if comma else ""
                parts += [f"{what}{one_line(name)}, {unit or title}", plain(table)]
        parts += ["\n".join(f"differs: {one_line(difference)}" for difference in task.differences)]
    for table in itertools.starmap(tables.accuracies, report["accuracies"].items()):
        parts += [one_line(table.title), plain(table)]
    parts += ["\n".join(map(one_line, report["notes"])), f"wrote to {report['folder']}: {', '.join(report['files'])}"]
    return spaced(parts).rstrip("\n")
