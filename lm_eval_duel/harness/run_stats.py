"""What an evaluation asked for, what each request adds to its results, and what that cost; summed over ranks.

What a request asks (its windows, tokens, cut contexts, settings) is counted from the request itself, by the evaluation
that asks it. What it came to is an `Outcome`: computed now, or found in a response cache, and counted the same.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import resource
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from lm_eval_duel.engine.results import WindowScore, known_sum
from lm_eval_duel.engine.windows import Window
from lm_eval_duel.estimators.base import Estimator, Value
from lm_eval_duel.harness.trace import IMPOSSIBLE

SHOWN = 20  # documents in a line of the log
PACKAGES = ("lm_eval_duel", "lm_eval", "torch", "transformers", "accelerate")


class Outcome(NamedTuple):
    """What one request came to."""

    values: list[dict[str, Value]]  # of each window, by name; the first is the one that its answer adds up
    close: bool  # whether any window has close picks

    @classmethod
    def of(cls, parts: Sequence[WindowScore], estimator: Estimator) -> Outcome:
        """From the results of a request's windows."""
        return cls([estimator.values(part) for part in parts], any(part.near_ties for part in parts))

    @property
    def plain(self) -> tuple[Any, ...]:
        """As a response cache keeps it."""
        return [{name: tuple(value) for name, value in one.items()} for one in self.values], self.close

    @classmethod
    def read(cls, plain: Any, windows: int, names: Iterable[str]) -> Outcome | None:
        """What `plain` wrote, of so many windows and these figures; None where it holds something else."""
        names = list(names)
        try:
            values, close = plain
            found = [{name: Value(*one[name]) for name in names} for one in values]
        except (TypeError, ValueError, KeyError):
            return None
        whole = len(found) == windows and type(close) is bool and all(list(one) == names for one in values)
        return cls(found, close) if whole and all(_sound(value) for one in found for value in one.values()) else None

    @property
    def total(self) -> float:
        """The log-likelihood that the answer states, nats."""
        return math.fsum(next(iter(one.values())).log_prob for one in self.values)


def _sound(value: Value) -> bool:
    """Whether a figure is made of numbers, as one is that an estimator wrote."""
    nats, stderr, nfe = value
    return type(nats) is float and type(stderr) in (float, type(None)) and type(nfe) in (int, type(None))


@dataclasses.dataclass
class Total:
    """The sum of one figure over windows."""

    log_prob: float = 0.0
    errors: dict[int, tuple[int, float]] | None = None  # of a window's hash: how often it came, its Monte Carlo error
    nfe: int | None = 0
    windows: int = 0
    squares: tuple[float, float, float] = (0.0, 0.0, 0.0)  # of nats, of nats x tokens, of tokens

    @classmethod
    def of(cls, window: Window, value: Value) -> Total:
        """One window's figure."""
        tokens = float(len(window.target))
        errors = None if value.stderr is None else {hash(window): (1, value.stderr)}
        return cls(value.log_prob, errors, value.nfe, 1, (value.log_prob**2, value.log_prob * tokens, tokens**2))

    def merge(self, other: Total) -> None:
        if not self.windows:  # what the first one does not know, the sum does not
            self.errors = None if other.errors is None else {}
            self.nfe = None if other.nfe is None else 0
        self.log_prob += other.log_prob
        self.nfe = known_sum(self.nfe, other.nfe)
        self.windows += other.windows
        self.squares = tuple(mine + theirs for mine, theirs in zip(self.squares, other.squares, strict=True))
        if self.errors is None or other.errors is None:
            self.errors = None
            return
        for window, (count, error) in other.errors.items():
            self.errors[window] = (self.errors.get(window, (0, 0.0))[0] + count, error)

    @property
    def stderr(self) -> float | None:
        """The Monte Carlo error of `nats`: equal windows have the same draws, so their errors are one error."""
        if self.errors is None:
            return None
        return math.sqrt(math.fsum((count * error) ** 2 for count, error in self.errors.values()))

    def describe(self, tokens: int) -> dict[str, Any]:
        """As in the results JSON, for a task of `tokens` tokens; null, with the reason, where JSON has no number."""
        if not math.isfinite(self.log_prob):
            return {"log_prob": None, "stderr": None, "window_stderr": None, "nfe": self.nfe, "reason": IMPOSSIBLE}
        return {
            "log_prob": self.log_prob,
            "stderr": self.stderr,
            "window_stderr": self._over_windows(tokens),
            "nfe": self.nfe,
            "windows": self.windows,
        }

    def bound(self, tokens: int) -> str:
        """A Monte Carlo ELBO of `tokens` tokens in words, with its standard error."""
        rate, error = -self.log_prob / tokens, self.stderr
        perplexity = math.exp(rate) if rate < 700 else math.inf
        if error is None:
            errors, said = ("", ""), "Monte Carlo error not known: 8 draws or more have one"
        else:
            errors, said = (f" +- {error:.2f}", f" +- {perplexity * error / tokens:.2f}"), "Monte Carlo standard error"
        return f"{self.log_prob:.2f}{errors[0]} nats, {perplexity:.2f}{errors[1]} per token ({said})"

    def _over_windows(self, tokens: int) -> float | None:
        """The standard error of `nats` as a ratio to tokens over windows: what other windows like these would move it.

        sqrt(n / (n - 1) sum over windows of (nats - rate tokens)^2), rate = nats / tokens of all n windows.
        """
        if self.windows < 2 or not tokens:
            return None
        rate, (nats, both, squared) = self.log_prob / tokens, self.squares
        spread = nats - 2 * rate * both + rate**2 * squared
        return (max(0.0, spread) * self.windows / (self.windows - 1)) ** 0.5


@dataclasses.dataclass
class TaskTotal:
    """The sums of one task."""

    documents: set[Any] = dataclasses.field(default_factory=set)
    close: set[Any] = dataclasses.field(default_factory=set)  # documents that have close picks
    requests: int = 0
    windows: int = 0
    tokens: int = 0
    longest_document: int = 0  # tokens
    values: dict[str, Total] = dataclasses.field(default_factory=dict)

    def merge(self, other: TaskTotal) -> None:
        self.documents |= other.documents
        self.close |= other.close
        for name in ("requests", "windows", "tokens"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.longest_document = max(self.longest_document, other.longest_document)
        for name, total in other.values.items():
            self.values.setdefault(name, Total()).merge(total)


@dataclasses.dataclass
class Verified:
    """What verify=N found (verify.py), added up over windows and ranks."""

    windows: int = 0
    tokens: int = 0
    largest_difference: float = 0.0  # nats, of a window
    where: str = ""
    changed_picks: int | None = 0  # positions whose reveal step differs; None: of no one order
    changed_windows: int = 0  # that have any
    near_tie_windows: int = 0  # whose run had close picks

    def merge(self, other: Verified) -> None:
        """More windows added to these."""
        if other.largest_difference >= self.largest_difference and other.where:
            self.largest_difference, self.where = other.largest_difference, other.where
        self.changed_picks = known_sum(self.changed_picks, other.changed_picks)
        for name in ("windows", "tokens", "changed_windows", "near_tie_windows"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def describe(self) -> dict[str, Any]:
        """As in the results JSON; `where` says which two values differ, where the difference is no number."""
        least = self.largest_difference if math.isfinite(self.largest_difference) else None
        return {**dataclasses.asdict(self), "largest_difference": least}

    @property
    def words(self) -> str:
        """As in the log."""
        picks = "no order to compare"
        if self.changed_picks is not None:
            picks = f"{self.changed_picks} of {self.tokens} picks moved, in {self.changed_windows} windows"
        return (
            f"verify: {self.windows} windows scored again, one row at a time in float32: largest difference "
            f"{self.largest_difference:.3g} nats ({self.where}); {picks}; {self.near_tie_windows} have close picks"
        )


@dataclasses.dataclass
class Cost:
    """One rank's account of one evaluation."""

    tasks: dict[str, TaskTotal] = dataclasses.field(default_factory=dict)
    counts: dict[str, int | None] = dataclasses.field(default_factory=dict)  # added up over ranks
    generated: set[str] = dataclasses.field(default_factory=set)  # in words, how
    seconds: float = 0.0  # in the estimator
    peak_memory: int = 0  # bytes
    ranks: int = 1
    shares: list[Share] = dataclasses.field(default_factory=list)  # of each rank
    verified: Verified = dataclasses.field(default_factory=Verified)

    def count(self, task: str, document: Any, windows: Sequence[Window], outcome: Outcome) -> None:
        """One request: its windows, and what they came to."""
        one = TaskTotal({document}, requests=1, windows=len(windows))
        one.tokens = one.longest_document = sum(len(window.target) for window in windows)
        if outcome.close:
            one.close.add(document)
        for window, values in zip(windows, outcome.values, strict=True):
            for name, value in values.items():
                one.values.setdefault(name, Total()).merge(Total.of(window, value))
        self.more("empty_requests", one.tokens == 0)
        self.tasks.setdefault(task, TaskTotal()).merge(one)

    def more(self, name: str, count: int = 1) -> None:
        """So many more of what is counted under a name."""
        self.counts[name] = self.counts.get(name, 0) + count

    def merge(self, other: Cost) -> None:
        """Another rank's account added to this one."""
        for name, total in other.tasks.items():
            self.tasks.setdefault(name, TaskTotal()).merge(total)
        for name, count in other.counts.items():
            self.counts[name] = known_sum(self.counts.get(name, 0), count)
        self.generated |= other.generated
        self.seconds = max(self.seconds, other.seconds)
        self.peak_memory = max(self.peak_memory, other.peak_memory)
        self.ranks += other.ranks
        self.shares += other.shares
        self.verified.merge(other.verified)

    @property
    def balance(self) -> str:
        """As in the log."""
        parts = (
            f"{name} {' '.join(f'{each:,.0f}' for each in found['ranks'])} (max/mean {found['max_over_mean'] or 0:.2f})"
            for name, found in balance(self.shares).items()
        )
        return f"balance of {self.ranks} ranks: {', '.join(parts)}"

    @property
    def close(self) -> str:
        """The documents that have close picks, as in the log; empty where none has any."""
        listed = [f"{task} {doc}" for task, total in self.tasks.items() for doc in sorted(total.close)]
        if not listed:
            return ""
        names = ", ".join(listed[:SHOWN])
        more = f" and {len(listed) - SHOWN} more (config.duel.tasks)" if len(listed) > SHOWN else ""
        return f"{len(listed)} documents have close picks, which float noise could change: {names}{more}"

    @property
    def bounds(self) -> list[str]:
        """Each task's Monte Carlo ELBO with its standard error, as in the log."""
        return [
            f"{task}: {total.values['elbo'].bound(total.tokens)}"
            for task, total in self.tasks.items()
            if "elbo" in total.values and total.tokens
        ]

    def describe(self) -> dict[str, Any]:
        """As in the results JSON."""
        windows, nfe, tokens = self.counts["windows"], self.counts["nfe"], self.counts["tokens"]
        return {
            "ranks": self.ranks,
            "balance": balance(self.shares),
            **self.counts,
            "mean_nfe": nfe / windows if nfe is not None and windows else None,
            "seconds": self.seconds,
            "tokens_per_second": tokens / self.seconds if self.seconds else None,
            "peak_memory_bytes": self.peak_memory,
            "longest_document": max((total.longest_document for total in self.tasks.values()), default=0),
            "generated": sorted(self.generated),
            "verify": self.verified.describe() if self.verified.windows else None,
            "tasks": {
                name: {
                    "documents": len(total.documents),
                    "near_tie_documents": sorted(total.close),
                    "requests": total.requests,
                    "windows": total.windows,
                    "tokens": total.tokens,
                    "longest_document": total.longest_document,
                    "values": {value: sums.describe(total.tokens) for value, sums in total.values.items()},
                }
                for name, total in self.tasks.items()
            },
        }


class Share(NamedTuple):
    """What one rank had to do."""

    rows: int
    tokens: int  # of targets
    seconds: float


def balance(shares: Sequence[Share]) -> dict[str, Any]:
    """What each rank had to do, and the most of any over the mean: 1 where all had the same."""
    found: dict[str, Any] = {}
    for name in Share._fields:
        each = [getattr(share, name) for share in shares]
        found[name] = {"ranks": each, "max_over_mean": max(each) * len(each) / sum(each) if sum(each) else None}
    return found


def peak_memory(device: torch.device) -> int:
    """The most memory that this process held, in bytes: on each of its GPUs, added up, or on a CPU."""
    if device.type == "cuda":
        return sum(torch.cuda.max_memory_allocated(gpu) for gpu in range(torch.cuda.device_count()))
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most  # kilobytes, but on a Mac


def versions() -> dict[str, str]:
    """The releases of the packages that a number depends on."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
