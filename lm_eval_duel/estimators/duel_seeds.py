"""The mean over noise seeds of the likelihood under commit-once sampling: a bound of log p in expectation.

    p(x) = E p(x | seed),   so   E log p(x | seed) <= log p(x)        (Jensen)

All windows share the seeds, so their errors are not independent: sums over windows are made for each seed, and the
spread of these sums is the error (core/scores.py, `Value`).

A second value is the log of the mean of p over seeds, taken block by block and added up. The noise of different blocks
is independent, so this bound is tighter in expectation, as are importance-weighted bounds (Burda et al. 2016). A rule
that keeps a history over blocks carries the noise of one into the next, so there all blocks of a window count as one.

Shapes: N windows, S seeds, B blocks of a window.
"""

from __future__ import annotations

import dataclasses
import math
from functools import cached_property
from typing import Any

import torch

from lm_eval_duel import rules
from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.core.reveal import WindowGroup
from lm_eval_duel.core.scores import IndexedScores, Score, Value, known_sum
from lm_eval_duel.core.windows import Window, target_parts
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.arguments import CommitOnceArguments, SeedsArguments
from lm_eval_duel.estimators.duel import DuelEstimator, noise_spec
from lm_eval_duel.estimators.registry import LOG_MEAN

EFFECTIVE = 10.0  # the fewest effective seeds with which the error of a log-mean-exp is known


class DuelSeeds(DuelEstimator):
    """The mean of log p(x | seed) over noise seeds, nats, with its standard error over seeds.

    Args:
        denoiser: A network whose noise is random tokens.
        rule, block, layout: As in `DuelEstimator`.
        arguments: The number of seeds, and what each `DuelEstimator` takes.

    Raises:
        DuelError: If the noise of the network is masks, which have no seeds.
    """

    name = "duel_seeds"
    decodes = False
    takes_noise = "only"

    def __init__(
        self,
        denoiser: Denoiser,
        rule: str | rules.Rule,
        block: int | str | None,
        arguments: SeedsArguments | None = None,
        **layout: Any,
    ):
        if denoiser.noise_training is None:
            raise DuelError(f"estimator={self.name} is for networks whose noise is random tokens; use estimator=duel.")
        arguments = arguments or SeedsArguments()
        super().__init__(denoiser, rule, block, arguments, **layout)
        self.seeds = range(self.noise_seed, self.noise_seed + arguments.noise_seeds)

    @cached_property
    def empty_score(self) -> Score:  # type: ignore[override]
        zeros = (0.0,) * len(self.seeds)
        log_mean = self.bound(0.0)
        if len(self.seeds) >= EFFECTIVE:
            log_mean = self.bound(0.0, seeds=zeros)
        mean = self.bound(0.0, 0.0, zeros)
        return dataclasses.replace(mean, near_ties=0, others={LOG_MEAN: log_mean})

    def bound(
        self,
        nats: float,
        error: float | None = None,
        seeds: tuple[float, ...] = (),
    ) -> Score:
        """A value over seeds, as a score. `seeds`: the value under each of them, from which the error of sums comes."""
        return Score(
            nats,
            kind=self.value_template.kind,
            note=self.value_template.note,
            stderr=error,
            seeds=seeds,
        )

    def describe(self) -> dict[str, object]:
        return {
            **super().describe(),
            **noise_spec(self.denoiser, None),
            "noise_seed": self.seeds[0],
            "noise_seeds": len(self.seeds),
        }

    def with_seed(self, seed: int) -> DuelEstimator:
        """The likelihood given the noise of one seed."""
        noise = CommitOnceArguments(noise_seed=seed)
        duel = DuelEstimator(self.denoiser, self.rule, self.block, noise, grid=self.grid)
        return duel.with_denoiser(self.denoiser)  # which has the other arguments of commit-once sampling

    def lanes(self, window: Window) -> int:
        return len(self.seeds) * super().lanes(window)

    def score_group(self, group: WindowGroup) -> IndexedScores:
        """Each window is scored once for each seed, all of them side by side."""
        count = len(self.seeds)
        windows: list[Window] = []
        indices: list[int] = []
        for window, index in zip(group.windows, group.window_indices, strict=True):
            windows += [window] * count
            indices += [index] * count
        repeated = self.open(windows, indices)
        seeds = torch.tensor(self.seeds, device=repeated.rows.ids.device)  # (S,)
        rows = dataclasses.replace(repeated.rows, noise_seed=seeds.repeat(len(group.windows)))  # (N S,)
        repeated = dataclasses.replace(repeated, rows=rows)

        unfinished: dict[int, dict[int, Score]] = {}  # of each window, by the place of the seed
        for n, score in super().score_group(repeated):
            row, place = divmod(n, count)
            scores = unfinished.setdefault(row, {})
            scores[place] = score
            if len(scores) == count:
                del unfinished[row]
                in_order = [scores[place] for place in range(count)]
                yield row, self.combined(group.windows[row], in_order)

    def combined(self, window: Window, scores: list[Score]) -> Score:
        """The score of a window from its scores under each seed."""
        value = Value.from_seeds([score.log_prob for score in scores])
        tokens = torch.tensor([score.token_logprobs for score in scores], dtype=torch.float64)  # (S, T)
        parts = target_parts(window, self.blocks(window))
        block_log_probs = torch.stack([tokens[:, part].sum(1) for part in parts], 1)  # (S, B)
        near_ties: int | None = 0
        for score in scores:
            near_ties = known_sum(near_ties, score.near_ties)
        return dataclasses.replace(
            self.bound(value.nats, value.error, value.seeds),
            token_logprobs=tuple(tokens.mean(0).tolist()),
            near_ties=near_ties,
            all_mask_starts=sum(score.all_mask_starts for score in scores),
            others={LOG_MEAN: self._log_mean(block_log_probs)},
        )

    def _log_mean(self, block_log_probs: torch.Tensor) -> Score:
        """The log of the mean over seeds of the probability of each block, from log-probs (S, B), summed over blocks.

        Its `seeds` are the value plus the influence of each seed, which is w_s / mean(w) - 1 summed over blocks (the
        infinitesimal jackknife). Their mean is the value, and their spread gives its error, also for sums over windows.
        They are NaN, and the error is not known, if one block has too few effective seeds, (sum w)^2 / sum w^2.
        """
        count = len(block_log_probs)
        log_means = block_log_probs.logsumexp(0) - math.log(count)  # (B,)
        nats = float(log_means.sum())
        weight = (block_log_probs - log_means).exp()  # (S, B) of mean 1
        effective = count**2 / weight.square().sum(0)  # (B,)
        if count < EFFECTIVE:
            return self.bound(nats)
        seeds = (math.nan,) * count
        if math.isfinite(nats) and bool((effective >= EFFECTIVE).all()):
            influence = (weight - 1).sum(1)  # (S,)
            seeds = tuple((nats + influence).tolist())
        error = Value.from_seeds(seeds).error
        return self.bound(nats, error, seeds)
