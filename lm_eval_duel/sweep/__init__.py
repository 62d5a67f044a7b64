"""`lm-eval-duel sweep`: compare unmasking rules at several speeds, by likelihood of text and quality of samples."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from lm_eval_duel import signals
from lm_eval_duel.command_line import INTERRUPTED
from lm_eval_duel.results.own_files import OwnFiles
from lm_eval_duel.sweep.arguments import parse

FORMAT = "lm_eval_duel sweep"


def main(arguments: Sequence[str]) -> None:
    """Run a sweep and print its tables: `lm-eval-duel sweep`."""
    options = parse(arguments)
    OwnFiles(options.out, FORMAT).earlier()
    # torch and the harness are imported only after the arguments have been checked
    from lm_eval_duel.sweep.run import Sweep

    try:
        sweep = Sweep(options)
        with signals.deferred():
            report = sweep.run()
    except (KeyboardInterrupt, signals.Interrupted) as stop:
        print(f"\nStopped. {options.out} keeps the finished work: run the same command to continue.", file=sys.stderr)
        sys.exit(stop.code if isinstance(stop, signals.Interrupted) else INTERRUPTED)
    if sweep.ranks.rank == 0:
        print(write(report, options))
        print(f"wrote to {options.out}: {', '.join(report['files'])}")


def write(report: dict[str, Any], options: argparse.Namespace) -> str:
    """Write sweep.md, sweep.json and the figure, in place of those of an earlier sweep, and return the Markdown.

    Raises DuelError for files in the folder that are no sweep's.
    """
    from lm_eval_duel.results import figures
    from lm_eval_duel.sweep import figure, tables

    images: dict[str, bytes] = {}
    report["rankings"] = tables.rankings(report["settings"])
    if figures.available():
        drawn, width = figure.draw(report, options.width), options.width
        images = {f"sweep.{k}": c for k, c in figures.images(drawn, options.figures, exact=width is not None).items()}
    else:
        report["notes"].append(figures.MISSING)
    page = tables.markdown(report)
    report["folder"] = options.out
    report["files"] = OwnFiles(options.out, FORMAT).write(report, {"sweep.md": page, **images})
    return page
