"""The reveal loop (the paper, Algorithms 1 and 2): predict, pick, choose tokens, add up log-probabilities.

    while lanes:
        predictions = view(lanes)
        decision = rule(predictions, lanes)
        tokens = targets | draw(predictions, decision.pick)     the one line in which Algorithms 2 and 1 differ
        scores.add(lanes, decision, predictions.log_prob(tokens))
        lanes = lanes.reveal(decision, tokens)                  finished windows are yielded, waiting lanes enter

Scoring, sampling, the ELBO and the lattice all run this loop, so they cannot diverge.

Shapes: N windows, R lanes, W block width.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import TypeAlias, cast

import torch

from lm_eval_duel.core import row_checks, signals
from lm_eval_duel.core.accumulators import Accumulator, Step
from lm_eval_duel.core.budget import Budget
from lm_eval_duel.core.decision import UnmaskingRule, require_pick
from lm_eval_duel.core.lanes import Lanes, Rows
from lm_eval_duel.core.network import without_autocast
from lm_eval_duel.core.queue import Queue
from lm_eval_duel.core.row_checks import RowChecks
from lm_eval_duel.core.scores import Counts, IndexedScores
from lm_eval_duel.core.tokens import Draw
from lm_eval_duel.core.view import View
from lm_eval_duel.core.windows import Window
from lm_eval_duel.errors import LaneError

BlockSpan: TypeAlias = tuple[int, int, int]  # (row, first column, width) of a block


@dataclasses.dataclass(frozen=True)
class WindowGroup:
    """Windows that are opened together. Where targets are known, every block starts from a known state."""

    windows: list[Window]
    window_indices: list[int]  # the index of each window among all that are scored
    rows: Rows
    opened: Callable[[Rows], View]  # how windows are opened

    @cached_property
    def view(self) -> View:
        """The windows, opened."""
        return self.opened(self.rows)

    @cached_property
    def keys(self) -> torch.Tensor:
        """The key of each window, on which its random numbers depend, (N,)."""
        return torch.tensor([window.key for window in self.windows], device=self.rows.ids.device)

    def fresh(self, spans: Sequence[BlockSpan]) -> Lanes:
        """Lanes at the start of these blocks."""
        return Lanes.fresh(self.rows, *torch.tensor(spans, device=self.rows.ids.device).unbind(1))


class Reveal:
    """The lanes of one group of windows while they are revealed: an iterator of (row, score) of each finished window.

    Args:
        group: The windows.
        rule: The unmasking rule, which chooses the positions of each step.
        lanes: The lanes to reveal, made when they are needed.
        scores: The sums over steps of each window, and the windows that are finished.
        budget: The size of one network call. Out of memory, it is halved.
        counts: Network calls, rows and checks are added to it.
        checks: Draws lanes to evaluate them again alone.
        draw: The tokens to reveal at a pick (Algorithm 1). None: the targets (Algorithm 2).
        following: The lanes that finished lanes make possible, which go before those that wait.
    """

    def __init__(
        self,
        group: WindowGroup,
        rule: UnmaskingRule,
        lanes: Iterable[Lanes],
        scores: Accumulator,
        budget: Budget,
        counts: Counts,
        checks: RowChecks,
        draw: Draw | None = None,
        following: Callable[[Lanes], Lanes | None] | None = None,
    ):
        self.group, self.view, self.rule, self.scores, self.draw = group, group.view, rule, scores, draw
        self.budget, self.counts, self.checks, self.following = budget, counts, checks, following
        self.waiting = Queue(lanes)
        self.active: Lanes | None = None

    def __iter__(self) -> IndexedScores:
        rows, forwards, lanes_per_row = self.view.evaluated, self.view.forwards, 0.0
        try:
            while (active := self._fill()) is not None:
                lanes_per_row = lanes_per_row or self._lanes_per_row(active)
                if due := self.checks.number_due(self.counts, len(active), lanes_per_row):
                    self.checks.compare(self.counts)
                after = None
                while after is None:
                    try:
                        after = self._step(active, due)
                    except torch.OutOfMemoryError:
                        if len(active) == 1:
                            raise
                    if after is None:  # outside the handler, so that the tensors of the step are released
                        active = self._halve(active)
                self.counts.lane_steps += len(after)
                if due and not self.view.denoiser.fixed_weights:  # they may change before the next step
                    self.checks.compare(self.counts)
                finished = ~after.masked.any(1)  # (R,)
                self.active = after
                if finished.any():
                    self.active, done = after.select(~finished), after.select(finished)
                    if self.following is not None and (following := self.following(done)) is not None:
                        self.waiting.put_first(following)
                    yield from self.scores.take(done)
                signals.check()
        finally:
            self.counts.forwards += self.view.forwards - forwards
            self.counts.rows += self.view.evaluated - rows

    def _lanes_per_row(self, lanes: Lanes) -> float:
        """The number of lanes that cost as much as a whole row."""
        return max(1.0, float(self.group.rows.length[lanes.row].sum() / self.view.cost(lanes).sum()))

    def _step(self, lanes: Lanes, due: int) -> Lanes:
        """The lanes after one step, which is added to the scores; `due` of them are drawn to be evaluated again."""
        with naming_window(lanes, self.group.window_indices), without_autocast(self.view.denoiser):
            targets = self.group.rows.targets(lanes) if self.draw is None else None  # (R, W)
            predictions = self.view(lanes, targets)
            decision = self.rule(predictions, lanes)
            require_pick(self.rule, decision)
            if self.draw is not None:
                tokens = self.draw(predictions, lanes, decision.pick)  # (R, W)
            else:
                tokens = torch.where(decision.pick, cast(torch.Tensor, targets), -1)
            log_prob = predictions.log_prob(tokens)  # (R, W)
            after = lanes.reveal(decision.pick, tokens, decision.memory)  # before the scores: it may run out of memory
            what = (self.group.opened, self.view, lanes, predictions, tokens, self.group.window_indices)
            drawn = row_checks.draw(due, *what) if due else []
            self.scores.add(Step(lanes, predictions, decision, tokens, log_prob))
            self.checks.waiting += drawn
        return after

    def _fill(self) -> Lanes | None:
        """The active lanes, with as many of those that wait as the budget allows; None if there are none."""
        active = self.active if self.active is not None and len(self.active.row) else None
        while self.waiting:
            batch = [] if active is None else [active]
            count = sum(map(len, batch))
            room = self.budget.room(self.view, self.rule, self.waiting.first(), *batch) - count
            if room <= 0:
                break
            entering = self.waiting.take(room)
            # later lanes may be more expensive than the first one
            while (fitting := self.budget.room(self.view, self.rule, entering, *batch) - count) < len(entering):
                kept = fitting if fitting > 0 else len(entering) // 2
                self.waiting.put_first(entering.select(slice(kept, None)))
                entering = entering.select(slice(0, kept))
            try:
                active = entering if active is None else active.concat(entering)
            except torch.OutOfMemoryError:
                self.waiting.put_first(entering)
                self.budget.halve(self.view.denoiser.device)
                break
        return active

    def _halve(self, lanes: Lanes) -> Lanes:
        """Halve the budget; return half of the lanes, and let the others wait."""
        self.budget.halve(self.view.denoiser.device)
        half = len(lanes) // 2
        self.waiting.put_first(lanes.select(slice(half, None)))
        return lanes.select(slice(0, half))


@contextlib.contextmanager
def naming_window(lanes: Lanes, window_indices: Sequence[int]) -> Iterator[None]:
    """Add the window, the block and the step to an error in one of `lanes`."""
    try:
        yield
    except LaneError as error:
        if error.window is not None:
            raise
        lane = error.lane
        window = window_indices[int(lanes.row[lane])]
        position = max(0, int(lanes.start[lane] - lanes.origin[lane]))  # a block may begin inside the context
        place = f"(Window {window}, block at target position {position}, step {int(lanes.step[lane])}.)"
        raise type(error)(f"{error} {place}", window) from None
