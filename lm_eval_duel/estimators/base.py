"""The base class of estimators: windows in, a score for each as it is finished.

    for index, score in estimator.stream(windows): ...

    estimator    lanes                                            how log-probabilities combine
    duel, ar     every block of every window (duel.py)            sum over picks
    lattice      every set of masked positions of every block     max, mixture or mean over orders (lattice.py)
    elbo         random draws of every span                       weighted mean (elbo.py)

Equal windows are evaluated once.

Shapes: N windows, L row length, R lanes, W block width.
"""

from __future__ import annotations

import abc
import contextlib
import copy
import importlib
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, ClassVar, TypeVar

import torch

from lm_eval_duel.core.batch_size import Budget, plan
from lm_eval_duel.core.decision import UnmaskingRule
from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.core.lanes import Lanes, Rows, blocks, groups
from lm_eval_duel.core.reveal import Accumulator, BlockSpan, Reveal, WindowGroup
from lm_eval_duel.core.row_checks import RowChecks
from lm_eval_duel.core.scores import Counts, IndexedScores, Score, Value
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers import self_tests
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators import registry
from lm_eval_duel.estimators.checks import check_windows, require_masks, resolve_block, resolve_grid
from lm_eval_duel.rules import PARAMETERS, presets, repeat_last

log = logging.getLogger("lm_eval.duel_mdm")

Self = TypeVar("Self", bound="Estimator")

# If windows are taken in the order given, the first few are evaluated alone, in calls that are a quarter full, so that
# a first document is finished early. A step of all lanes that would fill n calls then takes up to n + 0.75. On a CPU
# the time of a call grows with its tokens (for a small network, 512 tokens take 25 % of the time of 2,048), so this
# costs less than 1 %. On a GPU a small call may take as long as a full one, so it is done only from n = 32 on, where it
# costs at most 2.4 %.
FIRST_CALL = 0.25
MANY = 32
BUCKET = 8  # the most network calls that the windows of a later bucket fill


class Estimator(abc.ABC):
    """A denoiser, a block, and a way to combine log-probabilities. Subclasses implement `score_group`.

    Args:
        denoiser: A network, from `load`.
        block: The number of positions that are finished before the next ones begin. None: the whole target. "auto": the
            trained or published block, else 32.
        grid: Where blocks start counting: "target", "row", or "auto" ("row" for block-causal networks).
        batch_size: Rows of max_length in one network call, more if rows are shorter. None: 2048 tokens or one row on a
            CPU; on a GPU as many as fit, found by trial. On out-of-memory the batch is halved. A `Budget`: that of
            another estimator, which the two then share. Changes no number beyond float noise.
        max_batch_size: The most rows of max_length that the trial takes.
        traced: Add the confidence, margin and entropy of each token to the scores.

    Raises:
        DuelError: If the network does not support the estimator, the block or the grid.
    """

    name: str  # as in estimator=
    decodes: ClassVar[bool] = False  # `is_greedy` says what decoding would write
    takes_known: ClassVar[bool] = False  # whether windows may have known target positions
    takes_noise: ClassVar[str] = "no"  # networks whose noise is random tokens: "no", "only" or "both"
    noise_seed: int = 0  # of the noise at masked positions, if it is random tokens
    empty_score: Score = Score(0.0, is_greedy=True, nfe=0, near_ties=0)  # of an empty target

    def __init__(
        self,
        denoiser: Denoiser,
        block: int | str | None,
        grid: str = "auto",
        batch_size: int | Budget | None = None,
        max_batch_size: int | None = None,
        traced: bool = False,
    ):
        if self.takes_noise == "no":
            require_masks(denoiser, self.name)
        self.denoiser = denoiser
        self.traced = traced
        self.block = resolve_block(denoiser, block)
        self.grid = resolve_grid(denoiser, grid)
        self.budget = plan(denoiser, self.block, self.grid, batch_size, max_batch_size)  # of one network call
        self_tests.cover(denoiser, self.budget.tokens)
        self.counts = Counts()  # of what has been computed
        self.row_checks = RowChecks()

    @staticmethod
    def from_options(denoiser: Denoiser, options: registry.Options, **sizes: Any) -> Estimator:
        """The estimator that the options name. Raises DuelError if there is none of its kind for this network.

        `sizes`: batch_size, max_batch_size and traced, to override the options.
        """
        presets.require_fit(options.preset_as_given, denoiser.family, denoiser.block is not None)
        entry = registry.find(options.estimator)
        module, name = entry.target.split(":")
        constructor = getattr(importlib.import_module(module), name)
        taken = {key: getattr(options, key) for key in entry.takes}
        if entry.arguments:
            taken["arguments"] = options.estimator_args
        layout = {
            "grid": options.grid,
            "batch_size": options.rows,
            "max_batch_size": options.max_batch_size,
            "traced": options.trace is not None,
        }
        estimator: Estimator = constructor(denoiser, **taken, **layout | sizes)
        return estimator

    def describe(self) -> dict[str, object]:
        """The entries of the spec that define this estimator's numbers."""
        return {"estimator": self.name, "block": self.block, "grid": self.grid}

    @cached_property
    def value_template(self) -> Value:
        """The kind of this estimator's values and the note on them, as a `Value` whose nats are not known."""
        return registry.value_template(self.name, self.describe())

    def ignored_args(self, given: Collection[str]) -> list[str]:
        """The model args given that change nothing under this estimator and network."""
        entry = registry.find(self.name)
        ignored = {*entry.ignored_args}
        if "rule" in ignored:
            ignored |= PARAMETERS - {*entry.arguments}
        if self.denoiser.attention != "block_causal":
            ignored.add("last_block")
        if self.block is None:
            ignored.add("grid")  # it says where blocks begin to count, and there is one
        if "draw_seed" not in self.describe():
            ignored.add("draw_seed")
        noise = self.denoiser.noise_training
        if noise is not None and noise.self_conditioning == "none":  # other values than "none" and "auto" are refused
            ignored.add("self_conditioning")
        return [key for key in given if key in ignored]

    def name_ignored_args(self, given: Collection[str]) -> None:
        """Log the arguments that change nothing, so that no one takes them for a part of the result."""
        ignored = self.ignored_args(given)
        if not ignored:
            return
        about = ""
        if "block" in ignored and "elbo_block" in registry.find(self.name).arguments:
            about += "; elbo_block=N masks in blocks of N"
        if "draw_seed" in ignored:
            about += "; draw_seed only seeds texts that tasks generate, verify=N and order=random"
        listed = " and ".join(ignored)
        log.warning("estimator=%s does not read %s: the value is the same without%s", self.name, listed, about)

    @abc.abstractmethod
    def score_group(self, group: WindowGroup) -> IndexedScores:
        """Score one group of windows; yield (row, score) of each as it is finished."""

    def reveal(
        self,
        group: WindowGroup,
        rule: UnmaskingRule,
        lanes: Iterable[Lanes],
        scores: Accumulator,
        **sampling: Any,
    ) -> IndexedScores:
        """(row, score) of each window of a group as it is finished; `sampling`: other arguments of `Reveal`.

        At the end a user's rule is asked for its last decision again.
        """
        yield from Reveal(group, rule, lanes, scores, self.budget, self.counts, self.row_checks, **sampling)
        repeat_last(rule)

    def use_single_rows(self) -> None:
        """Evaluate one row in each network call."""
        self.budget = Budget(1, 1)

    # ------------------------------------------------------------ windows in, scores out

    def log_prob(self, windows: Sequence[Window]) -> list[Score]:
        """The score of each window, in order."""
        with self.one_run():
            scores = dict(self.stream(windows))
        return [scores[n] for n in range(len(windows))]

    def one_run(self) -> contextlib.AbstractContextManager[None]:
        """The context of a run that returns only when all is done, so that the network cannot change in between."""
        return self.row_checks.repeating(self.denoiser, self.counts)

    def with_counts(self: Self, counts: Counts, row_checks: RowChecks | None = None) -> Self:
        """The same estimator for another run, whose work is added to `counts`.

        `row_checks`: those of the run that this one is a part of. None: this run stands alone.
        """
        twin = copy.copy(self)
        twin.counts = counts
        twin.row_checks = RowChecks() if row_checks is None else row_checks
        return twin

    def stream(self, windows: Sequence[Window], in_order: bool = False) -> IndexedScores:
        """Yield (index, score) of each window as it is finished, in any order.

        `in_order`: take the windows in the order given, a few network calls at once, so that the first are finished
        early; by default the longest are first.

        Equal windows are scored once, and equal rows of different windows are evaluated once.

        Raises:
            DuelError: If a window cannot be scored; raised before any is, and the message names it.
        """
        self.check(windows)
        return self._scored(windows, in_order)

    def check(self, windows: Sequence[Window]) -> None:
        """Raise DuelError, naming the window, for one that cannot be scored."""
        check_windows(self.denoiser, self.block, self.grid, windows)
        for n, window in enumerate(windows):
            if window.known and not self.takes_known:
                raise DuelError(f"Window {n} has known target positions, which estimator={self.name} does not take.", n)

    @torch.inference_mode()
    def _scored(self, windows: Sequence[Window], in_order: bool) -> IndexedScores:
        equal: dict[Window, list[int]] = {}  # the indices of each different window
        for n, window in enumerate(windows):
            equal.setdefault(window, []).append(n)

        first_indices = []  # of equal windows, only the first is scored
        for window, indices in equal.items():
            if window.target:
                first_indices.append(indices[0])
            else:
                for n in indices:
                    yield n, self.empty_score

        for group in self.groups(windows, first_indices, in_order=in_order):
            for row, score in self.score_group(group):
                window = group.windows[row]
                self.counts.add(score, window.scored_tokens)
                for n in equal[window]:
                    yield n, score
        self.row_checks.compare(self.counts)  # the last ones that were chosen

    def groups(
        self,
        windows: Sequence[Window],
        window_indices: Sequence[int],
        generating: bool = False,
        in_order: bool = False,
    ) -> Iterator[WindowGroup]:
        """The windows at these indices, opened in groups; those with an empty target are left out."""
        chosen = [windows[n] for n in window_indices]
        buckets = [0] * len(chosen)
        stages = [slice(0, len(chosen))]
        if in_order:
            buckets = self._buckets(chosen)
            if self._takes_small_calls(chosen):
                # the first bucket is a group of its own, so that its calls are small
                in_first = buckets.count(0)
                stages = [slice(0, in_first), slice(in_first, len(chosen))]

        same_length = not self.denoiser.honours_padding
        for stage in stages:
            for part in groups(chosen[stage], same_length, buckets[stage]):
                members = [stage.start + n for n in part]
                indices = [window_indices[n] for n in members]
                yield self.open([chosen[n] for n in members], indices, generating)

    def open(self, windows: list[Window], window_indices: list[int], generating: bool = False) -> WindowGroup:
        """One group of windows; `window_indices`: of each among all that are scored."""
        rows = Rows.from_windows(windows, self.denoiser.device, self.noise_seed)
        return WindowGroup(windows, window_indices, rows, partial(self.denoiser.open, generating=generating))

    def _buckets(self, windows: Sequence[Window]) -> list[int]:
        """The bucket of each window. The first fills a quarter of a network call, so that it is finished early.

        Each of the next fills twice as much, up to `BUCKET` calls: sorting its windows by length saves padding.
        """
        numbers: list[int] = []
        bucket = 0
        work = 0
        calls = FIRST_CALL
        for window in windows:
            more = self._work(window)
            if work and work + more > calls * self.budget.tokens:
                bucket += 1
                work = 0
                calls = min(2 * calls, BUCKET)
            numbers.append(bucket)
            work += more
        return numbers

    def _takes_small_calls(self, windows: Sequence[Window]) -> bool:
        """True if the first calls may be small: on a CPU time goes by tokens, elsewhere if there are many others."""
        work = sum(map(self._work, windows))
        return self.denoiser.device.type == "cpu" or work > MANY * self.budget.tokens

    def _work(self, window: Window) -> int:
        """The network tokens of one step of all lanes of a window."""
        positions = self.denoiser.block or 1
        if self.denoiser.attention == "bidirectional":
            positions = window.length
        return self.lanes(window) * positions

    # ------------------------------------------------------------ for subclasses: blocks and lanes

    def blocks(self, window: Window) -> list[tuple[int, int]]:
        """(first column, width) of each block of a window that has a position to score."""
        spans = blocks(len(window.context), len(window.target), self.block, self.grid)
        if not window.known:
            return spans
        first = len(window.context)
        known = {first + index for index in window.known}  # columns
        scored = []
        for start, width in spans:
            target_columns = range(max(start, first), start + width)  # a first block may begin inside the context
            if not known.issuperset(target_columns):
                scored.append((start, width))
        return scored

    def block_spans(self, group: WindowGroup) -> list[BlockSpan]:
        """Every block of every window."""
        spans: list[BlockSpan] = []
        for row, window in enumerate(group.windows):
            spans += [(row, *span) for span in self.blocks(window)]
        return spans

    def batches(
        self,
        group: WindowGroup,
        spans: Sequence[BlockSpan],
        size: Callable[[int], int],
        rule: UnmaskingRule,
    ) -> Iterator[tuple[Lanes, int]]:
        """(lanes, room): fresh lanes of the next `size(room)` blocks, where `room` is how many fit a network call."""
        done = 0
        while done < len(spans):
            next_lane = group.fresh(spans[done : done + 1])
            room = self.budget.room(group.view, rule, next_lane)
            count = max(1, size(room))
            yield group.fresh(spans[done : done + count]), room
            done += count

    def block_numbers(self, lanes: Lanes) -> torch.Tensor:
        """The number of each lane's block in its window, (R,)."""
        if not self.block:
            return torch.zeros_like(lanes.row)
        # rounded up, so that a first block that begins inside the context has the number 0
        return -((lanes.origin - lanes.start) // self.block)

    def lanes(self, window: Window) -> int:
        """The number of lanes of a window that can be evaluated together."""
        return len(self.blocks(window))
