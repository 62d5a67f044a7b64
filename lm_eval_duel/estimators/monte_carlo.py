"""Monte Carlo bounds: the mean of random draws of every span of a window (the target, or each block), with its error.

Draws are stratified within a replicate, also across the spans of a window, with phi the golden ratio:

    t = frac(shift + draw / draws + span phi)

Replicates have independent shifts, so their spread gives the standard error. All random numbers are functions of the
seed and the window's ids, so results do not depend on batch size, order or rank.

Shapes: N windows, L row length, R lanes, W span width, S replicates.
"""

from __future__ import annotations

import abc
import logging
import math
from collections.abc import Iterator
from typing import Any

import torch

from lm_eval_duel.core.accumulators import Step
from lm_eval_duel.core.decision import EVALUATE_ALL, UnmaskingRule
from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.core.hashing import uniform
from lm_eval_duel.core.lanes import Lanes
from lm_eval_duel.core.reveal import WindowGroup
from lm_eval_duel.core.scores import IndexedScores, Kind, Score
from lm_eval_duel.core.windows import Window
from lm_eval_duel.estimators.base import Estimator

log = logging.getLogger("lm_eval.duel_mdm")

REPLICATES = 8  # the fewest for a standard error
FEW = 12  # in spans of at most this many positions draws are often equal: all of a span are made together
GOLDEN = (math.sqrt(5) - 1) / 2
SHIFT = 2  # key of the random numbers: a replicate's shift


class MonteCarloBound(Estimator):
    """The mean of weighted draws. Subclasses implement `drawn` and `terms`."""

    empty_score = Score(0.0, kind=Kind.UPPER_BOUND, stderr=0.0)

    def __init__(self, denoiser: Denoiser, block: int | str | None, samples: int, seed: int, **layout: Any):
        self.samples, self.seed, self.replicates = samples, seed, replicates(samples)
        if samples < REPLICATES:
            log.warning(
                "mc_samples=%d is less than %d, too few for a Monte Carlo standard error: stderr is null, and only the "
                "error over windows (window_stderr) is known",
                *(samples, REPLICATES),
            )
        super().__init__(denoiser, block, **layout)

    @property
    def evaluated(self) -> UnmaskingRule:
        """The rule that reveals all positions of a draw at once."""
        return EVALUATE_ALL

    def lanes(self, window: Window) -> int:
        return self.samples * len(self.blocks(window))

    @abc.abstractmethod
    def drawn(self, group: WindowGroup, lanes: Lanes, draw: torch.Tensor) -> Lanes:
        """The lanes to evaluate for draws (R,) of the spans `lanes`."""

    @abc.abstractmethod
    def terms(self, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """The weighted log-probs of drawn lanes (R, W), and their sums in each replicate (R, S)."""

    def score_group(self, group: WindowGroup) -> IndexedScores:
        sums = BoundAccumulator(group, self)
        yield from self.reveal(group, self.evaluated, self._draws(group, sums), sums)
        yield from sums.finished()  # their last draws mask nothing

    def _draws(self, group: WindowGroup, sums: BoundAccumulator) -> Iterator[Lanes]:
        """The lanes of every draw of every span."""
        spans, device = self.block_spans(group), group.rows.ids.device
        for fresh, room in self.batches(group, spans, lambda room: room // self.samples, self.evaluated):
            few = fresh.masked.shape[1] <= FEW
            for draws in torch.arange(self.samples, device=device).split(self.samples if few else room):
                place = torch.arange(len(fresh), device=device).repeat_interleave(len(draws))  # (R,)
                lanes = self.drawn(group, fresh.select(place), draws.repeat(len(fresh)))
                sums.skip(fresh.row, len(draws), lanes.row)
                if len(lanes):
                    yield lanes

    def strata(self, group: WindowGroup, lanes: Lanes, draw: torch.Tensor) -> torch.Tensor:
        """The stratified uniform number of each draw, (R,)."""
        shift = uniform(group.keys[lanes.row], self.seed, SHIFT, draw % self.replicates)  # (R,)
        of_draw = (draw // self.replicates).double() / (self.samples // self.replicates)  # (R,)
        return (shift + of_draw + self.block_numbers(lanes).double() * GOLDEN) % 1


class BoundAccumulator:
    """The sums over the draws of one group of windows, on the network's device, in float64."""

    def __init__(self, group: WindowGroup, bound: MonteCarloBound):
        count, self.length = group.rows.ids.shape  # the column of positions that are not scored
        self.windows, self.bound, device = group.windows, bound, group.rows.ids.device
        self.log_probs = torch.zeros(count, self.length + 1, dtype=torch.float64, device=device)  # (N, L + 1)
        self.sums = self.log_probs.new_zeros(count, bound.replicates)  # (N, S)
        self.waiting = torch.tensor([bound.lanes(window) for window in group.windows], device=device)  # (N,) draws

    def skip(self, rows: torch.Tensor, draws: int, kept: torch.Tensor) -> None:
        """Skip the draws of spans in `rows`, `draws` each, that are not `kept`: they equal one or mask nothing."""
        self.waiting.index_add_(0, rows, torch.full_like(rows, -draws))
        self.waiting.index_add_(0, kept, torch.ones_like(kept))

    def add(self, step: Step) -> None:
        """Add the terms of draws."""
        lanes, (values, of_replicates) = step.lanes, self.bound.terms(step)  # (R, W), (R, S)
        column = torch.where(lanes.masked, lanes.columns, self.length)  # (R, W)
        row, done = lanes.row[:, None].expand_as(column), -torch.ones_like(lanes.row)  # (R, W), (R,)
        sums = self.sums.index_add(0, lanes.row, of_replicates)  # (N, S)
        # on out-of-memory before this line, nothing has been added yet
        self.log_probs.index_put_((row, column), values, accumulate=True)
        self.sums = sums
        self.waiting.index_add_(0, lanes.row, done)

    def take(self, finished: Lanes) -> IndexedScores:
        """(row, bound) of the windows that miss no draw."""
        return self.finished()

    def finished(self) -> IndexedScores:
        """(row, bound) of the windows that miss no draw, each once."""
        rows, count = (self.waiting == 0).nonzero()[:, 0], self.bound.replicates
        self.waiting[rows] = -1  # taken
        shares, means = self.log_probs[rows].cpu() / self.bound.samples, self.sums[rows].cpu()  # (n, L + 1), (n, S)
        means /= self.bound.samples // count
        for n, row in enumerate(rows.tolist()):
            window = self.windows[row]
            error = float(means[n].std() / math.sqrt(count)) if count > 1 else math.nan
            bound = Score(
                log_prob=float(means[n].mean()),
                token_logprobs=tuple(shares[n, len(window.context) :][: len(window.target)].tolist()),
                kind=Kind.UPPER_BOUND,
                stderr=error if math.isfinite(error) else None,  # of infinite log-probs neither
            )
            yield row, bound


def replicates(samples: int) -> int:
    """The number of replicates of equal size: 16 or a little more, at least 8, or 1 if there are too few draws."""
    least = min(2 * REPLICATES, samples)
    return next(count for count in range(least, samples + 1) if samples % count == 0) if samples >= REPLICATES else 1
