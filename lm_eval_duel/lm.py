"""`duel-mdm`: the model that lm-evaluation-harness sees. Text in, nats out, in request order.

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

from lm_eval_duel import fingerprint
from lm_eval_duel.errors import DuelError
from lm_eval_duel.options import BUNDLED, LATTICE, TOKENS, Options, unread
from lm_eval_duel.ranks import Ranked
from lm_eval_duel.token_text import keep_apart_in_caches

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import CacheHook

    from lm_eval_duel.cost import Cost
    from lm_eval_duel.ledger import Scored
    from lm_eval_duel.trace import Writer
    from lm_eval_duel.windows import Window

log = logging.getLogger("lm_eval.duel_mdm")  # the harness shows its own loggers only

LAW_VERSION = 1  # raised when a release changes a number for the same arguments
CACHE_KEY = "lm_eval_duel law"


class DuelMDM(Ranked):
    """Exact likelihood of a masked diffusion model under a deterministic unmasking rule, and what it is compared with.

    Takes the model args of `Options`; raises DuelError for a wrong one before the checkpoint is read.
    """

    def __init__(self, **arguments: Any):
        super().__init__()
        self.options = options = Options.parse(arguments)
        # transformers is imported once the arguments are known to be good
        from lm_eval_duel import denoisers, switch
        from lm_eval_duel.cost import Cost
        from lm_eval_duel.text import Text

        device = self.join_ranks(options.device)
        if options.pretrained is None and self.rank == 0:
            log.info(
                "no pretrained= given: scoring with demo-mdm, the small bundled demonstration checkpoint. "
                "Name yours with --model_args pretrained=<folder or hub name>,..."
            )
        self.tokenizer = denoisers.load_tokenizer(vars(options))
        self.denoiser = denoisers.load(
            options.pretrained or BUNDLED, device=device, tokenizer=self.tokenizer, **options.network
        )
        self._device = self.denoiser.device
        self.estimator = switch.make(self.denoiser, options)
        self.text = Text(self.tokenizer, self.denoiser, options.windows, self.estimator.block)
        self.cost = Cost()
        self.trace = self._open_trace()
        if self.rank == 0:
            if left := unread(arguments, options.estimator):
                log.info("estimator=%s does not read %s", options.estimator, " and ".join(left))
            log.info("law %s: %s", self.fingerprint, ", ".join(f"{key}={value}" for key, value in self.law.items()))

    # ------------------------------------------------------------ what this law is

    @cached_property
    def law(self) -> dict[str, str]:
        """Everything that defines a number, in words."""
        parts = {**self.denoiser.describe(), **self.estimator.describe(), **self.text.describe()}
        return {key: str(value) for key, value in {**parts, "version": LAW_VERSION}.items()}

    @property
    def fingerprint(self) -> str:
        """The law as a short digest."""
        return fingerprint.digest(self.law)

    def get_model_info(self) -> dict[str, Any]:
        """For the results JSON: the law, its fingerprint, and what it cost, on all ranks."""
        from lm_eval_duel.cost import Cost, versions

        total = Cost(ranks=0)
        for account in self.accounts or [self.account()]:
            total.merge(account)
        law, denoiser = self.law, self.denoiser
        return {
            "fingerprint": self.fingerprint,
            "law": law,
            "duel": {
                "pretrained": self.options.pretrained or BUNDLED,
                "estimator": self.estimator.name,
                "rule": law.get("rule"),
                "block": self.estimator.block,
                "family": denoiser.family,
                "attention": denoiser.attention,
                "dtype": law.get("dtype"),
                "weights": law.get("weights"),
                "bos": self.text.bos,
                "row_capacity": self.text.capacity,
                "device": str(denoiser.device),
                "versions": versions(),
                "trace": str(self.trace.path) if self.trace else None,
                **total.describe(),
            },
        }

    def account(self) -> Cost:
        """What this rank computed and what it cost."""
        from lm_eval_duel.cost import peak_memory

        sums = dataclasses.asdict(self.estimator.counts)
        sums |= {name: getattr(self.text, name) for name in ("cut_contexts", "merged_borders")}
        return dataclasses.replace(
            self.cost, counts=sums | self.cost.counts, peak_memory=peak_memory(self.denoiser.device)
        )

    def set_cache_hook(self, cache_hook: CacheHook) -> None:
        """Take the harness's response cache, unless it was written under another law (it keys on the text only)."""
        store = cache_hook.dbdict
        if store is not None:
            keep_apart_in_caches()
            stored = store.get(CACHE_KEY)
            if stored is None and len(store):
                raise DuelError(
                    "The --use_cache file holds answers of another model (it has no law of duel-mdm). "
                    "Name another file, or delete this one."
                )
            if stored is not None and stored != self.law:
                changed = "; ".join(fingerprint.differences(self.law, stored))
                raise DuelError(
                    f"The --use_cache file was written under another law ({fingerprint.digest(stored)}, this run is "
                    f"{self.fingerprint}): {changed}. Name another file, or delete this one."
                )
            if len(store) > 1 and (self.trace or self.options.estimator in LATTICE):
                log.warning(
                    "answers found in the --use_cache file are not computed again: they are in no trace of this run, "
                    "and its results hold no other figures (config.duel.tasks) of them"
                )
            store[CACHE_KEY] = self.law
        super().set_cache_hook(cache_hook)

    def _open_trace(self) -> Writer | None:
        """The trace asked for; raises DuelError where there is one of another law."""
        if self.options.trace is None:
            return None
        from lm_eval_duel.trace import Writer

        name = self.options.tokenizer or self.options.pretrained or BUNDLED
        header = {"fingerprint": self.fingerprint, "law": self.law, "tokenizer": name}
        header["rules"] = [str(rule) for rule in getattr(self.estimator, "rules", ())]  # that a lattice reads off
        return Writer(self.options.trace, header, self.rank, self.world_size)

    # ------------------------------------------------------------ what the harness asks about text

    @property
    def eot_token_id(self) -> int | None:
        return self.text.end

    @property
    def prefix_token_id(self) -> int | None:
        return self.text.start

    @property
    def max_length(self) -> int:
        """Positions in a row, framing tokens included."""
        return self.denoiser.max_length

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """The ids of a text alone; framing tokens are added to windows, not to texts."""
        return self.text.encode(string, bool(add_special_tokens))

    # ------------------------------------------------------------ requests

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
                counted = request.doc.get(TOKENS) if isinstance(request.doc, dict) else None
                windows.append(self.text.windows(text, counted))
        return self._score("loglikelihood_rolling", requests, windows, _total, disable_tqdm)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        raise NotImplementedError(
            "duel-mdm does not generate inside the harness yet: tasks with generate_until cannot run. "
            "From Python, lm_eval_duel.duel.Duel.sample and .decode generate under the rule that is scored."
        )

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
            parts = [found[r][part] for part in range(len(windows[r]))]
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

        blank, began = self.estimator.counts.blank_starts, time.perf_counter()
        with bar:
            for r, parts in enumerate(windows):
                if not parts:
                    complete(r)
            try:
                self.estimator.log_prob([window for parts in windows for window in parts], done)
            except DuelError as error:
                if error.window is not None:
                    error.args = (f"{_name(requests[owner[error.window][0]])}: {error}",)
                raise
            finally:
                self.cost.seconds += time.perf_counter() - began
        if blank := self.estimator.counts.blank_starts - blank:
            log.info(
                "%d blocks started with nothing in view: all cells tie exactly, the lowest position goes first", blank
            )
        return answers

    def _write_trace(self, request: Instance, windows: list[Window], parts: list[Scored]) -> None:
        if self.trace is None:
            return
        from lm_eval_duel.trace import record

        place = {"task": request.task_name, "doc": request.doc_id, "request": request.idx}
        self.trace.write(
            {**place, "window": n, **record(window, scored, self.estimator)}
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
