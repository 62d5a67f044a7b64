"""A rule that the reference does not have: the run's own, which is shown one lane in float64.

Shapes: W block width, C masked positions, D features, V tokens.
"""

from __future__ import annotations

import dataclasses

import torch

from lm_eval_duel import rules
from lm_eval_duel.audit.one_row import OneRow
from lm_eval_duel.core.lanes import Lanes
from lm_eval_duel.core.predictions import Predictions


class OneLane(Predictions):
    """The distributions of one lane, as the run's rules read them; `inputs` (C, D): of the LM head."""

    def __init__(self, masked: torch.Tensor, log_P: torch.Tensor, inputs: torch.Tensor | None):
        every = torch.arange(len(log_P), device=log_P.device)  # (C,)
        none = torch.zeros(log_P.shape[1], dtype=torch.bool, device=log_P.device)  # (V,)
        all_mask = torch.zeros(1, dtype=torch.bool, device=log_P.device)
        super().__init__(masked, all_mask, log_P, every, lambda logits: logits, none)
        self.inputs = inputs

    def _one_input(self) -> torch.Tensor:
        assert self.inputs is not None  # under guidance there are two, and no run has a rule that reads them
        return self.inputs


class RunsRule:
    """A rule of the run as a rule of the reference: it is shown one lane, in float64.

    It may be asked several times at a state; `advance` goes on to the next one, with what it remembered when it was
    asked first. `chain`: its lane is the whole target, for a rule that keeps a history over blocks.
    """

    def __init__(self, rule: rules.Rule, network: OneRow, chain: bool = False):
        self.rule, self.network, self.chain = rule, network, chain
        self.lane: Lanes | None = None
        self.decided: rules.Decision | None = None

    def __call__(self, log_P: torch.Tensor, M: list[int]) -> list[int]:
        network = self.network
        begin, end = (network.origin, network.end) if self.chain else network.span(M[0])
        if self.lane is None or int(self.lane.start) != begin:
            self.lane = self._fresh(begin, end, log_P.device)
        masked = torch.zeros_like(self.lane.masked)  # (1, W)
        masked[0, [ell - begin for ell in M]] = True
        tokens = torch.tensor([network.x[begin:end]], device=log_P.device).masked_fill(masked, -1)  # (1, W)
        self.lane = dataclasses.replace(self.lane, masked=masked, tokens=tokens)
        inputs = None if network.inputs is None else network.inputs[M]
        if inputs is not None and (log_P[M] == log_P[M[0]]).all():  # an exact tie
            inputs = inputs[:1].expand_as(inputs)
        decision = self.rule(OneLane(masked, log_P[M], inputs), self.lane)
        if isinstance(decision, torch.Tensor):
            decision = rules.Decision(decision)
        self.decided = self.decided or decision
        return [begin + int(position) for position in decision.pick[0].nonzero()]

    def advance(self) -> None:
        """Go on to the next step."""
        if self.lane is not None and self.decided is not None:
            self.lane = dataclasses.replace(self.lane, step=self.lane.step + 1, memory=self.decided.memory)
        self.decided = None

    def _fresh(self, begin: int, end: int, device: torch.device) -> Lanes:
        """The lane of a block at its start."""
        row, start, origin, width = (
            torch.tensor([n], device=device) for n in (0, begin, self.network.origin, end - begin)
        )
        tokens = torch.zeros(1, end - begin, dtype=torch.int64, device=device)  # (1, W)
        return Lanes(row, start, origin, width, tokens, tokens.bool(), torch.zeros_like(row))
