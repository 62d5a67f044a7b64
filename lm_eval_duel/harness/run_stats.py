"""Statistics of one evaluation, summed over ranks: totals of every task, and what they cost."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import resource
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lm_eval_duel.core.scores import known_sum
from lm_eval_duel.estimators.registry import BEAM, ESTIMATORS, Kind, of_spec
from lm_eval_duel.harness import verify
from lm_eval_duel.harness.totals import Outcome, TaskTotal, Total
from lm_eval_duel.harness.verify import Checked
from lm_eval_duel.text.text import unknown_share

if TYPE_CHECKING:
    from lm_eval_duel.core.denoiser import Denoiser

SHOWN = 20  # documents listed in a log line
PACKAGES = ("lm_eval_duel", "lm_eval", "torch", "transformers", "accelerate")


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
                lines.append(f"on all ranks, {verify.in_words(self.checked)}")
        return lines

    def errors(self, bound: str) -> list[str]:
        """The values that depend on random numbers, with their errors. `bound`: what kind of number an ELBO is."""
        lines: list[str] = []
        for name, task, total in ((name, task, total) for name in ESTIMATORS for task, total in self.tasks.items()):
            value = total.values.get(name)
            entry = of_spec(name, {} if value is None or value.beam is None else {BEAM: ""})
            if entry.drawn is None or value is None or not total.tokens:
                continue
            title = entry.drawn.value + (f" ({bound})" if entry.kind is Kind.UPPER_BOUND else "")
            lines.append(f"{title} of {task}: {value.in_words(total.tokens, entry.drawn)}")
        return lines

    def warnings(self) -> list[str]:
        """For the log: the tasks with text that the tokenizer does not know."""
        return [
            f"{task}: {unknown_share(total.unknown.total(), total.tokens)}"
            for task, total in self.tasks.items()
            if total.unknown
        ]

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
            "verify": verify.describe(self.checked) if self.checked else None,
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


def peak_memory(device: torch.device) -> int:
    """The peak memory of this process in bytes: summed over its GPUs, or of the CPU."""
    if device.type == "cuda":
        return sum(torch.cuda.max_memory_allocated(gpu) for gpu in range(torch.cuda.device_count()))
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most  # kilobytes, except on macOS


def parameters(denoiser: Denoiser) -> int | None:
    """The number of parameters of a network; None for packed weights, whose tensors hold several in one number."""
    network = getattr(denoiser, "model", None) or getattr(denoiser, "network", None)
    if denoiser.quantized or not isinstance(network, torch.nn.Module):
        return None
    return sum(parameter.numel() for parameter in network.parameters())


def versions() -> dict[str, str]:
    """The installed versions of the packages that a number depends on."""
    installed = {}
    for name in PACKAGES:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed[name] = "not installed"
    return installed
