"""The blocks behind an estimate: sums that add up over windows, tasks and ranks.

Shapes: B blocks of a window.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, ClassVar

from lm_eval_duel.core.scores import BlockSums, Kind

if TYPE_CHECKING:
    import torch

FEW = 8  # drawn blocks: with fewer there is no standard error
FAIR = 30  # drawn blocks: with fewer the standard error is itself uncertain


@dataclasses.dataclass(frozen=True)
class TwoPhaseBlocks(BlockSums):
    """The blocks of a two-phase estimate. f and g: a block's log-prob without and with the cache, nats.

    `sampled` blocks have both; `drawn` ones are sampled blocks with a weight above 1, which represent others, too.
    """

    name: ClassVar[str] = "two_phase"
    count: int = 0
    sampled: int = 0
    drawn: int = 0
    variance: float = 0.0  # unbiased estimate of the variance of the log-prob
    sum_g: float = 0.0  # over all blocks
    f: float = 0.0  # these five over the sampled blocks
    g: float = 0.0
    ff: float = 0.0
    gg: float = 0.0
    fg: float = 0.0
    # of each block of a single window; a sum over windows has none
    cached: tuple[float, ...] = ()  # g
    weights: tuple[float, ...] = ()  # 0: not sampled
    uncached: tuple[float, ...] = ()  # f of the sampled blocks

    @classmethod
    def from_blocks(cls, g: torch.Tensor, f: torch.Tensor, weight: torch.Tensor, variance: float) -> TwoPhaseBlocks:
        """The sums over the blocks of a window, from g, f and the weight of each, (B,)."""
        sampled_f, sampled_g = f[weight > 0], g[weight > 0]  # (b,) each
        return cls(
            count=len(g),
            sampled=len(sampled_f),
            drawn=int((weight > 1).sum()),
            variance=variance,
            sum_g=float(g.sum()),
            f=float(sampled_f.sum()),
            g=float(sampled_g.sum()),
            ff=float(sampled_f @ sampled_f),
            gg=float(sampled_g @ sampled_g),
            fg=float(sampled_f @ sampled_g),
            cached=tuple(g.tolist()),
            weights=tuple(weight.tolist()),
            uncached=tuple(sampled_f.tolist()),
        )

    def __add__(self, other: TwoPhaseBlocks) -> TwoPhaseBlocks:
        return dataclasses.replace(super().__add__(other), cached=(), weights=(), uncached=())

    @property
    def error(self) -> float:
        return math.sqrt(self.variance)

    @property
    def kind(self) -> Kind:
        return Kind.ESTIMATE

    @property
    def stderr(self) -> float | None:
        """The sampling standard error, nats; None: too few blocks were drawn."""
        return self.error if self.drawn >= FEW or self.sampled == self.count else None

    @property
    def correlation(self) -> float | None:
        """The correlation of f and g over the sampled blocks."""
        n = self.sampled
        spread = (n * self.ff - self.f**2) * (n * self.gg - self.g**2)
        return (n * self.fg - self.f * self.g) / math.sqrt(spread) if n > 2 and spread > 0 else None

    def describe(self) -> dict[str, Any]:
        return {
            "blocks": self.count,
            "sampled_blocks": self.sampled,
            "cached_log_prob": self.sum_g,
            "correlation": self.correlation,
        }

    @property
    def summary(self) -> str:
        text = f"{self.sampled:,} of {self.count:,} blocks also without the cache"
        if self.correlation is not None:
            text += f", correlation {self.correlation:.4f}"
        if self.stderr is not None and FEW <= self.drawn < FAIR:
            text += f"; the standard error of {self.drawn} drawn blocks is uncertain itself: raise the sample"
        return text
