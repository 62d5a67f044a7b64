"""The order in which windows are opened and lanes wait.

Shapes: R lanes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from lm_eval_duel.core.lanes import Lanes
from lm_eval_duel.core.windows import Window

GROUP = 4096  # windows opened at once, which bounds the ids in memory, not the batch


def groups(windows: Sequence[Window], same_length: bool, buckets: Sequence[int] | None = None) -> list[list[int]]:
    """Groups of windows to open together: longest first, and of one length only if the network sees padding.

    `buckets`: a number for each window; a smaller one goes first, and only windows of one number are sorted by length.
    """
    chosen = [n for n, window in enumerate(windows) if window.target]
    order = sorted(chosen, key=lambda n: (buckets[n] if buckets else 0, -windows[n].length))
    result: list[list[int]] = []
    for n in order:
        full = not result or len(result[-1]) >= GROUP
        if full or (same_length and windows[result[-1][0]].length != windows[n].length):
            result.append([])
        result[-1].append(n)
    return result


class Queue:
    """Waiting lanes in order, made when they are needed. The consumer of the loop's results may put more in front.

    Started and fresh lanes wait separately, so that fresh lanes take no rule memory.
    """

    def __init__(self, lanes: Iterable[Lanes]):
        self._ready: deque[Lanes] = deque()
        self._coming = iter(lanes)

    def __bool__(self) -> bool:
        if not self._ready and (following := next(self._coming, None)) is not None:
            self._ready.append(following)
        return bool(self._ready)

    def first(self) -> Lanes:
        """The next lane, which stays in the queue."""
        return self._ready[0].select(slice(0, 1))

    def take(self, count: int) -> Lanes:
        """The next lanes, at most `count`."""
        part = self._ready.popleft()
        if len(part) > count:
            self._ready.appendleft(part.select(slice(count, None)))
        return part.select(slice(0, count))

    def put_first(self, lanes: Lanes) -> None:
        """Put these lanes in front."""
        self._ready.appendleft(lanes)
