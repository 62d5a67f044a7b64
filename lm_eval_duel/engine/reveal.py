"""The reveal loop (the paper, Algorithms 1 and 2): predict, pick, choose tokens, add up log-probabilities.

    while lanes:
        predictions = view(lanes)
        decision = rule(predictions, lanes)
        tokens = choose(predictions, lanes, decision.pick)
        results.add(lanes, decision, predictions, tokens, predictions.log_prob(tokens))
        lanes = lanes.reveal(decision.pick, tokens)          finished lanes are yielded, waiting ones enter

Scoring, sampling, the ELBO and the lattice all run this loop, so they cannot drift apart.

Shapes: N windows, R lanes, W block width.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, cast

import torch

from lm_eval_duel import rules, signals
from lm_eval_duel.engine.budget import Budget, free
from lm_eval_duel.engine.choose import Choose
from lm_eval_duel.engine.lanes import Lanes, Queue
from lm_eval_duel.engine.results import Accumulator, Counts
from lm_eval_duel.errors import DuelError, NotFinite, RuleStalled

if TYPE_CHECKING:
    from lm_eval_duel.denoisers.base import Denoiser, View
    from lm_eval_duel.denoisers.predictions import Predictions

log = logging.getLogger("lm_eval.duel_mdm")


class RevealLoop:
    """The loop on one network, with the budget of a call and the counts of what has been computed."""

    def __init__(self, denoiser: Denoiser, budget: Budget):
        self.denoiser, self.budget = denoiser, budget
        self.counts = Counts()
        self._halved = False

    def run(
        self,
        view: View,
        rule: rules.Rule,
        queue: Queue,
        choose: Choose,
        results: Accumulator,
        numbers: Sequence[int],
    ) -> Iterator[Lanes]:
        """Reveal all lanes of `queue`, and yield those that finish.

        The caller may put the lanes that follow into the queue before it takes the next ones. `numbers`: the index of
        each window, for error messages.
        """
        rows, forwards = view.evaluated, view.forwards
        active: Lanes | None = None
        try:
            while active is not None or queue:
                active = self._refill(view, rule, active, queue)
                active = self._step_or_halve(view, rule, active, queue, choose, results, numbers)
                finished = ~active.hidden.any(1)  # (R,)
                if finished.any():
                    done, active = active.select(finished), active.select(~finished)
                    active = active if len(active) else None
                    yield done
                signals.check()
        finally:
            self.counts.forwards += view.forwards - forwards
            self.counts.rows += view.evaluated - rows

    def _step_or_halve(
        self,
        view: View,
        rule: rules.Rule,
        active: Lanes,
        queue: Queue,
        choose: Choose,
        results: Accumulator,
        numbers: Sequence[int],
    ) -> Lanes:
        """The lanes after one step. On out-of-memory half of them go back to the queue, and the step is retried."""
        while True:
            try:
                return self._step(view, rule, active, choose, results, numbers)
            except torch.OutOfMemoryError:
                if len(active) == 1:
                    raise
            # outside the handler, so that the tensors of the step are released
            self._halve()
            half = len(active) // 2
            queue.put_first(active.select(slice(half, None)))
            active = active.select(slice(0, half))

    def _refill(self, view: View, rule: rules.Rule, active: Lanes | None, queue: Queue) -> Lanes:
        """The batch with as many waiting lanes as the budget allows."""
        while queue:
            batch = [] if active is None else [active]
            count = sum(map(len, batch))
            room = self.fits(view, rule, queue.first(), *batch) - count
            if room <= 0:
                break
            entering = queue.take(room)
            # later lanes may be more expensive than the first one
            while (fitting := self.fits(view, rule, entering, *batch) - count) < len(entering):
                kept = fitting if fitting > 0 else len(entering) // 2
                queue.put_first(entering.select(slice(kept, None)))
                entering = entering.select(slice(0, kept))
            try:
                active = entering if active is None else active.concat(entering)
            except torch.OutOfMemoryError:
                queue.put_first(entering)
                self._halve()
                break
        assert active is not None  # it was, or the queue was not empty
        return active

    def fits(self, view: View, rule: rules.Rule, *lanes: Lanes) -> int:
        """How many lanes as expensive as the most expensive of `lanes` one network call holds."""
        cost = int(torch.cat([view.cost(part) for part in lanes]).max())
        values = 0
        if not self.denoiser.splits_head:
            values = cost * self.denoiser.vocab_size
        elif rule.dense_memory:
            values = 4 * max(part.hidden.shape[1] for part in lanes) * self.denoiser.vocab_size
        return self.budget.rows(cost, values)

    def _halve(self) -> None:
        """Halve the budget after an out-of-memory error; logged once."""
        if not self._halved:
            log.warning("Out of memory at %d tokens per call: halving the batch until it fits", self.budget.tokens)
        self._halved = True
        self.budget = self.budget.halved()
        free(self.denoiser.device)

    def _step(
        self,
        view: View,
        rule: rules.Rule,
        lanes: Lanes,
        choose: Choose,
        results: Accumulator,
        numbers: Sequence[int],
    ) -> Lanes:
        """The lanes after one step, which is added to the results."""
        try:
            predictions = view(lanes)
            if choose.teacher_forced:
                predictions.expect(choose(predictions, lanes, lanes.hidden))
            decision = decide(rule, predictions, lanes, numbers)
            tokens = choose(predictions, lanes, decision.pick)  # (R, W)
            log_prob = predictions.log_prob(tokens)  # (R, W)
        except NotFinite as error:
            window = numbers[int(lanes.row[error.lane])]
            raise NotFinite(f"{error} {_place(lanes, error.lane, numbers)}", window) from None
        after = lanes.reveal(decision.pick, tokens, decision.memory)  # before the results: it may run out of memory
        results.add(lanes, decision, predictions, tokens, log_prob)
        return after


def decide(rule: rules.Rule, predictions: Predictions | None, lanes: Lanes, numbers: Sequence[int]) -> rules.Decision:
    """The rule's decision, checked. `predictions` is None for a fixed rule; `numbers` as in `RevealLoop.run`.

    Raises RuleStalled for a pick that is empty, unless the rule may wait, or that is not hidden.
    """
    try:
        decision = rule(cast("Predictions", predictions), lanes)
    except (DuelError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if type(rule).__module__.partition(".")[0] == "lm_eval_duel":
            raise
        raise DuelError(f"Rule {rule} raised {type(error).__name__}: {error} ({_line_of(rule, error)}).") from error
    if isinstance(decision, torch.Tensor):
        decision = rules.Decision(decision)
    if not isinstance(decision, rules.Decision):
        raise DuelError(
            f"Rule {rule} must return a Decision or a boolean plane; got {type(decision).__name__}. "
            "The plane is a torch tensor."
        )
    pick, lead = decision.pick, decision.lead
    for what, plane in (("pick", pick), ("lead", lead), *(("memory", plane) for plane in decision.memory)):
        if not isinstance(plane, torch.Tensor) and not (what == "lead" and plane is None):
            raise DuelError(f"The {what} of rule {rule} is a torch tensor; got {type(plane).__name__}.")
        if plane is not None and plane.device != lanes.hidden.device:
            raise DuelError(
                f"The {what} of rule {rule} is on {plane.device}, but the network is on {lanes.hidden.device}: make it "
                "from the rule's arguments, or with device=lanes.hidden.device."
            )
    if pick.shape != lanes.hidden.shape or pick.dtype != torch.bool:
        raise DuelError(
            f"Rule {rule} must pick a boolean plane {tuple(lanes.hidden.shape)}; got {pick.dtype} {tuple(pick.shape)}."
        )
    if lead is not None and lead.shape != lanes.row.shape:
        raise DuelError(f"The lead of rule {rule} is one number for each lane ({len(lanes)}); got {tuple(lead.shape)}.")
    if any(plane.shape[:2] != pick.shape for plane in decision.memory):
        raise DuelError(f"The memory of rule {rule} must be tensors of the shape (R, W, ...) = {(*pick.shape, ...)}.")
    stalled = (~pick.any(1) & ~_waits(rule, decision, lanes)) | (pick & ~lanes.hidden).any(1)  # (R,)
    if stalled.any():
        lane = int(stalled.nonzero()[0])
        what = "picked a position that is not hidden" if pick[lane].any() else "picked nothing"
        window = numbers[int(lanes.row[lane])]
        raise RuleStalled(f"Rule {rule} {what}. {_place(lanes, lane, numbers)}", window)
    return decision


def _line_of(rule: rules.Rule, error: Exception) -> str:
    """The line of a user's rule that raised `error`."""
    frames = traceback.extract_tb(error.__traceback__)
    file = getattr(sys.modules.get(type(rule).__module__), "__file__", None)
    own = [frame for frame in frames if frame.filename == file] or frames
    return f"{own[-1].filename}, line {own[-1].lineno}"


def _waits(rule: rules.Rule, decision: rules.Decision, lanes: Lanes) -> torch.Tensor:
    """Which lanes may pick nothing now, because the rule's step or memory moves on, (R,)."""
    waits = torch.full_like(lanes.row, rule.may_wait and rule.reads_step, dtype=torch.bool)  # (R,)
    if rule.may_wait and not rule.reads_step and not decision.pick.any(1).all():
        before = lanes.memory or tuple(torch.zeros_like(plane) for plane in decision.memory)
        for old, new in zip(before, decision.memory, strict=True):
            waits |= (old != new).flatten(1).any(1)
    return waits


def _place(lanes: Lanes, lane: int, numbers: Sequence[int]) -> str:
    position = int(lanes.start[lane] - lanes.origin[lane])
    return (
        f"(Window {numbers[int(lanes.row[lane])]}, block at target position {position}, step {int(lanes.step[lane])}.)"
    )
