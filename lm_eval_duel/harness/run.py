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

from lm_eval_duel import fingerprint
from lm_eval_duel.core import reveal as signals
from lm_eval_duel.core.scores import Counts, Score
from lm_eval_duel.core.windows import Window
from lm_eval_duel.errors import InconsistentOutput
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
from lm_eval_duel.text.text import TextEncoder

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

log = logging.getLogger("lm_eval.duel_mdm")  # lm-eval prints its own loggers only

EVERY = 1.0  # seconds between two estimates in a progress bar


class Progress:
    """The progress of the requests of one call: `finished` ones, and `windows` of others.

    `tokens`: of each request. `remaining`: the requests without an answer. `title`: follows the kind of request.
    `so_far`: estimates of the final value.
    """

    def __init__(
        self,
        kind: str,
        tokens: Sequence[int],
        remaining: Sequence[int],
        title: str = "",
        so_far: SoFar | None = None,
        hidden: bool = False,
    ):
        self.kind, self.requests, self.windows, self.so_far = kind, len(tokens), 0, so_far
        self.finished = len(tokens) - len(remaining)
        self.shown = -math.inf  # when estimates were computed
        off = {"disable": True} if hidden else {}  # else as TQDM_DISABLE says
        self.bar = tqdm(total=sum(tokens[n] for n in remaining), desc=kind + title, unit="tok", **off)

    def add_window(self, tokens: int) -> None:
        """One more window is finished."""
        self.windows += 1
        self.bar.update(tokens)

    def finish_request(self, windows: int) -> None:
        """One more request, of `windows` windows, is finished."""
        self.finished += 1
        self.windows -= windows
        if self.so_far is not None and (time.monotonic() - self.shown > EVERY or self.finished == self.requests):
            self.shown = time.monotonic()
            self.bar.set_postfix_str(str(self.so_far), refresh=False)

    def __str__(self):
        windows = f" and {self.windows} windows of unfinished ones" if self.windows else ""
        return f"{self.finished} of {self.requests} {self.kind} requests{windows}"


@dataclasses.dataclass
class HarnessRun:
    """One evaluation of a model. Creating it resets the counts of `estimator` and `text`."""

    options: Options
    text: TextEncoder
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

    def begin(
        self, kind: str, tokens: Sequence[int], remaining: Sequence[int], title: str = "", so_far: SoFar | None = None
    ) -> Progress:
        """Count the answers from the response cache, and show the progress of the requests that remain."""
        hidden = not self.show_progress or self.ranks.rank != 0
        self.progress = Progress(kind, tokens, remaining, title, so_far, hidden)
        from_cache = self.progress.finished
        if self.store is not None:
            log.info("Cached requests: %d, Requests remaining: %d", from_cache, len(remaining))  # as lm-eval
        if from_cache:
            self.stats.merge(RunStats(counts={"answers_from_cache": from_cache}, ranks=0))
        return self.progress

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Time the estimator. A signal ends the run after the network call under way; the log says what was saved.

        An InconsistentOutput says what it means for saved answers, and marks the response cache, so that no later run
        uses it.
        """
        start = time.perf_counter()
        self.estimator.in_order = self.progress.so_far is not None  # else the longest windows are first
        try:
            with signals.deferred():
                yield
        except signals.Interrupted as signal:
            saved = "Nothing is saved: only a run with --use_cache FILE can be resumed."
            if self.store is not None:
                saved = f"They are saved in {self.store.path}: run the same command to resume."
            log.warning("Interrupted by %s on rank %d after %s. %s", signal.name, self.ranks.rank, self.progress, saved)
            if estimates := str(self.progress.so_far or ""):
                name = self.estimator.name
                log.warning("Estimate so far (estimator=%s), from this rank's documents: %s", name, estimates)
            raise
        except InconsistentOutput as error:
            where = "results files"
            if self.store is not None:
                self.store.suspect(str(error))
                where = f"{self.store.path}, which are kept and not used any more, and those in results files"
            digest = fingerprint.digest(fingerprint.spec_of(self.estimator.denoiser, self.estimator, self.text))
            suspects = f"InconsistentOutput: all answers with the fingerprint {digest} in {where}."
            raise InconsistentOutput(f"{error} {suspects}", error.window) from None
        finally:
            self.estimator.in_order = False
            self.stats.seconds += time.perf_counter() - start
            if self.trace is not None:
                self.trace.flush()

    def write_trace(
        self,
        request: Instance,
        windows: Sequence[Window],
        scores: Sequence[Score],
        estimator: Estimator,
        **about: Any,
    ) -> None:
        """Write a line for each window of a finished request."""
        if self.trace is None:
            return
        origin = {"task": request.task_name, "doc": request.doc_id, "request": request.idx, **about}
        self.trace.write(
            {**origin, "window": part, **record(window, score, estimator)}
            for part, (window, score) in enumerate(zip(windows, scores, strict=True))
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
