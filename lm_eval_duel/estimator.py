"""What all estimators share: windows in, one result each out, in any order, equal windows once.

    estimator     which lanes                                        how nats combine
    duel, exact   every block of every window (duel.py)              sum over picks
    lattice       every block x every set of its hidden cells        max, mixture or mean over orders (lattice.py)
    elbo          every span x random hidden sets                    weighted sum (elbo.py)

Shapes: N windows, L row length, R lanes, W block width.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, NamedTuple

import torch

from lm_eval_duel import rules
from lm_eval_duel.budget import Budget, plan
from lm_eval_duel.denoisers.base import Denoiser, View
from lm_eval_duel.denoisers.predictions import Predictions
from lm_eval_duel.lanes import Lanes, Rows, blocks, groups
from lm_eval_duel.law import check_windows, resolve_block, resolve_grid
from lm_eval_duel.ledger import Books, Counts, Scored
from lm_eval_duel.reveal import RevealLoop
from lm_eval_duel.windows import Window

OnDone = Callable[[int, Scored], None]  # the window's index, its result


class Value(NamedTuple):
    """One figure of a window under one estimator."""

    nats: float
    stderr: float | None = None  # Monte Carlo error, nats
    nfe: int | None = None  # rule steps


@dataclasses.dataclass(frozen=True)
class Opened:
    """One group of windows with the truth known: every block starts from a known state."""

    windows: list[Window]
    numbers: list[int]  # of the windows, among all that are scored
    rows: Rows
    view: View

    def truth(self, lanes: Lanes) -> torch.Tensor:
        """The true tokens of each cell, (R, W)."""
        ids = self.rows.ids
        return ids[lanes.row[:, None], lanes.columns.clamp(max=ids.shape[1] - 1)]  # (R, W)

    def true_tokens(self, predictions: Predictions, lanes: Lanes, pick: torch.Tensor) -> torch.Tensor:
        """What a token is when a text is scored, (R, W); -1 where nothing is picked."""
        return torch.where(pick, self.truth(lanes), -1)

    def fresh(self, places: list[tuple[int, int, int]]) -> Lanes:
        """Fresh lanes at (row, first column, width)."""
        return fresh(self.rows, places)

    def hide(self, lanes: Lanes, hidden: torch.Tensor) -> Lanes:
        """Fresh lanes with `hidden` (R, W) of their cells still hidden and the truth at the others."""
        tokens = torch.where(lanes.hidden & ~hidden, self.truth(lanes), lanes.tokens)  # (R, W)
        return dataclasses.replace(lanes, hidden=hidden, tokens=tokens)


class Estimator(abc.ABC):
    """A denoiser, a block and a way to combine nats.

    `batch_size`: rows of max_length in a network call (more where they are shorter); None: on a CPU 2048 tokens or one
    row, on a GPU what fits, by trial; at most `max_batch_size`; halved where memory ends all the same. Neither changes
    a number beyond float noise. `traced`: results carry confidence, margin and entropy of each token, too.
    """

    name: str  # as in estimator=
    decodes: bool = False  # `is_greedy` says what decoding would write
    nothing: ClassVar[Scored] = Scored(0.0, True, (), (), 0, 0, 0)  # the result of an empty target

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

    def log_prob(self, windows: Sequence[Window], on_done: OnDone | None = None, keep: bool = True) -> list[Scored]:
        """The nats of each window, in order; `on_done(index, result)` as each finishes.

        Equal windows are scored once, and so are equal rows of different ones. `keep=False`: results go to `on_done`
        alone, and the list is empty.
        """
        return self._score(windows, self._score_group, on_done, keep)

    @abc.abstractmethod
    def describe(self) -> dict[str, object]:
        """What of this estimator defines a number, for the law."""

    @abc.abstractmethod
    def values(self, scored: Scored) -> dict[str, Value]:
        """All that one result says, by name; the first is its `log_prob`."""

    def blocks(self, window: Window) -> list[tuple[int, int]]:
        """(first column, width) of each block of a window."""
        return blocks(len(window.context), len(window.target), self.block, self.grid)

    @abc.abstractmethod
    def _score_group(self, opened: Opened, emit: OnDone) -> None:
        """Score one group of windows; `emit(row, result)` for each."""

    def _score(
        self,
        windows: Sequence[Window],
        score: Callable[[Opened, OnDone], None],
        on_done: OnDone | None = None,
        keep: bool = True,
    ) -> list[Scored]:
        check_windows(self.denoiser, self.block, self.grid, windows)
        same: dict[Window, list[int]] = {}  # equal windows are scored once
        for n, window in enumerate(windows):
            same.setdefault(window, []).append(n)
        results = [self.nothing] * len(windows) if keep else []

        def emit(n: int, scored: Scored) -> None:
            for one in same[windows[n]]:
                if keep:
                    results[one] = scored
                if on_done:
                    on_done(one, scored)

        unique = [numbers[0] for numbers in same.values()]
        for n in unique:
            if not windows[n].target:
                emit(n, self.nothing)
        for part in self._groups([windows[n] for n in unique]):
            numbers = [unique[n] for n in part]
            opened = self._open([windows[n] for n in numbers], numbers)

            def done(row: int, scored: Scored, opened: Opened = opened) -> None:
                self.counts.add(scored, len(opened.windows[row].target))
                emit(opened.numbers[row], scored)

            score(opened, done)
        return results

    def _open(self, windows: list[Window], numbers: list[int]) -> Opened:
        rows = Rows.of(windows, self.denoiser.device)
        return Opened(windows, numbers, rows, self.denoiser.open(rows))

    def _evaluate(self, opened: Opened, states: Iterator[Lanes], books: Books, emit: OnDone) -> None:
        """Evaluate `states` once each, all of their hidden cells, entered in `books`."""
        self._loop(
            opened.view,
            books,
            All(),
            states,
            opened.true_tokens,
            lambda lanes: None,
            emit,
            opened.numbers,
            foreseen=True,
        )

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
