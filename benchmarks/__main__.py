"""Measure the arms and print a table: `python -m benchmarks`."""

import sys
from collections.abc import Sequence

from benchmarks.options import parse
from lm_eval_duel.console.command_line import STDOUT, errors_as_exit_codes, write_json


def main(arguments: Sequence[str]) -> None:
    settings = parse(arguments)
    from benchmarks import figures  # torch is imported only after the arguments have been checked
    from benchmarks.arms import Bench

    bench = Bench(settings)
    if settings.peak_of is not None:
        print(bench.own_peak_bytes(settings.peak_of))
        return
    measured = figures.measure(bench)
    if settings.json != STDOUT:
        print(figures.table(measured))
    if settings.json:
        write_json(settings.json, measured)


if __name__ == "__main__":
    with errors_as_exit_codes():
        main(sys.argv[1:])
