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
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, cast

import torch

from lm_eval_duel import signals
from lm_eval_duel.core.budget import Budget, free
from lm_eval_duel.core.decision import Decision, UnmaskingRule
from lm_eval_duel.core.lanes import Lanes, Queue
from lm_eval_duel.core.scores import Accumulator, Counts
from lm_eval_duel.core.tokens import Choose
from lm_eval_duel.errors import NotFinite, RuleStalled

if TYPE_CHECKING:
    from lm_eval_duel.core.denoiser import Denoiser
    from lm_eval_duel.core.predictions import Predictions
    from lm_eval_duel.core.view import View

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
        rule: UnmaskingRule,
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
                finished = ~active.masked.any(1)  # (R,)
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
        rule: UnmaskingRule,
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

    def _refill(self, view: View, rule: UnmaskingRule, active: Lanes | None, queue: Queue) -> Lanes:
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

    def fits(self, view: View, rule: UnmaskingRule, *lanes: Lanes) -> int:
        """How many lanes as expensive as the most expensive of `lanes` one network call holds."""
        cost = int(torch.cat([view.cost(part) for part in lanes]).max())
        values = 0
        if not self.denoiser.splits_head:
            values = cost * self.denoiser.vocab_size
        elif rule.dense_memory:
            values = 4 * max(part.masked.shape[1] for part in lanes) * self.denoiser.vocab_size
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
        rule: UnmaskingRule,
        lanes: Lanes,
        choose: Choose,
        results: Accumulator,
        numbers: Sequence[int],
    ) -> Lanes:
        """The lanes after one step, which is added to the results."""
        try:
            with without_autocast(self.denoiser):
                predictions = view(lanes)
                if choose.teacher_forced:
                    predictions.expect(choose(predictions, lanes, lanes.masked))
                decision = decide(rule, predictions, lanes, numbers)
                tokens = choose(predictions, lanes, decision.pick)  # (R, W)
                log_prob = predictions.log_prob(tokens)  # (R, W)
        except NotFinite as error:
            window = numbers[int(lanes.row[error.lane])]
            raise NotFinite(f"{error} {_place(lanes, error.lane, numbers)}", window) from None
        after = lanes.reveal(decision.pick, tokens, decision.memory)  # before the results: it may run out of memory
        results.add(lanes, decision, predictions, tokens, log_prob)
        return after


def without_autocast(denoiser: Denoiser) -> torch.autocast:
    """A context in which an autocast around the call does not count: numbers are those of the dtype in the spec."""
    return torch.autocast(denoiser.device.type, enabled=False)


def decide(rule: UnmaskingRule, predictions: Predictions | None, lanes: Lanes, numbers: Sequence[int]) -> Decision:
    """The rule's decision. `predictions` is None for a fixed rule; `numbers` as in `RevealLoop.run`.

    Raises RuleStalled for a pick that is empty, unless the rule may wait.
    """
    try:
        decision = rule(cast("Predictions", predictions), lanes)
        picked = decision.pick.any(1)  # (R,)
        if not rule.may_pick_none and not picked.all():
            raise RuleStalled(f"Rule {rule} picked nothing.", lane=int((~picked).nonzero()[0]))
    except RuleStalled as error:
        window = numbers[int(lanes.row[error.lane])]
        raise RuleStalled(f"{error} {_place(lanes, error.lane, numbers)}", window) from None
    return decision


def _place(lanes: Lanes, lane: int, numbers: Sequence[int]) -> str:
    position = int(lanes.start[lane] - lanes.origin[lane])
    return (
        f"(Window {numbers[int(lanes.row[lane])]}, block at target position {position}, step {int(lanes.step[lane])}.)"
    )
