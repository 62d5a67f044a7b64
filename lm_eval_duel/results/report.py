"""`lm-eval-duel report`: the paper's tables and figures from the harness's results."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import quote

from lm_eval_duel.arguments import TRUTH, choice
from lm_eval_duel.console.command_line import Flag, Parser
from lm_eval_duel.core.scores import METRICS
from lm_eval_duel.errors import DuelError, usage
from lm_eval_duel.harness import trace
from lm_eval_duel.results import as_json, compare, cost, figures, match, own_files, read, tables
from lm_eval_duel.results import compare as pairs
from lm_eval_duel.results.figures import Image
from lm_eval_duel.results.read import Run
from lm_eval_duel.results.rows import Row
from lm_eval_duel.results.table import WORDS, Table, bullets, escape, form_of, number, plus_minus, spaced, span
from lm_eval_duel.rules.tables import without_defaults

EPILOG = """\
Prints the perplexities of every task and the share of the gap to the autoregressive baseline that DUEL closes.
Writes report.md, report.json, LaTeX tables (.tex) and, if matplotlib is installed, figures.
Compared results must have the same documents, windows, scored positions and tokenizers; otherwise an error names both
files. Intervals need samples: run lm_eval with --log_samples.
"""
SINGLE = "Each 95 % interval is for its pair alone: of twenty pairs of equal rows, about one is called different."
DRAWN = (
    "95 % intervals are over documents; for estimates and the ELBO they include the Monte Carlo error of each value. "
    "± is the Monte Carlo error alone."
)
PRINTED = ("methods", "cache", "pairs")  # tables of a task that the command prints


@dataclasses.dataclass
class Report:
    """The content of the files of a report."""

    runs: list[Run]
    tasks: dict[str, compare.Comparison]
    notes: list[str]

    def __post_init__(self) -> None:
        rows = {name: task.rows for name, task in self.tasks.items()}
        runs = sorted(self.runs, key=lambda run: not run.baseline)
        self.costs = cost.table(self.runs, [row for of_task in rows.values() for row in of_task])
        # tasks with other averages than perplexities
        self.scored = dict.fromkeys(name for run in runs for name, task in run.every_task.items() if task.scores)
        self.headlines = {name: headlines(name, of_task) for name, of_task in rows.items()}

    def tables(self) -> Iterator[tuple[str, str, Table]]:
        """Every table: the task that it is about, or "" for one over tasks; its kind; and itself."""
        if len(self.tasks) > 1:
            yield "", "perplexity", tables.perplexities(self.tasks)
            if any(row.gap_closed is not None for task in self.tasks.values() for row in task.rows):
                yield "", "gap_closed", tables.gaps_closed(self.tasks)
        for name, task in self.tasks.items():
            yield from ((name, kind, table) for kind, table in tables.task_tables(task))
        for name in self.scored:
            yield name, "accuracy", tables.accuracies(name, self.runs)
        if self.costs:
            yield "", "cost", tables.cost(self.costs)


# ---------------------------------------------------------------- what is compared


@usage()
def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The parsed command line; raises UsageError, also for missing results and traces."""
    options = Parser(
        "report",
        "Compare results files of lm_eval: perplexities, paired differences, the gap to an autoregressive baseline.",
        EPILOG,
        "results/duel results/elbo --ar results/ar --out report",
        *("RESULTS", "ar", "out", "metric", "traces", "figures", "width"),
        as_published=Flag(
            TRUTH, False, "list differences of windows, positions and tokenizers instead of refusing them"
        ),
        pairs=Flag(
            choice(*pairs.CHOICES),
            pairs.BOTH,
            "paired differences: between the rules of a network with one block and cache (rules), between models "
            "(models), both, between all rows of a task (all), or none",
            none="none",
        ),
    ).parse_args(arguments)
    check_files(options)
    return options


def check_files(options: argparse.Namespace) -> None:
    """Raise DuelError for results and traces that are not there or are none; folders of traces become their files."""
    read.files([*options.results, *([] if options.ar is None else [options.ar])])
    options.traces = [file for place in options.traces for file in trace.files(place)]
    for path in options.traces:
        trace.spec(path)


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
    notes = [note for run in runs for note in run.left_out()]
    for name in {name for run in ar for name in run.tasks}:
        if len(holding := [run.name for run in ar if name in run.tasks]) > 1:
            raise DuelError(f"--ar holds {name} more than once: {', '.join(holding)}. Name one of these files.")
    if not options.ar:
        ar, note = baseline(runs)
        notes = [*filter(None, [note]), *notes]
    for run in ar:
        run.baseline = True
    known = [run for run in runs if run.ours or run.autoregressive]
    shown = [run for run in known if run.tasks or any(task.scores for task in run.every_task.values())]
    if not shown:
        raise DuelError(f"No perplexity ({', '.join(METRICS)}) to report: {'; '.join(notes)}")
    notes += read.Traces(options.traces).attach(shown)
    names = dict.fromkeys(name for run in shown if not run.baseline for name in run.tasks)
    if not names and any(run.tasks for run in shown) and all(run.tasks == run.every_task for run in shown):
        raise DuelError("Nothing to compare: only the --ar result of RESULTS has perplexities.")
    tasks = {name: compare.task(name, shown, options.metric, options.as_published, options.pairs) for name in names}
    return Report(shown, tasks, notes)


def baseline(runs: Sequence[Run]) -> tuple[list[Run], str]:
    """The results of the only autoregressive model among others, or none of them and a note that says why.

    Of several results of a task under one spec it is the newest.
    """
    causal = [run for run in runs if run.autoregressive and run.tasks]
    if causal and all(run.autoregressive for run in runs if run.tasks):
        return [], ""
    if note := no_baseline(causal):
        return [], note
    newest: dict[str, Run] = {}
    for run in causal:  # oldest first
        for name in run.tasks:
            if newest.setdefault(name, run).spec != run.spec:
                return [], f"No gaps: there are several results of {run.label} on {name}; name one with --ar."
            newest[name] = run
    return list({run.name: run for run in newest.values()}.values()), ""


def no_baseline(causal: Sequence[Run]) -> str:
    """The reason that runs of autoregressive models are no baseline; empty if they are of one model."""
    models = {run.key: run.label for run in causal}
    if not models:
        return f"No gaps: gap closed needs an autoregressive result ({match.TWIN})."
    several = f"No gaps: there are {len(models)} autoregressive models ({', '.join(models.values())})"
    return f"{several}; name one with --ar." if len(models) > 1 else ""


# ---------------------------------------------------------------- headlines


def headlines(name: str, rows: Sequence[Row]) -> list[str]:
    """One sentence per model of a task except the baseline, in Markdown: its perplexity, its ELBO and gap closed."""
    base = next((row for row in rows if row.ar), None)
    models = dict.fromkeys(row.model for row in rows if not row.ar and row.estimator != "ar")
    return [_headline(name, base, [row for row in rows if row.model == model and not row.ar]) for model in models]


def _headline(name: str, base: Row | None, mine: Sequence[Row]) -> str:
    chosen, metric = pairs.headline(mine), mine[0].metric
    form, unit = form_of(metric), "" if metric in ("token_perplexity", "perplexity") else f", {WORDS[metric]}"
    start = f"**{escape(mine[0].model)}** on {escape(name)}{unit}"
    against = f" against {number(base.value, form)} for {escape(base.model)}" if base else ""
    if chosen is None:
        bound = min((row for row in mine if row.likelihood), key=lambda row: (row.bound, row.value), default=None)
        if bound is None:
            return f"{start}: the oracle only; no DUEL result (estimator=duel)."
        against += f", a gap of {'at most ' if bound.bound else ''}{number(bound.gap, form)}" if base else ""
        return f"{start}: {_value(bound)} ({escape(bound.name)}){against}; no DUEL result (estimator=duel)."
    text = f"{start}: {_value(chosen)} under {_rule(chosen)} ({chosen.entry.display}){against}"
    text += "." if chosen.elbo is None and base is None else _gap(chosen, form)
    lowest = min((row for row in mine if row.proper), key=lambda row: row.value, default=chosen)
    if lowest is not chosen:
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


def _gap(chosen: Row, form: str) -> str:
    """The ELBO, and the share of its gap to the autoregressive model that DUEL closes."""
    reason, closed, elbo = escape(chosen.gap_closed_reason), chosen.gap_closed, chosen.elbo
    if elbo is None:
        return f", a gap of {number(chosen.gap, form)}; {reason}."
    text = f"; the ELBO gives {_value(elbo)}"
    if elbo.gap is None:
        return f"{text} ({reason})."
    gap = f"the ELBO's gap of {number(elbo.gap, form)}"
    if chosen.distinguishable is False:
        return (
            f"{text}, not distinguishable from DUEL (within two standard errors). To learn how much of {gap} DUEL "
            "closes, raise mc_samples."
        )
    if closed is None:
        return f"{text} ({reason}); the gap is {number(chosen.gap, form)}."
    between = span(chosen.gap_closed_interval, ".1f") or plus_minus(chosen.gap_closed_stderr, ".1f").strip()
    percent = f"{number(closed, '.1f')} %"
    if closed < 0:
        percent += f" {between}" if between else ""
        return f"{text}, lower than DUEL, which closes none of {gap} (gap closed {percent})."
    return f"{text}. DUEL closes {percent}{f' ({between})' if between else ''} of {gap}."


# ---------------------------------------------------------------- what is written


def page(report: Report, images: Sequence[Image] = ()) -> str:
    """report.md."""
    every = list(report.tables())
    lines = [f"- {line}" for of_task in report.headlines.values() for line in of_task]
    parts = ["# How far from autoregressive?", "\n".join(lines), bullets(report.notes)]
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
        drawn = any(row.interval and row.entry.drawn for row in task.rows)
        parts += ["### Notes", bullets([*task.notes, *([DRAWN] if drawn else [])])]
    for about, kind, table in every:
        if kind == "accuracy" or (not about and kind != "perplexity"):
            parts += [f"## {escape(table.title)}", table.markdown()]
    listed = tables.files(report.runs)
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
    return spaced([*parts, "\n".join(report.notes)])


def write(report: Report, folder: str, formats: Sequence[str] = ("png",), width: float | None = None) -> list[str]:
    """Write the report's files and return their names. Files of an earlier report are removed.

    `formats` and `width` (in inches) are for the figures. Raises DuelError, and leaves the folder unchanged, if a
    file there does not belong to an earlier report.
    """
    images: list[Image] = []
    if figures.available():
        images = figures.draw(report.tasks, formats, width)
    else:
        report.notes.append(figures.MISSING)
    found = [(name, kind, table) for name, kind, table in report.tables() if kind != "cost"]
    named = own_files.stems((name, kind, table.title) for name, kind, table in found)
    texts = {f"{stem}.tex": table.latex() for stem, (_, _, table) in zip(named, found, strict=True)}
    pictures = {file: content for image in images for file, content in image.files.items()}
    others = {"report.md": page(report, images)} | texts | pictures
    return own_files.write(folder, "report", content(report), others)


def content(report: Report) -> dict[str, Any]:
    """report.json."""
    return {
        "version": 1,
        "ar": [run.name for run in report.runs if run.baseline],
        "notes": report.notes,
        "tasks": {
            name: as_json.comparison(task) | {"headlines": report.headlines[name]}
            for name, task in report.tasks.items()
        },
        "accuracies": {name: as_json.accuracies(report.runs, name) for name in report.scored},
        "cost": list(map(as_json.cost, report.costs)),
        "results": [
            {"file": run.name, "model": run.label, "ar": run.baseline, "fingerprint": run.fingerprint, "spec": run.spec}
            for run in report.runs
        ],
    }


def main(arguments: Sequence[str]) -> None:
    """Write a report and print its tables: `lm-eval-duel report`."""
    options = parse(arguments)
    own_files.earlier(options.out, "report")
    report = collect(options)
    files = write(report, options.out, options.figures, options.width)
    print(console(report), f"wrote to {options.out}: {', '.join(files)}", sep="\n")
