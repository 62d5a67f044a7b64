"""The number of positions that each step of a block reveals: n, or a schedule of S steps.

Steps that reveal none change nothing, so the number of masked positions determines the next step of a schedule. A state
is therefore a set of masked positions, and sets of other sizes are never reached.

Shapes: R lanes, M the most positions of a block.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache

import torch

from lm_eval_duel.core.lanes import Lanes
from lm_eval_duel.estimators.arguments import BEAM_BLOCK, ConfidenceArguments
from lm_eval_duel.rules.scheduled import dream_counts, even_counts

COUNTS = {"even": even_counts, "dream": dream_counts}


@dataclasses.dataclass(frozen=True)
class StepCounts:
    """The number of positions at each step: `n`, or by a `schedule` over `steps` steps, "even" (LLaDA) or "dream".

    `or_more`: a step may reveal more than n.
    """

    n: int = 1
    steps: int | None = None
    schedule: str = "even"
    or_more: bool = False

    @classmethod
    def from_arguments(cls, own: ConfidenceArguments) -> StepCounts:
        """The counts of `sampled_confidence`."""
        return cls(own.n or 1, own.steps, own.schedule, or_more=own.tau is not None)

    def of_block(self, m: int) -> list[int]:
        """The number of positions that each step reveals, of m in all."""
        if self.steps is None:
            return [min(self.n, m - done) for done in range(0, m, self.n)]
        return COUNTS[self.schedule](m, self.steps)

    def of_state(self, m: int, masked: int) -> int:
        """The number of positions that the next step reveals when `masked` of m are left; 0 if no step begins there."""
        if self.or_more:
            return min(self.n, masked) if masked == m or masked <= m - self.n else 0
        left = m
        for count in self.of_block(m):
            if left == masked and count:
                return count
            left -= count
        return 0

    def of_lanes(self, lanes: Lanes) -> torch.Tensor:
        """The number of positions that the next step of each lane reveals, (R,); 0 for a lane that no step begins
        with.
        """
        return self.of_sizes(lanes.in_target.sum(1), lanes.masked.sum(1))

    def of_sizes(self, first: torch.Tensor, masked: torch.Tensor) -> torch.Tensor:
        """The same for blocks that begin with `first` (X,) masked positions of which `masked` (X,) are left, (X,)."""
        return table(self, first.device)[first, masked]


@lru_cache(maxsize=64)
def table(counts: StepCounts, device: torch.device) -> torch.Tensor:
    """The number of positions that a step reveals, by the block's width and its masked positions: (M + 1, M + 1).

    0 where no step begins.
    """
    entries = torch.zeros(BEAM_BLOCK + 1, BEAM_BLOCK + 1, dtype=torch.int64)
    for m in range(1, BEAM_BLOCK + 1):
        for masked in range(1, m + 1):
            entries[m, masked] = counts.of_state(m, masked)
    return entries.to(device)
