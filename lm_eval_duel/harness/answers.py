"""What the harness asks: requests in, answers out in their order, each kept as soon as it is known.

requests -> windows (text.py) -> their likelihoods (scoring.py) -> added up per request
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from lm_eval_duel import signals as interrupts
from lm_eval_duel.engine.results import Counts
from lm_eval_duel.engine.windows import Window
from lm_eval_duel.errors import DuelError
from lm_eval_duel.harness import cache_keys
from lm_eval_duel.harness import requests as instances
from lm_eval_duel.harness.distributed import Ranked
from lm_eval_duel.options import Options
from lm_eval_duel.tasks.columns import MADE, TOKENS
from lm_eval_duel.tasks.tokenized_text import MADE as MADE_HERE

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

    from lm_eval_duel.denoisers.base import Denoiser
    from lm_eval_duel.engine.results import WindowScore
    from lm_eval_duel.estimators.base import Estimator
    from lm_eval_duel.harness.run_stats import Cost
    from lm_eval_duel.harness.text import Text
    from lm_eval_duel.harness.trace import Writer

log = logging.getLogger("lm_eval.duel_mdm")  # the harness shows its own loggers only


class Answering(Ranked):
    """A model of the harness that answers with an estimator: the likelihoods of windows."""

    options: Options
    denoiser: Denoiser
    estimator: Estimator
    text: Text
    evaluation: int  # whose results these are
    cost: Cost
    trace: Writer | None

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """log p(continuation | context) in nats, and whether `decode` under the same rule would write it.

        An empty context leaves the framing tokens alone in view; an empty continuation is (0.0, True). A context too
        long for the row is cut from the left, a continuation too long is an error. An estimator that decodes nothing
        says False.
        """
        if not self.estimator.decodes:
            log.warning(
                "estimator=%s decodes nothing, so is_greedy is False: an accuracy that counts it (lambada's acc) means "
                "nothing here; log-likelihoods, and what is made of them, do",
                self.estimator.name,
            )
        asked = self.asked(requests)
        cut, merged = self.text.cut_contexts, self.text.merged_borders
        windows = []
        for request in asked.requests:
            with instances.naming(request):
                windows.append([self.text.continuation(*self.text.encode_pair(*request.args))])
        if cut := self.text.cut_contexts - cut:
            log.warning(
                "%d of %d contexts were longer than max_length=%d and cut from the left",
                cut,
                len(windows),
                self.max_length,
            )
        if merged := self.text.merged_borders - merged:
            log.warning(
                "%d of %d continuations would share a token with their context and were encoded by themselves",
                merged,
                len(windows),
            )
        return asked.spread(self._score("loglikelihood", asked.requests, windows, _both, disable_tqdm))

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str] | None, list[int], list[int]]], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """The same for ids: (texts, context ids, continuation ids)."""
        windows = [self.text.continuation(context, target) for _, context, target in requests]
        return [(scored.log_prob, scored.is_greedy) for scored in self.estimator.log_prob(windows)]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """log p of whole texts in nats, each token in exactly one window; an empty text is 0.0."""
        asked = self.asked(requests)
        windows = []
        for request in asked.requests:
            with instances.naming(request):
                (text,) = request.args
                doc = request.doc if isinstance(request.doc, dict) else {}
                if MADE in doc and doc[MADE] not in MADE_HERE:
                    raise DuelError(
                        "it comes from a request cache and was made with other metadata (data set, tokenizer, length "
                        "...) than this run's: run once with --cache_requests refresh."
                    )
                windows.append(self.text.windows(text, doc.get(TOKENS)))
        answers = self._score("loglikelihood_rolling", asked.requests, windows, _total, disable_tqdm)
        return asked.spread(list(map(TextScore, answers, (request.args[0] for request in asked.requests), windows)))

    def asked(self, requests: list[Instance]) -> instances.Asked:
        """The requests that are answered; the first ones of an evaluation begin its results."""
        if self.evaluation != instances.evaluation():
            self.begin()
        return instances.asked(requests)

    def begin(self) -> None:
        """Begin the results of an evaluation: what another one asked, found or computed is not in them."""
        from lm_eval_duel.harness.run_stats import Cost

        self.evaluation, self.cost, self.accounts = instances.evaluation(), Cost(), None
        self.estimator.counts = Counts()
        self.text.cut_contexts = self.text.merged_borders = 0

    def _score(
        self,
        kind: str,
        requests: list[Instance],
        windows: list[list[Window]],
        combine: Callable[[list[WindowScore]], Any],
        disable_tqdm: bool,
    ) -> list[Any]:
        """The answer of each request: found in the response cache, or from its windows' results."""
        from lm_eval_duel.harness.scoring import Scoring

        answers = [self._found(kind, *each) for each in zip(requests, windows, strict=True)]
        left = [r for r, answer in enumerate(answers) if answer is None]
        self.say_found(len(answers) - len(left), len(left))
        blank = self.estimator.counts.all_mask_starts
        scoring = Scoring(self, kind, [requests[r] for r in left], [windows[r] for r in left], combine)
        with tqdm(
            total=sum(len(window.target) for r in left for window in windows[r]),
            desc=f"{kind} {self.spec.get('rule', self.estimator.name)}",
            unit="tok",
            disable=disable_tqdm or self.rank != 0,
        ) as bar:
            for r, answer in zip(left, scoring.run(bar), strict=True):
                answers[r] = answer
        if blank := self.estimator.counts.all_mask_starts - blank:
            log.info(
                "%d blocks started with nothing in view: all cells tie exactly, the lowest position goes first", blank
            )
        scoring.verify()
        return answers

    def _found(self, kind: str, request: Instance, windows: list[Window]) -> Any:
        """The answer that the response cache has, counted as when it was computed; None where there is none."""
        from lm_eval_duel.harness.run_stats import Outcome

        if (store := self.cache_hook.dbdict) is None:
            return None
        key = cache_keys.of(kind, request.args)
        if (answer := store.find(key)) is None:
            return None
        outcome = Outcome.read(store.account(key), len(windows), self.estimator.values(self.estimator.empty_score))
        if outcome is None or not _same(answer, outcome.total):
            store.drop()
            return None
        self.cost.count(str(request.task_name), request.doc_id, windows, outcome)
        return answer

    def say_found(self, found: int, left: int) -> None:
        """Count the answers of the response cache, and say how many there are, in the harness's words."""
        if self.cache_hook.dbdict is not None:
            log.info("Cached requests: %d, Requests remaining: %d", found, left)
        if found:
            self.cost.more("answers_from_cache", found)

    @property
    def seen(self) -> tuple[object, ...]:
        """What is in a window's score and not in the spec: statistics for a trace, the rules a lattice follows."""
        return self.estimator.traced, *map(str, getattr(self.estimator, "rules", ()))

    def fine(self) -> Denoiser:
        """The network in float32, or in float64 where it runs in that."""
        raise NotImplementedError

    @contextlib.contextmanager
    def answering(self, owners: list[Instance], progress: Callable[[], str]) -> Iterator[None]:
        """Count the seconds, and put the name of its request before an error about a window.

        A signal ends the run after the network call under way; the log says with what (`progress`), and where it is
        kept.
        """
        began = time.perf_counter()
        try:
            with interrupts.deferred():
                yield
        except DuelError as error:
            if error.window is not None:
                error.args = (f"{instances.name(owners[error.window])}: {error}",)
            raise
        except interrupts.Interrupted as signal:
            store = self.cache_hook.dbdict
            where = "lost, for lack of --use_cache FILE"
            if store is not None:
                where = f"kept in {store.filename}: the same command goes on from there"
            log.warning("Interrupted by %s on rank %d: %s are done and %s", signal.name, self.rank, progress(), where)
            raise
        finally:
            self.cost.seconds += time.perf_counter() - began
            if self.trace is not None:
                self.trace.settle()

    def write_trace(
        self,
        request: Instance,
        windows: list[Window],
        parts: list[WindowScore],
        said: dict[str, Any] | None = None,
        estimator: Estimator | None = None,
    ) -> None:
        """A line for each window, with what else is `said` about it."""
        if self.trace is None:
            return
        from lm_eval_duel.harness.trace import record

        place = {"task": request.task_name, "doc": request.doc_id, "request": request.idx, **(said or {})}
        self.trace.write(
            {**place, "window": n, **record(window, scored, estimator or self.estimator)}
            for n, (window, scored) in enumerate(zip(windows, parts, strict=True))
        )


class TextScore(float):
    """The log-likelihood of a whole text, nats; to the functions of a task, also its text and its tokens, for data that
    do not count them."""

    text: str
    tokens: int

    def __new__(cls, nats: float, text: str, windows: Iterable[Window]) -> TextScore:
        self = super().__new__(cls, nats)
        self.text, self.tokens = text, sum(len(window.target) for window in windows)
        return self

    def __reduce__(self) -> tuple[Any, ...]:  # ranks send each other plain numbers
        return float, (float(self),)


def _same(answer: Any, total: float) -> bool:
    """Whether an answer is the sum of what a cache says of its windows."""
    if isinstance(answer, tuple):
        return len(answer) == 2 and answer[0] == total and type(answer[1]) is bool
    return answer == total


def _total(parts: list[WindowScore]) -> float:
    return math.fsum(scored.log_prob for scored in parts)


def _both(parts: list[WindowScore]) -> tuple[float, bool]:
    return _total(parts), all(scored.is_greedy for scored in parts)
