"""Runs jobs: `lm-eval-duel run` in a process of its own, whose memory is free again afterwards, or torchrun with it."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from lm_eval_duel._autoload import MODELS
from lm_eval_duel.cli.paper.recipes import Job
from lm_eval_duel.command_line import INTERRUPTED, PROGRAM

SHOWN = 320  # characters of a reason
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node")


def processes_of(job: Job, options: argparse.Namespace) -> int:
    """How many processes run a job: at most one for each document.

    One for a model of the harness's own, which decides by the device whether it shares documents.
    """
    count = options.num_processes
    return min(count, job.limit or count) if job.config["model"] in MODELS else 1


def run(job: Job, options: argparse.Namespace) -> str:
    """Run a job to its end; returns why it failed, or an empty text.

    Raises KeyboardInterrupt after Ctrl-C, SIGTERM or SIGHUP, when the job has kept its work and ended.
    """
    if why := job.missing_weights:
        return why
    config, log, processes = write(job, options), job.path("runs", ".log"), processes_of(job, options)
    launcher = (*TORCHRUN, str(processes), "-m") if processes > 1 else ()
    command = [sys.executable, "-m", *launcher, "lm_eval_duel", "run", "--config", str(config)]
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    with log.open("w", encoding="utf-8") as file:  # a session of its own: signals reach it once, from here
        process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
        try:
            process.wait()
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            process.wait()
            raise
    if process.returncode == INTERRUPTED:
        raise KeyboardInterrupt
    return "" if process.returncode == 0 and job.finished else reason(log, process.returncode)


def write(job: Job, options: argparse.Namespace) -> Path:
    """The job as a file for `run --config`."""
    import yaml

    own_size = job.batch_size if options.batch_size == "auto" else None
    config: dict[str, Any] = {
        **job.config,
        "batch_size": own_size or options.batch_size,
        "output_path": str(job.path("results")),
        "use_cache": str(job.path("cache")),
        "log_samples": not options.no_samples,
        **({} if options.device is None else {"device": options.device}),
    }
    file = job.path("runs", ".yaml")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return file


def reason(log: Path, code: int) -> str:
    """Why a process failed, in one line: its last message."""
    if code < 0:
        name = signal.Signals(-code).name
        return f"killed by {name}" + (" (probably out of memory)" if name == "SIGKILL" else "")
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    own = [line for line in lines if line.startswith(f"{PROGRAM}: ")]
    last = (own[:1] or lines or ["it wrote no results"])[-1].removeprefix(f"{PROGRAM}: ")  # others fail as it has ended
    return last if len(last) <= SHOWN else f"{last[:SHOWN]}..."
