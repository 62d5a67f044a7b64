"""All orders of a block by dynamic programming over the sets of its positions.

w(H, j) is the log-prob of the target token at position j while the positions H are masked. With V(empty set) = 0,
smaller sets first:

    elbo_exact  V(H) = mean over j in H of  w(H, j) + V(H - j)
    mixture     V(H) = log of the mean of   exp(w(H, j) + V(H - j))
    oracle      V(H) = max                  w(H, j) + V(H - j)

Shapes: N windows, L row length, R lanes, W block width, B blocks of a chunk, m masked positions, S = 2^m states
(number: the sum of 2^q over masked positions q), F rules.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from lm_eval_duel.core.lanes import Lanes
from lm_eval_duel.core.scores import STATISTICS
from lm_eval_duel.estimators.subsets.sets import sets


@dataclasses.dataclass
class LatticeChunk:
    """The lattices of some blocks while they are filled."""

    lanes: Lanes  # (B,) as their blocks begin
    waiting: int  # states that are missing
    log_probs: torch.Tensor  # (B, S, m) w
    statistics: torch.Tensor  # (B, S, m, T) of `STATISTICS` if traced, else T = 0
    after: torch.Tensor  # (B, S, F) the state after a rule's pick
    near_tie: torch.Tensor  # (B, S, F) bool

    @property
    def full(self) -> torch.Tensor:
        """The state of each block in which all its positions are masked, (B,)."""
        return (1 << self.lanes.masked.sum(1)) - 1


@dataclasses.dataclass(frozen=True)
class OrderScore:
    """One order through a window's blocks, and its log-prob. Fields as in `WindowScore`."""

    log_prob: float
    reveal_steps: tuple[int, ...]
    token_logprobs: tuple[float, ...]
    nfe: int
    near_ties: int | None = None
    confidence: tuple[float, ...] = ()  # this and the next two: if `traced`
    margin: tuple[float, ...] = ()
    entropy: tuple[float, ...] = ()


class Orders:
    """A path through the blocks of each window: log-probs and steps by column, and sums."""

    def __init__(self, like: torch.Tensor, traced: bool = False):
        self.log_probs = torch.full_like(like, math.nan)  # (N, L + 1)
        self.reveal_steps = torch.full_like(like, -1, dtype=torch.int32)  # (N, L + 1)
        self.sums = torch.zeros(len(like), 2, dtype=torch.int64, device=like.device)  # (N, 2) NFE, near ties
        self.statistics = like.new_full((*like.shape, len(STATISTICS) * traced), math.nan)  # (N, L + 1, T)

    def path(self, row: int, span: slice, has_margins: bool) -> OrderScore:
        """The order of one window, whose target is at the columns `span`."""
        log_probs = tuple(self.log_probs[row, span].tolist())
        nfe, near_ties = self.sums[row].tolist()
        statistics = [tuple(values) for values in self.statistics[row, span].T.tolist()]
        confidence, margin, entropy = statistics or [()] * len(STATISTICS)
        return OrderScore(
            log_prob=math.fsum(log_probs),
            reveal_steps=tuple(self.reveal_steps[row, span].tolist()),
            token_logprobs=log_probs,
            nfe=nfe,
            near_ties=near_ties if has_margins else None,
            confidence=confidence,
            margin=margin,
            entropy=entropy,
        )


def follow(
    chunk: LatticeChunk, column: torch.Tensor, after: torch.Tensor, near_tie: torch.Tensor, into: Orders
) -> None:
    """Enter the path of each block, from the state in which all its positions are masked until none is.

    `after` (B, S): the state that follows each state; `column` (B, m): the column of each position; `near_tie` (B, S):
    the states in which the pick is a near tie.
    """
    row, state, step = chunk.lanes.row, chunk.full, 0  # (B,) each
    block = torch.arange(len(row), device=row.device)  # (B,)
    positions = torch.arange(column.shape[1], device=row.device)  # (m,)
    while (unfinished := state > 0).any():
        following = after[block, state] * unfinished  # (B,)
        picked = ((state & ~following)[:, None] >> positions & 1).bool()  # (B, m)
        b, q = picked.nonzero().unbind(1)  # (c,)
        where = row[b], column[b, q]
        into.reveal_steps[where] = step
        into.log_probs[where] = chunk.log_probs[b, state[b], q]
        into.statistics[where] = chunk.statistics[b, state[b], q]
        into.sums.index_add_(0, row, torch.stack([unfinished, unfinished & near_tie[block, state]], 1).long())
        state, step = following, step + 1


def fold(table: torch.Tensor, full: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All orders of some blocks, by dynamic programming over sets, smaller sets first.

    `table` (B, S, m): w of each state and position; `full` (B,): the state in which all positions of a block are
    masked. Returns elbo_exact, mixture and oracle (B, 3), each position's share of elbo_exact (B, m), and the state
    that follows each one on its best order (B, S).
    """
    blocks, states, m = table.shape
    mean, mixture, oracle = (table.new_zeros(blocks, states) for _ in range(3))
    best = torch.zeros(blocks, states, dtype=torch.int64, device=table.device)
    share = table.new_zeros(blocks, m)
    positions = (full + 1).double().log2().round().long()  # (B,) of each block
    for size in range(1, m + 1):
        state, position, rest = (indices.to(table.device) for indices in sets(m, size))  # (n,), (n, size), (n, size)
        w = table[:, state[:, None], position]  # (B, n, size)
        mean[:, state] = (w + mean[:, rest]).mean(2)
        mixture[:, state] = (w + mixture[:, rest]).logsumexp(2) - math.log(size)
        oracle[:, state], at = (w + oracle[:, rest]).max(2)
        best[:, state] = rest.expand(blocks, -1, -1).gather(2, at[:, :, None])[:, :, 0]
        # an order hides a given set of `size` of the m positions with probability 1 / C(m, size)
        chance = table.new_tensor([1 / max(1, math.comb(n, size)) for n in positions.tolist()])  # (B,)
        part = torch.where((state <= full[:, None])[:, :, None], w, 0.0) * chance[:, None, None] / size  # (B, n, size)
        share.scatter_add_(1, position.flatten().expand(blocks, -1), part.flatten(1))
    block = torch.arange(blocks, device=table.device)
    return torch.stack([values[block, full] for values in (mean, mixture, oracle)], 1), share, best
