"""What windows will cost under each way to score them: counted, not run.

    method       a block of m masked positions, k revealed at a step, in a row of L positions
    exact        ceil(m / k) rows of L positions (bidirectional); of the block's own positions, after one pass over the
    clean
                 positions (block-causal, causal prefix); the whole row once (causal)
    prefix       one row of L positions, then ceil(m / k) - 1 rows from the block's start on
    dual         one row of L positions, then ceil(m / k) - 1 rows of the block's positions
    two_phase    dual, and a share of the blocks exact as well
    elbo         for each draw one row of L positions (bidirectional), or of each block's positions (by blocks)
    lattice      2^m - 1 rows of L positions (bidirectional), or of the block's own positions (by blocks)
    beam         at most sum over h of min(K + K/2 + ..., m choose h) such rows, for beams of several sizes

Rules with sub-blocks, a schedule of steps or `seed_first` take other steps; see `reveals`. Equal windows are scored
once, and counted once. Equal rows of different windows, which a network call evaluates once, are not foreseen, nor is
padding.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from lm_eval_duel.core.block_causal import CLEAN, STRETCH, clean_group
from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.core.lanes import blocks
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.cached.view import GPU_KEPT
from lm_eval_duel.rules import Rule, SeedFirst, SubBlock, inner
from lm_eval_duel.rules.base import Counted
from lm_eval_duel.rules.scheduled import Scheduled, even_counts


@dataclasses.dataclass(frozen=True)
class Cost:
    """What scoring takes.

    `pairs`: queries times keys, summed over rows. `head`: positions at which the LM head runs. `weight`: what the rows
    take of the tokens that a network call holds (`View.cost`, on a GPU). `longest`: calls that must follow each other.
    """

    blocks: float = 0
    nfe: float = 0  # rule steps
    rows: float = 0  # rows evaluated by the network
    token_rows: float = 0  # positions of these rows
    pairs: float = 0.0
    head: float = 0.0
    weight: float = 0.0
    longest: int = 0

    def __add__(self, other: Cost) -> Cost:
        sums = {
            field.name: getattr(self, field.name) + getattr(other, field.name) for field in dataclasses.fields(self)
        }
        return Cost(**{**sums, "longest": max(self.longest, other.longest)})

    def times(self, count: float) -> Cost:
        """This cost `count` times over, except for `longest`: the number of calls that must follow each other."""
        scaled = {field.name: getattr(self, field.name) * count for field in dataclasses.fields(self)}
        return Cost(**{**scaled, "longest": self.longest})

    def rounded(self) -> Cost:
        """With whole counts, rounded up."""
        whole = {name: math.ceil(getattr(self, name)) for name in ("blocks", "nfe", "rows", "token_rows")}
        return dataclasses.replace(self, **whole)


class Layout(NamedTuple):
    """The number of positions of a window: visible ones before the target, the target, and the whole row."""

    context: int
    target: int
    length: int


@dataclasses.dataclass(frozen=True)
class Setting:
    """The network (its weights are not needed), the rule, the blocks."""

    denoiser: Denoiser
    rule: Rule
    block: int | None
    grid: str
    kept: int = 0  # numbers that a cache keeps per position of a row

    def masked(self, positions: int, width: int) -> list[int]:
        """The masked positions before each step of a block of `width` positions, the last `positions` of which are
        masked.
        """
        counts = reveals(self.rule, positions, width - positions)
        return [positions - done for done in itertools.accumulate(counts[:-1], initial=0)]

    @property
    def is_exact(self) -> bool:
        """Whether the number of steps is known; otherwise one position a step is assumed."""
        return isinstance(inner(self.rule), Counted | Scheduled)

    @property
    def is_bound(self) -> bool:
        """Whether one position a step is the most that the rule takes: not if it may reveal nothing at a step."""
        return not self.rule.may_pick_none

    def places(self, window: Layout) -> list[tuple[int, int, int]]:
        """(first column, width, masked positions) of each block."""
        origin = window.context
        return [
            (start, width, start + width - max(start, origin))
            for start, width in blocks(origin, window.target, self.block, self.grid)
        ]

    def head(self, masked: Sequence[int]) -> int:
        """Positions at which the head runs in a block: those that are masked, or only the picks if the order is
        fixed.
        """
        return masked[0] if inner(self.rule).fixed else sum(masked)


def reveals(rule: Rule, positions: int, first: int) -> list[int]:
    """How many positions each step of a block reveals, if the positions from `first` on are masked; one each if not
    known.
    """
    if isinstance(rule, SeedFirst):  # a block that begins inside the context has no first token of its own
        if first:
            return reveals(rule.rule, positions, first)
        return [1, *reveals(rule.rule, positions - 1, 1)] if positions else []
    if isinstance(rule, SubBlock):
        parts = Counter(position // rule.sub_block for position in range(first, first + positions))
        return [count for part in parts.values() for count in reveals(rule.rule, part, 0)]
    if isinstance(rule, Scheduled):
        return even_counts(positions, rule.steps)  # type: ignore[attr-defined]
    k = rule.k if isinstance(rule, Counted) else 1
    return [min(k, positions - done) for done in range(0, positions, k)]


def exact(setting: Setting, window: Layout) -> Cost:
    """`estimator=duel` without a cache, and the chain rule of a causal network."""
    if setting.denoiser.attention == "causal":
        return _causal(window)
    if setting.denoiser.by_blocks:
        return _by_blocks(setting, window)
    total, length = Cost(), window.length
    for _, width, positions in setting.places(window):
        masked = setting.masked(positions, width)
        steps = len(masked)
        tokens = steps * length
        total += Cost(1, steps, steps, tokens, tokens * length, setting.head(masked), tokens, steps)
    return dataclasses.replace(total, longest=int(total.nfe)) if setting.rule.spans_blocks else total


def cached(setting: Setting, window: Layout, cache: str) -> Cost:
    """`cache=prefix` or `dual`: the whole row at a block's start, later the positions that the cache leaves out."""
    total, length = Cost(), window.length
    for start, width, positions in setting.places(window):
        masked = setting.masked(positions, width)
        steps, later = len(masked), width if cache == "dual" else length - start
        tokens, pairs = length + (steps - 1) * later, length**2 + (steps - 1) * later * length
        weight = length + (steps - 1) * max(later, -(-length * setting.kept // GPU_KEPT))
        total += Cost(1, steps, steps, tokens, pairs, setting.head(masked), weight, steps)
    return total


def two_phase(setting: Setting, window: Layout, share: float) -> Cost:
    """Every block under `cache=dual`, and on average a `share` of them without a cache."""
    cheap, again = cached(setting, window, "dual"), exact(setting, window)
    return dataclasses.replace(cheap + again.times(share), blocks=cheap.blocks)


def elbo(setting: Setting, window: Layout, samples: int) -> Cost:
    """The Monte Carlo ELBO with `samples` draws of each span (the whole target, or each block)."""
    spans = setting.places(window)
    head = samples * sum((positions + 1) / 2 for _, _, positions in spans)
    return _side_by_side(setting, window, {start: samples for start, _, _ in spans}, head)


def noised(setting: Setting, window: Layout, samples: int, passes: int, canvas: int | None) -> Cost:
    """The bound under random tokens with `samples` draws of each span (the whole target, or each canvas).

    `passes`: network passes of a draw.
    """
    total = Cost()
    for start, width in blocks(window.context, window.target, canvas, "target"):
        length = window.length if canvas is None else start + width
        rows = samples * passes
        total += Cost(1, 0, rows, rows * length, rows * length**2, rows * width, rows * length, passes)
    return total


def lattice(setting: Setting, window: Layout, beam: int | None = None) -> Cost:
    """The estimators over all orders: every set of masked positions of a block once, or `beam` of a size."""
    sets = {
        start: [min(beam or math.inf, math.comb(m, masked)) for masked in range(1, m + 1)]
        for start, _, m in setting.places(window)
    }
    head = sum(masked * count for counts in sets.values() for masked, count in enumerate(counts, 1))
    states = {start: int(sum(counts)) for start, counts in sets.items()}
    return _side_by_side(setting, window, states, head, max(map(len, sets.values())) if beam else 1)


def _side_by_side(setting: Setting, window: Layout, states: dict[int, int], head: float, longest: int = 1) -> Cost:
    """The cost of `states`, the number for each block (by its first column), none of which waits for another."""
    total = Cost(blocks=len(states), head=head, longest=longest)
    if setting.denoiser.by_blocks:
        return total + _blocks_of(setting, window, {start: [count] for start, count in states.items()})
    rows = sum(states.values())
    tokens = rows * window.length
    return dataclasses.replace(total, rows=rows, token_rows=tokens, pairs=tokens * window.length, weight=tokens)


def _causal(window: Layout) -> Cost:
    """One pass: the last token is predicted, and never an input."""
    tokens, targets = window.context + window.target - 1, window.target
    return Cost(targets, targets, 1, tokens, tokens**2, targets, tokens, 1)


def _by_blocks(setting: Setting, window: Layout) -> Cost:
    total, states = Cost(), {}
    for start, width, positions in setting.places(window):
        masked = setting.masked(positions, width)
        states[start] = [1] * len(masked)
        total += Cost(1, len(masked), head=setting.head(masked), longest=len(masked))
    return total + _blocks_of(setting, window, states)


def _blocks_of(setting: Setting, window: Layout, states: dict[int, list[int]]) -> Cost:
    """The clean positions once, and the states of each block (how many at each step), as `BlockCausalView` packs them.

    Blocks that begin within a stretch of columns share rows of the network.
    """
    block = setting.denoiser.block or 1
    group, zero = clean_group(setting.denoiser), window.context if setting.denoiser.anchor == "target" else 0
    clean = zero + (window.context + window.target - 1 - zero) // group * group
    piece = max(group, CLEAN // group * group)
    total, start = Cost(longest=1 if clean else 0), 0
    while start < clean:
        end = min(clean, max(start, zero) + piece)
        total += Cost(rows=1, token_rows=end - start, pairs=(end - start) * end, weight=end - start)
        start = end
    abreast, share = max(1, STRETCH // block), max(block, -(-clean // max(1, len(states))))
    for stretch in {start // max(block, STRETCH) for start in states}:
        starts = [start for start in states if start // max(block, STRETCH) == stretch]
        for step in range(max(len(states[start]) for start in starts)):
            lanes = sum(states[start][step] for start in starts if step < len(states[start]))
            ahead = max(start for start in starts if step < len(states[start]))
            rows = -(-lanes // abreast)
            keys = ahead + block * min(lanes, abreast)
            total += Cost(rows=rows, token_rows=lanes * block, pairs=lanes * block * keys, weight=lanes * share)
    steps = max((len(counts) for counts in states.values()), default=0)
    return dataclasses.replace(total, longest=total.longest + steps)


def layouts(windows: Iterable[Window]) -> Counter[Layout]:
    """How many different windows there are of each layout."""
    different = dict.fromkeys(window for window in windows if window.target)
    return Counter(Layout(len(window.context), len(window.target), window.length) for window in different)


def sum_over(layouts: Mapping[Layout, int], cost: Callable[[Layout], Cost]) -> Cost:
    """The cost of all windows, given how many there are of each layout."""
    total = sum((cost(window).times(count) for window, count in layouts.items()), Cost())
    return total.rounded()
