"""The statistics of an evaluation: the totals of each task and of the run, summed over ranks."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from lm_eval_duel.audit import checked
from lm_eval_duel.audit.checked import CheckedWindow
from lm_eval_duel.core.scores import known_sum
from lm_eval_duel.estimators.registry import ESTIMATORS
from lm_eval_duel.estimators.totals import Total
from lm_eval_duel.text.text import unknown_share

SHOWN = 20  # documents listed in a log line


@dataclasses.dataclass
class RunStats:
    """The statistics of one evaluation, of one rank or, merged, of all."""

    # by task
    tasks: dict[str, Total] = dataclasses.field(default_factory=dict)
    requests: Counter[str] = dataclasses.field(default_factory=Counter)
    longest: dict[str, int] = dataclasses.field(default_factory=dict)  # tokens of the longest request
    documents: dict[str, set[Any]] = dataclasses.field(default_factory=dict)
    near_tie_documents: dict[str, set[Any]] = dataclasses.field(default_factory=dict)
    unknown: dict[str, Counter[Any]] = dataclasses.field(default_factory=dict)  # [UNK] tokens of documents with any
    # of the run
    counts: dict[str, int | None] = dataclasses.field(default_factory=dict)  # summed over ranks
    generated: set[str] = dataclasses.field(default_factory=set)  # descriptions of generation settings
    seconds: float = 0.0  # in the estimator
    peak_memory: int = 0  # bytes
    ranks: int = 1
    shares: list[Share] = dataclasses.field(default_factory=list)  # of each rank
    checked: list[CheckedWindow] = dataclasses.field(default_factory=list)  # windows that were scored twice
    verify_failures: list[str] = dataclasses.field(default_factory=list)  # reasons why others were not
    phases: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)  # costs of a two-phase estimate

    def add_request(self, task: str, document: Any, total: Total, unknown: int = 0) -> None:
        """Add one request; `unknown`: how many of its tokens are [UNK]."""
        request = RunStats(
            tasks={task: total},
            requests=Counter([task]),
            longest={task: total.tokens},
            documents={task: {document}},
            near_tie_documents={task: {document} if total.near_ties else set()},
            unknown={task: Counter({document: unknown} if unknown else {})},
            counts={"empty_requests": int(total.tokens == 0)},
            ranks=0,
        )
        self.merge(request)

    def merge(self, other: RunStats) -> None:
        """Add other statistics, such as another rank's."""
        for task, total in other.tasks.items():
            self.tasks.setdefault(task, Total()).merge(total)
            self.longest[task] = max(self.longest.get(task, 0), other.longest[task])
            self.documents.setdefault(task, set()).update(other.documents[task])
            self.near_tie_documents.setdefault(task, set()).update(other.near_tie_documents[task])
            self.unknown.setdefault(task, Counter()).update(other.unknown[task])
        self.requests.update(other.requests)
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

    def log_lines(self) -> list[str]:
        """The lines of the log: near ties, estimates and bounds, the balance of ranks."""
        lines = [*([self.near_ties] if self.near_ties else []), *self.errors()]
        if self.ranks > 1:
            parts = []
            for name, load in balance(self.shares).items():
                work = " ".join(f"{amount:,.0f}" for amount in load["ranks"])
                parts.append(f"{name} {work} (max/mean {load['max_over_mean'] or 0:.2f})")
            lines.append(f"balance of {self.ranks} ranks: {', '.join(parts)}")
            if self.checked:
                lines.append(f"on all ranks, {checked.summary(self.checked)}")
        return lines

    def errors(self) -> list[str]:
        """The values of the run that depend on random numbers, with their errors, or are no likelihoods."""
        lines: list[str] = []
        for name, entry in ESTIMATORS.items():
            for task, total in self.tasks.items():
                found = total.named.get(name)
                if found is None or not found.tokens or found.value.is_exact:
                    continue
                if entry.drawn is not None or found is total:
                    lines.append(f"{entry.display} of {task}: {found.summary(entry.drawn)}")
        return lines

    def warnings(self) -> list[str]:
        """The warnings of the log: tasks with text that the tokenizer does not know, and checks with two answers."""
        lines = []
        for what, how in (("rows", "evaluated again alone"), ("decisions", "asked of the rule again")):
            differing, checked = (self.counts.get(f"{what}_{each}") for each in ("differing", "checked"))
            if differing:  # an error, unless the dtype is coarse
                lines.append(f"{differing} of {checked} {what} that were {how} differ by more than noise of this dtype")
        for task, unknown in self.unknown.items():
            if unknown:
                lines.append(f"{task}: {unknown_share(unknown.total(), self.tasks[task].tokens)}")
        return lines

    @property
    def near_ties(self) -> str:
        """The documents that have near ties; empty if none has any."""
        documents = [f"{task} {doc}" for task, found in self.near_tie_documents.items() for doc in sorted(found)]
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
            "longest_document": max(self.longest.values(), default=0),
            "generated": sorted(self.generated),
            "verify": checked.describe(self.checked) if self.checked else None,
            **({"verify_failed": self.verify_failures} if self.verify_failures else {}),
            **({"phases": self.phases} if self.phases else {}),
            "tasks": {task: self.describe_task(task) for task in self.tasks},
        }

    def describe_task(self, task: str) -> dict[str, Any]:
        """The entry of a task in the results JSON."""
        total, unknown = self.tasks[task], self.unknown[task]
        return {
            "documents": len(self.documents[task]),
            "near_tie_documents": sorted(self.near_tie_documents[task]),
            "requests": self.requests[task],
            "windows": total.windows,
            "tokens": total.tokens,
            "longest_document": self.longest[task],
            "unk_tokens": unknown.total(),
            "unk_documents": {str(document): count for document, count in sorted(unknown.items())},
            "values": {name: value.describe() for name, value in total.named.items()},
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
