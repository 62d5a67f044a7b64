"""What a two-phase estimate is made of, as sums over blocks: they add up over windows, tasks and ranks.

Shapes: B blocks of a window.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

FEW = 8  # drawn blocks: with fewer there is no standard error
FAIR = 30  # drawn blocks: with fewer the standard error is itself uncertain


class Phases(NamedTuple):
    """Sums over the blocks of some windows. f and g: a block's log-prob without and with the cache, nats.

    `sampled` blocks have both; `drawn` ones are those that stand for others, too (their weight is above 1). Rows and
    token-rows are those of one window at a time: each step of a block evaluates one row, or a part of it.
    `full_token_rows` assumes that a block that is not sampled takes as many steps without the cache as under it; with a
    rule whose steps depend on the text it may take others.
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
    cached_rows: int = 0
    uncached_rows: int = 0
    cached_token_rows: int = 0
    uncached_token_rows: int = 0
    full_token_rows: int = 0  # of all blocks without the cache

    @classmethod
    def from_blocks(
        cls,
        length: int,
        places: Sequence[tuple[int, int]],
        values: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        variance: float,
        steps: tuple[Sequence[int], Sequence[int]],
        cache: str,
    ) -> Phases:
        """The sums over one window of `length` positions.

        `places`: (first column, width) of its blocks; `values`: g, f and weight of each, (B,); `steps`: of each under
        the cache, and without it.
        """
        g, f, weight = values
        steps_cached, steps_uncached = steps
        sampled = (weight > 0).tolist()
        later = [width if cache == "dual" else length - start for start, width in places]  # positions of later steps
        f_sampled, g_sampled = f[weight > 0], g[weight > 0]  # (b,) each
        uncached_rows = sum(count for count, here in zip(steps_uncached, sampled, strict=True) if here)
        return cls(
            blocks=len(places),
            sampled=sum(sampled),
            drawn=int((weight > 1).sum()),
            variance=variance,
            cached=float(g.sum()),
            f=float(f_sampled.sum()),
            g=float(g_sampled.sum()),
            ff=float(f_sampled @ f_sampled),
            gg=float(g_sampled @ g_sampled),
            fg=float(f_sampled @ g_sampled),
            cached_rows=sum(steps_cached),
            uncached_rows=uncached_rows,
            cached_token_rows=sum(
                length + (n - 1) * positions for n, positions in zip(steps_cached, later, strict=True)
            ),
            uncached_token_rows=length * uncached_rows,
            full_token_rows=length * sum(steps_uncached),
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
        work = {
            "cached": {"rows": self.cached_rows, "token_rows": self.cached_token_rows},
            "uncached": {"rows": self.uncached_rows, "token_rows": self.uncached_token_rows},
        }
        return {
            "blocks": self.blocks,
            "sampled_blocks": self.sampled,
            "cached_log_prob": self.cached,
            "correlation": self.correlation,
            **work,
            "all_uncached": {"token_rows": self.full_token_rows},
        }

    @property
    def words(self) -> str:
        """The sample, for the log."""
        text = f"{self.sampled:,} of {self.blocks:,} blocks also without the cache"
        if self.correlation is not None:
            text += f", correlation {self.correlation:.4f}"
        if self.full_token_rows:
            share = (self.cached_token_rows + self.uncached_token_rows) / self.full_token_rows
            text += f", {share:.1%} of the token-rows of all blocks without it"
            text += "" if share < 1 else " (estimator=duel costs less)"
        if self.stderr is not None and FEW <= self.drawn < FAIR:
            text += f"; the standard error of {self.drawn} drawn blocks is uncertain itself: raise the sample"
        return text
