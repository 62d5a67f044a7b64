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
    """Draws a token at every masked position, and picks the n best draws, or all above `tau` if these are more."""

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
        # a masked position with a score of -inf still ranks before one that is not masked
        lowest = torch.finfo(score.dtype).min
        key = torch.where(masked, score.clamp(min=lowest), -math.inf)  # (R, W)
        best = masked & (rules.rank(-key) < n)  # (R, W)
        if self.tau is None:
            return best
        above = masked & self.above(score)  # (R, W)
        enough = above.sum(1, keepdim=True) >= best.sum(1, keepdim=True)  # (R, 1)
        return torch.where(enough, above, best)

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
        self,
        predictions: Predictions,
        lanes: Lanes,
        targets: torch.Tensor,
        pick: torch.Tensor,
    ) -> torch.Tensor:
        """log p that exactly the draws at `pick` are kept, given that these are the targets, (R,)."""
        drawn = self.against(predictions, targets)

        # the draw at `pick` that ranks last: the smallest score, and of equals the rightmost
        kept = torch.where(pick, drawn.score, math.inf)  # (R, W)
        is_least = kept == kept.amin(1, keepdim=True)  # (R, W)
        last = is_least.int().cumsum(1).argmax(1)  # (R,)
        every = torch.arange(len(last), device=last.device)  # (R,)
        log_after = drawn.log_after[every, :, last]  # (R, W)
        all_above = (self.above(drawn.score) | ~pick).all(1) & (self.tau is not None)  # (R,)

        # not `of_lanes`, whose table ends at the largest block of the lattice: here blocks have any size
        sizes = zip(lanes.in_target.sum(1).tolist(), lanes.masked.sum(1).tolist(), strict=True)
        counts = [self.counts.of_state(m, masked) for m, masked in sizes]
        wanted = torch.tensor(counts, device=pick.device)  # (R,)
        count = pick.sum(1)  # (R,)
        fits = torch.where(all_above, count >= wanted, count == wanted)  # (R,)
        possible = fits & (wanted > 0)  # (R,)

        # the draws at all other positions are not kept
        log_not_kept = torch.where(all_above[:, None], drawn.log_quiet, log_after)  # (R, W)
        others = torch.where(lanes.masked & ~pick, log_not_kept, 0.0)  # (R, W)
        return others.sum(1).where(possible, -math.inf)


class StepDraws(Draws):
    """Samples: at every step a new draw at each position, so that a draw depends on the step, too.

    The tokens drawn from the last predictions are kept, so that a pick reveals the tokens that decided it.
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
    if p <= 0.5:
        return math.log(p)
    return min(log_odds(p) - math.log(2), LARGEST)


def scores(logits: torch.Tensor, scale: float) -> torch.Tensor:
    """The score of every token under softmax(scale x logits), for logits (u, V), float64 (u, V)."""
    scaled = logits.double() * scale  # (u, V)
    top = top_of(scaled)
    log_p_top = -F.softplus(-top.confidence)  # (u,) log P1
    score = scaled - top.logit[:, None] + log_p_top[:, None]  # (u, V) log p of every token
    # only the top token may be more probable than 1/2
    of_top = torch.where(top.confidence > 0, top.confidence - math.log(2), log_p_top)  # (u,)
    of_top = of_top.clamp(max=LARGEST)
    return score.scatter_(1, top.token[:, None], of_top[:, None])


def untempered(denoiser: Denoiser) -> float:
    """The factor of the logits of `denoiser` that undoes its temperature.

    Raises:
        DuelError: If its distributions are truncated as well, which cannot be undone.
    """
    scale = 1.0
    for warp in denoiser.filters:
        if not isinstance(warp, Warp):
            continue
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
    predictions: Predictions,
    targets: torch.Tensor,
    scale: float,
    tau: float,
    strict: bool,
) -> DrawnScores:
    """Compare the draw of every position with the targets (R, W) of its lane, and with the threshold `tau`, a score.

    One draw ranks after another if its score is smaller, or equal and its position stands further right. `strict`: a
    draw exceeds the threshold only if its score is larger. Values are NaN where a draw's position is not masked.
    """
    masked = predictions.masked
    wide = masked.shape[1]
    score_of_target = torch.full(masked.shape, math.nan, dtype=torch.float64, device=masked.device)  # (R, W)
    score_of_top = torch.full_like(score_of_target, math.nan)  # (R, W)
    log_quiet = torch.full_like(score_of_target, math.nan)  # (R, W)
    log_after = score_of_target.new_full((*masked.shape, wide), math.nan)  # (R, W, W)
    for lanes, row, logits in predictions.by_lanes():
        scores_of_row = scores(logits, scale)  # (u, V)
        score = scores_of_row[row]  # (c, V)
        p = logits.double().softmax(1)[row]  # (c, V)
        masked_part = masked[lanes]  # (r, W)
        lane, position = masked_part.nonzero().unbind(1)  # (c,) each
        token = targets[lanes][masked_part]  # (c,)
        target = score.gather(1, token[:, None])[:, 0]  # (c,)
        level = torch.full_like(masked_part, math.inf, dtype=torch.float64)  # (r, W)
        level[lane, position] = target

        # A draw ranks after the target of another position if its score is less. Of equal scores the one further right
        # ranks after, so there the bound is the next larger float, below which an equal score lies.
        bound = level[lane]  # (c, W)
        further = position[:, None] > torch.arange(wide, device=bound.device)  # (c, W)
        next_larger = bound.nextafter(bound.new_tensor(math.inf))  # (c, W)
        bound = bound.where(~further | bound.isinf(), next_larger)

        # one pass over the vocabulary for all bounds: the mass below each is a cumulative sum over sorted bounds
        bound, order = bound.sort(1)
        reached = torch.searchsorted(bound, score, right=True)  # (c, V) how many bounds each score reaches
        mass = p.new_zeros(len(p), wide + 1)  # (c, W + 1) by this number
        mass = mass.scatter_add_(1, reached, p).cumsum(1)[:, :wide]  # (c, W)
        log_after[lanes][lane, position] = torch.empty_like(mass).scatter_(1, order, mass.log())

        quiet = score <= tau if strict else score < tau  # (c, V)
        score_of_target[lanes][lane, position] = target
        score_of_top[lanes][lane, position] = scores_of_row.amax(1)[row]
        log_quiet[lanes][lane, position] = torch.where(quiet, p, 0.0).sum(1).log()
    return DrawnScores(score_of_target, score_of_top, log_after, log_quiet)


def token_scores(predictions: Predictions, tokens: torch.Tensor, scale: float) -> torch.Tensor:
    """The scores of `tokens` (R, W) at the masked positions, float64 (R, W); NaN elsewhere."""
    masked = predictions.masked
    plane = torch.full_like(masked, math.nan, dtype=torch.float64)  # (R, W)
    for lanes, row, logits in predictions.by_lanes():
        masked_part = masked[lanes]  # (r, W)
        ids = tokens[lanes][masked_part]  # (c,)
        plane[lanes][masked_part] = scores(logits, scale)[row, ids]
    return plane
