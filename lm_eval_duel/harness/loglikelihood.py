"""Log-likelihoods of requests.

    requests -> windows (text.py) -> scores of windows (the estimator) -> the sum over a request's windows

Every request is scored once, in the order in which windows are finished, and saved as soon as it is finished.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lm_eval_duel.audit.verify import Verification
from lm_eval_duel.core.scores import WindowScore
from lm_eval_duel.core.windows import Window
from lm_eval_duel.errors import DuelError, naming
from lm_eval_duel.estimators.totals import Outcome
from lm_eval_duel.harness.cache import Unfinished, request_key
from lm_eval_duel.harness.requests import Batch, document_of, name, random_order
from lm_eval_duel.harness.run import Finished, HarnessRun, Work
from lm_eval_duel.harness.so_far import Document, SoFar
from lm_eval_duel.tasks.columns import MADE, MADE_HERE, TOKENS
from lm_eval_duel.text.annotated import Gap, Residues
from lm_eval_duel.text.text import Text

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

log = logging.getLogger("lm_eval.duel_mdm")  # lm-eval prints its own loggers only


# ---------------------------------------------------------------- requests -> windows


def continuation_windows(text: Text, requests: Sequence[Instance]) -> list[list[Window]]:
    """The window of each (context, continuation); logs how many contexts were truncated."""
    cut, merged = text.cut_contexts, text.merged_borders
    windows = []
    gaps = any(isinstance(request.args[1], Gap) for request in requests)
    for request in requests:
        with naming(name(request)):
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
        with naming(name(request)):
            (document,) = request.args
            doc = request.doc if isinstance(request.doc, dict) else {}
            if MADE in doc and doc[MADE] not in MADE_HERE:
                raise DuelError(
                    "the document comes from a request cache and was made with other metadata (data set, tokenizer, "
                    "length, ...) than this run's. Run once with --cache_requests refresh."
                )
            windows.append(text.windows(document, doc.get(TOKENS)))
    return windows


# ---------------------------------------------------------------- what the loop of lm.py asks


class Scoring(Work):
    """Requests for log-likelihoods. The answer to each is its `Outcome`."""

    def __init__(self, run: HarnessRun, batch: Batch, windows: list[list[Window]]):
        super().__init__(run, batch)
        self.label = f" {run.method}"
        self.windows = windows  # of each request
        self.tokens = [sum(len(window.target) for window in parts) for parts in windows]
        self.unfinished = None if run.store is None else Unfinished(run.store, run.estimator)
        self.verification: Verification | None = None
        self.all_mask_starts = run.estimator.counts.all_mask_starts
        self.keys = [""] * len(batch.requests)  # in the response cache, if there is one
        if run.store is not None:
            self.keys = [request_key(self.kind, request.args) for request in batch.requests]

    def cached(self) -> Iterator[tuple[int, Outcome]]:
        for n in self.order:
            if self.run.store is None or (record := self.run.store.find(self.keys[n], tuple)) is None:
                continue
            if (outcome := Outcome.from_record(record, self.windows[n])) is None:
                self.run.store.drop()
            else:
                self._count(n, outcome)
                yield n, outcome

    def finished(self, remaining: Sequence[int]) -> Iterator[Finished]:
        """Each of the other requests, as the last of its windows is scored.

        Until then its scores are kept in the response cache, so an interrupted run loses only the windows in flight.
        """
        run, windows = self.run, self.windows
        if run.options.verify:
            ranks = run.ranks.rank, run.ranks.world_size, run.ranks.device
            self.verification = Verification(run.options, {n: windows[n] for n in remaining}, *ranks)
        kept = self.unfinished
        scores = {n: {} if kept is None else kept.resume(windows[n]) for n in remaining}  # of each request, by part
        missing = [(n, part) for n in remaining for part in range(len(windows[n])) if part not in scores[n]]
        for n in remaining:
            for part in scores[n]:
                run.progress.add_window(len(windows[n][part].target))
            if len(scores[n]) == len(windows[n]):
                yield self._joined(n, scores.pop(n))
        with naming(lambda i: name(self.requests[missing[i][0]])):
            for i, score in run.estimator.stream([windows[n][part] for n, part in missing]):
                n, part = missing[i]
                if kept is not None and len(windows[n]) > 1:  # else it is the request's score, which is saved next
                    kept.keep(windows[n][part], score)
                run.progress.add_window(len(windows[n][part].target))
                scores[n][part] = score
                if len(scores[n]) == len(windows[n]):
                    yield self._joined(n, scores.pop(n))

    def save(self, done: Finished) -> None:
        if self.unfinished is not None:
            self.unfinished.store.keep(self.keys[done.n], done.answer.record)
            self.unfinished.forget(done.windows)

    def count(self, done: Finished) -> None:
        """Add a request to the statistics, and to the windows that may be verified."""
        self._count(done.n, done.answer)
        if self.verification is not None:
            self.verification.keep(done.n, done.scores)

    def after(self) -> None:
        """Log ties, and score some windows again."""
        if ties := self.estimator.counts.all_mask_starts - self.all_mask_starts:
            log.info("blocks that started from masks alone, where all positions tie and the lowest is first: %d", ties)
        if self.verification is not None:
            self.run.stats.checked += self.verification.compare(self.requests, self.run.text)
            self.run.stats.verify_failures += [self.verification.failure] if self.verification.failure else []

    def _joined(self, n: int, scores: dict[int, WindowScore]) -> Finished:
        """A request whose windows are all scored."""
        parts = [scores[part] for part in range(len(scores))]
        return Finished(n, Outcome.from_scores(self.windows[n], parts, self.estimator), self.windows[n], parts)

    def _count(self, n: int, outcome: Outcome) -> None:
        request = self.requests[n]
        unknown = self.run.text.unknown(outcome.windows, str(request.args[-1]))
        self.run.stats.add_request(str(request.task_name), document_of(request), outcome, unknown)


class Continuations(Scoring):
    """Requests of a context and its continuation."""

    kind = "loglikelihood"

    def __init__(self, run: HarnessRun, batch: Batch):
        super().__init__(run, batch, continuation_windows(run.text, batch.requests))

    def reply(self, n: int, answer: Outcome) -> tuple[float, bool]:
        """The log-likelihood, and whether decoding would write the continuation."""
        continuation = self.requests[n].args[1]
        log_prob = TextLogLikelihood(answer, continuation) if isinstance(continuation, Gap) else answer.log_prob
        return log_prob, answer.is_greedy


class WholeTexts(Scoring):
    """Requests of whole texts; with `order=random` there are estimates of the final value while they are scored."""

    kind = "loglikelihood_rolling"

    def __init__(self, run: HarnessRun, batch: Batch):
        super().__init__(run, batch, document_windows(run.text, batch.requests))
        if run.options.order == "random":
            self.order = random_order(self.requests, run.options.draw_seed)
        self.documents = {n: Document(str(self.requests[n].task_name), self.tokens[n]) for n in self.order}
        if run.options.order == "random" and self.requests:
            self.so_far = SoFar(self.documents.values(), run.stats.perplexity_error)

    def reply(self, n: int, answer: Outcome) -> TextLogLikelihood:
        """The log-likelihood."""
        (text,) = self.requests[n].args
        return TextLogLikelihood(answer, text)

    def _count(self, n: int, outcome: Outcome) -> None:
        super()._count(n, outcome)
        self.documents[n].log_prob = outcome.log_prob


class TextLogLikelihood(float):
    """The log-likelihood of a whole text or of a gap, which also tells a task's functions what was scored.

    Data that do not count tokens get `text` and `tokens` from here.
    """

    text: str
    tokens: int
    stderr: float | None  # Monte Carlo
    sees_suffix = True  # the text after a gap was visible; answers of other models lack this

    def __new__(cls, outcome: Outcome, text: str) -> TextLogLikelihood:
        self = super().__new__(cls, outcome.log_prob)
        self.text, self.tokens = text, sum(len(window.target) for window in outcome.windows)
        self.stderr = outcome.total.stderr
        return self

    def __reduce__(self) -> tuple[Any, ...]:  # ranks exchange plain numbers
        return float, (float(self),)
