"""The parts of a two-phase estimate, as sums over blocks: they add up over windows, tasks and ranks.

Shapes: B blocks of a window.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

FEW = 8  # drawn blocks: with fewer there is no standard error
FAIR = 30  # drawn blocks: with fewer the standard error is itself uncertain


class Phases(NamedTuple):
    """Sums over the blocks of some windows. f and g: a block's log-prob without and with the cache, nats.

    `sampled` blocks have both; `drawn` ones are those that stand for others, too (their weight is above 1).
    """

    blocks: int = 0
    sampled: int = 0
    drawn: int = 0
    variance: float = 0.0  # unbiased estimate of the variance of the log-prob
    cached: float = 0.0  # sum of g over all blocks
    f: float = 0.0  # these five over the sampled blocks
    g: float = 0.0
    ff: float = 0.0
    gg: float = 0.0
    fg: float = 0.0

    @classmethod
    def from_blocks(cls, g: torch.Tensor, f: torch.Tensor, weight: torch.Tensor, variance: float) -> Phases:
        """The sums over one window, from g, f and the weight of each of its blocks, (B,)."""
        mine, theirs = f[weight > 0], g[weight > 0]  # (b,) each
        return cls(
            blocks=len(g),
            sampled=len(mine),
            drawn=int((weight > 1).sum()),
            variance=variance,
            cached=float(g.sum()),
            f=float(mine.sum()),
            g=float(theirs.sum()),
            ff=float(mine @ mine),
            gg=float(theirs @ theirs),
            fg=float(mine @ theirs),
        )

    @classmethod
    def read(cls, sums: Iterable[float]) -> Phases:
        """From a plain tuple of the sums."""
        return cls(*sums)  # type: ignore[arg-type]  # whole numbers where whole numbers were

    @classmethod
    def total(cls, parts: Iterable[Phases]) -> Phases:
        """The sums over several windows."""
        return cls(*map(sum, zip(cls(), *parts, strict=True)))

    @property
    def stderr(self) -> float | None:
        """The sampling standard error, nats; None: too few blocks were drawn."""
        return math.sqrt(self.variance) if self.drawn >= FEW or self.sampled == self.blocks else None

    @property
    def correlation(self) -> float | None:
        """The correlation of f and g over the sampled blocks."""
        n = self.sampled
        spread = (n * self.ff - self.f**2) * (n * self.gg - self.g**2)
        return (n * self.fg - self.f * self.g) / math.sqrt(spread) if n > 2 and spread > 0 else None

    def describe(self) -> dict[str, Any]:
        """For the results JSON."""
        return {
            "blocks": self.blocks,
            "sampled_blocks": self.sampled,
            "cached_log_prob": self.cached,
            "correlation": self.correlation,
        }

    @property
    def words(self) -> str:
        """The sample, for the log."""
        text = f"{self.sampled:,} of {self.blocks:,} blocks also without the cache"
        if self.correlation is not None:
            text += f", correlation {self.correlation:.4f}"
        if self.stderr is not None and FEW <= self.drawn < FAIR:
            text += f"; the standard error of {self.drawn} drawn blocks is uncertain itself: raise the sample"
        return text
