"""`lm-eval-duel bench`: speed and memory compared with the loops that people run."""

from __future__ import annotations

from collections.abc import Sequence

from lm_eval_duel.bench.options import parse


def main(arguments: Sequence[str]) -> None:
    """Measure and print: `lm-eval-duel bench`."""
    settings = parse(arguments)
    # torch is imported only after the arguments have been checked
    from lm_eval_duel.bench.run import run

    run(settings)
