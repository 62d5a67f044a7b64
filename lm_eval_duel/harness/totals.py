"""The statistics of an evaluation: the totals of each task and of the run, summed over ranks."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from lm_eval_duel.audit import checked
from lm_eval_duel.audit.checked import CheckedWindow
from lm_eval_duel.core.scores import known_sum
from lm_eval_duel.estimators.registry import BEAM, ESTIMATORS, Kind, of_spec
from lm_eval_duel.estimators.totals import Outcome, Total
from lm_eval_duel.text.text import unknown_share

SHOWN = 20  # documents listed in a log line


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
        """The entries of the results JSON."""
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
    checked: list[CheckedWindow] = dataclasses.field(default_factory=list)  # windows that were scored twice
    verify_failures: list[str] = dataclasses.field(default_factory=list)  # reasons why others were not
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
        self.verify_failures += other.verify_failures
        for phase, costs in other.phases.items():
            mine = self.phases.setdefault(phase, {})
            self.phases[phase] = {name: mine.get(name, 0) + cost for name, cost in costs.items()}

    def log_lines(self, bound: str) -> list[str]:
        """The lines of the log: near ties, estimates (`bound`: the kind of an ELBO), the balance of ranks."""
        lines = [*([self.near_ties] if self.near_ties else []), *self.errors(bound)]
        if self.ranks > 1:
            lines.append(self.balance)
            if self.checked:
                lines.append(f"on all ranks, {checked.in_words(self.checked)}")
        return lines

    def errors(self, bound: str) -> list[str]:
        """The values of the run that depend on random numbers, with their errors, or are no likelihoods.

        `bound`: what kind of number an ELBO is.
        """
        lines: list[str] = []
        for name, task, total in ((name, task, total) for name in ESTIMATORS for task, total in self.tasks.items()):
            value = total.values.get(name)
            beam = None if value is None else value.beam
            entry = of_spec(name, {} if beam is None else {BEAM: ""}, beam)
            if value is None or not total.tokens:
                continue
            if entry.drawn is None:
                found = "" if beam is None else f"; {beam.summary}"
                if entry.kind is not Kind.LIKELIHOOD and name == next(iter(total.values)):
                    lines.append(
                        f"{entry.display} of {task}: {value.figures(total.tokens)} ({entry.kind.value}{found})"
                    )
                continue
            title = entry.drawn.value + (f" ({bound})" if entry.kind is Kind.UPPER_BOUND else "")
            lines.append(f"{title} of {task}: {value.with_error(total.tokens, entry.drawn)}")
        return lines

    def warnings(self) -> list[str]:
        """The warnings of the log: tasks with text that the tokenizer does not know, and checks with two answers."""
        return [
            *self._two_answers(),
            *(
                f"{task}: {unknown_share(total.unknown.total(), total.tokens)}"
                for task, total in self.tasks.items()
                if total.unknown
            ),
        ]

    def _two_answers(self) -> Iterator[str]:
        """A sentence on values that differed by more than noise when they were computed again: counted, since they are
        coarse.
        """
        for what, how in (("rows", "evaluated again alone"), ("decisions", "asked of the rule again")):
            differing, checked = (self.counts.get(f"{what}_{each}") for each in ("differing", "checked"))
            if differing:
                yield f"{differing} of {checked} {what} that were {how} differ by more than noise of this dtype"

    @property
    def balance(self) -> str:
        """The balance of the load over ranks."""
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
        """The entries of the results JSON."""
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
            **({"verify_failed": self.verify_failures} if self.verify_failures else {}),
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
