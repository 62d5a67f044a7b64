"""Log-likelihoods of requests.

    requests -> windows (text.py) -> scores of windows (the estimator) -> the sum over a request's windows

Every request is scored once, in the order in which windows are finished, and saved as soon as it is finished.
"""

from __future__ import annotations

import abc
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from lm_eval_duel.core.scores import WindowScore
from lm_eval_duel.core.windows import Window
from lm_eval_duel.errors import DuelError
from lm_eval_duel.harness import versions
from lm_eval_duel.harness.cache import DOCUMENTS
from lm_eval_duel.harness.requests import Batch, document_of, named, named_windows
from lm_eval_duel.harness.resume import Unfinished
from lm_eval_duel.harness.run import Finished, Run
from lm_eval_duel.harness.so_far import Document, SoFar, plain, random_order
from lm_eval_duel.harness.totals import Outcome
from lm_eval_duel.harness.verify import Verification, is_coarse, summed
from lm_eval_duel.tasks.columns import MADE, TOKENS
from lm_eval_duel.tasks.gap import Gap, Residues
from lm_eval_duel.tasks.tokenized_text import MADE as MADE_HERE
from lm_eval_duel.text.text import Text

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

log = logging.getLogger("lm_eval.duel_mdm")  # lm-eval prints its own loggers only


class RequestScore(NamedTuple):
    """The score of a request, over all its windows."""

    log_prob: float
    is_greedy: bool
    stderr: float | None = None  # the Monte Carlo error of log_prob, if the estimator has one

    @classmethod
    def from_scores(cls, scores: Sequence[WindowScore], stderr: float | None = None) -> RequestScore:
        """From the scores of a request's windows; an empty text has probability 1."""
        return cls(math.fsum(score.log_prob for score in scores), all(score.is_greedy for score in scores), stderr)

    def cached_as(self, kind: str) -> float | tuple[float, bool]:
        """The answer in the response cache."""
        return self.log_prob if kind == "loglikelihood_rolling" else (self.log_prob, self.is_greedy)


# ---------------------------------------------------------------- requests -> windows


def continuation_windows(text: Text, requests: Sequence[Instance]) -> list[list[Window]]:
    """The window of each (context, continuation); logs how many contexts were truncated."""
    cut, merged = text.cut_contexts, text.merged_borders
    windows = []
    gaps = any(isinstance(request.args[1], Gap) for request in requests)
    for request in requests:
        with named(request):
            context, continuation = request.args
            if isinstance(continuation, Residues):
                windows.append([text.residues(context, continuation)])
                continue
            encode = text.encode_gap if isinstance(continuation, Gap) else text.encode_pair
            windows.append([text.continuation(*encode(context, continuation))])
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


def document_windows(text: Text, requests: Sequence[Instance]) -> list[list[Window]]:
    """The windows of each whole text; raises DuelError if its task counted other tokens than are scored."""
    windows = []
    for request in requests:
        with named(request):
            (document,) = versions.arguments(request)
            doc = request.doc if isinstance(request.doc, dict) else {}
            if MADE in doc and doc[MADE] not in MADE_HERE:
                raise DuelError(
                    "the document comes from a request cache and was made with other metadata (data set, tokenizer, "
                    "length, ...) than this run's. Run once with --cache_requests refresh."
                )
            windows.append(text.windows(document, doc.get(TOKENS)))
    return windows


# ---------------------------------------------------------------- what the loop of lm.py asks


class Scoring(abc.ABC):
    """Requests for log-likelihoods. Each of the loop's steps is a method; `n` is a request's index."""

    kind: ClassVar[str]  # the method of the model that answers them

    def __init__(self, run: Run, batch: Batch):
        self.run, self.estimator, self.requests = run, run.estimator, batch.requests
        self.windows = self.cut(batch.requests)  # of each request
        self.unfinished = Unfinished(run.store, run.estimator)
        self.order: Sequence[int] = range(len(batch.requests))
        self.so_far: SoFar | None = None
        self.all_mask_starts = run.estimator.counts.all_mask_starts

    @abc.abstractmethod
    def cut(self, requests: Sequence[Instance]) -> list[list[Window]]:
        """The windows of each request."""

    @property
    def label(self) -> str:
        """For the progress bar."""
        name, rule = self.estimator.name, self.estimator.describe().get("rule", "")
        return f" {rule}" if name == "duel" else f" {name} {rule}".rstrip()

    def size(self, n: int) -> int:
        """The target tokens of a request."""
        return sum(len(window.target) for window in self.windows[n])

    def cached(self) -> Iterator[tuple[int, RequestScore]]:
        """(n, score) of each request with an intact answer in the response cache, counted as if computed now."""
        for n in self.order:
            if (score := self._cached(n)) is not None:
                yield n, score

    def finished(self, remaining: Sequence[int]) -> Iterator[Finished]:
        """Each of the other requests, as the last of its windows is scored.

        Until then its scores are kept in the response cache, so an interrupted run loses only the windows in flight.
        """
        run, windows = self.run, self.windows
        self.verification = Verification(run, {n: windows[n] for n in remaining})
        scores = {n: self.unfinished.resume(windows[n]) for n in remaining}  # of each request, by part
        missing = [(n, part) for n in remaining for part in range(len(windows[n])) if part not in scores[n]]
        for n in remaining:
            for part in scores[n]:
                run.progress.add_window(len(windows[n][part].target))
            if len(scores[n]) == len(windows[n]):
                yield self._joined(n, scores.pop(n))
        with named_windows([self.requests[n] for n, _ in missing]):
            for i, score in run.estimator.stream([windows[n][part] for n, part in missing]):
                n, part = missing[i]
                if len(windows[n]) > 1:  # else it is the request's score, which is saved next
                    self.unfinished.keep(windows[n][part], score)
                run.progress.add_window(len(windows[n][part].target))
                scores[n][part] = score
                if len(scores[n]) == len(windows[n]):
                    yield self._joined(n, scores.pop(n))

    def save(self, done: Finished) -> None:
        """Save an answer, and what each window contributed to it, for a run that resumes this one."""
        arguments, answer = versions.arguments(self.requests[done.n]), done.answer.cached_as(self.kind)
        if self.run.store is None:
            self.run.cache.add_partial(self.kind, arguments, answer)
        else:
            self.run.store.keep(self.kind, arguments, answer, done.outcome.plain)
            self.unfinished.forget(done.windows)

    def count(self, done: Finished) -> None:
        """Add a request to the statistics, and to the windows that may be verified."""
        self._count(done.n, done.outcome, done.answer)
        self.verification.keep(done.n, done.scores)

    def after(self) -> None:
        """Log ties, and score some windows again."""
        if ties := self.estimator.counts.all_mask_starts - self.all_mask_starts:
            log.info(
                "%d blocks started from masks alone: all positions tie exactly, and the lowest position is first", ties
            )
        self.run.checked += (checked := self.verification.compare(self.requests))
        coarse = bool(checked) and is_coarse(self.estimator.denoiser)
        self.run.stats.verified.merge(summed(checked, coarse=coarse))

    @abc.abstractmethod
    def reply(self, n: int, score: RequestScore) -> Any:
        """A score as lm-eval expects it."""

    def _joined(self, n: int, scores: dict[int, WindowScore]) -> Finished:
        """A request whose windows are all scored."""
        parts = [scores[part] for part in range(len(scores))]
        outcome = Outcome.from_scores(parts, self.estimator)
        answer = RequestScore.from_scores(parts, outcome.stderr(self.windows[n]))
        return Finished(n, answer, self.windows[n], parts, outcome)

    def _cached(self, n: int) -> RequestScore | None:
        """An intact answer of the response cache: the sum of what is cached of its windows."""
        arguments, store = versions.arguments(self.requests[n]), self.run.store
        if store is None or (answer := store.answer(self.kind, arguments)) is None:
            return None
        names = self.estimator.values(self.estimator.empty_score)
        outcome = Outcome.read(store.values(self.kind, arguments), len(self.windows[n]), names)
        if outcome is not None:
            is_greedy = isinstance(answer, tuple) and answer[-1] is True
            score = RequestScore(outcome.log_prob, is_greedy, outcome.stderr(self.windows[n]))
            if score.cached_as(self.kind) == answer:
                self._count(n, outcome, score)
                return score
        store.drop()
        return None

    def _count(self, n: int, outcome: Outcome, score: RequestScore) -> None:
        request, windows = self.requests[n], self.windows[n]
        unknown = self.run.text.unknown(windows, str(versions.arguments(request)[-1]))
        self.run.stats.add_request(str(request.task_name), document_of(request), windows, outcome, unknown)


class Continuations(Scoring):
    """Requests of a context and its continuation."""

    kind = "loglikelihood"

    def cut(self, requests: Sequence[Instance]) -> list[list[Window]]:
        return continuation_windows(self.run.text, requests)

    def reply(self, n: int, score: RequestScore) -> tuple[float, bool]:
        """The log-likelihood, and whether decoding would write the continuation."""
        continuation = self.requests[n].args[1]
        in_gap = isinstance(continuation, Gap)
        log_prob = TextLogLikelihood(score, continuation, self.windows[n]) if in_gap else score.log_prob
        return log_prob, score.is_greedy


class WholeTexts(Scoring):
    """Requests of whole texts; with `order=random` there are estimates of the final value while they are scored."""

    kind = "loglikelihood_rolling"

    def __init__(self, run: Run, batch: Batch):
        super().__init__(run, batch)
        if run.options.order == "random":
            self.order = random_order(self.requests, run.options.draw_seed)
        self.documents = {n: Document.from_request(self.requests[n], self.windows[n]) for n in self.order}
        if run.options.order == "random" and self.requests:
            self.so_far = SoFar(self.documents.values())
        if run.store is not None:
            run.store[DOCUMENTS + self.kind] = plain(self.documents.values(), run.options.order)

    def cut(self, requests: Sequence[Instance]) -> list[list[Window]]:
        return document_windows(self.run.text, requests)

    def reply(self, n: int, score: RequestScore) -> float | tuple[float, bool]:
        """The log-likelihood, in the form of the release that asks."""
        (text,) = versions.arguments(self.requests[n])
        return versions.answer(self.requests[n], TextLogLikelihood(score, text, self.windows[n]))

    def _count(self, n: int, outcome: Outcome, score: RequestScore) -> None:
        super()._count(n, outcome, score)
        self.documents[n].log_prob = score.log_prob


class TextLogLikelihood(float):
    """The log-likelihood of a whole text or of a gap, which also tells a task's functions what was scored.

    Data that do not count tokens get `text` and `tokens` from here.
    """

    text: str
    tokens: int
    stderr: float | None  # Monte Carlo
    sees_suffix = True  # the text after a gap was visible; answers of other models lack this

    def __new__(cls, score: RequestScore, text: str, windows: Iterable[Window]) -> TextLogLikelihood:
        self = super().__new__(cls, score.log_prob)
        self.text, self.tokens, self.stderr = text, sum(len(window.target) for window in windows), score.stderr
        return self

    def __reduce__(self) -> tuple[Any, ...]:  # ranks exchange plain numbers
        return float, (float(self),)
