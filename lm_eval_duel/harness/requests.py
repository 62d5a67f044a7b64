"""The harness's requests: the distinct ones of a call, their names, and the windows of their texts."""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from lm_eval_duel.audit.verify import OTHER_TEXTS
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.vocabulary import added_tokens
from lm_eval_duel.errors import DuelError, naming
from lm_eval_duel.tasks.data import TOKENS
from lm_eval_duel.text.annotated import Gap, document_of
from lm_eval_duel.text.text import TextEncoder

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

log = logging.getLogger("lm_eval.duel_mdm")  # lm-eval prints its own loggers only


class Batch(NamedTuple):
    """The distinct requests of one call. The harness repeats some, so that all ranks have the same number."""

    requests: list[Instance]
    repeats: list[int]  # of each distinct request: how many repeats of it came before
    sources: list[int]  # of each request of the call: the index of the distinct one

    @classmethod
    def from_requests(cls, requests: Sequence[Instance]) -> Batch:
        """Find the distinct requests.

        A task with `repeats` asks for the same object that many times, each with its own answer. Further copies pad a
        rank's share to the size of the largest one: they get the answer of the last repeat.
        """
        batch = cls([], [], [])
        indices_of: dict[Any, list[int]] = {}  # by identity: the distinct request of each repeat
        times_seen: Counter[int] = Counter()
        for request in requests:
            indices = indices_of.setdefault(_identity(request), [])
            last_repeat = (request.repeats or 1) - 1
            repeat = min(times_seen[id(request)], last_repeat)
            times_seen[id(request)] += 1
            if repeat == len(indices):  # not seen yet
                indices.append(len(batch.requests))
                batch.requests.append(request)
                batch.repeats.append(repeat)
            batch.sources.append(indices[repeat])
        return batch

    def spread(self, answers: Sequence[Any]) -> list[Any]:
        """An answer for each request of the call."""
        return [answers[index] for index in self.sources]


def _identity(request: Instance) -> Any:
    """A value that is equal for requests with the same answer in the same task."""
    was_made_by_a_task = request.task_name is not None and request.doc_id is not None
    if not was_made_by_a_task:  # nothing says what it is
        return id(request)
    return request.task_name, request.doc_id, request.idx, repr(request.args)


def noun(kind: str) -> str:
    """The word for a request of a kind: a whole text is a document, as in results and reports."""
    return "document" if kind == "loglikelihood_rolling" else f"{kind} request"


def name(request: Instance) -> str:
    """The name of a request for users, who do not know the texts that `audit` adds."""
    if request.task_name == OTHER_TEXTS:
        return "A text of the batch (scored beside those that are audited)"
    document = document_of(request)
    if document != request.doc_id:
        return str(document)
    if request.request_type == "loglikelihood_rolling":
        return f"Document {request.doc_id} of task {request.task_name}"
    return f"Request of task {request.task_name}, document {request.doc_id}"


def make_request(
    kind: str, doc: dict[str, Any], arguments: tuple[Any, ...], task: str, number: int, repeats: int = 1
) -> Instance:
    """A request for document `number` of a task."""
    from lm_eval.api.instance import Instance

    return Instance(kind, doc, arguments, idx=0, metadata=(task, number, repeats))


def random_order(requests: Sequence[Instance], seed: int) -> list[int]:
    """The indices of requests in an order that depends on `seed` and on each request alone."""
    keys = []
    for n, request in enumerate(requests):
        text = f"{seed} {request.task_name} {request.args}"
        keys.append((hashlib.sha256(text.encode()).digest(), n))
    return [n for _, n in sorted(keys)]


# ---------------------------------------------------------------- windows


def continuation_windows(text: TextEncoder, requests: Sequence[Instance]) -> tuple[list[list[Window]], Counter[str]]:
    """The window of each (context, continuation), and how many contexts of each task were truncated, with a warning."""
    merged_before = text.merged_borders
    has_gaps = any(isinstance(request.args[1], Gap) for request in requests)
    windows = []
    cut: Counter[str] = Counter()
    for request in requests:
        cut_before = text.cut_contexts
        with naming(name(request)):
            windows.append([text.pair(*request.args)])
        if text.cut_contexts > cut_before:
            cut[str(request.task_name)] += 1

    if cut:
        log.warning(
            "%d of %d contexts were longer than max_length=%d and truncated from the left%s%s",
            cut.total(),
            len(windows),
            text.denoiser.max_length,
            " (the text after a gap: from the right)" if has_gaps else "",
            _of_tasks(cut, requests),
        )
    merged = text.merged_borders - merged_before
    if merged:
        log.warning(
            "%d of %d continuations share a token with their context%s in the joint encoding and were encoded alone",
            merged,
            len(windows),
            " or with the text after the gap" if has_gaps else "",
        )
    return windows, cut


def _of_tasks(cut: Counter[str], requests: Iterable[Instance]) -> str:
    """The number of contexts of each task that were truncated, for a message; empty if all requests are of one task."""
    if len({request.task_name for request in requests}) == 1:
        return ""
    listed = ", ".join(f"{count} of {task}" for task, count in cut.items())
    return f": {listed}"


def difference_from_hf(text: TextEncoder, kind: str, windows: Sequence[Sequence[Window]], bos_is_chosen: bool) -> str:
    """A sentence on how an autoregressive network's numbers differ from those of `--model hf`; empty if they do not.

    `windows`: of each request of this kind. Special tokens that the user has chosen are not questioned.
    """
    if text.denoiser.attention != "causal":
        return ""
    if kind == "loglikelihood_rolling" and text.scheme != "harness" and any(len(parts) > 1 for parts in windows):
        return "texts longer than a row are not cut where --model hf cuts them; for its numbers pass windows=harness"
    if bos_is_chosen:
        return ""
    added = tokenizer_adds(text.tokenizer)
    if kind == "loglikelihood_rolling":
        if added and text.prefix:
            return "--model hf would also score the BOS that this tokenizer adds, unless it gets add_bos_token=False"
    elif text.prefix and not added:
        return (
            f"each context begins with a BOS (bos={text.bos}), which this tokenizer does not add under --model hf; for "
            "its numbers pass bos=none"
        )
    return ""


def tokenizer_adds(tokenizer: Any) -> bool:
    """True if a tokenizer adds special tokens to a text of its own accord."""
    try:
        before, after = added_tokens(tokenizer)
    except DuelError:  # no text shows it
        return False
    return bool(before or after)


def document_windows(text: TextEncoder, requests: Sequence[Instance]) -> list[list[Window]]:
    """The windows of each whole text; raises DuelError if its task counted other tokens than are scored."""
    windows = []
    for request in requests:
        (document,) = request.args
        counted = request.doc.get(TOKENS) if isinstance(request.doc, dict) else None
        with naming(name(request)):
            windows.append(text.windows(document, counted))

    note = text.note_on_blocks(itertools.chain(*windows))
    if note:
        log.info("%s", note)
    return windows
