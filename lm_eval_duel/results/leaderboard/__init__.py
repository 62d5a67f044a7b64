"""`lm-eval-duel leaderboard`: one page to sort, filter and send, and the same as Markdown, CSV and JSON."""

from __future__ import annotations

import argparse
import datetime
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lm_eval_duel.arguments import TEXT, whole
from lm_eval_duel.console.command_line import PATH, Flag, Parser
from lm_eval_duel.core.rates import METRICS
from lm_eval_duel.errors import DuelError, usage
from lm_eval_duel.results import published, reveal_order
from lm_eval_duel.results.leaderboard import board, columns, documents, exports, page, views
from lm_eval_duel.results.leaderboard.board import Board
from lm_eval_duel.results.own_files import OwnFiles
from lm_eval_duel.results.records import plain
from lm_eval_duel.results.report import check_files, left_out, no_baseline, read_runs

FORMAT = "lm_eval_duel leaderboard"
MAIN = ("index.html", "leaderboard.md", "leaderboard.csv", "leaderboard.json")
EPILOG = """\
Prints ranks and perplexities. Writes index.html (one file that opens from disk, without a network), leaderboard.md,
leaderboard.csv, leaderboard.json, and exports/ for Every Eval Ever and the hub's .eval_results.
Results with other documents, windows or scored positions get columns of their own. Intervals need samples: run lm_eval
with --log_samples. The document view needs traces: --model_args trace=FILE.
"""


@usage()
def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The parsed command line; raises UsageError, also for missing results, traces and published figures."""
    options = Parser(
        "leaderboard",
        __doc__,
        EPILOG,
        "results results_ar --out site",
        *("RESULTS", "ar", "out", "metric", "traces", "tokenizer"),
        title=Flag(TEXT, "Perplexity leaderboard", "the heading of the page"),
        published=Flag(PATH, None, "published figures; `paper` for those of the paper", many=True, shows="CSV"),
        shown=Flag(whole(0), 3, "documents to show of each task", shows="N"),
        organization=Flag(TEXT, "unknown", "who ran it, for the exports", shows="NAME"),
        benchmark=Flag(TEXT, None, "benchmarks of the hub's export", many=True, shows="TASK=OWNER/DATASET:ID"),
    ).parse_args(arguments)
    check_files(options)
    published.tables(published.read(options.published))
    exports.benchmarks(options.benchmark)
    return options


def collect(options: argparse.Namespace) -> Board:
    """The content of the leaderboard."""
    named, runs = read_runs(options)
    traces = reveal_order.Traces(options.traces)
    # a page that is sent tells no home folder: files are named from the folder that holds them all
    folder = os.path.commonpath([run.file.parent for run in runs])
    short = {run.file: Path(os.path.relpath(run.file, folder)) for run in runs}
    notes = [note for run in runs for note in left_out(replace(run, file=short[run.file]))]
    known = [run for run in runs if (run.ours or run.autoregressive) and run.tasks]
    if not known:
        raise DuelError(f"No perplexity ({', '.join(METRICS)}) to show: {'; '.join(notes)}")
    labels: dict[Path, str] = {}  # the models of traces
    for run in known:
        if (path := traces.find(run)) is not None:
            labels.setdefault(path, run.label)
    known = [replace(traces.attach(run), file=short[run.file]) for run in known]
    causal = [run for run in named or known if run.autoregressive]
    note, models = no_baseline(causal), {run.key for run in causal}
    ar = [] if note else [run for run in known if run.autoregressive and run.key in models]
    metric = columns.unit(known, options.metric)
    for run in known:
        notes += [f"{n} in {run.name} has no {metric} and is left out." for n in run.tasks if not run.has(n, metric)]
    compared = columns.from_runs(known, metric, ar)
    rows, mean_of = board.ranked(board.rows(compared), compared, metric)
    shown, problems = documents.collect(traces, labels, options.shown, documents.texts_by(options.tokenizer))
    return Board(
        title=options.title,
        metric=metric,
        ar=ar[0].label if ar else None,
        mean_of=mean_of,
        by="mean" if mean_of else board.most_rows(compared),
        columns=compared,
        rows=rows,
        published=published.tables(published.read(options.published)),
        documents=shown,
        notes=list(dict.fromkeys([*notes, *filter(None, [note]), *columns.remarks(compared), *problems])),
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    )


def write(content: Board, options: argparse.Namespace) -> list[str]:
    """Write the leaderboard's files and return their names. Files of an earlier leaderboard are replaced or removed.

    Raises DuelError, and leaves the folder unchanged, if a file there does not belong to an earlier leaderboard.
    """
    written = {
        "index.html": page.html(content),
        "leaderboard.md": views.page(content),
        "leaderboard.csv": views.csv_text(content),
        **exports.every_eval_ever(content, options.organization),
        **exports.eval_results(content, exports.benchmarks(options.benchmark)),
    }
    return OwnFiles(options.out, FORMAT).write({"version": 1, **plain(content)}, written)


def main(arguments: Sequence[str]) -> None:
    """Write a leaderboard and print its table: `lm-eval-duel leaderboard`."""
    options = parse(arguments)
    OwnFiles(options.out, FORMAT).earlier()
    content = collect(options)
    several = len(write(content, options)) - len(MAIN)
    print(views.console(content))
    print(f"wrote to {options.out}: {', '.join(MAIN)}{f' and {several} exports' if several else ''}")
