"""Perplexity of a task before all of it is scored: an estimate from a random sample of its documents.

The first n documents of a random order that are all finished are a simple random sample without replacement, whatever
their lengths. (Documents that finish out of turn are left out: short ones do so early.) From log-likelihoods l and
sizes t,

    rate = sum l / sum t,   stderr^2 = (1 - n / N) n / (n - 1) sum (l - rate t)^2 / (sum t)^2,   perplexity = exp(-rate)

with N documents in all: the ratio estimator and its error by the delta method (Cochran, Sampling Techniques, 1977,
section 6.11). So the interval is for the value that the finished run will print, not for other documents.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile

from scipy.special import stdtrit

from lm_eval_duel.core.scores import perplexity, ratio
from lm_eval_duel.estimators.totals import Total

FEWEST = 5  # documents for an interval


class SoFar:
    """Estimates of the final values of one call; `str` is the text for a progress bar.

    `documents`: the (index, task, tokens) of each, in the order in which they are taken. `log_probs`: of the documents
    that are finished, by index. `totals`: of each task, with its Monte Carlo error.
    """

    def __init__(
        self,
        documents: Iterable[tuple[int, str, int]],
        log_probs: Mapping[int, float],
        totals: Mapping[str, Total],
    ):
        self.log_probs, self.totals = log_probs, totals
        self.tasks: dict[str, list[tuple[int, int]]] = {}  # (index, tokens)
        for n, task, tokens in documents:
            self.tasks.setdefault(task, []).append((n, tokens))

    def __str__(self) -> str:
        texts, interval = [], False
        for task, documents in self.tasks.items():
            finished = [*takewhile(lambda document: document[0] in self.log_probs, documents)]
            log_probs, tokens = [self.log_probs[n] for n, _ in finished], [size for _, size in finished]
            if (estimated := estimate(log_probs, tokens, len(documents))) is not None:
                value, low, high = estimated
                text = f"ppl {task} {value:.4g}" if len(self.tasks) > 1 else f"ppl {value:.4g}"
                if task in self.totals and (error := self.totals[task].perplexity_stderr) is not None:
                    text += f" ± {error:.2g}"
                if low is not None:
                    text, interval = f"{text} [{low:.4g}, {high:.4g}]", True
                elif len(finished) < len(documents):
                    text += f" over {len(finished)} of {len(documents)} documents"
                texts.append(text)
        return ", ".join(texts) + (" (95 % interval of the final value)" if interval else "")


def estimate(
    log_probs: Sequence[float], tokens: Sequence[int], documents: int
) -> tuple[float, float | None, float | None] | None:
    """The perplexity per token of `documents` documents from a sample of them, and its 95 % interval.

    None for a sample without tokens. The interval is (None, None) for fewer than five documents, and for all of them.
    """
    if not sum(tokens):
        return None
    rate, stderr = ratio([-log_prob for log_prob in log_probs], tokens)
    if stderr is None or not FEWEST <= len(tokens) < documents:
        return perplexity(rate), None, None
    reach = stdtrit(len(tokens) - 1, 0.975) * stderr * math.sqrt(1 - len(tokens) / documents)
    return perplexity(rate), perplexity(rate - reach), perplexity(rate + reach)
