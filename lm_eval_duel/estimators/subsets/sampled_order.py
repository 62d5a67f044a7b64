"""The exact likelihood of samplers that draw which positions to reveal (Dream; LLaDA's random remasking).

At each step of a block, while the positions H are masked, a set A of them is drawn and their tokens with it:

    origin      each position independently, with the step's share r_i
                P(A) = r_i^|A| (1 - r_i)^|H - A|
    random      n_i positions, all sets of this size alike
    entropy,    n_i positions, one after the other without replacement, by weights w = exp(s / alg_temp) of the scores
    topk_margin s = -entropy or s = P1 - P2 (Plackett and Luce):
                P(A) = sum over i in A of P(A - i) w_i / (sum of w over H - A + i), P(empty set) = 1

A text has many orders, and its probability is the sum over them, of products of P(A) and of p_i(x_i) at the positions
i of A: see chunk.py.

Shapes: R lanes, W block width, X sets of a level, T steps.
"""

from __future__ import annotations

import math

import torch

from lm_eval_duel import fingerprint
from lm_eval_duel.core.accumulators import Step
from lm_eval_duel.estimators.arguments import OrderArguments
from lm_eval_duel.estimators.subsets.counts import StepCounts
from lm_eval_duel.estimators.subsets.moves import Moves, Planes, StateLevel, Thin, in_turn, independent
from lm_eval_duel.estimators.subsets.set_sampler import SetSampler
from lm_eval_duel.rules.scheduled import dream_shares


class SampledOrder(SetSampler):
    """A sampler that draws the positions to reveal, too.

    Args:
        denoiser: A network.
        block: At most 12 positions, 48 with a beam.
        seed: The seed of a beam.
        arguments: alg, steps, alg_temp, beam, tolerance and repetitions, as in docs/estimators.md, and the other
            arguments of `Estimator`. With S `steps` of a block and
            alg="origin", r_i = 1 - t_(i+1) / t_i for noise levels t from 1 to 0.001 in equal steps, and 1 at the last
            step. With "entropy" and "topk_margin", n_i = int(m r_i) of the m positions that are left. With "random",
            n_i = M // S + (i < M mod S) of M positions.

    Raises:
        DuelError: If an argument is wrong, or the network cannot evaluate every state of such a block.
    """

    name = "sampled_order"
    reads = OrderArguments
    own: OrderArguments

    @property
    def counted(self) -> StepCounts | None:
        """The number of positions that a step reveals; None: it is drawn."""
        if self.own.alg == "origin":
            return None
        return StepCounts(steps=self.own.steps, schedule="even" if self.own.alg == "random" else "dream")

    def describe(self) -> dict[str, object]:
        alg_temp = {} if self.own.alg_temp is None else {"alg_temp": fingerprint.number(self.own.alg_temp)}
        of_sampler = {"alg": self.own.alg, "steps": self.own.steps, **alg_temp, **self.own.describe(self.seed)}
        return {**super().describe(), **of_sampler}

    @property
    def shares(self) -> torch.Tensor | None:
        return dream_shares(self.own.steps).double() if self.own.alg == "origin" else None

    def planes(self, step: Step) -> Planes:
        _, predictions, _, _, log_prob = step
        score = torch.zeros_like(log_prob)  # (R, W)
        if self.own.alg == "entropy":
            score = -predictions.entropy.double()
        elif self.own.alg == "topk_margin":
            score = predictions.margin.double()
        return {"log_probs": log_prob, "score": score / (self.own.alg_temp or 1.0)}

    def moves(self, level: StateLevel, planes: Planes, thin: Thin) -> Moves:
        """The moves of positions drawn one after the other; as a product if all sets of a size are alike."""
        masked, log_p = level.masked, planes["log_probs"]  # (X, W) each
        size, every = masked.sum(1), torch.arange(len(masked), device=masked.device)  # (X,) each
        least, most, log_in = torch.ones_like(size), size, log_p.where(masked, -math.inf)
        if self.counted is not None:
            least = most = count = self.counted.of_sizes(level.first, size)  # (X,)
            if self.own.alg != "random":
                return in_turn(level, log_p, planes["score"], count, thin)
        moves = independent(level, every, log_in, torch.zeros_like(log_in), torch.stack([least, most]), thin)
        if self.counted is not None:
            n, k = size.double(), most.double()
            ways = (n + 1).lgamma() - (k + 1).lgamma() - (n - k + 1).lgamma()  # (X,)
            moves = moves._replace(log_p=moves.log_p - ways[moves.state, None])
        return moves
