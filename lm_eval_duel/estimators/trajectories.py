"""Recorded trajectories: the probability of their tokens along their order, and of the order under a rule or sampler.

An order is followed state by state. A rule is asked at every state what it would pick. For a sampler that selects after
sampling (samplers.py), the joint probability of text and order is a product over steps, so it needs no sum over orders,
and blocks may have any size.

Shapes: R lanes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lm_eval_duel import rules
from lm_eval_duel.core.decision import NEAR_TIE
from lm_eval_duel.core.lanes import Lanes, Rows
from lm_eval_duel.core.predictions import Predictions
from lm_eval_duel.core.windows import Ids, Window, target_parts
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.arguments import ConfidenceArguments
from lm_eval_duel.estimators.base import Estimator
from lm_eval_duel.estimators.drawn import BestDrawn
from lm_eval_duel.estimators.duel import DuelEstimator, Replay


@dataclasses.dataclass(frozen=True)
class Departure:
    """A step at which the rule picks other positions than the recorded ones."""

    block: int  # the first target position of the block, which may begin in the context
    step: int
    margin: float | None  # of the rule's decision, in logits; None: the rule does not know

    @property
    def near_tie(self) -> bool:
        """True if float noise explains it."""
        return self.margin is not None and self.margin < NEAR_TIE


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """A recorded trajectory under a network. Log-probabilities in nats."""

    log_prob: float  # of the tokens along the order
    token_logprobs: tuple[float, ...]
    steps: int
    differences: tuple[Departure, ...] = ()  # from the rule, in order
    log_joint: float | None = None  # of tokens and order, if a sampler was given


@dataclasses.dataclass(frozen=True)
class _Followed(Replay):
    """Recorded orders; at each state, `rule` says what it would pick, or `sampler` how probable the selection is."""

    rows: Rows
    rule: rules.Rule
    sampler: BestDrawn | None
    # by (row, first target position of the block, step): the rule's margin where it differs
    differences: dict[tuple[int, int, int], float | None] = dataclasses.field(default_factory=dict)
    log_selection: dict[tuple[int, int, int], float] = dataclasses.field(default_factory=dict)  # likewise

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "dense_memory", self.sampler is None and self.rule.dense_memory)

    def __call__(self, predictions: Predictions, lanes: Lanes) -> rules.Decision:
        pick = super().__call__(predictions, lanes).pick
        block = (lanes.start - lanes.origin).clamp(min=0)  # (R,) its first target position
        keys = list(zip(lanes.row.tolist(), block.tolist(), lanes.step.tolist(), strict=True))
        if self.sampler is not None:
            values = self.sampler.log_selection(predictions, lanes, self.rows.targets(lanes), pick)  # (R,)
            self.log_selection.update(zip(keys, values.tolist(), strict=True))
            return rules.Decision.certain(pick)
        decision = self.rule(predictions, lanes)
        margin = decision.decision_margin  # (R,)
        differs = (decision.pick != pick).any(1)  # (R,)
        for lane in differs.nonzero()[:, 0].tolist():
            self.differences[keys[lane]] = None if margin is None else float(margin[lane])
        return rules.Decision(pick, margin, decision.memory)

    def departures(self, row: int) -> tuple[Departure, ...]:
        """The steps of a row at which the rule differs, in order."""
        departures = []
        for (of_row, block, step), margin in self.differences.items():
            if of_row == row:
                departures.append(Departure(block, step, margin))
        return tuple(sorted(departures, key=lambda each: (each.block, each.step)))

    def log_order(self, row: int) -> float:
        """The log-probability with which the sampler selects the recorded positions of a row, given its tokens."""
        return math.fsum(value for (of_row, _, _), value in self.log_selection.items() if of_row == row)


@torch.inference_mode()
def follow(
    duel: DuelEstimator, windows: Sequence[Window], steps: Sequence[Ids], sampler: Mapping[str, Any] | None
) -> list[Trajectory]:
    """Follow recorded trajectories, and compare each with the rule of `duel` or with a sampler; see `Duel.follow`."""
    drawn = None if sampler is None else BestDrawn.from_arguments(duel.denoiser, ConfidenceArguments(**sampler))
    orders = []
    for n, order in enumerate(duel.orders(windows, steps)):
        orders.append(in_blocks(order, windows[n], duel, n))

    trajectories = [Trajectory(0.0, (), 0)] * len(windows)
    with duel.one_run():
        for group in duel.groups(windows, range(len(windows))):
            of_group = tuple(orders[n] for n in group.window_indices)
            rule = _Followed(of_group, group.rows, duel.followed, drawn)
            for row, scored in duel.score_blocks(group, duel.block_spans(group), rule):
                window = group.windows[row]
                step_count = 0
                for part in target_parts(window, duel.blocks(window)):
                    step_count += len(set(of_group[row][part]))
                trajectories[group.window_indices[row]] = Trajectory(
                    log_prob=scored.log_prob,
                    token_logprobs=scored.token_logprobs,
                    steps=step_count,
                    differences=rule.departures(row),
                    log_joint=None if drawn is None else scored.log_prob + rule.log_order(row),
                )
            rules.repeat_last(rule.rule)
        duel.row_checks.compare(duel.counts)
    return trajectories


def in_blocks(order: Sequence[int], window: Window, duel: DuelEstimator, n: int) -> tuple[int, ...]:
    """The steps of window `n`, numbered from 0 in each block.

    Raises:
        DuelError: If a block is not finished before the next one begins.
    """
    inner = [order[part] for part in target_parts(window, Estimator.blocks(duel, window))]  # if `blocks` is one chain
    if duel.rule.spans_blocks and len(inner) > 1 and _restart(inner):
        raise DuelError(
            f"Rule {duel.rule} keeps a history over blocks, so the steps of window {n} count over the whole text and "
            "do not restart in each block.",
            n,
        )
    parts = [order[part] for part in target_parts(window, duel.blocks(window))]
    in_turn = all(max(before) < min(after) for before, after in itertools.pairwise(parts))
    if not in_turn and not _restart(parts):
        raise DuelError(
            f"Window {n} is not revealed in blocks of {duel.block}: a block's first step comes before the last one of "
            "the block before. Pass the sampler's own block.",
            n,
        )
    steps: list[int] = []
    for part in parts:
        ranks = {step: rank for rank, step in enumerate(sorted(set(part)))}
        steps += [ranks[step] for step in part]
    return tuple(steps)


def _restart(parts: Sequence[Sequence[int]]) -> bool:
    """True if the steps of each block count from the same number."""
    return len({min(part) for part in parts}) == 1
