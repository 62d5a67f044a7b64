"""The tables of the DUEL paper: runs of lm_eval, and what they measured beside the published figures.

    python examples/paper/run.py 'oracle/*' --limit 16
    python examples/paper/run.py 'samplers/*' 'owt/bd3lm_*' --launch "torchrun --nproc-per-node 8"

A row of recipes.yaml is run on each of its tasks, in a process of its own. What is finished is not run again, and what
was interrupted continues: each run keeps its results and its response cache in --out. For intervals and paired
differences: lm-eval-duel report OUT/owt --as_published --out report
"""

import argparse
import csv
import fnmatch
import hashlib
import itertools
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from lm_eval_duel.errors import DuelError, unknown
from lm_eval_duel.results import columns, compare, read
from lm_eval_duel.results.published import PAPER_FILE
from lm_eval_duel.rules import parse as parse_rule

RECIPES = Path(__file__).with_name("recipes.yaml")
HEADS = ("row", "task", "rule", "published", "measured", "difference", "documents")


class Job(NamedTuple):
    """A row on one task. `config`: as for lm_eval --config."""

    row: str
    task: str
    config: dict[str, Any]

    @property
    def finished(self) -> bool:
        return any(Path(self.config["output_path"]).rglob("results_*.json"))

    def write_config(self) -> Path:
        """Write the config for lm_eval, next to the cache."""
        file = Path(self.config["use_cache"]).with_name("config.yaml")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(yaml.safe_dump(self.config), encoding="utf-8")
        return file


def rows(group: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a group and their model args. An argument with several values stands for a row for each."""
    for name, arguments in group["rows"].items():
        several = {key: values for key, values in arguments.items() if isinstance(values, list)}
        for values in itertools.product(*several.values()):
            one = arguments | dict(zip(several, values, strict=True))
            texts = {key: value.format(**one) for key, value in one.items() if isinstance(value, str)}
            yield name.format(**one), group.get("model_args", {}) | one | texts


def jobs(options: argparse.Namespace) -> Iterator[Job]:
    """The jobs of the rows that match a pattern; raises DuelError in the end for a pattern that matches none."""
    groups = yaml.safe_load(Path(options.recipes).read_text(encoding="utf-8"))["groups"]
    names: list[str] = []
    for group in groups:
        for (row, arguments), task in itertools.product(rows(group), group["tasks"]):
            job_names = [row, f"{row}/{task}"]
            names += job_names
            if any(fnmatch.filter(job_names, pattern) for pattern in options.rows):
                yield job_of(group, row, arguments, task, options)
    for pattern in options.rows:
        if not fnmatch.filter(names, pattern):
            raise unknown("row", pattern, dict.fromkeys(names))


def job_of(
    group: Mapping[str, Any], row: str, arguments: Mapping[str, Any], task: str, options: argparse.Namespace
) -> Job:
    """A row of a group on one of its tasks."""
    if options.given and arguments.get("bos") in ("official", "scored"):
        arguments = {**arguments, "bos": "given"}
    config = {
        "model": group.get("model", "duel-mdm"),
        "model_args": dict(arguments),
        "tasks": [task],
        "metadata": group.get("metadata", {}),
    }
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:8]
    folder = Path(options.out, row, f"{task}-{digest}")  # other settings have another folder
    config |= {
        "batch_size": group.get("batch_size", "auto"),
        "log_samples": True,
        "use_cache": str(folder / "cache"),
        "output_path": str(folder / (f"limit{options.limit}" if options.limit else "all")),
    }
    if options.device is not None:
        config["device"] = options.device
    if options.limit is not None:
        config["limit"] = options.limit
    return Job(row, task, config)


def execute(words: Sequence[str]) -> int:
    """The exit code of a command. Ctrl-C reaches it, too; it then saves its work."""
    process = subprocess.Popen(words)
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.wait()
        raise


def published_figures(row: str, task: str) -> Iterator[dict[str, str]]:
    """The lines of the paper's figures that a row of recipes.yaml measures on a task."""
    for line in csv.DictReader(PAPER_FILE.read_text(encoding="utf-8").splitlines()):
        if line["task"] == task and row in line["recipes"].split():
            yield line


def beside(job: Job) -> Iterator[tuple[str, ...]]:
    """The cells of HEADS for each published figure of a finished job."""
    runs = read.runs([job.config["output_path"]])
    counts = runs[-1].content["n-samples"][job.task]
    documents = f"{counts['effective']:,} of {counts['original']:,}"

    figures = {}  # two tables print some of them
    for line in published_figures(job.row, job.task):
        figures[line["estimator"], line["rule"]] = line

    for (estimator, rule), line in figures.items():
        name = estimator, str(parse_rule(rule)) if rule else None
        published = float(line["value"])
        for compared in compare.task(job.task, runs, metric=line["metric"]).rows:
            row = compared.row
            if (row.estimator, row.rule) != name:
                continue
            printed = f"{'≤ ' if row.score.is_bound else ''}{published:.2f}"
            change = f"{row.value - published:+.2f} ({100 * (row.value / published - 1):+.1f} %)"
            yield job.row, job.task, rule or estimator, printed, columns.value(row), change, documents


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="+", help="patterns: 'owt/*', or with a task: 'zero_shot/*/duel_ptb_wrapped'")
    parser.add_argument("--out", default="paper", help="a folder for results and caches")
    parser.add_argument("--limit", type=int, help="only the first documents of each task; do not publish such values")
    parser.add_argument("--given", action="store_true", help="the corrected conventions")
    parser.add_argument("--device")
    parser.add_argument("--launch", default=sys.executable, help="what starts a run, such as torchrun and its flags")
    parser.add_argument("--recipes", default=RECIPES, help="your own table of rows")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """The number of jobs that failed."""
    options = parse(arguments)
    chosen = list(jobs(options))
    failed = 0
    for number, job in enumerate(chosen, 1):
        print(f"[{number}/{len(chosen)}] {job.row} {job.task}{': finished before' if job.finished else ''}", flush=True)
        if job.finished:
            continue
        code = execute([*shlex.split(options.launch), "-m", "lm_eval_duel", "run", "--config", str(job.write_config())])
        if code:
            print(f"{job.row} {job.task}: FAILED with exit code {code}", flush=True)
            failed += 1

    print(f"| {' | '.join(HEADS)} |\n{'|---' * len(HEADS)}|")
    for job in chosen:
        if job.finished:
            for cells in beside(job):
                print(f"| {' | '.join(cells)} |")
    return failed


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]) > 0)
    except DuelError as error:
        sys.exit(f"run.py: {error}")
