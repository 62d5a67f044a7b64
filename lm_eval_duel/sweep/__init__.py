"""`lm-eval-duel sweep`: compare unmasking rules at several speeds, by likelihood of text and quality of samples."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from lm_eval_duel import signals
from lm_eval_duel.command_line import INTERRUPTED
from lm_eval_duel.results.own_files import OwnFiles
from lm_eval_duel.sweep.arguments import parse


def main(arguments: Sequence[str]) -> None:
    """Run a sweep and print its tables: `lm-eval-duel sweep`."""
    options = parse(arguments)
    # torch and the harness are imported only after the arguments have been checked
    from lm_eval_duel.sweep import tables
    from lm_eval_duel.sweep.run import Sweep

    OwnFiles(Path(options.out), tables.FORMAT).earlier()
    try:
        sweep = Sweep(options)
        with signals.deferred():
            report = sweep.run()
    except (KeyboardInterrupt, signals.Interrupted) as stop:
        print(f"\nStopped. {options.out} keeps the finished work: run the same command to continue.", file=sys.stderr)
        sys.exit(stop.code if isinstance(stop, signals.Interrupted) else INTERRUPTED)
    if sweep.ranks.rank == 0:
        tables.write(report, Path(options.out), options.figures, options.width)
        print(tables.console(report))
