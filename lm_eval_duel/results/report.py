"""`lm-eval-duel report`: the paper's tables and figures from the harness's results."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from lm_eval_duel.core.scores import METRICS
from lm_eval_duel.errors import DuelError, usage
from lm_eval_duel.results import (
    as_csv,
    as_json,
    compare,
    cost,
    figures,
    gaps,
    latex,
    match,
    own_files,
    player,
    published,
    read,
    rows,
    tables,
)
from lm_eval_duel.results.compare import ComparedRow, Comparison
from lm_eval_duel.results.figures import Image
from lm_eval_duel.results.rows import Row
from lm_eval_duel.results.runs import Documents, Run
from lm_eval_duel.results.standings import Standings, standings
from lm_eval_duel.results.table import WORDS, Note, Table, bullets, escape, form_of, number, plus_minus, spaced, span
from lm_eval_duel.rules.tables import without_defaults

SINGLE = (
    "Each 95 % interval holds for its pair alone. Among twenty pairs that do not differ, about one is still called "
    "different."
)
DRAWN = (
    "95 % intervals are over documents; for estimates and the ELBO they include the Monte Carlo error of each value. "
    "± is the Monte Carlo error alone."
)
PRINTED = ("methods", "cache", "pairs")  # tables of a task that the command prints


@dataclasses.dataclass(frozen=True)
class Report:
    """The content of the files of a report.

    `runs`: the baselines first. `published`: figures of others. `documents`: of the page, with their orders.
    """

    runs: list[Run]
    baselines: list[Run]
    tasks: dict[str, Comparison]
    notes: list[Note]
    published: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    documents: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    @functools.cached_property
    def standings(self) -> Standings:
        return standings(self.tasks, self.runs, self.baselines)

    @functools.cached_property
    def costs(self) -> list[cost.RunCost]:
        return cost.table(self.runs, self.baselines, [row for task in self.tasks.values() for row in task.rows])

    @property
    def scored(self) -> list[str]:
        """The tasks with other averages than perplexities."""
        return list(dict.fromkeys(name for run in self.runs for name, task in run.every_task.items() if task.scores))

    @functools.cached_property
    def headlines(self) -> dict[str, list[str]]:
        return {name: headlines(name, task.rows) for name, task in self.tasks.items()}

    def tables(self) -> Iterator[tuple[str, str, Table]]:
        """Every table: the task that it is about, or "" for one over tasks; its kind; and itself."""
        if len(self.tasks) > 1:
            yield "", "perplexity", tables.perplexities(self.standings, self.tasks)
            if any(row.closed.percent is not None for task in self.tasks.values() for row in task.rows):
                yield "", "gap_closed", tables.gaps_closed(self.standings, self.tasks)
        for name, task in self.tasks.items():
            yield from ((name, kind, table) for kind, table in tables.task_tables(task))
        for name in self.scored:
            yield name, "accuracy", tables.accuracies(name, self.runs, self.baselines)
        if self.costs:
            yield "", "cost", tables.cost(self.costs)


# ---------------------------------------------------------------- what is compared


def read_runs(options: argparse.Namespace) -> tuple[list[Run], list[Run]]:
    """The runs of --ar, and all runs; raises DuelError for an --ar that is not of an autoregressive model."""
    with usage():
        runs = read.runs([*options.results, *([options.ar] if options.ar else [])])
        files = {str(file) for file in read.files([options.ar])} if options.ar else set()
    ar = [run for run in runs if run.name in files]
    for run in ar:
        if not run.autoregressive:
            what = f"estimator={run.estimator}" if run.ours else f"--model {run.model}"
            raise DuelError(
                f"--ar {run.name} is a result of {what}, not of an autoregressive model; name one of ours "
                f"({match.TWIN}), or one of `--model hf` or of another autoregressive model of the harness."
            )
    return ar, runs


def collect(options: argparse.Namespace) -> Report:
    """The content of the report."""
    ar, runs = read_runs(options)
    notes = [Note(note) for run in runs for note in run.left_out()]
    for name in {name for run in ar for name in run.tasks}:
        if len(holding := [run.name for run in ar if name in run.tasks]) > 1:
            raise DuelError(f"--ar holds {name} more than once: {', '.join(holding)}. Name one of these files.")
    if not options.ar:
        ar, note = baseline(runs)
        notes = [*filter(None, [note]), *notes]
    known = [run for run in runs if run.ours or run.autoregressive]
    shown = [run for run in known if run.tasks or any(task.scores for task in run.every_task.values())]
    if not shown:
        raise DuelError(f"No perplexity ({', '.join(METRICS)}) to report: {'; '.join(map(str, notes))}")
    named = {run.name for run in ar}
    traces = read.Traces(options.traces)
    shown, gone = traces.attach(shown)
    baselines = [run for run in shown if run.name in named]
    notes += gone
    names = dict.fromkeys(name for run in shown if run not in baselines for name in run.tasks)
    if not names and any(run.tasks for run in shown) and all(run.tasks == run.every_task for run in shown):
        raise DuelError("Nothing to compare: only the --ar result of RESULTS has perplexities.")
    tasks: dict[str, Comparison] = {}
    for name in names:
        metric = compare.shared_metric(name, options.metric, [run for run in shown if name in run.tasks])
        groups = _groups(name, metric, shown, baselines) if options.apart else [(shown, "")]
        for n, (members, difference) in enumerate(groups, 1):
            label = f"{_label(name, members)}{'' if len(groups) == 1 else f' ({n})'}"
            notes += [Note(f"{label}: {difference}")] if difference else []
            tasks[label] = compare.task(name, members, baselines, metric, options.as_published, options.pairs)
    if not figures.available():
        notes.append(Note(advice=figures.MISSING))
    documents: list[dict[str, Any]] = []
    if options.page:
        documents, problems = player.collect(traces, shown, options.shown, options.tokenizer)
        notes += problems
    return Report(
        runs=sorted(shown, key=lambda run: run not in baselines),
        baselines=baselines,
        tasks=tasks,
        notes=notes,
        published=published.sources(options.published),
        documents=documents,
    )


def _label(name: str, runs: Sequence[Run]) -> str:
    """The name of a task in tables. Texts that `score` scored have the name of their file."""
    scored = {run.content.get("scored") for run in runs if name in run.tasks}
    return str(scored.pop() or name) if len(scored) == 1 else name


def _groups(name: str, metric: str, runs: Sequence[Run], baselines: Sequence[Run]) -> list[tuple[list[Run], str]]:
    """The runs of a task in groups that may be compared; the first has the baseline. Runs stay oldest first."""
    having = [run for run in runs if name in run.tasks and metric in run.tasks[name].metrics]
    groups = match.groups(name, metric, sorted(having, key=lambda run: run not in baselines))
    return [(sorted(members, key=having.index), difference) for members, difference in groups]


def baseline(runs: Sequence[Run]) -> tuple[list[Run], Note]:
    """The results of the only autoregressive model among others, or none of them and a note that says why.

    Of several results of a task under one spec it is the newest.
    """
    if not any(run.tasks for run in runs):
        return [], Note()
    causal = [run for run in runs if run.autoregressive and run.tasks]
    if causal and all(run.autoregressive for run in runs if run.tasks):
        return [], Note()
    if note := no_baseline(causal):
        return [], note
    newest: dict[str, Run] = {}
    for run in causal:  # oldest first
        for name in run.tasks:
            if newest.setdefault(name, run).spec != run.spec:
                several = f"No gaps: there are several results of {run.label} on {name}."
                return [], Note(several, "name one with --ar")
            newest[name] = run
    return list({run.name: run for run in newest.values()}.values()), Note()


def no_baseline(causal: Sequence[Run]) -> Note:
    """The reason that runs of autoregressive models are no baseline; empty if they are of one model."""
    models = {run.key: run.label for run in causal}
    if not models:
        return Note("No gaps: gap closed needs an autoregressive result.", match.TWIN)
    several = f"No gaps: there are {len(models)} autoregressive models ({', '.join(models.values())})."
    return Note(several, "name one with --ar") if len(models) > 1 else Note()


# ---------------------------------------------------------------- headlines


def headlines(name: str, rows: Sequence[ComparedRow]) -> list[str]:
    """One sentence per model of a task except the baseline, in Markdown: its perplexity, its ELBO and gap closed."""
    base = next((each.row for each in rows if each.row.ar), None)
    others = [each for each in rows if not each.row.ar]
    models = dict.fromkeys(each.row.model for each in others if each.row.estimator != "ar")
    return [_headline(name, base, [each for each in others if each.row.model == model]) for model in models]


def _headline(name: str, base: Row | None, mine: Sequence[ComparedRow]) -> str:
    chosen, metric = compare.headline(mine), mine[0].row.metric
    form, unit = form_of(metric), "" if metric in ("token_perplexity", "perplexity") else f", {WORDS[metric]}"
    start = f"**{escape(mine[0].row.model)}** on {escape(name)}{unit}"
    against = f" against {number(base.value, form)} for {escape(base.model)}" if base else ""
    if chosen is None:
        bounds = [each for each in mine if each.row.likelihood]
        bound = min(bounds, key=lambda each: (each.row.bound, each.row.value), default=None)
        if bound is None:
            return f"{start}: the oracle only; no DUEL result (estimator=duel)."
        at_most = "at most " if bound.row.bound else ""
        against += f", a gap of {at_most}{number(bound.gap, form)}" if base else ""
        return f"{start}: {_value(bound.row)} ({escape(bound.row.name)}){against}; no DUEL result (estimator=duel)."
    seed = f", noise seed {chosen.row.run.spec['noise_seed']}" if "noise_seed" in chosen.row.run.spec else ""
    named = f"{chosen.row.entry.display}{seed}"
    text = f"{start}: {_value(chosen.row)} under {_rule(chosen.row)} ({named}){against}"
    text += "." if chosen.closed.elbo is None and base is None else _gap(chosen, form)
    lowest = min((each.row for each in mine if each.row.proper), key=lambda row: row.value, default=chosen.row)
    if lowest is not chosen.row:
        text += f" Lowest of its likelihoods: {_rule(lowest)}, {number(lowest.value, form)}."
    return text


def _rule(row: Row) -> str:
    """The rule of a DUEL row, or the estimator of another, with the cache."""
    method = escape(without_defaults(row.rule)) if row.duel else row.entry.display.lower()
    return f"{method} with cache={escape(row.run.cache)}" if row.run.has_cache else method


def _value(row: Row) -> str:
    """A row's value, with its bound and its error."""
    remarks = "; ".join(filter(None, [f"eps={row.eps:g}: no bound" if row.eps else "", row.stderr_reason]))
    text = number(row.value, form_of(row.metric), row.stderr, row.bound)
    return f"{text} ({remarks})" if remarks else text


def _gap(chosen: ComparedRow, form: str) -> str:
    """The ELBO, and the share of its gap to the autoregressive model that DUEL closes."""
    closed = chosen.closed
    reason, elbo = escape(str(closed.reason)), closed.elbo
    if elbo is None:
        return f", a gap of {number(chosen.gap, form)}; {reason}."
    text = f"; the {closed.of} ELBO gives {_value(elbo)}"
    if closed.elbo_gap is None:
        return f"{text} ({reason})."
    gap = f"the ELBO's gap of {number(closed.elbo_gap, form)}"
    if closed.distinguishable is False:
        return (
            f"{text}, not distinguishable from DUEL (within two standard errors). To learn how much of {gap} DUEL "
            "closes, raise mc_samples."
        )
    if closed.percent is None:
        return f"{text} ({reason}); the gap is {number(chosen.gap, form)}."
    between = span(closed.interval, ".1f") or plus_minus(closed.stderr, ".1f").strip()
    percent = f"{number(closed.percent, '.1f')} %"
    if closed.percent < 0:
        percent += f" {between}" if between else ""
        return f"{text}, lower than DUEL, which closes none of {gap} (gap closed {percent})."
    about = "an estimated " if closed.of == gaps.MONTE_CARLO else ""
    return f"{text}. DUEL closes {about}{percent}{f' ({between})' if between else ''} of {gap}."


# ---------------------------------------------------------------- what is written


def markdown(report: Report, images: Sequence[Image] = ()) -> str:
    """report.md."""
    every = list(report.tables())
    lines = [f"- {line}" for of_task in report.headlines.values() for line in of_task]
    parts = ["# How far from autoregressive?", "\n".join(lines), bullets(map(str, report.notes))]
    for name, task in report.tasks.items():
        mine = [(kind, table) for about, kind, table in every if about == name and kind != "accuracy"]
        documents = "" if task.documents is None else f", {task.documents} documents"
        parts.append(f"## {escape(name)}: {WORDS[task.metric]}{documents}")
        parts += [table.markdown() for kind, table in mine if kind == "methods"]
        parts += [image.markdown(quote) for image in images if (image.task, image.kind) == (name, "perplexity")]
        if task.differences:
            title = "Compared as published, although these differ" if task.as_published else "These differ"
            parts += [f"**{title}:**", bullets(task.differences)]
        for kind, table in mine:
            parts += [] if kind == "methods" else [f"### {escape(table.title)}", table.markdown()]
            parts += [SINGLE] if kind == "pairs" else []
        parts += [image.markdown(quote) for image in images if (image.task, image.kind) == (name, "rules")]
        drawn = any(each.interval and each.row.entry.drawn for each in task.rows)
        parts += ["### Notes", bullets([*task.notes, *([DRAWN] if drawn else [])])]
    for about, kind, table in every:
        if kind == "accuracy" or not about:
            parts += [f"## {escape(table.title)}", table.markdown()]
    for source in report.published:
        parts += [f"## Published: {escape(source['source'])}", published.UNCHECKED, published.table(source).markdown()]
    listed = tables.files(report.runs, report.baselines)
    return spaced([*parts, "## Files", escape(listed.title), listed.markdown()])


def console(report: Report) -> str:
    """The text that the command prints: headlines, perplexities, differences, and notes."""
    lines = [line for of_task in report.headlines.values() for line in of_task]
    parts = [re.sub(r"\\(?=[^\w\s])", "", line.replace("**", "")) for line in lines]
    for name, kind, table in report.tables():
        if kind in (*PRINTED, "accuracy"):
            title = table.title if kind == "accuracy" else f"{name}: {table.title}"
            parts += [title, table.text()]
    parts += [f"differs: {line}" for task in report.tasks.values() for line in task.differences]
    return spaced([*parts, "\n".join(map(str, report.notes))])


def write(
    report: Report,
    folder: str,
    formats: Sequence[str] = ("png",),
    width: float | None = None,
    others: Mapping[str, str] | None = None,
) -> list[str]:
    """Write the report's files and return their names. Files of an earlier report are removed.

    `formats` and `width` (in inches) are for the figures; `others`: more files. Raises DuelError, and leaves the folder
    unchanged, if a file there does not belong to an earlier report.
    """
    images = figures.draw(report.tasks, formats, width) if figures.available() else []
    found = [(name, kind, table) for name, kind, table in report.tables() if kind != "cost"]
    named = own_files.stems((name, kind, table.title) for name, kind, table in found)
    texts = {f"{stem}.tex": latex.tabular(table) for stem, (_, _, table) in zip(named, found, strict=True)}
    pictures = {file: content for image in images for file, content in image.files.items()}
    every = {"report.md": markdown(report, images), "report.csv": as_csv.text(report.standings)} | texts | pictures
    return own_files.write(folder, content(report), every | dict(others or {}))


def content(report: Report) -> dict[str, Any]:
    """report.json."""
    baselines = report.baselines
    return {
        "version": 1,
        "ar": [run.name for run in baselines],
        "notes": list(map(str, report.notes)),
        "tasks": {
            name: as_json.comparison(task) | {"headlines": report.headlines[name]}
            for name, task in report.tasks.items()
        },
        "accuracies": {name: as_json.accuracies(report.runs, name, baselines) for name in report.scored},
        "standings": as_json.ranking(report.standings, report.tasks),
        "published": report.published,
        "documents": report.documents,
        "cost": list(map(as_json.cost, report.costs)),
        "results": [
            {
                "file": run.name,
                "model": run.label,
                "ar": run in baselines,
                "fingerprint": run.fingerprint,
                "spec": run.spec,
            }
            for run in report.runs
        ],
    }


# ---------------------------------------------------------------- of one run


def summary(content: Mapping[str, Any]) -> str:
    """The values of one run, as a table to paste: what lm-eval's own table has no place for.

    `content`: that of its results file. Empty without a perplexity. Raises DuelError for entries that lm_eval does not
    write.
    """
    file = Path("results")
    with own_files.reading(file, read.RESULTS):
        run = read.run_of(file, content, Documents({}, {}))
    found = []
    for name, task in run.tasks.items():
        metric = next(metric for metric in METRICS if metric in task.metrics)
        of_task, _ = rows.of_run(run, name, metric, baseline=False)
        found += of_task
    if not found:
        return ""
    return f"{tables.summary(found).markdown()}\n\nfingerprint {run.fingerprint}"
