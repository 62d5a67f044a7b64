"""Accumulators of the steps of lanes, which yield the score of each finished window.

Shapes: N windows, L row length, R lanes, W block width.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from lm_eval_duel.core.decision import Decision
from lm_eval_duel.core.lanes import Lanes, Rows
from lm_eval_duel.core.scores import STATISTICS, IndexedScores, Score

if TYPE_CHECKING:
    from lm_eval_duel.core.predictions import Predictions


class Step(NamedTuple):
    """One step of some lanes."""

    lanes: Lanes  # before it
    predictions: Predictions
    decision: Decision
    tokens: torch.Tensor  # (R, W) revealed at the picks; -1 elsewhere
    log_prob: torch.Tensor  # (R, W) of the tokens, float64


class Accumulator(Protocol):
    """An accumulator of the steps of one group of windows."""

    def add(self, step: Step) -> None:
        """Add one step. After an out-of-memory error in here, the same step is added again."""

    def take(self, finished: Lanes) -> IndexedScores:
        """(row, score) of each window that these finished lanes complete."""


class ScoreAccumulator:
    """The scores of one group of windows, on the network's device, in float64."""

    def __init__(self, rows: Rows, traced: bool = False, expected: torch.Tensor | None = None):
        count, length = rows.ids.shape
        device = rows.ids.device
        self.origin, self.target = rows.origin.tolist(), rows.target.tolist()
        self.length = length  # the column of positions that are not picked
        self.log_probs = torch.full((count, length + 1), math.nan, dtype=torch.float64, device=device)  # (N, L + 1)
        self.reveal_steps = torch.full((count, length + 1), -1, dtype=torch.int32, device=device)  # (N, L + 1)
        self.sums = torch.zeros(count, 5, dtype=torch.int64, device=device)  # (N, 5) as in `add`
        column = torch.arange(length, device=device)  # (L,)
        known = rows.visible & (column >= rows.origin[:, None]) & (column < (rows.origin + rows.target)[:, None])
        # (N,) target positions to reveal
        self.expected = rows.target - known.sum(1) if expected is None else expected
        self.has_margins = True
        # (N, L + 1) each
        self.statistics = {name: torch.full_like(self.log_probs, math.nan) for name in STATISTICS if traced}
        for plane in (self.log_probs, *self.statistics.values()):
            plane[:, :length].masked_fill_(known, 0.0)

    def add(self, step: Step) -> None:
        """Add one step: log-probs and steps at the picks; NFE, near ties, all-mask starts."""
        lanes, predictions, decision, tokens, log_prob = step
        pick = decision.pick
        missed = ((tokens != predictions.argmax) & pick).any(1)  # (R,)
        one = torch.ones_like(missed)  # (R,)
        sums = torch.stack([pick.sum(1), one, missed, decision.near_tie, predictions.all_mask], 1).long()  # (R, 5)
        row, column = lanes.row[:, None].expand_as(pick), torch.where(pick, lanes.columns, self.length)  # (R, W)
        self.log_probs.index_put_((row, column), log_prob)
        self.reveal_steps.index_put_((row, column), lanes.step[:, None].int().expand_as(pick))
        for name, plane in self.statistics.items():
            plane.index_put_((row, column), getattr(predictions, name).double())
        # on out-of-memory before this line, the step is taken again and writes the same values
        self.sums.index_add_(0, lanes.row, sums)
        self.has_margins &= decision.decision_margin is not None

    def take(self, finished: Lanes) -> IndexedScores:
        """(row, score) of each window that has no lane left."""
        rows = finished.row.unique()  # (n,)
        return self.scores(rows[self.sums[rows, 0] == self.expected[rows]])

    def scores(self, rows: torch.Tensor) -> IndexedScores:
        """(row, score) of each of `rows` (n,)."""
        if not len(rows):
            return
        log_probs, steps, sums = (plane[rows].cpu() for plane in (self.log_probs, self.reveal_steps, self.sums))
        planes = {name: plane[rows].cpu() for name, plane in self.statistics.items()}
        for n, row in enumerate(rows.tolist()):
            span = slice(self.origin[row], self.origin[row] + self.target[row])
            traced: dict[str, Any] = {name: tuple(plane[n, span].tolist()) for name, plane in planes.items()}
            _, nfe, missed, near_ties, all_mask = sums[n].tolist()
            scored = Score(
                log_prob=float(log_probs[n, span].sum()),
                is_greedy=not missed,
                reveal_steps=tuple(steps[n, span].tolist()),
                token_logprobs=tuple(log_probs[n, span].tolist()),
                nfe=nfe,
                near_ties=near_ties if self.has_margins else None,
                all_mask_starts=all_mask,
                **traced,
            )
            yield row, scored
