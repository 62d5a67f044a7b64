"""Many rules over the same windows: every state that any of them reaches is evaluated once.

With the targets known, a state-only rule's pick depends only on which positions of the block are masked, so rules that
reach the same state share its network call, whatever their paths. A walker is one rule in one block. The walkers with
the most masked positions go first: each moves to a state with fewer, so no walker can reach a state that has already
been evaluated. Blocks do not wait for each other.

Shapes: N windows, R lanes, W block width, B blocks, F rules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from lm_eval_duel import rules
from lm_eval_duel.core.decision import EVALUATE_ALL, require_pick
from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.core.lanes import Lanes
from lm_eval_duel.core.reveal import BlockSpan, Reveal, WindowGroup
from lm_eval_duel.core.scores import IndexedScores, Step, WindowScore
from lm_eval_duel.estimators.base import Estimator
from lm_eval_duel.estimators.checks import check_rule


class RuleScore(NamedTuple):
    """The score of one window under one rule. The first of several rules has all `states` that were evaluated."""

    log_prob: float  # nats
    nfe: int
    near_ties: int | None
    states: int | None = 0  # None for a rule that was followed alone


@dataclasses.dataclass(frozen=True)
class SharedScore(WindowScore):
    """One window under several rules, keyed by the rule's text. `log_prob` is that of the first rule."""

    rules: dict[str, RuleScore] = dataclasses.field(default_factory=dict)


class Shared(Estimator):
    """The exact likelihood under each of several state-only rules; the same as one `Duel` per rule.

    Other arguments as in `Estimator`. Raises DuelError for a rule that is not state-only, or that this network cannot
    follow.
    """

    name = "several rules"

    def __init__(
        self, denoiser: Denoiser, follow: Sequence[rules.Rule], block: int | str | None = "auto", **layout: Any
    ):
        for rule in follow:
            check_rule(denoiser, rule)
            rules.check_state_only(rule)
        self.rules = [rules.with_checks(rule) for rule in follow]
        super().__init__(denoiser, block, **layout)
        self.empty_score = SharedScore(0.0, rules={str(rule): RuleScore(0.0, 0, 0) for rule in self.rules})

    def score_group(self, group: WindowGroup) -> IndexedScores:
        walks = SharedAccumulator(group, self.rules, self.block_spans(group))
        following = walks.next_states
        return iter(Reveal(group, EVALUATE_ALL, [walks.fresh], walks, self.budget, self.counts, following=following))


class SharedAccumulator:
    """The state of each rule in each block of a group of windows, and its log-probability so far (float64)."""

    def __init__(self, opened: WindowGroup, follow: Sequence[rules.Rule], spans: list[BlockSpan]):
        self.opened, self.rules = opened, follow
        self.fresh = opened.fresh(spans)  # (B,) the start of each block
        count, length = opened.rows.ids.shape
        device = self.fresh.row.device
        self.block = torch.full((count, length), -1, device=device)  # (N, L) the block that starts at a column
        self.block[self.fresh.row, self.fresh.start] = torch.arange(len(spans), device=device)
        self.masked = self.fresh.masked[:, None].repeat(1, len(follow), 1)  # (B, F, W)
        self.states = torch.ones(len(spans), dtype=torch.int64, device=device)  # (B,) states being evaluated
        self.blocks = torch.bincount(self.fresh.row, minlength=count)  # (N,) unfinished blocks
        self.evaluated = self.blocks.clone()  # (N,) evaluated states
        self.log_prob = torch.zeros(count, len(follow), dtype=torch.float64, device=device)  # (N, F)
        self.counts = torch.zeros(count, len(follow), 2, dtype=torch.int64, device=device)  # (N, F, 2) NFE, near ties
        self.has_margins = [True] * len(follow)

    def add(self, step: Step) -> None:
        """Move the walkers that are in these states."""
        lanes, predictions, _, _, log_prob = step
        block = self.block[lanes.row, lanes.start]  # (R,)
        here = (self.masked[block] == lanes.masked[:, None]).all(2)  # (R, F)
        gains, counts, moves, has_margins = [], [], [], []
        for f, rule in enumerate(self.rules):
            choice = rule(predictions, lanes)
            require_pick(rule, choice)
            here_f = here[:, f]  # (R,)
            gains.append(torch.where(choice.pick & here_f[:, None], log_prob, 0.0).sum(1))
            counts.append(torch.stack([here_f, here_f & choice.near_tie], 1))  # (R, 2)
            moves.append((block[here_f], (lanes.masked & ~choice.pick)[here_f]))
            has_margins.append(choice.decision_margin is not None)
        gains, counts, less = torch.stack(gains, 1), torch.stack(counts, 1).long(), -torch.ones_like(block)
        # out of memory above: the states are evaluated again. Nothing below can fail half way
        for f, (of_block, masked) in enumerate(moves):
            self.masked[of_block, f] = masked
            self.has_margins[f] &= has_margins[f]
        self.log_prob.index_add_(0, lanes.row, gains)
        self.counts.index_add_(0, lanes.row, counts)
        self.states.index_add_(0, block, less)

    def next_states(self, left: Lanes) -> Lanes | None:
        """The next states of blocks that wait for none: those with the most masked positions, without duplicates."""
        block = self.block[left.row, left.start].unique()
        block = block[self.states[block] == 0]  # (b,)
        count = self.masked[block].sum(2)  # (b, F)
        most = count.amax(1)  # (b,)
        done = self.fresh.row[block[most == 0]]
        self.blocks.index_add_(0, done, -torch.ones_like(done))
        at, rule = ((count == most[:, None]) & (most > 0)[:, None]).nonzero().unbind(1)
        if not len(at):
            return None
        block = block[at]
        states = torch.cat([block[:, None], self.masked[block, rule].long()], 1).unique(dim=0)  # (r, 1 + W)
        block, masked = states[:, 0], states[:, 1:].bool()
        self.states.index_add_(0, block, torch.ones_like(block))
        lanes = self.fresh.select(block)
        self.evaluated.index_add_(0, lanes.row, torch.ones_like(block))
        return lanes.show(self.opened.rows.targets(lanes), masked)

    def take(self, finished: Lanes) -> IndexedScores:
        """(row, score) of the windows without unfinished blocks."""
        rows = finished.row.unique()
        for row in rows[self.blocks[rows] == 0].tolist():
            scores, states = {}, self.evaluated[row].item()
            for rule, log_prob, (nfe, near_ties), known in zip(
                self.rules, self.log_prob[row].tolist(), self.counts[row].tolist(), self.has_margins, strict=True
            ):
                scores[str(rule)] = RuleScore(log_prob, nfe, near_ties if known else None, 0 if scores else states)
            yield row, SharedScore(self.log_prob[row, 0].item(), rules=scores)
