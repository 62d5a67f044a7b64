"""What `bench` measures: a network, a spec and windows, the ways to score them, and their time and memory."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import inspect
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lm_eval_duel import denoisers
from lm_eval_duel.bench.options import CACHED, TWO_PHASE, Settings
from lm_eval_duel.bench.textbook import KeptKeys, Loop, WholeRow, algorithm2, check, one_by_one
from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.core.scores import WindowScore
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers import random_network, self_tests
from lm_eval_duel.denoisers.cached.denoiser import Cached
from lm_eval_duel.denoisers.hub import pick_device
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.checks import DEFAULT_BLOCK
from lm_eval_duel.estimators.duel import DuelEstimator
from lm_eval_duel.estimators.phases import Phases
from lm_eval_duel.estimators.two_phase import TwoPhase

LOOPS = {"textbook": WholeRow, "textbook_kv": KeptKeys}
MEMORY_STEPS = 2  # steps on which the textbook loop's memory is measured: every step needs the same


class Bench:
    """A network, a spec and windows, and the arms on them."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.plain = _load(settings)
        cache = None if settings.cache == "none" else settings.cache
        self.denoiser = Cached(self.plain, cache) if cache else self.plain
        self.windows = _windows(self.denoiser, settings)
        check(self.denoiser, self.windows)
        named_blocks = {"auto": _block(settings) if _is_random(settings) else "auto", "none": None}
        block = named_blocks.get(settings.block, settings.positions)
        self.duel = DuelEstimator(self.denoiser, settings.rule_text, block, batch_size=settings.batch_size)
        self.uncached = self.duel
        if cache:
            self.uncached = DuelEstimator(self.plain, settings.rule_text, block, batch_size=settings.batch_size)
        self.two_phase: TwoPhase | None = None
        if settings.estimator == TWO_PHASE:
            self.two_phase = TwoPhase(
                self.plain, settings.rule_text, block, batch_size=settings.batch_size, sample=settings.sample
            )

    @property
    def loops(self) -> list[str]:
        """The textbook loops that this network supports."""
        if self.denoiser is not self.plain:
            return ["textbook", CACHED]
        keeps = self.denoiser.attention == "block_causal" and self.denoiser.anchor == "row"
        return [name for name in LOOPS if name == "textbook" or keeps]

    def loop(self, name: str, windows: Sequence[Window] | None = None, max_steps: int | None = None) -> Loop:
        """Run a textbook loop over `windows` (default: all), for `max_steps` steps at most."""
        duel, windows = self.duel, windows or self.windows
        if name == CACHED:
            return one_by_one(self.denoiser, duel.rule, duel.block, duel.grid, windows, max_steps)
        return algorithm2(LOOPS[name], self.plain, duel.rule, duel.block, duel.grid, windows, max_steps)

    def last_blocks(self, count: int) -> Window:
        """The first window with its last `count` blocks as the target (without a cache, all blocks cost the same)."""
        ids = self.windows[0].context + self.windows[0].target
        start = self.uncached.blocks(self.windows[0])[-count][0]
        return Window(ids[:start], ids[start:])

    def record(self) -> tuple[Recording, list[WindowScore]]:
        """Record the network calls of one run of ours; returns them and the scores."""
        recording, before = Recording(self.denoiser), self.duel.counts.forwards
        with recording.record():
            scores = self.duel.log_prob(self.windows)
        counted = self.duel.counts.forwards - before
        if recording.forwards != counted:
            raise DuelError(f"The recording holds {recording.forwards} network calls, but ours counted {counted}.")
        return recording, scores

    def two_phase_sample(self) -> Phases:
        """The sums of a two-phase estimate of the windows, and of its costs."""
        assert self.two_phase is not None
        return Phases.total(Phases.read(score.phases) for score in self.two_phase.log_prob(self.windows))

    def seconds(self, run: Callable[[], Any]) -> tuple[float, Any]:
        """The time of a run in seconds, and its result."""
        self._wait()
        began = time.perf_counter()
        result = run()
        self._wait()
        return time.perf_counter() - began, result

    def _wait(self) -> None:
        if self.denoiser.device.type == "cuda":
            torch.cuda.synchronize(self.denoiser.device)

    def steps(self, scores: Sequence[WindowScore]) -> int:
        """Steps of the textbook loop: in each block as many as its slowest window needs."""
        width = self.duel.block or self.settings.length
        offset = len(self.windows[0].context) if self.duel.grid == "row" else 0
        slowest: dict[int, int] = {}
        for result in scores:
            for n, step in enumerate(result.reveal_steps):
                number = (n + offset) // width
                slowest[number] = max(slowest.get(number, 0), step + 1)
        return sum(slowest.values())

    def cut(self, seconds: float) -> list[Window]:
        """The first --compare_windows windows, shortened until the textbook loop takes about `seconds` for them."""
        windows, block = self.windows[: self.settings.compare_windows], self.duel.block or 1
        count = len(windows[0].target)
        while count > block:
            per_step, _ = self.seconds(partial(self.loop, "textbook", windows, 1))
            if per_step * count <= seconds:
                break
            count = max(block, count // 2 // block * block)
            windows = [Window(window.context, window.target[:count]) for window in windows]
        return windows

    # ------------------------------------------------------------ memory

    def peak_bytes(self, arm: str) -> int:
        """Peak memory of an arm beyond what a small warm-up leaves allocated; on a CPU measured in a fresh process."""
        device = self.denoiser.device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            self._once(arm)
            return torch.cuda.max_memory_allocated(device) - before
        words = dataclasses.replace(self.settings, json=None, peak_of=arm).words()
        command = [sys.executable, "-m", "lm_eval_duel", "bench", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or [f"It ended with code {done.returncode}."])[-1]
            raise DuelError(f"Could not measure the memory of {arm}; --no_memory skips this. {reason}")
        return int(done.stdout.split()[-1])

    def own_peak_bytes(self, arm: str) -> int:
        """Peak memory of an arm in this process, which has done nothing else."""
        window = self.windows[0]
        self._once(arm, [Window(window.context, window.target[: self.duel.block or 1])])
        with contextlib.suppress(AttributeError, OSError):
            ctypes.CDLL(None).malloc_trim(0)  # memory that the warm-up freed but the process kept would hide later use
        before = _resident("VmRSS")
        try:
            Path("/proc/self/clear_refs").write_text("5")  # reset VmHWM
        except OSError:
            self._once(arm)
            return max(0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before)
        self._once(arm)
        return _resident("VmHWM") - before

    def _once(self, arm: str, windows: Sequence[Window] | None = None) -> None:
        if arm == TWO_PHASE and self.two_phase is not None:
            self.two_phase.log_prob(windows or self.windows)
        elif arm == "uncached":
            self.uncached.log_prob(windows or [self.last_blocks(1)])
        elif arm in self.loops:
            self.loop(arm, windows, MEMORY_STEPS if arm == "textbook" else None)
        else:
            self.duel.log_prob(windows or self.windows)


def _resident(key: str) -> int:
    """Bytes in one line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def _is_random(settings: Settings) -> bool:
    return settings.pretrained.startswith(random_network.PREFIX)


def _block(settings: Settings) -> int:
    """The block that a random network is built for."""
    return settings.positions or DEFAULT_BLOCK


def _load(settings: Settings) -> Denoiser:
    if not _is_random(settings):
        denoiser = denoisers.load(settings.pretrained, device=settings.device, dtype=settings.dtype)
        denoiser.special_tokens = None  # no warning: the tokens are random on purpose
        return denoiser
    sizes = {name: getattr(settings, name) for name in ("length", "layers", "width", "vocab", "seed", "dtype")}
    device = pick_device(settings.device)
    needed, available = random_network.least_bytes(settings.pretrained, **sizes), _memory(device)
    if needed > available:
        raise DuelError(
            f"{settings.pretrained} of this size needs at least {needed / 2**30:,.0f} GiB and {device} has "
            f"{available / 2**30:,.0f} GiB; lower --layers, --width or --vocab."
        )
    return random_network.make(settings.pretrained, device, block=_block(settings), **sizes)


def _memory(device: torch.device) -> int:
    """Total memory of a device in bytes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _windows(denoiser: Denoiser, settings: Settings) -> list[Window]:
    """Windows of random tokens, with one visible token first for networks that need one."""
    if settings.length > denoiser.max_length:
        raise DuelError(f"{settings.pretrained} holds {denoiser.max_length} positions: pass --length of at most that.")
    visible = max(denoiser.shift, int(denoiser.needs_visible or denoiser.seeds_blocks))
    if settings.length <= visible:
        raise DuelError(f"{settings.pretrained} needs a visible first token: pass --length 2 or more.")
    rows = self_tests.random_rows(denoiser, settings.length, settings.windows, settings.seed).tolist()
    return [Window(tuple(row[:visible]), tuple(row[visible:])) for row in rows]


class Recording:
    """The network calls of a run (`features`, `stream`, `head`), which can be replayed without the code around them."""

    NAMES = ("features", "stream", "head")

    def __init__(self, denoiser: Denoiser):
        self.denoiser = denoiser
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
    def replay(self, max_calls: int | None = None) -> None:
        """Repeat the calls in order, the first `max_calls` of them."""
        for name, args, kwargs in self.calls[:max_calls]:
            getattr(self.denoiser, name)(*args, **kwargs)


def _copy(value: Any) -> Any:
    """Copy a tensor, or the tensors in a tuple or list; return anything else unchanged."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    return type(value)(map(_copy, value)) if type(value) in (tuple, list) else value
