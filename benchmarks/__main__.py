"""`python -m benchmarks`: the three ratios of docs/running.md, or the arms of one network if arguments are given."""

import sys
from collections.abc import Sequence

from benchmarks.options import parse
from lm_eval_duel.console.command_line import STDOUT, plain_table, write_json
from lm_eval_duel.console.exits import errors_as_exit_codes

THREE = {  # the loops that people run, each on a small random network of its kind
    "kept keys, blocks of 4, 512 positions": "random:block-causal --model_args block=4 --length 512",
    "whole rows, blocks of 32, 128 positions": "random:bidirectional --model_args block=32 --length 128",
    "dual cache, blocks of 32, 256 positions": "random:bidirectional --model_args block=32,cache=dual --length 256",
}
SMALL = "--vocab 8192 --windows 2 --repeats 2 --no_memory"
READING = """\
loop / ours: how many times as long the usual loop takes as this package, for the same windows and the same numbers.
ours / calls: this package against its own network calls alone, which no code around them can undercut.
Medians of the ratios within a repeat. Real networks have other ratios: `python -m benchmarks --help`."""


def main(arguments: Sequence[str]) -> None:
    """Measure one network as the arguments say, or the three of `THREE` without any."""
    if not arguments:
        print(three())
        return
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


def three(small: str = SMALL) -> str:
    """The ratios of the three loops as a table."""
    from benchmarks import figures
    from benchmarks.arms import Bench

    header = ("loop", "loop / ours", "ours / calls", "largest difference in nats")
    lines = []
    for title, words in THREE.items():
        bench = Bench(parse(f"{words} {small}".split()))
        bench.arms = {arm: bench.arms[arm] for arm in ("loop", "ours", "forwards")}
        measured = figures.measure(bench)
        ratios = measured["ratios"]
        difference = measured["compared"]["max_abs_diff_nats"]
        ours = f"{ratios['ours / forwards']:.2f}"
        lines.append((title, f"{ratios['loop / ours']:.1f}", ours, "" if difference is None else f"{difference:.0e}"))
    return f"{plain_table(header, lines)}\n\n{READING}"


if __name__ == "__main__":
    with errors_as_exit_codes():
        main(sys.argv[1:])
