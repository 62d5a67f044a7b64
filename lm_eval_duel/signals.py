"""Ctrl-C and SIGTERM while requests are answered: the network call under way is finished, what is done is kept.

with interrupts.held():        # a signal waits ...
    interrupts.check()         # ... until here, where it is raised
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
TWICE = 2.0  # seconds: a launcher passes on the Ctrl-C that its processes have had already

_came: tuple[int, float] | None = None  # the signal that waits, and when it came


class Interrupted(SystemExit):
    """A signal has ended the run; the exit status is the shell's, 128 + its number."""

    def __init__(self, number: int):
        super().__init__(128 + number)
        self.name = signal.Signals(number).name


def _wait(number: int, frame: FrameType | None) -> None:
    global _came
    now = time.monotonic()
    if _came is None:
        _came = number, now
    elif number == signal.SIGINT and now - _came[1] > TWICE:
        raise KeyboardInterrupt


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Signals wait for `check`, and at last for the end; a second Ctrl-C, after two seconds, does not."""
    global _came
    if threading.current_thread() is not threading.main_thread():  # where Python takes no handlers
        yield
        return
    _came = None
    before = [signal.signal(number, _wait) for number in SIGNALS]
    try:
        yield
        check()
    finally:
        _came = None
        for number, handler in zip(SIGNALS, before, strict=True):
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def check() -> None:
    """Raise Interrupted where a signal waits."""
    if _came is not None:
        raise Interrupted(_came[0])
