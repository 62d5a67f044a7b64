"""All orders of a block by dynamic programming over the sets of its positions.

w(H, j) is the log-prob of the target token at position j while the positions H are masked. With V(empty set) = 0,
smaller sets first:

    elbo_exact  V(H) = mean over j in H of  w(H, j) + V(H - j)
    mixture     V(H) = log of the mean of   exp(w(H, j) + V(H - j))
    oracle      V(H) = max                  w(H, j) + V(H - j)

Shapes: W block width, B blocks of a chunk, S = 2^W states (a set of masked positions, by
number: the sum of 2^position), F rules.
"""

from __future__ import annotations

import dataclasses
import math
from functools import lru_cache
from itertools import combinations

import torch

from lm_eval_duel.core.accumulators import ScoreAccumulator
from lm_eval_duel.core.lanes import Lanes
from lm_eval_duel.estimators.subsets.moves import from_bitmask, to_bitmask


@dataclasses.dataclass
class OrderChunk:
    """The tables of some blocks and their states, which are filled call by call."""

    lanes: Lanes  # (B,) as their blocks begin
    missing: int  # states that have not been evaluated
    log_probs: torch.Tensor  # (B, S, W) w
    statistics: torch.Tensor  # (B, S, W, T) of `STATISTICS` if traced, else T = 0
    after: torch.Tensor  # (B, S, F) the state after a rule's pick
    near_tie: torch.Tensor  # (B, S, F) bool

    @property
    def full(self) -> torch.Tensor:
        """The state in which all positions of a block are masked, (B,)."""
        return to_bitmask(self.lanes.masked)


class Orders(ScoreAccumulator):
    """A path through the blocks of each window. Nothing is known of decoding, so no score of it is greedy."""

    def follow(self, chunk: OrderChunk, after: torch.Tensor, near_tie: torch.Tensor) -> None:
        """Enter the path of each block, from the state in which all its positions are masked until none is.

        `after` (B, S): the state that follows each state; `near_tie` (B, S): the states whose pick is a near tie.
        """
        row, columns, state, step = chunk.lanes.row, chunk.lanes.columns, chunk.full, 0  # (B,), (B, W), (B,)
        block = torch.arange(len(row), device=row.device)  # (B,)
        while (unfinished := state > 0).any():
            following = after[block, state] * unfinished  # (B,)
            picked = from_bitmask(state & ~following, columns.shape[1])  # (B, W)
            b, position = picked.nonzero().unbind(1)  # (c,)
            where, at = (row[b], columns[b, position]), (b, state[b], position)
            self.reveal_steps[where] = step
            self.log_probs[where] = chunk.log_probs[at]
            for t, plane in enumerate(self.statistics.values()):
                plane[where] = chunk.statistics[..., t][at]
            tied, never = unfinished & near_tie[block, state], torch.zeros_like(unfinished)  # (B,) each
            sums = torch.stack([picked.sum(1), unfinished, unfinished, tied, never], 1).long()  # (B, 5)
            self.sums.index_add_(0, row, sums)
            state, step = following, step + 1


def fold(table: torch.Tensor, masked: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All orders of some blocks, whose `masked` (B, W) positions are to be revealed.

    `table` (B, S, W): w of each state and position. Returns elbo_exact, mixture and oracle (B, 3), each position's
    share of elbo_exact (B, W), and the state that follows each one on its best order (B, S).
    """
    blocks, states, wide = table.shape
    mean, mixture, oracle = (table.new_zeros(blocks, states) for _ in range(3))
    best = torch.zeros(blocks, states, dtype=torch.int64, device=table.device)
    share = table.new_zeros(blocks, wide)
    full, counts = to_bitmask(masked), masked.sum(1).tolist()  # (B,) each
    for size in range(1, wide + 1):
        state, position, rest = (indices.to(table.device) for indices in sets(wide, size))  # (n,), (n, size), (n, size)
        w = table[:, state[:, None], position]  # (B, n, size) NaN for sets that are no state of the block
        mean[:, state] = (w + mean[:, rest]).mean(2)
        mixture[:, state] = (w + mixture[:, rest]).logsumexp(2) - math.log(size)
        oracle[:, state], at = (w + oracle[:, rest]).max(2)
        best[:, state] = rest.expand(blocks, -1, -1).gather(2, at[:, :, None])[:, :, 0]
        # an order passes a given set of `size` of m masked positions with probability 1 / C(m, size)
        chance = table.new_tensor([1 / max(1, math.comb(m, size)) for m in counts])  # (B,)
        is_state = (state & ~full[:, None] == 0)[:, :, None]  # (B, n, 1)
        part = torch.where(is_state, w, 0.0) * chance[:, None, None] / size  # (B, n, size)
        share.scatter_add_(1, position.flatten().expand(blocks, -1), part.flatten(1))
    block = torch.arange(blocks, device=table.device)
    return torch.stack([values[block, full] for values in (mean, mixture, oracle)], 1), share, best


@lru_cache(maxsize=128)
def sets(m: int, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The sets of `size` of m positions: their numbers (n,), their positions and the sets without each (n, size)."""
    position = torch.tensor(list(combinations(range(m), size)))  # (n, size)
    state = (1 << position).sum(1)  # (n,)
    return state, position, state[:, None] - (1 << position)
