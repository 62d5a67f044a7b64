"""Scores of the windows of unfinished requests, kept in the response cache.

A long document has many windows: without this an interrupted run would start the document again. The windows are
deleted as soon as the document is saved.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

from lm_eval_duel.core.scores import WindowScore
from lm_eval_duel.core.windows import Window
from lm_eval_duel.estimators.base import Estimator
from lm_eval_duel.harness.cache import WINDOW, ResponseCache


class Unfinished:
    """Window scores in a response cache; without a cache, nothing is kept."""

    def __init__(self, store: ResponseCache | None, estimator: Estimator):
        self.store, self.kind = store, type(estimator.empty_score)
        # part of a score and not of the spec: its fields, the statistics of a trace, the rules that a lattice follows
        fields = [field.name for field in dataclasses.fields(self.kind)]
        self.contents = str((fields, estimator.traced, *map(str, getattr(estimator, "rules", ()))))

    def resume(self, windows: Sequence[Window]) -> dict[int, WindowScore]:
        """The kept scores of a request's windows, by index. A request of one window has none."""
        if self.store is None or len(windows) < 2:
            return {}
        found = {n: self.store.find(self.key(window), dict) for n, window in enumerate(windows)}
        return {n: self.kind.from_fields(fields) for n, fields in found.items() if fields is not None}

    def keep(self, window: Window, score: WindowScore) -> None:
        """Keep a score until its request is saved."""
        if self.store is not None:
            self.store.keep(self.key(window), dataclasses.asdict(score))

    def forget(self, windows: Sequence[Window]) -> None:
        """Delete the scores of a finished request."""
        if self.store is not None and len(windows) > 1:
            self.store.forget([self.key(window) for window in windows])

    def key(self, window: Window) -> str:
        """The key of a window's score."""
        return WINDOW + hashlib.sha256(f"{self.contents} {window}".encode()).hexdigest()
