"""A run's order of a window through the reference: the values along it, and the rule at each of its states.

The order is the run's; every number is the reference's. Where the rule of the reference picks otherwise than the run,
the pick is either wrong or within a tie: then some change of the reference's own logits by at most `NEAR_TIE` gives the
run's pick. So a tie at one step excuses neither a value nor a later pick, and nothing that the run reports excuses it.

A rule that the reference does not have is the run's own, which is shown one lane in float64 (`RunsRule`).

Shapes: L row length, W block width, C masked positions, D features, V tokens.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import torch

from lm_eval_duel import reference, rules
from lm_eval_duel.audit.networks import OneRow
from lm_eval_duel.core.decision import NEAR_TIE
from lm_eval_duel.core.lanes import Lanes
from lm_eval_duel.core.predictions import Predictions

PAPER: dict[type[rules.Rule], Callable[..., reference.Rule]] = {
    rules.LeftToRight: lambda rule: reference.left_to_right(rule.k),
    rules.Greedy: lambda rule: reference.greedy(rule.k),
    rules.Margin: lambda rule: reference.margin(rule.k),
    rules.Entropy: lambda rule: reference.entropy(rule.k),
    rules.Threshold: lambda rule: reference.threshold(rule.mu),
    rules.Klass: lambda rule: reference.klass(rule.mu, rule.nu),
}
# Changes of logits within a tie: how those of the positions that the run picked move, how those of the others do, and
# whether the top one of each position moves alone.
TIES = [
    (picked * NEAR_TIE, others * NEAR_TIE, top_alone)
    for picked, others, top_alone in itertools.product((1, -1), (1, -1), (True, False))
]


def rule_of(rule: rules.Rule) -> Callable[..., reference.Rule] | None:
    """The reference's own rule for a rule of the paper; None for other rules."""
    make = PAPER.get(type(rule))
    if make is None or getattr(rule, "strict", False):
        return None
    if isinstance(rule, rules.Klass) and not _as_printed(rule):
        return None
    return lambda: make(rule)


def _as_printed(rule: rules.Klass) -> bool:
    """True for KLASS as the paper prints it: one step of history, KL(previous || current), within a block."""
    return rule.history == 1 and rule.kl == "paper" and not rule.across


class Followed:
    """A recorded order as a rule of the reference: `steps` of the positions, counted from 0 in each block.

    `F` is asked at each state. `other_picks` counts where it picks otherwise, `ties` where that is within a tie.
    """

    def __init__(self, network: OneRow, steps: dict[int, int], F: reference.Rule):
        self.network = network
        self.steps = steps
        self.F = F
        self.step = 0
        self.other_picks = 0
        self.ties = 0
        self.is_greedy = True
        self.top_tokens_tie = False

    def __call__(self, log_P: torch.Tensor, M: list[int]) -> list[int]:
        picked = [ell for ell in M if self.steps[ell] == self.step]
        if {*self.F(log_P, M)} != {*picked}:
            # Where all positions are equal because the network has relative positions, the lowest is first: no tie.
            decided = self.network.relative_positions and all_equal(log_P, M)
            if not decided and in_a_tie(self.F, log_P, M, picked):
                self.ties += 1
            else:
                self.other_picks += 1
        if isinstance(self.F, RunsRule):
            self.F.advance()
        for ell in picked:
            self._compare_with_top(log_P[ell], self.network.x[ell])
        self.step = 0 if len(picked) == len(M) else self.step + 1
        return picked

    def _compare_with_top(self, log_p: torch.Tensor, token: int) -> None:
        """Note it if a token is not the most probable one of its position, with log-probabilities log_p (V,)."""
        first, *rest = log_p.topk(min(2, len(log_p))).values.tolist()
        behind = first - float(log_p[token])
        if behind >= NEAR_TIE:
            self.is_greedy = False
        elif rest and first - rest[0] < NEAR_TIE:  # either of two tokens may count as the top one
            self.top_tokens_tie = True


class Watched:
    """A rule of the reference that notes whether a pick was a tie, other than that of a row of masks."""

    def __init__(self, F: reference.Rule):
        self.F = F
        self.tied = False

    def __call__(self, log_P: torch.Tensor, M: list[int]) -> list[int]:
        picked = self.F(log_P, M)
        if not all_equal(log_P, M):
            moves = (self.F(moved(log_P, M, picked, *by), M) for by in TIES)
            self.tied |= any({*pick} != {*picked} for pick in moves)
        return picked


def all_equal(log_P: torch.Tensor, M: list[int]) -> bool:
    """True if all masked positions have one distribution."""
    return bool((log_P[M] == log_P[M[0]]).all())


def in_a_tie(F: reference.Rule, log_P: torch.Tensor, M: list[int], picked: list[int]) -> bool:
    """True if some change of the logits within a tie makes F pick `picked`."""
    return any({*F(moved(log_P, M, picked, *by), M)} == {*picked} for by in TIES)


def moved(log_P: torch.Tensor, M: list[int], picked: list[int], by: float, others_by: float, top: bool) -> torch.Tensor:
    """log_P with the logits of the picked positions of M moved by at most `by`, and of the other ones by `others_by`.

    `top`: the top logit alone; else those above the mean of log_P up and those below it down, which changes entropies
    most.
    """
    at = torch.tensor(M, device=log_P.device)
    rows = log_P[at]  # (M, V)
    moves = log_P.new_tensor([by if ell in picked else others_by for ell in M])[:, None]  # (M, 1)
    if top:
        rows = rows.scatter_add(1, rows.argmax(1, keepdim=True), moves)
    else:
        rows = rows + moves * (rows + reference.entropy_nats(rows)[:, None]).sign()
    changed = log_P.clone()
    changed[at] = rows.log_softmax(1)
    return changed


# ---------------------------------------------------------------- a rule that the reference does not have


class OneLane(Predictions):
    """The distributions of one lane, as the run's rules read them; `inputs` (C, D): of the LM head."""

    def __init__(self, masked: torch.Tensor, log_P: torch.Tensor, inputs: torch.Tensor | None):
        every = torch.arange(len(log_P), device=log_P.device)  # (C,)
        none = torch.zeros(log_P.shape[1], dtype=torch.bool, device=log_P.device)  # (V,) excluded columns
        all_mask = torch.zeros(1, dtype=torch.bool, device=log_P.device)  # the reference has made its exact tie
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
        self.rule = rule
        self.network = network
        self.chain = chain
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

        inputs = None if network.inputs is None else network.inputs[M]  # (C, D)
        if inputs is not None and all_equal(log_P, M):  # an exact tie, for rules that read features, too
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
