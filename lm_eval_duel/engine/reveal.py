"""The reveal loop (the paper, Algorithms 1 and 2): predict, pick, choose tokens, add up log-probabilities.

    while lanes:
        predictions = view(lanes)
        decision = rule(predictions, lanes)
        tokens = choose(predictions, lanes, decision.pick)
        results.add(lanes, decision, predictions, tokens, predictions.log_prob(tokens))
        lanes = lanes.reveal(decision.pick, tokens)          finished lanes are yielded, waiting ones enter

Scoring, sampling, the ELBO and the lattice are this one loop, so they cannot drift apart.

Shapes: N windows, R lanes, W block width.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import cast

import torch

from lm_eval_duel import rules
from lm_eval_duel import signals as interrupts
from lm_eval_duel.denoisers.base import Denoiser
from lm_eval_duel.denoisers.predictions import Predictions
from lm_eval_duel.denoisers.views import View
from lm_eval_duel.engine.budget import Budget, free
from lm_eval_duel.engine.choose import Choose
from lm_eval_duel.engine.lanes import Lanes, Queue
from lm_eval_duel.engine.results import Accumulator, Counts
from lm_eval_duel.errors import DuelError, NotFinite, RuleStalled

log = logging.getLogger("lm_eval.duel_mdm")


class RevealLoop:
    """The loop on one network, with what a call may hold, and what has been computed so far."""

    def __init__(self, denoiser: Denoiser, budget: Budget):
        self.denoiser, self.budget = denoiser, budget
        self.counts = Counts()
        self._short = False  # memory has ended once

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

        The reader may put the lanes that follow in the queue before it asks for the next ones. `numbers`: of the
        group's windows, by which errors name them.
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
                interrupts.check()
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
        """The lanes after one step; on out-of-memory half of them wait and the step is taken by the others."""
        while True:
            try:
                return self._step(view, rule, active, choose, results, numbers)
            except torch.OutOfMemoryError:
                if len(active) == 1:
                    raise
            # outside the handler nothing holds the tensors of the step any more
            self._halve()
            half = len(active) // 2
            queue.put_first(active.select(slice(half, None)))
            active = active.select(slice(0, half))

    def _refill(self, view: View, rule: rules.Rule, active: Lanes | None, queue: Queue) -> Lanes:
        """The batch with waiting lanes added while the budget allows."""
        while queue:
            there = [] if active is None else [active]
            room = self.fits(view, rule, queue.first(), *there) - sum(map(len, there))
            if room <= 0:
                break
            entering = queue.take(room)
            try:
                active = entering if active is None else active.concat(entering)
            except torch.OutOfMemoryError:
                queue.put_first(entering)
                self._halve()
                break
        assert active is not None  # it was, or the queue was not empty
        return active

    def fits(self, view: View, rule: rules.Rule, *lanes: Lanes) -> int:
        """How many lanes like the dearest of `lanes` one network call holds."""
        cost = max(int(view.cost(each).max()) for each in lanes)
        values = 0
        if not self.denoiser.splits_head:
            values = cost * self.denoiser.vocab_size
        elif rule.dense_memory:
            values = 4 * max(each.hidden.shape[1] for each in lanes) * self.denoiser.vocab_size
        return self.budget.rows(cost, values)

    def _halve(self) -> None:
        """Go on with half the budget: memory has ended."""
        if not self._short:
            log.warning(
                "memory ended at network calls of %d tokens: they are halved until they fit", self.budget.tokens
            )
        self._short = True
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
        """One step of a batch, added to the results; the lanes after it."""
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


def decide(rule: rules.Rule, predictions: Predictions | None, lanes: Lanes, group: Sequence[int]) -> rules.Decision:
    decision = rule(cast(Predictions, predictions), lanes)  # None for a fixed rule
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
                f"The {what} of rule {rule} lies on {plane.device}, and the network on {lanes.hidden.device}: make it "
                "from the tensors that the rule is given, or with device=lanes.hidden.device."
            )
    if pick.shape != lanes.hidden.shape or pick.dtype != torch.bool:
        raise DuelError(
            f"Rule {rule} must pick a boolean plane {tuple(lanes.hidden.shape)}; got {pick.dtype} {tuple(pick.shape)}."
        )
    if lead is not None and lead.shape != lanes.row.shape:
        raise DuelError(f"The lead of rule {rule} is one number a lane, {len(lanes)}; got {tuple(lead.shape)}.")
    if any(plane.shape[:2] != pick.shape for plane in decision.memory):
        raise DuelError(f"The memory of rule {rule} is tensors with leading (R, W) = {tuple(pick.shape)}.")
    stalled = ~pick.any(1) | (pick & ~lanes.hidden).any(1)  # (R,)
    if stalled.any():
        lane = int(stalled.nonzero()[0])
        what = "picked a position that is not hidden" if pick[lane].any() else "picked nothing"
        window = group[int(lanes.row[lane])]
        raise RuleStalled(f"Rule {rule} {what}. {_place(lanes, lane, group)}", window)
    return decision


def _place(lanes: Lanes, lane: int, group: Sequence[int]) -> str:
    position = int(lanes.start[lane] - lanes.origin[lane])
    return f"(Window {group[int(lanes.row[lane])]}, block at target position {position}, step {int(lanes.step[lane])}.)"
