"""One evaluation: its statistics, and what all code that answers its requests shares."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from lm_eval_duel import signals
from lm_eval_duel.core.scores import Counts, WindowScore
from lm_eval_duel.core.windows import Window
from lm_eval_duel.estimators import registry
from lm_eval_duel.estimators.base import Estimator
from lm_eval_duel.estimators.duel import DuelEstimator
from lm_eval_duel.harness.cache import DOCUMENTS, ResponseCache
from lm_eval_duel.harness.distributed import Ranks
from lm_eval_duel.harness.run_stats import RunStats, Share, peak_memory
from lm_eval_duel.harness.so_far import Document, SoFar, plain
from lm_eval_duel.harness.trace import Writer, record
from lm_eval_duel.harness.verify import Checked
from lm_eval_duel.options import Options
from lm_eval_duel.text.text import Text

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import CacheHook

log = logging.getLogger("lm_eval.duel_mdm")  # lm-eval prints its own loggers only

EVERY = 1.0  # seconds between two estimates in a progress bar


@dataclasses.dataclass
class Progress:
    """How far the requests of one call are."""

    kind: str
    requests: int
    bar: tqdm
    finished: int = 0  # requests
    windows: int = 0  # scored windows of requests that are not finished
    so_far: SoFar | None = None  # the estimates that the bar shows
    shown: float = -math.inf  # when they were computed

    def add_window(self, window: Window) -> None:
        """One more scored window."""
        self.windows += 1
        self.bar.update(len(window.target))

    def finish_request(self, windows: int = 0) -> None:
        """One more finished request, of so many scored windows."""
        self.finished += 1
        self.windows -= windows
        if self.so_far is not None and (time.monotonic() - self.shown > EVERY or self.finished == self.requests):
            self.shown = time.monotonic()
            self.bar.set_postfix_str(str(self.so_far), refresh=False)

    def __str__(self):
        windows = f" and {self.windows} windows of unfinished ones" if self.windows else ""
        return f"{self.finished} of {self.requests} {self.kind} requests{windows}"


@dataclasses.dataclass
class Run:
    """One evaluation of a model. Creating it resets the counts of `estimator` and `text`.

    `cache`: the harness's hook of the call under way; `number`: which evaluation this is (patches.evaluation).
    """

    options: Options
    text: Text
    estimator: Estimator
    ranks: Ranks
    trace: Writer | None
    cache: CacheHook
    number: int
    stats: RunStats = dataclasses.field(default_factory=RunStats)
    gathered: list[RunStats] | None = None  # the statistics of all ranks
    show_progress: bool = True
    progress: Progress | None = None
    checked: list[Checked] = dataclasses.field(default_factory=list)  # windows that were scored twice, on this rank

    def __post_init__(self) -> None:
        self.estimator.counts = Counts()
        self.text.cut_contexts = self.text.merged_borders = 0

    @property
    def store(self) -> ResponseCache | None:
        """The response cache, if there is one."""
        return self.cache.dbdict

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
    def show(
        self, kind: str, label: str, requests: int, finished: int, tokens: int, so_far: SoFar | None = None
    ) -> Iterator[Progress]:
        """A progress bar of `tokens` tokens, with the estimates so far (of this rank's documents).

        Until it ends, windows are taken in the order given if there are estimates, and longest first otherwise.
        """
        hidden = not self.show_progress or self.ranks.rank != 0
        with tqdm(total=tokens, desc=f"{kind}{label}", unit="tok", disable=hidden) as bar:
            self.progress = Progress(kind, requests, bar, finished, so_far=so_far)
            self.estimator.in_order = so_far is not None
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
                saved = f"They are saved in {self.store.filename}: run the same command to resume."
            log.warning("Interrupted by %s on rank %d after %s. %s", signal.name, self.ranks.rank, self.progress, saved)
            if self.progress is not None and (estimates := str(self.progress.so_far or "")):
                log.warning(
                    "Estimate so far (estimator=%s), from this rank's documents: %s",
                    self.estimator.name,
                    estimates,
                )
            raise
        finally:
            self.stats.seconds += time.perf_counter() - start
            if self.trace is not None:
                self.trace.flush()

    def keep_documents(self, kind: str, documents: Sequence[Document]) -> None:
        """Store the order of this rank's documents in the response cache, if there is one."""
        if self.store is not None:
            self.store[DOCUMENTS + kind] = plain(documents, self.options.order)

    def count_cached(self, cached: int, remaining: int) -> None:
        """Count the answers from the response cache, and log them in the harness's words."""
        if self.store is not None:
            log.info("Cached requests: %d, Requests remaining: %d", cached, remaining)
        if cached:
            self.stats.add_count("answers_from_cache", cached)

    def write_trace(
        self,
        request: Instance,
        windows: Sequence[Window],
        scores: Sequence[WindowScore],
        estimator: Estimator,
        extra: dict[str, Any] | None = None,
    ) -> None:
        """Write a line for each window of a finished request; `extra`: more about all of them."""
        if self.trace is None:
            return
        origin = {"task": request.task_name, "doc": request.doc_id, "request": request.idx, **(extra or {})}
        self.trace.write(
            {**origin, "window": n, **record(window, score, estimator)}
            for n, (window, score) in enumerate(zip(windows, scores, strict=True))
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
