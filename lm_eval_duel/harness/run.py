"""One evaluation: its statistics, and what all code that answers its requests shares."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from tqdm import tqdm

from lm_eval_duel.core import signals
from lm_eval_duel.core.scores import Counts, WindowScore
from lm_eval_duel.core.windows import Window
from lm_eval_duel.errors import Suspect
from lm_eval_duel.estimators import registry
from lm_eval_duel.estimators.base import Estimator
from lm_eval_duel.estimators.duel import DuelEstimator
from lm_eval_duel.harness.cache import ResponseCache
from lm_eval_duel.harness.distributed import Ranks
from lm_eval_duel.harness.so_far import SoFar
from lm_eval_duel.harness.spec import peak_memory
from lm_eval_duel.harness.totals import RunStats, Share
from lm_eval_duel.harness.trace import Writer, record
from lm_eval_duel.options import Options
from lm_eval_duel.text.text import Text

if TYPE_CHECKING:
    from lm_eval_duel.harness.requests import Batch

log = logging.getLogger("lm_eval.duel_mdm")  # lm-eval prints its own loggers only

EVERY = 1.0  # seconds between two estimates in a progress bar


class Finished(NamedTuple):
    """A request that has just been computed. Its answer and its windows' scores, and more about it for the trace."""

    n: int  # its index in the batch
    answer: Any
    windows: Sequence[Window]
    scores: Sequence[WindowScore]
    about: Mapping[str, Any] = {}


class Work(abc.ABC):
    """The requests of one call: what differs between scoring and generation in the loop of lm.py. `n`: an index."""

    kind: ClassVar[str]  # the method of the model that answers them
    label = ""  # for the progress bar
    tokens: Sequence[int]  # of each request, for the progress bar
    so_far: SoFar | None = None  # estimates of the final value, for the progress bar

    def __init__(self, run: HarnessRun, batch: Batch):
        self.run, self.estimator, self.requests = run, run.estimator, batch.requests
        self.order: Sequence[int] = range(len(batch.requests))  # in which they are taken

    @abc.abstractmethod
    def cached(self) -> Iterator[tuple[int, Any]]:
        """(n, answer) of each request with an answer in the response cache, counted as if computed now."""

    @abc.abstractmethod
    def finished(self, remaining: Sequence[int]) -> Iterator[Finished]:
        """The other requests, each as it is finished."""

    @abc.abstractmethod
    def save(self, done: Finished) -> None:
        """Save a request in the response cache, if there is one."""

    def count(self, done: Finished) -> None:  # noqa: B027  # a text contributes to no total
        """Add a request to the statistics."""

    def after(self) -> None:  # noqa: B027  # texts are not verified
        """Log and verify what was computed."""

    def reply(self, n: int, answer: Any) -> Any:
        """An answer as lm-eval expects it."""
        return answer


class Progress:
    """The progress of the requests of one call: `finished` requests, and `windows` of requests that are not
    finished.
    """

    def __init__(self, work: Work, remaining: Sequence[int], hidden: bool):
        self.work, self.finished, self.windows = work, len(work.requests) - len(remaining), 0
        self.shown = -math.inf  # when estimates were computed
        tokens = sum(work.tokens[n] for n in remaining)
        off = {"disable": True} if hidden else {}  # else as TQDM_DISABLE says
        self.bar = tqdm(total=tokens, desc=f"{work.kind}{work.label}", unit="tok", **off)

    def add_window(self, tokens: int) -> None:
        """One more window is finished."""
        self.windows += 1
        self.bar.update(tokens)

    def finish_request(self, windows: int) -> None:
        """One more request, of `windows` windows, is finished."""
        self.finished += 1
        self.windows -= windows
        last = self.finished == len(self.work.requests)
        if self.work.so_far is not None and (time.monotonic() - self.shown > EVERY or last):
            self.shown = time.monotonic()
            self.bar.set_postfix_str(str(self.work.so_far), refresh=False)

    def __str__(self):
        windows = f" and {self.windows} windows of unfinished ones" if self.windows else ""
        return f"{self.finished} of {len(self.work.requests)} {self.work.kind} requests{windows}"


@dataclasses.dataclass
class HarnessRun:
    """One evaluation of a model. Creating it resets the counts of `estimator` and `text`."""

    options: Options
    text: Text
    estimator: Estimator
    ranks: Ranks
    trace: Writer | None
    store: ResponseCache | None = None  # the response cache of the call under way
    stats: RunStats = dataclasses.field(default_factory=RunStats)
    gathered: list[RunStats] | None = None  # the statistics of all ranks
    show_progress: bool = True
    progress: Progress | None = None  # of the call under way

    def __post_init__(self) -> None:
        name, rule = self.estimator.name, self.estimator.describe().get("rule", "")
        self.method = str(rule) if name == "duel" else f"{name} {rule}".rstrip()
        self.estimator.counts = Counts()
        self.text.cut_contexts = self.text.merged_borders = 0

    @cached_property
    def sampler(self) -> DuelEstimator:
        """The distribution that texts are generated from: the estimator's, or if it cannot sample, that of `rule`."""
        if self.estimator.decodes:
            return self.estimator
        sampler = registry.make(self.estimator.denoiser, dataclasses.replace(self.options, estimator="duel"))
        sampler.counts = self.estimator.counts
        return sampler

    # ------------------------------------------------------------ while requests are answered

    @contextlib.contextmanager
    def show(self, work: Work, remaining: Sequence[int]) -> Iterator[Progress]:
        """A progress bar, with the estimates so far (of this rank's documents).

        Until it ends, windows are taken in the order given if there are estimates, and longest first otherwise.
        """
        self.progress = Progress(work, remaining, hidden=not self.show_progress or self.ranks.rank != 0)
        self.estimator.in_order = work.so_far is not None
        with self.progress.bar:
            try:
                yield self.progress
            finally:
                self.estimator.in_order = False

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Time the estimator. A signal ends the run after the network call under way; the log says what was saved."""
        start = time.perf_counter()
        try:
            with signals.deferred():
                yield
        except signals.Interrupted as signal:
            saved = "Nothing is saved: only a run with --use_cache FILE can be resumed."
            if self.store is not None:
                saved = f"They are saved in {self.store.path}: run the same command to resume."
            log.warning("Interrupted by %s on rank %d after %s. %s", signal.name, self.ranks.rank, self.progress, saved)
            if estimates := str(self.progress.work.so_far or ""):
                name = self.estimator.name
                log.warning("Estimate so far (estimator=%s), from this rank's documents: %s", name, estimates)
            raise
        finally:
            self.stats.seconds += time.perf_counter() - start
            if self.trace is not None:
                self.trace.flush()

    def suspected(self, error: Suspect, digest: str) -> Suspect:
        """The error with what it means for saved answers; a response cache is marked, so that no later run uses it."""
        where = "results files"
        if self.store is not None:
            self.store.suspect(str(error))
            where = f"{self.store.path}, which are kept and not used any more, and those in results files"
        suspects = f"Suspect: all answers with the fingerprint {digest} in {where}."
        return Suspect(f"{error} {suspects}", error.window)

    def count_cached(self, cached: int, remaining: int) -> None:
        """Count the answers from the response cache, and log them in the harness's words."""
        if self.store is not None:
            log.info("Cached requests: %d, Requests remaining: %d", cached, remaining)
        if cached:
            self.stats.add_count("answers_from_cache", cached)

    def write_trace(self, work: Work, done: Finished) -> None:
        """Write a line for each window of a finished request."""
        if self.trace is None:
            return
        request = work.requests[done.n]
        origin = {"task": request.task_name, "doc": request.doc_id, "request": request.idx, **done.about}
        self.trace.write(
            {**origin, "window": part, **record(window, score, work.estimator)}
            for part, (window, score) in enumerate(zip(done.windows, done.scores, strict=True))
        )

    # ------------------------------------------------------------ afterwards

    def summary(self) -> RunStats:
        """The statistics of this rank."""
        counts = dataclasses.asdict(self.estimator.counts)
        phases = counts.pop("phases")
        counts |= {"cut_contexts": self.text.cut_contexts, "merged_borders": self.text.merged_borders}
        return dataclasses.replace(
            self.stats,
            counts=counts | self.stats.counts,
            peak_memory=peak_memory(self.estimator.denoiser.device),
            shares=[Share(counts["rows"], counts["tokens"], self.stats.seconds)],
            phases=phases,
        )

    def total(self) -> RunStats:
        """The statistics of all ranks, as far as they were gathered."""
        total = RunStats(ranks=0)
        for stats in self.gathered or [self.summary()]:
            total.merge(stats)
        return total
