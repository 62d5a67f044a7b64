"""`lm-eval-duel report`: the paper's tables and figures from the harness's results."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from lm_eval_duel.core.scores import METRICS
from lm_eval_duel.errors import DuelError, counted
from lm_eval_duel.results import (
    averages,
    baseline,
    columns,
    compare,
    costs,
    figures,
    files,
    headlines,
    match,
    order,
    published,
    run_tables,
    standings,
    traced,
)
from lm_eval_duel.results.averages import AveragePair
from lm_eval_duel.results.compare import Comparison
from lm_eval_duel.results.costs import RunCost
from lm_eval_duel.results.figures import Image
from lm_eval_duel.results.notes import all_mask_starts, shown_once
from lm_eval_duel.results.rows import Row
from lm_eval_duel.results.runs import Run, is_limited
from lm_eval_duel.results.standings import Standings
from lm_eval_duel.results.table import WORDS, Note, Table, bullets, escape, spaced

OF_AVERAGES = ("accuracy", "accuracy_pairs")  # tables whose titles name their task, and the number of documents
PRINTED = ("methods", "ranks", "cache", "pairs", *OF_AVERAGES)  # tables that the command prints


@dataclasses.dataclass(frozen=True)
class Report:
    """The content of the files of a report.

    `runs`: the baselines first. `published`: figures of others. `documents`: of the page, with their orders.
    `average_pairs`: of each task with averages other than perplexities. `same_averages`: as `order.Once` has them.
    """

    runs: list[Run]
    baselines: list[Run]
    tasks: dict[str, Comparison]
    notes: list[Note]
    published: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    documents: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    average_pairs: dict[str, list[AveragePair]] = dataclasses.field(default_factory=dict)
    same_averages: dict[str, dict[Row, list[Row]]] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def standings(self) -> Standings:
        return standings.standings(self.tasks, self.runs, self.baselines)

    @functools.cached_property
    def costs(self) -> list[RunCost]:
        return costs.of_runs(self.runs, self.baselines, self.tasks.values())

    @property
    def scored(self) -> list[str]:
        """The tasks with other averages than perplexities."""
        return _scored(self.runs)

    @functools.cached_property
    def headlines(self) -> dict[str, list[str]]:
        """The sentences of each task."""
        return {name: headlines.of_task(name, task.rows) for name, task in self.tasks.items()}

    def tables(self) -> Iterator[tuple[str, str, Table]]:
        """Every table: the task that it is about, or "" for one over tasks; its kind; and itself."""
        if len(self.tasks) > 1:
            yield "", "perplexity", columns.perplexities(self.standings, self.tasks)
            if any(task.closes_a_gap for task in self.tasks.values()):
                yield "", "gap_closed", columns.gaps_closed(self.standings, self.tasks)
        for name, task in self.tasks.items():
            for kind, table in columns.of_task(task):
                yield name, kind, table
            beside = published.beside(name, task, self.published)
            if beside:
                yield name, "published", beside
        for name in self.scored:
            yield name, "accuracy", run_tables.accuracies(name, self.runs, self.baselines)
            if self.average_pairs.get(name):
                yield name, "accuracy_pairs", run_tables.average_differences(name, self.average_pairs[name])
        if self.costs:
            yield "", "cost", run_tables.cost(self.costs)


# ---------------------------------------------------------------- what is compared


def collect(options: argparse.Namespace) -> Report:
    """The content of the report."""
    ar, runs = baseline.read_runs(options)
    notes: list[Note] = []
    if options.ar:
        baseline.check_single(ar)
    else:
        ar, note = baseline.find(runs)
        if not options.apart:  # else each table may have its own
            notes.append(note)
    ar = [*ar, *baseline.of_averages(runs, ar)]
    for run in runs:
        notes += map(Note, run.left_out())
    shown = []
    for run in runs:
        if (run.config.ours or run.config.autoregressive) and run.has_results:
            shown.append(run)
    if not shown:
        raise DuelError(f"No perplexity ({', '.join(METRICS)}) to report: {'; '.join(map(str, notes))}")
    if options.metric and not any(run.tasks for run in shown):
        names = ", ".join(_scored(shown))
        raise DuelError(
            f"--metric {options.metric} is a perplexity, but RESULTS have other averages only, of {names}. Leave it "
            "out: all averages are shown."
        )

    traces = traced.Traces(options.traces)
    shown, notes_on_traces = traces.attach(shown)  # new records, so the baselines are found by their names
    notes += notes_on_traces
    baseline_names = {run.name for run in ar}
    shown, same_averages = order.once(shown, baseline_names)
    baselines = [run for run in shown if run.name in baseline_names]
    tasks, of_tables, apart = _compare_tasks(options, shown, baselines)
    baselines = list(dict.fromkeys([*baselines, *of_tables]))
    notes += apart
    notes.append(shown_once({name: task.same for name, task in tasks.items()}, same_averages))
    notes.append(all_mask_starts(shown))

    tasks_of_runs: dict[str, None] = dict.fromkeys(tasks)  # by their labels, too
    for run in runs:
        tasks_of_runs |= dict.fromkeys(run.every_task)
    notes += published.without_results(options.published, tasks_of_runs)
    notes += published.in_other_units(options.published, tasks)
    if options.figures and not figures.available():
        notes.append(Note(advice=figures.MISSING))
    documents: list[dict[str, Any]] = []
    if options.page:
        labels = {}
        for label, task in tasks.items():
            for each in task.rows:
                labels[each.row.run.name, task.name] = label
        documents, problems = traced.documents(traces, shown, labels, options.shown, options.tokenizer)
        notes += problems
    average_pairs = {}
    for name in _scored(shown):
        in_order = order.rows_of_averages(shown, name, baselines)
        chosen = averages.chosen_pairs(options.pairs, in_order)
        average_pairs[name] = averages.pairs(name, chosen)
        notes.append(_other_pairs(name, len(chosen), averages.possible_pairs(in_order), "of averages"))
    return Report(
        runs=sorted(shown, key=lambda run: run not in baselines),
        baselines=baselines,
        tasks=tasks,
        notes=list(filter(None, notes)),
        published=published.by_source(options.published),
        documents=documents,
        average_pairs=average_pairs,
        same_averages=same_averages,
    )


def _scored(runs: Iterable[Run]) -> list[str]:
    """The tasks with other averages than perplexities."""
    names: dict[str, None] = {}
    for run in runs:
        for name, task in run.every_task.items():
            if task.scores:
                names[name] = None
    return list(names)


def _compare_tasks(
    options: argparse.Namespace, shown: Sequence[Run], baselines: Sequence[Run]
) -> tuple[dict[str, Comparison], list[Run], list[Note]]:
    """The comparison of each task that is not the baselines' alone, and notes.

    With --apart a task may have several, each with a baseline of its own; these are returned, too.
    """
    names: dict[str, None] = {}
    for run in shown:
        if run not in baselines:
            names |= dict.fromkeys(run.tasks)
    only_perplexities = all(run.tasks and run.tasks == run.every_task for run in shown)
    if not names and only_perplexities:
        raise DuelError("Nothing to compare: only the --ar result of RESULTS has perplexities.")

    tasks: dict[str, Comparison] = {}
    of_tables: list[Run] = []
    notes = []
    for name in names:
        runs = [run for run in shown if name in run.tasks]
        metric = compare.shared_metric(name, options.metric, runs)
        groups = _groups(name, metric, runs, baselines) if options.apart else [(runs, "")]
        for members, difference in groups:
            label = _free_label(_label(name, members), tasks)
            if difference:
                notes.append(Note(f"{label}: {difference}"))
            of_group: Sequence[Run] = [run for run in members if run in baselines]
            if options.apart and not of_group:
                of_group, note = baseline.find(members)
                of_tables += of_group
                if note.advice:
                    in_windows = f"with the documents and windows of this table ({match.size_of_windows(members[0])})"
                    note = Note(note.fact, f"{note.advice}, {in_windows}")
                notes.append(note.after(f"{label}: "))
            elif baselines and not of_group:
                notes.append(_baseline_elsewhere(label, baselines))
            tasks[label] = compare.task(name, members, of_group, metric, options.as_published, options.pairs)
            notes.append(_other_pairs(label, len(tasks[label].pairs), tasks[label].possible_pairs))
            notes += _gaps_without_interval(label, tasks[label])
    return tasks, of_tables, notes


def _baseline_elsewhere(label: str, baselines: Sequence[Run]) -> Note:
    """A note on a task of which the baselines have no result: it has no gaps."""
    names: dict[str, None] = {}
    for run in baselines:
        names |= dict.fromkeys(run.tasks)
    others = ", ".join(names)
    if not others:
        return Note()
    fact = f"{label}: no gaps, since the autoregressive results are of {others}."
    advice = "score the baseline on it, too; the texts of score --json, and the same texts as a task, are two tasks"
    return Note(fact, advice)


def _gaps_without_interval(name: str, task: Comparison) -> list[Note]:
    """Notes on the results without values per document, which take the interval from a gap closed; each once."""
    reasons: dict[str, Note] = {}  # by file
    for each in task.rows:
        closed = each.closed
        if closed.distinguishable is None or closed.interval is not None:
            continue
        for row in (closed.elbo, each.row, closed.ar):
            if row not in task.draws and row.no_interval.advice:
                reasons.setdefault(row.run.name, row.no_interval)
    files_of_reasons: dict[Note, list[str]] = {}
    for file, reason in reasons.items():
        files_of_reasons.setdefault(reason, []).append(file)
    notes = []
    for reason, names in files_of_reasons.items():
        listed = ", ".join(names)
        notes.append(Note(advice=f"{name}: gap closed has no interval because of {listed}: {reason}"))
    return notes


def _other_pairs(name: str, count: int, possible: int, of: str = "") -> Note:
    """The number of pairs of rows in the table of paired differences, and how to get all; empty if all are there."""
    if not 0 < count < possible:
        return Note()
    table = f"the paired differences {of}".strip()
    listed = f"{name}: {count} of {counted(possible, 'pair')} of rows are among {table}"
    return Note(advice=f"{listed}; --pairs all lists every pair")


def _label(name: str, runs: Sequence[Run]) -> str:
    """The name of a task in tables; if its results give it several, that of the first."""
    for run in runs:
        label = run.label_of(name)
        if label != name:
            return label
    return name


def _free_label(label: str, taken: Container[str]) -> str:
    """The label, with a number from 2 on if it is taken.

    So the first table keeps its name, and its files theirs, when a result is added that stands apart.
    """
    numbered = label
    number = 1
    while numbered in taken:
        number += 1
        numbered = f"{label} ({number})"
    return numbered


def _groups(name: str, metric: str, runs: Sequence[Run], baselines: Sequence[Run]) -> list[tuple[list[Run], str]]:
    """The runs of a task in groups that may be compared; the first has the baseline. Runs stay oldest first."""
    with_metric = [run for run in runs if metric in run.tasks[name].metrics]
    baselines_first = sorted(with_metric, key=lambda run: run not in baselines)
    groups = []
    for members, difference in match.groups(name, metric, baselines_first):
        oldest_first = sorted(members, key=with_metric.index)
        groups.append((oldest_first, difference))
    return groups


# ---------------------------------------------------------------- what is written


def markdown(report: Report, images: Sequence[Image] = ()) -> str:
    """report.md."""
    of_tasks: dict[str, dict[str, list[Table]]] = {name: {} for name in report.tasks}  # by task and kind
    over_tasks = []
    for name, kind, table in report.tables():
        if name and kind not in OF_AVERAGES:
            of_tasks[name].setdefault(kind, []).append(table)
        else:
            over_tasks.append(table)

    lines = []
    for of_task in report.headlines.values():
        for line in of_task:
            lines.append(f"- {line}")
    title = "How far from autoregressive?" if report.tasks else "Accuracies and other averages"
    parts = [f"# {title}", "\n".join(lines), bullets(map(str, report.notes))]
    for name, task in report.tasks.items():
        images_of_task = [image for image in images if image.task == name]
        parts += _markdown_of_task(name, task, of_tasks[name], images_of_task)
    for table in over_tasks:
        parts += [f"## {escape(table.title)}", table.markdown()]
    for source in report.published:
        of_source = published.table(source)
        parts.append(f"## Published: {escape(of_source.title)}")
        parts.append(of_source.markdown())
    listed = run_tables.files(report.runs, report.baselines)
    parts += ["## Files", escape(listed.title), listed.markdown()]
    for name, same in report.same_averages.items():
        parts.append(bullets(f"averages of {name}: {text}" for text in order.notes_on_others(same)))
    return spaced(parts)


def _markdown_of_task(
    name: str, task: Comparison, tables: Mapping[str, Sequence[Table]], images: Sequence[Image]
) -> Iterator[str]:
    """The parts of a task: values and their figure, what differs, the other tables, figures of rules, notes."""
    about = ", ".join(filter(None, [WORDS[task.metric], task.size]))
    yield f"## {escape(name)}: {about}"
    for table in tables["methods"]:
        yield table.markdown()
    for image in images:
        if image.kind == "perplexity":
            yield image.markdown(quote)
    if task.differences:
        title = "Compared as published, although these differ" if task.as_published else "These differ"
        yield f"**{title}:**"
        yield bullets(task.differences)
    for kind, of_kind in tables.items():
        if kind == "methods":
            continue
        for table in of_kind:
            yield f"### {escape(table.title)}"
            yield table.markdown()
    for image in images:
        if image.kind == "rules":
            yield image.markdown(quote)
    yield "### Notes"
    yield bullets(task.notes)


def console(report: Report) -> str:
    """The text that the command prints: headlines, perplexities, differences, and notes."""
    parts = []
    for of_task in report.headlines.values():
        for line in of_task:
            without_bold = line.replace("**", "")
            parts.append(re.sub(r"\\(?=[^\w\s])", "", without_bold))  # and without the escapes of Markdown
    for name, kind, table in report.tables():
        if kind not in PRINTED:
            continue
        title = table.title if kind in OF_AVERAGES else f"{name}: {table.title}"
        if kind == "methods" and report.tasks[name].size:
            title += f", {report.tasks[name].size}"
        parts.append(title)
        parts.append(table.text())
    for task in report.tasks.values():
        parts += [f"differs: {line}" for line in task.differences]
    return spaced([*parts, "\n".join(map(str, report.notes))])


def write(
    report: Report,
    folder: str,
    formats: Sequence[str] = ("png",),
    width: float | None = None,
    others: Mapping[str, str] | None = None,
) -> list[str]:
    """Write the report's files and return their names. Files of an earlier report are removed.

    `formats` (none for no figures) and `width` (in inches) are for the figures; `others`: more files. Raises DuelError,
    and leaves the folder unchanged, if a file there does not belong to an earlier report.
    """
    images = figures.draw(report.tasks, formats, width) if formats and figures.available() else []
    written: dict[str, str | bytes] = {
        "report.md": markdown(report, images),
        "report.csv": files.csv_of(report.standings, published.lines(report.published)),
    }
    tables = []
    subjects = []
    for name, kind, table in report.tables():
        if kind == "gap" and not report.tasks[name].has_gap:
            continue
        if kind != "cost":
            tables.append(_latex(report, name, kind, table))
            subjects.append((name, kind, ""))
    for source in report.published:
        tables.append(published.table(source).latex())
        subjects.append(("", "published", source["source"]))
    for stem, text in zip(files.stems(subjects), tables, strict=True):
        written[f"{stem}.tex"] = text
    for image in images:
        written |= image.files
    return files.write(folder, content(report), written | dict(others or {}))


def _latex(report: Report, name: str, kind: str, table: Table) -> str:
    """A table in LaTeX with the numbers of documents; below it, those that --limit cut and what --as_published allows.

    `name`: of its task; empty for a table over all tasks.
    """
    if kind in OF_AVERAGES:  # these have a column with the numbers of documents
        return table.latex()
    tasks = {name: report.tasks[name]} if name else report.tasks
    sizes = []
    below = []
    for of_task, task in tasks.items():
        size = ": ".join(filter(None, [of_task, task.size]))
        sizes.append(size)
        if is_limited(task.documents, task.available):
            below.append(size)
        if task.as_published:
            below += [f"differs: {line}" for line in task.differences]
    return table.latex("; ".join(sizes), "; ".join(below))


def content(report: Report) -> dict[str, Any]:
    """report.json."""
    tasks = {}
    for name, task in report.tasks.items():
        tasks[name] = files.comparison(task) | {"headlines": report.headlines[name]}
    accuracies = {}
    for name in report.scored:
        accuracies[name] = files.accuracies(report.runs, name, report.baselines)
    average_pairs = {}
    for name, pairs in report.average_pairs.items():
        listed = [run for run in report.runs if run.scores(name)]
        average_pairs[name] = [files.average_pair(pair, listed) for pair in pairs]
    results = []
    for run in report.runs:
        results.append(
            {
                "file": run.name,
                "model": run.label,
                "ar": run in report.baselines,
                "fingerprint": run.config.fingerprint,
                "spec": run.spec,
            }
        )
    return {
        "version": 1,
        "ar": [run.name for run in report.baselines],
        "notes": list(map(str, report.notes)),
        "tasks": tasks,
        "accuracies": accuracies,
        "accuracy_pairs": average_pairs,
        "standings": files.ranking(report.standings, report.tasks),
        "published": report.published,
        "documents": report.documents,
        "cost": [files.cost(cost) for cost in report.costs],
        "results": results,
    }
