"""Recorded trajectories: the probability of their tokens along their order, and what gave the order.

An order is followed state by state. A rule is asked at every state what it would pick. For a sampler that selects after
sampling, the joint probability of text and order is a product over steps, so it needs no sum over orders, and no limit
of the block. With the positions H masked and A kept, the others draw tokens that are thrown away:

    P(A and its tokens) = prod over A of q_i(x_i)  x  prod over H - A of q_j{v is not kept}

(subsets/sampled_confidence.py has both cases in full.)

Shapes: N windows, R lanes, W block width, c masked positions, V tokens.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import torch

from lm_eval_duel import rules
from lm_eval_duel.core.decision import NEAR_TIE
from lm_eval_duel.core.lanes import Lanes, Rows
from lm_eval_duel.core.predictions import Predictions
from lm_eval_duel.core.windows import Ids, Window, as_ids
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.base import Estimator
from lm_eval_duel.estimators.duel import DuelEstimator
from lm_eval_duel.estimators.fixed_orders import Replay
from lm_eval_duel.estimators.subsets.counts import StepCounts
from lm_eval_duel.estimators.subsets.drawn import exceeds, score_of, scores
from lm_eval_duel.estimators.subsets.sets import fresh_positions


@dataclasses.dataclass(frozen=True)
class Difference:
    """A step at which the rule picks other positions than those recorded."""

    block: int  # target position at which the block begins
    step: int
    margin: float | None  # of the rule's decision, in logits; None: the rule does not know

    @property
    def near_tie(self) -> bool:
        """Whether float noise explains it."""
        return self.margin is not None and self.margin < NEAR_TIE


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """A recorded trajectory under a network. Log-probabilities in nats."""

    log_prob: float  # of the tokens along the order
    token_logprobs: tuple[float, ...]
    steps: int
    differences: tuple[Difference, ...] = ()  # from the rule, in order
    log_joint: float | None = None  # of tokens and order, if a sampler was given


@dataclasses.dataclass(frozen=True)
class DrawnSampler:
    """A sampler that keeps the best of the tokens drawn, as in `SampledConfidence`; `scale` as there."""

    counts: StepCounts
    tau: float | None
    strict: bool
    scale: float

    def log_selection(
        self, predictions: Predictions, lanes: Lanes, targets: torch.Tensor, pick: torch.Tensor
    ) -> torch.Tensor:
        """log p that the draws at other positions are not kept where those at `pick` are the targets, (R,)."""
        threshold = math.inf if self.tau is None else score_of(self.tau)
        own = torch.full(pick.shape, math.nan, dtype=torch.float64, device=pick.device)  # (R, W) scores of the targets
        log_after, log_quiet = own.clone(), own.clone()  # (R, W) of the draws at positions that are not picked
        for part, row, logits in predictions.by_lanes():
            of_row = scores(logits, self.scale)  # (u, V)
            score, p = of_row[row], logits.double().softmax(1)[row]  # (c, V) each
            masked, picked = lanes.masked[part], pick[part]  # (r, W)
            lane, position = masked.nonzero().unbind(1)  # (c,)
            own[part][lane, position] = score.gather(1, targets[part][masked][:, None])[:, 0]
            kept = torch.where(picked, own[part], math.inf)  # (r, W)
            worst = kept.amin(1, keepdim=True)  # (r, 1); of equals, the rightmost ranks last
            last = (kept == worst).int().cumsum(1).argmax(1)  # (r,)
            bound = worst[lane, 0]  # (c,)
            bound = torch.where(position > last[lane], bound.nextafter(bound.new_tensor(math.inf)), bound)
            quiet = score <= threshold if self.strict else score < threshold  # (c, V)
            log_after[part][lane, position] = torch.where(score < bound[:, None], p, 0.0).sum(1).log()
            log_quiet[part][lane, position] = torch.where(quiet, p, 0.0).sum(1).log()
        above = exceeds(own, threshold, self.strict)  # (R, W)
        all_above = (above | ~pick).all(1) & (self.tau is not None)  # (R,)
        wanted = torch.tensor(
            [
                self.counts.of_state(*pair)
                for pair in zip(fresh_positions(lanes).sum(1).tolist(), lanes.masked.sum(1).tolist(), strict=True)
            ],
            device=pick.device,
        )  # (R,)
        count = pick.sum(1)  # (R,)
        possible = torch.where(all_above, count >= wanted, count == wanted) & (wanted > 0)  # (R,)
        others = torch.where(lanes.masked & ~pick, torch.where(all_above[:, None], log_quiet, log_after), 0.0)
        return others.sum(1).where(possible, -math.inf)


@dataclasses.dataclass(frozen=True)
class _Followed(Replay):
    """Recorded orders; at each state, `rule` says what it would pick, or `sampler` how probable the selection is."""

    rows: Rows
    rule: rules.Rule
    sampler: DrawnSampler | None
    differences: dict[tuple[int, int, int], float | None] = dataclasses.field(default_factory=dict)
    log_selection: dict[tuple[int, int, int], float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "dense_memory", self.sampler is None and self.rule.dense_memory)

    def __call__(self, predictions: Predictions, lanes: Lanes) -> rules.Decision:
        pick = super().__call__(predictions, lanes).pick
        keys = [*zip(lanes.row.tolist(), (lanes.start - lanes.origin).tolist(), lanes.step.tolist(), strict=True)]
        if self.sampler is not None:
            values = self.sampler.log_selection(predictions, lanes, self.rows.targets(lanes), pick)  # (R,)
            self.log_selection.update(zip(keys, values.tolist(), strict=True))
            return rules.Decision.certain(pick)
        decision = self.rule(predictions, lanes)
        margins = [None] * len(keys) if decision.decision_margin is None else decision.decision_margin.tolist()
        for lane in (decision.pick != pick).any(1).nonzero()[:, 0].tolist():
            self.differences[keys[lane]] = margins[lane]
        return rules.Decision(pick, decision.decision_margin, decision.memory)


@torch.inference_mode()
def follow(
    duel: DuelEstimator, windows: Sequence[Window], steps: Sequence[Ids], sampler: DrawnSampler | None = None
) -> list[Trajectory]:
    """Recorded trajectories, each against the rule of `duel`, or under a sampler that selects after sampling.

    `steps`: of each target token, counted from any number, in its block or in the whole text.
    """
    duel.check(windows)
    if len(windows) != len(steps):
        raise DuelError(f"Each window needs its order; got {len(windows)} windows and {len(steps)} orders.")
    orders = [in_blocks(as_ids(steps[n]), window, duel, n) for n, window in enumerate(windows)]
    followed = [Trajectory(0.0, (), 0)] * len(windows)
    for group in duel.groups(windows, range(len(windows))):
        of_group = tuple(orders[n] for n in group.window_indices)
        rule = _Followed(of_group, group.rows, duel.followed, sampler)
        for row, scored in duel.score_blocks(group, duel.block_spans(group), rule):
            window = group.windows[row]
            differences = sorted((key[1:], margin) for key, margin in rule.differences.items() if key[0] == row)
            factors = [value for key, value in rule.log_selection.items() if key[0] == row]
            followed[group.window_indices[row]] = Trajectory(
                log_prob=scored.log_prob,
                token_logprobs=scored.token_logprobs,
                steps=sum(len(set(part)) for part in _split(of_group[row], window, duel.blocks(window))),
                differences=tuple(Difference(*key, margin) for key, margin in differences),
                log_joint=None if sampler is None else scored.log_prob + math.fsum(factors),
            )
    return followed


def in_blocks(order: Sequence[int], window: Window, duel: DuelEstimator, n: int) -> tuple[int, ...]:
    """The steps of window `n`, numbered from 0 in each block.

    Raises:
        DuelError: there is not one for each token, or a block is not finished before the next one begins.
    """
    if len(order) != len(window.target):
        raise DuelError(f"Window {n} has {len(window.target)} target tokens but {len(order)} steps.", n)
    inner = _split(order, window, Estimator.blocks(duel, window))
    if duel.rule.spans_blocks and len(inner) > 1 and all(min(part) == min(order) for part in inner):
        raise DuelError(
            f"Rule {duel.rule} keeps a history over blocks, so the steps of window {n} count over the whole text and "
            "do not restart in each block.",
            n,
        )
    parts = _split(order, window, duel.blocks(window))
    restarts = all(min(part) == min(order) for part in parts)
    if not restarts and any(max(a) >= min(b) for a, b in itertools.pairwise(parts)):
        raise DuelError(
            f"Window {n} is not revealed in blocks of {duel.block}: a block's first step comes before the last one of "
            "the block before. Pass the sampler's own block.",
            n,
        )
    return tuple(sorted(set(part)).index(step) for part in parts for step in part)


def _split(order: Sequence[int], window: Window, blocks: Sequence[tuple[int, int]]) -> list[Sequence[int]]:
    """The steps of each of the blocks (first column, width)."""
    first = len(window.context)
    return [order[max(0, start - first) : start - first + width] for start, width in blocks]
