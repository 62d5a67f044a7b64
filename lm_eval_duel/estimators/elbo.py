"""Monte Carlo bounds: the mean of random draws of every span of a window (the target, or each block), with its error.

Draws are stratified within a replicate, also across the spans of a window, with phi the golden ratio:

    t = frac(shift + i / n + span phi)      of draw i of the n draws of a replicate

Replicates have independent shifts, so their spread gives the standard error. All random numbers are functions of the
seed and the window's ids, so results do not depend on batch size, order or rank.

The ELBO is the lower bound of log p under uniformly random unmasking. A draw masks random positions of every span, of m
positions, and weights their log-probs:

    form            masks                                      weight        from
    count           l positions, l uniform in 1..m             m / l         LLaDA (Nie et al. 2025)
    ratio           each position with probability t           1 / t         MDLM, BD3-LM; t uniform in (eps, 1)
    score_entropy   each position with probability (1 - e) t   sigma'(t)     SEDD's own loss (Lou et al. 2024), e = 1e-3

The weights 1 / t have no finite variance: for ratios the error is an underestimate if no draw had a small t. Counts
have no such tail. The bound of random-token noise is in noised_elbo.py.

Shapes: N windows, L row length, R lanes, W span width, S replicates.
"""

from __future__ import annotations

import abc
import dataclasses
import logging
import math
from collections.abc import Iterator
from functools import cached_property, partial
from typing import Any, cast

import torch

from lm_eval_duel.core.decision import EVALUATE_ALL, UnmaskingRule
from lm_eval_duel.core.denoiser import Denoiser, distinct
from lm_eval_duel.core.hashing import hashed, uniform
from lm_eval_duel.core.lanes import Lanes
from lm_eval_duel.core.reveal import Step, WindowGroup
from lm_eval_duel.core.scores import IndexedScores, Score
from lm_eval_duel.core.windows import Window
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.arguments import SEED, ElboArguments
from lm_eval_duel.estimators.base import Estimator
from lm_eval_duel.estimators.checks import check_every_order
from lm_eval_duel.rules import rank

log = logging.getLogger("lm_eval.duel_mdm")

REPLICATES = 16  # the fewest for a standard error: 1.96 errors of 8 cover 91 % even of normal draws
# In spans of at most this many positions draws are often equal. All draws of such a span are made together, so that
# equal ones are found and evaluated once.
FEW = 12
GOLDEN = (math.sqrt(5) - 1) / 2
SHIFT = 2  # key of the random numbers: a replicate's shift


class MonteCarloBound(Estimator):
    """The mean of weighted draws. Subclasses implement `make_draws` and `terms`."""

    def __init__(
        self,
        denoiser: Denoiser,
        block: int | str | None,
        samples: int,
        draw_seed: int,
        **layout: Any,
    ):
        self.samples = samples
        self.draw_seed = SEED("draw_seed", draw_seed)
        self.replicates = replicates(samples)
        if samples < REPLICATES:
            log.warning(
                "mc_samples=%d is less than %d, too few draws for a Monte Carlo standard error, so "
                "the values have none",
                samples,
                REPLICATES,
            )
        super().__init__(denoiser, block, **layout)

    @property
    def rule_of_draws(self) -> UnmaskingRule:
        """The rule that reveals all positions of a draw at once."""
        return EVALUATE_ALL

    def lanes(self, window: Window) -> int:
        return self.samples * len(self.blocks(window))

    @abc.abstractmethod
    def make_draws(self, group: WindowGroup, lanes: Lanes, draw_index: torch.Tensor) -> Lanes:
        """The lanes to evaluate for the draws with these numbers (R,) of the spans `lanes` (R,)."""

    @abc.abstractmethod
    def terms(self, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """The weighted log-probs of draws (R, W), and their sums in each replicate (R, S)."""

    @cached_property
    def empty_score(self) -> Score:  # type: ignore[override]
        return Score(0.0, kind=self.value_template.kind, note=self.value_template.note, stderr=0.0)

    def score_group(self, group: WindowGroup) -> IndexedScores:
        sums = BoundAccumulator(group, self)
        lanes = self._every_draw(group, sums)
        yield from self.reveal(group, self.rule_of_draws, lanes, sums)
        yield from sums.finished()  # windows whose last draws mask nothing

    def _every_draw(self, group: WindowGroup, sums: BoundAccumulator) -> Iterator[Lanes]:
        """The lanes of every draw of every span."""

        def spans_at_once(room: int) -> int:
            return room // self.samples

        spans = self.block_spans(group)
        device = group.rows.ids.device
        indices = torch.arange(self.samples, device=device)
        for fresh, room in self.batches(group, spans, spans_at_once, self.rule_of_draws):
            is_short = fresh.masked.shape[1] <= FEW
            for part in indices.split(self.samples if is_short else room):  # the same draws of every span
                span = torch.arange(len(fresh), device=device).repeat_interleave(len(part))  # (R,)
                lanes = self.make_draws(group, fresh.select(span), part.repeat(len(fresh)))
                sums.skip(fresh.row, len(part), lanes.row)
                if len(lanes):
                    yield lanes

    def strata(self, group: WindowGroup, lanes: Lanes, draw_index: torch.Tensor) -> torch.Tensor:
        """The stratified uniform number of each draw, (R,)."""
        shift = uniform(group.keys[lanes.row], self.draw_seed, SHIFT, draw_index % self.replicates)  # (R,)
        stratum = (draw_index // self.replicates).double() / (self.samples // self.replicates)  # (R,)
        # blocks of one window move on by the golden ratio, so that they do not all have few masks in the same draw
        return (shift + stratum + self.block_numbers(lanes).double() * GOLDEN) % 1


class BoundAccumulator:
    """The sums over the draws of one group of windows, on the network's device, in float64."""

    def __init__(self, group: WindowGroup, bound: MonteCarloBound):
        count, self.length = group.rows.ids.shape
        device = group.rows.ids.device
        self.windows = group.windows
        self.bound = bound
        # one column more than the rows, which takes what is written at positions that are not scored
        self.log_probs = torch.zeros(count, self.length + 1, dtype=torch.float64, device=device)  # (N, L + 1)
        self.sums = self.log_probs.new_zeros(count, bound.replicates)  # (N, S)
        draws = [bound.lanes(window) for window in group.windows]
        self.waiting = torch.tensor(draws, device=device)  # (N,) draws that are missing

    def skip(self, rows: torch.Tensor, draws: int, kept: torch.Tensor) -> None:
        """Wait no longer for draws that equal another one or mask nothing.

        `rows`: the window of each span; `draws`: how many draws of each span were made; `kept`: the window of each lane
        that is left of them.
        """
        self.waiting.index_add_(0, rows, torch.full_like(rows, -draws))
        self.waiting.index_add_(0, kept, torch.ones_like(kept))

    def add(self, step: Step) -> None:
        """Add the terms of draws."""
        lanes = step.lanes
        values, replicate_sums = self.bound.terms(step)  # (R, W), (R, S)
        column = torch.where(lanes.masked, lanes.columns, self.length)  # (R, W)
        row = lanes.row[:, None].expand_as(column)  # (R, W)
        done = -torch.ones_like(lanes.row)  # (R,)
        sums = self.sums.index_add(0, lanes.row, replicate_sums)  # (N, S)
        # on out-of-memory before this line, nothing has been added yet
        self.log_probs.index_put_((row, column), values, accumulate=True)
        self.sums = sums
        self.waiting.index_add_(0, lanes.row, done)

    def take(self, finished: Lanes) -> IndexedScores:
        """(row, bound) of the windows that miss no draw."""
        return self.finished()

    def finished(self) -> IndexedScores:
        """(row, bound) of the windows that miss no draw, each once."""
        count = self.bound.replicates
        rows = (self.waiting == 0).nonzero()[:, 0]  # (n,)
        self.waiting[rows] = -1  # taken
        shares = self.log_probs[rows].cpu() / self.bound.samples  # (n, L + 1)
        means = self.sums[rows].cpu() / (self.bound.samples // count)  # (n, S)
        for n, row in enumerate(rows.tolist()):
            window = self.windows[row]
            error = math.nan  # unknown
            if count > 1:
                error = float(means[n].std() / math.sqrt(count))
            begin = len(window.context)
            target = slice(begin, begin + len(window.target))
            bound = Score(
                log_prob=float(means[n].mean()),
                token_logprobs=tuple(shares[n, target].tolist()),
                kind=self.bound.empty_score.kind,
                note=self.bound.empty_score.note,
                stderr=error if math.isfinite(error) else None,  # NaN for infinite log-probs, too
            )
            yield row, bound


def replicates(samples: int) -> int:
    """The number of replicates of equal size: 16 or a little more, or 1 if there are too few draws."""
    if samples < REPLICATES:
        return 1
    return next(count for count in range(REPLICATES, samples + 1) if samples % count == 0)


POSITIONS = 1  # key of the random numbers: the masked positions of a draw
LAST = torch.iinfo(torch.int64).max


class Elbo(MonteCarloBound):
    """A Monte Carlo estimate of the ELBO of each window under uniformly random unmasking, in nats.

    Args:
        denoiser: A network that is not autoregressive.
        arguments: `elbo_block`: the positions that are masked together. None: the whole target. A number: one block,
            with the targets before it and [MASK] after it. "auto": the trained block of a block-causal network, else
            None. `elbo_form`: how positions are masked and weighted: "count", "ratio", "score_entropy" (SEDD only,
            whole target only), or "auto", score_entropy for SEDD and else count; docs/estimators.md has the formulas.
            `elbo_eps`: the least t of "ratio" and "score_entropy"; above 0 the value is not a bound. `mc_samples`:
            draws of each window; fewer than 16 have no standard error.
        draw_seed: The seed of the draws.
        layout: The other arguments of `Estimator`.

    Raises:
        DuelError: If the network has no such bound, or an argument is out of range.
    """

    name = "elbo"

    def __init__(
        self,
        denoiser: Denoiser,
        arguments: ElboArguments | None = None,
        *,
        draw_seed: int = 0,
        **layout: Any,
    ):
        if denoiser.attention == "causal":
            raise DuelError("An autoregressive network needs no bound: use estimator=ar.")
        check_every_order(denoiser, self.name)
        arguments = arguments or ElboArguments()
        block = arguments.elbo_block
        if block == "auto":
            block = denoiser.block  # the trained one; None: the whole target
        form = resolve_form(denoiser, arguments.elbo_form, block)
        super().__init__(denoiser, block, arguments.mc_samples, draw_seed, **layout)
        self.arguments = dataclasses.replace(arguments, elbo_form=form, elbo_block=self.block)

    def describe(self) -> dict[str, object]:
        spec: dict[str, object] = {}
        if self.block:  # for a whole target all grids are equal
            spec["grid"] = self.grid
        if self.arguments.elbo_form == "score_entropy":
            spec["sigma"] = "that of each draw"
        spec["estimator"] = self.name
        spec |= self.arguments.describe()
        spec["draw_seed"] = self.draw_seed
        return spec

    def score_group(self, group: WindowGroup) -> IndexedScores:
        if self.arguments.elbo_form == "score_entropy":
            at_level: Any = self.denoiser.open  # only SEDD's takes a noise level
            opened = partial(at_level, level=lambda lanes: lanes.memory[1][:, 0])
            group = dataclasses.replace(group, opened=opened)
        return super().score_group(group)

    def make_draws(self, group: WindowGroup, lanes: Lanes, draw_index: torch.Tensor) -> Lanes:
        """The draws that mask something. Equal draws of a span are one lane.

        The memory of a lane is its weight in each replicate (R, W, S), the same at every position, and SEDD's noise
        level. Draws that have levels are all different.
        """
        lanes = self._mask(group, lanes, draw_index)
        weight, *level = lanes.memory  # (R, W) each
        apart = (draw_index,) if level else ()  # draws at different levels are different lanes
        first, number = distinct(lanes.row, lanes.start, lanes.masked, *apart)  # (r,), (R,)
        weights = weight.new_zeros(len(first), self.replicates)  # (r, S)
        replicate = draw_index % self.replicates  # (R,)
        weights.index_put_((number, replicate), weight[:, 0], accumulate=True)
        kept = lanes.select(first)
        at_positions = weights[:, None].expand(-1, kept.masked.shape[1], -1)  # (r, W, S)
        kept = dataclasses.replace(kept, memory=(at_positions, *kept.memory[1:]))
        return kept.select(kept.masked.any(1))

    def _mask(self, group: WindowGroup, lanes: Lanes, draw_index: torch.Tensor) -> Lanes:
        """The lanes with the positions of their draw (R,) masked and the targets at the others.

        Their memory is the weight, the same at every position, and SEDD's noise level.
        """
        t = self._levels(group, lanes, draw_index)  # (R,)
        window_key = group.keys[lanes.row][:, None]  # (R, 1)
        position = lanes.columns - lanes.origin[:, None]  # (R, W)
        keys = (window_key, self.draw_seed, POSITIONS, draw_index[:, None], position)
        level: tuple[torch.Tensor, ...] = ()
        if self.arguments.elbo_form == "count":
            m = lanes.masked.sum(1)  # (R,)
            count = 1 + (m * t).long().minimum(m - 1)  # (R,) uniform in 1..m
            hashes = torch.where(lanes.masked, hashed(*keys), LAST)  # (R, W)
            order = rank(hashes)  # (R, W) a random permutation of the masked positions
            masked = lanes.masked & (order < count[:, None])
            weight = m.double() / count  # (R,)
        else:
            chance = t  # (R,)
            weight = 1 / t  # (R,)
            if self.arguments.elbo_form == "score_entropy":
                sigma = cast(Any, self.denoiser).schedule(t)  # (R,) SEDD's noise level
                level = (sigma,)
                chance = -torch.expm1(-sigma)
                weight = torch.expm1(sigma) / t
            masked = lanes.masked & (uniform(*keys) < chance[:, None])  # (R, W)
        memory = tuple(plane[:, None].expand_as(masked) for plane in (weight, *level))
        shown = lanes.show(group.rows.targets(lanes), masked)
        return dataclasses.replace(shown, memory=memory)

    def _levels(self, group: WindowGroup, lanes: Lanes, draw_index: torch.Tensor) -> torch.Tensor:
        """t of each draw, uniform in (eps, 1); for counts, which have no eps, the share that l is made of, (R,)."""
        eps = self.arguments.elbo_eps
        return eps + (1 - eps) * self.strata(group, lanes, draw_index)

    def draws(self, window: Window) -> list[list[tuple[list[int], float | None]]]:
        """The draws of a window: of each span the masked columns, and t unless `form` is "count"."""
        group = self.open([window], [0])
        lanes = group.fresh(self.block_spans(group))
        draws = []
        for number in range(self.samples):
            draw_index = torch.full_like(lanes.row, number)
            masked = self._mask(group, lanes, draw_index).masked
            columns = [lanes.columns[r][masked[r]].tolist() for r in range(len(lanes))]
            levels: list[float | None] = [None] * len(lanes)
            if self.arguments.elbo_form != "count":
                levels = self._levels(group, lanes, draw_index).tolist()
            draws.append(list(zip(columns, levels, strict=True)))
        return draws

    def terms(self, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        lanes = step.lanes
        log_prob = step.log_prob  # (R, W)
        weight, *level = lanes.memory  # (R, W, S), (R, W)
        if level:
            tokens = self.denoiser.vocab_size - 1  # without [MASK]
            log_prob = -score_entropy(level[0], log_prob, step.predictions.log_sum, tokens)
        log_prob = torch.where(lanes.masked, log_prob, 0.0)  # (R, W)
        total = log_prob.sum(1, keepdim=True)  # (R, 1)
        # in a replicate without this draw its weight is 0, and 0 times an infinite log-prob would be NaN
        in_replicate = weight[:, 0]  # (R, S)
        sums = torch.where(in_replicate > 0, total * in_replicate, 0.0)  # (R, S)
        return log_prob * weight.sum(2), sums


def score_entropy(
    sigma: torch.Tensor,
    log_prob: torch.Tensor,
    log_sum: torch.Tensor,
    tokens: int,
) -> torch.Tensor:
    """SEDD's loss at masked positions (Lou et al. 2024, eq. 5, absorbing graph):

        sum_v s_v - r log s_x + r (log r - 1),   s_v = exp(logit_v) / (expm1(sigma) n),   r = 1 / expm1(sigma)

    `sigma`, `log_prob` (of the target x) and `log_sum` (the log of the sum of exp(logit_v)): (R, W). `tokens`: n, the
    size of the vocabulary.
    """
    log_r = -torch.expm1(sigma).log()  # (R, W)
    total = log_sum + log_r - math.log(tokens)  # (R, W) log of the sum of scores
    return total.exp() - log_r.exp() * (log_prob + total - log_r + 1)


def resolve_form(denoiser: Denoiser, form: str, block: int | str | None) -> str:
    """The form to use; "auto" is score_entropy for SEDD over a whole target, else count.

    Raises DuelError for score_entropy if it is not defined. Under a temperature, say, it is not: the loss takes logits
    as scores of the noising process, and filtered logits are the scores of none.
    """
    scheduled = denoiser.schedule is not None and not denoiser.filters
    if form == "auto":
        return "score_entropy" if scheduled and block is None else "count"
    if form == "score_entropy" and not scheduled:
        what = "this network is not SEDD"
        if denoiser.schedule is not None:
            what = "it takes the network's logits unchanged, without a temperature, top_k or other filter"
        raise DuelError(f"elbo_form=score_entropy is SEDD's own loss, and {what}; use count or ratio.")
    if form == "score_entropy" and block is not None:
        raise DuelError("elbo_form=score_entropy masks positions of the whole target; use elbo_block=none with it.")
    return form
