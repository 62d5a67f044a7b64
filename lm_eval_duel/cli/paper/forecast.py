"""What the jobs of a command will take, counted as `plan` counts, before any weight is read."""

from __future__ import annotations

import argparse
import functools
import json
import tempfile
from pathlib import Path
from typing import Any

from lm_eval_duel.cli import plan
from lm_eval_duel.cli.paper import recipes
from lm_eval_duel.cli.paper.jobs import processes_of
from lm_eval_duel.cli.paper.recipes import Job
from lm_eval_duel.errors import DuelError
from lm_eval_duel.tables import one_line, plain_table

HEADER = ("row", "task", "windows", "calls", "rows", "time", "")
METHODS = {"duel": "exact", "ar": "chain rule", "oracle": "lattice"}
SIZES = {  # documents and scored tokens where a data set cannot be read here: rough, within about a quarter
    "duel_openwebtext_wrapped": (110_000, 1023),
    "duel_openwebtext_1k_wrapped": (1_100, 1023),
    "duel_lm1b_in_domain": (72_000, 127),
    "duel_ptb_wrapped": (90, 1023),
    "duel_wikitext103_wrapped": (240, 1023),
    "duel_lm1b_wrapped": (8_700, 1023),
    "duel_lambada_wrapped": (450, 1023),
    "duel_ag_news_wrapped": (384, 1023),  # the number of rows in the authors' result files
    "duel_pubmed_wrapped": (26_000, 1023),
    "duel_arxiv_wrapped": (45_000, 1023),
    "wikitext": (62, 4_680),
    "duel_lambada": (5_153, 88),
    "duel_ag_news": (7_600, 53),
}
STOCK = {"wikitext": "duel_wikitext2"}  # lm-eval's own task, and ours with the same pages


def forecast(job: Job, options: argparse.Namespace) -> dict[str, Any]:
    """Windows, network calls (at least), rows and hours of a job, on one device. `rough`: its data set is not on this
    machine; `most`: an upper bound. Raises DuelError if its network's config.json cannot be read.
    """
    documents, tokens, rough = _size(job)
    arguments = {key: value for key, value in job.config["model_args"].items() if key != "add_bos_token"}
    arguments |= {"estimator": "ar"} if job.config["model"] == "hf" else {}
    with tempfile.TemporaryDirectory() as folder:
        if job.missing_weights and job.shape:
            (Path(folder) / "config.json").write_text(job.shape, encoding="utf-8")
            arguments["pretrained"] = folder
        words = ["--model_args", json.dumps(arguments), "--tokens", str(tokens), "--documents", str(documents)]
        words += ["--utilization", str(options.utilization)]
        words += ["--tflops", str(options.tflops)] if options.tflops else []
        figures = plan.plan(plan.parse(words))
    method = METHODS.get(arguments.get("estimator", "duel"), f"elbo {arguments.get('mc_samples', 128)}")
    most = figures["upper_bound"] and method == "exact"
    return {**figures["methods"][method], "windows": figures["windows"], "rough": rough, "most": most}


def _size(job: Job) -> tuple[int, int, bool]:
    """(documents, scored tokens, whether they are rough) of a job."""
    arguments, rough = job.config["model_args"], False
    named = {key: arguments[key] for key in ("pretrained", "tokenizer", "bos") if key in arguments}
    try:
        documents, tokens = _counted(job.task, json.dumps({**named, **job.config["metadata"]}, sort_keys=True))
    except DuelError:
        if job.task not in SIZES:
            raise
        documents, length = SIZES[job.task]
        tokens, rough = documents * length, True
    if job.limit is not None and job.limit < documents:
        documents, tokens = job.limit, round(tokens * job.limit / documents)
    return documents, tokens, rough


@functools.cache
def _counted(task: str, settings: str) -> tuple[int, int]:
    """The documents and scored tokens of a data set."""
    from lm_eval_duel import tasks
    from lm_eval_duel.cli.data import benchmarks
    from lm_eval_duel.tasks.columns import TOKENS

    config = benchmarks().get(STOCK.get(task, task))
    if config is None:
        raise DuelError(f"The size of {task} is not known.")
    load = getattr(tasks, config["custom_dataset"].rsplit(".", 1)[-1])
    rows = load(**{**config["metadata"], **json.loads(settings)})["test"]
    return len(rows), sum(rows[TOKENS])


def table(options: argparse.Namespace) -> str:
    """The forecasts of a command as a table; a text in the last column says why there is none."""
    rows, known, hours = [], [], 0.0
    for job in recipes.jobs(options.lines).values():
        try:
            why = "finished" if job.finished else ""
            figures = None if why else forecast(job, options)
        except DuelError as error:
            figures, why = None, one_line(str(error).partition(". ")[0])
        if figures is None:
            rows.append([job.row, job.task, *[""] * 4, why])
            continue
        about, most = "about " if figures["rough"] else "", "<= " if figures["most"] else ""
        counts = [f"{about}{figures['windows']:,}", *(f"{most}{figures[key]:,}" for key in ("calls_at_least", "rows"))]
        own = figures["hours"] / processes_of(job, options)
        rows.append([job.row, job.task, *counts, f"{most}{plan.hours_as_text(own)}", ""])
        known, hours = [*known, figures], hours + own
    devices = f" on {options.num_processes} devices" if options.num_processes > 1 else ""
    windows = sum(figures["windows"] for figures in known)
    lines = [
        plain_table(HEADER, rows),
        "",
        f"{len(known)} run{'s' * (len(known) != 1)}, {windows:,} windows, {plan.hours_as_text(hours)}.",
        f"Time{devices} at {options.utilization:.0%} of the device's dense rate ({plan.TFLOPS['float32']:g} TFLOP/s in "
        f"float32, {plan.TFLOPS['bfloat16']:g} in bfloat16, an H200's); see --tflops, --utilization. Network calls: at "
        "least.",
    ]
    if any(figures["rough"] for figures in known):
        lines.append("about: the data set is not on this machine, and its size is known within a quarter.")
    return "\n".join(lines)
