"""The Monte Carlo ELBO: a lower bound of log p under uniformly random unmasking, with its standard error.

A draw masks random positions of every span of a window (the whole target, or each block) and weights their log-probs:

    form            masks                                  weight        from
    count           l positions, l uniform in 1..m             m / l         LLaDA (Nie et al. 2025)
    ratio           each position with probability t           1 / t         MDLM, BD3-LM; t uniform in (eps, 1)
    score_entropy   each position with probability (1 - e) t   sigma'(t)     SEDD's own loss (Lou et al. 2024), e = 1e-3

m is the number of positions of the span. Draws are stratified in t (or l) within a replicate, also across the spans of
a window: t = frac(shift + draw / draws + span phi), with phi the golden ratio. Replicates have independent shifts, so
their spread gives the standard error. (The weights 1 / t have no finite variance: for ratios the error is an
underestimate if no draw had a small t. Counts have no such tail.) All random numbers are functions of the seed and the
window's ids, so results do not depend on batch size, order or rank.

Shapes: N windows, L row length, R lanes, W span width, S replicates.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import torch

from lm_eval_duel.core.accumulators import Step
from lm_eval_duel.core.decision import EVALUATE_ALL
from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.core.hashing import hashed, uniform
from lm_eval_duel.core.lanes import Lanes
from lm_eval_duel.core.reveal import Reveal, WindowGroup
from lm_eval_duel.core.scores import IndexedScores, Kind, Score
from lm_eval_duel.core.view import distinct
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.dit.denoiser import SEDD
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.arguments import ElboArguments
from lm_eval_duel.estimators.base import Estimator
from lm_eval_duel.estimators.checks import check_every_order
from lm_eval_duel.rules import rank

log = logging.getLogger("lm_eval.duel_mdm")

REPLICATES = 8  # the fewest for a standard error
FEW = 12  # in spans of at most this many positions draws are often equal: they are merged over the whole span
GOLDEN = (math.sqrt(5) - 1) / 2
POSITIONS, SHIFT = 1, 2  # keys of the random numbers: the masked positions of a draw, a replicate's shift
LAST = torch.iinfo(torch.int64).max


class Elbo(Estimator):
    """A Monte Carlo estimate of the ELBO of each window under uniformly random unmasking, in nats.

    Args:
        denoiser: A network that is not autoregressive.
        block: The positions that are masked together. None: the whole target. A number: one block, with the targets
            before it and [MASK] after it. "auto": the trained block of a block-causal network, else None.
        samples: Draws of each window. Fewer than 8 have no standard error.
        form: How positions are masked and weighted: "count", "ratio", "score_entropy" (SEDD only, whole target only),
            or "auto", score_entropy for SEDD and else count. docs/estimators.md has the formulas.
        eps: The least t of "ratio" and "score_entropy". Above 0 the value is not a bound.
        seed: The seed of the draws.
        layout: The other arguments of `Estimator`.

    Raises:
        DuelError: If the network has no such bound, or an argument is out of range.
    """

    name = "elbo"
    empty_score = Score(0.0, kind=Kind.UPPER_BOUND, stderr=0.0)

    def __init__(
        self,
        denoiser: Denoiser,
        block: int | str | None = "auto",
        *,
        samples: int = 128,
        form: str = "auto",
        eps: float = 0.0,
        seed: int = 0,
        **layout: Any,
    ):
        if denoiser.attention == "causal":
            raise DuelError("An autoregressive network needs no bound: use estimator=ar.")
        check_every_order(denoiser, self.name)
        if block == "auto":
            block = denoiser.block  # the trained one; None: the whole target
        own = ElboArguments(samples, resolve_form(denoiser, form, block), elbo_eps=eps)
        self.samples, self.form, self.eps, self.seed = own.mc_samples, own.elbo_form, own.elbo_eps, seed
        self.replicates = replicates(samples)
        warn_if_few(samples)
        super().__init__(denoiser, block, **layout)

    def describe(self) -> dict[str, object]:
        spec = {"grid": self.grid} if self.block else {}  # for a whole target all grids are equal
        if self.form == "score_entropy":
            spec["sigma"] = "that of each draw"
        return {
            **spec,
            "estimator": self.name,
            "elbo_form": self.form,
            "elbo_block": self.block,
            "elbo_eps": float(self.eps),
            "mc_samples": self.samples,
            "draw_seed": self.seed,
        }

    def lanes(self, window: Window) -> int:
        return self.samples * len(self.blocks(window))

    def score_group(self, group: WindowGroup) -> IndexedScores:
        if self.form == "score_entropy":
            opened = partial(cast(SEDD, self.denoiser).open_at, level=lambda lanes: lanes.memory[1][:, 0])
            group = dataclasses.replace(group, opened=opened)
        sums = ElboAccumulator(group, self, self.samples)
        work = (self.budget, self.counts, self.row_checks)
        yield from Reveal(group, EVALUATE_ALL, self._draws(group, sums), sums, *work)
        yield from sums.finished()  # their last draws mask nothing

    def _draws(self, group: WindowGroup, sums: ElboAccumulator) -> Iterator[Lanes]:
        """Every draw of every span; equal draws of a span once, with the sum of their weights."""
        key = torch.tensor([window.key for window in group.windows], device=group.rows.ids.device)  # (N,)
        places = self.block_spans(group)
        nth = [n for window in group.windows for n in range(len(self.blocks(window)))]  # each place's number in a row
        done = 0
        while done < len(places):
            room = self.budget.room(group.view, EVALUATE_ALL, group.fresh(places[done : done + 1]))
            count = max(1, room // self.samples)
            spans = group.fresh(places[done : done + count])
            nths = torch.tensor(nth[done : done + count], device=key.device)  # (r,)
            few = spans.masked.shape[1] <= FEW
            for draws in torch.arange(self.samples, device=key.device).split(self.samples if few else room):
                place = torch.arange(len(spans), device=key.device).repeat_interleave(len(draws))  # (R,)
                draw = draws.repeat(len(spans))  # (R,)
                drawn = self._masked_lanes(group, spans.select(place), key, nths[place], draw)
                lanes = self._merged(drawn, place, draw)
                sums.skip(spans.row, len(draws), lanes.row)
                if len(lanes):
                    yield lanes
            done += count

    def _masked_lanes(
        self, group: WindowGroup, lanes: Lanes, key: torch.Tensor, span: torch.Tensor, draw: torch.Tensor
    ) -> Lanes:
        """The lanes with the positions of `draw` (R,) masked and the targets at the others.

        Their memory is the weight of each position, and SEDD's noise level.
        """
        key = key[lanes.row]  # (R,)
        t = self._levels(key, span, draw)
        keys = key[:, None], self.seed, POSITIONS, draw[:, None], lanes.columns - lanes.origin[:, None]  # (R, W)
        level: tuple[torch.Tensor, ...] = ()
        if self.form == "count":
            m = lanes.masked.sum(1)  # (R,)
            count = 1 + (m * t).long().minimum(m - 1)  # (R,)
            masked = lanes.masked & (rank(torch.where(lanes.masked, hashed(*keys), LAST)) < count[:, None])
            weight = m.double() / count  # (R,)
        else:
            chance, weight = t, 1 / t  # (R,) each
            if self.form == "score_entropy":
                level = (cast(SEDD, self.denoiser).schedule(t),)  # (R,)
                chance, weight = -torch.expm1(-level[0]), torch.expm1(level[0]) / t
            masked = lanes.masked & (uniform(*keys) < chance[:, None])  # (R, W)
        memory = tuple(plane[:, None].expand_as(masked) for plane in (weight, *level))
        return dataclasses.replace(lanes.show(group.rows.targets(lanes), masked), memory=memory)

    def _levels(self, key: torch.Tensor, span: torch.Tensor, draw: torch.Tensor) -> torch.Tensor:
        """t of each draw, uniform in (eps, 1); for counts, which have no eps, the share that l is made of, (R,)."""
        replicate, strata = draw % self.replicates, self.samples // self.replicates  # (R,)
        shift = uniform(key, self.seed, SHIFT, replicate)  # (R,)
        t = (shift + (draw // self.replicates).double() / strata + span.double() * GOLDEN) % 1  # (R,)
        return self.eps + (1 - self.eps) * t

    def draws(self, window: Window) -> list[list[tuple[list[int], float | None]]]:
        """The draws of a window: of each span the masked columns, and t unless `form` is "count"."""
        group = self.open([window], [0])
        lanes = group.fresh(self.block_spans(group))
        key = torch.full_like(lanes.row[:1], window.key)  # (1,)
        span, found = torch.arange(len(lanes), device=key.device), []
        for number in range(self.samples):
            draw = torch.full_like(lanes.row, number)  # (R,)
            masked, levels = (
                self._masked_lanes(group, lanes, key, span, draw).masked,
                self._levels(key[lanes.row], span, draw),
            )
            t = [None if self.form == "count" else level for level in levels.tolist()]
            found.append([(lanes.columns[r][masked[r]].tolist(), t[r]) for r in range(len(lanes))])
        return found

    def _merged(self, lanes: Lanes, place: torch.Tensor, draw: torch.Tensor) -> Lanes:
        """The draws that mask something, equal ones of a span `place` (R,) once.

        Their weight becomes (R, W, S), by replicate. If each draw has its own noise level, all are different.
        """
        weight, *level = lanes.memory  # (R, W) each
        first, number = distinct(place, lanes.masked, draw) if level else distinct(place, lanes.masked)
        weights = weight.new_zeros(len(first), self.replicates)  # (r, S)
        weights.index_put_((number, draw % self.replicates), weight[:, 0], accumulate=True)
        kept = lanes.select(first)
        planes = weights[:, None].expand(-1, kept.masked.shape[1], -1), *(plane[first] for plane in level)
        kept = dataclasses.replace(kept, memory=planes)
        return kept.select(kept.masked.any(1))


class BoundAccumulator:
    """The sums over the draws of one group of windows, on the network's device, in float64."""

    def __init__(self, group: WindowGroup, estimator: Estimator, samples: int):
        count, length = group.rows.ids.shape
        device = group.rows.ids.device
        self.windows, self.estimator = group.windows, estimator
        self.samples, self.replicates = samples, replicates(samples)
        self.length = length  # the column of positions that are not scored
        # (N, L + 1 + S): of each column, and of each replicate
        self.log_probs = torch.zeros(count, length + 1 + self.replicates, dtype=torch.float64, device=device)
        spans = torch.tensor([len(estimator.blocks(window)) for window in group.windows], device=device)  # (N,)
        self.waiting = spans * samples  # (N,) draws that are missing

    def put(self, lanes: Lanes, values: torch.Tensor, replicate: torch.Tensor, of_draw: torch.Tensor) -> None:
        """Add the terms (R, W) of draws, and their sums (R, n) to the replicates (R, n)."""
        column = torch.where(lanes.masked, lanes.columns, self.length)  # (R, W)
        column = torch.cat([column, self.length + 1 + replicate], 1)  # (R, W + n)
        values = torch.cat([values, of_draw], 1)  # (R, W + n)
        row, done = lanes.row[:, None].expand_as(column), -torch.ones_like(lanes.row)  # (R, W + n), (R,)
        # on out-of-memory before this line, nothing has been added yet
        self.log_probs.index_put_((row, column), values, accumulate=True)
        self.waiting.index_add_(0, lanes.row, done)

    def finished(self) -> IndexedScores:
        """(row, bound) of the windows that miss no draw, each once."""
        rows = (self.waiting == 0).nonzero()[:, 0]
        self.waiting[rows] = -1  # taken
        shares, means = self.log_probs[rows].cpu().tensor_split([self.length + 1], dim=1)
        shares, means = shares / self.samples, means / (self.samples // self.replicates)  # (n, L + 1), (n, S)
        for n, row in enumerate(rows.tolist()):
            start, count = len(self.windows[row].context), len(self.windows[row].target)
            error = float(means[n].std() / math.sqrt(self.replicates)) if self.replicates > 1 else math.nan
            bound = Score(
                log_prob=float(means[n].mean()),
                token_logprobs=tuple(shares[n, start : start + count].tolist()),
                kind=Kind.UPPER_BOUND,
                stderr=error if math.isfinite(error) else None,  # of infinite log-probs neither
            )
            yield row, bound


class ElboAccumulator(BoundAccumulator):
    """The sums over draws of masked positions."""

    def skip(self, rows: torch.Tensor, samples: int, kept: torch.Tensor) -> None:
        """Skip the draws in `rows`, `samples` a span, that are not `kept`: they equal a kept one or mask nothing."""
        self.waiting.index_add_(0, rows, torch.full_like(rows, -samples))
        self.waiting.index_add_(0, kept, torch.ones_like(kept))

    def add(self, step: Step) -> None:
        """Add the weighted log-probs (R, W) of the draws in `lanes`."""
        lanes, predictions, _, _, log_prob = step
        weight, *level = lanes.memory  # (R, W, S), (R, W)
        if level:
            log_prob = -score_entropy(level[0], log_prob, predictions.log_sum, self.estimator.denoiser.vocab_size - 1)
        log_prob = torch.where(lanes.masked, log_prob, 0.0)  # (R, W)
        of_draw = log_prob.sum(1, keepdim=True)  # (R, 1)
        # a replicate that did not draw these positions has weight 0, and log-probs may be infinite
        of_draw = torch.where(weight[:, 0] > 0, of_draw * weight[:, 0], 0.0)  # (R, S)
        replicate = torch.arange(of_draw.shape[1], device=of_draw.device).expand_as(of_draw)  # (R, S)
        self.put(lanes, log_prob * weight.sum(2), replicate, of_draw)

    def take(self, finished: Lanes) -> IndexedScores:
        """(row, bound) of the windows that miss no draw."""
        return self.finished()


def score_entropy(sigma: torch.Tensor, log_prob: torch.Tensor, log_sum: torch.Tensor, tokens: int) -> torch.Tensor:
    """SEDD's loss at masked positions (Lou et al. 2024, eq. 5, absorbing graph), from log-probabilities and the log of
    the logits' sum:

        sum_v s_v - r log s_x + r (log r - 1),   s_v = exp(logit_v) / (expm1(sigma) n),   r = 1 / expm1(sigma)

    `sigma`, `log_prob` (of the target x), `log_sum`: (R, W); `tokens`: n, the size of the vocabulary.
    """
    log_r = -torch.expm1(sigma).log()  # (R, W)
    total = log_sum + log_r - math.log(tokens)  # (R, W) log of the sum of scores
    return total.exp() - log_r.exp() * (log_prob + total - log_r + 1)


def replicates(samples: int) -> int:
    """The number of replicates of equal size: 16 or a little more, at least 8, or 1 if there are too few draws."""
    least = min(2 * REPLICATES, samples)
    return next(count for count in range(least, samples + 1) if samples % count == 0) if samples >= REPLICATES else 1


def warn_if_few(samples: int) -> None:
    """Warn if there are too few draws for a standard error."""
    if samples < REPLICATES:
        log.warning(
            "mc_samples=%d is less than %d, too few for a Monte Carlo standard error: stderr is null, and only the "
            "error over windows (window_stderr) is known",
            samples,
            REPLICATES,
        )


def resolve_form(denoiser: Denoiser, form: str, block: int | str | None) -> str:
    """The form to use; "auto" is score_entropy for SEDD over a whole target, else count.

    Raises DuelError for score_entropy if it is not defined.
    """
    sedd = isinstance(denoiser, SEDD)
    if form == "auto":
        return "score_entropy" if sedd and block is None else "count"
    if form == "score_entropy" and not sedd:
        raise DuelError("elbo_form=score_entropy is SEDD's own loss and this network is not SEDD; use count or ratio.")
    if form == "score_entropy" and block is not None:
        raise DuelError("elbo_form=score_entropy masks positions of the whole target; use elbo_block=none with it.")
    return form
