"""`lm-eval-duel report`: the paper's tables and figures, and a page, from the harness's results."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from lm_eval_duel.arguments import CHECKPOINT, TEXT, TRUTH, choice, whole
from lm_eval_duel.console.command_line import PATH, Flag, Parser
from lm_eval_duel.errors import DuelError, usage
from lm_eval_duel.results import baseline, compare, files, page, published, read, trace
from lm_eval_duel.results.report import collect, console, write

SHOWN = 3  # documents of a task on the page
EPILOG = """\
Prints the perplexities of every task and the share of the gap to the autoregressive baseline that DUEL closes.
Writes report.md, report.csv, report.json, LaTeX tables (.tex) and, if matplotlib is installed, figures. With --page
also index.html: one file that opens from disk, without a network. Its view of texts needs traces (trace=FILE).
Compared results must have the same documents, windows, scored positions and tokenizers; otherwise an error names both
files. Intervals need samples: run lm_eval with --log_samples.
"""


def main(arguments: Sequence[str]) -> None:
    """Write a report and print its tables: `lm-eval-duel report`."""
    options = parse(arguments)
    with usage():
        files.earlier(options.out)
        report = collect(options)
    others = {"index.html": page.html(report, options.title)} if options.page else {}
    written = write(report, options.out, options.figures, options.width, others)
    print(console(report), f"wrote to {options.out}: {', '.join(written)}", sep="\n")


@usage()
def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The parsed command line; raises UsageError, also for missing results, traces and published figures."""
    options = Parser(
        "report",
        "Compare results files of lm_eval: perplexities, paired differences, the gap to an autoregressive baseline.",
        EPILOG,
        "$(lm-eval-duel list folders results) --out report",
        *("RESULTS", "ar", "out", "metric", "traces", "figures", "width"),
        page=Flag(TRUTH, False, "also write index.html: the results to sort, filter and share, and texts of traces"),
        title=Flag(TEXT, None, "the heading of the page"),
        shown=Flag(whole(0), None, "documents of each task to show on the page", unset=str(SHOWN), shows="N"),
        tokenizer=Flag(CHECKPOINT, None, "the tokenizer of all traces", unset="as each trace says", shows="NAME"),
        published=Flag(PATH, None, "published figures; `paper`: the figures of the DUEL paper", many=True, shows="CSV"),
        as_published=Flag(
            TRUTH, False, "list differences of windows, positions and tokenizers instead of refusing them"
        ),
        apart=Flag(TRUTH, False, "give results that may not be compared separate tables instead of refusing them"),
        pairs=Flag(
            choice(*compare.CHOICES),
            compare.BOTH,
            "paired differences: between the rules of a network with one block and cache (rules), between models "
            "(models), both, between all rows of a task (all), or none",
            none="none",
        ),
    ).parse_args(arguments)
    about_page = []
    for name in ("title", "shown", "tokenizer"):
        if getattr(options, name) is not None:
            about_page.append(f"--{name}")
    if about_page and not options.page:
        raise DuelError(f"{', '.join(about_page)}: this is about the page; add --page to write it.")
    if options.apart and options.as_published:
        raise DuelError("--apart and --as_published exclude each other; give one of them.")
    if options.shown is None:  # only now: above, None says that the flag was not given
        options.shown = SHOWN
    read.files(options.results)  # raises DuelError for a place without results
    if options.ar is not None:
        _check_baseline_place(options.ar, options.results)
    traces: list[str] = []
    for place in options.traces:
        traces += trace.files(place)
    for path in traces:
        trace.spec(path)  # raises DuelError for a file that is none
    options.traces = traces
    options.published = published.read(options.published)
    return options


def _check_baseline_place(ar: str, results: Sequence[str]) -> None:
    """Raise DuelError for an --ar that names no results: neither a place nor an autoregressive model."""
    if not Path(ar).exists():
        runs = read.runs(results)
        if baseline.of_model(ar, runs):
            return
        what = "neither a file nor a model of RESULTS"
        if any(ar in (run.label, run.pretrained) for run in runs):
            what = "a model without autoregressive results"
        others = dict.fromkeys(run.label for run in runs if run.config.autoregressive)
        advice = baseline.how_to_make_one(runs)
        if others:
            advice = f"RESULTS have those of {', '.join(others)}"
        raise DuelError(
            f"--ar {ar} is {what}. --ar takes an autoregressive model of RESULTS, or a file or folder of its results: "
            f"{advice}."
        )
    read.files([ar])
