"""Likelihoods of one kind of requests: their windows in, an answer for each out, kept as soon as it is known.

windows -> those that an interrupted run has scored, and the others -> estimator -> nats per window -> answers
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from lm_eval_duel.engine.results import WindowScore
from lm_eval_duel.engine.windows import Window
from lm_eval_duel.harness import cache_keys
from lm_eval_duel.harness import requests as instances
from lm_eval_duel.harness.resume import Unfinished
from lm_eval_duel.harness.run_stats import Outcome
from lm_eval_duel.harness.verify import Verification

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

    from lm_eval_duel.harness.answers import Answering


class Scoring:
    """Requests and their windows; `combine`: a request's answer from its windows' results."""

    def __init__(
        self,
        model: Answering,
        kind: str,
        requests: list[Instance],
        windows: list[list[Window]],
        combine: Callable[[list[WindowScore]], Any],
    ):
        self.model, self.kind, self.requests, self.combine = model, kind, requests, combine
        self.windows = windows
        self.flat = [window for parts in windows for window in parts]
        self.owner = [(r, part) for r, parts in enumerate(windows) for part in range(len(parts))]
        self.found: list[dict[int, WindowScore]] = [{} for _ in windows]
        self.answers: list[Any] = [None] * len(windows)  # None: not known yet
        self.verification = Verification(self.flat, model.options, model.rank, model.world_size)
        self.unfinished = Unfinished(model.cache_hook.dbdict, model.seen)

    def run(self, bar: tqdm) -> list[Any]:
        """The answers; `bar` counts target tokens."""
        self.bar, model = bar, self.model
        for r, parts in enumerate(self.windows):
            if not parts:
                self._complete(r)
        left = [n for n in range(len(self.flat)) if not self._known(n)]
        with model.answering([self.requests[self.owner[n][0]] for n in left], self._progress):
            for n, scored in model.estimator.stream([self.flat[n] for n in left]):
                self._computed(left[n], scored)
        return self.answers

    def _progress(self) -> str:
        """What is done, in words."""
        done, parts = sum(answer is not None for answer in self.answers), sum(map(len, self.found))
        return f"{done} of {len(self.answers)} {self.kind} requests of this rank, and {parts} windows of others,"

    def verify(self) -> None:
        """Score some of them once more (verify.py)."""
        with self.model.answering([], self._progress):
            found = self.verification.run(self.model.fine, lambda n: instances.name(self.requests[self.owner[n][0]]))
        self.model.cost.verified.merge(found)

    def _known(self, n: int) -> bool:
        """Whether an interrupted run has scored window n, of a request that it did not finish."""
        alone = len(self.windows[self.owner[n][0]]) == 1
        if alone or (scored := self.unfinished.find(self.flat[n])) is None:
            return False
        self._done(n, scored)
        return True

    def _computed(self, n: int, scored: WindowScore) -> None:
        r, _ = self.owner[n]
        if len(self.found[r]) < len(self.windows[r]) - 1:
            self.unfinished.keep(self.flat[n], scored)
        self._done(n, scored)

    def _done(self, n: int, scored: WindowScore) -> None:
        r, part = self.owner[n]
        self.found[r][part] = scored
        self.verification.keep(n, scored)
        self.bar.update(len(self.flat[n].target))
        if len(self.found[r]) == len(self.windows[r]):
            self._complete(r)

    def _complete(self, r: int) -> None:
        """Count a request; its answer, and what it came to, go to the response cache, its windows to the trace."""
        request, windows = self.requests[r], self.windows[r]
        parts, self.found[r] = [self.found[r][part] for part in range(len(windows))], {}
        self.answers[r] = self.combine(parts)
        outcome = Outcome.of(parts, self.model.estimator)
        self.model.cost.count(str(request.task_name), request.doc_id, windows, outcome)
        self.model.write_trace(request, windows, parts)
        if (store := self.model.cache_hook.dbdict) is not None:
            store.note(cache_keys.of(self.kind, request.args), outcome.plain)
        self.model.cache_hook.add_partial(self.kind, request.args, self.answers[r])
        if len(parts) > 1:
            self.unfinished.forget(windows)
