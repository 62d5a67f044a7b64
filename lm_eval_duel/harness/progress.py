"""The progress of requests while documents are scored, and estimates of the final values."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence

from scipy.special import stdtrit
from tqdm import tqdm

from lm_eval_duel.core.scores import Counts, perplexity, ratio
from lm_eval_duel.errors import counted
from lm_eval_duel.harness.requests import noun
from lm_eval_duel.harness.stats import TaskStats

FEWEST = 5  # documents for an interval
EVERY = 1.0  # seconds between two estimates in a progress bar


class RunningEstimate:
    """The perplexity of tasks before all of their documents are scored; `str` is the text for a progress bar.

    The first n documents of a random order that are all finished are a simple random sample without replacement,
    whatever their lengths. (Documents that finish out of turn are left out: short ones do so early.) From
    log-likelihoods l and sizes t,

        rate = sum l / sum t,   stderr^2 = (1 - n / N) n / (n - 1) sum (l - rate t)^2 / (sum t)^2,   exp(-rate)

    with N documents in all: the ratio estimator and its error by the delta method (Cochran, Sampling Techniques, 1977,
    section 6.11). So the interval is for the value that the finished run will print, not for other documents.

    Args:
        documents: The (index, task, tokens) of each, in the order in which they are taken.
        log_probs: The log-probabilities of the finished documents, by index.
        tasks: The statistics of each task, with its Monte Carlo error.
        is_of_rank: The documents are those of one rank of several.
        is_bound: The perplexities are upper bounds.
    """

    def __init__(
        self,
        documents: Iterable[tuple[int, str, int]],
        log_probs: Mapping[int, float],
        tasks: Mapping[str, TaskStats],
        is_of_rank: bool = False,
        is_bound: bool = False,
    ):
        self.is_of_rank = is_of_rank  # of several: its documents are a part of the run's
        self.sign = "≤ " if is_bound else ""
        self.log_probs = log_probs
        self.tasks = tasks
        self.documents: dict[str, list[tuple[int, int]]] = {}  # of each task: (index, tokens)
        for n, task, tokens in documents:
            self.documents.setdefault(task, []).append((n, tokens))

    def __str__(self) -> str:
        texts = []
        for task in self.documents:
            text = self._text_of_task(task)
            if text:
                texts.append(f"ppl {task} {text}" if len(self.documents) > 1 else f"ppl {text}")
        joined = ", ".join(texts)
        if joined and self.is_of_rank:
            joined += " of this rank"
        return f"{joined} (95 % interval of the final value)" if "[" in joined else joined

    def _text_of_task(self, task: str) -> str:
        """The estimate of one task; empty before its first document is finished."""
        documents = self.documents[task]
        log_probs = []
        sizes = []
        for n, tokens in documents:
            if n not in self.log_probs:  # later ones are no random sample
                break
            log_probs.append(self.log_probs[n])
            sizes.append(tokens)

        estimated = estimate(log_probs, sizes, len(documents))
        if estimated is None:
            return ""
        value, low, high = estimated
        text = f"{self.sign}{value:.4g}"
        error = self.tasks[task].total.perplexity_stderr if task in self.tasks else None
        if error is not None:
            text += f" ± {error:.2g}"
        if low is not None:
            text += f" [{low:.4g}, {high:.4g}]"
        elif len(sizes) < len(documents):
            text += f" over {len(sizes)} of {counted(len(documents), 'document')}"
        return text


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
    without_replacement = math.sqrt(1 - len(tokens) / documents)
    # Student's t: the error is estimated from few documents.
    reach = stdtrit(len(tokens) - 1, 0.975) * stderr * without_replacement
    return perplexity(rate), perplexity(rate - reach), perplexity(rate + reach)


class Progress:
    """The progress of one call: how many requests are `finished`, and how many `windows` of the others.

    The bar counts target tokens. Windows are scored side by side and finish late, so unfinished ones count in part: the
    steps that they have taken, divided by the steps per token of the finished windows. So the bar moves, and estimates
    the time left, with the work of the network.

    Args:
        kind: The kind of request.
        tokens: The number of target tokens of each request.
        remaining: The requests without an answer.
        counts: The counts that the estimator updates as it takes steps.
        title: Text that follows the kind.
        running: The estimate of the final values.
        hidden: Show no bar.
    """

    def __init__(
        self,
        kind: str,
        tokens: Sequence[int],
        remaining: Sequence[int],
        counts: Counts,
        title: str = "",
        running: RunningEstimate | None = None,
        hidden: bool = False,
    ):
        self.noun = noun(kind)
        self.requests = len(tokens)
        self.counts = counts
        self.running = running
        self.windows = 0
        self.finished = len(tokens) - len(remaining)
        self.tokens = 0  # of finished windows
        self.computed_tokens = 0  # of finished windows that this run computed
        self.computed_steps = 0
        self.steps_before = counts.lane_steps
        self.last_shown = -math.inf  # when estimates were computed last
        no_bar = {"disable": True} if hidden else {}  # tqdm reads TQDM_DISABLE only if `disable` is not passed
        total = sum(tokens[n] for n in remaining)
        self.bar = tqdm(total=total, desc=f"{self.noun}s{title}", unit="tok", smoothing=0, **no_bar)

    def add_saved(self, tokens: int) -> None:
        """One more window has a score already, which took no time."""
        self.windows += 1
        self.tokens += tokens
        if not self.bar.disable:  # a hidden bar has no rate
            self.bar.initial += tokens
        self.bar.update(tokens)

    def add_window(self, tokens: int, steps: int | None) -> None:
        """One more window is finished, in `steps` steps of its blocks; None: their number is not known."""
        self.windows += 1
        self.tokens += tokens
        self.computed_tokens += tokens
        self.computed_steps += steps or 0
        done = min(self.bar.total, self.tokens + self.unfinished)
        self.bar.update(max(0, done - self.bar.n))

    @property
    def unfinished(self) -> int:
        """The tokens that the work on unfinished windows stands for."""
        steps = self.counts.lane_steps - self.steps_before - self.computed_steps  # of unfinished windows
        if not self.computed_steps or steps <= 0:
            return 0
        return int(steps * self.computed_tokens / self.computed_steps)

    def finish_request(self, windows: int) -> None:
        """One more request, of `windows` windows, is finished."""
        self.finished += 1
        self.windows -= windows
        if self.running is None:
            return
        is_due = time.monotonic() - self.last_shown > EVERY or self.finished == self.requests
        if is_due:
            self.last_shown = time.monotonic()
            self.bar.set_postfix_str(str(self.running), refresh=False)

    def __str__(self) -> str:
        windows = f" and {counted(self.windows, 'window')} of unfinished ones" if self.windows else ""
        return f"{self.finished} of {counted(self.requests, self.noun)}{windows}"
