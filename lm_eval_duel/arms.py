"""What `bench` measures: a network, a law, windows, and the ways to score them, with their time and memory."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import inspect
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
from lm_eval_duel.baselines import KeptKeys, Loop, WholeRow, algorithm2, check
from lm_eval_duel.denoisers import probes, random_network
from lm_eval_duel.denoisers.base import Denoiser
from lm_eval_duel.denoisers.hub import pick_device
from lm_eval_duel.duel import Duel
from lm_eval_duel.errors import DuelError, unknown
from lm_eval_duel.law import DEFAULT_BLOCK
from lm_eval_duel.ledger import Scored
from lm_eval_duel.windows import Window

LOOPS = {"textbook": WholeRow, "textbook_kv": KeptKeys}
ARMS = (*LOOPS, "ours", "forwards")
FEW = 2  # steps of the textbook loop that its memory is measured on: every step takes the same


@dataclasses.dataclass(frozen=True)
class Settings:
    """The options of the command, one field each."""

    pretrained: str = "random:bidirectional"
    layers: int | None = None
    width: int | None = None
    vocab: int | None = None
    length: int = 256
    block: str = "auto"
    windows: int = 4
    rule: str = "greedy"
    k: int | None = None
    device: str = "cpu"
    dtype: str = "float32"
    repeats: int = 3
    batch_size: int | None = None
    seed: int = 0
    textbook_steps: int | None = None
    compare_windows: int = 1
    no_memory: bool = False
    json: str | None = None
    peak_of: str | None = None

    def __post_init__(self) -> None:
        for name in ("length", "windows", "repeats", "compare_windows", "textbook_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise DuelError(f"--{name.replace('_', '-')} is at least 1; got {value}.")
        if not self.block.isdigit() and self.block not in ("auto", "none"):
            raise DuelError(f"--block is a number of positions, auto or none; got {self.block}.")
        if not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise unknown("dtype", self.dtype, ["float32", "bfloat16", "float16", "float64"])
        if self.peak_of not in (None, *ARMS):
            raise unknown("arm", self.peak_of, ARMS)

    def words(self) -> list[str]:
        """The command line that says the same."""
        said = []
        for name, value in dataclasses.asdict(self).items():
            if value is not None and value is not False:
                said += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        return said


class Bench:
    """A network, a law and windows, and the arms on them."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.denoiser = _load(settings)
        self.windows = _windows(self.denoiser, settings)
        check(self.denoiser, self.windows)
        said = {"auto": _block(settings) if _made(settings) else "auto", "none": None}
        rule = settings.rule if settings.k is None else f"{settings.rule}:k={settings.k}"
        block = said[settings.block] if settings.block in said else int(settings.block)
        self.duel = Duel(self.denoiser, rule, block, batch_size=settings.batch_size)

    @property
    def loops(self) -> list[str]:
        """The textbook loops that this network has."""
        return [name for name in LOOPS if name == "textbook" or self.denoiser.attention == "block_causal"]

    def loop(self, name: str, windows: Sequence[Window] | None = None, most: int | None = None) -> Loop:
        """A textbook loop over the windows, or over others; `most` steps at most."""
        duel = self.duel
        return algorithm2(
            LOOPS[name], self.denoiser, duel.rule, duel.block, duel.grid, windows or self.windows, most=most
        )

    def record(self) -> tuple[Recording, list[Scored]]:
        """The network calls of one run of ours, and its results."""
        recording, before = Recording(self.denoiser), self.duel.counts.forwards
        with recording.record():
            scored = self.duel.log_prob(self.windows)
        made = self.duel.counts.forwards - before
        if recording.forwards != made:
            raise DuelError(f"The recording holds {recording.forwards} network calls, but ours counted {made}.")
        return recording, scored

    def seconds(self, run: Callable[[], Any]) -> tuple[float, Any]:
        """How long a run takes, and what it returns."""
        self._wait()
        began = time.perf_counter()
        result = run()
        self._wait()
        return time.perf_counter() - began, result

    def _wait(self) -> None:
        if self.denoiser.device.type == "cuda":
            torch.cuda.synchronize(self.denoiser.device)

    def steps(self, scored: Sequence[Scored]) -> int:
        """Steps of the textbook loop: in each block as many as its slowest window takes."""
        width = self.duel.block or self.settings.length
        offset = len(self.windows[0].context) if self.duel.grid == "row" else 0
        slowest: dict[int, int] = {}
        for result in scored:
            for n, step in enumerate(result.steps):
                number = (n + offset) // width
                slowest[number] = max(slowest.get(number, 0), step + 1)
        return sum(slowest.values())

    def cut(self, seconds: float) -> list[Window]:
        """The first --compare-windows, shortened so that the textbook loop takes about `seconds` for them."""
        windows, block = self.windows[: self.settings.compare_windows], self.duel.block or 1
        count = len(windows[0].target)
        while count > block:
            one, _ = self.seconds(partial(self.loop, "textbook", windows, 1))
            if one * count <= seconds:
                break
            count = max(block, count // 2 // block * block)
            windows = [Window(window.context, window.target[:count]) for window in windows]
        return windows

    # ------------------------------------------------------------ memory

    def peak_bytes(self, arm: str) -> int:
        """What an arm takes at its peak beyond what is there after a small warm-up; on a CPU in a fresh process."""
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
            raise DuelError(f"Measuring the memory of {arm} failed; --no-memory leaves it out. {done.stderr[-2000:]}")
        return int(done.stdout.split()[-1])

    def own_peak_bytes(self, arm: str) -> int:
        """The same of this process, which has done nothing else."""
        window = self.windows[0]
        self._once(arm, [Window(window.context, window.target[: self.duel.block or 1])])
        with contextlib.suppress(AttributeError, OSError):
            ctypes.CDLL(None).malloc_trim(0)  # what the warm-up freed and the process kept would hide as much later
        before = _resident("VmRSS")
        try:
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from here
        except OSError:
            self._once(arm)
            return max(0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before)
        self._once(arm)
        return _resident("VmHWM") - before

    def _once(self, arm: str, windows: Sequence[Window] | None = None) -> None:
        if arm in LOOPS:
            self.loop(arm, windows, FEW if arm == "textbook" else None)
        else:
            self.duel.log_prob(windows or self.windows)


def _resident(key: str) -> int:
    """Bytes of a line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def _made(settings: Settings) -> bool:
    return settings.pretrained.startswith(random_network.PREFIX)


def _block(settings: Settings) -> int:
    """The block that a random network is trained on."""
    return int(settings.block) if settings.block.isdigit() else DEFAULT_BLOCK


def _load(settings: Settings) -> Denoiser:
    if not _made(settings):
        denoiser = denoisers.load(settings.pretrained, device=settings.device, dtype=settings.dtype)
        denoiser.special_tokens = None  # random tokens on purpose
        return denoiser
    sizes = {name: getattr(settings, name) for name in ("length", "layers", "width", "vocab", "seed", "dtype")}
    return random_network.make(settings.pretrained, pick_device(settings.device), block=_block(settings), **sizes)


def _windows(denoiser: Denoiser, settings: Settings) -> list[Window]:
    """Windows of random tokens; one is given first to networks that cannot do without."""
    if settings.length > denoiser.max_length:
        raise DuelError(f"{settings.pretrained} holds {denoiser.max_length} positions: pass --length of at most that.")
    given = max(denoiser.shift, int(denoiser.needs_visible))
    if settings.length <= given:
        raise DuelError(f"{settings.pretrained} needs a given first token: pass --length of 2 or more.")
    rows = probes.tokens(denoiser, settings.length, settings.windows, settings.seed).tolist()
    return [Window(tuple(row[:given]), tuple(row[given:])) for row in rows]


class Recording:
    """The network calls of a run (`features`, `stream`, `head`), to be made again without anything around them."""

    NAMES = ("features", "stream", "head")

    def __init__(self, denoiser: Denoiser):
        self.denoiser = denoiser
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.forwards = self.rows = self.tokens = 0
        self._inside = False

    @contextlib.contextmanager
    def record(self) -> Iterator[None]:
        """Record the calls made inside."""
        for name in self.NAMES:
            setattr(self.denoiser, name, self._recorder(name, getattr(self.denoiser, name)))
        try:
            yield
        finally:
            for name in self.NAMES:
                delattr(self.denoiser, name)  # the class's own are back

    def _recorder(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(method)

        def recorder(*args: Any, **kwargs: Any) -> Any:
            if not self._inside:
                bound = signature.bind(*args, **kwargs)
                # past is large and only read: what is in it does not matter for the time
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
    def replay(self, most: int | None = None) -> None:
        """The same calls again, in order; the first `most` of them."""
        for name, args, kwargs in self.calls[:most]:
            getattr(self.denoiser, name)(*args, **kwargs)


def _copy(value: Any) -> Any:
    """A copy of a tensor, or of those in a tuple or list; anything else as it is."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    return type(value)(map(_copy, value)) if type(value) in (tuple, list) else value
