"""The sums of an estimator's values: over the windows of a request, and over requests, tasks and ranks.

An `Outcome` counts the same whether it was computed now or read from a response cache.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from lm_eval_duel.core.rates import IMPOSSIBLE, perplexity
from lm_eval_duel.core.scores import BlockSums, Score, known_sum
from lm_eval_duel.core.windows import Window
from lm_eval_duel.estimators.base import Estimator
from lm_eval_duel.estimators.blocks import BeamBlocks
from lm_eval_duel.estimators.registry import MonteCarlo


class Outcome(NamedTuple):
    """The contribution of one request to the results, over all its windows."""

    windows: Sequence[Window]
    values: list[dict[str, Score]]  # of each window, by name; the first ones add up to `log_prob`
    is_greedy: bool
    near_ties: bool  # whether any of its windows has near ties

    @classmethod
    def from_scores(cls, windows: Sequence[Window], scores: Sequence[Score], estimator: Estimator) -> Outcome:
        """The outcome of a request, from the scores of its windows."""
        values = [{estimator.name: score, **score.others} for score in scores]
        is_greedy, near_ties = all(score.is_greedy for score in scores), any(score.near_ties for score in scores)
        return cls(windows, values, is_greedy, near_ties)

    @property
    def log_prob(self) -> float:
        """The request's log-likelihood, 0 for an empty text."""
        return math.fsum(next(iter(values.values())).log_prob for values in self.values)

    @property
    def total(self) -> Total:
        """The sum over its windows, with the Monte Carlo error of `log_prob`, if there is one and it is known."""
        pairs = zip(self.windows, self.values, strict=True)
        return Total.from_parts(Total.from_value(window, next(iter(values.values()))) for window, values in pairs)


@dataclasses.dataclass
class Total:
    """The sum of one value over windows."""

    log_prob: float = 0.0
    errors: dict[int, tuple[int, float]] | None = None  # hash of a window: how often it came, its Monte Carlo error
    nfe: int | None = 0
    windows: int = 0
    squares: tuple[float, float, float] = (0.0, 0.0, 0.0)  # of log_prob, of log_prob x tokens, of tokens
    blocks: BlockSums | None = None

    @classmethod
    def from_value(cls, window: Window, value: Score) -> Total:
        """The value of one window."""
        tokens = float(len(window.target))
        error = value.stderr if value.blocks is None else value.blocks.error
        errors = None if error is None else {hash(window): (1, error)}
        squares = value.log_prob**2, value.log_prob * tokens, tokens**2
        return cls(value.log_prob, errors, value.nfe, 1, squares, value.blocks)

    @classmethod
    def from_parts(cls, parts: Iterable[Total]) -> Total:
        """The sum of several sums; equal windows in them have one error."""
        total = cls()
        for part in parts:
            total.merge(part)
        return total

    def merge(self, other: Total) -> None:
        """Add another sum to this one."""
        if not self.windows:  # unknown in the first one: unknown in the sum
            self.errors = None if other.errors is None else {}
            self.nfe = None if other.nfe is None else 0
            self.blocks = None if other.blocks is None else type(other.blocks)()
        self.log_prob += other.log_prob
        self.nfe = known_sum(self.nfe, other.nfe)
        self.windows += other.windows
        self.blocks = self.blocks + other.blocks if self.blocks and other.blocks else None
        (a, b, c), (x, y, z) = self.squares, other.squares
        self.squares = a + x, b + y, c + z
        if self.errors is None or other.errors is None:
            self.errors = None
            return
        for window, (count, error) in other.errors.items():
            before = self.errors[window][0] if window in self.errors else 0
            self.errors[window] = (before + count, error)

    @property
    def stderr(self) -> float | None:
        """The Monte Carlo error of `log_prob`: equal windows have the same draws, so their errors are one error.

        None: not known, for example because too few blocks of a two-phase estimate were drawn, or because no block of a
        beam has converged, so that its value is a bound at an unknown distance.
        """
        if self.errors is None or (self.blocks is not None and self.blocks.stderr is None):
            return None
        if self.beam is not None:
            return self.beam.stderr
        return math.hypot(*(count * error for count, error in self.errors.values()))

    @property
    def beam(self) -> BeamBlocks | None:
        """The blocks of a sum over orders by a beam."""
        return self.blocks if isinstance(self.blocks, BeamBlocks) else None

    def perplexity(self, tokens: int) -> tuple[float, float | None]:
        """The perplexity per token, and its Monte Carlo error; None as for `stderr`."""
        value = perplexity(-self.log_prob / tokens)
        return value, None if (error := self.stderr) is None else value * error / tokens

    def describe(self, tokens: int) -> dict[str, Any]:
        """The entries of the results JSON, for `tokens` tokens; null, with the reason, if the sum is infinite."""
        if not math.isfinite(self.log_prob):
            return {"log_prob": None, "stderr": None, "window_stderr": None, "nfe": self.nfe, "reason": IMPOSSIBLE}
        return {
            "log_prob": self.log_prob,
            "stderr": self.stderr,
            "window_stderr": self._over_windows(tokens),
            "nfe": self.nfe,
            "windows": self.windows,
            **({} if self.blocks is None else {self.blocks.name: self.blocks.describe()}),
        }

    def figures(self, tokens: int) -> str:
        """A value without an error, of `tokens` tokens, for the log."""
        return f"{self.log_prob:.2f} nats, perplexity {self.perplexity(tokens)[0]:.2f} per token"

    def with_error(self, tokens: int, drawn: MonteCarlo) -> str:
        """A value that is drawn, of `tokens` tokens, with its standard error, for the log."""
        (value, value_error), error = self.perplexity(tokens), self.stderr
        if error is None:
            errors, note = (" +- ?", " +- ?"), f"{drawn.error} error unknown: it takes at least 8 {drawn.units}"
        else:
            errors = (f" +- {error:.2f}", f" +- {value_error:.2f}")
            note = f"{drawn.error} {'error' if self.beam else 'standard error'}"
        note += f"; {self.blocks.summary}" if self.blocks else ""
        return f"{self.log_prob:.2f}{errors[0]} nats, perplexity {value:.2f}{errors[1]} per token ({note})"

    def _over_windows(self, tokens: int) -> float | None:
        """The standard error of `log_prob` over windows, as a ratio to tokens: how much other such windows would vary.

        sqrt(n / (n - 1) sum over windows of (log_prob - rate tokens)^2), rate = log_prob / tokens of all n windows.
        """
        if self.windows < 2 or not tokens:
            return None
        rate, (squared, mixed, tokens_squared) = self.log_prob / tokens, self.squares
        spread = squared - 2 * rate * mixed + rate**2 * tokens_squared
        return math.sqrt(max(0.0, spread) * self.windows / (self.windows - 1))
