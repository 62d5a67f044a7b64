"""SIGINT (Ctrl-C) and SIGTERM during a run: the network call in progress is finished, and its results are kept.

with signals.deferred():    # a signal that arrives in here ...
    signals.check()         # ... is raised here
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SECOND_AFTER = 2.0  # seconds: a launcher repeats the Ctrl-C that its processes have already received

_pending: tuple[int, float] | None = None  # the deferred signal, and when it arrived


class Interrupted(SystemExit):
    """A signal has ended the run. The exit status is 128 + its number, as in a shell."""

    def __init__(self, number: int):
        super().__init__(128 + number)
        self.name = signal.Signals(number).name


def _defer(number: int, frame: FrameType | None) -> None:
    global _pending
    now = time.monotonic()
    if _pending is None:
        _pending = number, now
    elif number == signal.SIGINT and now - _pending[1] > SECOND_AFTER:
        raise KeyboardInterrupt


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Defer signals until `check` or the end of the block. A second Ctrl-C after two seconds is not deferred."""
    global _pending
    if threading.current_thread() is not threading.main_thread():  # Python allows handlers in the main thread only
        yield
        return
    _pending = None
    before = [signal.signal(number, _defer) for number in SIGNALS]
    try:
        yield
        check()
    finally:
        _pending = None
        for number, handler in zip(SIGNALS, before, strict=True):
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def check() -> None:
    """Raise Interrupted if a signal is pending."""
    if _pending is not None:
        raise Interrupted(_pending[0])
