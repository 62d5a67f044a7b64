"""One evaluation: requests in, answers out, each saved as soon as its last window is scored.

    requests -> windows (text.py) -> scores of windows (the estimator) -> sums over the windows of a request

`Scoring.answers` is the loop.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from lm_eval_duel import fingerprint
from lm_eval_duel.audit.recompute import Verification
from lm_eval_duel.core import reveal as signals
from lm_eval_duel.core.scores import Counts, IndexedScores, Kind, Score
from lm_eval_duel.core.windows import Window
from lm_eval_duel.errors import InconsistentOutput, naming
from lm_eval_duel.estimators import registry
from lm_eval_duel.estimators.arguments import CommitOnceArguments
from lm_eval_duel.estimators.base import Estimator
from lm_eval_duel.estimators.duel import DuelEstimator
from lm_eval_duel.estimators.totals import Total, Unfinished
from lm_eval_duel.harness.distributed import Ranks
from lm_eval_duel.harness.patches import BUILT
from lm_eval_duel.harness.stats import Progress, RunStats, Share, SoFar, peak_memory
from lm_eval_duel.harness.store import Answers, ResponseCache
from lm_eval_duel.options import Options
from lm_eval_duel.results.trace import Writer, record
from lm_eval_duel.tasks.data import TOKENS
from lm_eval_duel.text.annotated import Gap
from lm_eval_duel.text.text import TextEncoder, shorter_than_a_block

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

log = logging.getLogger("lm_eval.duel_mdm")  # lm-eval prints its own loggers only

FILE = "file of this document"  # an entry of documents that are the user's own files
ROLLING = "loglikelihood_rolling"


# ---------------------------------------------------------------- requests


class Batch(NamedTuple):
    """The distinct requests of one call. The harness repeats some of them, so that all ranks have equally many."""

    requests: list[Instance]
    repeats: list[int]  # of each distinct request: how often it came before
    sources: list[int]  # of each request of the call: the index of the distinct one

    @classmethod
    def from_requests(cls, requests: Sequence[Instance]) -> Batch:
        """Find the distinct requests. A task repeats a request `repeats` times, as one object; more are padding."""
        batch = cls([], [], [])
        copies: dict[Any, list[int]] = {}  # by identity: the indices of its repeats
        came: Counter[int] = Counter()
        for request in requests:
            indices = copies.setdefault(_identity(request), [])
            repeat = min(came[id(request)], (request.repeats or 1) - 1)
            came[id(request)] += 1
            if repeat == len(indices):
                batch.repeats.append(repeat)
                indices.append(len(batch.requests))
                batch.requests.append(request)
            batch.sources.append(indices[repeat])
        return batch

    def spread(self, answers: Sequence[Any]) -> list[Any]:
        """An answer for each request of the call."""
        return [answers[index] for index in self.sources]


def _identity(request: Instance) -> Any:
    """A value that is equal for requests with the same answer in the same task."""
    if request.task_name is None or request.doc_id is None:
        return id(request)
    return request.task_name, request.doc_id, request.idx, repr(request.args)


def document_of(request: Instance) -> Any:
    """The name of a request's document: its file, if it is one, else its number."""
    return request.doc.get(FILE, request.doc_id) if isinstance(request.doc, dict) else request.doc_id


def name(request: Instance) -> str:
    """The name of a request for users."""
    if (document := document_of(request)) != request.doc_id:
        return str(document)
    return f"Request of task {request.task_name}, document {request.doc_id}"


def make_request(
    kind: str, doc: dict[str, Any], arguments: tuple[Any, ...], task: str, number: int, repeats: int = 1
) -> Instance:
    """A request for document `number` of a task."""
    from lm_eval.api.instance import Instance

    return Instance(kind, doc, arguments, idx=0, metadata=(task, number, repeats))


def random_order(requests: Sequence[Instance], seed: int) -> list[int]:
    """The indices of requests in an order that depends on `seed` and on each request alone."""
    texts = [f"{seed} {request.task_name} {request.args}" for request in requests]
    keys = [hashlib.sha256(text.encode()).digest() for text in texts]
    return sorted(range(len(requests)), key=lambda n: (keys[n], n))


def continuation_windows(text: TextEncoder, requests: Sequence[Instance]) -> list[list[Window]]:
    """The window of each (context, continuation); logs how many contexts were truncated."""
    cut, merged = text.cut_contexts, text.merged_borders
    windows = []
    gaps = any(isinstance(request.args[1], Gap) for request in requests)
    for request in requests:
        with naming(name(request)):
            windows.append([text.pair(*request.args)])
    if cut := text.cut_contexts - cut:
        log.warning(
            "%d of %d contexts were longer than max_length=%d and truncated from the left%s",
            cut,
            len(windows),
            text.denoiser.max_length,
            " (the text after a gap: from the right)" if gaps else "",
        )
    if merged := text.merged_borders - merged:
        log.warning(
            "%d of %d continuations share a token with their context%s in the joint encoding and were encoded alone",
            merged,
            len(windows),
            " or with the text after the gap" if gaps else "",
        )
    return windows


def document_windows(text: TextEncoder, requests: Sequence[Instance]) -> list[list[Window]]:
    """The windows of each whole text; raises DuelError if its task counted other tokens than are scored."""
    windows = []
    for request in requests:
        with naming(name(request)):
            (document,) = request.args
            doc = request.doc if isinstance(request.doc, dict) else {}
            windows.append(text.windows(document, doc.get(TOKENS)))
    every = (window for of_text in windows for window in of_text)
    if not text.denoiser.by_blocks and (note := shorter_than_a_block(every, text.block)):
        log.info("%s", note)
    return windows


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
        self.is_exact = total.value.kind is Kind.LIKELIHOOD
        return self

    def __reduce__(self) -> tuple[Any, ...]:  # ranks exchange plain numbers
        return float, (float(self),)


# ---------------------------------------------------------------- the evaluation


class Evaluation:
    """One evaluation of a model: what all code that answers its requests shares, and the statistics.

    `store`: the response cache of the call under way; `progress`: of the same.
    """

    def __init__(self, options: Options, text: TextEncoder, estimator: Estimator, ranks: Ranks, trace: Writer | None):
        self.options = options
        self.text = text
        self.estimator = estimator
        self.ranks = ranks
        self.trace = trace
        self.store: ResponseCache | None = None
        self.show_progress = True
        self.progress: Progress | None = None
        self.stats = RunStats()
        self.gathered: list[RunStats] | None = None  # the statistics of all ranks
        self.counts = Counts()
        estimator.count_into(self.counts)
        self.cut_before = text.cut_contexts, text.merged_borders
        self.started: int | None = None  # when its first request was asked, by time.monotonic_ns

    def owns(self, requests: Sequence[Instance]) -> bool:
        """False for requests that the harness has built after this evaluation began: they belong to the next one."""
        return self.started is None or all(getattr(request, BUILT, 0) <= self.started for request in requests)

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
        windows = continuation_windows(self.text, batch.requests)
        answers = Scoring(self, "loglikelihood", batch.requests, windows).answers()
        return batch.spread([(answer, answer.is_greedy) for answer in answers])

    def loglikelihood_rolling(self, requests: Sequence[Instance]) -> list[TextLogLikelihood]:
        """The log-likelihood of each whole text, by default in a random order, with estimates of the final values."""
        batch = Batch.from_requests(requests)
        windows = document_windows(self.text, batch.requests)
        shuffled = self.options.order == "random"
        return batch.spread(Scoring(self, ROLLING, batch.requests, windows, shuffled).answers())

    @cached_property
    def sampler(self) -> DuelEstimator:
        """The distribution that texts are generated from: the estimator's, or if it cannot sample, that of `duel`.

        Of `duel_seeds` it is that of its first seed, with its other arguments.
        """
        if self.estimator.decodes:
            return self.estimator
        own = self.options.estimator_args
        arguments = None
        if isinstance(own, CommitOnceArguments):  # without the number of seeds
            fields = dataclasses.fields(CommitOnceArguments)
            arguments = CommitOnceArguments(**{field.name: getattr(own, field.name) for field in fields})
        options = dataclasses.replace(self.options, estimator="duel", estimator_args=arguments)
        sampler = registry.make(self.estimator.denoiser, options)
        sampler.count_into(self.counts)
        return sampler

    @property
    def method(self) -> str:
        """The estimator and its rule, for the progress bar."""
        name, rule = self.estimator.name, self.estimator.describe().get("rule", "")
        return str(rule) if name == "duel" else f"{name} {rule}".rstrip()

    # ------------------------------------------------------------ while requests are answered

    def begin(
        self, kind: str, tokens: Sequence[int], remaining: Sequence[int], title: str = "", so_far: SoFar | None = None
    ) -> Progress:
        """Count the answers from the response cache, and show the progress of the requests that remain."""
        hidden = not self.show_progress or self.ranks.rank != 0
        self.progress = Progress(kind, tokens, remaining, self.counts, title, so_far, hidden)
        from_cache = self.progress.finished
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
            rank = self.ranks.rank
            log.warning("Interrupted by %s on rank %d after %s. %s", signal.name, rank, self.progress, self.saved)
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
            self.stats.seconds += time.perf_counter() - start
            if self.trace is not None:
                self.trace.flush()

    @property
    def saved(self) -> str:
        """A sentence on what an interrupted call has saved."""
        if self.store is None:
            return "Nothing is saved: only a run with --use_cache FILE can be resumed."
        if not (self.progress.finished or self.progress.windows):
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
        self.trace.write(
            {**origin, "window": part, **record(window, score, estimator)}
            for part, (window, score) in enumerate(zip(windows, scores, strict=True))
        )

    # ------------------------------------------------------------ afterwards

    def summary(self) -> RunStats:
        """The statistics of this rank."""
        counts = dataclasses.asdict(self.counts)
        phases = counts.pop("phases")
        cut, merged = self.cut_before
        counts["cut_contexts"] = self.text.cut_contexts - cut
        counts["merged_borders"] = self.text.merged_borders - merged
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
        self.verification: Verification | None = None

    def answers(self) -> list[TextLogLikelihood]:
        """The log-likelihood of each request: from the response cache, or computed now and saved as it is finished."""
        evaluation = self.evaluation
        for n, scores in self.store.saved():
            self.count(n, scores)
        order = range(len(self.requests))
        if self.shuffled:
            order = random_order(self.requests, evaluation.options.draw_seed)
        remaining = [n for n in order if n not in self.finished]
        known = self.store.kept(remaining)
        progress = self.begin(order, remaining)
        unfinished = Unfinished({n: self.windows[n] for n in remaining}, known)
        for window in unfinished.known:
            progress.add_known(len(window.target))
        ties = evaluation.counts.all_mask_starts
        with evaluation.computing():
            with progress.bar:
                for n, scores in unfinished.complete():
                    self.finish(n, scores)
                for (n, place), score in self.scored(unfinished.missing):
                    window = self.windows[n][place]
                    self.store.keep(window, score)
                    progress.add_window(len(window.target), score.nfe)
                    if (scores := unfinished.add(n, place, score)) is not None:
                        self.finish(n, scores)
            self.verify()
        if ties := evaluation.counts.all_mask_starts - ties:
            log.info("blocks that started from masks alone, where all positions tie and the lowest is first: %d", ties)
        return [self.finished.pop(n) for n in range(len(self.requests))]  # the bar, which stays, refers to them

    def begin(self, order: Sequence[int], remaining: Sequence[int]) -> Progress:
        """Draw the windows to verify, and show the progress. `order`: of all requests."""
        evaluation, options = self.evaluation, self.evaluation.options
        if options.verify:
            ranks = evaluation.ranks
            windows = {n: self.windows[n] for n in remaining}
            self.verification = Verification(options, windows, ranks.rank, ranks.world_size, ranks.device)
        tokens = [sum(len(window.target) for window in parts) for parts in self.windows]
        so_far = None
        if self.shuffled:
            documents = [(n, str(self.requests[n].task_name), tokens[n]) for n in order]
            so_far = SoFar(documents, self.finished, evaluation.stats.tasks)
        return evaluation.begin(self.kind, tokens, remaining, f" {evaluation.method}", so_far)

    def scored(self, missing: Sequence[tuple[int, int]]) -> Iterator[tuple[tuple[int, int], Score]]:
        """((request, place), score) of each window as it is scored; an error names its request."""
        windows = [self.windows[n][place] for n, place in missing]
        stream: IndexedScores = self.estimator.stream(windows, in_order=self.shuffled)
        with naming(lambda index: name(self.requests[missing[index][0]])):
            for index, score in stream:
                yield missing[index], score

    def finish(self, n: int, scores: Sequence[Score]) -> None:
        """Save a finished request first: whatever fails after that, it is not lost."""
        self.store.save(n, scores)
        self.count(n, scores)
        if self.verification is not None:
            self.verification.keep(n, scores)
        self.evaluation.progress.finish_request(len(scores))
        self.evaluation.write_trace(self.requests[n], self.windows[n], scores, self.estimator)

    def count(self, n: int, scores: Sequence[Score]) -> None:
        """Add a request to the statistics and to the answers."""
        request, text = self.requests[n], self.requests[n].args[-1]
        total = Total.from_scores(self.windows[n], scores, self.estimator.name)
        unknown = self.evaluation.text.unknown(self.windows[n], text)
        self.finished[n] = TextLogLikelihood(total, text)
        self.evaluation.stats.add_request(str(request.task_name), document_of(request), total, unknown)

    def verify(self) -> None:
        """Score the drawn windows again, if any are to be."""
        if self.verification is None:
            return
        stats = self.evaluation.stats
        stats.checked += self.verification.compare(self.requests, self.evaluation.text)
        if self.verification.failure:
            stats.verify_failures.append(self.verification.failure)
