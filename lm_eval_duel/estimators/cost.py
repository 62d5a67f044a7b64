"""The cost of scoring windows, by one formula for each way to score them, without running it.

Equal windows count once. Equal rows of different windows all count, though a call evaluates them once.
Padding does not count.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import NamedTuple, TypeAlias

from lm_eval_duel.core.block_causal import CLEAN, STRETCH, clean_group
from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.core.lanes import blocks
from lm_eval_duel.core.windows import Window
from lm_eval_duel.estimators.base import Estimator
from lm_eval_duel.estimators.duel import Autoregressive, DuelEstimator
from lm_eval_duel.estimators.elbo import Elbo
from lm_eval_duel.estimators.lattice import Lattice
from lm_eval_duel.estimators.noised_elbo import NoisedElbo
from lm_eval_duel.estimators.two_phase import TwoPhase
from lm_eval_duel.rules import LeftToRight, Rule, SeedFirst, SubBlock, inner
from lm_eval_duel.rules.base import Counted
from lm_eval_duel.rules.scheduled import Scheduled, even_counts


class Cost(NamedTuple):
    """The cost of scoring."""

    nfe: float = 0  # rule steps
    rows: float = 0  # rows evaluated by the network
    token_rows: float = 0  # positions of these rows
    weight: float = 0  # how much of the budget of network calls the rows take (`View.cost`)
    longest: float = 0  # calls that must follow each other


def total(costs: Iterable[tuple[Cost, float]]) -> Cost:
    """The sum of costs, each with a factor; `longest` is the largest."""
    nfe = 0.0
    rows = 0.0
    token_rows = 0.0
    weight = 0.0
    longest = 0.0
    for cost, factor in costs:
        nfe += cost.nfe * factor
        rows += cost.rows * factor
        token_rows += cost.token_rows * factor
        weight += cost.weight * factor
        longest = max(longest, cost.longest)
    return Cost(nfe, rows, token_rows, weight, longest)


class Layout(NamedTuple):
    """The number of positions of a window's context, of its target, and of the whole row."""

    context: int
    target: int
    length: int


Count: TypeAlias = Callable[[Layout], Cost]


class BlockCount(NamedTuple):
    """A block, and how many positions are masked before each step."""

    start: int  # its first column
    width: int
    masked: tuple[int, ...]


class Setting(NamedTuple):
    """The network (its weights are not needed), the rule and the blocks."""

    denoiser: Denoiser
    rule: Rule
    block: int | None
    grid: str

    @property
    def is_exact(self) -> bool:
        """True if the number of steps is known; otherwise one position a step is assumed."""
        return isinstance(inner(self.rule), Counted | Scheduled)

    def blocks(self, window: Layout) -> list[BlockCount]:
        counts = []
        for start, width in blocks(window.context, window.target, self.block, self.grid):
            positions = min(width, start + width - window.context)  # of the target
            revealed = reveals(self.rule, positions, width - positions)
            masked = []
            left = positions
            for count in revealed:
                masked.append(left)
                left -= count
            counts.append(BlockCount(start, width, tuple(masked)))
        return counts

    def exact(self, window: Layout) -> Cost:
        """`estimator=duel` without a cache, and the chain rule of a causal network."""
        if self.denoiser.attention == "causal":  # one pass: the last token is predicted, and never an input
            tokens = window.context + window.target - 1
            return Cost(nfe=window.target, rows=1, token_rows=tokens, weight=tokens, longest=1)
        states = {block: len(block.masked) for block in self.blocks(window)}
        nfe = sum(states.values())
        longest = nfe if self.rule.spans_blocks else max(states.values())
        return self._states(window, states, longest, in_turn=True)._replace(nfe=nfe)

    def cached(self, window: Layout, cache: str) -> Cost:
        """`cache=prefix` or `dual`: the whole row at a block's start, later the positions that the cache leaves out."""
        costs = []
        for block in self.blocks(window):
            steps = len(block.masked)
            later = block.width if cache == "dual" else window.length - block.start
            tokens = window.length + (steps - 1) * later
            costs.append((Cost(nfe=steps, rows=steps, token_rows=tokens, weight=tokens, longest=steps), 1))
        return total(costs)

    def two_phase(self, window: Layout, share: float, cache: str = "dual") -> Cost:
        """Every block under a cache, and on average a `share` of them without one."""
        return total([(self.cached(window, cache), 1), (self.exact(window), share)])

    def elbo(self, window: Layout, samples: int) -> Cost:
        """The Monte Carlo ELBO with `samples` draws of each span (the whole target, or each block)."""
        return self._states(window, dict.fromkeys(self.blocks(window), samples), longest=1)

    def noised(self, window: Layout, samples: int, passes: int) -> Cost:
        """The bound under random tokens: `samples` draws of the target, or of each canvas, with `passes` calls each."""
        rows = samples * passes  # of each span
        spans = blocks(window.context, window.target, self.denoiser.block, "target")
        if self.denoiser.block is None:
            tokens = rows * window.length * len(spans)
        else:  # a row ends with its canvas
            tokens = rows * sum(start + width for start, width in spans)
        return Cost(rows=rows * len(spans), token_rows=tokens, weight=tokens, longest=passes)

    def lattice(self, window: Layout) -> Cost:
        """The estimators over all orders: every set of masked positions of a block once."""
        states = {block: 2 ** block.masked[0] - 1 for block in self.blocks(window)}
        return self._states(window, states, longest=1)

    def _states(
        self,
        window: Layout,
        states: Mapping[BlockCount, int],
        longest: int,
        in_turn: bool = False,
    ) -> Cost:
        """The cost of a number of `states` of each block, in at least `longest` calls.

        `in_turn`: a call evaluates one state of a block, since the next one depends on it.
        """
        count = sum(states.values())
        if not self.denoiser.by_blocks:
            tokens = count * window.length
            return Cost(rows=count, token_rows=tokens, weight=tokens, longest=longest)

        # the clean positions once, in pieces (`CleanStream`)
        width = self.denoiser.block or 1
        group = clean_group(self.denoiser)
        zero = window.context if self.denoiser.anchor == "target" else 0
        last = window.context + window.target - 1 - zero
        clean = zero + last // group * group
        piece = max(group, CLEAN // group * group)
        borders = {0, *range(zero + piece, clean, piece), clean}
        rows = len(borders) - 1  # the pieces between them; none if nothing is clean

        # then the blocks, which share rows with others of their stretch of columns (`BlockCausalView`)
        states_of_stretches: dict[int, list[int]] = {}
        for block, states_of_block in states.items():
            stretch = block.start // max(width, STRETCH)
            states_of_stretches.setdefault(stretch, []).append(states_of_block)
        abreast = max(1, STRETCH // width)
        for states_of_blocks in states_of_stretches.values():
            steps = max(states_of_blocks) if in_turn else 1
            full_rows = -(-sum(states_of_blocks) // abreast)  # rounded up
            rows += max(steps, full_rows)
        keys_per_lane = -(-clean // len(states))  # rounded up
        weight = clean + count * max(width, keys_per_lane)
        return Cost(
            rows=rows,
            token_rows=clean + count * width,
            weight=weight,
            longest=longest + bool(clean),
        )


def reveals(rule: Rule, positions: int, first: int) -> list[int]:
    """The number of positions that each step of a block reveals, of `positions` from `first` on; 1 if not known."""
    if isinstance(rule, SeedFirst):
        if first:  # the block begins inside the context, so its first token is known
            return reveals(rule.rule, positions, first)
        return [1, *reveals(rule.rule, positions - 1, 1)]
    if isinstance(rule, SubBlock):
        sizes = Counter(position // rule.sub_block for position in range(first, first + positions))
        counts: list[int] = []
        for size in sizes.values():
            counts += reveals(rule.rule, size, 0)
        return counts
    if isinstance(rule, Scheduled):
        return even_counts(positions, rule.steps)  # type: ignore[attr-defined]
    k = rule.k if isinstance(rule, Counted) else 1
    return [min(k, positions - done) for done in range(0, positions, k)]


def count_of(estimator: Estimator) -> Count | None:
    """The formula that counts what an estimator does; None if there is none."""
    denoiser = estimator.denoiser
    # the cost of an estimator without a rule does not depend on an order, so any will do
    rule = getattr(estimator, "rule", None) or LeftToRight()
    setting = Setting(denoiser, rule, estimator.block, estimator.grid)
    if isinstance(estimator, NoisedElbo):
        passes_by_conditioning = {"none": 1, "twice": 2, "chain": estimator.steps}
        passes = passes_by_conditioning[estimator.conditioning]
        return partial(setting.noised, samples=estimator.samples, passes=int(passes))
    if denoiser.noise_training is not None:
        return None
    if isinstance(estimator, Elbo):
        return partial(setting.elbo, samples=estimator.samples)
    if isinstance(estimator, TwoPhase):
        uncached = setting._replace(rule=estimator.phases["uncached"].rule)
        return partial(uncached.two_phase, share=estimator.arguments.sample, cache=estimator.cache)
    if isinstance(estimator, Lattice):
        return setting.lattice
    if type(estimator) in (DuelEstimator, Autoregressive):  # a subclass is another sampler
        if denoiser.cache is None:
            return setting.exact
        return partial(setting.cached, cache=denoiser.cache)
    return None


def layouts(windows: Iterable[Window]) -> Counter[Layout]:
    """The number of different windows of each layout."""
    counts: Counter[Layout] = Counter()
    for window in dict.fromkeys(windows):  # each different one once
        if window.target:
            layout = Layout(len(window.context), len(window.target), window.length)
            counts[layout] += 1
    return counts


def sum_over(layouts: Mapping[Layout, int], count: Count) -> Cost:
    """The cost of all windows, given how many there are of each layout; with whole counts, rounded up."""
    cost = total((count(layout), windows) for layout, windows in layouts.items())
    return cost._replace(
        nfe=_rounded_up(cost.nfe),
        rows=_rounded_up(cost.rows),
        token_rows=_rounded_up(cost.token_rows),
    )


def _rounded_up(count: float) -> int:
    """The next whole number above, or this one if float noise alone has put a sum of shares above it."""
    return math.ceil(round(count, 6))
