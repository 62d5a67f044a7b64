"""A rule of the run that the paper does not have, as a rule of the reference: it is shown one lane, in float64.

Its definition is the run's. What is compared is how the run asks it: the distributions that it sees, its lane, its
memory, and the order that its picks make.

Shapes: W block width, C masked positions, D features, V tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from lm_eval_duel import rules
from lm_eval_duel.audit.checked import RUNS_RULE, Recomputed
from lm_eval_duel.audit.networks import OneRow
from lm_eval_duel.audit.replay import StepRule, all_equal, along_the_order, rule_of
from lm_eval_duel.core.lanes import Lanes
from lm_eval_duel.core.predictions import Predictions
from lm_eval_duel.core.scores import Score


def along_any_order(network: OneRow, rule: rules.Rule, score: Score) -> Recomputed:
    """`along_the_order` under the reference's own rule; for a rule that the paper does not have, under the run's."""
    make = rule_of(rule)
    if make is not None:
        return along_the_order(network, make, score)
    again = along_the_order(network, _runs_rule(network, rule), score, rule.may_pick_none)
    return dataclasses.replace(again, route=RUNS_RULE)


def _runs_rule(network: OneRow, rule: rules.Rule) -> Callable[[], RunsRule]:
    """The run's rule, which may keep a history over blocks: the target is then one chain of them."""
    if not rule.spans_blocks:
        return lambda: RunsRule(rule, network)
    chained = rules.blockwise(rule, network.block)
    network.blocks = [network.scored]
    return lambda: RunsRule(chained, network, chain=True)


class OneLane(Predictions):
    """The distributions of one lane, as the run's rules read them; `inputs` (C, D): of the LM head."""

    def __init__(self, masked: torch.Tensor, log_P: torch.Tensor, inputs: torch.Tensor | None):
        positions, columns = log_P.shape
        device = log_P.device
        all_mask = torch.zeros(1, dtype=torch.bool, device=device)  # the reference has made its exact tie
        row = torch.arange(positions, device=device)  # (C,) each has features of its own
        excluded = torch.zeros(columns, dtype=torch.bool, device=device)  # (V,) they are at -inf already
        super().__init__(masked, all_mask, log_P, row, _unchanged, excluded)
        self.inputs = inputs

    def _one_input(self) -> torch.Tensor:
        assert self.inputs is not None  # under guidance there are two, and no run has a rule that reads them
        return self.inputs


def _unchanged(logits: torch.Tensor) -> torch.Tensor:
    return logits


class RunsRule(StepRule):
    """A rule of the run as a rule of the reference: it is shown one lane, in float64.

    It may be asked several times at a state; `advance` goes on to the next one, with what it remembered when it was
    asked first. `chain`: its lane is the whole target, for a rule that keeps a history over blocks.
    """

    def __init__(self, rule: rules.Rule, network: OneRow, chain: bool = False):
        self.rule = rule
        self.network = network
        self.chain = chain
        self.lane: Lanes | None = None
        self.decided: rules.Decision | None = None

    def __call__(self, log_P: torch.Tensor, M: list[int]) -> list[int]:
        network = self.network
        begin, end = (network.origin, network.end) if self.chain else network.span(M[0])
        if self.lane is None or int(self.lane.start) != begin:  # a block begins
            self.lane = self._fresh(begin, end, log_P.device)
        masked = torch.zeros_like(self.lane.masked)  # (1, W)
        masked[0, [ell - begin for ell in M]] = True
        tokens = torch.tensor([network.x[begin:end]], device=log_P.device)  # (1, W)
        tokens = tokens.masked_fill(masked, -1)
        self.lane = dataclasses.replace(self.lane, masked=masked, tokens=tokens)

        inputs = None if network.inputs is None else network.inputs[M]  # (C, D)
        if inputs is not None and all_equal(log_P, M):  # an exact tie, for rules that read features, too
            inputs = inputs[:1].expand_as(inputs)
        decision = self.rule(OneLane(masked, log_P[M], inputs), self.lane)
        if isinstance(decision, torch.Tensor):
            decision = rules.Decision(decision)
        if self.decided is None:
            self.decided = decision
        picked = decision.pick[0].nonzero()  # (picks, 1)
        return [begin + int(position) for position in picked]

    def advance(self) -> None:
        if self.lane is not None and self.decided is not None:
            step = self.lane.step + 1
            self.lane = dataclasses.replace(self.lane, step=step, memory=self.decided.memory)
        self.decided = None

    def _fresh(self, begin: int, end: int, device: torch.device) -> Lanes:
        """The lane of a block at its start."""

        def plane(number: int) -> torch.Tensor:
            return torch.tensor([number], device=device)

        width = end - begin
        tokens = torch.zeros(1, width, dtype=torch.int64, device=device)  # (1, W)
        return Lanes(
            row=plane(0),
            start=plane(begin),
            origin=plane(self.network.origin),
            width=plane(width),
            tokens=tokens,
            masked=tokens.bool(),
            step=plane(0),
        )
