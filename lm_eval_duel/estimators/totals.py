"""Sums of the scores of windows: over a document, and over documents, tasks and ranks.

A document of several windows is finished when the last of them is scored; equal windows share one Monte Carlo error.
The sums behind a two-phase estimate are of blocks, and add up over windows as well.

Shapes: B blocks of a window.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from lm_eval_duel.core import scores as rates
from lm_eval_duel.core.scores import BlockSums, IndexedScores, Score, Value, known_sum
from lm_eval_duel.core.windows import Window
from lm_eval_duel.errors import naming
from lm_eval_duel.estimators.registry import MonteCarlo

if TYPE_CHECKING:
    import torch


FEW = 8  # drawn blocks: with fewer there is no standard error
FAIR = 30  # drawn blocks: with fewer the standard error is itself uncertain
NOTHING = Value(0.0)  # the sum over no window


@dataclasses.dataclass(slots=True)
class Total:
    """The sum of one value over windows, and of their other values in `others`.

    Equal windows have equal draws, so they share one Monte Carlo error, wherever they come from, and their drawn blocks
    count once.
    """

    name: str = ""  # of the value, as in estimator= or a rule
    summed: Value = NOTHING  # without its error, which `stderr` gives
    windows: int = 0
    filled: int = 0  # windows with scored tokens
    tokens: int = 0  # that are scored
    is_greedy: bool = True  # in all windows
    nfe: int | None = 0  # rule steps; None: more than one order
    near_ties: int | None = 0  # None: the rule does not know
    blocks: BlockSums | None = None  # of a two-phase estimate
    others: dict[str, Total] | None = None
    # by the hash of a window: how often it occurs, its Monte Carlo error, its drawn blocks
    errors: dict[int, tuple[int, float, int]] | None = None
    # sums over windows of log_prob^2, of log_prob x tokens, and of tokens^2
    squares: tuple[float, float, float] = (0.0, 0.0, 0.0)

    @classmethod
    def from_scores(
        cls,
        windows: Sequence[Window],
        scores: Sequence[Score],
        name: str,
    ) -> Total:
        """The sum over the windows of a document; `name`: that of the estimator."""
        total = cls()
        for window, score in zip(windows, scores, strict=True):
            total.merge(cls.from_score(window, score, name))
        return total

    @classmethod
    def from_score(cls, window: Window, score: Score, name: str) -> Total:
        """The score of one window."""
        tokens = window.scored_tokens
        error = score.stderr
        drawn = 0
        if score.blocks is not None:
            error = score.blocks.error  # known however few blocks were drawn, unlike `stderr`
        if isinstance(score.blocks, TwoPhaseBlocks):
            drawn = score.blocks.drawn
        others = {}
        for key, other in score.others.items():
            others[key] = cls.from_score(window, other, key)
        return cls(
            name=name,
            summed=score.value.with_nats(score.log_prob),
            windows=1,
            filled=int(tokens > 0),
            tokens=tokens,
            is_greedy=score.is_greedy,
            nfe=score.nfe,
            near_ties=score.near_ties,
            blocks=score.blocks,
            others=others or None,
            errors=None if error is None else {hash(window): (1, error, drawn)},
            squares=(score.log_prob**2, score.log_prob * tokens, float(tokens**2)),
        )

    @classmethod
    def from_parts(cls, parts: Iterable[Total]) -> Total:
        """The sum of several totals of the same value."""
        total = cls()
        for part in parts:
            total.merge(part)
        return total

    def merge(self, other: Total) -> None:
        """Add another total of the same value. What is not known of one of them is not known of the sum."""
        if not other.windows:
            return
        if self.windows:
            self.summed += other.summed
        else:
            self._begin(other)
        self.windows += other.windows
        self.filled += other.filled
        self.tokens += other.tokens
        self.is_greedy &= other.is_greedy
        self.nfe = known_sum(self.nfe, other.nfe)
        self.near_ties = known_sum(self.near_ties, other.near_ties)
        if self.blocks is None or other.blocks is None:
            self.blocks = None
        else:
            self.blocks = self.blocks + other.blocks
        squared, mixed, tokens_squared = (a + b for a, b in zip(self.squares, other.squares, strict=True))
        self.squares = squared, mixed, tokens_squared
        if self.others and other.others:
            for name, total in other.others.items():
                self.others[name].merge(total)
        self._merge_errors(other)

    def _begin(self, first: Total) -> None:
        """Take the name and the log-probability of `first`, and begin the sums that it has. `merge` adds the rest."""
        self.name = first.name
        self.summed = first.summed
        self.blocks = None if first.blocks is None else type(first.blocks)()
        self.others = None if first.others is None else {name: Total() for name in first.others}
        self.errors = None if first.errors is None else {}

    def _merge_errors(self, other: Total) -> None:
        """Add the windows of another total to those whose errors are known.

        Equal windows have the same drawn blocks, which count once.
        """
        if self.errors is None or other.errors is None:
            self.errors = None
            return
        copies = 0  # drawn blocks that have been counted twice
        for window, (count, error, drawn) in other.errors.items():
            before = 0
            if window in self.errors:
                before, _, _ = self.errors[window]
                copies += drawn
            self.errors[window] = (before + count, error, drawn)
        if copies and isinstance(self.blocks, TwoPhaseBlocks):
            self.blocks = dataclasses.replace(self.blocks, drawn=self.blocks.drawn - copies)

    @property
    def named(self) -> dict[str, Total]:
        """All values by name, this one first; empty without windows."""
        if not self.windows:
            return {}
        return {self.name: self, **(self.others or {})}

    @property
    def value(self) -> Value:
        """The sum and what it is worth."""
        return dataclasses.replace(self.summed, error=self.stderr)

    @property
    def log_prob(self) -> float:
        """The sum in nats."""
        return self.summed.nats

    @property
    def stderr(self) -> float | None:
        """The Monte Carlo error of `log_prob`, nats.

        None: nothing is drawn, or the error is not known, for example because too few blocks of a two-phase estimate
        were drawn.
        """
        if self.summed.seeds:
            return Value.from_seeds(self.summed.seeds).error
        too_few_blocks = self.blocks is not None and self.blocks.stderr is None
        if self.errors is None or too_few_blocks:
            return None
        # different windows have independent draws, and equal ones the same
        return math.hypot(*(count * error for count, error, _ in self.errors.values()))

    @property
    def window_stderr(self) -> float | None:
        """The standard error of `log_prob` over windows, as a ratio to tokens: how much other such windows would vary.

        sqrt(n / (n - 1) sum over windows of (log_prob - rate tokens)^2), rate = log_prob / tokens, of the n windows
        with tokens: an empty one says nothing about others. None for fewer than two of them, and for an infinite sum.
        """
        if self.filled < 2 or not math.isfinite(self.log_prob):
            return None
        rate = self.log_prob / self.tokens
        squared, mixed, tokens_squared = self.squares
        spread = squared - 2 * rate * mixed + rate**2 * tokens_squared
        return math.sqrt(max(0.0, spread) * self.filled / (self.filled - 1))

    @property
    def perplexity(self) -> float:
        """The perplexity per token; NaN without tokens."""
        if not self.tokens:
            return math.nan
        return rates.perplexity(-self.log_prob / self.tokens)

    @property
    def perplexity_stderr(self) -> float | None:
        """The Monte Carlo error of `perplexity` (delta method); None as for `stderr`, and without tokens."""
        error = self.stderr
        if error is None or not self.tokens:
            return None
        return self.perplexity * error / self.tokens

    def describe(self) -> dict[str, Any]:
        """The entries of the results JSON: the value, its error over windows, steps, windows and blocks."""
        entries = self.value.describe()
        entries["window_stderr"] = self.window_stderr
        entries["nfe"] = self.nfe
        entries["windows"] = self.windows
        if self.blocks is not None:
            entries[self.blocks.name] = self.blocks.describe()
        return entries

    def summary(self, monte_carlo: MonteCarlo | None = None) -> str:
        """The value in a log line, with its error and what it is; `monte_carlo`: of an estimate."""
        value = self.value
        nats = f"{self.log_prob:.2f}"
        per_token = f"{self.perplexity:.2f}"
        remarks = [value.label]
        if value.error is not None:
            nats += f" ± {value.error:.2f}"
            per_token += f" ± {self.perplexity_stderr:.2f}"
        elif monte_carlo is not None:
            least = f"{monte_carlo.least} or more {monte_carlo.units}"
            remarks.append(f"{monte_carlo.error} error not known: it takes {least}")
        if self.blocks is not None:
            remarks.append(self.blocks.summary)
        return f"{nats} nats, perplexity {per_token} per token ({'; '.join(remarks)})"


@dataclasses.dataclass(frozen=True)
class TwoPhaseBlocks(BlockSums):
    """The blocks of a two-phase estimate. f and g are the log-probs of a block without and with the cache, in nats.

    `sampled` counts the blocks that have both, and `drawn` those of them with a weight above 1, which stand for others.
    """

    name: ClassVar[str] = "two_phase"
    count: int = 0
    sampled: int = 0
    drawn: int = 0
    variance: float = 0.0  # unbiased estimate of the variance of the log-prob
    sum_g: float = 0.0  # over all blocks
    f: float = 0.0  # these five over the sampled blocks
    g: float = 0.0
    ff: float = 0.0
    gg: float = 0.0
    fg: float = 0.0
    # of each block of a single window; a sum over windows has none
    cached: tuple[float, ...] = ()  # g
    weights: tuple[float, ...] = ()  # 0: not sampled
    uncached: tuple[float, ...] = ()  # f of the sampled blocks

    @classmethod
    def from_blocks(cls, g: torch.Tensor, f: torch.Tensor, weight: torch.Tensor, variance: float) -> TwoPhaseBlocks:
        """The sums over the blocks of a window, from g, f and the weight of each, (B,)."""
        sampled_f = f[weight > 0]  # (b,)
        sampled_g = g[weight > 0]  # (b,)
        return cls(
            count=len(g),
            sampled=len(sampled_f),
            drawn=int((weight > 1).sum()),
            variance=variance,
            sum_g=float(g.sum()),
            f=float(sampled_f.sum()),
            g=float(sampled_g.sum()),
            ff=float(sampled_f @ sampled_f),
            gg=float(sampled_g @ sampled_g),
            fg=float(sampled_f @ sampled_g),
            cached=tuple(g.tolist()),
            weights=tuple(weight.tolist()),
            uncached=tuple(sampled_f.tolist()),
        )

    def __add__(self, other: TwoPhaseBlocks) -> TwoPhaseBlocks:
        return dataclasses.replace(super().__add__(other), cached=(), weights=(), uncached=())

    @property
    def error(self) -> float:
        return math.sqrt(self.variance)

    @property
    def stderr(self) -> float | None:
        """The sampling standard error, nats; None: too few blocks were drawn. 0 if each stands for itself alone."""
        nothing_is_drawn = self.sampled == self.count and self.drawn == 0
        return self.error if self.drawn >= FEW or nothing_is_drawn else None

    @property
    def correlation(self) -> float | None:
        """The correlation of f and g over the sampled blocks."""
        n = self.sampled
        spread = (n * self.ff - self.f**2) * (n * self.gg - self.g**2)
        return (n * self.fg - self.f * self.g) / math.sqrt(spread) if n > 2 and spread > 0 else None

    def describe(self) -> dict[str, Any]:
        return {
            "blocks": self.count,
            "sampled_blocks": self.sampled,
            "cached_log_prob": self.sum_g,
            "correlation": self.correlation,
        }

    @property
    def summary(self) -> str:
        text = f"{self.sampled:,} of {self.count:,} blocks also without the cache"
        if self.correlation is not None:
            text += f", correlation {self.correlation:.4f}"
        if self.stderr is not None and FEW <= self.drawn < FAIR:
            text += f"; the standard error of {self.drawn} drawn blocks is uncertain itself: raise the sample"
        return text


class Unfinished:
    """Documents of several windows while they are scored.

    Args:
        documents: The windows of each document, by its index.
        saved: Scores of windows that need not be scored again.
    """

    def __init__(
        self,
        documents: Mapping[int, Sequence[Window]],
        saved: Mapping[Window, Score] = MappingProxyType({}),
    ):
        self.documents = documents
        self.scores: dict[int, dict[int, Score]] = {}  # of each document that is not complete, by place
        self.saved: list[Window] = []  # windows that have a score already
        self.missing: list[tuple[int, int]] = []  # (document, place) of each window without a score
        for n, windows in documents.items():
            self.scores[n] = {}
            for place, window in enumerate(windows):
                if window in saved:
                    self.scores[n][place] = saved[window]
                    self.saved.append(window)
                else:
                    self.missing.append((n, place))

    def complete(self) -> Iterator[tuple[int, list[Score]]]:
        """(index, scores) of each document that misses no window."""
        complete = [n for n, scores in self.scores.items() if len(scores) == len(self.documents[n])]
        for n in complete:
            yield n, self._take(n)

    def add(self, n: int, place: int, score: Score) -> list[Score] | None:
        """Add the score of a window. Returns the scores of its document, in order, if it was the last one."""
        self.scores[n][place] = score
        if len(self.scores[n]) < len(self.documents[n]):
            return None
        return self._take(n)

    def _take(self, n: int) -> list[Score]:
        scores = self.scores.pop(n)
        return [scores[place] for place in range(len(scores))]


def score_documents(
    documents: Sequence[Sequence[Window]],
    stream: Callable[[Sequence[Window]], IndexedScores],
    name: Callable[[int], str] = "Document {}".format,
) -> Iterator[tuple[int, list[Score]]]:
    """(index, scores of its windows) of each document, in any order, as the last of its windows is scored.

    Args:
        documents: The windows of each document.
        stream: A function that scores windows, such as `Estimator.stream`.
        name: The name of a document in error messages, by its index.

    Raises:
        DuelError: If a window cannot be scored; the message names its document.
    """
    unfinished = Unfinished(dict(enumerate(documents)))
    yield from unfinished.complete()  # those without windows
    missing = unfinished.missing

    def name_of_document(index: int) -> str:
        n, _ = missing[index]
        return name(n)

    with naming(name_of_document):
        for index, score in stream([documents[n][place] for n, place in missing]):
            n, place = missing[index]
            scores = unfinished.add(n, place, score)
            if scores is not None:
                yield n, scores
