"""One evaluation: requests in, answers out, each saved as soon as its last window is scored.

    requests -> windows (requests.py) -> scores of windows (the estimator) -> sums over the windows of a request

`Scoring.answers` is the loop.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from lm_eval_duel import fingerprint
from lm_eval_duel.audit.verify import OTHER_TEXTS, Verification
from lm_eval_duel.core import reveal as signals
from lm_eval_duel.core.scores import Counts, IndexedScores, Score, Ties
from lm_eval_duel.core.windows import Window
from lm_eval_duel.errors import InconsistentOutput, naming
from lm_eval_duel.estimators.arguments import CommitOnceArguments
from lm_eval_duel.estimators.base import Estimator
from lm_eval_duel.estimators.duel import DuelEstimator
from lm_eval_duel.estimators.totals import Total, Unfinished
from lm_eval_duel.harness.distributed import Ranks
from lm_eval_duel.harness.patches import BUILT
from lm_eval_duel.harness.progress import Progress, RunningEstimate
from lm_eval_duel.harness.requests import (
    Batch,
    continuation_windows,
    difference_from_hf,
    document_windows,
    name,
    random_order,
)
from lm_eval_duel.harness.stats import RunStats, Share, peak_memory
from lm_eval_duel.harness.store import Answers, ResponseCache
from lm_eval_duel.options import Options
from lm_eval_duel.results.stats import key_of
from lm_eval_duel.results.trace import Writer, record
from lm_eval_duel.text.annotated import document_of
from lm_eval_duel.text.text import TextEncoder

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

log = logging.getLogger("lm_eval.duel_mdm")  # lm-eval prints its own loggers only

ROLLING = "loglikelihood_rolling"


# ---------------------------------------------------------------- the evaluation


class Evaluation:
    """One evaluation of a model: the state that is shared by all code that answers its requests, and the statistics.

    `store` and `progress` belong to the call under way: its response cache, and how much of it is finished.
    """

    def __init__(self, options: Options, text: TextEncoder, estimator: Estimator, ranks: Ranks, trace: Writer | None):
        self.options = options
        self.text = text
        self.counts = Counts()
        self.estimator = estimator.with_counts(self.counts)
        self.ranks = ranks
        self.trace = trace
        self.store: ResponseCache | None = None
        self.show_progress = True
        self.progress: Progress | None = None
        self.stats = RunStats()
        self.gathered: list[RunStats] | None = None  # the statistics of all ranks
        # The encoder counts as long as the model lives; an evaluation reports what was added since it began.
        self.merged_before = text.merged_borders
        self.started: int | None = None  # when its first request was asked, by time.monotonic_ns

    def owns(self, requests: Sequence[Instance]) -> bool:
        """False for requests that the harness has built after this evaluation began: they belong to the next one.

        lm-eval does not tell a model that an evaluation has ended, and asks for each kind of request in its own call.
        """
        if self.started is None:
            return True
        return all(getattr(request, BUILT, 0) <= self.started for request in requests)

    def ask(self, store: ResponseCache | None, show_progress: bool) -> None:
        """Begin to answer a call, with this response cache."""
        self.store = store
        self.show_progress = show_progress
        if self.started is None:
            self.started = time.monotonic_ns()

    # ------------------------------------------------------------ requests in, answers out

    def loglikelihood(self, requests: Sequence[Instance]) -> list[tuple[float, bool]]:
        """The log-likelihood of each continuation, and True if decoding would write it."""
        batch = Batch.from_requests(requests)
        windows, cut = continuation_windows(self.text, batch.requests)
        self.stats.cut_contexts.update(cut)
        self._log_difference_from_hf("loglikelihood", windows)
        answers = Scoring(self, "loglikelihood", batch.requests, windows).answers()
        return batch.spread([(answer, answer.is_greedy) for answer in answers])

    def loglikelihood_rolling(self, requests: Sequence[Instance]) -> list[TextLogLikelihood]:
        """The log-likelihood of each whole text, by default in a random order, with estimates of the final values."""
        batch = Batch.from_requests(requests)
        windows = document_windows(self.text, batch.requests)
        self._log_difference_from_hf(ROLLING, windows)
        shuffled = self.options.order == "random"
        return batch.spread(Scoring(self, ROLLING, batch.requests, windows, shuffled).answers())

    def _log_difference_from_hf(self, kind: str, windows: Sequence[Sequence[Window]]) -> None:
        """Log where `--model hf` would have other numbers of this network, on the first rank."""
        if self.ranks.rank:
            return
        note = difference_from_hf(self.text, kind, windows, self.options.bos is not None)
        if note:
            log.info("%s", note)

    @cached_property
    def sampler(self) -> DuelEstimator:
        """The distribution that texts are generated from: the estimator's, or if it cannot sample, that of `duel`.

        For `duel_seeds` it is `duel` given the noise of the first seed, with the other arguments unchanged.
        """
        if self.estimator.decodes:
            assert isinstance(self.estimator, DuelEstimator)
            return self.estimator
        arguments = CommitOnceArguments()
        given = self.options.estimator_args
        if isinstance(given, CommitOnceArguments):  # `duel` takes all of them but the number of seeds
            shared = {}
            for field in dataclasses.fields(CommitOnceArguments):
                shared[field.name] = getattr(given, field.name)
            arguments = CommitOnceArguments(**shared)
        options = dataclasses.replace(self.options, estimator="duel", estimator_args=arguments)
        sampler = Estimator.from_options(self.estimator.denoiser, options)
        assert isinstance(sampler, DuelEstimator)
        return sampler.with_counts(self.counts)

    @cached_property
    def method(self) -> str:
        """The estimator and its rule, for the progress bar."""
        name = self.estimator.name
        rule = str(self.estimator.describe().get("rule", ""))
        return rule if name == "duel" else f"{name} {rule}".rstrip()

    # ------------------------------------------------------------ while requests are answered

    @property
    def hides_bars(self) -> bool:
        """True if the caller wants no progress bars, and on all ranks but the first."""
        return not self.show_progress or self.ranks.rank != 0

    def begin(
        self,
        kind: str,
        tokens: Sequence[int],
        remaining: Sequence[int],
        title: str = "",
        running: RunningEstimate | None = None,
    ) -> Progress:
        """Count the answers from the response cache, and show the progress of the requests that remain."""
        if self.ranks.world_size > 1:  # only this rank shows a bar
            title += f" (rank {self.ranks.rank} of {self.ranks.world_size})"
        self.progress = Progress(kind, tokens, remaining, self.counts, title, running, self.hides_bars)
        from_cache = self.progress.finished  # nothing is computed yet
        if self.store is not None:
            log.info("Cached requests: %d, Requests remaining: %d", from_cache, len(remaining))  # as lm-eval
        if from_cache:
            self.stats.count("answers_from_cache", from_cache)
        return self.progress

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Time the estimator. A signal ends the run after the network call under way; the log says what was saved.

        An InconsistentOutput says what it means for saved answers, and marks the response cache, so that no later run
        uses it.
        """
        start = time.perf_counter()
        try:
            with signals.deferred():
                yield
        except signals.Interrupted as signal:
            assert self.progress is not None  # `begin` came first
            self._log_interruption(signal, self.progress)
            raise
        except InconsistentOutput as error:
            if self.store is not None:
                self.store.suspect(str(error))
            raise InconsistentOutput(f"{error} {self._suspects}", error.window) from None
        finally:
            self.stats.seconds += time.perf_counter() - start
            if self.trace is not None:
                self.trace.flush()

    def _log_interruption(self, signal: signals.Interrupted, progress: Progress) -> None:
        """Log what was finished, what of it is saved, and the estimates so far."""
        rank = self.ranks.rank
        saved = self._saved(progress)
        log.warning("Interrupted by %s on rank %d after %s. %s", signal.name, rank, progress, saved)
        estimates = str(progress.running or "")
        if estimates:
            name = self.estimator.name
            log.warning(
                "Estimate so far (estimator=%s), from this rank's documents before the first unfinished one of the "
                "random order, as only those are a random sample: %s",
                name,
                estimates,
            )

    @property
    def _suspects(self) -> str:
        """A sentence that names the answers that may be wrong."""
        where = "results files"
        if self.store is not None:
            where = f"{self.store.path}, which are kept and not used any more, and those in results files"
        spec = fingerprint.spec_of(self.estimator.denoiser, self.estimator, self.text)
        digest = fingerprint.digest(spec)
        return f"Discard all answers with the fingerprint {digest} in {where}."

    def _saved(self, progress: Progress) -> str:
        """A sentence on what an interrupted call has saved."""
        if self.store is None:
            # `score` and `audit` say it, too, which have no such flag
            kept = "No answer is saved. (`lm_eval` and `lm-eval-duel run` save them with --use_cache FILE.)"
            if self.trace is not None:
                kept += f" The trace {self.trace.place} has the finished documents."
            return kept
        if not (progress.finished or progress.windows):
            return "None is finished, so there is nothing to save yet."
        if self.store.waiting:
            return f"{self.store.path} cannot be written, so not all of them are saved."
        return f"They are saved in {self.store.path}: run the same command to resume."

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
        texts = [part for part in request.args if isinstance(part, str)]
        origin["sha256"] = key_of("".join(texts))
        document = document_of(request)
        if document != request.doc_id:  # the name of one of the user's texts
            origin["document"] = document
        lines = []
        for part, (window, score) in enumerate(zip(windows, scores, strict=True)):
            lines.append({**origin, "window": part, **record(window, score, estimator)})
        self.trace.write(lines)

    # ------------------------------------------------------------ afterwards

    def summary(self) -> RunStats:
        """The statistics of this rank."""
        counts = dataclasses.asdict(self.counts)
        phases = counts.pop("phases")
        counts["merged_borders"] = self.text.merged_borders - self.merged_before
        return dataclasses.replace(
            self.stats,
            counts=counts | self.stats.counts,
            peak_memory=peak_memory(self.estimator.denoiser.device),
            shares=[Share(counts["rows"], counts["tokens"], self.stats.seconds)],
            phases=phases,
        )

    def gather(self, obj: Any, dst: int) -> list[Any] | None:
        """The objects of all ranks, on rank `dst`, which then has the statistics of all ranks, too.

        lm-eval gathers samples and metrics only after all requests are answered, so every call brings the same ones.
        """
        of_ranks = self.ranks.gather_object((obj, self.summary()), dst)
        if of_ranks is None:
            return None
        self.gathered = [summary for _, summary in of_ranks]
        return [obj for obj, _ in of_ranks]

    def total(self) -> RunStats:
        """The statistics of all ranks, as far as they were gathered."""
        total = RunStats(ranks=0)
        for stats in self.gathered or [self.summary()]:
            total.merge(stats)
        return total


class TextLogLikelihood(float):
    """The log-likelihood of a whole text or of a gap, with `text` and `tokens` for data that do not count tokens."""

    __slots__ = ("is_exact", "is_greedy", "stderr", "text", "tokens")
    text: str
    tokens: int
    stderr: float | None  # Monte Carlo
    is_greedy: bool  # decoding would write the text
    is_exact: bool  # a likelihood, not a bound or an estimate
    sees_suffix = True  # the text after a gap was visible; answers of other models lack this

    def __new__(cls, total: Total, text: str) -> TextLogLikelihood:
        self = super().__new__(cls, total.log_prob)
        self.text = text
        self.tokens = total.tokens
        self.stderr = total.stderr
        self.is_greedy = total.is_greedy
        self.is_exact = total.value.is_exact
        return self

    def __reduce__(self) -> tuple[Any, ...]:  # ranks exchange plain numbers
        return float, (float(self),)


class Scoring:
    """The requests of one call while they are scored.

    `windows`: of each request. `shuffled`: take the requests in a random order, and show estimates of the final values.
    """

    def __init__(
        self,
        evaluation: Evaluation,
        kind: str,
        requests: Sequence[Instance],
        windows: Sequence[Sequence[Window]],
        shuffled: bool = False,
    ):
        self.evaluation = evaluation
        self.estimator = evaluation.estimator
        self.kind = kind
        self.requests = requests
        self.windows = windows
        self.shuffled = shuffled
        self.store = Answers(evaluation.store, self.estimator, kind, requests, windows)
        self.finished: dict[int, TextLogLikelihood] = {}

    def answers(self) -> list[TextLogLikelihood]:
        """The log-likelihood of each request: from the response cache, or computed now and saved as it is finished."""
        evaluation = self.evaluation
        saved: dict[Window, Ties] = {}  # by an earlier run; the scores themselves would fill the memory
        for n, scores in self.store.saved():
            self.count(n, scores)
            for window, score in zip(self.windows[n], scores, strict=True):
                saved[window] = Ties(score.near_ties, score.all_mask_starts)

        order: Sequence[int] = range(len(self.requests))
        if self.shuffled:
            order = random_order(self.requests, evaluation.options.draw_seed)
        remaining = [n for n in order if n not in self.finished]
        verification = self.draw_verification(remaining)
        progress = self.begin(order, remaining)

        with evaluation.computing():
            with progress.bar:
                for n, scores in self.scored(remaining, saved, progress):
                    self.store.save(n, scores)  # first: whatever fails below, this request is not lost
                    self.count(n, scores)
                    if verification is not None:
                        verification.keep(n, scores)
                    progress.finish_request(len(scores))
                    evaluation.write_trace(self.requests[n], self.windows[n], scores, self.estimator)
            if verification is not None:
                self.verify(verification)

        # The evaluation keeps the progress, which refers to `finished`: emptied, it does not keep the texts.
        return [self.finished.pop(n) for n in range(len(self.requests))]

    def begin(self, order: Sequence[int], remaining: Sequence[int]) -> Progress:
        """Begin to show the progress. `order`: of all requests; `remaining`: those without an answer."""
        tokens = []  # of each request
        for parts in self.windows:
            tokens.append(sum(len(window.target) for window in parts))

        running = None
        if self.shuffled:
            documents = []
            for n in order:
                task = str(self.requests[n].task_name)
                if task != OTHER_TEXTS:
                    documents.append((n, task, tokens[n]))
            is_of_rank = self.evaluation.ranks.world_size > 1
            is_bound = self.evaluation.estimator.value_template.is_bound
            tasks = self.evaluation.stats.tasks
            running = RunningEstimate(documents, self.finished, tasks, is_of_rank, is_bound)
        return self.evaluation.begin(self.kind, tokens, remaining, f" {self.evaluation.method}", running)

    def scored(
        self, remaining: Sequence[int], saved: Mapping[Window, Ties], progress: Progress
    ) -> Iterator[tuple[int, list[Score]]]:
        """(index, scores of its windows) of each remaining request, as its last window is scored.

        The score of a window that waits for others of its request is kept in the response cache. `saved`: the ties
        of the windows of finished requests.
        """
        kept = self.store.kept(remaining)
        unfinished = Unfinished({n: self.windows[n] for n in remaining}, kept)
        self.count_ties({**saved, **kept}, unfinished)
        for window in unfinished.saved:
            progress.add_saved(len(window.target))
        yield from unfinished.complete()

        for (n, place), score in self.scored_windows(unfinished.missing):
            window = self.windows[n][place]
            self.store.keep(window, score)
            progress.add_window(len(window.target), score.nfe)
            scores = unfinished.add(n, place, score)
            if scores is not None:
                yield n, scores

    def count_ties(self, known: Mapping[Window, Score | Ties], unfinished: Unfinished) -> None:
        """Count the ties of windows that an earlier run has scored, so that a resumed run counts those of all.

        The estimator counts equal windows once, and those that are scored now itself.
        """
        scored_now = {self.windows[n][place] for n, place in unfinished.missing}
        for window, ties in known.items():
            if window.target and window not in scored_now:
                self.evaluation.counts.add_ties(ties)

    def scored_windows(self, missing: Sequence[tuple[int, int]]) -> Iterator[tuple[tuple[int, int], Score]]:
        """((request, place), score) of each window as it is scored; an error names its request."""
        windows = [self.windows[n][place] for n, place in missing]
        stream: IndexedScores = self.estimator.stream(windows, in_order=self.shuffled)

        def request_name(index: int) -> str:
            n, _ = missing[index]
            return name(self.requests[n])

        with naming(request_name):
            for index, score in stream:
                yield missing[index], score

    def count(self, n: int, scores: Sequence[Score]) -> None:
        """Add a request to the statistics and to the answers."""
        request = self.requests[n]
        text = request.args[-1]
        total = Total.from_scores(self.windows[n], scores, self.estimator.name)
        unknown = self.evaluation.text.unknown(self.windows[n], text)
        self.finished[n] = TextLogLikelihood(total, text)
        task = str(request.task_name)
        document = document_of(request)
        self.evaluation.stats.add_request(task, document, total, unknown, request.idx, self.windows[n])

    def draw_verification(self, remaining: Sequence[int]) -> Verification | None:
        """Draw the windows that are to be scored again, if any are."""
        options = self.evaluation.options
        ranks = self.evaluation.ranks
        if not options.verify:
            return None
        windows = {n: self.windows[n] for n in remaining}
        return Verification(options, windows, ranks.rank, ranks.world_size, ranks.device)

    def verify(self, verification: Verification) -> None:
        """Score the drawn windows again."""
        evaluation = self.evaluation
        stats = evaluation.stats
        stats.checked += verification.compare(self.requests, evaluation.text, evaluation.hides_bars)
        if verification.failure:
            stats.verify_failures.append(verification.failure)
