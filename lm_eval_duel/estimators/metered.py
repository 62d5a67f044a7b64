"""A `DuelEstimator` that knows what its network calls cost, and for which windows.

One call may hold blocks of many windows. Its forwards and seconds are shared out to the windows in proportion to the
token-rows that each has in it: for a lane the positions of its row, or under a cache those of a later step.

Shapes: N windows, R lanes, W block width.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from lm_eval_duel import rules
from lm_eval_duel.core.lanes import Lanes
from lm_eval_duel.core.predictions import Predictions
from lm_eval_duel.core.scores import Accumulator, WindowScore
from lm_eval_duel.core.windows import Window
from lm_eval_duel.estimators.base import BlockSpan, IndexedScores, WindowGroup
from lm_eval_duel.estimators.duel import DuelEstimator
from lm_eval_duel.estimators.phases import Cost


class Metered(DuelEstimator):
    """`DuelEstimator` with the costs of its network calls, in total (`cost`) and of each window (`take_costs`)."""

    def __init__(self, *arguments: Any, **settings: Any):
        super().__init__(*arguments, **settings)
        self.reset()

    def reset(self) -> None:
        """Forget all costs."""
        self.cost: dict[str, float] = {"forwards": 0, "rows": 0, "seconds": 0.0}
        self._windows: dict[Window, Cost] = {}

    def take_window_costs(self) -> dict[Window, Cost]:
        """What each window has cost since the last call."""
        costs, self._windows = self._windows, {}
        return costs

    def _run(
        self, group: WindowGroup, rule: rules.Rule, places: list[BlockSpan], results: Accumulator
    ) -> IndexedScores:
        meter, evaluated = Meter(results, group, self.denoiser.cache), group.view.evaluated
        try:
            for indexed in super()._run(group, rule, places, meter):
                meter.pause()
                yield indexed
                meter.resume()
        finally:
            costs = meter.finish()
            for window, cost in zip(group.windows, costs, strict=True):
                if cost != Cost():
                    self._windows.setdefault(window, Cost()).add(cost)
            self.cost["forwards"] += meter.forwards
            self.cost["rows"] += group.view.evaluated - evaluated
            self.cost["seconds"] += meter.seconds


class Meter:
    """Results that are filled step by step, with the cost of each step. The clock runs from the beginning."""

    def __init__(self, results: Accumulator, group: WindowGroup, cache: str | None):
        self.results = results
        self._view, self._length, self._cache = group.view, group.rows.length, cache
        self._charged = torch.zeros(2, len(group.windows), dtype=torch.float64, device=group.rows.ids.device)  # (2, N)
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None  # (R,) each: rows and shares of the last call
        self._before, self.forwards = group.view.forwards, 0
        self._uncharged = self.seconds = 0.0
        self._since: float | None = time.perf_counter()

    def take(self, finished: Lanes) -> Iterator[tuple[int, WindowScore]]:
        return self.results.take(finished)

    def add(
        self,
        lanes: Lanes,
        decision: rules.Decision,
        predictions: Predictions,
        tokens: torch.Tensor,
        log_prob: torch.Tensor,
    ) -> None:
        self.results.add(lanes, decision, predictions, tokens, log_prob)
        token_rows = self._token_rows(lanes).double()  # (R,)
        self._last = lanes.row, token_rows / token_rows.sum()
        forwards = self._view.forwards - self._before - self.forwards
        self.forwards += forwards
        self.pause()
        self._charge(forwards)
        self.resume()

    def pause(self) -> None:
        """Stop the clock."""
        if self._since is not None:
            self._uncharged += time.perf_counter() - self._since
        self._since = None

    def resume(self) -> None:
        """Start the clock again."""
        self._since = time.perf_counter()

    def finish(self) -> list[Cost]:
        """The costs of each window. What came after the last call is part of that call."""
        self.pause()
        self._charge(0)
        return [Cost(*amounts) for amounts in zip(*self._charged.tolist(), strict=True)]

    def _charge(self, forwards: int) -> None:
        """Share out so many forwards and the time since the last ones to the windows of the last call."""
        if self._last is None:
            return
        for charged, amount in zip(self._charged, (forwards, self._uncharged), strict=True):
            charged.index_add_(0, *self._last, alpha=amount)
        self.seconds += self._uncharged
        self._uncharged = 0.0

    def _token_rows(self, lanes: Lanes) -> torch.Tensor:
        """The positions that one step evaluates of each lane, (R,)."""
        length = self._length[lanes.row]  # (R,)
        if self._cache is None:
            return length
        later = lanes.width if self._cache == "dual" else length - lanes.start  # (R,)
        return torch.where(lanes.step == 0, length, later)
