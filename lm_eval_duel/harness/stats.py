"""The statistics of an evaluation: of each task and of the run, summed over ranks."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import resource
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lm_eval_duel.audit import verify
from lm_eval_duel.audit.checked import CheckedWindow
from lm_eval_duel.core.scores import known_sum
from lm_eval_duel.errors import counted
from lm_eval_duel.estimators.registry import ESTIMATORS
from lm_eval_duel.estimators.totals import Total
from lm_eval_duel.text.text import unknown_share
from lm_eval_duel.text.unigram import scored_tokens, unigram_warning

if TYPE_CHECKING:
    from lm_eval_duel.core.denoiser import Denoiser
    from lm_eval_duel.core.windows import Window

SHOWN = 20  # documents listed in a log line
FEWEST = 1_000  # tokens of a task that is compared with its unigram: fewer may be unusual texts
PACKAGES = ("lm_eval_duel", "lm_eval", "torch", "transformers", "accelerate")


class Share(NamedTuple):
    """The work of one rank."""

    rows: int
    tokens: int  # of targets
    seconds: float


@dataclasses.dataclass
class TaskStats:
    """The sums over the requests of one task."""

    total: Total = dataclasses.field(default_factory=Total)
    requests: int = 0
    longest: int = 0  # tokens of the longest request
    documents: set[Any] = dataclasses.field(default_factory=set)
    near_ties: set[Any] = dataclasses.field(default_factory=set)  # documents that have any
    unknown: Counter[Any] = dataclasses.field(default_factory=Counter)  # [UNK] tokens of documents that have any
    ids: Counter[int] = dataclasses.field(default_factory=Counter)  # how often each token is scored
    has_options: bool = False  # its requests are the options of questions, so their sum is no text's value

    def add(
        self, document: Any, total: Total, unknown: int = 0, option: int = 0, windows: Iterable[Window] = ()
    ) -> None:
        """Add one request of a document; the arguments are those of `RunStats.add_request`."""
        self.total.merge(total)
        self.requests += 1
        self.longest = max(self.longest, total.tokens)
        self.documents.add(document)
        if total.near_ties:
            self.near_ties.add(document)
        if unknown:
            self.unknown[document] += unknown
        self.ids.update(scored_tokens(windows))
        self.has_options |= option > 0

    def merge(self, other: TaskStats) -> None:
        """Add the statistics of the same task on another rank."""
        self.total.merge(other.total)
        self.requests += other.requests
        self.longest = max(self.longest, other.longest)
        self.documents |= other.documents
        self.near_ties |= other.near_ties
        self.unknown.update(other.unknown)
        self.ids.update(other.ids)
        self.has_options |= other.has_options

    def describe(self) -> dict[str, Any]:
        """The entry of a task in the results JSON."""
        return {
            "documents": len(self.documents),
            "near_tie_documents": sorted(self.near_ties),
            "requests": self.requests,
            "windows": self.total.windows,
            "tokens": self.total.tokens,
            "longest_document": self.longest,
            "unk_tokens": self.unknown.total(),
            "unk_documents": {str(document): count for document, count in sorted(self.unknown.items())},
            "values": {name: total.describe() for name, total in self.total.named.items()},
        }


@dataclasses.dataclass
class RunStats:
    """The statistics of one evaluation, of one rank or, merged, of all."""

    tasks: dict[str, TaskStats] = dataclasses.field(default_factory=dict)
    counts: dict[str, int | None] = dataclasses.field(default_factory=dict)  # summed over ranks
    cut_contexts: Counter[str] = dataclasses.field(default_factory=Counter)  # truncated contexts and prompts, by task
    generated: set[str] = dataclasses.field(default_factory=set)  # descriptions of generation settings
    seconds: float = 0.0  # in the estimator
    peak_memory: int = 0  # bytes
    ranks: int = 1
    shares: list[Share] = dataclasses.field(default_factory=list)  # of each rank
    checked: list[CheckedWindow] = dataclasses.field(default_factory=list)  # windows that were scored twice
    verify_failures: list[str] = dataclasses.field(default_factory=list)  # why other drawn windows were not
    phases: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)  # costs of a two-phase estimate

    def add_request(
        self,
        task: str,
        document: Any,
        total: Total,
        unknown: int = 0,
        option: int = 0,
        windows: Iterable[Window] = (),
    ) -> None:
        """Add one request.

        `unknown`: how many of its tokens are [UNK]; `option`: its number among a document's; `windows`: its windows,
        whose tokens are counted.
        """
        self.tasks.setdefault(task, TaskStats()).add(document, total, unknown, option, windows)
        self.count("empty_requests", int(total.tokens == 0))

    def count(self, name: str, more: int | None) -> None:
        """Add to a count. A sum with an unknown part (None) is unknown."""
        self.counts[name] = known_sum(self.counts.get(name, 0), more)

    def merge(self, other: RunStats) -> None:
        """Add the statistics of another rank."""
        for task, stats in other.tasks.items():
            self.tasks.setdefault(task, TaskStats()).merge(stats)
        for name, count in other.counts.items():
            self.count(name, count)
        self.cut_contexts.update(other.cut_contexts)
        self.generated |= other.generated
        self.seconds = max(self.seconds, other.seconds)
        self.peak_memory = max(self.peak_memory, other.peak_memory)
        self.ranks += other.ranks
        self.shares += other.shares
        self.checked += other.checked
        self.verify_failures += other.verify_failures
        for phase, costs in other.phases.items():
            sums = self.phases.setdefault(phase, {})
            for name, cost in costs.items():
                sums[name] = sums.get(name, 0) + cost

    def log_lines(self) -> list[str]:
        """The lines of the log: near ties, estimates and bounds, the balance of ranks."""
        lines = []
        if self.near_ties:
            lines.append(self.near_ties)
        lines += self.errors()
        if self.ranks == 1:
            return lines

        loads = []
        for name, load in balance(self.shares).items():
            work = " ".join(f"{amount:,.0f}" for amount in load["ranks"])
            loads.append(f"{name} {work} (max/mean {load['max_over_mean'] or 0:.2f})")
        lines.append(f"balance of {self.ranks} ranks: {', '.join(loads)}")
        if self.checked:
            lines.append(f"on all ranks, {verify.summary(self.checked)}")
        return lines

    def errors(self) -> list[str]:
        """The values of the run that depend on random numbers, with their errors, and those that are not likelihoods.

        A task of choices has none: the sum over all options, wrong ones too, is not the value of a text.
        """
        lines: list[str] = []
        for name, entry in ESTIMATORS.items():
            for task, stats in self.tasks.items():
                total = None if stats.has_options else stats.total.named.get(name)
                if total is None or not total.tokens or total.value.is_exact:
                    continue
                # A score may hold values of other estimators: of these, only drawn ones have an error to name.
                is_own = total is stats.total
                if is_own or entry.is_drawn:
                    lines.append(f"{entry.display} of {task}: {total.summary(entry.monte_carlo)}")
        return lines

    def warnings(self) -> list[str]:
        """The warnings of the log: rows that differed when they were evaluated again, and tasks with [UNK]."""
        lines = []
        differing = self.counts.get("rows_differing")
        if differing:  # an error, unless the dtype is coarse
            checked = self.counts.get("rows_checked")
            lines.append(
                f"{differing} of {checked} rows that were evaluated again alone differ by more than noise of this dtype"
            )
        for task, stats in self.tasks.items():
            unknown = stats.unknown.total()
            if unknown:
                lines.append(f"{task}: {unknown_share(unknown, stats.total.tokens)}")
        return lines

    def unigram_warnings(self, vocabulary: int) -> list[str]:
        """The warnings of tasks whose perplexity is above that of a unigram of their texts.

        A task of choices has none: wrong options are no texts. `vocabulary`: the tokens that the network may predict.
        """
        lines = []
        for task, stats in self.tasks.items():
            total = stats.total
            if stats.has_options or total.tokens < FEWEST:
                continue
            bound = total.value.is_bound
            error = total.perplexity_stderr
            warning = unigram_warning(task, total.perplexity, stats.ids, vocabulary, bound, error)
            if warning:
                lines.append(warning)
        return lines

    @property
    def near_ties(self) -> str:
        """The documents that have near ties; empty if none has any."""
        documents = []
        for task, stats in self.tasks.items():
            documents += [f"{task} {document}" for document in sorted(stats.near_ties)]
        if not documents:
            return ""
        names = ", ".join(documents[:SHOWN])
        if len(documents) > SHOWN:
            names += f" and {len(documents) - SHOWN} more (config.duel.tasks)"
        return f"near ties, whose order float noise could change, in {counted(len(documents), 'document')}: {names}"

    def describe(self) -> dict[str, Any]:
        """The entries of the results JSON."""
        windows = self.counts["windows"]
        tokens = self.counts["tokens"]
        nfe = self.counts["nfe"]
        entries = {
            "ranks": self.ranks,
            "balance": balance(self.shares),
            **self.counts,
            "cut_contexts": dict(sorted(self.cut_contexts.items())),
            "mean_nfe": nfe / windows if nfe is not None and windows else None,
            "seconds": self.seconds,
            "tokens_per_second": tokens / self.seconds if tokens is not None and self.seconds else None,
            "peak_memory_bytes": self.peak_memory,
            "longest_document": max((stats.longest for stats in self.tasks.values()), default=0),
            "generated": sorted(self.generated),
            "verify": verify.describe(self.checked) if self.checked else None,
        }
        if self.verify_failures:
            entries["verify_failed"] = self.verify_failures
        if self.phases:
            entries["phases"] = self.phases
        return {**entries, "tasks": {task: stats.describe() for task, stats in self.tasks.items()}}


def balance(shares: Sequence[Share]) -> dict[str, Any]:
    """The work of each rank, and the maximum over the mean: 1 if all ranks did the same."""
    loads: dict[str, Any] = {}
    for name in Share._fields:
        amounts = [getattr(share, name) for share in shares]
        total = sum(amounts)
        max_over_mean = max(amounts) * len(amounts) / total if total else None
        loads[name] = {"ranks": amounts, "max_over_mean": max_over_mean}
    return loads


def peak_memory(device: torch.device) -> int:
    """The peak memory of this process in bytes: summed over its GPUs, or of the CPU."""
    if device.type == "cuda":
        return sum(torch.cuda.max_memory_allocated(gpu) for gpu in range(torch.cuda.device_count()))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # kilobytes, except on macOS


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
