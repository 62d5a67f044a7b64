"""What `bench` measures: a network, a spec and windows, and the arms that score them.

loop        the loop that people run with such a network (loops.py)
ours        this package
forwards    the network calls of ours alone: no code around these calls can be faster
uncached    with cache=: ours without it
two_phase   with estimator=two_phase: the estimate of the same value
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import inspect
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from lm_eval_duel import denoisers
from lm_eval_duel.bench.loops import algorithm2, loop_for
from lm_eval_duel.bench.options import TWO_PHASE
from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers import random_network, self_tests
from lm_eval_duel.denoisers.cached.denoiser import Cached
from lm_eval_duel.denoisers.hub import pick_device
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.checks import DEFAULT_BLOCK
from lm_eval_duel.estimators.duel import DuelEstimator
from lm_eval_duel.estimators.phases import Phases
from lm_eval_duel.estimators.two_phase import TwoPhase


class Bench:
    """A network, a spec and windows, and the arms on them."""

    def __init__(self, settings: argparse.Namespace):
        self.settings, model = settings, settings.model
        plain = _load(settings)
        self.denoiser = Cached(plain, model.cache) if model.cache else plain
        self.title = loop_for(self.denoiser).title
        self.windows = _windows(self.denoiser, settings)
        shared = model.rule, _block(settings) if _is_random(settings) and model.block else model.block
        self.duel = DuelEstimator(self.denoiser, *shared, batch_size=model.rows)
        self.estimators: dict[str, DuelEstimator | TwoPhase] = {"ours": self.duel}
        if model.cache:
            self.estimators["uncached"] = DuelEstimator(plain, *shared, batch_size=model.rows)
        if model.estimator == TWO_PHASE:
            self.estimators[TWO_PHASE] = TwoPhase(plain, *shared, batch_size=model.rows, **model.estimator_args)

    @property
    def arms(self) -> list[str]:
        """The arms of these settings."""
        return ["loop", *self.estimators, "forwards"]

    @cached_property
    def recording(self) -> Recording:
        """The network calls of ours."""
        recording = Recording(self.denoiser)
        with recording.record():
            self.duel.log_prob(self.windows)
        return recording

    def run(self, arm: str, windows: Sequence[Window] | None = None) -> tuple[float, Any]:
        """Run an arm over `windows` (default: all). Returns its seconds and its result."""
        windows = windows or self.windows
        if arm == "forwards":
            return self.seconds(self.recording.replay)
        if arm == "loop":
            return self.seconds(partial(algorithm2, self.duel, windows))
        return self.seconds(partial(self.estimators[arm].log_prob, windows))

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

    def count(self, arm: str) -> tuple[dict[str, Any], Any]:
        """The network calls, rows and token-rows of an arm's first run, and its result."""
        if arm == "forwards":
            recording, result = self.recording, None
        else:
            recording = Recording(self.estimators.get(arm, self.duel).denoiser, keep=False)
            with recording.record():
                _, result = self.run(arm)
        counts = {"forwards": recording.forwards, "rows": recording.rows, "token_rows": recording.tokens}
        if arm == TWO_PHASE:  # its calls are spread over two networks
            counted, sums = self.estimators[arm].counts, Phases.total(Phases.read(score.phases) for score in result)
            sample = {"blocks": sums.blocks, "sampled": sums.sampled, "log_prob_stderr": sums.stderr}
            counts = {"forwards": counted.forwards, "rows": counted.rows, "token_rows": None, "sample": sample}
        return counts, result

    # ------------------------------------------------------------ memory

    def peak_bytes(self, arm: str) -> int:
        """Peak memory of an arm on all windows, beyond the weights; on a CPU measured in a process of its own."""
        device = self.denoiser.device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            self.run(arm)
            return torch.cuda.max_memory_allocated(device) - before
        command = [sys.executable, "-m", "lm_eval_duel", "bench", *self.settings.words, "--peak_of", arm]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or [f"It ended with code {done.returncode}."])[-1]
            raise DuelError(f"Could not measure the memory of {arm}; --no_memory skips this. {reason}")
        return int(done.stdout.split()[-1])

    def own_peak_bytes(self, arm: str) -> int:
        """Peak memory of an arm beyond what a warm-up on one block leaves allocated, in a process of its own."""
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
    return settings.model.pretrained.startswith(random_network.PREFIX)


def _block(settings: argparse.Namespace) -> int:
    """The block that a random network is built for."""
    return settings.model.block if isinstance(settings.model.block, int) else DEFAULT_BLOCK


def _load(settings: argparse.Namespace) -> Denoiser:
    name, device, dtype = settings.model.pretrained, settings.model.device, settings.model.dtype
    if not _is_random(settings):
        denoiser = denoisers.load(name, device=device, dtype=dtype, compile=settings.model.compile)
        denoiser.special_tokens = None  # no warning: the tokens are random on purpose
        return denoiser
    sizes = {key: getattr(settings, key) for key in ("length", "layers", "vocab", "seed")}
    sizes |= {"width": settings.hidden_size, "dtype": dtype}
    device = pick_device(device)
    needed, available = random_network.least_bytes(name, **sizes), _memory(device)
    if needed > available:
        raise DuelError(
            f"{name} of this size needs at least {needed / 2**30:,.0f} GiB and {device} has "
            f"{available / 2**30:,.0f} GiB; lower --layers, --hidden_size or --vocab."
        )
    denoiser = random_network.make(name, device, block=_block(settings), **sizes)
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
    rows = self_tests.random_rows(denoiser, settings.length, settings.windows, settings.seed).tolist()
    return [Window(tuple(row[:visible]), tuple(row[visible:])) for row in rows]


class Recording:
    """The network calls of a run (`features`, `stream`, `head`), which can be replayed without the code around them."""

    NAMES = ("features", "stream", "head")

    def __init__(self, denoiser: Denoiser, keep: bool = True):
        self.denoiser, self.keep = denoiser, keep  # keep=False: counts alone
        self.names = getattr(denoiser, "calls", self.NAMES)
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.forwards = self.rows = self.tokens = 0
        self._inside = False

    @contextlib.contextmanager
    def record(self) -> Iterator[None]:
        """Record the calls made inside this context."""
        for name in self.names:
            setattr(self.denoiser, name, self._recorder(name, getattr(self.denoiser, name)))
        try:
            yield
        finally:
            for name in self.names:
                delattr(self.denoiser, name)  # back to the class's method

    def _recorder(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(method)

        def recorder(*args: Any, **kwargs: Any) -> Any:
            if not self._inside:
                if self.keep:
                    bound = signature.bind(*args, **kwargs)
                    # past is large and read-only; its values do not affect the time
                    for key, value in bound.arguments.items():
                        if key != "past":
                            bound.arguments[key] = _copy(value)
                    self.calls.append((name, bound.args, bound.kwargs))
                if name != "head":
                    self.forwards += 1
                    self.rows += len(args[0])
                    self.tokens += args[0].numel()
            outer, self._inside = self._inside, True
            try:
                return method(*args, **kwargs)
            finally:
                self._inside = outer

        return recorder

    @torch.inference_mode()
    def replay(self) -> None:
        """Repeat the calls in order."""
        for name, args, kwargs in self.calls:
            getattr(self.denoiser, name)(*args, **kwargs)


def _copy(value: Any) -> Any:
    """Copy a tensor, or the tensors in a tuple or list; return anything else unchanged."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    return type(value)(map(_copy, value)) if type(value) in (tuple, list) else value
