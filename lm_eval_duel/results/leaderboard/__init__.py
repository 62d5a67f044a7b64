"""`lm-eval-duel leaderboard`: one page to sort, filter and send, and the same as Markdown, CSV and JSON."""

from __future__ import annotations

import argparse
import datetime
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval_duel import strict_json
from lm_eval_duel.arguments import TEXT, whole
from lm_eval_duel.command_line import PATH, Flag, Parser
from lm_eval_duel.errors import DuelError, usage
from lm_eval_duel.harness import trace
from lm_eval_duel.rates import METRICS
from lm_eval_duel.results import match, published, read, reveal_order
from lm_eval_duel.results.leaderboard import board, columns, documents, exports, page, provenance, text
from lm_eval_duel.results.own_files import OwnFiles
from lm_eval_duel.results.report import left_out
from lm_eval_duel.results.table import WORDS
from lm_eval_duel.tables import one_line

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
        shown=Flag(whole(0), 3, "documents shown of each task", shows="N"),
        organization=Flag(TEXT, "unknown", "who ran it, for the exports", shows="NAME"),
        benchmark=Flag(TEXT, None, "benchmarks of the hub's export", many=True, shows="TASK=OWNER/DATASET:ID"),
    ).parse_args(arguments)
    read.files([*options.results, *([] if options.ar is None else [options.ar])])
    options.traces = [file for place in options.traces for file in trace.files(place)]
    for path in options.traces:
        trace.spec(path)
    published.tables(published.read(options.published))
    exports.benchmarks(options.benchmark)
    return options


def collect(options: argparse.Namespace) -> dict[str, Any]:
    """The content of the leaderboard as one dict."""
    with usage():
        named = read.runs([options.ar]) if options.ar else []
        runs = read.runs([*options.results, *([options.ar] if options.ar else [])])
    notes = [note for run in runs for note in left_out(run)]
    known = [run for run in runs if (run.ours or run.autoregressive) and run.tasks]
    if not known:
        raise DuelError(f"No perplexity ({', '.join(METRICS)}) to show: {'; '.join(notes)}")
    ar = _baseline(named, known, notes)
    traces = reveal_order.Traces(options.traces)
    known = [traces.attach(run) for run in known]
    metric = columns.unit(known, options.metric)
    for run in known:
        notes += [f"{n} in {run.name} has no {metric} and is left out." for n in run.tasks if not run.has(n, metric)]
    compared = columns.of(known, metric, ar)
    rows = board.rows(compared, known, {run.name: provenance.of(run) for run in known})
    order = board.rank(rows, compared, metric)
    shown, problems = documents.collect(traces, known, options.shown, options.tokenizer, documents.Tokenizers())
    notes += columns.remarks(compared) + problems
    notes = list(dict.fromkeys(notes))
    _shorten(rows, notes, known)
    content = {
        "format": FORMAT,
        "version": 1,
        "title": options.title,
        "metric": metric,
        "unit": WORDS[metric],
        "ar": ar[0].label if ar else None,
        **order,
        "columns": _described(compared),
        "rows": rows,
        "published": published.tables(published.read(options.published)),
        "documents": shown,
        "notes": notes,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }
    return clean(content)


def _baseline(named: Sequence[read.Run], known: Sequence[read.Run], notes: list[str]) -> list[read.Run]:
    """The runs of the autoregressive model of the gaps: that of --ar, else the only one."""
    for run in named:
        if not run.autoregressive:
            raise DuelError(
                f"--ar {run.name} is not a result of an autoregressive model; name one of ours ({match.TWIN}), or one "
                "of `--model hf` or of another autoregressive model of the harness."
            )
    models = {run.key: run.label for run in (named or known) if run.autoregressive}
    if len(models) == 1:
        return [run for run in known if run.autoregressive and run.key in models]
    if models:
        notes.append(
            f"No gaps: there are {len(models)} autoregressive models ({', '.join(models.values())}); name one with "
            "--ar."
        )
    else:
        notes.append(f"No gaps: there is no autoregressive result ({match.TWIN}).")
    return []


def _described(compared: Sequence[columns.Column]) -> list[dict[str, Any]]:
    """The columns, with labels that tell those of one task apart."""
    described: list[dict[str, Any]] = []
    for column in compared:
        alike = [other for other in compared if other.task == column.task]
        parts = []
        if len({other.documents for other in alike}) > 1:
            parts.append(f"{column.documents or 'unknown number of'} documents")
        if len({tuple(other.windows) for other in alike}) > 1:
            parts.append(" and ".join(column.windows))
        if sum((other.documents, other.windows) == (column.documents, column.windows) for other in alike) > 1:
            parts.append(f"column {alike.index(column) + 1}")
        count = "" if column.documents is None else f"{column.documents} documents"
        described.append(
            {
                "id": column.id,
                "task": column.task,
                "label": f"{column.task} ({', '.join(parts)})" if parts else column.task,
                "documents": column.documents,
                "windows": column.windows,
                "apart": column.apart,
                "about": "; ".join(filter(None, [count, f"windows: {' and '.join(column.windows)}", column.apart])),
            }
        )
    return described


def clean(value: Any) -> Any:
    """Content that can be shown: control characters and lone surrogates in names become spaces, in keys, too."""
    if isinstance(value, dict):
        return {
            one_line(key): part if key == "documents" and isinstance(part, list) else clean(part)
            for key, part in value.items()
        }
    if isinstance(value, list | tuple):
        return [clean(part) for part in value]
    return one_line(value) if isinstance(value, str) else value


def _shorten(rows: Sequence[dict[str, Any]], notes: list[str], runs: Sequence[read.Run]) -> None:
    """Show result files from the folder that holds them all: a page that is sent tells no home folder."""
    folder = os.path.join(os.path.commonpath([run.file.parent for run in runs]), "")
    for row in rows:
        row["files"] = [os.path.relpath(file, folder) for file in row["files"]]
        for cell in row["cells"].values():
            cell["file"] = os.path.relpath(cell["file"], folder)
    if len(folder) > 1:
        notes[:] = [note.replace(folder, "") for note in notes]


def write(content: dict[str, Any], options: argparse.Namespace) -> list[str]:
    """Write the leaderboard's files and return their names. Files of an earlier leaderboard are replaced or removed.

    Raises DuelError, and leaves the folder unchanged, if a file there does not belong to an earlier leaderboard.
    """
    written = {
        "index.html": page.html(content),
        "leaderboard.md": text.markdown(content),
        "leaderboard.csv": text.csv_text(content),
        **exports.every_eval_ever(content, one_line(options.organization)),
        **exports.eval_results(content, exports.benchmarks(options.benchmark)),
    }
    own = OwnFiles(Path(options.out), FORMAT)
    content["files"] = [own.listing, *written]
    written[own.listing] = strict_json.dumps(content) + "\n"
    own.write({name: text.encode() for name, text in written.items()})
    return content["files"]


def main(arguments: Sequence[str]) -> None:
    """Write a leaderboard and print its table: `lm-eval-duel leaderboard`."""
    options = parse(arguments)
    OwnFiles(Path(options.out), FORMAT).earlier()
    content = collect(options)
    written = write(content, options)
    print(text.console(content))
    several = len(written) - len(MAIN)
    print(f"wrote to {options.out}: {', '.join(MAIN)}{f' and {several} exports' if several else ''}")
