"""A window's score once more, by `reference.py` as far as it goes. The route says how far that was.

    reference                        Algorithm 2 and the paper's rules, from reference.py
    reference with the run's rule    Algorithm 2 from reference.py; the picks by the rule of the run
    alone                            the estimator of the run, with one row in each network call

On the first two routes the network is called by `denoisers/one_row.py`, so that of the run's code only the network
itself and, on the second, the rule take part.

Shapes: W block width, V tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from lm_eval_duel import reference, rules
from lm_eval_duel.core.lanes import Lanes
from lm_eval_duel.core.predictions import Predictions
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers import one_row
from lm_eval_duel.denoisers.one_row import OneRow
from lm_eval_duel.estimators.base import Estimator
from lm_eval_duel.estimators.duel import DuelEstimator

REFERENCE, RUNS_RULE, ALONE = ROUTES = ("reference", "reference with the run's rule", "alone")
PAPER: dict[type[rules.Rule], Callable[..., reference.Rule]] = {
    rules.LeftToRight: lambda rule: reference.left_to_right(rule.k),
    rules.Greedy: lambda rule: reference.greedy(rule.k),
    rules.Margin: lambda rule: reference.margin(rule.k),
    rules.Entropy: lambda rule: reference.entropy(rule.k),
    rules.Threshold: lambda rule: reference.threshold(rule.mu),
}


class Recomputed(NamedTuple):
    """A window's log-probability in nats and its order; no steps if the estimator has no single order."""

    log_prob: float
    reveal_steps: tuple[int, ...]
    route: str


class _ReadsFeatures(Exception):
    """The run's rule reads more than distributions."""


def recompute(estimator: Estimator, window: Window) -> Recomputed:
    """The score of a window by the reference, or, where that does not know the estimator, by the estimator alone."""
    if not window.target:
        return Recomputed(0.0, (), REFERENCE)
    if (
        estimator.name in ("duel", "ar")
        and isinstance(estimator, DuelEstimator)
        and one_row.supports(estimator.denoiser)
    ):
        rule, network = estimator.rule, OneRow(estimator.denoiser, window, estimator.block, estimator.grid)
        paper = PAPER.get(type(rule))
        if paper is not None and not getattr(rule, "strict", False):
            return _by_reference(network, paper(rule), REFERENCE)
        if not rule.spans_blocks:
            try:
                return _by_reference(network, RunsRule(rule, network), RUNS_RULE)
            except _ReadsFeatures:
                pass
    estimator.use_single_rows()
    [score] = estimator.log_prob([window])
    return Recomputed(score.log_prob, score.reveal_steps, ALONE)


def _by_reference(network: OneRow, rule: reference.Rule, route: str) -> Recomputed:
    path = reference.log_likelihood(network.x, network.blocks, network, rule, network.m)
    steps = steps_in_blocks(network.blocks, path.sigma)
    return Recomputed(path.ll, tuple(steps.get(position, -1) for position in range(network.origin, network.end)), route)


def steps_in_blocks(blocks: Sequence[Sequence[int]], sigma: Sequence[Sequence[int]]) -> dict[int, int]:
    """The step at which each position is revealed, counted in its block. A step may reveal nothing."""
    steps: dict[int, int] = {}
    step, left, coming = 0, set[int](), iter(blocks)
    for revealed in sigma:
        if not left:
            step, left = 0, {*next(coming)}
        steps |= dict.fromkeys(revealed, step)
        step, left = step + 1, left - {*revealed}
    return steps


class OneLane(Predictions):
    """The distributions of one lane, as the run's rules read them."""

    def __init__(self, masked: torch.Tensor, log_p: torch.Tensor):
        every = torch.arange(len(log_p), device=log_p.device)  # (C,)
        none = torch.zeros(log_p.shape[1], dtype=torch.bool, device=log_p.device)  # (V,)
        all_mask = torch.zeros(1, dtype=torch.bool, device=log_p.device)
        super().__init__(masked, all_mask, log_p, every, lambda logits: logits, none)

    @property
    def features(self) -> torch.Tensor:
        raise _ReadsFeatures

    def apply(self, *arguments: Any) -> torch.Tensor:
        raise _ReadsFeatures


class RunsRule:
    """A rule of the run as a rule of the reference: it is shown one lane, in float64."""

    def __init__(self, rule: rules.Rule, network: OneRow):
        self.rule, self.network = rule, network
        self.lane: Lanes | None = None

    def __call__(self, log_p: torch.Tensor, positions: list[int]) -> list[int]:
        begin, end = self.network.span(positions[0])
        if self.lane is None or int(self.lane.start) != begin:
            self.lane = self._fresh(begin, end, log_p.device)
        masked = torch.zeros_like(self.lane.masked)  # (1, W)
        masked[0, [position - begin for position in positions]] = True
        tokens = torch.tensor([self.network.x[begin:end]], device=log_p.device).masked_fill(masked, -1)  # (1, W)
        lane = dataclasses.replace(self.lane, masked=masked, tokens=tokens)
        decision = self.rule(OneLane(masked, log_p[positions]), lane)
        if isinstance(decision, torch.Tensor):
            decision = rules.Decision(decision)
        self.lane = dataclasses.replace(lane, step=lane.step + 1, memory=decision.memory)
        return [begin + int(position) for position in decision.pick[0].nonzero()]

    def _fresh(self, begin: int, end: int, device: torch.device) -> Lanes:
        """The lane of a block at its start."""
        row, start, origin, width = (
            torch.tensor([n], device=device) for n in (0, begin, self.network.origin, end - begin)
        )
        tokens = torch.zeros(1, end - begin, dtype=torch.int64, device=device)  # (1, W)
        return Lanes(row, start, origin, width, tokens, tokens.bool(), torch.zeros_like(row))
