"""`lm-eval-duel report`: the paper's tables and figures from the harness's results."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lm_eval_duel.arguments import TRUTH, choice
from lm_eval_duel.console.command_line import Flag, Parser
from lm_eval_duel.core.rates import METRICS
from lm_eval_duel.errors import DuelError, usage
from lm_eval_duel.harness import trace
from lm_eval_duel.results import (
    accuracy,
    compare,
    figures,
    match,
    pairs,
    read,
    report_files,
    reveal_order,
    run_cost,
)
from lm_eval_duel.results.own_files import OwnFiles
from lm_eval_duel.results.records import plain

FORMAT = "lm_eval_duel report"

EPILOG = """\
Prints the perplexities of every task and the share of the gap to the autoregressive baseline that DUEL closes.
Writes report.md, report.json, LaTeX table bodies (.tex) and, if matplotlib is installed, figures.
Compared results must have the same documents, windows, scored positions and tokenizers; otherwise an error names both
files. Intervals need samples: run lm_eval with --log_samples.
"""


@usage()
def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The parsed command line; raises UsageError, also for missing results and traces."""
    options = Parser(
        "report",
        __doc__,
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


def read_runs(options: argparse.Namespace) -> tuple[list[read.Run], list[read.Run]]:
    """The runs of --ar, and all runs; raises DuelError for an --ar that is not of an autoregressive model."""
    with usage():
        ar = read.runs([options.ar]) if options.ar else []
        runs = read.runs([*options.results, *([options.ar] if options.ar else [])])
    for run in ar:
        if not run.autoregressive:
            what = f"estimator={run.estimator}" if run.ours else f"--model {run.model}"
            raise DuelError(
                f"--ar {run.name} is a result of {what}, not of an autoregressive model; name one of ours "
                f"({match.TWIN}), or one of `--model hf` or of another autoregressive model of the harness."
            )
    return ar, runs


def collect(options: argparse.Namespace) -> dict[str, Any]:
    """The content of the report as one dict."""
    ar, runs = read_runs(options)
    notes = [note for run in runs for note in left_out(run)]
    for name in {name for run in ar for name in run.tasks}:
        if len(holding := [run.name for run in ar if name in run.tasks]) > 1:
            raise DuelError(f"--ar holds {name} more than once: {', '.join(holding)}. Name one of these files.")
    if not options.ar:
        ar, note = baseline(runs)
        notes[:0] = [note] if note else []
    files = {run.file for run in ar}
    known = [replace(run, baseline=run.file in files) for run in runs if run.ours or run.autoregressive]
    accuracies = accuracy.by_task(known)
    runs = [run for run in known if run.tasks]
    if not runs and not accuracies:
        raise DuelError(f"No perplexity ({', '.join(METRICS)}) to report: {'; '.join(notes)}")
    runs, shown = _traces(runs, options.traces, notes)
    names = dict.fromkeys(name for run in runs if not run.baseline for name in run.tasks)
    if runs and not names and not any(run.others for run in runs):
        raise DuelError("Nothing to compare: RESULTS holds no perplexity other than those of the --ar result.")
    tasks = {name: compare.task(name, runs, options.metric, options.as_published, options.pairs) for name in names}
    return {
        "version": 1,
        "ar": [run.name for run in runs if run.baseline],
        "notes": notes,
        "tasks": tasks,
        "averages": compare.averages({name: task.rows for name, task in tasks.items()}),
        "accuracies": accuracies,
        "cost": run_cost.table(runs, [row for task in tasks.values() for row in task.rows]),
        "traces": shown,
        "results": [
            {"file": run.name, "model": run.label, "ar": run.baseline, "fingerprint": run.fingerprint}
            | {"spec": run.spec}
            for run in known
            if run.tasks or any(task.scores for task in run.others.values())
        ],
        "figures": [],
    }


def baseline(runs: Sequence[read.Run]) -> tuple[list[read.Run], str]:
    """The results of the only autoregressive model among others, or none of them and a note that says why.

    Of several results of a task under one spec it is the newest.
    """
    causal = [run for run in runs if run.autoregressive and run.tasks]
    if causal and all(run.autoregressive for run in runs if run.tasks):
        return [], ""
    if note := no_baseline(causal):
        return [], note
    newest: dict[str, read.Run] = {}
    for run in causal:  # oldest first
        for name in run.tasks:
            if newest.setdefault(name, run).spec != run.spec:
                return [], f"No gaps: there are several results of {run.label} on {name}; name one with --ar."
            newest[name] = run
    return list({run.file: run for run in newest.values()}.values()), ""


def no_baseline(causal: Sequence[read.Run]) -> str:
    """Why runs of autoregressive models are no baseline; empty if they are of one model."""
    models = {run.key: run.label for run in causal}
    if not models:
        return f"No gaps: gap closed needs an autoregressive result ({match.TWIN})."
    several = f"No gaps: there are {len(models)} autoregressive models ({', '.join(models.values())})"
    return f"{several}; name one with --ar." if len(models) > 1 else ""


def left_out(run: read.Run) -> list[str]:
    """Notes on the parts of a results file that are left out."""
    if not run.ours and not run.autoregressive:
        return [f"{run.name} is a result of --model {run.model}, not known to be autoregressive, and is left out."]
    notes = [f"{name} in {run.name} is a group of tasks and is left out." for name in run.groups]
    notes += [f"{line}, and is left out." for task in [*run.tasks.values(), *run.others.values()] for line in task.nans]
    notes += [
        f"{name} in {run.name} holds no perplexity and no accuracy, and is left out."
        for name, task in run.others.items()
        if not task.scores
    ]
    nothing = not (run.tasks or run.others)
    return [*notes, f"{run.name} holds no perplexity and is left out."] if nothing else notes


def _traces(runs: Sequence[read.Run], named: Sequence[str], notes: list[str]) -> tuple[list[read.Run], list[dict]]:
    """The runs with what their traces hold of each document, and the summary of every trace."""
    traces = reveal_order.Traces(named)
    labels: dict[Path, str] = dict.fromkeys(traces.named, "")
    for run in runs:
        if path := traces.find(run):
            labels[path] = run.label
        elif run.duel.get("trace"):
            notes.append(f"The trace of {run.name} is no longer at {run.duel['trace']}; name it with --traces.")
    return [traces.attach(run) for run in runs], [traces.summary(path, label) for path, label in labels.items()]


def write(report: dict[str, Any], folder: str, formats: Sequence[str] = ("png",), width: float | None = None) -> None:
    """Write the report's files and enter their names in `report`. Files of an earlier report are removed.

    `formats` and `width` (in inches) are those of the figures.

    Raises DuelError, and leaves the folder unchanged, if a file there does not belong to an earlier report.
    """
    images: dict[str, bytes] = {}
    if figures.available():
        report["figures"], images = figures.draw(report, formats, width)
    else:
        report["notes"].append(figures.MISSING)
    report["folder"] = folder
    texts = {"report.md": report_files.page(report), **report_files.bodies(report)}
    report["files"] = OwnFiles(folder, FORMAT).write(plain(report), texts | images)


def main(arguments: Sequence[str]) -> None:
    """Write a report and print its tables: `lm-eval-duel report`."""
    options = parse(arguments)
    OwnFiles(options.out, FORMAT).earlier()
    report = collect(options)
    write(report, options.out, options.figures, options.width)
    print(report_files.console(report))
