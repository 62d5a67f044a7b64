"""The files of a report: report.md, LaTeX tables, and the text that the command prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

from lm_eval_duel.results import pairs, tables
from lm_eval_duel.results.names import free, safe_name, subject
from lm_eval_duel.results.table import MARKDOWN, WORDS, Table, bullets, latex, markdown, plain, spaced
from lm_eval_duel.tables import one_line

SINGLE = "Each 95 % interval is for its pair alone: of twenty pairs of equal rows, about one is called different."
escape = MARKDOWN.escape


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
        for title, table in _of_task(task):
            parts += [f"### {escape(title)}", markdown(table)]
            parts += [SINGLE] if table.rows and title.startswith("Paired") else []
        parts += [*_figures(report, name, "rules"), "### Notes", bullets(task.notes)]
    if len(report["tasks"]) > 1 and (table := tables.averages([*report["tasks"]], report["averages"])):
        parts += ["## Gap closed over tasks, %", markdown(table)]
    for table in map(tables.accuracies, report["accuracies"]):
        parts += [f"## {escape(table.title)}", markdown(table)]
    if report["cost"]:
        parts += ["## Cost", markdown(tables.cost(report["cost"]))]
    if report["traces"]:
        parts += ["## Reveal orders, from traces", markdown(tables.traces(report["traces"])), tables.TRACES]
        parts += _figures(report, "traces", "trace")
    table = tables.files(report["results"])
    return spaced([*parts, "## Files", escape(table.title), markdown(table)])


def _of_task(task: Any) -> Iterator[tuple[str, Table]]:
    """The tables of a task other than the first, with their titles."""
    unit = pairs.unit(task.metric)
    if any(row.duel for row in task.rows):
        yield "Gap to the autoregressive model", tables.gaps(task)
    if costs := tables.cache_costs(task):
        yield f"Cost of the cache, nats per {unit}", costs
    if task.pairs:
        yield f"Paired differences, nats per {unit}", tables.differences(task)
    for speeds in task.rules:
        yield f"Rules against NFE: {speeds.title}", tables.speeds(task, speeds)


def _figures(report: Mapping[str, Any], about: str, kind: str) -> list[str]:
    figures = [figure for figure in report["figures"] if (figure["about"], figure["kind"]) == (about, kind)]
    return [
        f"{'' if figure['file'].endswith('.pdf') else '!'}[{escape(figure['title'])}]({quote(figure['file'])})"
        for figure in figures
    ]


def bodies(report: Mapping[str, Any]) -> dict[str, str]:
    """The body of every LaTeX table, by file name."""
    files: dict[str, str] = {}

    def add(stem: str, table: Table | None) -> None:
        if table is not None:
            files[free(stem, ".tex", files)] = latex(table)

    if len(report["tasks"]) > 1:
        add("perplexity", tables.perplexities(report["tasks"]))
        add("gap_closed", tables.averages([*report["tasks"]], report["averages"]))
    for name, task in report["tasks"].items():
        safe = safe_name(name)
        if any(row.duel for row in task.rows):
            add(f"gap_{safe}", tables.gaps(task))
        add(f"methods_{safe}", tables.values(task))
        add(f"cache_{safe}", tables.cache_costs(task))
        if task.pairs:
            add(f"pairs_{safe}", tables.differences(task))
        for speeds in task.rules:
            end = "" if len(task.rules) == 1 else f"_{subject(speeds.title)}"
            add(f"rules_{safe}{end}", tables.speeds(task, speeds))
    for table in report["accuracies"]:
        add(f"accuracy_{safe_name(table['task'])}", tables.accuracies(table))
    return files


def console(report: Mapping[str, Any]) -> str:
    """The text that the command prints: headlines, perplexities, differences, and the names of the files."""
    parts = [line.replace("**", "") for task in report["tasks"].values() for line in task.headlines]
    for name, task in report["tasks"].items():
        parts += [f"{one_line(name)}, {WORDS[task.metric]}", plain(tables.values(task))]
        unit = pairs.unit(task.metric)
        if costs := tables.cache_costs(task):
            parts += [f"cost of the cache on {one_line(name)}, nats per {unit}", plain(costs)]
        if task.pairs:
            parts += [f"paired differences on {one_line(name)}, nats per {unit}", plain(tables.differences(task))]
        parts += ["\n".join(f"differs: {one_line(difference)}" for difference in task.differences)]
    for table in map(tables.accuracies, report["accuracies"]):
        parts += [one_line(table.title), plain(table)]
    parts += ["\n".join(map(one_line, report["notes"])), f"wrote to {report['folder']}: {', '.join(report['files'])}"]
    return spaced(parts).rstrip("\n")
