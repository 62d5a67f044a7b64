"""The reveal loop (the paper, Algorithms 1 and 2), and what it needs: token sources, accumulators, deferred signals.

    while lanes:
        predictions = view(lanes)
        decision = rule(predictions, lanes)
        tokens = targets | sampled(predictions, decision.pick)  the one line in which Algorithms 2 and 1 differ
        scores.add(lanes, decision, predictions.log_prob(tokens))
        lanes = lanes.reveal(decision, tokens)                  finished windows are yielded, waiting lanes enter

Scoring, sampling, the ELBO and the lattice all run this loop, so they cannot diverge. SIGINT (Ctrl-C) and SIGTERM end a
run after the network call in progress, whose results are kept.

Shapes: N windows, L row length, R lanes, W block width.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import operator
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

import torch

from lm_eval_duel.core import row_checks
from lm_eval_duel.core.batch_size import Budget
from lm_eval_duel.core.decision import Decision, UnmaskingRule, require_pick
from lm_eval_duel.core.hashing import uniform
from lm_eval_duel.core.lanes import Lanes, Queue, Rows
from lm_eval_duel.core.network import Evaluated, Evaluator, without_autocast
from lm_eval_duel.core.row_checks import RowChecks
from lm_eval_duel.core.scores import STATISTICS, Counts, IndexedScores, Score
from lm_eval_duel.core.windows import Window
from lm_eval_duel.errors import DuelError, LaneError

if TYPE_CHECKING:
    from lm_eval_duel.core.predictions import Predictions

log = logging.getLogger("lm_eval.duel_mdm")

BlockSpan: TypeAlias = tuple[int, int, int]  # (row, first column, width) of a block


@dataclasses.dataclass(frozen=True)
class WindowGroup:
    """Windows that are opened together. Where targets are known, every block starts from a known state."""

    windows: list[Window]
    window_indices: list[int]  # the index of each window among all that are scored
    rows: Rows
    opened: Callable[[Rows], Evaluator]  # how windows are opened

    @cached_property
    def view(self) -> Evaluator:
        """The windows, opened."""
        return self.opened(self.rows)

    @cached_property
    def keys(self) -> torch.Tensor:
        """The key of each window, on which its random numbers depend, (N,)."""
        return torch.tensor([window.key for window in self.windows], device=self.rows.ids.device)

    def fresh(self, spans: Sequence[BlockSpan]) -> Lanes:
        """Lanes at the start of these blocks."""
        planes = torch.tensor(spans, device=self.rows.ids.device)  # (R, 3)
        row, start, width = planes.unbind(1)  # (R,) each
        return Lanes.fresh(self.rows, row, start, width)


class Reveal:
    """The lanes of one group of windows while they are revealed: an iterator of (row, score) of each finished window.

    Args:
        group: The windows.
        rule: The unmasking rule, which chooses the positions of each step.
        lanes: The lanes to reveal, made when they are needed.
        scores: The sums over steps of each window, and the windows that are finished.
        budget: The size of one network call. Out of memory, it is halved.
        counts: Network calls, rows and checks are added to it.
        checks: Chooses lanes to evaluate them again alone.
        token_source: The tokens to reveal at a pick (Algorithm 1). None: the targets (Algorithm 2).
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
        token_source: TokenSource | None = None,
        following: Callable[[Lanes], Lanes | None] | None = None,
    ):
        self.group = group
        self.view = group.view  # the windows, opened once
        self.rule = rule
        self.token_source = token_source
        self.following = following
        self.scores = scores
        self.budget = budget
        self.counts = counts
        self.checks = checks
        self.waiting = Queue(lanes)
        self.active: Lanes | None = None  # of the next network call

    def __iter__(self) -> IndexedScores:
        rows_before = self.view.evaluated
        forwards_before = self.view.forwards
        lanes_per_row = 0.0  # not known yet
        try:
            while (active := self._fill()) is not None:
                if not lanes_per_row:
                    lanes_per_row = self._lanes_per_row(active)
                due = self.checks.number_due(self.counts, len(active), lanes_per_row)
                after = self._step_that_fits(active, due)
                self.counts.lane_steps += len(after)
                if due:
                    # the lanes just chosen wait for the next comparison, unless the weights may change before it
                    latest = due if self.view.denoiser.fixed_weights else 0
                    self.checks.compare(self.counts, latest)

                self.active = after
                finished = ~after.masked.any(1)  # (R,)
                if finished.any():
                    self.active = after.select(~finished)
                    done = after.select(finished)
                    self._enter_following(done)
                    yield from self.scores.take(done)
                check()
        finally:
            self.counts.forwards += self.view.forwards - forwards_before
            self.counts.rows += self.view.evaluated - rows_before

    def _lanes_per_row(self, lanes: Lanes) -> float:
        """The number of lanes that cost as much as a whole row, at least 1."""
        length = self.group.rows.length[lanes.row].sum()
        cost = self.view.cost(lanes).sum()
        return max(1.0, float(length / cost))

    def _enter_following(self, finished: Lanes) -> None:
        """Let the lanes that `finished` ones make possible wait before all others."""
        if self.following is None:
            return
        following = self.following(finished)
        if following is not None:
            self.waiting.put_first(following)

    def _step_that_fits(self, lanes: Lanes, due: int) -> Lanes:
        """The lanes after one step, or half of them, and so on, if memory runs out; the others wait."""
        while True:
            try:
                return self._step(lanes, due)
            except torch.OutOfMemoryError:
                if len(lanes) == 1:
                    raise
            lanes = self._halve(lanes)  # outside the handler, so that the tensors of the step are released

    def _step(self, lanes: Lanes, due: int) -> Lanes:
        """The lanes after one step, which is added to the scores; `due` of them are chosen to be evaluated again."""
        with naming_window(lanes, self.group.window_indices), without_autocast(self.view.denoiser):
            targets = None
            if self.token_source is None:
                targets = self.group.rows.targets(lanes)  # (R, W)
            evaluated = self.view(lanes, targets)
            # A view may return terms of a bound instead. They go with `EvaluateAll`, which reads nothing of them.
            predictions = cast("Predictions", evaluated)
            decision = self.rule(predictions, lanes)
            require_pick(self.rule, decision)
            if self.token_source is not None:
                tokens = self.token_source(predictions, lanes, decision.pick)  # (R, W)
            else:
                tokens = torch.where(decision.pick, cast(torch.Tensor, targets), -1)
            # before the scores: it may run out of memory
            after = lanes.reveal(decision.pick, tokens, decision.memory, evaluated.carried)
            checks = []
            if due:
                checks = row_checks.make_checks(
                    due,
                    self.group.opened,
                    self.view,
                    lanes,
                    evaluated,
                    tokens,
                    self.group.window_indices,
                )
            self.scores.add(Step(lanes, evaluated, decision, tokens))
            self.checks.add(checks)
        return after

    def _fill(self) -> Lanes | None:
        """The active lanes, with as many of those that wait as the budget allows; None if there are none."""
        active = self.active
        if active is not None and not len(active):
            active = None
        while self.waiting:
            room = self._room(active, self.waiting.first())
            if room <= 0:
                break
            entering = self.waiting.take(room)
            # later lanes may be more expensive than the first one
            while (room := self._room(active, entering)) < len(entering):
                kept = room if room > 0 else len(entering) // 2
                self.waiting.put_first(entering.select(slice(kept, None)))
                entering = entering.select(slice(0, kept))
            try:
                active = entering if active is None else active.concat(entering)
            except torch.OutOfMemoryError:
                self.waiting.put_first(entering)
                self.budget.halve(self.view.denoiser.device)
                break
        return active

    def _room(self, active: Lanes | None, entering: Lanes) -> int:
        """The number of lanes such as those `entering` that fit into a call with the active ones."""
        if active is None:
            return self.budget.room(self.view, self.rule, entering)
        return self.budget.room(self.view, self.rule, entering, active) - len(active)

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
        step = int(lanes.step[lane])
        place = f"(Window {window}, block at target position {position}, step {step}.)"
        raise type(error)(f"{error} {place}", window) from None


# ---------------------------------------------------------------- token sources
# The tokens that a pick reveals when sampling. When scoring they are the targets.


class TokenSource(Protocol):
    """The source of the tokens of a pick: samples, or the most probable ones."""

    def __call__(self, predictions: Predictions, lanes: Lanes, pick: torch.Tensor) -> torch.Tensor:
        """The tokens (R, W) to reveal at `pick` (R, W); -1 elsewhere."""


class SampledTokens:
    """Samples (Algorithm 1). Random numbers depend on the row's key, the position in the target and the seed."""

    def __init__(self, keys: Sequence[int], seed: int, device: torch.device):
        self.keys = torch.tensor(keys, device=device)  # (N,)
        try:
            self.seed = operator.index(seed)
        except TypeError:
            raise DuelError(f"'seed' is a whole number; got {seed!r}. Leave it out for 0.") from None

    def __call__(self, predictions: Predictions, lanes: Lanes, pick: torch.Tensor) -> torch.Tensor:
        position = lanes.columns - lanes.origin[:, None]  # (R, W)
        u = uniform(self.keys[lanes.row][:, None], position, self.seed)  # (R, W)
        return predictions.sample(torch.where(pick, u, math.nan))


class ArgmaxTokens:
    """The most probable tokens: what `is_greedy` promises."""

    def __call__(self, predictions: Predictions, lanes: Lanes, pick: torch.Tensor) -> torch.Tensor:
        return torch.where(pick, predictions.argmax, -1)


# ---------------------------------------------------------------- accumulators
# Accumulators of the steps of lanes, which yield the score of each finished window.


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of some lanes. Accumulators ask for what they add up."""

    lanes: Lanes  # before it
    evaluated: Evaluated  # what the view returned
    decision: Decision
    tokens: torch.Tensor  # (R, W) revealed at the picks; -1 elsewhere

    @property
    def predictions(self) -> Predictions:
        """The predictions that the view returned, as every view does but that of `noised_elbo`."""
        return cast("Predictions", self.evaluated)

    @cached_property
    def log_prob(self) -> torch.Tensor:
        """The log-probability of the tokens, float64 (R, W)."""
        return self.predictions.log_prob(self.tokens)


class Accumulator(Protocol):
    """An accumulator of the steps of one group of windows."""

    def add(self, step: Step) -> None:
        """Add one step. After an out-of-memory error in here, the same step is added again."""

    def take(self, finished: Lanes) -> IndexedScores:
        """(row, score) of each window that these finished lanes complete."""


class ScoreAccumulator:
    """The scores of one group of windows, on the network's device, in float64."""

    def __init__(
        self,
        rows: Rows,
        traced: bool = False,
        expected: torch.Tensor | None = None,
        note: str = "",
    ):
        count, length = rows.ids.shape
        device = rows.ids.device
        self.note = note  # on each score
        self.origin = rows.origin.tolist()
        self.target = rows.target.tolist()
        self.has_margins = True  # until a decision comes without one

        # one column more than the rows, which takes what is written at positions that are not picked
        self.length = length
        shape = (count, length + 1)
        self.log_probs = torch.full(shape, math.nan, dtype=torch.float64, device=device)  # (N, L + 1)
        self.reveal_steps = torch.full(shape, -1, dtype=torch.int32, device=device)  # (N, L + 1)
        self.statistics: dict[str, torch.Tensor] = {}  # (N, L + 1) each
        if traced:
            for name in STATISTICS:
                self.statistics[name] = torch.full_like(self.log_probs, math.nan)

        # known positions of the target are never revealed: their log-probability is 0
        column = torch.arange(length, device=device)  # (L,)
        end = rows.origin + rows.target  # (N,)
        in_target = (column >= rows.origin[:, None]) & (column < end[:, None])  # (N, L)
        known = rows.visible & in_target  # (N, L)
        for plane in (self.log_probs, *self.statistics.values()):
            plane[:, :length].masked_fill_(known, 0.0)
        self.sums = torch.zeros(count, 5, dtype=torch.int64, device=device)  # (N, 5) as in `add`
        if expected is None:
            expected = rows.target - known.sum(1)
        self.expected = expected  # (N,) positions to reveal

    def add(self, step: Step) -> None:
        """Add one step: log-probs and steps at the picks; NFE, near ties, all-mask starts."""
        lanes = step.lanes
        predictions = step.predictions
        decision = step.decision
        pick = decision.pick  # (R, W)
        log_prob = step.log_prob  # (R, W)
        missed = ((step.tokens != predictions.argmax) & pick).any(1)  # (R,)
        step_taken = torch.ones_like(missed)  # (R,)
        counted = [pick.sum(1), step_taken, missed, decision.near_tie, predictions.all_mask]
        sums = torch.stack(counted, 1).long()  # (R, 5)
        row = lanes.row[:, None].expand_as(pick)  # (R, W)
        column = torch.where(pick, lanes.columns, self.length)  # (R, W)
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
        is_complete = self.sums[rows, 0] == self.expected[rows]  # (n,)
        return self.scores(rows[is_complete])

    def scores(self, rows: torch.Tensor) -> IndexedScores:
        """(row, score) of each of `rows` (n,)."""
        if not len(rows):
            return
        log_probs = self.log_probs[rows].cpu()  # (n, L + 1)
        steps = self.reveal_steps[rows].cpu()  # (n, L + 1)
        sums = self.sums[rows].cpu()  # (n, 5)
        planes = {name: plane[rows].cpu() for name, plane in self.statistics.items()}  # (n, L + 1) each
        for n, row in enumerate(rows.tolist()):
            origin = self.origin[row]
            span = slice(origin, origin + self.target[row])
            traced: dict[str, Any] = {}
            for name, plane in planes.items():
                traced[name] = tuple(plane[n, span].tolist())
            _, nfe, missed, near_ties, all_mask = sums[n].tolist()
            score = Score(
                log_prob=float(log_probs[n, span].sum()),
                is_greedy=not missed,
                reveal_steps=tuple(steps[n, span].tolist()),
                token_logprobs=tuple(log_probs[n, span].tolist()),
                nfe=nfe,
                near_ties=near_ties if self.has_margins else None,
                all_mask_starts=all_mask,
                note=self.note,
                **traced,
            )
            yield row, score


# ---------------------------------------------------------------- signals

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SECOND_AFTER = 2.0  # seconds: a launcher repeats the Ctrl-C that its processes have already received

_pending: tuple[int, float] | None = None  # the deferred signal, and when it arrived


class Interrupted(SystemExit):
    """A signal has ended the run. The exit status is 128 + its number, as in a shell."""

    code: int

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
