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
from typing import Any, TypeAlias

import torch

from lm_eval_duel import rules
from lm_eval_duel.arguments import declared
from lm_eval_duel.core.decision import NEAR_TIE
from lm_eval_duel.core.lanes import Lanes, Rows
from lm_eval_duel.core.predictions import Predictions
from lm_eval_duel.core.windows import Ids, Window, target_parts
from lm_eval_duel.errors import DuelError, require_known
from lm_eval_duel.estimators.arguments import ConfidenceArguments
from lm_eval_duel.estimators.base import Estimator
from lm_eval_duel.estimators.duel import DuelEstimator, Replay
from lm_eval_duel.estimators.sampled_confidence import BestCandidates

StepKey: TypeAlias = tuple[int, int, int]  # (row, first target position of the block, step)


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
    sampler: BestCandidates | None
    # the rule's margin where it differs, and the log-probability of the selection
    differences: dict[StepKey, float | None] = dataclasses.field(default_factory=dict)
    log_selection: dict[StepKey, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        # a class attribute of other rules; here it depends on `rule`, and the dataclass is frozen
        object.__setattr__(self, "dense_memory", self.sampler is None and self.rule.dense_memory)

    def __call__(self, predictions: Predictions, lanes: Lanes) -> rules.Decision:
        pick = super().__call__(predictions, lanes).pick
        block = (lanes.start - lanes.origin).clamp(min=0)  # (R,) its first target position
        keys = list(zip(lanes.row.tolist(), block.tolist(), lanes.step.tolist(), strict=True))
        if self.sampler is not None:
            targets = self.rows.targets(lanes)  # (R, W)
            values = self.sampler.log_selection(predictions, lanes, targets, pick)  # (R,)
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
        for (row_of_step, block, step), margin in self.differences.items():
            if row_of_step == row:
                departures.append(Departure(block, step, margin))
        return tuple(sorted(departures, key=lambda each: (each.block, each.step)))

    def log_order(self, row: int) -> float:
        """The log-probability with which the sampler selects the recorded positions of a row, given its tokens."""
        values = []
        for (row_of_step, _, _), value in self.log_selection.items():
            if row_of_step == row:
                values.append(value)
        return math.fsum(values)


@torch.inference_mode()
def follow(
    duel: DuelEstimator,
    windows: Sequence[Window],
    steps: Sequence[Ids],
    sampler: Mapping[str, Any] | None,
) -> list[Trajectory]:
    """Follow recorded trajectories, and compare each with the rule of `duel` or with a sampler; see `Duel.follow`."""
    candidates_rule = None
    if sampler is not None:
        candidates_rule = BestCandidates.from_arguments(duel.denoiser, _sampler_arguments(sampler))
    orders = []
    for n, order in enumerate(duel.orders(windows, steps)):
        orders.append(in_blocks(order, windows[n], duel, n))

    trajectories = [Trajectory(0.0, (), 0)] * len(windows)
    with duel.one_run():
        for group in duel.groups(windows, range(len(windows))):
            orders_of_group = tuple(orders[n] for n in group.window_indices)
            rule = _Followed(orders_of_group, group.rows, duel.followed, candidates_rule)
            for row, scored in duel.score_blocks(group, duel.block_spans(group), rule):
                window = group.windows[row]
                step_count = 0
                for part in target_parts(window, duel.blocks(window)):
                    steps_of_block = set(orders_of_group[row][part])
                    step_count += len(steps_of_block)
                log_joint = None
                if candidates_rule is not None:
                    log_joint = scored.log_prob + rule.log_order(row)
                trajectories[group.window_indices[row]] = Trajectory(
                    log_prob=scored.log_prob,
                    token_logprobs=scored.token_logprobs,
                    steps=step_count,
                    differences=rule.departures(row),
                    log_joint=log_joint,
                )
            rules.repeat_last(rule.rule)
        duel.row_checks.compare(duel.counts)
    return trajectories


def _sampler_arguments(sampler: Any) -> ConfidenceArguments:
    """The arguments of the sampler that `Duel.follow` is given; raises DuelError unless all are its own."""
    if not isinstance(sampler, Mapping):
        raise DuelError(
            f'sampler must be a dict of arguments of estimator=sampled_confidence, such as {{"n": 1}}; got {sampler!r}.'
        )
    require_known("argument", sampler, declared(ConfidenceArguments), "of estimator=sampled_confidence")
    return ConfidenceArguments(**sampler)


def in_blocks(
    order: Sequence[int],
    window: Window,
    duel: DuelEstimator,
    n: int,
) -> tuple[int, ...]:
    """The steps of window `n`, numbered from 0 in each block.

    Raises:
        DuelError: If a block is not finished before the next one begins.
    """
    # of the base class, since for a rule that spans blocks `duel.blocks` is the chain of all of them
    inner_parts = target_parts(window, Estimator.blocks(duel, window))
    inner = [order[part] for part in inner_parts]
    if duel.rule.spans_blocks and len(inner) > 1 and _restart(inner):
        raise DuelError(
            f"Rule {duel.rule} keeps a history over blocks, so the steps of window {n} count over the whole text and "
            "do not restart in each block.",
            n,
        )
    parts = [order[part] for part in target_parts(window, duel.blocks(window))]
    one_after_another = all(max(before) < min(after) for before, after in itertools.pairwise(parts))
    if not one_after_another and not _restart(parts):
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
