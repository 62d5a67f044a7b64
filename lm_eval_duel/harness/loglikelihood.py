"""Log-likelihoods of requests, each saved as soon as its last window is scored.

requests -> windows (text.py) -> scores of windows (the estimator) -> sums over the windows of a request
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lm_eval_duel.audit.recompute import Verification
from lm_eval_duel.core.scores import Score
from lm_eval_duel.core.windows import Window
from lm_eval_duel.errors import naming
from lm_eval_duel.estimators.totals import Total, score_documents
from lm_eval_duel.harness.answers import Answers
from lm_eval_duel.harness.requests import Batch, document_of, name, random_order
from lm_eval_duel.harness.run import HarnessRun
from lm_eval_duel.harness.so_far import SoFar
from lm_eval_duel.tasks.columns import TOKENS
from lm_eval_duel.text.annotated import Gap
from lm_eval_duel.text.text import TextEncoder

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

log = logging.getLogger("lm_eval.duel_mdm")  # lm-eval prints its own loggers only


# ---------------------------------------------------------------- requests -> windows


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
    return windows


# ---------------------------------------------------------------- requests -> answers


def score_continuations(run: HarnessRun, requests: Sequence[Instance]) -> list[tuple[float, bool]]:
    """The log-likelihood of each continuation, and True if decoding would write it."""
    batch = Batch.from_requests(requests)
    windows = continuation_windows(run.text, batch.requests)
    answers = score_requests(run, "loglikelihood", batch.requests, windows)
    return batch.spread([(answer, answer.is_greedy) for answer in answers])


def score_texts(run: HarnessRun, requests: Sequence[Instance]) -> list[TextLogLikelihood]:
    """The log-likelihood of each whole text."""
    batch, shuffled = Batch.from_requests(requests), run.options.order == "random"
    windows = document_windows(run.text, batch.requests)
    return batch.spread(score_requests(run, "loglikelihood_rolling", batch.requests, windows, shuffled))


def score_requests(
    run: HarnessRun,
    kind: str,
    requests: Sequence[Instance],
    windows: Sequence[Sequence[Window]],
    shuffled: bool = False,
) -> list[TextLogLikelihood]:
    """The log-likelihood of each request: from the response cache, or computed now and saved as soon as it is finished.

    `windows`: of each request. `shuffled`: take the requests in a random order, and show estimates of the final values.
    """
    answers, finished = Answers(run.store, run.estimator, kind, requests, windows), dict[int, TextLogLikelihood]()

    def count(n: int, scores: Sequence[Score]) -> None:
        total = Total.from_scores(windows[n], scores, run.estimator.name)
        request, text = requests[n], requests[n].args[-1]
        finished[n] = TextLogLikelihood(total, text)
        unknown = run.text.unknown(windows[n], text)
        run.stats.add_request(str(request.task_name), document_of(request), total, unknown)

    for n, scores in answers.saved():
        count(n, scores)
    order = random_order(requests, run.options.draw_seed) if shuffled else range(len(requests))
    remaining = [n for n in order if n not in finished]
    tokens = [sum(len(window.target) for window in parts) for parts in windows]
    documents = [(n, str(requests[n].task_name), tokens[n]) for n in order]
    so_far = SoFar(documents, finished, run.stats.tasks) if shuffled else None
    progress = run.begin(kind, tokens, remaining, f" {run.method}", so_far)
    known = answers.kept(remaining)
    for window in (window for n in remaining for window in windows[n] if window in known):
        progress.add_window(len(window.target))

    def keep(window: Window, score: Score) -> None:
        answers.keep(window, score)
        progress.add_window(len(window.target))

    verification = None
    if run.options.verify:
        ranks = run.ranks.rank, run.ranks.world_size, run.ranks.device
        verification = Verification(run.options, {n: windows[n] for n in remaining}, *ranks)
    ties = run.estimator.counts.all_mask_starts
    with run.computing():
        with progress.bar:
            stream = score_documents(
                [windows[n] for n in remaining],
                run.estimator.stream,
                lambda i: name(requests[remaining[i]]),
                known,
                keep,
            )
            for i, scores in stream:
                n = remaining[i]
                answers.save(n, scores)  # first: whatever fails below, this request is not lost
                count(n, scores)
                if verification is not None:
                    verification.keep(n, scores)
                progress.finish_request(len(scores))
                run.write_trace(requests[n], windows[n], scores, run.estimator)
        if verification is not None:
            run.stats.checked += verification.compare(requests, run.text)
            run.stats.verify_failures += [verification.failure] if verification.failure else []
    if ties := run.estimator.counts.all_mask_starts - ties:
        log.info("blocks that started from masks alone, where all positions tie and the lowest is first: %d", ties)
    return [finished.pop(n) for n in range(len(requests))]  # the progress bar, which stays, refers to them


class TextLogLikelihood(float):
    """The log-likelihood of a whole text or of a gap, with `text` and `tokens` for data that do not count tokens."""

    __slots__ = ("is_greedy", "stderr", "text", "tokens")
    text: str
    tokens: int
    stderr: float | None  # Monte Carlo
    is_greedy: bool  # decoding would write the text
    sees_suffix = True  # the text after a gap was visible; answers of other models lack this

    def __new__(cls, total: Total, text: str) -> TextLogLikelihood:
        self = super().__new__(cls, total.log_prob)
        self.text, self.tokens, self.stderr, self.is_greedy = text, total.tokens, total.stderr, total.is_greedy
        return self

    def __reduce__(self) -> tuple[Any, ...]:  # ranks exchange plain numbers
        return float, (float(self),)
