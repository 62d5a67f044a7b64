"""`lm-eval-duel paper`: the paper's tables, measured again.

    lm-eval-duel paper owt --limit 16
    lm-eval-duel paper zero_shot samplers --plan

Each row is a recipe (recipes/*/*.yaml). What is finished is not run again.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval_duel.arguments import COUNT, MISSING, TEXT, TRUTH, number
from lm_eval_duel.cli.paper import forecast, jobs, recipes, verdict
from lm_eval_duel.cli.where import where
from lm_eval_duel.command_line import FAILED, FLAGS, PATH, Flag, Parser, process
from lm_eval_duel.errors import DuelError, usage
from lm_eval_duel.results.own_files import OwnFiles

FORMAT = "lm_eval_duel paper"
PER_CENT = number("a number of per cent, from 0 to below 100", lambda x: 0 <= x < 100)
PRINTS = f"""\
Prints a line for each figure of the tables: published, measured, difference, standard error over documents, how many
documents were scored, and a verdict. Each row is run in a process of its own (--num_processes 8: in eight, a GPU each);
results, logs and response caches are kept in --out, so after Ctrl-C the same command continues, and finished rows are
not run again. A row that fails is reported, and the others are still run; the exit code is then {FAILED}.
Writes DIR/paper.md and DIR/paper.json, and DIR/results for `report` and `leaderboard`.
"""


def main(arguments: Sequence[str]) -> None:
    """Run the paper's tables: `lm-eval-duel paper`."""
    options = parse(arguments)
    if options.plan:
        print(forecast.table(options))
        return
    every = recipes.jobs(options.lines)
    finished = {path: job.finished for path, job in every.items()}  # the results file, if there is one
    lines = [verdict.described(line, finished[line.path], "", options.tolerance) for line in options.lines]
    failed = 0
    write(options, lines)
    try:
        for n, (path, job) in enumerate(every.items(), 1):
            label = f"[{n}/{len(every)}] {job.row} {job.task}"
            if finished[path]:
                print(f"{label}: finished before", flush=True)
            elif why := _run(job, label, options, lines):
                failed += 1
                print(f"{label}: FAILED: {why}", flush=True)
    finally:  # what is finished is shown after Ctrl-C, too
        print(verdict.terminal(lines, options.tolerance))
        print(f"\nwrote {options.out}/paper.md and {options.out}/paper.json", flush=True)
    if failed:
        raise DuelError(f"{failed} of {len(every)} runs failed; their logs are in {options.out}/runs.")


@usage()
def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The parsed command line with its `lines`; raises UsageError for wrong arguments."""
    if (processes := process()[1]) > 1:
        raise DuelError(
            "paper starts the processes of its runs itself: start it without torchrun or accelerate, with "
            f"--num_processes {processes}."
        )
    options = Parser(
        "paper",
        "Measure the paper's tables and print published and measured values side by side.",
        PRINTS,
        "owt --limit 16 --out paper",
        *("metadata", "limit", "device", "batch_size", "tflops", "utilization"),
        TABLE=Flag(TEXT, MISSING, "owt, lm1b, zero_shot, samplers, oracle, 8b", many=True),
        rows=Flag(TEXT, None, "only these rows; patterns: mdlm_duel 'bd3lm_*'", many=True, shows="ROW"),
        tasks=Flag(TEXT, None, "only these tasks: duel_ptb_wrapped", many=True, shows="TASK"),
        given=Flag(TRUTH, False, "the corrected conventions (given/) for rows that have one"),
        out=dataclasses.replace(FLAGS["out"], default="paper"),
        plan=Flag(TRUTH, False, "run nothing: print windows, network rows and hours"),
        tolerance=Flag(PER_CENT, 1.0, "differences that agree, in per cent of the published figure", shows="P"),
        weights=Flag(TEXT, None, "model args in place of a row's or checkpoint's", many=True, shows="NAME=FOLDER,..."),
        num_processes=Flag(COUNT, 1, "processes that share the documents of each run, a GPU each", shows="N"),
        no_samples=Flag(TRUTH, False, "do not save documents: gigabytes for owt and lm1b"),
        recipes=Flag(PATH, where("recipes"), "a folder of recipes, with a published.csv", unset="ours", shows="FOLDER"),
    ).parse_args(arguments)
    options.recipes = Path(options.recipes)
    if not (options.recipes / "published.csv").is_file():
        raise DuelError(f"--recipes {options.recipes}: there is no published.csv in it.")
    options.weights = dict(map(_weights, options.weights))
    options.lines = recipes.lines(options)
    return options


def _weights(text: str) -> tuple[str, dict[str, Any]]:
    """A row or checkpoint, and the model args that replace its own."""
    name, _, replaced = text.partition("=")
    arguments = FLAGS["model_args"].read("--weights", replaced) if replaced else {}
    if not (name and arguments.get("pretrained")):
        raise DuelError(f"--weights is NAME=FOLDER or NAME=FOLDER,tokenizer=...; got {text}.")
    if recipes.missing_folder(str(arguments["pretrained"])):
        raise DuelError(f"The weights of {name}: there is no folder {arguments['pretrained']}.")
    return name, arguments


def _run(job: recipes.Job, label: str, options: argparse.Namespace, lines: list[dict[str, Any]]) -> str:
    """Run a job, describe its lines again and write them; returns why it failed, or an empty text."""
    why = ""
    try:
        if job.finished:  # by another command in this folder
            print(f"{label}: finished meanwhile", flush=True)
        else:
            print(label, flush=True)
            why = jobs.run(job, options)
    finally:  # Ctrl-C may come after the results were written
        file = job.finished
        for at, line in enumerate(options.lines):
            if line.path == job.path("runs"):
                lines[at] = verdict.described(line, file, why, options.tolerance)
        write(options, lines)
    return why


def write(options: argparse.Namespace, lines: Sequence[dict[str, Any]]) -> None:
    """Write paper.md and paper.json; raises DuelError for such files that are not ours."""
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    content = {"version": 1, "date": date, "tolerance_percent": options.tolerance, "lines": lines}
    OwnFiles(options.out, FORMAT).write(content, {"paper.md": verdict.page(lines, options.tolerance)})
