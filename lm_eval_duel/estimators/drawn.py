"""Draws at every masked position at once, of which a sampler keeps the best: the rule, and its probabilities.

The score of a token grows with its probability p, and does not saturate near 1: log p up to p = 1/2, and
log p - log(1 - p) - log 2 above.

Shapes: R lanes, W block width, u rows of logits, c masked positions, V tokens.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F

from lm_eval_duel import rules
from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.core.hashing import uniform
from lm_eval_duel.core.lanes import Lanes
from lm_eval_duel.core.predictions import Predictions, top_of
from lm_eval_duel.core.reveal import Draw, Draws
from lm_eval_duel.denoisers.filters import Warp
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.arguments import ConfidenceArguments
from lm_eval_duel.estimators.moves import StepCounts
from lm_eval_duel.rules.base import log_odds

LARGEST = 1e300  # the score of a token of probability 1: finite, so that the next larger float exists


@dataclasses.dataclass(frozen=True)
class BestDrawn(rules.Rule):
    """Draws a token at every masked position, and picks the n best, or all above `tau` and at least the n best."""

    name: ClassVar[str] = "sampled_confidence"
    counts: StepCounts  # n of each step
    tau: float | None = None
    strict: bool = True
    scale: float = 1.0  # of the logits, in the confidence
    draw: Draw | None = None

    @classmethod
    def from_arguments(cls, denoiser: Denoiser, arguments: ConfidenceArguments) -> BestDrawn:
        """The rule without its `draw`. Raises DuelError for truncated distributions, see `untempered`."""
        scale = untempered(denoiser) if arguments.confidence == "untempered" else 1.0
        return cls(StepCounts.from_arguments(arguments), arguments.tau, arguments.strict, scale)

    def __call__(self, predictions: Predictions, lanes: Lanes) -> rules.Decision:
        assert self.draw is not None
        tokens = self.draw(predictions, lanes, lanes.masked)  # (R, W)
        return rules.Decision(self.pick(token_scores(predictions, tokens, self.scale), lanes))

    def pick(self, score: torch.Tensor, lanes: Lanes) -> torch.Tensor:
        """The draws to keep among those with these scores, (R, W) bool."""
        masked = lanes.masked  # (R, W)
        n = self.counts.of_lanes(lanes)[:, None]  # (R, 1)
        key = torch.where(masked, score.clamp(min=torch.finfo(score.dtype).min), -math.inf)  # (R, W)
        best = masked & (rules.rank(-key) < n)  # (R, W)
        if self.tau is None:
            return best
        above = masked & self.above(score)  # (R, W)
        return torch.where(above.sum(1, keepdim=True) >= best.sum(1, keepdim=True), above, best)

    @property
    def threshold(self) -> float:
        """The score of `tau`."""
        return math.inf if self.tau is None else score_of(self.tau)

    def above(self, score: torch.Tensor) -> torch.Tensor:
        """The scores (R, W) above the threshold, (R, W) bool."""
        above = score > self.threshold if self.strict else score >= self.threshold
        return above & (self.tau is not None)

    def against(self, predictions: Predictions, targets: torch.Tensor) -> DrawnScores:
        """The draws at all positions against the targets (R, W)."""
        return against_targets(predictions, targets, self.scale, self.threshold, self.strict)

    def log_selection(
        self, predictions: Predictions, lanes: Lanes, targets: torch.Tensor, pick: torch.Tensor
    ) -> torch.Tensor:
        """log p that the draws at other positions are not kept where those at `pick` are the targets, (R,)."""
        drawn = self.against(predictions, targets)
        kept = torch.where(pick, drawn.score, math.inf)  # (R, W)
        # of equals, the rightmost ranks last
        last = (kept == kept.amin(1, keepdim=True)).int().cumsum(1).argmax(1)  # (R,)
        log_after = drawn.log_after[torch.arange(len(last), device=last.device), :, last]  # (R, W)
        all_above = (self.above(drawn.score) | ~pick).all(1) & (self.tau is not None)  # (R,)
        # not `of_lanes`, whose table ends at the largest block of the lattice: here blocks have any size
        sizes = zip(lanes.in_target.sum(1).tolist(), lanes.masked.sum(1).tolist(), strict=True)
        wanted = torch.tensor([self.counts.of_state(*pair) for pair in sizes], device=pick.device)  # (R,)
        count = pick.sum(1)  # (R,)
        possible = torch.where(all_above, count >= wanted, count == wanted) & (wanted > 0)  # (R,)
        log_not_kept = torch.where(all_above[:, None], drawn.log_quiet, log_after)  # (R, W)
        others = torch.where(lanes.masked & ~pick, log_not_kept, 0.0)  # (R, W)
        return others.sum(1).where(possible, -math.inf)


class StepDraws(Draws):
    """Samples: a new draw at each position at every step, on which it depends, too.

    The tokens drawn for one set of predictions are kept, so that a pick reveals the tokens it was decided by.
    """

    last: tuple[Predictions, torch.Tensor] | None = None

    def __call__(self, predictions: Predictions, lanes: Lanes, pick: torch.Tensor) -> torch.Tensor:
        if self.last is None or self.last[0] is not predictions:
            position = lanes.columns - lanes.origin[:, None]  # (R, W)
            u = uniform(self.keys[lanes.row][:, None], position, lanes.step[:, None], self.seed)  # (R, W)
            self.last = predictions, predictions.draw(torch.where(lanes.masked, u, math.nan))
        return torch.where(pick, self.last[1], -1)


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
    for warp in (each for each in denoiser.filters if isinstance(each, Warp)):
        if warp.truncates:
            raise DuelError(
                "confidence=untempered is the probability before temperature, and no sampler that we know combines it "
                f"with top_k or top_p; got {warp}. Leave them out, or use confidence=tempered."
            )
        scale *= warp.temperature
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
        score = of_row[row]  # (c, V)
        p = logits.double().softmax(1)[row]  # (c, V)
        lane, position = masked[lanes].nonzero().unbind(1)  # (c,)
        target = score.gather(1, targets[lanes][masked[lanes]][:, None])[:, 0]  # (c,)
        level = torch.full_like(masked[lanes], math.inf, dtype=torch.float64)  # (r, W)
        level[lane, position] = target
        # A draw ranks after the target of another position if its score is less. Of equal scores the one further right
        # ranks after, so there the bound is the next larger float, below which an equal score lies.
        bound = level[lane]  # (c, W)
        further = position[:, None] > torch.arange(wide, device=bound.device)  # (c, W)
        above = bound.nextafter(bound.new_tensor(math.inf))  # (c, W)
        bound, order = bound.where(~further | bound.isinf(), above).sort(1)
        # one pass over the vocabulary for all bounds: the mass below each is a cumulative sum over sorted bounds
        reached = torch.searchsorted(bound, score, right=True)  # (c, V) how many bounds each score reaches
        mass = p.new_zeros(len(p), wide + 1).scatter_add_(1, reached, p).cumsum(1)[:, :wide]  # (c, W)
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
