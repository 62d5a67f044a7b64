"""The arms of the benchmark: ways to score the same windows under one network and spec."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch

from benchmarks.loops import algorithm2, loop_for
from benchmarks.random_network import PREFIX, RandomNetwork
from benchmarks.recording import Recording
from lm_eval_duel import denoisers
from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.core.float_noise import random_rows
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.cached.denoiser import Cached
from lm_eval_duel.denoisers.dit.denoiser import DiTDenoiser, NoisedDiT
from lm_eval_duel.denoisers.hub import pick_device
from lm_eval_duel.errors import DuelError, unknown
from lm_eval_duel.estimators.base import Estimator
from lm_eval_duel.estimators.checks import DEFAULT_BLOCK
from lm_eval_duel.estimators.duel import DuelEstimator
from lm_eval_duel.estimators.noised_elbo import NoisedElbo
from lm_eval_duel.estimators.totals import TwoPhaseBlocks
from lm_eval_duel.estimators.two_phase import TwoPhase


@dataclasses.dataclass(frozen=True)
class Arm:
    """A way to score the windows.

    `denoiser`: the network whose calls are counted. `more`: entries of the JSON, from the result of the first run; they
    replace the counted ones. `line`: what is printed below the table, from the entries of the JSON.
    """

    score: Callable[[Sequence[Window]], Any]
    denoiser: Denoiser
    more: Callable[[Any], dict[str, Any]] = lambda result: {}
    line: Callable[[dict[str, Any]], str] = lambda figures: ""


def ours(bench: Bench) -> Arm:
    """This package. Some rows of the first run are evaluated again alone (core/row_checks.py)."""

    def more(result: Any) -> dict[str, Any]:
        return {"rows_checked": bench.duel.counts.rows_checked}

    def line(figures: dict[str, Any]) -> str:
        if not figures["rows_checked"]:
            return ""
        return "{rows_checked} rows of the first run were evaluated again alone, and are among its rows".format(
            **figures
        )

    return Arm(bench.duel.log_prob, bench.denoiser, more, line)


def uncached(bench: Bench) -> Arm | None:
    """Ours without the cache."""
    if not bench.settings.model.cache:
        return None
    return Arm(DuelEstimator(bench.plain, *bench.layout, batch_size=bench.rows).log_prob, bench.plain)


def two_phase(bench: Bench) -> Arm | None:
    """The estimate of the same value. Its calls are spread over two networks, so it counts them itself."""
    if bench.settings.model.estimator != TwoPhase.name:
        return None
    estimator = TwoPhase(bench.plain, *bench.layout, bench.settings.model.estimator_args, batch_size=bench.rows)

    def more(result: Any) -> dict[str, Any]:
        sums = sum((score.blocks for score in result), TwoPhaseBlocks())
        sample = {"blocks": sums.count, "sampled": sums.sampled, "log_prob_stderr": sums.stderr}
        counts = estimator.counts
        return {"forwards": counts.forwards, "rows": counts.rows, "token_rows": None, "sample": sample}

    def line(figures: dict[str, Any]) -> str:
        return "{sampled} of {blocks} blocks also without the cache".format(**figures["sample"])

    return Arm(estimator.log_prob, bench.plain, more, line)


def forwards(bench: Bench) -> Arm:
    """The network calls of ours alone: no code around these calls can be faster."""

    return Arm(lambda windows: bench.recording.replay(), bench.denoiser, lambda result: bench.recording.counts)


def noised_elbo(bench: Bench) -> Arm | None:
    """The bound of ancestral sampling, by the same weights read as a Duo."""
    if (estimator := bench.noised) is None:
        return None
    return Arm(estimator.log_prob, estimator.denoiser, line=partial(_draws, bench, estimator))


def noised_forwards(bench: Bench) -> Arm | None:
    """The network calls of the bound alone."""
    if bench.noised is None:
        return None
    line = partial(_draws, bench, bench.noised)
    return Arm(
        lambda windows: bench.noised_recording.replay(),
        bench.noised.denoiser,
        lambda result: bench.noised_recording.counts,
        line,
    )


def _draws(bench: Bench, estimator: NoisedElbo, figures: dict[str, Any]) -> str:
    rate = estimator.samples * len(bench.windows) / median(figures["seconds"])
    return f"{rate:,.1f} draws/s at {estimator.denoiser.vocab_size:,} tokens"


ARMS: dict[str, Callable[[Bench], Arm | None]] = {  # None: these settings have no such arm
    "loop": lambda bench: Arm(partial(algorithm2, bench.duel), bench.denoiser),  # the one that people run (loops.py)
    "ours": ours,
    "uncached": uncached,
    "two_phase": two_phase,
    "forwards": forwards,
    "noised_elbo": noised_elbo,
    "noised_forwards": noised_forwards,
}


class Bench:
    """A network, a spec and windows, and the arms on them."""

    def __init__(self, settings: argparse.Namespace):
        self.settings = settings
        model = settings.model
        self.plain = _load(settings)
        self.denoiser = Cached(self.plain, model.cache) if model.cache else self.plain
        self.title = loop_for(self.denoiser).title
        self.windows = _windows(self.denoiser, settings)
        self.rows = model.rows
        block = _block(settings) if _is_random(settings) and model.block else model.block
        self.layout = model.rule, block
        self.duel = DuelEstimator(self.denoiser, *self.layout, batch_size=self.rows)
        self.arms: dict[str, Arm] = {}
        for name, make in ARMS.items():
            arm = make(self)
            if arm is not None:
                self.arms[name] = arm
        if model.estimator not in ("duel", *self.arms):
            raise DuelError(f"There is no arm for estimator={model.estimator}.")
        if model.estimator != "duel" and model.cache:
            raise DuelError("The arms of other estimators are measured without a cache; leave cache out.")

    @cached_property
    def noised(self) -> NoisedElbo | None:
        """The bound under uniform noise, by the network's weights; None: this is not what is measured."""
        model = self.settings.model
        plain = self.plain
        if model.estimator != NoisedElbo.name or not isinstance(plain, DiTDenoiser) or plain.family != "mdlm":
            return None
        every = set(range(plain.vocab_size))
        network = NoisedDiT(plain.network, "duo", plain.max_length, model.pretrained, every, None)
        return NoisedElbo(network, model.estimator_args, batch_size=self.rows)

    @cached_property
    def recording(self) -> Recording:
        """The network calls of ours."""
        return self._record(self.duel)

    @cached_property
    def noised_recording(self) -> Recording:
        """The network calls of the bound under uniform noise."""
        return self._record(cast(NoisedElbo, self.noised))

    def _record(self, estimator: Estimator) -> Recording:
        recording = Recording(estimator.denoiser)
        with recording.record():
            estimator.log_prob(self.windows)
        return recording

    def arm(self, name: str) -> Arm:
        if name not in self.arms:
            raise unknown("arm", name, self.arms)
        return self.arms[name]

    def run(self, arm: str, windows: Sequence[Window] | None = None) -> tuple[float, Any]:
        """Run an arm over `windows` (default: all). Returns its seconds and its result."""
        return self.seconds(partial(self.arm(arm).score, windows or self.windows))

    def seconds(self, work: Callable[[], Any]) -> tuple[float, Any]:
        """The time of some work in seconds, and its result."""
        self._wait()
        began = time.perf_counter()
        result = work()
        self._wait()
        return time.perf_counter() - began, result

    def _wait(self) -> None:
        if self.denoiser.device.type == "cuda":
            torch.cuda.synchronize(self.denoiser.device)

    def count(self, name: str) -> tuple[dict[str, Any], Any]:
        """The network calls, rows and token-rows of an arm's first run, and its result."""
        arm = self.arm(name)
        recording = Recording(arm.denoiser, keep=False)
        with recording.record():
            _, result = self.run(name)
        return recording.counts | arm.more(result), result

    # ------------------------------------------------------------ memory

    def peak_bytes(self, arm: str) -> int:
        """Peak memory of an arm on all windows, beyond the weights; on a CPU measured in its own process."""
        device = self.denoiser.device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            self.run(arm)
            return torch.cuda.max_memory_allocated(device) - before
        command = [sys.executable, "-m", "benchmarks", *self.settings.words, "--peak_of", arm]
        root = Path(__file__).resolve().parents[1]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or [f"It ended with code {done.returncode}."])[-1]
            raise DuelError(f"Could not measure the memory of {arm}; --no_memory skips this. {reason}")
        return int(done.stdout.split()[-1])

    def own_peak_bytes(self, arm: str) -> int:
        """Peak memory of an arm beyond what a warm-up on one block leaves allocated, in its own process."""
        window = self.windows[0]
        first = Window(window.context, window.target[: self.duel.block or 1])
        self.run("ours" if arm == "forwards" else arm, [first])
        if arm == "forwards":
            self.recording  # noqa: B018 - made before the measurement begins
        with contextlib.suppress(AttributeError, OSError):
            ctypes.CDLL(None).malloc_trim(0)  # memory that was freed but that the process kept would hide later use
        before = _resident("VmRSS")
        try:
            Path("/proc/self/clear_refs").write_text("5")  # reset VmHWM
        except OSError:
            self.run(arm)
            return max(0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before)
        self.run(arm)
        return _resident("VmHWM") - before


def _resident(key: str) -> int:
    """Bytes in one line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def _is_random(settings: argparse.Namespace) -> bool:
    return settings.model.pretrained.startswith(PREFIX)


def _block(settings: argparse.Namespace) -> int:
    """The block that a random network is built for."""
    return settings.model.block if isinstance(settings.model.block, int) else DEFAULT_BLOCK


def _load(settings: argparse.Namespace) -> Denoiser:
    name = settings.model.pretrained
    device = settings.model.device
    dtype = settings.model.dtype
    if not _is_random(settings):
        denoiser = denoisers.load(name, device=device, dtype=dtype, compile=settings.model.compile)
        denoiser.special_tokens = None  # no warning: the tokens are random on purpose
        return denoiser
    sizes = {key: getattr(settings, key) for key in ("length", "layers", "vocab", "seed")}
    network = RandomNetwork(name, dtype, block=_block(settings), width=settings.hidden_size, **sizes)
    device = pick_device(device)
    needed = network.least_bytes
    available = _memory(device)
    if needed > available:
        raise DuelError(
            f"{name} of this size needs at least {needed / 2**30:,.0f} GiB and {device} has "
            f"{available / 2**30:,.0f} GiB; lower --layers, --hidden_size or --vocab."
        )
    denoiser = network.make(device)
    if settings.model.compile:
        denoiser.compile()
    return denoiser


def _memory(device: torch.device) -> int:
    """Total memory of a device in bytes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _windows(denoiser: Denoiser, settings: argparse.Namespace) -> list[Window]:
    """Windows of random tokens, with one visible token first for networks that need one."""
    name = settings.model.pretrained
    if settings.length > denoiser.max_length:
        raise DuelError(f"{name} takes at most {denoiser.max_length} positions: lower --length.")
    visible = max(denoiser.shift, int(denoiser.needs_visible or denoiser.seeds_blocks))
    if settings.length <= visible:
        raise DuelError(f"{name} needs a visible first token: pass --length 2 or more.")
    rows = random_rows(denoiser, settings.length, settings.windows, settings.seed).tolist()
    return [Window(tuple(row[:visible]), tuple(row[visible:])) for row in rows]
