"""Runs jobs: `lm-eval-duel run` in processes of its own, whose memory is free again afterwards.

Several processes find each other by the variables that torchrun sets, and share the documents as under torchrun. A job
that has a results file is finished. An interrupted one continues from its response cache.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from lm_eval_duel._autoload import MODELS
from lm_eval_duel.cli.paper.recipes import Job
from lm_eval_duel.command_line import INTERRUPTED, PROGRAM
from lm_eval_duel.errors import DuelError
from lm_eval_duel.results import read

EVERY = 2.0  # seconds between looks at the log
SHOWN = 160  # characters of a reason, or of a line of the log


@dataclasses.dataclass(frozen=True)
class Settings:
    """How jobs are run: none of it changes a number."""

    out: Path
    device: str | None = None
    batch_size: str | None = None
    samples: bool = True
    processes: int = 1

    def processes_of(self, job: Job) -> int:
        """How many processes run a job: at most one for each document.

        One for a model of the harness's own, which decides by the device whether it shares documents.
        """
        return min(self.processes, job.limit or self.processes) if job.config["model"] in MODELS else 1


def finished(job: Job, out: Path) -> Path | None:
    """The newest results file of a job, if it holds the job's task under its model args and limit."""
    for file in sorted(job.results(out).rglob("results_*.json"), reverse=True):
        try:
            run = read.run(file)
            config = run.content["config"]
        except (DuelError, KeyError):  # a damaged file: run it again
            continue
        same_limit = (config.get("limit") or None) == job.limit
        if job.task in run.tasks and config.get("model_args") == job.config["model_args"] and same_limit:
            return file
    return None


def run(job: Job, settings: Settings) -> str:
    """Run a job to its end; returns why it failed, or an empty text. An interruption of the job raises.

    Raises KeyboardInterrupt after Ctrl-C or SIGTERM, when the job has kept its work and ended.
    """
    if why := job.missing_weights:
        return why
    config, log = write(job, settings), job.file(settings.out, ".log")
    with log.open("w", encoding="utf-8") as file:
        command = [sys.executable, "-m", "lm_eval_duel", "run", "--config", str(config)]
        processes = [
            subprocess.Popen(command, stdout=file, stderr=file, env=environment)
            for environment in environments(settings.processes_of(job))
        ]
        with _forwarded(processes) as stopped:
            code = _wait(processes, log)
        _show(None)
    if stopped or code == INTERRUPTED:
        raise KeyboardInterrupt
    if code or finished(job, settings.out) is None:
        return reason(log, code)
    return ""


def environments(processes: int) -> list[dict[str, str] | None]:
    """The environment of each process, as torchrun sets it on one machine; None: that of this process."""
    if processes == 1:
        return [None]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    address |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    return [
        {**os.environ, **address, **threads, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)
    ]


def _wait(processes: Sequence[subprocess.Popen[bytes]], log: Path) -> int:
    """Wait until all processes have ended; the exit code of the first that failed, after which the others are ended."""
    code = 0
    while running := [process for process in processes if process.poll() is None]:
        if not code and (code := _failure(processes)):
            for process in running:
                process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            running[0].wait(EVERY)
        _show(log)
    return code or _failure(processes)


def _failure(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """The exit code of a process that failed, 0 if none has: of one that was killed, since others fail as it ends."""
    codes = [process.returncode for process in processes if process.returncode]
    return min(codes, key=lambda code: code > 0, default=0)


def write(job: Job, settings: Settings) -> Path:
    """The job as a file for `run --config`."""
    import yaml

    config: dict[str, Any] = {
        **job.config,
        "batch_size": settings.batch_size or job.batch_size or "auto",
        "output_path": str(job.results(settings.out)),
        "use_cache": str(job.cache(settings.out)),
        "log_samples": settings.samples,
    }
    if settings.device is not None:
        config["device"] = settings.device
    file = job.file(settings.out, ".yaml")
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
    return last if len(last) <= 2 * SHOWN else f"{last[: 2 * SHOWN]}..."


@contextlib.contextmanager
def _forwarded(processes: Sequence[subprocess.Popen[bytes]]) -> Iterator[list[int]]:
    """Pass SIGINT and SIGTERM on to the processes, which keep their work and end; yields the signals that arrived."""
    arrived: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        arrived.append(number)
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield arrived
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _show(log: Path | None) -> None:
    """Show the last line of a log, such as a progress bar, in a line that the next one overwrites; None clears it."""
    if not sys.stderr.isatty():
        return
    text = ""
    if log is not None:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 4096))
            pieces = file.read().decode(errors="replace").replace("\r", "\n").split("\n")
        text = next((piece.strip() for piece in reversed(pieces) if piece.strip()), "")[:SHOWN]
    print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
