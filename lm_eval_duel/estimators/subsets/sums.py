"""The results of beams of a sum over orders, as sums over blocks: they add up over windows, tasks and ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from lm_eval_duel.estimators.arguments import LATTICE_BLOCK


class BeamSums(NamedTuple):
    """Sums over the blocks of some windows. A block that has not converged counts with its lower bound."""

    blocks: int = 0
    exact: int = 0  # every set was evaluated
    converged: int = 0  # of the others
    unproven: int = 0  # of these, with more positions than blocks whose exact values are known
    bound: float = 0.0  # lower bound of the log-likelihood, nats
    rows: int = 0

    @classmethod
    def total(cls, parts: Iterable[BeamSums | tuple[float, ...]]) -> BeamSums:
        """The sums over several windows."""
        return cls(*map(sum, zip(cls(), *parts, strict=True)))

    @classmethod
    def read(cls, entries: Mapping[str, Any]) -> BeamSums:
        """The inverse of `describe`."""
        return cls(*(entries[name] for name in cls._fields))

    @property
    def open(self) -> int:
        """The number of blocks that count with their bound."""
        return self.blocks - self.exact - self.converged

    @property
    def only_bounded(self) -> bool:
        """True if some blocks count with their bound and none has converged: there is no error to tell."""
        return bool(self.open) and not self.converged

    @property
    def kind(self) -> Literal["bound", "estimate", "exact"]:
        """The kind of the sum of these blocks."""
        if self.open:
            return "bound"
        return "estimate" if self.converged else "exact"

    def describe(self) -> dict[str, Any]:
        """For the results JSON."""
        return {"kind": self.kind, **self._asdict()}

    @property
    def remark(self) -> str:
        """A short remark on what limits the value; empty for one that is exact or proven."""
        parts = [f"{self.open:,} of {self.blocks:,} blocks with their lower bound"] if self.open else []
        if self.unproven:
            parts.append(f"error not proven: blocks above {LATTICE_BLOCK} positions")
        return ", ".join(parts)

    @property
    def words(self) -> str:
        """For the log."""
        text = f"{self.exact:,} of {self.blocks:,} blocks exact, {self.converged:,} converged"
        text += f", {self.open:,} with their lower bound: raise beam" if self.open else ""
        if self.unproven:
            text += f"; the error of {self.unproven:,} converged blocks above {LATTICE_BLOCK} positions is not proven"
        return f"{text}; at least {self.bound:.2f} nats, {self.rows:,} rows"
