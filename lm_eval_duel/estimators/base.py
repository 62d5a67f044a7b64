"""What all estimators share: windows in, one score each out, as it is finished; equal windows are evaluated once.

    for index, score in estimator.stream(windows): ...

    estimator     which lanes                                        how log-probabilities combine
    duel, exact   every block of every window (duel.py)              sum over picks
    lattice       every block x every set of its hidden cells        max, mixture or mean over orders (lattice.py)
    elbo          every span x random hidden sets                    weighted sum (elbo.py)

Shapes: N windows, L row length, R lanes, W block width.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import ClassVar, NamedTuple

import torch

from lm_eval_duel import rules
from lm_eval_duel.denoisers.base import Denoiser
from lm_eval_duel.denoisers.predictions import Predictions
from lm_eval_duel.denoisers.views import View
from lm_eval_duel.engine.budget import Budget, plan
from lm_eval_duel.engine.choose import Targets
from lm_eval_duel.engine.lanes import Lanes, Queue, Rows, blocks, groups
from lm_eval_duel.engine.results import Accumulator, Counts, WindowScore
from lm_eval_duel.engine.reveal import RevealLoop
from lm_eval_duel.engine.windows import Window
from lm_eval_duel.estimators.checks import check_windows, resolve_block, resolve_grid

Finished = Iterator[tuple[int, WindowScore]]  # (index, score) of each window as it is finished


class Value(NamedTuple):
    """One figure of a window under one estimator."""

    log_prob: float
    stderr: float | None = None  # Monte Carlo error, nats
    nfe: int | None = None  # rule steps


@dataclasses.dataclass(frozen=True)
class Opened:
    """One group of windows with the truth known: every block starts from a known state."""

    windows: list[Window]
    numbers: list[int]  # of the windows, among all that are scored
    rows: Rows
    view: View

    @cached_property
    def targets(self) -> Targets:
        return Targets(self.rows)

    def fresh(self, places: list[tuple[int, int, int]]) -> Lanes:
        """Fresh lanes at (row, first column, width)."""
        return fresh(self.rows, places)


class Estimator(abc.ABC):
    """A denoiser, a block and a way to combine nats.

    `batch_size`: rows of max_length in a network call (more where they are shorter); None: on a CPU 2048 tokens or one
    row, on a GPU what fits, by trial; at most `max_batch_size`; halved where memory ends all the same. Neither changes
    a number beyond float noise. `traced`: results carry confidence, margin and entropy of each token, too.
    """

    name: str  # as in estimator=
    decodes: bool = False  # `is_greedy` says what decoding would write
    nothing: ClassVar[WindowScore] = WindowScore(
        0.0, is_greedy=True, nfe=0, near_ties=0
    )  # the score of an empty target

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
        """What one network call may hold now."""
        return self._loop.budget

    @property
    def counts(self) -> Counts:
        """What has been computed so far."""
        return self._loop.counts

    @counts.setter
    def counts(self, counts: Counts) -> None:
        """Count together with another estimator."""
        self._loop.counts = counts

    def one_by_one(self) -> None:
        """Every network call holds one row."""
        self._loop.budget = Budget(1, 1)

    def log_prob(self, windows: Sequence[Window]) -> list[WindowScore]:
        """The score of each window, in order."""
        scores = dict(self.stream(windows))
        return [scores[n] for n in range(len(windows))]

    def stream(self, windows: Sequence[Window]) -> Finished:
        """(index, score) of each window as it is finished, in any order.

        Equal windows are scored once, and so are equal rows of different ones. Raises DuelError at once, naming the
        window, for one that cannot be scored.
        """
        return self._stream(windows, self._score_group)

    @abc.abstractmethod
    def describe(self) -> dict[str, object]:
        """What of this estimator defines a number, for the spec."""

    @abc.abstractmethod
    def values(self, scored: WindowScore) -> dict[str, Value]:
        """All that one result says, by name; the first is its `log_prob`."""

    def blocks(self, window: Window) -> list[tuple[int, int]]:
        """(first column, width) of each block of a window."""
        return blocks(len(window.context), len(window.target), self.block, self.grid)

    @abc.abstractmethod
    def _score_group(self, opened: Opened) -> Finished:
        """Score one group of windows; (row, score) of each as it is finished."""

    def _stream(self, windows: Sequence[Window], score_group: Callable[[Opened], Finished]) -> Finished:
        check_windows(self.denoiser, self.block, self.grid, windows)
        return self._finished(windows, score_group)

    @torch.inference_mode()
    def _finished(self, windows: Sequence[Window], score_group: Callable[[Opened], Finished]) -> Finished:
        equal: dict[Window, list[int]] = {}
        for n, window in enumerate(windows):
            equal.setdefault(window, []).append(n)
        for window, indices in equal.items():
            if not window.target:
                yield from ((n, self.nothing) for n in indices)
        unique = [indices[0] for indices in equal.values()]
        for group in self._groups([windows[n] for n in unique]):
            numbers = [unique[n] for n in group]
            opened = self._open([windows[n] for n in numbers], numbers)
            for row, scored in score_group(opened):
                self.counts.add(scored, len(opened.windows[row].target))
                yield from ((n, scored) for n in equal[opened.windows[row]])

    def _open(self, windows: list[Window], numbers: list[int]) -> Opened:
        rows = Rows.of(windows, self.denoiser.device)
        return Opened(windows, numbers, rows, self.denoiser.open(rows))

    def _evaluate(self, opened: Opened, states: Iterable[Lanes], results: Accumulator) -> Finished:
        """Evaluate `states` once each, all of their hidden cells."""
        queue = Queue(states)
        for finished in self._loop.run(opened.view, All(), queue, opened.targets, results, opened.numbers):
            yield from results.take(finished)

    def _groups(self, windows: Sequence[Window]) -> list[list[int]]:
        return groups(windows, same_length=not self.denoiser.honours_padding)

    def _places(self, opened: Opened) -> list[tuple[int, int, int]]:
        """(row, first column, width) of every block."""
        return [(n, *place) for n, window in enumerate(opened.windows) for place in self.blocks(window)]


def fresh(rows: Rows, places: list[tuple[int, int, int]]) -> Lanes:
    """Fresh lanes at (row, first column, width)."""
    return Lanes.fresh(rows, *torch.tensor(places, device=rows.ids.device).unbind(1))


@dataclasses.dataclass(frozen=True)
class All(rules.Rule):
    """Everything hidden: a state that is evaluated once."""

    name: ClassVar[str] = "all"

    def __call__(self, predictions: Predictions, lanes: Lanes) -> rules.Decision:
        return rules.certain(lanes.hidden)
