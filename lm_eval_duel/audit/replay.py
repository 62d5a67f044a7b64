"""A run's order of a window through the reference: the values along it, and the rule at each of its states.

The order is the run's; every number is the reference's. Where the rule of the reference picks otherwise than the run,
the pick is either wrong or within a tie: then some change of the reference's own logits by at most `NEAR_TIE` gives the
run's pick. So a tie at one step excuses neither a value nor a later pick, and nothing that the run reports excuses it.

Shapes: L row length, V tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from lm_eval_duel import reference, rules
from lm_eval_duel.audit.one_row import OneRow
from lm_eval_duel.audit.runs_rule import RunsRule
from lm_eval_duel.core.decision import NEAR_TIE

PAPER: dict[type[rules.Rule], Callable[..., reference.Rule]] = {
    rules.LeftToRight: lambda rule: reference.left_to_right(rule.k),
    rules.Greedy: lambda rule: reference.greedy(rule.k),
    rules.Margin: lambda rule: reference.margin(rule.k),
    rules.Entropy: lambda rule: reference.entropy(rule.k),
    rules.Threshold: lambda rule: reference.threshold(rule.mu),
}
# how the logits of the positions that the run picked, and of the others, may move; and whether the top one moves alone
TIES = [(a * NEAR_TIE, b * NEAR_TIE, top) for a, b, top in itertools.product((1, -1), (1, -1), (True, False))]


def rule_of(rule: rules.Rule) -> Callable[..., reference.Rule] | None:
    """The reference's own rule for a rule of the paper; None for other rules."""
    make = PAPER.get(type(rule))
    return None if make is None or getattr(rule, "strict", False) else lambda: make(rule)


class Followed:
    """A recorded order as a rule of the reference: `steps` of the positions, counted from 0 in each block.

    `F` is asked at each state. `other_picks` counts where it picks otherwise, `ties` where that is within a tie.
    """

    def __init__(self, network: OneRow, steps: dict[int, int], F: reference.Rule):
        self.network, self.steps, self.F, self.step = network, steps, F, 0
        self.other_picks = self.ties = 0
        self.is_greedy, self.top_tokens_tie = True, False

    def __call__(self, log_P: torch.Tensor, M: list[int]) -> list[int]:
        picked = [ell for ell in M if self.steps[ell] == self.step]
        if {*self.F(log_P, M)} != {*picked}:
            tied = self.network.relative_positions and bool((log_P[M] == log_P[M[0]]).all())  # the lowest is first
            tie = not tied and any({*self.F(moved(log_P, M, picked, *by), M)} == {*picked} for by in TIES)
            self.ties, self.other_picks = self.ties + tie, self.other_picks + (not tie)
        if isinstance(self.F, RunsRule):
            self.F.advance()
        for ell in picked:
            first, second = log_P[ell].topk(min(2, len(log_P[ell]))).values.tolist()[:2]
            behind = first - float(log_P[ell, self.network.x[ell]])
            self.is_greedy &= behind < NEAR_TIE
            self.top_tokens_tie |= behind < NEAR_TIE and first - second < NEAR_TIE
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
