"""A network that the processes of a group hold together (`tp_plan`, `ep_size`).

The first process of a group, its leader, does everything above the network: windows, rules, results, files. The others
hold their part of every layer and repeat the leader's calls on the arguments that it broadcasts:

    leader     open(rows)    view.cells(lanes)    view.commit(lanes)    head(features)    ...    end
    others     the same calls, in the same order

Networks and views have numbers: 0 is the network, and `load` adds the same one in another dtype.

So every pick is made in one process, and float noise between processes cannot separate them. What differs by process
(the keys and values of its own heads) stays there.

Shapes: U rows of features that the LM head runs on, D features, V tokens.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import datetime
import itertools
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import distributed

from lm_eval_duel import signals
from lm_eval_duel.denoisers.base import Denoiser
from lm_eval_duel.denoisers.views import Cells, View
from lm_eval_duel.denoisers.wrappers.base import WrappedView, Wrapper
from lm_eval_duel.engine.lanes import Lanes, Rows
from lm_eval_duel.errors import DuelError

TIMEOUT = datetime.timedelta(weeks=52)  # a leader may read files, wait for other groups, ... for as long as it takes
Load = Callable[[str], Denoiser]
LOST = ("gloo", "nccl", "connection", "socket", "broken pipe")  # in errors that mean that a process has ended


class Group:
    """The processes that hold one network together, as one of them sees it."""

    def __init__(self, size: int, device: torch.device):
        if not distributed.is_initialized():
            if device.type == "cuda":
                torch.cuda.set_device(device)
            distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
        self.size, self.device = size, device
        self.network: Split | None = None  # the leader's, until it ends
        self.options: Any = None  # that it was loaded with
        self.numbers = itertools.count(1)
        self.closed: list[int] = []  # networks and views that are not used any more
        self.broken = False  # a call of all processes has failed here, so the others may wait in it forever
        self.rank, processes = distributed.get_rank(), distributed.get_world_size()
        self.leader = self.rank - self.rank % size
        for first in range(0, processes, size):  # every process takes part in making every group
            ranks = list(range(first, first + size))
            commands = distributed.new_group(ranks, backend="gloo", timeout=TIMEOUT)
            tensors = distributed.new_group(ranks)
            if first == self.leader:
                self.commands, self.tensors = commands, tensors

    @property
    def leads(self) -> bool:
        return self.rank == self.leader

    @property
    def others(self) -> str:
        """The other processes, in words."""
        return ", ".join(str(rank) for rank in range(self.leader, self.leader + self.size) if rank != self.rank)

    def gather(self, value: object) -> list[object]:
        """The values of all processes, on each of them."""
        values: list[object] = [None] * self.size
        with self.explained():
            distributed.all_gather_object(values, value, group=self.commands)
        return values

    def require_equal(self, value: object) -> None:
        """Raise DuelError if `value` differs between the processes: then they would make different calls."""
        values = self.gather(value)
        if any(other != value for other in values):
            raise DuelError(
                f"The processes that hold one network (tp_plan, ep_size) read it differently: {values}. Do all "
                "machines have the same files and the same versions of torch and transformers?"
            )

    def broadcast(self, command: Any = None) -> Any:
        """The leader's command, on every process; tensors in it travel through main memory."""
        box = [_moved(command, torch.device("cpu"))]
        with self.explained():
            distributed.broadcast_object_list(box, src=self.leader, group=self.commands)
        return command if self.leads else _moved(box[0], self.device)

    def broadcast_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """The leader's tensor in place of one of the same shape, from device to device."""
        tensor = tensor.contiguous()
        with self.explained():
            distributed.broadcast(tensor, src=self.leader, group=self.tensors)
        return tensor

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Turn errors of a call that all processes make into words."""
        try:
            yield
        except BaseException as error:
            self.broken = True
            if problem := self._in_words(error):
                raise DuelError(problem) from error
            raise

    def _in_words(self, error: BaseException) -> str:
        """What an error in a call of all processes means; empty if it says so itself."""
        if isinstance(error, torch.OutOfMemoryError):
            return (
                f"Process {self.rank} ran out of memory in a call that processes {self.others} make with it "
                "(tp_plan, ep_size), so it cannot be retried with fewer rows. Pass a smaller batch_size (rows of "
                "max_length in a network call), or start more processes for larger groups."
            )
        lost = any(word in str(error).lower() for word in LOST)
        if isinstance(error, distributed.DistError) or (isinstance(error, RuntimeError) and lost):
            return (
                f"Process {self.rank} holds a part of a network together with processes {self.others} (tp_plan, "
                "ep_size), and one of them has ended: look for that process's error, which is the cause. With "
                "--use_cache, finished requests are kept and the same command resumes the run. "
                f"({str(error).splitlines()[0]})"
            )
        return ""


class Split(Wrapper):
    """The leader's side of a network that is split over a group; `load` loads it in another dtype."""

    def __init__(self, plain: Denoiser, group: Group, load: Load | None = None, number: int = 0):
        super().__init__(plain)
        self.retries = False  # the others are in the middle of the call that ran out of memory
        self.group, self.number, self._load = group, number, load
        if group.network is None:
            group.network = self
            atexit.register(self.end)

    def describe(self) -> dict[str, object]:
        return self.plain.describe()

    def open(self, rows: Rows, generating: bool = False) -> View:
        number = next(self.group.numbers)
        self.call("open", self.number, (number, rows, generating))
        with self.group.explained():
            view = SplitView(self, self.plain.open(rows, generating), number)
        weakref.finalize(view, self.group.closed.append, number)
        return view

    def head(self, features: torch.Tensor) -> torch.Tensor:
        self.call("head", self.number, (tuple(features.shape), features.dtype))
        with self.group.explained():
            return self.plain.head(self.group.broadcast_tensor(features))

    def in_dtype(self, dtype: str) -> Split:
        """The same network in another dtype, loaded next to this one by all processes of the group.

        They drop it when its last reference is gone. Raises DuelError if one of them cannot load it.
        """
        assert self._load is not None
        number = next(self.group.numbers)
        self.call("load", number, dtype)
        network = Split(_load_too(self.group, self._load, dtype), self.group, number=number)
        weakref.finalize(network, self.group.closed.append, number)
        return network

    def call(self, name: str, number: int | None = None, arguments: Any = None) -> None:
        """Let the other processes make a call: `name` of the network or view `number`."""
        if self.group.broken:
            raise DuelError(
                f"A call that processes {self.group.others} make with process {self.group.rank} (tp_plan, ep_size) "
                "has failed before, and they may still wait in it: start the run again."
            )
        closed = [self.group.closed.pop() for _ in range(len(self.group.closed))]
        self.group.broadcast((name, number, arguments, closed))

    def end(self) -> None:
        """Release the other processes; the network cannot be called any more."""
        if self.group.network is self:
            self.group.network = None
            with contextlib.suppress(Exception):  # they have ended already, or do so when this process ends
                self.call("end")


class SplitView(WrappedView):
    """The leader's side of a view."""

    denoiser: Split

    def __init__(self, denoiser: Split, plain: View, number: int):
        super().__init__(denoiser, plain)
        self.number = number

    def commit(self, lanes: Lanes) -> None:
        self.denoiser.call("commit", self.number, lanes)
        with self.denoiser.group.explained():
            super().commit(lanes)

    def cells(self, lanes: Lanes) -> Cells:
        self.denoiser.call("cells", self.number, lanes)
        with self.denoiser.group.explained():
            return super().cells(lanes)


def share(denoiser: Denoiser, group: Group, load: Load) -> Split:
    """The denoiser of a group's leader, after each process has loaded its part as `denoiser`.

    `load`: loads this process's part in another dtype. In the other processes of the group this raises SystemExit(0)
    when the leader has ended.
    """
    _require_same(denoiser, group)
    if group.leads:
        return Split(denoiser, group, load)
    _follow(denoiser, group, load)
    raise SystemExit(0)


def _require_same(denoiser: Denoiser, group: Group) -> None:
    """Raise DuelError if the processes of a group have loaded networks that differ in more than their parts."""
    seen = denoiser.max_length, denoiser.vocab_size, denoiser.splits_head, denoiser.relative_positions
    group.require_equal((denoiser.describe(), *seen))


def _load_too(group: Group, load: Load, dtype: str) -> Denoiser:
    """This process's part in another dtype; raises DuelError on all processes if one cannot load it."""
    problem, denoiser = "", None
    try:
        denoiser = load(dtype)
    except Exception as error:  # such as out of memory: the others wait for the outcome
        problem = str(error) or type(error).__name__
    problems = [text for text in group.gather(problem) if text]
    if denoiser is None or problems:
        raise DuelError(f"The network cannot be loaded a second time, in {dtype}: {problems[0]}")
    _require_same(denoiser, group)
    return denoiser


@torch.inference_mode()
def _follow(denoiser: Denoiser, group: Group, load: Load) -> None:
    """Make the leader's calls until it ends. Signals are the leader's: it finishes the call under way."""
    numbered: dict[int, Any] = {0: denoiser}  # networks and views
    with _without_signals():
        while True:
            name, number, arguments, closed = group.broadcast()
            for old in closed:
                numbered.pop(old, None)  # a network that could not be loaded is none
            if name == "end":
                return
            with group.explained():
                if name == "load":
                    with torch.inference_mode(False), contextlib.suppress(DuelError):  # the leader's to report
                        numbered[number] = _load_too(group, load, arguments)
                elif name == "open":
                    view, *arguments = arguments
                    numbered[view] = numbered[number].open(*arguments)
                elif name == "head":
                    shape, dtype = arguments
                    features = group.broadcast_tensor(torch.empty(shape, dtype=dtype, device=group.device))
                    numbered[number].head(features)
                else:
                    getattr(numbered[number], name)(arguments)


@contextlib.contextmanager
def _without_signals() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # Python allows handlers in the main thread only
        yield
        return
    before = [(number, signal.signal(number, signal.SIG_IGN)) for number in signals.SIGNALS]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _moved(value: Any, device: torch.device) -> Any:
    """A value with all its tensors on a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(_moved(part, device) for part in value)
    if dataclasses.is_dataclass(value):
        fields = {field.name: _moved(getattr(value, field.name), device) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)  # type: ignore[type-var]
    return value
