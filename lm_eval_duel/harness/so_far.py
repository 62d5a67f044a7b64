"""Perplexity of a task before all of it is scored: an estimate from a random sample of its documents.

The first n documents of a random order that are all finished are a simple random sample without replacement, whatever
their lengths. (Those that finish out of turn are left out: short ones do so early.) From log-likelihoods l and sizes t,

    rate = sum l / sum t,   stderr^2 = (1 - n / N) n / (n - 1) sum (l - rate t)^2 / (sum t)^2,   perplexity = exp(-rate)

with N documents in all: the ratio estimator and its error by the delta method (Cochran, Sampling Techniques, 1977,
section 6.11). So the interval is for the value that the finished run will print, not for other documents.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence

from scipy.special import stdtrit

from lm_eval_duel.core.rates import perplexity, ratio

FEWEST = 5  # documents for an interval


@dataclasses.dataclass
class Document:
    """The size of a document and, once it is finished, its log-likelihood."""

    task: str
    tokens: int
    log_prob: float | None = None


class SoFar:
    """The documents of one call, in the order in which they are taken; `str` is the text for a progress bar.

    `error_of`: the Monte Carlo error of a task's perplexity.
    """

    def __init__(self, documents: Iterable[Document], error_of: Callable[[str], float | None] = lambda task: None):
        self.error_of = error_of
        self.tasks: dict[str, list[Document]] = {}
        for document in documents:
            self.tasks.setdefault(document.task, []).append(document)

    def __str__(self) -> str:
        texts, interval = [], False
        for task, documents in self.tasks.items():
            if (estimated := estimate(documents)) is not None:
                value, low, high = estimated
                text = f"ppl {task} {value:.4g}" if len(self.tasks) > 1 else f"ppl {value:.4g}"
                if (error := self.error_of(task)) is not None:
                    text += f" +- {error:.2g}"
                if low is not None:
                    text, interval = f"{text} [{low:.4g}, {high:.4g}]", True
                texts.append(text)
        return ", ".join(texts) + (" (95 % interval of the final value)" if interval else "")


def estimate(documents: Sequence[Document]) -> tuple[float, float | None, float | None] | None:
    """The perplexity per token and its 95 % interval, None before the first document is finished.

    The interval is (None, None) for fewer than five documents, and when all are finished.
    """
    sample = list(itertools.takewhile(lambda document: document.log_prob is not None, documents))
    sizes = [document.tokens for document in sample]
    if not sum(sizes):
        return None
    rate, stderr = ratio([-document.log_prob for document in sample], sizes)
    if stderr is None or not FEWEST <= len(sample) < len(documents):
        return perplexity(rate), None, None
    reach = stdtrit(len(sample) - 1, 0.975) * stderr * math.sqrt(1 - len(sample) / len(documents))
    return perplexity(rate), perplexity(rate - reach), perplexity(rate + reach)
