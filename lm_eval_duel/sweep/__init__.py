"""`lm-eval-duel sweep`: unmasking rules at several speeds, by the likelihood of text and by what they write."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from lm_eval_duel.sweep.arguments import parse

STOPPED = 130  # as a shell says of a program that was interrupted


def main(arguments: Sequence[str]) -> None:
    """Sweep and print: `lm-eval-duel sweep`."""
    asked = parse(arguments)
    # torch and the harness are imported once the arguments are known to be good
    from lm_eval_duel.sweep import tables
    from lm_eval_duel.sweep.run import Sweep

    try:
        sweep = Sweep(asked)
        report = sweep.run()
    except KeyboardInterrupt:
        out = Path(asked.out)
        whole = len(list(out.glob("settings/*.json")))
        lines = sum(file.read_bytes().count(b"\n") for file in out.glob("parts/*.jsonl"))
        print(
            f"\nStopped. {out} keeps what is finished ({whole} whole settings; {lines} windows and samples); "
            "the same command goes on from there.",
            file=sys.stderr,
        )
        sys.exit(STOPPED)
    tables.write(report, Path(asked.out))
    print(tables.console(report))
