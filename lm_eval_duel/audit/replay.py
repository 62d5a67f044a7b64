"""A run's order of a window through the reference: the values along it, and the rule at each of its states.

The order is the run's; every number is the reference's. Where the rule of the reference picks otherwise than the run,
the pick is either wrong or within a tie: then some change of the reference's own logits by at most `NEAR_TIE` gives the
run's pick. So a tie at one step excuses neither a value nor a later pick, and nothing that the run reports excuses it.

Shapes: L row length, W block width, D features, V tokens.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from lm_eval_duel import reference, rules
from lm_eval_duel.audit.one_row import OneRow
from lm_eval_duel.core.decision import NEAR_TIE
from lm_eval_duel.core.lanes import Lanes
from lm_eval_duel.core.predictions import Predictions

PAPER: dict[type[rules.Rule], Callable[..., reference.Rule]] = {
    rules.LeftToRight: lambda rule: reference.left_to_right(rule.k),
    rules.Greedy: lambda rule: reference.greedy(rule.k),
    rules.Margin: lambda rule: reference.margin(rule.k),
    rules.Entropy: lambda rule: reference.entropy(rule.k),
    rules.Threshold: lambda rule: reference.threshold(rule.mu),
}
# how the top logit of the positions that the run picked, and of the others, may move
TIES = [(sign * NEAR_TIE, other * NEAR_TIE) for sign, other in itertools.product((1, -1), repeat=2)]


class NoOrder(Exception):
    """The recorded steps of a run reveal some position never."""


class Replayed(NamedTuple):
    """A run's order through the reference."""

    path: reference.Path
    other_picks: int  # states at which the rule picks otherwise
    ties: int  # the same, but within a tie of the reference's numbers
    is_greedy: bool | None  # None: two tokens tie
    own_order: float | None  # log-probability along the order of the reference; None: it is that of the run


def rule_of(rule: rules.Rule) -> Callable[..., reference.Rule] | None:
    """The reference's own rule for a rule of the paper; None for other rules."""
    make = PAPER.get(type(rule))
    return None if make is None or getattr(rule, "strict", False) else lambda: make(rule)


def replay(network: OneRow, make_rule: Callable[[], reference.Rule], steps: Sequence[int]) -> Replayed:
    """Follow the recorded steps of each target position, counted from 0 in each block.

    Raises:
        NoOrder: a position that is scored has no step.
    """
    of = dict(zip(range(network.origin, network.end), steps, strict=True))
    if any(of[ell] < 0 for ell in network.scored):
        raise NoOrder
    followed = Followed(network.x, of, make_rule())
    arguments = network.x, network.blocks, network
    path = reference.log_likelihood(*arguments, followed, network.m, network.relative_positions)
    own_order = None
    if followed.other_picks or followed.ties:
        own = reference.log_likelihood(*arguments, make_rule(), network.m, network.relative_positions)
        own_order = own.ll
    is_greedy = None if followed.unclear and followed.is_greedy else followed.is_greedy
    return Replayed(path, followed.other_picks, followed.ties, is_greedy, own_order)


class Followed:
    """A recorded order as a rule of the reference. `F` is asked at each of its states, and what it says is counted."""

    def __init__(self, x: reference.Ids, steps: dict[int, int], F: reference.Rule):
        self.x, self.steps, self.F, self.step = x, steps, F, 0
        self.other_picks = self.ties = 0
        self.is_greedy, self.unclear = True, False

    def __call__(self, log_P: torch.Tensor, M: list[int]) -> list[int]:
        picked = [ell for ell in M if self.steps[ell] == self.step]
        if min(self.steps[ell] for ell in M) < self.step:
            raise NoOrder
        if {*self.F(log_P, M)} != {*picked}:
            tie = any({*self.F(moved(log_P, M, picked, *by), M)} == {*picked} for by in TIES)
            self.ties, self.other_picks = self.ties + tie, self.other_picks + (not tie)
        if isinstance(self.F, RunsRule):
            self.F.advance()
        for ell in picked:
            first, second = log_P[ell].topk(min(2, len(log_P[ell]))).values.tolist()[:2]
            behind = first - float(log_P[ell, self.x[ell]])
            self.is_greedy &= behind < NEAR_TIE
            self.unclear |= behind < NEAR_TIE and first - second < NEAR_TIE
        self.step = 0 if len(picked) == len(M) else self.step + 1
        return picked


class Watched:
    """A rule of the reference that notes whether a pick was a tie, other than that of a row of masks."""

    def __init__(self, F: reference.Rule):
        self.F, self.tied = F, False

    def __call__(self, log_P: torch.Tensor, M: list[int]) -> list[int]:
        picked = self.F(log_P, M)
        if not (log_P[M] == log_P[M[0]]).all():
            self.tied |= any({*self.F(moved(log_P, M, picked, *by), M)} != {*picked} for by in TIES)
        return picked


def moved(log_P: torch.Tensor, M: list[int], picked: list[int], by: float, others_by: float) -> torch.Tensor:
    """log_P with the top logit of the picked positions of M moved by `by`, and of the other ones by `others_by`."""
    at = torch.tensor(M, device=log_P.device)
    rows = log_P[at]  # (M, V)
    moves = log_P.new_tensor([by if ell in picked else others_by for ell in M])  # (M,)
    changed = log_P.clone()
    changed[at] = rows.scatter_add(1, rows.argmax(1, keepdim=True), moves[:, None]).log_softmax(1)
    return changed


# ---------------------------------------------------------------- rules that the reference does not have


class ReadsFeatures(Exception):
    """A rule reads the input of the LM head, and there are two."""


class OneLane(Predictions):
    """The distributions of one lane, as the run's rules read them; `inputs` (C, D): of the LM head."""

    def __init__(self, masked: torch.Tensor, log_P: torch.Tensor, inputs: torch.Tensor | None):
        every = torch.arange(len(log_P), device=log_P.device)  # (C,)
        none = torch.zeros(log_P.shape[1], dtype=torch.bool, device=log_P.device)  # (V,)
        all_mask = torch.zeros(1, dtype=torch.bool, device=log_P.device)
        super().__init__(masked, all_mask, log_P, every, lambda logits: logits, none)
        self.inputs = inputs

    def _one_input(self) -> torch.Tensor:
        if self.inputs is None:
            raise ReadsFeatures
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
