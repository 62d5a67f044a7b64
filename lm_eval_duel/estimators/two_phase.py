"""The two-phase estimate: every block under a cache, a random sample of blocks also without it.

    estimate = sum over blocks of g_b + sum over sampled blocks of w_b (f_b - g_b)
    variance = sum over sampled blocks of w_b (w_b - 1) (f_b - g_b)^2

f_b and g_b are the log-probs of a block under the rule without and with the cache. f is what is estimated; g is cheap
and nearly equal, so the differences are small and few of them suffice. Both phases are a `DuelEstimator`, the second
one with fewer lanes.

With a share s, block b of a window is sampled if u_b < s, and w_b = 1 / s. The uniform number u_b depends on the seed,
the window's ids and b alone, so the sample is the same for every batch size, order, number of ranks and resumed run.
Blocks are drawn independently and with the same probability (Poisson sampling; Horvitz and Thompson 1952). Let I_b be 1
if block b is sampled, else 0. E[I_b w_b] = 1, so the estimate is unbiased. Var(I_b w_b) = 1 / s - 1 =
E[I_b w_b (w_b - 1)], and variances of independent blocks add up, so the variance of the estimate is
sum (1 / s - 1) (f_b - g_b)^2, and the second line is unbiased for it. Both hold for every window, and so for every
document and corpus.

A sample of fixed size, or strata that span windows, would need the other windows, and a window often has fewer blocks
than 1 / s. The price is that the variance has the mean square of the differences, not their variance.

Shapes: N windows, B blocks of a window.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any, Final, cast

import torch

from lm_eval_duel import rules
from lm_eval_duel.core.batch_size import Budget
from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.core.hashing import uniform
from lm_eval_duel.core.reveal import BlockSpan, WindowGroup
from lm_eval_duel.core.scores import IndexedScores, Kind, PhaseCounts, Score, known_sum
from lm_eval_duel.core.windows import Window, target_parts
from lm_eval_duel.denoisers.cached.denoiser import under_cache
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.arguments import SEED, TwoPhaseArguments
from lm_eval_duel.estimators.base import Estimator
from lm_eval_duel.estimators.checks import check_two_phase
from lm_eval_duel.estimators.duel import DuelEstimator
from lm_eval_duel.estimators.totals import TwoPhaseBlocks

BLOCK = 3  # key of the random numbers, different for each estimator
FIRST_CACHE: Final = "dual"  # the cached sampler of the first phase, if none is named
# Windows are taken some at a time, enough for their sampled blocks to fill this many network calls.
BATCHES = 4


class TwoPhase(Estimator):
    """An unbiased estimate of the log-likelihood that `Duel(denoiser, rule, block)` gives, with its standard error.

    Perplexity is a convex function of the log-likelihood, so the perplexity of an estimate is too high by about half
    its squared relative error: by 0.00125 % at a standard error of 0.5 %.

    Args:
        denoiser, rule, block: As in `Duel`.
        arguments: The share of blocks that are scored without the cache, too.
        cache: The cached sampler of the first phase, "dual" or "prefix". None: "dual".
        draw_seed: The seed of the sample.
        layout: The other arguments of `Estimator`.

    Raises:
        DuelError: If the network supports no cache, or none with this rule.
    """

    name = "two_phase"
    empty_score = Score(0.0, near_ties=0, kind=Kind.ESTIMATE, stderr=0.0, blocks=TwoPhaseBlocks())

    def __init__(
        self,
        denoiser: Denoiser,
        rule: str | rules.Rule,
        block: int | str | None,
        arguments: TwoPhaseArguments | None = None,
        *,
        cache: str | None = None,
        draw_seed: int = 0,
        **layout: Any,
    ):
        cache = cache or FIRST_CACHE
        rule = rules.parse(rule) if isinstance(rule, str) else rule
        check_two_phase(denoiser, rule, cache)
        super().__init__(denoiser, block, **layout)
        try:
            cached = under_cache(denoiser, cache)
        except DuelError as error:
            raise DuelError(f"estimator=two_phase needs a cached first phase: {error} Use estimator=duel.") from error
        layout["traced"] = False  # an estimate has no values of single tokens
        uncached_layout = {**layout, "batch_size": self.budget}
        if isinstance(layout.get("batch_size"), Budget):
            # Calls under the cache have a size of their own, found by trial. A network in memory, which may be in
            # training, leaves no memory for trials.
            layout["batch_size"] = None if denoiser.fixed_weights else self.budget.rows(denoiser.max_length)
        self.phases = {
            "cached": DuelEstimator(cached, rule, block, **layout),
            "uncached": DuelEstimator(denoiser, rule, block, **uncached_layout),
        }
        self.arguments = arguments or TwoPhaseArguments()
        self.cache = cache
        self.rule = rule
        self.draw_seed = SEED("draw_seed", draw_seed)

    def use_single_rows(self) -> None:
        for phase in self.phases.values():
            phase.use_single_rows()

    def describe(self) -> dict[str, object]:
        return {
            **super().describe(),
            **self.rule.describe(),
            "cheap_cache": self.cache,
            **self.arguments.describe(),
            "draw_seed": self.draw_seed,
        }

    def weights(self, windows: Sequence[Window]) -> torch.Tensor:
        """The weight of each block of each window, (N, B) float64; 0: not in the sample, or no block."""
        keys = [window.key for window in windows]
        blocks = [len(self.blocks(window)) for window in windows]
        return block_sample_weights(keys, blocks, self.arguments.sample, self.draw_seed)

    def score_group(self, group: WindowGroup) -> IndexedScores:
        """Score windows some at a time: their sampled blocks without the cache, then all their blocks under it."""
        weights = self.weights(group.windows)  # (N, B)
        lanes_of_call = self.phases["uncached"].budget.rows(group.windows[0].length)
        per_window = float((weights > 0).sum()) / len(weights)  # sampled blocks
        per_window = max(per_window, 1e-3)  # above 0, if no block of these windows is sampled
        size = math.ceil(BATCHES * lanes_of_call / per_window)  # windows
        for first in range(0, len(weights), size):
            members = slice(first, first + size)
            part = self.open(group.windows[members], group.window_indices[members])
            weight = weights[members]  # (n, B)
            sampled: list[BlockSpan] = []
            for row, window in enumerate(part.windows):
                for n, (start, width) in enumerate(self.blocks(window)):
                    if weight[row, n]:
                        sampled.append((row, start, width))
            uncached = dict(self._score_blocks("uncached", part, sampled))
            for row, cached in self._score_blocks("cached", part, self.block_spans(part)):
                estimate = self._estimate(part, row, weight[row], cached, uncached.get(row))
                yield first + row, estimate

    def _score_blocks(
        self,
        name: str,
        group: WindowGroup,
        spans: list[BlockSpan],
    ) -> IndexedScores:
        """The scores of these blocks in one phase; what they cost is added to the phase's counts."""
        if not spans:
            return
        duel = self.phases[name].with_counts(self.counts, self.row_checks)
        phase = self.counts.phases.setdefault(name, PhaseCounts())
        forwards_before = self.counts.forwards
        rows_before = self.counts.rows
        group = dataclasses.replace(group, opened=duel.denoiser.open)
        began = time.perf_counter()
        try:
            for scored in duel.score_blocks(group, spans, duel.followed):
                phase.seconds += time.perf_counter() - began
                yield scored
                began = time.perf_counter()  # what the caller does with a score is no part of the phase
            phase.seconds += time.perf_counter() - began
        finally:
            phase.forwards += self.counts.forwards - forwards_before
            phase.rows += self.counts.rows - rows_before

    def _estimate(
        self,
        group: WindowGroup,
        row: int,
        weights: torch.Tensor,
        cached: Score,
        uncached: Score | None,
    ) -> Score:
        """The estimate of a row's window. `weights`: (B,). `uncached` is None if none of its blocks is sampled."""
        window = group.windows[row]
        parts = target_parts(window, self.blocks(window))
        weight = weights[: len(parts)]  # (B,)
        cached_log_probs = [math.fsum(cached.token_logprobs[part]) for part in parts]
        g = torch.tensor(cached_log_probs, dtype=torch.float64)  # (B,)
        f = g.clone()  # (B,) where a block is not sampled its weight is 0, so f is not read
        for n, part in enumerate(parts):
            if not weight[n]:
                continue
            uncached = cast(Score, uncached)  # a block is sampled
            if not _in_one_step(part, cached, uncached):
                f[n] = math.fsum(uncached.token_logprobs[part])
        estimate, variance = combine(g, f, weight)
        if not (math.isfinite(estimate) and math.isfinite(variance)):
            index = group.window_indices[row]
            raise DuelError(
                f"Window {index} has a block of probability 0 with or without the cache, so its difference in "
                "log-probability is not finite. Use estimator=duel.",
                index,
            )
        blocks = TwoPhaseBlocks.from_blocks(g, f, weight, float(variance))
        return Score(
            log_prob=float(estimate),
            near_ties=known_sum(cached.near_ties, uncached.near_ties if uncached else 0),
            all_mask_starts=cached.all_mask_starts + (uncached.all_mask_starts if uncached else 0),
            kind=Kind.ESTIMATE,
            stderr=blocks.stderr,
            blocks=blocks,
        )


def _in_one_step(block: slice, *scores: Score) -> bool:
    """True if each phase revealed the block in one step.

    The first step of a block reads no kept keys, so f = g, and float noise must not count as a difference.
    """
    return all(max(score.reveal_steps[block]) <= 0 for score in scores)  # -1 at known positions


def block_sample_weights(keys: Sequence[int], blocks: Sequence[int], share: float, seed: int) -> torch.Tensor:
    """The weight of each block, (N, B) float64, for windows with these keys and numbers of blocks.

    0: not sampled, or no block.
    """
    block = torch.arange(max(blocks))  # (B,)
    u = uniform(torch.tensor(keys)[:, None], seed, BLOCK, block)  # (N, B)
    drawn = (u < share) & (block < torch.tensor(blocks)[:, None])  # (N, B)
    return drawn.double() / share


def combine(g: torch.Tensor, f: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The estimate of the sum of f over blocks, and of its variance: (..., B) each -> (...).

    `f` is read where `weight` is not 0.
    """
    difference = torch.where(weight > 0, f - g, 0.0)  # (..., B)
    estimate = g.sum(-1) + (weight * difference).sum(-1)
    variance = (weight * (weight - 1) * difference**2).sum(-1)
    return estimate, variance
