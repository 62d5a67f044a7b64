"""`lm-eval-duel paper`: the paper's tables again, published beside measured.

    lm-eval-duel paper owt --limit 16
    lm-eval-duel paper zero_shot samplers --plan

Each row is a recipe (recipes/*/*.yaml). What is finished is not run again.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lm_eval_duel import strict_json
from lm_eval_duel.arguments import COUNT
from lm_eval_duel.cli.paper import forecast, jobs, page, recipes, verdict
from lm_eval_duel.cli.paper.jobs import Settings
from lm_eval_duel.cli.paper.recipes import Choice, Job, Line
from lm_eval_duel.command_line import FAILED, PROGRAM, Parser, folder_to_write, process
from lm_eval_duel.errors import DuelError, usage
from lm_eval_duel.harness.key_values import key_values
from lm_eval_duel.tables import one_line

FORMAT = "lm_eval_duel paper"
KEY = ("table", "row", "task", "estimator", "rule")  # of a line of paper.json
OUT, TOLERANCE = "paper", 1.0
PRINTS = f"""\
Prints a line for each figure of the tables: published, measured, difference, standard error over documents, how many
documents were scored, and a verdict. Each row is run in a process of its own (--num_processes 8: in eight, a GPU each);
results, logs and response caches are kept in --out, so after Ctrl-C the same command continues, and finished rows are
not run again. A row that fails is reported, and the others are still run; the exit code is then {FAILED}.
Writes DIR/paper.md and DIR/paper.json (everything measured in DIR so far), and DIR/results for `report` and
`leaderboard`.
"""


def main(arguments: Sequence[str]) -> None:
    """Run the paper's tables: `lm-eval-duel paper`."""
    options, choice, settings = parse(arguments)
    with usage():
        lines = recipes.lines(choice)
    if options.plan:
        print(_planned(lines, settings, options))
        return
    failures: dict[str, str] = {}
    try:
        _run(lines, settings, failures, options.tolerance)
    except KeyboardInterrupt:  # what is finished is shown
        _print(lines, settings.out, failures, options.tolerance)
        raise
    _print(lines, settings.out, failures, options.tolerance)
    if failures:
        raise DuelError(
            f"{len(failures)} of {len(_jobs(lines))} runs failed; their logs are in {settings.out / 'runs'}."
        )


@usage()
def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, Choice, Settings]:
    """The parsed command line; raises UsageError for wrong arguments."""
    if (processes := process()[1]) > 1:
        raise DuelError(
            "paper starts the processes of its runs itself: start it without torchrun or accelerate, with "
            f"--num_processes {processes}."
        )
    parser = Parser(
        "paper", "Measure the paper's tables and print published beside measured.", PRINTS, "owt --limit 16 --out paper"
    )
    add = parser.add_argument
    parser.add("metadata", "limit", "device")
    add("tables", nargs="+", metavar="TABLE", help="owt, lm1b, zero_shot, samplers, oracle, 8b")
    add("--rows", nargs="+", default=[], metavar="ROW", help="only these rows; patterns: mdlm_duel 'bd3lm_*'")
    add("--tasks", nargs="+", default=[], metavar="TASK", help="only these tasks: duel_ptb_wrapped")
    add("--given", action="store_true", help="the corrected conventions (given/) for rows that have one")
    add("--out", default=OUT, metavar="DIR", help=f"folder of results, caches, logs and tables ({OUT})")
    add("--plan", action="store_true", help="run nothing: print windows, network rows and hours")
    add("--tolerance", type=float, default=TOLERANCE, metavar="P", help=f"per cent that agree ({TOLERANCE:g})")
    add("--pretrained", action="append", default=[], metavar="NAME=FOLDER", help="weights; NAME: row or checkpoint")
    add("--weights", metavar="FILE", help="YAML: NAME: FOLDER, or NAME: {pretrained: FOLDER, tokenizer: ...}")
    add("--batch_size", help="rows per network call (auto)")
    add(
        "--num_processes",
        default="1",
        metavar="N",
        help="processes that share the documents of each run, a GPU each (1)",
    )
    add("--no_samples", action="store_true", help="do not save documents: gigabytes for owt and lm1b")
    add("--recipes", metavar="FOLDER", help="other recipes, with a published.csv")
    add("--tflops", type=float, help="with --plan: the device's dense rate, as for plan")
    add("--utilization", type=float, default=0.5, help="with --plan: the share of that rate that is reached (0.5)")
    options = parser.parse_args(list(arguments))
    if not 0 <= options.tolerance < 100:
        raise DuelError(f"--tolerance is a number of per cent from 0 to 100; got {options.tolerance}.")
    if not 0 < options.utilization <= 1:
        raise DuelError(f"--utilization is a share above 0, at most 1; got {options.utilization}.")
    if options.tflops is not None and not 0 < options.tflops < float("inf"):
        raise DuelError(f"--tflops is a rate above 0; got {options.tflops}.")
    out = folder_to_write("--out", options.out)
    folder = recipes.folder(options.recipes)
    choice = Choice(
        folder,
        options.tables,
        options.rows,
        options.tasks,
        options.given,
        COUNT("--limit", options.limit),
        key_values("--metadata", options.metadata),
        _weights(options),
    )
    recipes.lines(choice)
    processes = COUNT("--num_processes", options.num_processes) or 1
    settings = Settings(out, options.device, options.batch_size, not options.no_samples, processes)
    return options, choice, settings


def _weights(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Model args by row or checkpoint, from --weights and --pretrained."""
    import yaml

    checkpoints: dict[str, dict[str, Any]] = {}
    if options.weights is not None:
        try:
            content = yaml.safe_load(Path(options.weights).read_text(encoding="utf-8"))
        except (UnicodeDecodeError, yaml.YAMLError) as error:
            raise DuelError(f"--weights {options.weights} is not YAML: {' '.join(str(error).split())}.") from None
        for name, value in (content if isinstance(content, dict) else {"": None}).items():
            checkpoints[str(name)] = value if isinstance(value, dict) else {"pretrained": value}
            if not isinstance(checkpoints[str(name)].get("pretrained"), str):
                raise DuelError(f"--weights {options.weights}: lines are NAME: FOLDER; got {name}: {value}.")
    for pair in options.pretrained:
        name, equals, folder = pair.partition("=")
        if not (name and equals and folder):
            raise DuelError(f"--pretrained is NAME=FOLDER; got {pair}.")
        checkpoints[name] = {"pretrained": folder}
    for name, arguments in checkpoints.items():
        if recipes.missing_folder(arguments["pretrained"]):
            raise DuelError(f"The weights of {name}: there is no folder {arguments['pretrained']}.")
    return checkpoints


def _key(job: Job) -> str:
    return f"{job.row} {job.name}"


def _jobs(lines: Iterable[Line]) -> dict[str, Job]:
    """The different jobs of lines."""
    return {_key(line.job): line.job for line in lines}


def _run(lines: Sequence[Line], settings: Settings, failures: dict[str, str], tolerance: float) -> None:
    """Run every job that is not finished. `failures` gets why those that failed did."""
    everything = _jobs(lines)
    settings.out.mkdir(parents=True, exist_ok=True)
    write(lines, settings, failures, tolerance)
    for number, (key, job) in enumerate(everything.items(), 1):
        place = f"[{number}/{len(everything)}] {job.row} {job.task}"
        if jobs.finished(job, settings.out):
            print(f"{place}: finished before", flush=True)
            continue
        print(f"{place} (progress: {PROGRAM} so-far {job.cache(settings.out)})", flush=True)
        if why := jobs.run(job, settings):
            failures[key] = why
            print(f"{place}: FAILED: {why}", flush=True)
        write(lines, settings, failures, tolerance)


def _print(lines: Sequence[Line], out: Path, failures: dict[str, str], tolerance: float) -> None:
    """Print the table."""
    print(page.terminal([_described(line, out, failures, tolerance) for line in lines], tolerance))
    print(f"\nwrote {out / 'paper.md'} and {out / 'paper.json'}", flush=True)


def _described(line: Line, out: Path, failures: dict[str, str], tolerance: float) -> dict[str, Any]:
    """A line with what was measured, if its job is finished."""
    file = jobs.finished(line.job, out)
    if file is None:
        why = failures.get(_key(line.job), "")
        return verdict.describe(line, verdict.FAILED if why else verdict.NOT_RUN, why=why)
    try:
        measured = verdict.measured(line, file)
    except DuelError as error:
        return verdict.describe(line, verdict.FAILED, why=str(error))
    return verdict.describe(line, verdict.FINISHED, measured, verdict.judge(line, measured, tolerance))


def write(lines: Sequence[Line], settings: Settings, failures: dict[str, str], tolerance: float) -> None:
    """Write paper.md and paper.json: these lines, and those that earlier commands finished in the same folder."""
    out = settings.out
    content = [_described(line, out, failures, tolerance) for line in lines]
    content += _earlier(out / "paper.json", content)
    body = {
        "format": FORMAT,
        "version": 1,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "tolerance_percent": tolerance,
        "lines": content,
    }
    for name, text in (
        ("paper.json", strict_json.dumps(body) + "\n"),
        ("paper.md", page.markdown(content, tolerance, "Published and measured")),
    ):
        part = out / f"{name}.part"
        part.write_text(text, encoding="utf-8")
        part.replace(out / name)


def _earlier(file: Path, now: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The measured lines of an earlier paper.json that are not among those of this command."""
    from lm_eval_duel.results import consistency

    if not file.exists():
        return []
    try:
        stored = consistency.load(file, "a paper.json of this command")
        known = stored["lines"] if stored.get("format") == FORMAT else None
    except (KeyError, AttributeError):
        known = None
    if not isinstance(known, list):
        raise DuelError(f"{file} was not written by {PROGRAM} paper: name another --out, or remove it.")
    replaced = {tuple(map(line.get, KEY)): line["documents"] for line in now if line["measured"] is not None}
    return [
        line
        for line in known
        if line["measured"] is not None and line["documents"] > replaced.get(tuple(map(line.get, KEY)), 0)
    ]


def _planned(lines: Sequence[Line], settings: Settings, options: argparse.Namespace) -> str:
    """The table of --plan."""
    rows: list[tuple[Line, forecast.Forecast | str]] = []
    for line in {_key(line.job): line for line in lines}.values():
        if jobs.finished(line.job, settings.out):
            rows.append((line, verdict.FINISHED))
            continue
        try:
            alone = forecast.forecast(line.job, options.tflops, options.utilization)
            rows.append((line, dataclasses.replace(alone, hours=alone.hours / settings.processes_of(line.job))))
        except DuelError as error:
            rows.append((line, one_line(str(error).partition(". ")[0])))
    return page.plans(rows, options.utilization, settings.processes)
