"""Samplers that draw the positions to reveal, and then their tokens (Dream; LLaDA's random remasking).

A step draws a set A of the masked positions H, by `alg`:

    origin      each position independently, with the step's share r_i
                P(A) = r_i^|A| (1 - r_i)^|H - A|
    random      n_i positions, all sets of this size alike
    entropy,    n_i positions, one after the other without replacement, by weights w = exp(s / alg_temp) of the scores
    topk_margin s = -entropy or s = P1 - P2 (Plackett and Luce):
                P(A) = sum over i in A of P(A - i) w_i / (sum of w over H - A + i), P(empty set) = 1

P(A | H) of order_sums.py is this times p_i(x_i) at the positions i of A: their tokens are sampled from the predictions.

Shapes: R lanes, W block width, X states of one size, I moves.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.core.lanes import Lanes
from lm_eval_duel.core.reveal import Step
from lm_eval_duel.estimators.arguments import OrderArguments
from lm_eval_duel.estimators.moves import (
    Moves,
    Products,
    StateLevel,
    StepCounts,
    Tables,
    TimedStates,
    UntimedStates,
    from_bitmask,
    log_sums,
    subsets,
)
from lm_eval_duel.estimators.order_sums import OrderSum
from lm_eval_duel.rules.scheduled import dream_shares


class SampledOrder(OrderSum):
    """A sampler that draws the positions to reveal, too.

    Args:
        denoiser: A network.
        block: At most 12 positions.
        arguments: alg, steps and alg_temp, as in docs/estimators.md. With S `steps` of a block and alg="origin",
            r_i = 1 - t_(i+1) / t_i for noise levels t from 1 to 0.001 in equal steps, and 1 at the last step. With
            "entropy" and "topk_margin", n_i = int(m r_i) of the m positions that are left. With "random",
            n_i = M // S + (i < M mod S) of M positions.
        layout: The other arguments of `Estimator`.

    Raises:
        DuelError: If an argument is wrong, or the network cannot evaluate every state of such a block.
    """

    name = "sampled_order"

    def __init__(
        self,
        denoiser: Denoiser,
        block: int | str | None,
        arguments: OrderArguments | None = None,
        **layout: Any,
    ):
        super().__init__(denoiser, block, **layout)
        self.arguments = arguments or OrderArguments()

    def describe(self) -> dict[str, object]:
        return {**super().describe(), **self.arguments.describe()}

    @property
    def counts_of_steps(self) -> StepCounts | None:
        """The number of positions that a step reveals; None: it is drawn."""
        if self.arguments.alg == "origin":
            return None
        schedule = "even" if self.arguments.alg == "random" else "dream"
        return StepCounts(steps=self.arguments.steps, schedule=schedule)

    @property
    def timing(self) -> UntimedStates:  # type: ignore[override]
        if self.arguments.alg != "origin":
            return UntimedStates()
        shares = dream_shares(self.arguments.steps).double()  # (T,)
        return TimedStates(shares.to(self.denoiser.device))

    def step_begins(self, lanes: Lanes) -> torch.Tensor:
        if self.counts_of_steps is None:
            return lanes.masked.any(1)
        return self.counts_of_steps.next_steps_of_lanes(lanes) > 0

    def read(self, step: Step) -> Tables:
        score = torch.zeros_like(step.log_prob)  # (R, W)
        if self.arguments.alg == "entropy":
            score = -step.predictions.entropy.double()
        elif self.arguments.alg == "topk_margin":
            score = step.predictions.margin.double()
        return {"log_probs": step.log_prob, "score": score / (self.arguments.alg_temp or 1.0)}

    def moves(self, level: StateLevel, tables: Tables) -> Moves:
        masked = level.masked  # (X, W)
        log_prob = tables["log_probs"]  # (X, W)
        size = masked.sum(1)  # (X,)
        every_state = torch.arange(len(masked), device=masked.device)  # (X,)
        log_in = log_prob.where(masked, -math.inf)
        log_out = torch.zeros_like(log_in)  # positions that stay masked have no factor here
        if self.counts_of_steps is None:  # any number of positions; `TimedStates` has the factors of the shares
            at_least_one = torch.ones_like(size)
            return subsets(Products(every_state, log_in, log_out, fewest=at_least_one, most=size))

        count = self.counts_of_steps.next_steps(level.block_size, size)  # (X,)
        if self.arguments.alg != "random":
            return one_after_the_other(level, log_prob, tables["score"], count)
        moves = subsets(Products(every_state, log_in, log_out, fewest=count, most=count))
        n = size.double()
        k = count.double()
        log_ways = (n + 1).lgamma() - (k + 1).lgamma() - (n - k + 1).lgamma()  # (X,) log of n over k
        return moves._replace(log_p=moves.log_p - log_ways[moves.state])


def one_after_the_other(
    level: StateLevel,
    log_prob: torch.Tensor,
    score: torch.Tensor,
    count: torch.Tensor,
) -> Moves:
    """Subsets of `count` (X,) positions, drawn one after the other without replacement by weights exp(score) (X, W).

    `log_prob` (X, W): of the targets. The sum over the orders in which a subset is drawn (Plackett and Luce).
    """
    width = score.shape[1]
    state = torch.arange(len(score), device=score.device)  # (X,)
    moves = Moves(state, torch.zeros_like(state), score.new_zeros(len(score)))  # the empty subset of each state
    for chosen_before in range(int(count.max())):
        left = level.masked[moves.state] & ~from_bitmask(moves.revealed, width)  # (I, W)
        log_weight = score[moves.state].masked_fill(~left, -math.inf)  # (I, W)
        log_total = log_weight.logsumexp(1)  # (I,)

        # a subset that is not complete grows by each position that is left
        growing = count[moves.state] > chosen_before  # (I,)
        i, position = (left & growing[:, None]).nonzero().unbind(1)
        state = moves.state[i]
        log_p = moves.log_p[i] + score[state, position] - log_total[i] + log_prob[state, position]

        # the same subset in another order: their probabilities are added
        states = torch.cat([moves.state[~growing], state])
        revealed = torch.cat([moves.revealed[~growing], moves.revealed[i] | (1 << position)])
        log_ps = torch.cat([moves.log_p[~growing], log_p])
        pairs, place = torch.stack([states, revealed], 1).unique(dim=0, return_inverse=True)
        moves = Moves(pairs[:, 0], pairs[:, 1], log_sums(log_ps, place, len(pairs)))
    return moves
