"""The base class of estimators: windows in, and a score for each as it is finished. Equal windows are evaluated once.

    for index, score in estimator.stream(windows): ...

    estimator    lanes                                        how log-probabilities combine
    duel, ar     every block of every window (duel.py)        sum over picks
    lattice      every set of masked positions of every block     max, mixture or mean over orders (lattice.py)
    elbo         random sets of masked positions of every span    weighted sum (elbo.py)

Shapes: N windows, L row length, R lanes, W block width.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import ClassVar, NamedTuple, Protocol, TypeAlias

import torch

from lm_eval_duel import rules
from lm_eval_duel.core.budget import Budget, plan
from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.core.lanes import Lanes, Queue, Rows, blocks, groups
from lm_eval_duel.core.predictions import Predictions
from lm_eval_duel.core.reveal import RevealLoop
from lm_eval_duel.core.scores import Accumulator, Counts, WindowScore
from lm_eval_duel.core.tokens import Targets
from lm_eval_duel.core.view import View
from lm_eval_duel.core.windows import Window
from lm_eval_duel.estimators.checks import check_windows, resolve_block, resolve_grid
from lm_eval_duel.estimators.phases import Cost
from lm_eval_duel.estimators.registry import ESTIMATORS

BUCKET = 8  # network calls that the windows of one bucket fill, if windows are taken in the order given

IndexedScores: TypeAlias = Iterator[tuple[int, WindowScore]]  # (index, score) of each window as it is finished
BlockSpan: TypeAlias = tuple[int, int, int]  # (row, first column, width) of a block


class Ranks(Protocol):
    """The processes of a run, as one of them sees them."""

    @property
    def rank(self) -> int:
        """The number of this process."""

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The vectors (X,) of all ranks, concatenated."""


class Value(NamedTuple):
    """One value of a window under one estimator."""

    log_prob: float
    stderr: float | None = None  # Monte Carlo standard error, nats
    nfe: int | None = None  # rule steps
    phases: tuple[float, ...] | None = None  # of a two-phase estimate, as in `phases.Phases`


@dataclasses.dataclass(frozen=True)
class WindowGroup:
    """Windows that are scored together. Their targets are known, so every block starts from a known state."""

    windows: list[Window]
    numbers: list[int]  # the index of each window among all that are scored
    rows: Rows
    view: View

    @cached_property
    def targets(self) -> Targets:
        return Targets(self.rows)

    def fresh(self, places: list[BlockSpan]) -> Lanes:
        """Fresh lanes at (row, first column, width)."""
        return fresh(self.rows, places)


class Estimator(abc.ABC):
    """A denoiser, a block, and a way to combine log-probabilities.

    `batch_size`: rows of max_length in a network call (more if rows are shorter). None: on a CPU 2048 tokens or one
    row; on a GPU as many as fit, found by trial, and at most `max_batch_size`. On out-of-memory the batch is halved.
    Neither argument changes a number beyond float noise. `traced`: scores carry the confidence, margin and entropy of
    each token, too.
    """

    name: str  # as in estimator=
    in_order: bool = False  # windows are taken in the order given, in buckets that fill a few network calls
    empty_score: ClassVar[WindowScore] = WindowScore(0.0, is_greedy=True, nfe=0, near_ties=0)  # of an empty target

    def __init__(
        self,
        denoiser: Denoiser,
        block: int | str | None = "auto",
        grid: str = "auto",
        batch_size: int | None = None,
        max_batch_size: int | None = None,
        traced: bool = False,
    ):
        self.denoiser, self.traced = denoiser, traced
        self.block = resolve_block(denoiser, block)
        self.grid = resolve_grid(denoiser, grid)
        self._loop = RevealLoop(denoiser, plan(denoiser, self.block, self.grid, batch_size, max_batch_size))

    @property
    def budget(self) -> Budget:
        """How much one network call may hold at present."""
        return self._loop.budget

    @budget.setter
    def budget(self, budget: Budget) -> None:
        self._loop.budget = budget

    @property
    def counts(self) -> Counts:
        """What this estimator has computed so far."""
        return self._loop.counts

    @counts.setter
    def counts(self, counts: Counts) -> None:
        """Share the counts of another estimator."""
        self._loop.counts = counts

    def use_single_rows(self) -> None:
        """Evaluate one row in each network call."""
        self._loop.budget = Budget(1, 1)

    @property
    def costs(self) -> dict[str, dict[str, float]]:
        """Forwards, rows and seconds of each phase; empty: there is one phase only."""
        return {}

    def take_costs(self) -> dict[str, dict[Window, Cost]]:
        """What each window has cost in each phase since the last call; empty: there is one phase only."""
        return {}

    @property
    def plans(self) -> bool:
        """Whether `plan` needs all windows of a run before the first one is scored."""
        return False

    def plan(  # noqa: B027 - most estimators have no plan
        self, tasks: Sequence[Sequence[Window]], ranks: Ranks | None = None, names: Sequence[str] = ()
    ) -> None:
        """Prepare for the windows of each task (a list of windows, by `names` in the log).

        With several `ranks`, every one calls this with the same tasks, each with its own windows.
        """

    def adopt(self, other: Estimator) -> None:  # noqa: B027
        """Take over the plan of an estimator of the same spec."""

    @property
    def decodes(self) -> bool:
        """Whether `is_greedy` says what decoding would write."""
        return self.name in ESTIMATORS and ESTIMATORS[self.name].decodes

    def log_prob(self, windows: Sequence[Window]) -> list[WindowScore]:
        """The score of each window, in order."""
        scores = dict(self.stream(windows))
        return [scores[n] for n in range(len(windows))]

    def stream(self, windows: Sequence[Window]) -> IndexedScores:
        """(index, score) of each window as it is finished, in any order.

        Equal windows are scored once, and so are equal rows of different windows.

        Raises:
            DuelError: a window cannot be scored; raised before any is, and the message names it.
        """
        return self._stream(windows, self._score_group)

    def check(self, windows: Sequence[Window]) -> None:
        """Raise DuelError, naming the window, for one that cannot be scored."""
        check_windows(self.denoiser, self.block, self.grid, windows)

    @abc.abstractmethod
    def describe(self) -> dict[str, object]:
        """The entries of the spec that define this estimator's numbers."""

    @abc.abstractmethod
    def values(self, scored: WindowScore) -> dict[str, Value]:
        """All values of one score, by name; the first is its `log_prob`."""

    def blocks(self, window: Window) -> list[tuple[int, int]]:
        """(first column, width) of each block of a window."""
        return blocks(len(window.context), len(window.target), self.block, self.grid)

    @abc.abstractmethod
    def _score_group(self, group: WindowGroup) -> IndexedScores:
        """Score one group of windows; (row, score) of each as it is finished."""

    def _stream(self, windows: Sequence[Window], score_group: Callable[[WindowGroup], IndexedScores]) -> IndexedScores:
        self.check(windows)
        return self._finished(windows, score_group)

    @torch.inference_mode()
    def _finished(
        self, windows: Sequence[Window], score_group: Callable[[WindowGroup], IndexedScores]
    ) -> IndexedScores:
        equal: dict[Window, list[int]] = {}
        for n, window in enumerate(windows):
            equal.setdefault(window, []).append(n)
        for window, indices in equal.items():
            if not window.target:
                yield from ((n, self.empty_score) for n in indices)
        unique = [indices[0] for indices in equal.values()]
        for group in self._groups([windows[n] for n in unique]):
            numbers = [unique[n] for n in group]
            opened = self._open([windows[n] for n in numbers], numbers)
            for row, score in score_group(opened):
                self.counts.add(score, len(opened.windows[row].target))
                yield from ((n, score) for n in equal[opened.windows[row]])

    def _open(self, windows: list[Window], numbers: list[int]) -> WindowGroup:
        rows = Rows.from_windows(windows, self.denoiser.device)
        return WindowGroup(windows, numbers, rows, self.denoiser.open(rows))

    def _evaluate(self, group: WindowGroup, states: Iterable[Lanes], results: Accumulator) -> IndexedScores:
        """Evaluate each of the `states` once, at all of its masked positions."""
        queue = Queue(states)
        for finished in self._loop.run(group.view, EvaluateAll(), queue, group.targets, results, group.numbers):
            yield from results.take(finished)

    def _groups(self, windows: Sequence[Window]) -> list[list[int]]:
        buckets = self._buckets(windows) if self.in_order else None
        return groups(windows, not self.denoiser.honours_padding, buckets)

    def _buckets(self, windows: Sequence[Window]) -> list[int]:
        """The bucket of each window: as many in a row as fill a few calls, so that sorting them saves the padding."""
        numbers, work = [], 0
        whole_rows = self.denoiser.attention == "bidirectional"
        for window in windows:
            numbers.append(work // (BUCKET * self.budget.tokens))
            work += self.lanes(window) * (window.length if whole_rows else self.denoiser.block or 1)
        return numbers

    def lanes(self, window: Window) -> int:
        """How many lanes of a window can be evaluated side by side."""
        return len(self.blocks(window))

    def _places(self, group: WindowGroup) -> list[BlockSpan]:
        """(row, first column, width) of every block."""
        return [(n, *place) for n, window in enumerate(group.windows) for place in self.blocks(window)]


def fresh(rows: Rows, places: list[BlockSpan]) -> Lanes:
    """Fresh lanes at (row, first column, width)."""
    return Lanes.fresh(rows, *torch.tensor(places, device=rows.ids.device).unbind(1))


@dataclasses.dataclass(frozen=True)
class EvaluateAll(rules.Rule):
    """Picks every masked position, for states that are evaluated once."""

    name: ClassVar[str] = "all"

    def __call__(self, predictions: Predictions, lanes: Lanes) -> rules.Decision:
        return rules.certain(lanes.masked)
