"""Log-likelihoods of requests.

    requests -> windows (text.py) -> scores of windows (the estimator) -> the sum over a request's windows

Every request is scored once, in the order in which windows are finished, and saved as soon as it is finished.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from lm_eval_duel.core.scores import WindowScore
from lm_eval_duel.core.windows import Window
from lm_eval_duel.errors import DuelError
from lm_eval_duel.harness import versions
from lm_eval_duel.harness.requests import document_of, named, named_windows
from lm_eval_duel.harness.resume import Unfinished
from lm_eval_duel.harness.run import Run
from lm_eval_duel.harness.so_far import Document, SoFar, random_order
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

    def answer(self, kind: str) -> float | tuple[float, bool]:
        """As it is cached."""
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


# ---------------------------------------------------------------- windows -> scores of requests


def scored_requests(
    run: Run, kind: str, requests: Sequence[Instance], windows: Sequence[Sequence[Window]]
) -> Iterator[tuple[int, RequestScore]]:
    """(index, score) of each request: first those with a cached answer, then the others as they are finished."""
    remaining, order = [], range(len(requests))
    documents = None
    if kind == "loglikelihood_rolling" and run.options.order == "random":
        order = random_order(requests, run.options.draw_seed)
    if kind == "loglikelihood_rolling":
        documents = [Document.from_request(requests[n], windows[n]) for n in order]
        run.keep_documents(kind, documents)
    place = {n: i for i, n in enumerate(order)}
    for n in order:
        if (score := _cached_score(run, kind, requests[n], windows[n])) is None:
            remaining.append(n)
            continue
        if documents:
            documents[place[n]].log_prob = score.log_prob
        yield n, score
    run.count_cached(len(requests) - len(remaining), len(remaining))
    left, left_windows = [requests[n] for n in remaining], [windows[n] for n in remaining]
    verification, ties = Verification(run, left_windows), run.estimator.counts.all_mask_starts
    name, rule = run.estimator.name, run.estimator.describe().get("rule", "")
    label = f" {rule}" if name == "duel" else f" {name} {rule}".rstrip()
    tokens = sum(len(window.target) for parts in left_windows for window in parts)
    so_far = SoFar(documents) if documents and run.options.order == "random" else None
    with run.show(kind, label, len(requests), len(requests) - len(remaining), tokens, so_far), run.computing():
        for n, scores in _finished_requests(run, left, left_windows):
            verification.keep(n, scores)
            score = _save(run, kind, left[n], left_windows[n], scores)
            if documents:
                documents[place[remaining[n]]].log_prob = score.log_prob
            yield remaining[n], score
    if ties := run.estimator.counts.all_mask_starts - ties:
        log.info(
            "%d blocks started from masks alone: all positions tie exactly, and the lowest position is first", ties
        )
    with run.computing():
        run.checked += (checked := verification.compare(left))
        run.stats.verified.merge(summed(checked, coarse=bool(checked) and is_coarse(run.estimator.denoiser)))


def _finished_requests(
    run: Run, requests: Sequence[Instance], windows: Sequence[Sequence[Window]]
) -> Iterator[tuple[int, list[WindowScore]]]:
    """(index, scores of its windows) of each request, as the last one is scored.

    Until then its scores are kept in the response cache, so an interrupted run loses only the windows in flight.
    """
    unfinished, progress = Unfinished(run.store, run.estimator), run.progress
    scores = [unfinished.resume(parts) for parts in windows]  # of each request, by window
    remaining = [(n, part) for n, parts in enumerate(windows) for part in range(len(parts)) if part not in scores[n]]
    for n, parts in enumerate(windows):
        for part in scores[n]:
            progress.add_window(parts[part])
        if len(scores[n]) == len(parts):
            yield n, _take(scores, n)
            progress.finish_request(len(parts))
    with named_windows([requests[n] for n, _ in remaining]):
        for i, score in run.estimator.stream([windows[n][part] for n, part in remaining]):
            n, part = remaining[i]
            scores[n][part] = score
            progress.add_window(windows[n][part])
            if len(scores[n]) < len(windows[n]):
                unfinished.keep(windows[n][part], score)
            else:
                yield n, _take(scores, n)
                progress.finish_request(len(windows[n]))


def _take(scores: list[dict[int, WindowScore]], n: int) -> list[WindowScore]:
    """The scores of a request's windows, in order, which are not needed here any more."""
    parts, scores[n] = scores[n], {}
    return [parts[part] for part in range(len(parts))]


# ---------------------------------------------------------------- the response cache


def _save(
    run: Run, kind: str, request: Instance, windows: Sequence[Window], scores: Sequence[WindowScore]
) -> RequestScore:
    """Add a finished request to the statistics, the trace and the response cache."""
    outcome = Outcome.from_scores(scores, run.estimator)
    score = RequestScore.from_scores(scores, outcome.stderr(windows))
    _count(run, request, windows, outcome)
    run.write_trace(request, windows, scores, run.estimator)
    if run.store is None:
        run.cache.add_partial(kind, versions.arguments(request), score.answer(kind))
    else:
        run.store.keep(kind, versions.arguments(request), score.answer(kind), outcome.plain)
        Unfinished(run.store, run.estimator).forget(windows)
    return score


def _count(run: Run, request: Instance, windows: Sequence[Window], outcome: Outcome) -> None:
    """Add a request to the statistics."""
    unknown = run.text.unknown(windows, str(versions.arguments(request)[-1]))
    run.stats.add_request(str(request.task_name), document_of(request), windows, outcome, unknown)


def _cached_score(run: Run, kind: str, request: Instance, windows: Sequence[Window]) -> RequestScore | None:
    """The score in the response cache, counted as if it were computed now; None if there is none that is intact."""
    arguments = versions.arguments(request)
    if run.store is None or (answer := run.store.answer(kind, arguments)) is None:
        return None
    estimator = run.estimator
    outcome = Outcome.read(run.store.values(kind, arguments), len(windows), estimator.values(estimator.empty_score))
    if outcome is None or (score := _score_of(answer, outcome.log_prob)) is None:
        run.store.drop()
        return None
    _count(run, request, windows, outcome)
    return score._replace(stderr=outcome.stderr(windows))


def _score_of(answer: Any, log_prob: float) -> RequestScore | None:
    """A cached answer as a score; None if it is not the sum of what is cached of its windows."""
    if not isinstance(answer, tuple):
        return RequestScore(log_prob, False) if answer == log_prob else None
    intact = len(answer) == 2 and answer[0] == log_prob and type(answer[1]) is bool
    return RequestScore(*answer) if intact else None


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
