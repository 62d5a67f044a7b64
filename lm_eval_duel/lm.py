"""`duel-mdm`: the model that lm-evaluation-harness sees. Text in, nats out, in request order.

requests -> windows -> Duel -> nats per window -> added up per request
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import inspect
import json
import logging
import math
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from lm_eval_duel import fingerprint, rules
from lm_eval_duel.errors import DuelError
from lm_eval_duel.options import BUNDLED, TOKENS, Options
from lm_eval_duel.ranks import Ranked
from lm_eval_duel.windows import Window, conditional, independent, target_capacity

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import CacheHook

    from lm_eval_duel.duel import Scored

log = logging.getLogger("lm_eval.duel_mdm")  # the harness shows its own loggers only

LAW_VERSION = 1  # raised when a release changes a number for the same arguments
CACHE_KEY = "lm_eval_duel law"


class DuelMDM(Ranked):
    """Exact likelihood of a masked diffusion model under a deterministic unmasking rule.

    Takes the model args of `Options`; raises DuelError for a wrong one before the checkpoint is read.
    """

    def __init__(self, **arguments: Any):
        super().__init__()
        self.options = options = Options.parse(arguments)
        from lm_eval_duel import denoisers  # transformers is imported once the arguments are known to be good
        from lm_eval_duel.duel import Duel

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
        self.duel = Duel(self.denoiser, options.rule, options.block, options.grid, options.rows, options.max_batch_size)
        self.bos, self.prefix, self.suffix = self._framing()
        self.cut_contexts = self.merged_borders = 0
        if self.rank == 0:
            log.info("law %s: %s", self.fingerprint, ", ".join(f"{key}={value}" for key, value in self.law.items()))

    # ------------------------------------------------------------ what this law is

    @cached_property
    def law(self) -> dict[str, str]:
        """Everything that defines a number, in words."""
        rule = self.duel.rule
        law = {
            **self.denoiser.describe(),
            "rule": rule,
            "block": self.duel.block,
            "grid": self.duel.grid,
            "estimator": "duel",
            "windows": self.options.windows,
            "max_length": self.denoiser.max_length,
            "framing": f"{self.prefix} text {self.suffix}, bos={self.bos}"
            + (
                f", windows after {self.prefix_token_id}"
                if self.options.windows == "harness" and not self.prefix
                else ""
            ),
            "tokenizer": _tokenizer_hash(self.tokenizer),
            "version": LAW_VERSION,
        }
        if type(rule) not in rules.RULES.values():
            law["rule_code"] = fingerprint.hash_files([inspect.getfile(type(rule))])
        return {key: str(value) for key, value in law.items()}

    @property
    def fingerprint(self) -> str:
        """The law as a short digest."""
        return fingerprint.digest(self.law)

    def get_model_info(self) -> dict[str, Any]:
        """For the results JSON: the law, its fingerprint, and what it cost on this rank."""
        return {
            "fingerprint": self.fingerprint,
            "law": self.law,
            "duel": {
                **dataclasses.asdict(self.duel.counts),
                "cut_contexts": self.cut_contexts,
                "merged_borders": self.merged_borders,
            },
        }

    def set_cache_hook(self, cache_hook: CacheHook) -> None:
        """Take the harness's response cache, unless it was written under another law (it keys on the text only)."""
        store = cache_hook.dbdict
        if store is not None:
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
            store[CACHE_KEY] = self.law
        super().set_cache_hook(cache_hook)

    # ------------------------------------------------------------ text

    def _framing(self) -> tuple[str, list[int], list[int]]:
        """The convention of framing, and the ids before and after a text.

        A masked LM has its tokenizer's ([CLS] text [SEP]); any other network one BOS, where its family has one.
        """
        prefix, suffix = framing(self.tokenizer)
        suffix = suffix if self.denoiser.closes else []
        bos = self.denoiser.bos
        if bos == "auto":
            bos = "given" if prefix or suffix else "none"
        if bos == "none":
            return bos, [], []
        if not (prefix or suffix):
            start = self.tokenizer.bos_token_id if self.tokenizer.bos_token_id is not None else self.eot_token_id
            if start is None:
                raise DuelError(f"bos={bos} needs a BOS (or EOS) token and this tokenizer has none; use bos=none.")
            prefix = [start]
        return bos, prefix, suffix

    @property
    def eot_token_id(self) -> int | None:
        for token in (self.tokenizer.eos_token_id, self.tokenizer.sep_token_id, self.tokenizer.bos_token_id):
            if token is not None:
                return token
        return None

    @property
    def max_length(self) -> int:
        """Positions in a row, framing tokens included."""
        return self.denoiser.max_length

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """The ids of a text alone; framing tokens are added to windows, not to texts."""
        return self.tokenizer(string, add_special_tokens=bool(add_special_tokens), verbose=False)["input_ids"]

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """The ids of a context and of what continues it, as the harness cuts them: the whole text is encoded, and the
        context's trailing spaces belong to the continuation.

        Where a merge crosses the border, so that the whole does not begin with the context's ids, the continuation is
        encoded by itself: the ids that are scored are those of the continuation, as the tokenizer writes it alone.
        """
        if not continuation:
            return self.tok_encode(context), []
        kept = context.rstrip()
        continuation = context[len(kept) :] + continuation
        before, whole = self.tok_encode(kept) if kept else [], self.tok_encode(kept + continuation)
        if whole[: len(before)] == before and len(whole) > len(before):
            return before, whole[len(before) :]
        self.merged_borders += 1
        if not (alone := self.tok_encode(continuation)):
            raise DuelError(f"The continuation {continuation!r} has no tokens in this tokenizer, so it has no score.")
        return before, alone

    def _scorable(self, ids: list[int]) -> list[int]:
        """The ids of a text; raises DuelError where they hold the mask token."""
        if self.denoiser.mask_id in ids:
            raise DuelError(
                f"the text holds the mask token {self.tokenizer.decode([self.denoiser.mask_id])!r}, which a masked "
                "diffusion model cannot score or be given. Remove it from the text."
            )
        return ids

    # ------------------------------------------------------------ requests

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """log p(continuation | context) in nats, and whether `decode` under the same rule would write it.

        An empty context leaves the framing tokens alone in view; an empty continuation is (0.0, True). A context too
        long for the row is cut from the left, a continuation too long is an error.
        """
        if self.bos in ("scored", "official"):
            raise DuelError(
                f"bos={self.bos} scores the row from its first position on, so it has no place for a context: use it "
                "for whole texts (loglikelihood_rolling), and bos=given or none for tasks with a context."
            )
        windows, cut, merged = [], 0, self.merged_borders
        for request in requests:
            with _naming(request):
                context, target = map(self._scorable, self._encode_pair(*request.args))
                window, lost = conditional(context, target, self.max_length, self.prefix, self.suffix)
            windows.append([window])
            cut += lost > 0
        self.cut_contexts += cut
        if cut:
            log.warning(
                "%d of %d contexts were longer than max_length=%d and cut from the left",
                cut,
                len(requests),
                self.max_length,
            )
        if merged := self.merged_borders - merged:
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
        windows = [conditional(c, t, self.max_length, self.prefix, self.suffix)[0] for _, c, t in requests]
        return [(scored.log_prob, scored.is_greedy) for scored in self.duel.log_prob(windows)]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """log p of whole texts in nats, each token in exactly one window; an empty text is 0.0."""
        windows = []
        for request in requests:
            with _naming(request):
                ids = self._scorable(self.tok_encode(*request.args))
                counted = request.doc.get(TOKENS) if isinstance(request.doc, dict) else None
                if counted is not None and counted != len(ids):
                    raise DuelError(
                        f"the task counted {counted} tokens but this model's tokenizer has {len(ids)}: token "
                        "perplexity would be wrong. Name the tokenizer: --metadata tokenizer=<folder or hub name>."
                    )
                windows.append(self._document(ids))
        return self._score("loglikelihood_rolling", requests, windows, _total, disable_tqdm)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        raise NotImplementedError(
            "duel-mdm does not generate inside the harness yet: tasks with generate_until cannot run. "
            "From Python, lm_eval_duel.duel.Duel.sample and .decode generate under the rule that is scored."
        )

    def _document(self, ids: list[int]) -> list[Window]:
        """A text's windows, by the `windows` option."""
        if self.options.windows == "independent":
            windows = independent(ids, self.max_length, self.prefix, self.suffix, self.bos)
            return [self._without_unseen(window) for window in windows]
        start = self.prefix[-1] if self.prefix else self.prefix_token_id  # the harness's rolling windows have one
        if start is None:
            raise DuelError("windows=harness starts with a prefix token and this tokenizer has none; use independent.")
        capacity = target_capacity(self.max_length, [start], self.suffix)
        pairs = map(make_disjoint_window, get_rolling_token_windows(ids, start, capacity, context_len=1))
        return [Window(tuple(context), tuple(target), tuple(self.suffix)) for context, target in pairs]

    def _without_unseen(self, window: Window) -> Window:
        """A window without the suffix that no block of a block-causal network sees (after the last block's border)."""
        unseen = self.denoiser.attention == "block_causal" and len(window.target) % self.duel.block == 0
        return dataclasses.replace(window, suffix=()) if window.suffix and not window.context and unseen else window

    def _score(
        self,
        kind: str,
        requests: list[Instance],
        windows: list[list[Window]],
        combine: Callable[[list[Scored]], Any],
        disable_tqdm: bool,
    ) -> list[Any]:
        """The answer of each request from its windows' results.

        A request's answer goes to the response cache as soon as its last window is done.
        """
        owner = [r for r, parts in enumerate(windows) for _ in parts]  # the request of each window
        found: list[list[Scored]] = [[] for _ in windows]
        answers = [None if parts else combine([]) for parts in windows]
        bar = tqdm(
            total=sum(len(window.target) for parts in windows for window in parts),
            desc=f"{kind} {self.duel.rule}",
            unit="tok",
            disable=disable_tqdm or self.rank != 0,
        )

        def done(n: int, scored: Scored) -> None:
            r = owner[n]
            found[r].append(scored)
            bar.update(len(scored.nats))
            if len(found[r]) == len(windows[r]):
                answers[r] = combine(found[r])
                self.cache_hook.add_partial(kind, requests[r].args, answers[r])

        blank = self.duel.counts.blank_starts
        with bar:
            try:
                self.duel.log_prob([window for parts in windows for window in parts], done)
            except DuelError as error:
                if error.window is not None:
                    error.args = (f"{_name(requests[owner[error.window]])}: {error}",)
                raise
        if blank := self.duel.counts.blank_starts - blank:
            log.info(
                "%d blocks started with nothing in view: all cells tie exactly, the lowest position goes first", blank
            )
        return answers


def _total(parts: list[Scored]) -> float:
    return math.fsum(scored.log_prob for scored in parts)


def _both(parts: list[Scored]) -> tuple[float, bool]:
    return _total(parts), all(scored.is_greedy for scored in parts)


def framing(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The ids that a tokenizer puts before and after a text, such as [CLS] and [SEP]."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    framed = tokenizer("a", add_special_tokens=True)["input_ids"]
    for start in range(len(framed) - len(plain) + 1):
        if framed[start : start + len(plain)] == plain:
            return framed[:start], framed[start + len(plain) :]
    return [], []


def _tokenizer_hash(tokenizer: Any) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


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
