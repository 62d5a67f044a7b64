"""The content of a response cache: answers to requests, and scores of windows of unfinished requests."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from lm_eval_duel.core.scores import Score
from lm_eval_duel.core.windows import Window
from lm_eval_duel.estimators.base import Estimator
from lm_eval_duel.estimators.records import read_request, read_window, request_record, window_record
from lm_eval_duel.harness.cache import ResponseCache, request_key

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

WINDOW = "window "  # before the key of a window's score


class Answers:
    """The answers to the requests of one call, saved as they are finished.

    A long document has many windows, so the score of each is kept until its request is saved: an interrupted run loses
    only the windows in flight. Without a response cache nothing is found and nothing is kept.
    """

    def __init__(
        self,
        store: ResponseCache | None,
        estimator: Estimator,
        kind: str,
        requests: Sequence[Instance],
        windows: Sequence[Sequence[Window]],
    ):
        self.store, self.windows, self.estimator = store, windows, estimator
        self.keys: list[str] = []
        self.needed: Counter[Window] = Counter()  # how many unfinished requests of several windows have a window
        if store is not None:
            self.keys = [request_key(kind, request.args) for request in requests]
            self.needed = Counter(window for parts in windows if len(parts) > 1 for window in {*parts})
        # part of a score and not of the spec: its fields, the statistics of a trace, the rules that a lattice follows
        fields = list(window_record(estimator.empty_score, estimator))
        self.contents = str((fields, estimator.traced, *map(str, getattr(estimator, "rules", ()))))

    def saved(self) -> Iterator[tuple[int, list[Score]]]:
        """(index, scores of its windows) of each request that an earlier run has finished."""
        for n, key in enumerate(self.keys):
            if (record := self.store.find(key, tuple)) is not None:
                scores = read_request(record, len(self.windows[n]), self.estimator)
                if scores is None:
                    self.store.drop()
                else:
                    self._finish(n)
                    yield n, scores

    def kept(self, requests: Iterable[int]) -> dict[Window, Score]:
        """The scores of windows of these requests that an earlier run has kept."""
        scores = {}
        for window in self.needed.keys() & {window for n in requests for window in self.windows[n]}:
            if (fields := self.store.find(self.key(window), dict)) is not None:
                scores[window] = read_window(fields, self.estimator)
        return scores

    def keep(self, window: Window, score: Score) -> None:
        """Keep the score of a window until its requests are saved, unless they have only this window."""
        if window in self.needed:
            self.store.keep(self.key(window), window_record(score, self.estimator))

    def save(self, n: int, scores: Sequence[Score]) -> None:
        """Save a finished request, and delete the scores of its windows that no other request waits for."""
        if self.store is not None:
            self.store.keep(self.keys[n], request_record(scores, self.estimator))
            self.store.forget([self.key(window) for window in self._finish(n)])

    def _finish(self, n: int) -> list[Window]:
        """The windows of a request that is finished and that no unfinished one needs."""
        windows = {*self.windows[n]} if len(self.windows[n]) > 1 else set()
        self.needed.subtract(windows)
        return [window for window in windows if not self.needed[window]]

    def key(self, window: Window) -> str:
        """The key of a window's score."""
        return WINDOW + hashlib.sha256(f"{self.contents} {window}".encode()).hexdigest()
