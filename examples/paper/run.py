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
import json
import math
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from lm_eval_duel.errors import DuelError, unknown
from lm_eval_duel.results.published import PAPER_FILE
from lm_eval_duel.rules import parse as parse_rule

RECIPES = Path(__file__).with_name("recipes.yaml")


class Job(NamedTuple):
    """A row on one task. `config`: as for lm_eval --config."""

    row: str
    task: str
    config: dict[str, Any]
    folder: Path

    @property
    def results(self) -> dict[str, Any] | None:
        """The newest results; None if it is not finished."""
        files = sorted(Path(self.config["output_path"]).rglob("results_*.json"))
        return json.loads(files[-1].read_text(encoding="utf-8")) if files else None


def jobs(options: argparse.Namespace) -> Iterator[Job]:
    """The jobs of the rows that match a pattern; raises DuelError for a pattern that matches none."""
    groups = yaml.safe_load(Path(options.recipes).read_text(encoding="utf-8"))["groups"]
    rows = {row: group["tasks"] for group in groups for row in group["rows"]}
    known = [name for row, tasks in rows.items() for name in (row, *(f"{row}/{task}" for task in tasks))]
    for pattern in options.rows:
        if not fnmatch.filter(known, pattern):
            raise unknown("row", pattern, known if pattern.count("/") > 1 else rows)
    for group in groups:
        for row, arguments in group["rows"].items():
            arguments = group.get("model_args", {}) | arguments
            if options.given and arguments.get("bos") in ("official", "scored"):
                arguments["bos"] = "given"
            for task in group["tasks"]:
                if not any(fnmatch.fnmatchcase(name, p) for p in options.rows for name in (row, f"{row}/{task}")):
                    continue
                config = {"model": group.get("model", "duel-mdm"), "model_args": arguments, "tasks": [task]}
                config["metadata"] = group.get("metadata", {})
                digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:8]
                folder = Path(options.out, row, f"{task}-{digest}")  # other settings have another folder
                config |= {"batch_size": group.get("batch_size", "auto"), "device": options.device, "log_samples": True}
                config |= {"limit": options.limit, "use_cache": str(folder / "cache")}
                config |= {"output_path": str(folder / (f"limit{options.limit}" if options.limit else "all"))}
                yield Job(row, task, {key: value for key, value in config.items() if value is not None}, folder)


def execute(words: Sequence[str]) -> int:
    """The exit code of a command. Ctrl-C reaches it, too; it then saves its work."""
    process = subprocess.Popen(words)
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.wait()
        raise


def run(job: Job, launch: Sequence[str]) -> bool:
    """Whether the job finished."""
    job.folder.mkdir(parents=True, exist_ok=True)
    file = job.folder / "config.yaml"
    file.write_text(yaml.safe_dump(job.config), encoding="utf-8")
    if code := execute([*launch, "-m", "lm_eval_duel", "run", "--config", str(file)]):
        print(f"{job.row} {job.task}: FAILED with exit code {code}", flush=True)
    return not code


def beside(job: Job, results: dict[str, Any]) -> Iterator[list[str]]:
    """A line for each published figure of a job: row, task, rule, published, measured, difference, documents."""
    with PAPER_FILE.open(encoding="utf-8") as file:
        figures = [figure for figure in csv.DictReader(file) if job.row in figure["recipes"].split()]
    counts = results["n-samples"][job.task]
    own = results["config"].get("duel", {}).get("tasks", {}).get(job.task, {"values": {}})
    done = set()
    for figure in (figure for figure in figures if figure["task"] == job.task):
        estimator, metric, published = figure["estimator"], figure["metric"], float(figure["value"])
        name = estimator if estimator in own["values"] else str(parse_rule(figure["rule"])) if figure["rule"] else ""
        if name in done:  # two tables print it
            continue
        done.add(name)
        sums = own["values"].get(name)  # None: a baseline of the harness's own
        measured = results["results"][job.task][f"{metric},none"]
        if len(own["values"]) > 1:  # one run of all orders has the oracle and the rules
            measured = math.exp(-sums["log_prob"] / own["tokens"])
        bound, error = "<= " * (estimator == "elbo"), ""
        if sums and sums["stderr"] is not None:  # Monte Carlo, from nats to perplexity by the delta method
            error = f" ± {measured * math.log(measured) * sums['stderr'] / -sums['log_prob']:.2f}"
        change = f"{measured - published:+.2f} ({100 * (measured / published - 1):+.1f} %)"
        cells = [
            job.row,
            job.task,
            figure["rule"] or estimator,
            f"{bound}{published:.2f}",
            f"{bound}{measured:.2f}{error}",
        ]
        yield [*cells, change, f"{counts['effective']:,} of {counts['original']:,}"]


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
    chosen, failed = list(jobs(options)), 0
    for n, job in enumerate(chosen, 1):
        print(f"[{n}/{len(chosen)}] {job.row} {job.task}{': finished before' if job.results else ''}", flush=True)
        if not job.results:
            failed += not run(job, shlex.split(options.launch))
    print("| row | task | rule | published | measured | difference | documents |\n|---|---|---|---|---|---|---|")
    for job in chosen:
        for cells in beside(job, job.results) if job.results else ():
            print(f"| {' | '.join(cells)} |")
    return failed


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]) > 0)
    except DuelError as error:
        sys.exit(f"run.py: {error}")
