"""What requests contribute to the results of their task, and the totals of a task and of a run, summed over ranks.

An `Outcome` counts the same whether it was computed now or read from a response cache.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from lm_eval_duel.audit import checked
from lm_eval_duel.audit.checked import Checked
from lm_eval_duel.core.rates import perplexity
from lm_eval_duel.core.scores import WindowScore, known_sum
from lm_eval_duel.core.windows import Window
from lm_eval_duel.estimators.base import Estimator, Value
from lm_eval_duel.estimators.phases import Phases
from lm_eval_duel.estimators.registry import BEAM, ESTIMATORS, Kind, MonteCarlo, of_spec
from lm_eval_duel.estimators.subsets.sums import BeamSums
from lm_eval_duel.harness.trace import IMPOSSIBLE
from lm_eval_duel.text.text import unknown_share

SHOWN = 20  # documents listed in a log line


class Outcome(NamedTuple):
    """What one request contributes to the results, over all its windows."""

    windows: Sequence[Window]
    values: list[dict[str, Value]]  # of each window, by name; the first ones add up to `log_prob`
    is_greedy: bool
    near_ties: bool  # whether any of its windows has near ties

    @classmethod
    def from_scores(cls, windows: Sequence[Window], scores: Sequence[WindowScore], estimator: Estimator) -> Outcome:
        """From the scores of a request's windows."""
        values = [estimator.values(score) for score in scores]
        is_greedy, near_ties = all(score.is_greedy for score in scores), any(score.near_ties for score in scores)
        return cls(windows, values, is_greedy, near_ties)

    @property
    def record(self) -> tuple[Any, ...]:
        """As plain values, for a response cache; `log_prob` is first."""
        values = [{name: tuple(value) for name, value in values.items()} for values in self.values]
        return self.log_prob, values, self.is_greedy, self.near_ties

    @classmethod
    def from_record(cls, record: tuple[Any, ...], windows: Sequence[Window]) -> Outcome | None:
        """Read a `record`; None if it is inconsistent or has another number of windows."""
        try:
            log_prob, plain, is_greedy, near_ties = record
            values = [{name: Value(*value) for name, value in window.items()} for window in plain]
            outcome = cls(windows, values, is_greedy, near_ties)
            whole = len(values) == len(windows) and all(values)
            return outcome if whole and outcome.log_prob == log_prob else None
        except (TypeError, ValueError, AttributeError):
            return None

    @property
    def log_prob(self) -> float:
        """The request's log-likelihood; that of an empty text is 0."""
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
    phases: Phases | None = None  # of a two-phase estimate
    beam: BeamSums | None = None  # of a sum over orders by a beam

    @classmethod
    def from_value(cls, window: Window, value: Value) -> Total:
        """The value of one window."""
        tokens = float(len(window.target))
        phases = None if value.phases is None else Phases.read(value.phases)
        error = value.stderr if phases is None else math.sqrt(phases.variance)
        beam = None if value.beam is None else BeamSums(*value.beam)
        errors = None if error is None else {hash(window): (1, error)}
        squares = value.log_prob**2, value.log_prob * tokens, tokens**2
        return cls(value.log_prob, errors, value.nfe, 1, squares, phases, beam)

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
            self.phases = None if other.phases is None else Phases()
            self.beam = None if other.beam is None else BeamSums()
        self.log_prob += other.log_prob
        self.nfe = known_sum(self.nfe, other.nfe)
        self.windows += other.windows
        self.phases = None if None in (self.phases, other.phases) else Phases.total([self.phases, other.phases])
        self.beam = None if None in (self.beam, other.beam) else BeamSums.total([self.beam, other.beam])
        self.squares = tuple(mine + theirs for mine, theirs in zip(self.squares, other.squares, strict=True))
        if self.errors is None or other.errors is None:
            self.errors = None
            return
        for window, (count, error) in other.errors.items():
            before = self.errors[window][0] if window in self.errors else 0
            self.errors[window] = (before + count, error)

    @property
    def stderr(self) -> float | None:
        """The Monte Carlo error of `log_prob`: equal windows have the same draws, so their errors are one error.

        None: not known, for example because too few blocks of a two-phase estimate were drawn.
        """
        if self.errors is None or (self.phases is not None and self.phases.stderr is None):
            return None
        errors = [count * error for count, error in self.errors.values()]
        return math.fsum(errors) if self.beam else math.hypot(*errors)  # errors of a beam have one sign as a rule

    def perplexity(self, tokens: int) -> tuple[float, float | None]:
        """The perplexity per token, and its Monte Carlo error; None as for `stderr`."""
        value = perplexity(-self.log_prob / tokens)
        return value, None if (error := self.stderr) is None else value * error / tokens

    def describe(self, tokens: int) -> dict[str, Any]:
        """For the results JSON of a task of `tokens` tokens; null, with the reason, if the sum is infinite."""
        if not math.isfinite(self.log_prob):
            return {"log_prob": None, "stderr": None, "window_stderr": None, "nfe": self.nfe, "reason": IMPOSSIBLE}
        return {
            "log_prob": self.log_prob,
            "stderr": self.stderr,
            "window_stderr": self._over_windows(tokens),
            "nfe": self.nfe,
            "windows": self.windows,
            **({} if self.phases is None else {"two_phase": self.phases.describe()}),
            **({} if self.beam is None else {"beam": self.beam.describe()}),
        }

    def in_words(self, tokens: int, drawn: MonteCarlo) -> str:
        """A value that is drawn, of `tokens` tokens, with its standard error, for the log."""
        (value, value_error), error = self.perplexity(tokens), self.stderr
        if error is None:
            errors, note = (" +- ?", " +- ?"), f"{drawn.error} error unknown: it takes at least 8 {drawn.units}"
        else:
            errors = (f" +- {error:.2f}", f" +- {value_error:.2f}")
            note = f"{drawn.error} standard error"
        note += "".join(f"; {sums.words}" for sums in (self.phases, self.beam) if sums is not None)
        return f"{self.log_prob:.2f}{errors[0]} nats, perplexity {value:.2f}{errors[1]} per token ({note})"

    def _over_windows(self, tokens: int) -> float | None:
        """The standard error of `log_prob` over windows, as a ratio to tokens: how much other such windows would vary.

        sqrt(n / (n - 1) sum over windows of (log_prob - rate tokens)^2), rate = log_prob / tokens of all n windows.
        """
        if self.windows < 2 or not tokens:
            return None
        rate, (squared, mixed, tokens_squared) = self.log_prob / tokens, self.squares
        spread = squared - 2 * rate * mixed + rate**2 * tokens_squared
        return (max(0.0, spread) * self.windows / (self.windows - 1)) ** 0.5


@dataclasses.dataclass
class TaskTotal:
    """The sums of one task."""

    documents: set[Any] = dataclasses.field(default_factory=set)
    near_ties: set[Any] = dataclasses.field(default_factory=set)  # the documents that have any
    unknown: Counter[Any] = dataclasses.field(default_factory=Counter)  # [UNK] tokens of each document that has any
    requests: int = 0
    windows: int = 0
    tokens: int = 0
    longest_document: int = 0  # tokens
    values: dict[str, Total] = dataclasses.field(default_factory=dict)

    def merge(self, other: TaskTotal) -> None:
        """Add the sums of other requests."""
        self.documents |= other.documents
        self.near_ties |= other.near_ties
        self.unknown.update(other.unknown)
        for name in ("requests", "windows", "tokens"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.longest_document = max(self.longest_document, other.longest_document)
        for name, total in other.values.items():
            self.values.setdefault(name, Total()).merge(total)

    def describe(self) -> dict[str, Any]:
        """For the results JSON."""
        return {
            "documents": len(self.documents),
            "near_tie_documents": sorted(self.near_ties),
            "requests": self.requests,
            "windows": self.windows,
            "tokens": self.tokens,
            "longest_document": self.longest_document,
            "unk_tokens": self.unknown.total(),
            "unk_documents": {str(document): count for document, count in sorted(self.unknown.items())},
            "values": {name: total.describe(self.tokens) for name, total in self.values.items()},
        }


@dataclasses.dataclass
class RunStats:
    """The statistics of one evaluation, of one rank or, merged, of all."""

    tasks: dict[str, TaskTotal] = dataclasses.field(default_factory=dict)
    counts: dict[str, int | None] = dataclasses.field(default_factory=dict)  # summed over ranks
    generated: set[str] = dataclasses.field(default_factory=set)  # descriptions of generation settings
    seconds: float = 0.0  # in the estimator
    peak_memory: int = 0  # bytes
    ranks: int = 1
    shares: list[Share] = dataclasses.field(default_factory=list)  # of each rank
    checked: list[Checked] = dataclasses.field(default_factory=list)  # windows that were scored twice
    phases: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)  # costs of a two-phase estimate

    def add_request(self, task: str, document: Any, outcome: Outcome, unknown: int = 0) -> None:
        """One request: what its windows contribute, and how many of its tokens are [UNK]."""
        windows = outcome.windows
        total = TaskTotal({document}, requests=1, windows=len(windows))
        total.tokens = total.longest_document = sum(len(window.target) for window in windows)
        if outcome.near_ties:
            total.near_ties.add(document)
        if unknown:
            total.unknown[document] = unknown
        for window, values in zip(windows, outcome.values, strict=True):
            for name, value in values.items():
                total.values.setdefault(name, Total()).merge(Total.from_value(window, value))
        self.add_count("empty_requests", total.tokens == 0)
        self.tasks.setdefault(task, TaskTotal()).merge(total)

    def add_count(self, name: str, count: int = 1) -> None:
        """Add to a count."""
        self.counts[name] = self.counts.get(name, 0) + count

    def perplexity_error(self, task: str) -> float | None:
        """The Monte Carlo error of a task's perplexity per token; None: there is none, or it is not known."""
        total = self.tasks[task]
        return next(iter(total.values.values())).perplexity(total.tokens)[1] if total.tokens else None

    def merge(self, other: RunStats) -> None:
        """Add the statistics of another rank."""
        for name, total in other.tasks.items():
            self.tasks.setdefault(name, TaskTotal()).merge(total)
        for name, count in other.counts.items():
            self.counts[name] = known_sum(self.counts.get(name, 0), count)
        self.generated |= other.generated
        self.seconds = max(self.seconds, other.seconds)
        self.peak_memory = max(self.peak_memory, other.peak_memory)
        self.ranks += other.ranks
        self.shares += other.shares
        self.checked += other.checked
        for phase, costs in other.phases.items():
            mine = self.phases.setdefault(phase, {})
            self.phases[phase] = {name: mine.get(name, 0) + cost for name, cost in costs.items()}

    def log_lines(self, bound: str) -> list[str]:
        """For the log: near ties, estimates (`bound`: what kind of number an ELBO is), the balance of ranks."""
        lines = [*([self.near_ties] if self.near_ties else []), *self.errors(bound)]
        if self.ranks > 1:
            lines.append(self.balance)
            if self.checked:
                lines.append(f"on all ranks, {checked.in_words(self.checked)}")
        return lines

    def errors(self, bound: str) -> list[str]:
        """The values that depend on random numbers, with their errors. `bound`: what kind of number an ELBO is."""
        lines: list[str] = []
        for name, task, total in ((name, task, total) for name in ESTIMATORS for task, total in self.tasks.items()):
            value = total.values.get(name)
            beam = None if value is None else value.beam
            entry = of_spec(name, {} if beam is None else {BEAM: ""}, beam)
            if entry.drawn is None or value is None or not total.tokens:
                continue
            title = entry.drawn.value + (f" ({bound})" if entry.kind is Kind.UPPER_BOUND else "")
            lines.append(f"{title} of {task}: {value.in_words(total.tokens, entry.drawn)}")
        return lines

    def warnings(self) -> list[str]:
        """For the log: the tasks with text that the tokenizer does not know, and checks with two answers."""
        return [
            *self._two_answers(),
            *(
                f"{task}: {unknown_share(total.unknown.total(), total.tokens)}"
                for task, total in self.tasks.items()
                if total.unknown
            ),
        ]

    def _two_answers(self) -> Iterator[str]:
        """What differed more than its noise when it was computed again: counted, since the numbers are coarse."""
        for what, how in (("rows", "evaluated again alone"), ("decisions", "asked of the rule again")):
            differing, checked = (self.counts.get(f"{what}_{each}") for each in ("differing", "checked"))
            if differing:
                yield f"{differing} of {checked} {what} that were {how} differ by more than noise of this dtype"

    @property
    def balance(self) -> str:
        """How evenly the ranks were loaded."""
        parts = [
            f"{name} {' '.join(f'{work:,.0f}' for work in load['ranks'])} (max/mean {load['max_over_mean'] or 0:.2f})"
            for name, load in balance(self.shares).items()
        ]
        return f"balance of {self.ranks} ranks: {', '.join(parts)}"

    @property
    def near_ties(self) -> str:
        """The documents that have near ties; empty if none has any."""
        documents = [f"{task} {doc}" for task, total in self.tasks.items() for doc in sorted(total.near_ties)]
        if not documents:
            return ""
        names = ", ".join(documents[:SHOWN])
        more = f" and {len(documents) - SHOWN} more (config.duel.tasks)" if len(documents) > SHOWN else ""
        return f"{len(documents)} documents have near ties, whose order float noise could change: {names}{more}"

    def describe(self) -> dict[str, Any]:
        """For the results JSON."""
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
            "verify": checked.describe(self.checked) if self.checked else None,
            **({"phases": self.phases} if self.phases else {}),
            "tasks": {name: total.describe() for name, total in self.tasks.items()},
        }


class Share(NamedTuple):
    """The work of one rank."""

    rows: int
    tokens: int  # of targets
    seconds: float


def balance(shares: Sequence[Share]) -> dict[str, Any]:
    """The work of each rank, and the maximum over the mean: 1 if all ranks did the same."""
    loads: dict[str, Any] = {}
    for name in Share._fields:
        amounts = [getattr(share, name) for share in shares]
        ratio = max(amounts) * len(amounts) / sum(amounts) if sum(amounts) else None
        loads[name] = {"ranks": amounts, "max_over_mean": ratio}
    return loads
