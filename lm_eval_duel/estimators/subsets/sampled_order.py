"""The exact likelihood of samplers that draw which positions to reveal (Dream; LLaDA's random remasking).

At each step of a block, while the positions H are masked, a set A of them is drawn and their tokens with it:

    origin      each position by itself, with the step's share r_i
                P(A) = r_i^|A| (1 - r_i)^|H - A|
    random      n_i positions, all sets of so many alike
    entropy,    n_i positions, one after the other without replacement, by weights w = exp(s / alg_temp) of the scores
    topk_margin s = -entropy or s = P1 - P2 (Plackett and Luce):
                P(A) = sum over i in A of P(A - i) w_i / (sum of w over H - A + i), P(empty set) = 1

A text has many orders, and log p is a sum over them: V(H, step) = log sum over A of P(A) prod over A of p_i(x_i)
exp(V(H - A, step + 1)), by dynamic programming over the sets of a block's positions.

Shapes: R lanes, W block width, B blocks of a chunk, m masked positions, S = 2^m states, x sets of one size, h positions
of a set, K = 2^h subsets of a set.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from lm_eval_duel import fingerprint
from lm_eval_duel.core.decision import EVALUATE_ALL
from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.core.lanes import Lanes
from lm_eval_duel.core.reveal import Reveal, WindowGroup
from lm_eval_duel.core.scores import IndexedScores, Step, WindowScore
from lm_eval_duel.estimators.base import Estimator, Value
from lm_eval_duel.estimators.checks import check_every_order
from lm_eval_duel.estimators.subsets.arguments import ORDER, check_block, read_order
from lm_eval_duel.estimators.subsets.counts import StepCounts, table
from lm_eval_duel.estimators.subsets.sets import product, sets, subsets, sum_over_subsets
from lm_eval_duel.estimators.subsets.states import Chunk, SubsetAccumulator
from lm_eval_duel.rules.scheduled import dream_shares


class SampledOrder(Estimator):
    """A sampler that draws the positions to reveal, too.

    `alg`: how, see above: "origin", "entropy" and "topk_margin" (Dream), "random" (LLaDA). `steps`: of each block. With
    "origin", r_i = 1 - t_(i+1) / t_i for noise levels t from 1 to 0.001 in equal steps, and 1 at the last step; with
    "entropy" and "topk_margin", n_i = int(m r_i) of the m positions that are left; with "random", M // S + (i < M mod
    S) of M. `alg_temp`: above 0, of "entropy" and "topk_margin". `block`: at most 12 positions. Other arguments as in
    `Estimator`.

    Raises:
        DuelError: an argument is wrong, the block is too large, or this network cannot evaluate every state of a block.
    """

    name = "sampled_order"

    def __init__(
        self,
        denoiser: Denoiser,
        block: int | str | None = "auto",
        grid: str = "auto",
        batch_size: int | None = None,
        max_batch_size: int | None = None,
        traced: bool = False,
        alg: str = "origin",
        steps: int = ORDER["steps"].default,
        alg_temp: float | None = None,
    ):
        read = read_order({"alg": alg, "steps": steps, "alg_temp": alg_temp})
        check_every_order(denoiser, self.name)
        self.alg, self.steps, self.alg_temp = read["alg"], read["steps"], read["alg_temp"]
        super().__init__(denoiser, block, grid, batch_size, max_batch_size, traced)
        check_block(self.name, self.block, only=denoiser.block is not None)

    @property
    def counted(self) -> StepCounts | None:
        """How many positions a step reveals; None: it is drawn."""
        if self.alg == "origin":
            return None
        return StepCounts(steps=self.steps, schedule="even" if self.alg == "random" else "dream")

    def describe(self) -> dict[str, object]:
        alg_temp = {} if self.alg_temp is None else {"alg_temp": fingerprint.number(self.alg_temp)}
        of_sampler = {"alg": self.alg, "steps": self.steps, **alg_temp}
        return {"estimator": self.name, "block": self.block, "grid": self.grid, **of_sampler}

    def values(self, scored: WindowScore) -> dict[str, Value]:
        return {self.name: Value(scored.log_prob)}

    def score_group(self, group: WindowGroup) -> IndexedScores:
        tables = OrderAccumulator(group, self)
        return iter(Reveal(group, EVALUATE_ALL, tables.states(), tables, self.budget, self.counts))


@dataclasses.dataclass
class OrderChunk(Chunk):
    """The states of some blocks while they are entered."""

    log_probs: torch.Tensor  # (B, S, m) log p of each position's target
    score: torch.Tensor  # (B, S, m) over alg_temp


class OrderAccumulator(SubsetAccumulator):
    """The states of one group of windows: entered call by call, and folded as each chunk is complete."""

    values = 11  # 12 positions: 3^12 subsets of states, 11 for each position of a state

    def __init__(self, group: WindowGroup, estimator: SampledOrder):
        super().__init__(group, estimator)
        self.alg, self.counts, self.alg_temp = estimator.alg, estimator.counted, estimator.alg_temp or 1.0
        self.shares = [float(share) for share in dream_shares(estimator.steps)] if self.counts is None else []
        device = group.rows.ids.device
        self.log_prob = torch.zeros(len(group.windows), dtype=torch.float64, device=device)  # (N,)

    def reached(self, lanes: Lanes) -> torch.Tensor | None:
        return None if self.counts is None else self.counts.of_lanes(lanes) > 0

    def new_chunk(self, lanes: Lanes, states: int, most: int) -> OrderChunk:
        log_probs = self.log_prob.new_full((len(lanes), 1 << most, most), math.nan)  # (B, S, m)
        return OrderChunk(lanes, states, log_probs, log_probs.clone())

    def add(self, step: Step) -> None:
        """Enter the log-probs and the scores of these states."""
        lanes, predictions, _, _, log_prob = step
        score = torch.zeros_like(log_prob)  # (R, W)
        if self.alg == "entropy":
            score = -predictions.entropy.double()
        elif self.alg == "topk_margin":
            score = predictions.margin.double()
        self.enter(lanes, self.locate(lanes), {}, {"log_probs": log_prob, "score": score / self.alg_temp})

    def fold(self, chunk: OrderChunk) -> None:
        value = fold_counted(chunk, self.counts) if self.counts else fold_shares(chunk, self.shares)  # (B, S)
        self.log_prob.index_add_(0, chunk.lanes.row, value.gather(1, chunk.full[:, None])[:, 0])

    def score(self, row: int) -> WindowScore:
        return WindowScore(float(self.log_prob[row]))


def fold_counted(chunk: OrderChunk, counts: StepCounts) -> torch.Tensor:
    """log p of the targets in each state (B, S), if its number of masked positions says how many a step reveals."""

    def log_step(
        state: torch.Tensor, position: torch.Tensor, chosen: torch.Tensor, count: torch.Tensor
    ) -> torch.Tensor:
        log_p, score = (plane[:, state[:, None], position] for plane in (chunk.log_probs, chunk.score))  # (B, x, h)
        total = product(log_p, torch.zeros_like(log_p)) + plackett_luce(score, int(count.max()))  # (B, x, K)
        return total.where(chosen == count, -math.inf)

    counts_of = table(counts, chunk.full.device)[chunk.lanes.masked.sum(1)]  # (B, M + 1)
    return sum_over_subsets(counts_of, chunk.log_probs, log_step)


def fold_shares(chunk: OrderChunk, shares: list[float]) -> torch.Tensor:
    """log p of the targets in each state (B, S), if step i reveals each masked position with probability shares[i]."""
    log_probs = chunk.log_probs
    m, device = log_probs.shape[2], log_probs.device
    of_sizes = []
    for size in range(1, m + 1):
        state, position, _ = (indices.to(device) for indices in sets(m, size))  # (x,), (x, h)
        rest, chosen = (indices.to(device) for indices in subsets(m, size))  # (x, K), (K,)
        log_p = log_probs[:, state[:, None], position]  # (B, x, h)
        of_sizes.append((state, rest, chosen, product(log_p, torch.zeros_like(log_p))))  # (B, x, K)
    value = torch.full_like(log_probs[:, :, 0], -math.inf)  # (B, S) after the last step
    value[:, 0] = 0
    for share in reversed(shares):
        following = value.clone()
        for size, (state, rest, chosen, log_p) in enumerate(of_sizes, 1):
            if share == 1:
                value[:, state] = log_p[:, :, -1]  # all positions are revealed
                continue
            log_order = chosen.double() * math.log(share) + (size - chosen).double() * math.log1p(-share)  # (K,)
            value[:, state] = (log_p + log_order + following[:, rest]).logsumexp(2)
    return value


def plackett_luce(score: torch.Tensor, most: int) -> torch.Tensor:
    """log p that each subset of up to `most` positions is drawn first, without replacement, by weights exp(score).

    (B, x, h) -> (B, x, K), in the order of `subsets`; -inf for larger subsets.
    """
    left = torch.full_like(score[:, :, :1], -math.inf)  # (B, x, K) log of the sum of the weights outside each subset
    for position in range(score.shape[2]):
        left = torch.cat([left.logaddexp(score[:, :, position, None]), left], 2)
    log_p = torch.full_like(left, -math.inf)  # (B, x, K)
    log_p[:, :, 0] = 0
    for size in range(1, most + 1):
        subset, member, before = (indices.to(score.device) for indices in sets(score.shape[2], size))  # (y, size)
        last = log_p[:, :, before] + score[:, :, member] - left[:, :, before]  # (B, x, y, size)
        log_p[:, :, subset] = last.logsumexp(3)
    return log_p
