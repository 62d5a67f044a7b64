"""Perplexity of a corpus before all of it is scored: an estimate from a random sample of its documents.

Documents are taken in a random order, which depends on their texts and on `draw_seed` alone. The first n of that order
that are all finished are a simple random sample without replacement, whatever their lengths. (Those that happened to
finish out of turn are left out: short documents finish early.) From the log-likelihoods l and sizes t of the sample,

    rate = sum l / sum t,   stderr^2 = (1 - n / N) n / (n - 1) sum (l - rate t)^2 / (sum t)^2,   perplexity = exp(-rate)

the ratio estimator and its standard error by the delta method, N documents in all. So the interval is for the value
that the run will print when it is finished, not for other documents of the kind. Several processes are strata, each
with a sample of its own documents: sums are weighted by N / n of each, and the variances of weighted sums add up
(Cochran, Sampling Techniques, 1977, section 6.11).
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lm_eval_duel.core.windows import Window
from lm_eval_duel.harness.cache import DOCUMENTS
from lm_eval_duel.harness.requests import arguments_of
from lm_eval_duel.rates import perplexity
from lm_eval_duel.tasks.columns import TOKENS
from lm_eval_duel.tasks.metrics import sizes

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

FEWEST = 5  # documents for an interval
Z = 1.959964  # the 97.5 % quantile of the normal distribution


@dataclasses.dataclass
class Document:
    """One document: the key of its answer in a response cache, if there is one, its sizes, its log-likelihood."""

    task: str
    doc: Any
    key: str
    tokens: int  # as the task counts them
    words: int | None  # None: not known
    bytes: int | None
    log_prob: float | None = None  # None: not finished

    @classmethod
    def from_request(cls, request: Instance, windows: Sequence[Window], key: str) -> Document:
        """A request for a whole text. Words and bytes are known if its task counts them in the text that is scored."""
        (text,), doc = arguments_of(request), request.doc if isinstance(request.doc, dict) else {}
        counts: tuple[int | None, int | None] = (None, None)
        if TOKENS in doc and "words" in doc:
            counts = doc["words"], doc["bytes"]
        elif doc.get("text") == text:
            counts = sizes(text)
        tokens = doc.get(TOKENS, sum(len(window.target) for window in windows))
        return cls(str(request.task_name), request.doc_id, key, tokens, *counts)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A perplexity from `sample` of `documents` documents; `low` and `high`: its 95 % interval, or None."""

    perplexity: float
    low: float | None
    high: float | None
    sample: int
    documents: int

    def __str__(self) -> str:
        return self.words()

    def words(self, stderr: float | None = None) -> str:
        """With the Monte Carlo error, and with the interval unless all documents are finished."""
        error = "" if stderr is None else f" +- {stderr:.2g}"
        interval = "" if self.low == self.high else f" [{_digits(self.low)}, {_digits(self.high)}]"
        return f"{_digits(self.perplexity)}{error}{interval}"


class SoFar:
    """The documents of the tasks of one call, in the order in which they are taken.

    `error_of`: the Monte Carlo error of a task's perplexity.
    """

    def __init__(self, documents: Iterable[Document], error_of: Callable[[str], float | None] = lambda task: None):
        self.error_of = error_of
        self.documents: dict[str, list[Document]] = {}
        for document in documents:
            self.documents.setdefault(document.task, []).append(document)

    def estimate(self, task: str, unit: str = "tokens") -> Estimate | None:
        """The perplexity of a task per `unit`; None if its first document is not finished, or a size is not known."""
        return estimate([self.documents[task]], unit)

    def __str__(self) -> str:
        """For a progress bar: the perplexity of each task per token."""
        several = len(self.documents) > 1
        parts = [(task, value) for task in self.documents if (value := self.estimate(task))]
        text = ", ".join(
            f"ppl {f'{task} ' if several else ''}{value.words(self.error_of(task))}" for task, value in parts
        )
        open_ended = any(value.low is not None and value.sample < value.documents for _, value in parts)
        return text + (" (95 % interval of the final value)" if open_ended else "")


def random_order(requests: Sequence[Instance], seed: int) -> list[int]:
    """The indices of requests in an order that depends on `seed` and on each request alone."""
    texts = [f"{seed} {request.task_name} {arguments_of(request)}" for request in requests]
    keys = [hashlib.sha256(text.encode()).digest() for text in texts]
    return sorted(range(len(requests)), key=lambda n: (keys[n], n))


def plain(documents: Iterable[Document], order: str) -> dict[str, Any]:
    """The order of documents, for a response cache."""
    fields = [field.name for field in dataclasses.fields(Document) if field.name != "log_prob"]
    return {"order": order, "documents": [tuple(getattr(document, name) for name in fields) for document in documents]}


def estimate(strata: Sequence[Sequence[Document]], unit: str = "tokens") -> Estimate | None:
    """The perplexity per `unit` from the documents of each process, in their order.

    None if a process has no document finished, or if a size is not known.
    """
    strata = [documents for documents in strata if documents]
    samples = [_sample(documents) for documents in strata]
    if any(len(sample) < 2 < len(documents) for sample, documents in zip(samples, strata, strict=True)):
        samples, strata = [list(itertools.chain(*samples))], [list(itertools.chain(*strata))]
    if not all(samples) or any(getattr(document, unit) is None for document in itertools.chain(*strata)):
        return None
    pairs = [[(document.log_prob, getattr(document, unit)) for document in sample] for sample in samples]
    weights = [len(documents) / len(sample) for documents, sample in zip(strata, samples, strict=True)]
    total = math.fsum(weight * size for weight, sample in zip(weights, pairs, strict=True) for _, size in sample)
    if not total:
        return None
    log_prob = math.fsum(weight * part for weight, sample in zip(weights, pairs, strict=True) for part, _ in sample)
    rate, count, everything = log_prob / total, sum(map(len, samples)), sum(map(len, strata))
    low = high = None
    if count == everything:
        low = high = perplexity(-rate)
    elif count >= FEWEST and math.isfinite(rate):
        variance = sum(_variance(sample, weight, rate) for weight, sample in zip(weights, pairs, strict=True))
        reach = _student(count - len(samples)) * math.sqrt(variance) / total
        low, high = perplexity(-rate - reach), perplexity(reach - rate)
    return Estimate(perplexity(-rate), low, high, count, everything)


def _sample(documents: Sequence[Document]) -> list[Document]:
    """The first documents that are all finished."""
    return list(itertools.takewhile(lambda document: document.log_prob is not None, documents))


def _variance(sample: Sequence[tuple[float, int]], weight: float, rate: float) -> float:
    """The variance of the weighted sum of a sample's residuals; `weight`: documents over those in the sample."""
    residuals = [log_prob - rate * size for log_prob, size in sample]
    count, mean = len(residuals), math.fsum(residuals) / len(residuals)
    if count < 2:
        return 0.0
    spread = math.fsum((residual - mean) ** 2 for residual in residuals) / (count - 1)
    return weight**2 * (1 - 1 / weight) * count * spread


def _student(freedom: int) -> float:
    """The 97.5 % quantile of Student's t, by its expansion in 1 / freedom (within 1 % from 4 degrees of freedom on)."""
    first = (Z**3 + Z) / 4
    second = (5 * Z**5 + 16 * Z**3 + 3 * Z) / 96
    third = (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / 384
    return Z + first / freedom + second / freedom**2 + third / freedom**3


def _digits(number: float | None) -> str:
    return "inf" if number is None or number == math.inf else f"{number:.4g}" if number < 10_000 else f"{number:.3g}"


def read(records: Iterable[Mapping[str, Any]]) -> tuple[str, list[list[Document]]]:
    """The order, and the documents of each process, from the contents of response caches.

    A document that two files hold, because the run was resumed with another number of processes, is of the first.
    """
    answers: dict[str, Any] = {}
    for contents in records:
        answers |= contents
    order, strata, seen = "random", [], set()
    for contents in records:
        for key, record in contents.items():
            if not key.startswith(DOCUMENTS) or not isinstance(record, dict):
                continue
            order, documents = record["order"], [Document(*fields) for fields in record["documents"]]
            strata.append([document for document in documents if (document.task, document.doc) not in seen])
            seen |= {(document.task, document.doc) for document in documents}
    for document in itertools.chain(*strata):
        answer = answers.get(document.key)
        document.log_prob = answer[0] if isinstance(answer, tuple) else None
    return order, strata
