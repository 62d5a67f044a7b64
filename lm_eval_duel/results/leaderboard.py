"""`lm-eval-duel leaderboard`: one page to sort, filter and send, and the same as Markdown, CSV and JSON.

The page loads nothing from a network, and has no markup but ours: Jinja2 escapes every text. Its content security
policy names our style and script by their hashes, so a browser runs and fetches nothing else, even if a name found its
way into markup.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval_duel.arguments import TEXT, whole
from lm_eval_duel.console import command_line as strict_json
from lm_eval_duel.console.command_line import PATH, Flag, Parser, one_line
from lm_eval_duel.core.scores import METRICS
from lm_eval_duel.errors import DuelError, usage
from lm_eval_duel.results import as_json, documents, own_files, published
from lm_eval_duel.results.board import KINDS, Board, BoardRow
from lm_eval_duel.results.read import Traces
from lm_eval_duel.results.report import check_files, no_baseline, read_runs
from lm_eval_duel.results.table import Cell, Table, bullets, csv_text, escape, spaced, split
from lm_eval_duel.results.tables import Column, of_board

EPILOG = """\
Prints ranks and perplexities. Writes index.html (one file that opens from disk, without a network), leaderboard.md,
leaderboard.csv and leaderboard.json.
Results with other documents, windows or scored positions get separate columns. Intervals need samples: run lm_eval
with --log_samples. The document view needs traces: --model_args trace=FILE.
"""
NAMES = ("rank", "model", "estimator", "kind", "rule", "block", "cache", "remarks")  # of a line of CSV
SOURCE = ("nfe_per_token", "seconds_per_token", "device", "parameters", "dtype", "fingerprint", "date")
ASSETS = Path(__file__).resolve().parent / "assets"
SCRIPTS = ("table.js", "documents.js")
FIRST_HIDDEN = ("source", "bits", "gap", "closed")  # groups of columns: the first, with several tasks all of them
SWITCHES = {"mean": "means", "value": "", "bits": "bits per byte", "gap": "", "closed": "gap closed"}
SWITCHES |= {"cost": "cost", "source": "provenance"}
PLAIN = ("model", "estimator", "rule", "cache", "device", "fingerprint", "versions", "date")  # columns of no numbers
WIDTH, MARGIN = 140.0, 9.0  # of a plot
MANTISSAS = ((1, 1.5, 2, 3, 4, 5, 7), (1, 2, 3, 5), (1, 3), (1,))  # of ticks: the most that fit
MOST_TICKS = 5


@usage()
def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The parsed command line; raises UsageError, also for missing results, traces and published figures."""
    options = Parser(
        "leaderboard",
        "Show results files of lm_eval on one page to sort, filter and share.",
        EPILOG,
        "results results_ar --out site",
        *("RESULTS", "ar", "out", "metric", "traces", "tokenizer"),
        title=Flag(TEXT, "Perplexity leaderboard", "the heading of the page"),
        published=Flag(PATH, None, "published figures; `paper`: the figures of the DUEL paper", many=True, shows="CSV"),
        shown=Flag(whole(0), 3, "documents to show of each task", shows="N"),
    ).parse_args(arguments)
    check_files(options)
    options.published = published.read(options.published)
    return options


def collect(options: argparse.Namespace) -> Board:
    """The content of the leaderboard."""
    named, runs = read_runs(options)
    # the page may be sent to others: relative names of files tell no home folder
    folder = os.path.commonpath([run.file.parent for run in runs])
    for run in runs:
        run.name = os.path.relpath(run.name, folder)
    notes = [note for run in runs for note in run.left_out()]
    known = [run for run in runs if (run.ours or run.autoregressive) and run.tasks]
    if not known:
        raise DuelError(f"No perplexity ({', '.join(METRICS)}) to show: {'; '.join(notes)}")
    causal = [run for run in named or known if run.autoregressive]
    note, models = no_baseline(causal), {run.key for run in causal}
    traces = Traces(options.traces)
    traces.attach(known)
    for run in known:
        run.baseline = not note and run.autoregressive and run.key in models
    content = Board(known, options.metric, options.title)
    for run in known:
        without = [name for name, task in run.tasks.items() if content.metric not in task.metrics]
        notes += [f"{name} in {run.name} has no {content.metric} and is left out." for name in without]
    content.documents, problems = documents.collect(traces, known, options.shown, options.tokenizer)
    content.published = published.sources(options.published)
    content.notes = list(dict.fromkeys([*notes, *filter(None, [note]), *content.notes, *problems]))
    return content


# ---------------------------------------------------------------- what is written


def markdown(content: Board) -> str:
    """leaderboard.md."""

    def cell(row: BoardRow, column: Column) -> Cell:
        text, remark = split(column.cell(row))
        return f"{text} ({column.below(row)})" if column.below(row) else text, remark

    columns = [column for column in of_board(content) if column.head not in ("versions", "device")]
    shown = {column.head: lambda row, column=column: cell(row, column) for column in columns}
    parts = [f"# {escape(content.title)}", escape(content.about)]
    for title, rows in content.groups:
        parts += [title and f"## {title}", Table.of(content.title, rows, shown).markdown()]
    for source in content.published:
        parts += [f"## Published: {escape(source['source'])}", published.UNCHECKED, published.table(source).markdown()]
    return spaced([*parts, "## Notes", bullets(content.notes)])


def console(content: Board) -> str:
    """The text that the command prints: ranks, names, means and perplexities."""
    columns = [column for column in of_board(content) if column.group in ("name", "mean", "value")]
    texts = {column.head: lambda row, column=column: split(column.cell(row))[0] for column in columns}
    return spaced([Table.of(content.title, content.rows, texts).text(), "\n".join(content.notes)]).rstrip()


def csv(content: Mapping[str, Any]) -> str:
    """leaderboard.csv: a line for each result of leaderboard.json, with unrounded numbers."""
    labels = {column["id"]: column["label"] for column in content["columns"]}
    names = (*NAMES, "mean", "mean_rank") if content["mean_of"] else NAMES
    lines = []
    for row in content["rows"]:
        for column, cell in row["cells"].items():
            line = {key: row[key] for key in names} | {"task": labels[column], "metric": content["metric"]}
            for key, value in cell.items():
                if key.endswith("interval"):
                    line[f"{key} low"], line[f"{key} high"] = value or (None, None)
                else:
                    line[key] = value
            lines.append(line | {key: row[key] for key in SOURCE})
    return csv_text(lines)


# ---------------------------------------------------------------- the page


def html(board: Board) -> str:
    """index.html."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    style = (ASSETS / "style.css").read_text(encoding="utf-8")
    script = "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in SCRIPTS)
    columns = {column.head: column for column in of_board(board)}
    table = Table.of(board.title, board.rows, {head: column.cell for head, column in columns.items()})
    kinds = {row.kind for row in board.rows} | ({"AR"} if any(row.autoregressive for row in board.rows) else set())
    environment = Environment(
        autoescape=True,
        loader=FileSystemLoader(ASSETS),
        undefined=StrictUndefined,
        trim_blocks=True,
        finalize=lambda value: one_line(value) if type(value) is str else value,
    )
    return environment.get_template("page.html").render(
        board=board,
        style=style,
        script=script,
        policy=f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {_hash(script)}",
        kinds={kind: about for kind, about in KINDS.items() if kind in kinds},
        switches=SWITCHES | {"value": board.unit, "gap": f"gap to {board.ar}"},
        hidden=FIRST_HIDDEN[: 1 if len(board.columns) == 1 else None],
        columns=[columns[head] for head in table.heads],
        texts={
            row: dict(zip(table.heads, texts, strict=True)) for row, texts in zip(board.rows, table.rows, strict=True)
        },
        plain=PLAIN,
        remarks=table.remarks,
        plot=_plot(board),
        published=published,
        documents=strict_json.finite(board.documents),
    )


def _hash(content: str) -> str:
    digest = base64.b64encode(hashlib.sha256(content.encode("utf-8")).digest()).decode()
    return f"'sha256-{digest}'"


def _plot(board: Board) -> dict[str, Any] | None:
    """The plot of the values that rows are ranked by: where ticks, rows and the baseline stand, in pixels.

    A row has its value, and the ends of its interval if it has one. None if there is nothing to show.
    """
    rows = {row: [row.main] for row in board.rows if row.main is not None}
    for row, values in rows.items():
        interval = row.results[board.by].interval if board.by in row.results else None
        values += interval if interval and all(map(math.isfinite, interval)) else []
    every = [value for values in rows.values() for value in values]
    if not every or min(every) == max(every):
        return None
    low, high = min(every), max(every)
    scale = math.log if board.metric != "bits_per_byte" and low > 0 else float

    def at(value: float) -> float:
        share = (scale(value) - scale(low)) / (scale(high) - scale(low))
        return round(MARGIN + share * (WIDTH - 2 * MARGIN), 1)

    baselines = [row.main for row in rows if any(result.ar for result in row.results.values())]
    return {
        "width": WIDTH,
        "ticks": [(at(tick), f"{tick:g}") for tick in _ticks(low, high)],
        "rows": {row: list(map(at, values)) for row, values in rows.items()},
        "base": at(baselines[-1]) if baselines else None,
    }


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers between two values, five at most, and two at least if they are far enough apart."""
    powers = range(math.floor(math.log10(low)) if low > 0 else -6, math.ceil(math.log10(high)) + 1)
    for mantissas in MANTISSAS:
        ticks = [m * 10.0**power for power in powers for m in mantissas if low <= m * 10.0**power <= high]
        if len(ticks) <= MOST_TICKS:
            break
    if len(ticks) > 1:
        return ticks
    step = 10.0 ** math.floor(math.log10(high - low))  # close together: even steps
    return [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)][:MOST_TICKS]


# ---------------------------------------------------------------- the command


def main(arguments: Sequence[str]) -> None:
    """Write a leaderboard and print its table: `lm-eval-duel leaderboard`.

    Files of an earlier leaderboard are replaced or removed. Raises DuelError, and leaves the folder unchanged, if a
    file there does not belong to one.
    """
    options = parse(arguments)
    own_files.earlier(options.out, "leaderboard")
    content = collect(options)
    listing = as_json.board(content)
    texts = {"index.html": html(content), "leaderboard.md": markdown(content), "leaderboard.csv": csv(listing)}
    files = own_files.write(options.out, "leaderboard", {"version": 1, **listing}, texts)
    print(console(content), f"wrote to {options.out}: {', '.join(files)}", sep="\n")
