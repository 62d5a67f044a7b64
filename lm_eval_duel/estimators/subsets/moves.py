"""The moves of a sampler in many states at once: subsets of the masked positions, with probabilities.

Shapes: X states, W block width, c products, I moves, C sums, T steps.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F

from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.core.lanes import Lanes
from lm_eval_duel.core.predictions import Predictions, top_of
from lm_eval_duel.denoisers.wrappers import Warped
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.arguments import BEAM_BLOCK, ConfidenceArguments
from lm_eval_duel.rules.base import log_odds
from lm_eval_duel.rules.deployed import dream_counts, even_counts

Planes: TypeAlias = dict[str, torch.Tensor]  # (X, ...) each: what a sampler keeps of the predictions in some states


class StateLevel(NamedTuple):
    """The sets of one size that are evaluated."""

    block: torch.Tensor  # (X,)
    first: torch.Tensor  # (X,) how many positions are masked as the block begins
    masked: torch.Tensor  # (X, W) bool
    weight: torch.Tensor  # (X, C, T) log alpha


class Moves(NamedTuple):
    """The positions that the next step reveals, or a part of them."""

    state: torch.Tensor  # (I,) the set before
    chosen: torch.Tensor  # (I,) the number of the positions revealed
    log_p: torch.Tensor  # (I, C) log P(A | H) with the targets at A


Thin: TypeAlias = Callable[[Moves], tuple[Moves, torch.Tensor | slice]]  # those to follow, and which they were


def from_bitmask(number: torch.Tensor, wide: int) -> torch.Tensor:
    """The positions of bit masks: (X,) -> (X, W) bool."""
    return (number[:, None] >> torch.arange(wide, device=number.device) & 1).bool()


def to_bitmask(positions: torch.Tensor) -> torch.Tensor:
    """The bit mask of positions, the sum of 2^position: (X, W) bool -> (X,)."""
    return (positions.long() << torch.arange(positions.shape[1], device=positions.device)).sum(1)


def log_sums(values: torch.Tensor, at: torch.Tensor, count: int) -> torch.Tensor:
    """The logsumexp of the values (I, ...) at each of `count` places, (count, ...); `at` (I,): the place of a value."""
    index = at.reshape(-1, *[1] * (values.dim() - 1)).expand_as(values)
    top = values.new_full((count, *values.shape[1:]), -math.inf).scatter_reduce(0, index, values, "amax")
    top = top.clamp(min=torch.finfo(values.dtype).min)
    return torch.zeros_like(top).index_add_(0, at, (values - top[at]).exp()).log() + top


def independent(
    level: StateLevel, state: torch.Tensor, log_in: torch.Tensor, log_out: torch.Tensor, count: torch.Tensor, thin: Thin
) -> Moves:
    """The subsets whose probability is a product over positions, of log_in for members and log_out for others.

    `state` (c,): the state of each product; log_in, log_out (c, W); `count` (2, c): the least and the most members.
    """
    possible = (log_in > -math.inf).long()  # (c, W)
    later = possible.flip(1).cumsum(1).flip(1) - possible  # (c, W) possible members after each position
    product, members = torch.arange(len(state), device=state.device), torch.zeros_like(state)  # (I,) each
    moves = Moves(state, torch.zeros_like(state), log_in.new_zeros(len(state), level.weight.shape[1]))
    for position in range(log_in.shape[1]):
        least, most = count[:, product]
        enters, stays = log_in[product, position], log_out[product, position]  # (I,) each
        out = ((stays > -math.inf) & (members + later[product, position] >= least)).nonzero()[:, 0]
        into = ((enters > -math.inf) & (members < most)).nonzero()[:, 0]
        chosen = torch.cat([moves.chosen[out], moves.chosen[into] | 1 << position])
        log_p = torch.cat([moves.log_p[out] + stays[out, None], moves.log_p[into] + enters[into, None]])
        product, members = product[torch.cat([out, into])], torch.cat([members[out], members[into] + 1])
        moves, kept = thin(Moves(state[product], chosen, log_p))
        product, members = product[kept], members[kept]
    return moves


def in_turn(level: StateLevel, log_p: torch.Tensor, score: torch.Tensor, count: torch.Tensor, thin: Thin) -> Moves:
    """Subsets of `count` (X,) positions, drawn one after the other without replacement by weights exp(score) (X, W).

    `log_p` (X, W): of the targets. The sum over the orders in which a subset is drawn (Plackett and Luce).
    """
    wide, state = score.shape[1], torch.arange(len(score), device=score.device)  # (X,)
    moves = Moves(state, torch.zeros_like(state), score.new_zeros(len(score), level.weight.shape[1]))
    for turn in range(int(count.max())):
        left = level.masked[moves.state] & ~from_bitmask(moves.chosen, wide)  # (I, W)
        total = score[moves.state].masked_fill(~left, -math.inf).logsumexp(1)  # (I,)
        growing = count[moves.state] > turn  # (I,)
        i, position = (left & growing[:, None]).nonzero().unbind(1)
        before = moves.state[i]
        more = moves.log_p[i] + (score[before, position] - total[i] + log_p[before, position])[:, None]
        states = torch.cat([moves.state[~growing], before])
        chosen = torch.cat([moves.chosen[~growing], moves.chosen[i] | 1 << position])
        pairs, at = torch.stack([states, chosen], 1).unique(dim=0, return_inverse=True)
        merged = log_sums(torch.cat([moves.log_p[~growing], more]), at, len(pairs))
        moves, _ = thin(Moves(pairs[:, 0], pairs[:, 1], merged))
    return moves


# ---------------------------------------------------------------- counts
# The number of positions that each step of a block reveals: n, or a schedule of S steps.
#
# Steps that reveal none change nothing, so the number of masked positions determines the next step of a schedule. A
# state
# is therefore a set of masked positions, and sets of other sizes are never reached.
#
# Shapes: R lanes, M the most positions of a block.


COUNTS = {"even": even_counts, "dream": dream_counts}


@dataclasses.dataclass(frozen=True)
class StepCounts:
    """The number of positions at each step: `n`, or by a `schedule` over `steps` steps, "even" (LLaDA) or "dream".

    `or_more`: a step may reveal more than n.
    """

    n: int = 1
    steps: int | None = None
    schedule: str = "even"
    or_more: bool = False

    @classmethod
    def from_arguments(cls, own: ConfidenceArguments) -> StepCounts:
        """The counts of `sampled_confidence`."""
        return cls(own.n or 1, own.steps, own.schedule, or_more=own.tau is not None)

    def of_block(self, m: int) -> list[int]:
        """The number of positions that each step reveals, of m in all."""
        if self.steps is None:
            return [min(self.n, m - done) for done in range(0, m, self.n)]
        return COUNTS[self.schedule](m, self.steps)

    def of_state(self, m: int, masked: int) -> int:
        """The number of positions that the next step reveals when `masked` of m are left; 0 if no step begins there."""
        if self.or_more:
            return min(self.n, masked) if masked == m or masked <= m - self.n else 0
        left = m
        for count in self.of_block(m):
            if left == masked and count:
                return count
            left -= count
        return 0

    def of_lanes(self, lanes: Lanes) -> torch.Tensor:
        """The number of positions that the next step of each lane reveals, (R,); 0 for a lane that no step begins
        with.
        """
        return self.of_sizes(lanes.in_target.sum(1), lanes.masked.sum(1))

    def of_sizes(self, first: torch.Tensor, masked: torch.Tensor) -> torch.Tensor:
        """The same for blocks that begin with `first` (X,) masked positions of which `masked` (X,) are left, (X,)."""
        return table(self, first.device)[first, masked]


@lru_cache(maxsize=64)
def table(counts: StepCounts, device: torch.device) -> torch.Tensor:
    """The number of positions that a step reveals, by the block's width and its masked positions: (M + 1, M + 1).

    0 where no step begins.
    """
    entries = torch.zeros(BEAM_BLOCK + 1, BEAM_BLOCK + 1, dtype=torch.int64)
    for m in range(1, BEAM_BLOCK + 1):
        for masked in range(1, m + 1):
            entries[m, masked] = counts.of_state(m, masked)
    return entries.to(device)


# ---------------------------------------------------------------- drawn
# The confidence of a drawn token, and the probability that a position draws a less confident one.
#
# The score of a token grows with its probability p, and does not saturate near 1: log p up to p = 1/2, and
# log p - log(1 - p) - log 2 above.
#
# Shapes: R lanes, W block width, u rows of logits, c masked positions, V tokens.


LARGEST = 1e300  # the score of a token of probability 1: finite, so that the next larger float exists


def score_of(p: float) -> float:
    """The score of probability p."""
    if p <= 0:
        return -math.inf
    return math.log(p) if p <= 0.5 else min(log_odds(p) - math.log(2), LARGEST)


def scores(logits: torch.Tensor, scale: float) -> torch.Tensor:
    """The score of every token under softmax(scale x logits), for logits (u, V), float64 (u, V)."""
    scaled = logits.double() * scale  # (u, V)
    top = top_of(scaled)
    log_p = scaled - top.logit[:, None] - F.softplus(-top.confidence[:, None])  # (u, V)
    largest = torch.where(top.confidence > 0, top.confidence - math.log(2), -F.softplus(-top.confidence))  # (u,)
    return log_p.scatter_(1, top.token[:, None], largest.clamp(max=LARGEST)[:, None])


def untempered(denoiser: Denoiser) -> float:
    """The factor of the logits of `denoiser` that undoes its temperature.

    Raises:
        DuelError: If its distributions are truncated as well, which cannot be undone.
    """
    scale = 1.0
    while isinstance(denoiser, Warped):
        if denoiser.top_k is not None or denoiser.top_p < 1:
            raise DuelError(
                "confidence=untempered is the probability before temperature, and no sampler that we know combines it "
                f"with top_k or top_p; got {denoiser.warping}. Leave them out, or use confidence=tempered."
            )
        scale, denoiser = scale * denoiser.temperature, denoiser.plain
    return scale


class DrawnScores(NamedTuple):
    """The draws of some states, against the targets."""

    score: torch.Tensor  # (R, W) of each position's target
    top: torch.Tensor  # (R, W) of each position's most probable token
    log_after: torch.Tensor  # (R, W, W) log p that the draw of a position ranks after the target of another
    log_quiet: torch.Tensor  # (R, W) log p that the draw of a position does not exceed the threshold


def against_targets(
    predictions: Predictions, targets: torch.Tensor, scale: float, tau: float, strict: bool
) -> DrawnScores:
    """Compare the draw of every position with the targets (R, W) of its lane, and with the threshold `tau`, a score.

    One draw ranks after another if its score is smaller, or equal and its position stands further right. `strict`: a
    draw exceeds the threshold only if its score is larger. Values are NaN where a draw's position is not masked.
    """
    masked = predictions.masked
    wide = masked.shape[1]
    planes = torch.full((3, *masked.shape), math.nan, dtype=torch.float64, device=masked.device)  # (3, R, W)
    log_after = planes.new_full((*masked.shape, wide), math.nan)  # (R, W, W)
    for lanes, row, logits in predictions.by_lanes():
        of_row = scores(logits, scale)  # (u, V)
        score, p = of_row[row], logits.double().softmax(1)[row]  # (c, V) each
        lane, position = masked[lanes].nonzero().unbind(1)  # (c,)
        target = score.gather(1, targets[lanes][masked[lanes]][:, None])[:, 0]  # (c,)
        level = torch.full_like(masked[lanes], math.inf, dtype=torch.float64)  # (r, W)
        level[lane, position] = target
        bound = level[lane]  # (c, W) a draw ranks after the target of each other position if it is less
        further = position[:, None] > torch.arange(wide, device=bound.device)  # (c, W)
        bound, order = bound.where(~further | bound.isinf(), bound.nextafter(bound.new_tensor(math.inf))).sort(1)
        place = torch.searchsorted(bound, score, right=True)  # (c, V) how many bounds it reaches
        mass = p.new_zeros(len(p), wide + 1).scatter_add_(1, place, p).cumsum(1)[:, :wide]  # (c, W)
        log_after[lanes][lane, position] = torch.empty_like(mass).scatter_(1, order, mass.log())
        quiet = score <= tau if strict else score < tau  # (c, V)
        planes[0, lanes][lane, position] = target
        planes[1, lanes][lane, position] = of_row.amax(1)[row]
        planes[2, lanes][lane, position] = torch.where(quiet, p, 0.0).sum(1).log()
    return DrawnScores(planes[0], planes[1], log_after, planes[2])


def token_scores(predictions: Predictions, tokens: torch.Tensor, scale: float) -> torch.Tensor:
    """The score of the token at each masked position, for tokens (R, W), float64 (R, W); NaN where nothing is
    masked.
    """
    masked = predictions.masked
    plane = torch.full_like(masked, math.nan, dtype=torch.float64)  # (R, W)
    for lanes, row, logits in predictions.by_lanes():
        ids = tokens[lanes][masked[lanes]]  # (c,)
        plane[lanes][masked[lanes]] = scores(logits, scale)[row, ids]
    return plane
