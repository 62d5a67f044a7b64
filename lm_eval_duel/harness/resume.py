"""Windows of requests that are not finished yet, kept in the response cache.

The harness knows answers only, and a long document has many windows: an interrupted run would begin it anew. They are
forgotten as soon as the request's answer is kept.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable
from typing import Any

from lm_eval_duel.engine.results import WindowScore
from lm_eval_duel.engine.windows import Window
from lm_eval_duel.estimators.elbo import ElboScore
from lm_eval_duel.estimators.lattice import LatticeScore, OrderScore
from lm_eval_duel.harness.cache import ResponseCache

RESULTS = {kind.__name__: kind for kind in (WindowScore, ElboScore, LatticeScore)}


class Unfinished:
    """Results of windows in a response cache of one spec; without one, nothing is kept.

    `seen`: what else of the run is in a result (the statistics of a trace, a lattice's rules) and not in the spec.
    """

    def __init__(self, store: ResponseCache | None, seen: object):
        self.store, self.seen = store, str(seen)

    def find(self, window: Window) -> WindowScore | None:
        """What an interrupted run found for a window."""
        return None if self.store is None else _read(self.store.find(self._key(window)), len(window.target))

    def keep(self, window: Window, scored: WindowScore) -> None:
        if self.store is not None:
            self.store[self._key(window)] = type(scored).__name__, dataclasses.asdict(scored)

    def forget(self, windows: Iterable[Window]) -> None:
        if self.store is not None:
            self.store.forget([self._key(window) for window in windows])

    def _key(self, window: Window) -> str:
        return "window " + hashlib.sha256(f"{self.seen} {window}".encode()).hexdigest()


def _read(kept: Any, tokens: int) -> WindowScore | None:
    """A window's result of its plain form; None where it is damaged, or of another release or another window."""
    try:
        name, fields = kept
        fields = {**fields}
        if "rules" in fields:
            fields["rules"] = {rule: OrderScore(**path) for rule, path in fields["rules"].items()}
        found = RESULTS[name](**fields)
    except (TypeError, ValueError, KeyError, AttributeError):
        return None
    return found if all(_sound(part, tokens) for part in (found, *getattr(found, "rules", {}).values())) else None


def _sound(part: WindowScore | OrderScore, tokens: int) -> bool:
    """Whether a result is made of numbers, its sequences of one for each token, or of none."""
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if isinstance(value, tuple):
            if len(value) not in (0, tokens) or not all(type(one) in (int, float) for one in value):
                return False
        elif type(value) not in (int, float, bool, type(None), dict):
            return False
    return type(part.log_prob) is float
