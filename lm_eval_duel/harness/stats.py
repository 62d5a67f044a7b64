"""The statistics of an evaluation: of each task and of the run, summed over ranks.

While documents are scored, `Progress` shows how far the requests are, and `RunningEstimate` estimates the final values.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from scipy.special import stdtrit
from tqdm import tqdm

from lm_eval_duel.audit import verify
from lm_eval_duel.audit.checked import CheckedWindow
from lm_eval_duel.core.scores import Counts, known_sum, perplexity, ratio
from lm_eval_duel.errors import counted
from lm_eval_duel.estimators.registry import ESTIMATORS
from lm_eval_duel.estimators.totals import Total
from lm_eval_duel.harness.requests import noun
from lm_eval_duel.text.text import unknown_share

if TYPE_CHECKING:
    from lm_eval_duel.core.denoiser import Denoiser

SHOWN = 20  # documents listed in a log line
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

    def add(self, document: Any, total: Total, unknown: int = 0) -> None:
        """Add one request of a document; `unknown`: how many of its tokens are [UNK]."""
        self.total.merge(total)
        self.requests += 1
        self.longest = max(self.longest, total.tokens)
        self.documents.add(document)
        if total.near_ties:
            self.near_ties.add(document)
        if unknown:
            self.unknown[document] += unknown

    def merge(self, other: TaskStats) -> None:
        """Add the statistics of the same task on another rank."""
        self.total.merge(other.total)
        self.requests += other.requests
        self.longest = max(self.longest, other.longest)
        self.documents |= other.documents
        self.near_ties |= other.near_ties
        self.unknown.update(other.unknown)

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
    generated: set[str] = dataclasses.field(default_factory=set)  # descriptions of generation settings
    seconds: float = 0.0  # in the estimator
    peak_memory: int = 0  # bytes
    ranks: int = 1
    shares: list[Share] = dataclasses.field(default_factory=list)  # of each rank
    checked: list[CheckedWindow] = dataclasses.field(default_factory=list)  # windows that were scored twice
    verify_failures: list[str] = dataclasses.field(default_factory=list)  # why other drawn windows were not
    phases: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)  # costs of a two-phase estimate

    def add_request(self, task: str, document: Any, total: Total, unknown: int = 0) -> None:
        """Add one request; `unknown`: how many of its tokens are [UNK]."""
        self.tasks.setdefault(task, TaskStats()).add(document, total, unknown)
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
        """The values of the run that depend on random numbers, with their errors, or are no likelihoods."""
        lines: list[str] = []
        for name, entry in ESTIMATORS.items():
            for task, stats in self.tasks.items():
                total = stats.total.named.get(name)
                if total is None or not total.tokens or total.value.is_exact:
                    continue
                if entry.drawn is not None or total is stats.total:
                    lines.append(f"{entry.display} of {task}: {total.summary(entry.drawn)}")
        return lines

    def warnings(self) -> list[str]:
        """The warnings of the log: rows or decisions that differed when they were repeated, and tasks with [UNK]."""
        lines = []
        for what, how in (("rows", "evaluated again alone"), ("decisions", "asked of the rule again")):
            differing = self.counts.get(f"{what}_differing")
            asked = self.counts.get(f"{what}_checked")
            if differing:  # an error, unless the dtype is coarse
                lines.append(f"{differing} of {asked} {what} that were {how} differ by more than noise of this dtype")
        for task, stats in self.tasks.items():
            unknown = stats.unknown.total()
            if unknown:
                lines.append(f"{task}: {unknown_share(unknown, stats.total.tokens)}")
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


# ---------------------------------------------------------------- while documents are scored


FEWEST = 5  # documents for an interval
EVERY = 1.0  # seconds between two estimates in a progress bar


class RunningEstimate:
    """The perplexity of tasks before all of their documents are scored; `str` is the text for a progress bar.

    The first n documents of a random order that are all finished are a simple random sample without replacement,
    whatever their lengths. (Documents that finish out of turn are left out: short ones do so early.) From
    log-likelihoods l and sizes t,

        rate = sum l / sum t,   stderr^2 = (1 - n / N) n / (n - 1) sum (l - rate t)^2 / (sum t)^2,   exp(-rate)

    with N documents in all: the ratio estimator and its error by the delta method (Cochran, Sampling Techniques, 1977,
    section 6.11). So the interval is for the value that the finished run will print, not for other documents.

    Args:
        documents: The (index, task, tokens) of each, in the order in which they are taken.
        log_probs: Those of the finished documents, by index.
        tasks: The statistics of each task, with its Monte Carlo error.
    """

    def __init__(
        self,
        documents: Iterable[tuple[int, str, int]],
        log_probs: Mapping[int, float],
        tasks: Mapping[str, TaskStats],
    ):
        self.log_probs = log_probs
        self.tasks = tasks
        self.documents: dict[str, list[tuple[int, int]]] = {}  # of each task: (index, tokens)
        for n, task, tokens in documents:
            self.documents.setdefault(task, []).append((n, tokens))

    def __str__(self) -> str:
        texts = []
        for task in self.documents:
            text = self._text_of_task(task)
            if text:
                texts.append(f"ppl {task} {text}" if len(self.documents) > 1 else f"ppl {text}")
        joined = ", ".join(texts)
        return f"{joined} (95 % interval of the final value)" if "[" in joined else joined

    def _text_of_task(self, task: str) -> str:
        """The estimate of one task; empty before its first document is finished."""
        documents = self.documents[task]
        log_probs = []
        sizes = []
        for n, tokens in documents:
            if n not in self.log_probs:  # later ones are no random sample
                break
            log_probs.append(self.log_probs[n])
            sizes.append(tokens)

        estimated = estimate(log_probs, sizes, len(documents))
        if estimated is None:
            return ""
        value, low, high = estimated
        text = f"{value:.4g}"
        error = self.tasks[task].total.perplexity_stderr if task in self.tasks else None
        if error is not None:
            text += f" ± {error:.2g}"
        if low is not None:
            text += f" [{low:.4g}, {high:.4g}]"
        elif len(sizes) < len(documents):
            text += f" over {len(sizes)} of {counted(len(documents), 'document')}"
        return text


def estimate(
    log_probs: Sequence[float], tokens: Sequence[int], documents: int
) -> tuple[float, float | None, float | None] | None:
    """The perplexity per token of `documents` documents from a sample of them, and its 95 % interval.

    None for a sample without tokens. The interval is (None, None) for fewer than five documents, and for all of them.
    """
    if not sum(tokens):
        return None
    rate, stderr = ratio([-log_prob for log_prob in log_probs], tokens)
    if stderr is None or not FEWEST <= len(tokens) < documents:
        return perplexity(rate), None, None
    without_replacement = math.sqrt(1 - len(tokens) / documents)
    # Student's t: the error is estimated from few documents.
    reach = stdtrit(len(tokens) - 1, 0.975) * stderr * without_replacement
    return perplexity(rate), perplexity(rate - reach), perplexity(rate + reach)


class Progress:
    """The progress of the requests of one call: `finished` ones, and `windows` of others.

    The bar counts target tokens. Windows are scored side by side and finish late, so unfinished ones count in part: the
    steps that they have taken, divided by the steps per token of the finished windows. So the bar moves, and estimates
    the time left, with the work of the network.

    Args:
        kind: The kind of request.
        tokens: Those of each request.
        remaining: The requests without an answer.
        counts: The steps that are taken, as they are counted.
        title: Text that follows the kind.
        running: The estimate of the final values.
        hidden: Show no bar.
    """

    def __init__(
        self,
        kind: str,
        tokens: Sequence[int],
        remaining: Sequence[int],
        counts: Counts,
        title: str = "",
        running: RunningEstimate | None = None,
        hidden: bool = False,
    ):
        self.noun = noun(kind)
        self.requests = len(tokens)
        self.counts = counts
        self.running = running
        self.windows = 0
        self.finished = len(tokens) - len(remaining)
        self.tokens = 0  # of finished windows
        self.computed_tokens = 0  # of finished windows that this run computed
        self.computed_steps = 0
        self.steps_before = counts.lane_steps
        self.last_shown = -math.inf  # when estimates were computed last
        more = {"disable": True} if hidden else {}  # tqdm reads TQDM_DISABLE only if `disable` is not passed
        total = sum(tokens[n] for n in remaining)
        self.bar = tqdm(total=total, desc=f"{self.noun}s{title}", unit="tok", smoothing=0, **more)

    def add_saved(self, tokens: int) -> None:
        """One more window has a score already, which took no time."""
        self.windows += 1
        self.tokens += tokens
        if not self.bar.disable:  # a hidden bar has no rate
            self.bar.initial += tokens
        self.bar.update(tokens)

    def add_window(self, tokens: int, steps: int | None) -> None:
        """One more window is finished, in `steps` steps of its blocks; None: their number is not known."""
        self.windows += 1
        self.tokens += tokens
        self.computed_tokens += tokens
        self.computed_steps += steps or 0
        done = min(self.bar.total, self.tokens + self.unfinished)
        self.bar.update(max(0, done - self.bar.n))

    @property
    def unfinished(self) -> int:
        """The tokens that the work on unfinished windows stands for."""
        steps = self.counts.lane_steps - self.steps_before - self.computed_steps  # of unfinished windows
        if not self.computed_steps or steps <= 0:
            return 0
        return int(steps * self.computed_tokens / self.computed_steps)

    def finish_request(self, windows: int) -> None:
        """One more request, of `windows` windows, is finished."""
        self.finished += 1
        self.windows -= windows
        if self.running is None:
            return
        is_due = time.monotonic() - self.last_shown > EVERY or self.finished == self.requests
        if is_due:
            self.last_shown = time.monotonic()
            self.bar.set_postfix_str(str(self.running), refresh=False)

    def __str__(self) -> str:
        windows = f" and {counted(self.windows, 'window')} of unfinished ones" if self.windows else ""
        return f"{self.finished} of {counted(self.requests, self.noun)}{windows}"
