"""What the beams of a sum over orders have found, as sums over blocks: they add up over windows, tasks and ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple


class BeamSums(NamedTuple):
    """Sums over the blocks of some windows, in nats. A block that has not converged counts with its bound."""

    blocks: int = 0
    converged: int = 0
    bound: float = 0.0  # lower bound of the log-likelihood
    estimate: float = 0.0  # of all blocks, also of those that have not converged
    variance: float = 0.0  # of the estimate
    rows: int = 0

    @classmethod
    def total(cls, parts: Iterable[BeamSums | tuple[float, ...]]) -> BeamSums:
        """The sums over several windows."""
        return cls(*map(sum, zip(cls(), *parts, strict=True)))

    @property
    def is_bound(self) -> bool:
        """Whether some block is a bound, so that the sum is one."""
        return self.converged < self.blocks

    def describe(self) -> dict[str, Any]:
        """For the results JSON."""
        entries: dict[str, Any] = self._asdict()
        entries["estimate_stderr"] = entries.pop("variance") ** 0.5
        return entries

    @property
    def words(self) -> str:
        """For the log."""
        text = f"lower bound {self.bound:.2f} nats, {self.rows:,} rows"
        if self.is_bound:
            error = self.variance**0.5
            text += (
                f"; {self.blocks - self.converged:,} of {self.blocks:,} blocks have not converged and count with their "
                f"bound, so the value is a bound; estimate {self.estimate:.2f} +- {error:.2f}: raise beam"
            )
        return text
