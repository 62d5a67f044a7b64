"""What the harness asks: requests in, answers out in their order, each kept as soon as it is known.

requests -> windows (text.py) -> estimator -> nats per window -> added up per request
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from lm_eval_duel.errors import DuelError
from lm_eval_duel.options import MADE, TOKENS, Options
from lm_eval_duel.ranks import Ranked
from lm_eval_duel.token_text import MADE as MADE_HERE
from lm_eval_duel.windows import Window

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

    from lm_eval_duel.cost import Cost
    from lm_eval_duel.denoisers.base import Denoiser
    from lm_eval_duel.duel import Duel
    from lm_eval_duel.estimator import Estimator
    from lm_eval_duel.generation import Settings
    from lm_eval_duel.ledger import Drawn, Scored
    from lm_eval_duel.text import Text
    from lm_eval_duel.trace import Writer

log = logging.getLogger("lm_eval.duel_mdm")  # the harness shows its own loggers only


class Answering(Ranked):
    """A model of the harness that answers with an estimator: likelihoods of its windows, and generation."""

    options: Options
    denoiser: Denoiser
    estimator: Estimator
    text: Text
    cost: Cost
    trace: Writer | None
    generated: set[str]  # in words, how

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
        cut, merged = self.text.cut_contexts, self.text.merged_borders
        windows = []
        for request in requests:
            with _naming(request):
                windows.append([self.text.continuation(*self.text.encode_pair(*request.args))])
        if cut := self.text.cut_contexts - cut:
            log.warning(
                "%d of %d contexts were longer than max_length=%d and cut from the left",
                cut,
                len(requests),
                self.max_length,
            )
        if merged := self.text.merged_borders - merged:
            log.warning(
                "%d of %d continuations would share a token with their context and were encoded by themselves",
                merged,
                len(requests),
            )
        return self._score("loglikelihood", requests, windows, _both, disable_tqdm)

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str] | None, list[int], list[int]]], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """The same for ids: (texts, context ids, continuation ids)."""
        windows = [self.text.continuation(context, target) for _, context, target in requests]
        return [(scored.log_prob, scored.is_greedy) for scored in self.estimator.log_prob(windows)]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """log p of whole texts in nats, each token in exactly one window; an empty text is 0.0."""
        windows = []
        for request in requests:
            with _naming(request):
                (text,) = request.args
                doc = request.doc if isinstance(request.doc, dict) else {}
                if MADE in doc and doc[MADE] not in MADE_HERE:
                    raise DuelError(
                        "it comes from a request cache and was made with other metadata (data set, tokenizer, length "
                        "...) than this run's: run once with --cache_requests refresh."
                    )
                windows.append(self.text.windows(text, doc.get(TOKENS)))
        return self._score("loglikelihood_rolling", requests, windows, _total, disable_tqdm)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """What the model writes after each prompt, under the rule and block that are scored (Algorithm 1).

        A sample is seeded by (draw_seed, task, document, request, repeat); temperature 0 is decoding.
        """
        from lm_eval_duel.generation import Settings

        groups: dict[Settings, list[int]] = {}
        asked: dict[int, int] = {}
        repeats = []  # how often the same request came before
        for r, request in enumerate(requests):
            with _naming(request):
                groups.setdefault(Settings.of(request.args[1]), []).append(r)
            repeats.append(asked.get(id(request), 0))
            asked[id(request)] = repeats[-1] + 1
        answers = [""] * len(requests)
        total = sum(settings.length * len(group) for settings, group in groups.items())
        with tqdm(total=total, desc="generate_until", unit="tok", disable=disable_tqdm or self.rank != 0) as bar:
            for settings, group in groups.items():
                texts = self._generate(settings, [requests[r] for r in group], [repeats[r] for r in group], bar)
                for r, text in zip(group, texts, strict=True):
                    answers[r] = text
        return answers

    def _generate(self, settings: Settings, requests: list[Instance], repeats: list[int], bar: tqdm) -> list[str]:
        """The texts of requests of one kind of settings."""
        from lm_eval_duel.generation import Generator, key_of

        under = "" if self.estimator.decodes else f", rule={self._duel.rule}, block={self._duel.block}"
        self.generated.add(settings.words + under)
        texts = [""] * len(requests)

        def done(n: int, text: str, window: Window, drawn: Drawn) -> None:
            texts[n], request = text, requests[n]
            bar.update(settings.length)
            bar.set_postfix_str(f"NFE {self._duel.counts.nfe}")
            self.cache_hook.add_partial("generate_until", request.args, text)
            if repeats[n] < (request.repeats or 1):  # else it fills up a rank
                said = {"repeat": repeats[n], "generated": settings.words + under, "text": text, "tail": drawn.tail}
                self._write_trace(request, [window], [drawn], said, self._duel)

        keys = [
            key_of(request.task_name, request.doc_id, request.idx, repeat)
            for request, repeat in zip(requests, repeats, strict=True)
        ]
        with self._timed(requests):
            Generator(self._duel, self.text, settings, self.options.draw_seed)(
                [request.args[0] for request in requests], keys, done
            )
        return texts

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as the tokenizer's template writes it."""
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The template's text, for the results; `chat_template`: its name, where the tokenizer has several."""
        if chat_template is False or chat_template is None:
            return ""
        return self.tokenizer.get_chat_template(None if chat_template is True else chat_template)

    @cached_property
    def _duel(self) -> Duel:
        """What generates: the estimator, or where it decodes nothing the rule beside it."""
        from lm_eval_duel import switch

        if self.estimator.decodes:
            return self.estimator
        duel = switch.make(self.denoiser, dataclasses.replace(self.options, estimator="duel"))
        duel._loop.counts = self.estimator.counts
        return duel

    def _score(
        self,
        kind: str,
        requests: list[Instance],
        windows: list[list[Window]],
        combine: Callable[[list[Scored]], Any],
        disable_tqdm: bool,
    ) -> list[Any]:
        """The answer of each request from its windows' results.

        A request's answer goes to the response cache, and its windows to the trace, as soon as the last one is done.
        """
        owner = [(r, part) for r, parts in enumerate(windows) for part in range(len(parts))]
        found: list[dict[int, Scored]] = [{} for _ in windows]
        answers: list[Any] = [None] * len(windows)
        extra = _padding(requests)
        bar = tqdm(
            total=sum(len(window.target) for parts in windows for window in parts),
            desc=f"{kind} {self.law.get('rule', self.estimator.name)}",
            unit="tok",
            disable=disable_tqdm or self.rank != 0,
        )

        def complete(r: int) -> None:
            parts, found[r] = [found[r][part] for part in range(len(windows[r]))], {}
            answers[r] = combine(parts)
            if r not in extra:
                request = requests[r]
                self.cost.count(request.task_name, request.doc_id, windows[r], parts, self.estimator)
                self._write_trace(requests[r], windows[r], parts)
            if parts:
                self.cache_hook.add_partial(kind, requests[r].args, answers[r])

        def done(n: int, scored: Scored) -> None:
            r, part = owner[n]
            found[r][part] = scored
            bar.update(len(windows[r][part].target))
            if len(found[r]) == len(windows[r]):
                complete(r)

        blank = self.estimator.counts.blank_starts
        with bar:
            for r, parts in enumerate(windows):
                if not parts:
                    complete(r)
            with self._timed([requests[r] for r, _ in owner]):
                self.estimator.log_prob([window for parts in windows for window in parts], done, keep=False)
        if blank := self.estimator.counts.blank_starts - blank:
            log.info(
                "%d blocks started with nothing in view: all cells tie exactly, the lowest position goes first", blank
            )
        return answers

    @contextlib.contextmanager
    def _timed(self, owners: list[Instance]) -> Iterator[None]:
        """Count the seconds, and put the name of its request before an error about a window."""
        began = time.perf_counter()
        try:
            yield
        except DuelError as error:
            if error.window is not None:
                error.args = (f"{_name(owners[error.window])}: {error}",)
            raise
        finally:
            self.cost.seconds += time.perf_counter() - began

    def _write_trace(
        self,
        request: Instance,
        windows: list[Window],
        parts: list[Scored],
        said: dict[str, Any] | None = None,
        estimator: Estimator | None = None,
    ) -> None:
        """A line for each window, with what else is `said` about it."""
        if self.trace is None:
            return
        from lm_eval_duel.trace import record

        place = {"task": request.task_name, "doc": request.doc_id, "request": request.idx, **(said or {})}
        self.trace.write(
            {**place, "window": n, **record(window, scored, estimator or self.estimator)}
            for n, (window, scored) in enumerate(zip(windows, parts, strict=True))
        )


def _padding(requests: list[Instance]) -> set[int]:
    """The requests that the harness added so that ranks have equally many: the same object more often than asked."""
    seen: dict[int, int] = {}
    extra = set()
    for r, request in enumerate(requests):
        seen[id(request)] = seen.get(id(request), 0) + 1
        if seen[id(request)] > (request.repeats or 1):
            extra.add(r)
    return extra


def _total(parts: list[Scored]) -> float:
    return math.fsum(scored.log_prob for scored in parts)


def _both(parts: list[Scored]) -> tuple[float, bool]:
    return _total(parts), all(scored.is_greedy for scored in parts)


@contextlib.contextmanager
def _naming(request: Instance) -> Iterator[None]:
    """Put the request's name, as the user knows it, before an error."""
    try:
        yield
    except DuelError as error:
        raise DuelError(f"{_name(request)}: {error}") from None


def _name(request: Instance) -> str:
    """A request as the user knows it."""
    return f"Request of task {request.task_name}, document {request.doc_id}"
