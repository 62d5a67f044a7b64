"""Scores of the windows of unfinished requests, kept in the response cache.

The harness caches answers only, and a long document has many windows: without this an interrupted run would start the
document again. The windows are deleted as soon as the answer is cached.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

from lm_eval_duel.core.scores import WindowScore
from lm_eval_duel.core.windows import Window
from lm_eval_duel.estimators.base import Estimator
from lm_eval_duel.harness.cache import ResponseCache


class Unfinished:
    """Window scores in a response cache; without a cache, nothing is kept."""

    def __init__(self, store: ResponseCache | None, estimator: Estimator):
        self.store, self.kind = store, type(estimator.empty_score)
        # part of a score and not of the spec: the statistics of a trace, the rules that a lattice follows
        self.contents = str((estimator.traced, *map(str, getattr(estimator, "rules", ()))))

    def resume(self, windows: Sequence[Window]) -> dict[int, WindowScore]:
        """The kept scores of a request's windows, by index. A request of one window has none."""
        scores = {n: self.find(window) for n, window in enumerate(windows)} if len(windows) > 1 else {}
        return {n: score for n, score in scores.items() if score is not None}

    def find(self, window: Window) -> WindowScore | None:
        """The score that an interrupted run kept."""
        return None if self.store is None else _read(self.store.find(self.key(window)), self.kind, len(window.target))

    def keep(self, window: Window, score: WindowScore) -> None:
        """Keep a score until its request is saved."""
        if self.store is not None:
            self.store[self.key(window)] = type(score).__name__, dataclasses.asdict(score)

    def forget(self, windows: Sequence[Window]) -> None:
        """Delete the scores of a finished request."""
        if self.store is not None and len(windows) > 1:
            self.store.forget([self.key(window) for window in windows])

    def key(self, window: Window) -> str:
        """The key of a window's score."""
        return "window " + hashlib.sha256(f"{self.contents} {window}".encode()).hexdigest()


def _read(record: Any, kind: type[WindowScore], tokens: int) -> WindowScore | None:
    """A score from its plain form; None if it is damaged, or of another release or another window."""
    try:
        name, fields = record
        score = kind.from_fields(fields)
    except (TypeError, ValueError, KeyError, AttributeError):
        return None
    return score if name == kind.__name__ and _is_intact(score, tokens) else None


def _is_intact(score: Any, tokens: int) -> bool:
    """Whether all fields are numbers, or sequences with a number for each token (or empty, or of another length).

    A field may also hold the scores of several rules.
    """
    other_lengths = getattr(score, "other_lengths", ())
    for field in dataclasses.fields(score):
        value = getattr(score, field.name)
        if isinstance(value, dict):
            if not all(_is_intact(part, tokens) for part in value.values()):
                return False
        elif isinstance(value, tuple):
            if (len(value) not in (0, tokens) and field.name not in other_lengths) or not all(
                type(number) in (int, float) for number in value
            ):
                return False
        elif type(value) not in (int, float, bool, type(None)):
            return False
    return type(score.log_prob) is float
