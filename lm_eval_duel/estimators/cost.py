"""The cost of each way to score windows, by one formula for each method, without running it.

Equal windows count once. Equal rows of different windows all count, though a call evaluates them once.
Padding does not count.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from lm_eval_duel.core.denoiser import CLEAN, STRETCH, Denoiser, clean_group
from lm_eval_duel.core.lanes import blocks
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.cached.denoiser import GPU_KEPT
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.arguments import (
    ConfidenceArguments,
    ElboArguments,
    NoisedElboArguments,
    OrderArguments,
    TwoPhaseArguments,
)
from lm_eval_duel.estimators.registry import Entry
from lm_eval_duel.rules import Rule, SeedFirst, SubBlock, inner
from lm_eval_duel.rules.base import Counted
from lm_eval_duel.rules.deployed import Scheduled, even_counts


class Cost(NamedTuple):
    """The cost of scoring."""

    blocks: float = 0
    nfe: float = 0  # rule steps
    rows: float = 0  # rows evaluated by the network
    token_rows: float = 0  # positions of these rows
    pairs: float = 0  # queries times keys, summed over rows
    head: float = 0  # positions at which the LM head runs
    weight: float = 0  # what the rows take of the tokens that a network call holds (`View.cost`, on a GPU)
    longest: float = 0  # calls that must follow each other


def total(costs: Iterable[tuple[Cost, float]]) -> Cost:
    """The sum of costs, each with a factor; `longest` is the largest."""
    scaled = [[*(part * factor for part in cost[:-1]), cost.longest] for cost, factor in costs]
    if not scaled:
        return Cost()
    *sums, longest = zip(*scaled, strict=True)
    return Cost._make([*map(sum, sums), max(longest)])


class Layout(NamedTuple):
    """The number of positions of a window's context, of its target, and of the whole row."""

    context: int
    target: int
    length: int


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
    kept: int = 0  # numbers that a cache keeps per position of a row

    @property
    def is_exact(self) -> bool:
        """True if the number of steps is known; otherwise one position a step is assumed."""
        return isinstance(inner(self.rule), Counted | Scheduled)

    def blocks(self, window: Layout) -> list[BlockCount]:
        found = []
        for start, width in blocks(window.context, window.target, self.block, self.grid):
            positions = min(width, start + width - window.context)
            done = itertools.accumulate(reveals(self.rule, positions, width - positions)[:-1], initial=0)
            found.append(BlockCount(start, width, tuple(positions - count for count in done)))
        return found

    def head(self, block: BlockCount) -> int:
        """Positions at which the head runs: those that are masked, or only the picks if the order is fixed."""
        return block.masked[0] if inner(self.rule).fixed else sum(block.masked)

    def exact(self, window: Layout) -> Cost:
        """`estimator=duel` without a cache, and the chain rule of a causal network."""
        if self.denoiser.attention == "causal":  # one pass: the last token is predicted, and never an input
            tokens, targets = window.context + window.target - 1, window.target
            return Cost(targets, targets, 1, tokens, tokens**2, targets, tokens, 1)
        states = {block: len(block.masked) for block in self.blocks(window)}
        head, nfe = sum(map(self.head, states)), sum(states.values())
        longest = nfe if self.rule.spans_blocks else max(states.values())
        return self._states(window, states, longest, in_turn=True)._replace(nfe=nfe, head=head)

    def cached(self, window: Layout, cache: str) -> Cost:
        """`cache=prefix` or `dual`: the whole row at a block's start, later the positions that the cache leaves out."""
        costs, length = [], window.length
        for block in self.blocks(window):
            steps, later = len(block.masked), block.width if cache == "dual" else length - block.start
            tokens = length + (steps - 1) * later
            weight = length + (steps - 1) * max(later, -(-length * self.kept // GPU_KEPT))
            costs.append((Cost(1, steps, steps, tokens, tokens * length, self.head(block), weight, steps), 1))
        return total(costs)

    def two_phase(self, window: Layout, share: float) -> Cost:
        """Every block under `cache=dual`, and on average a `share` of them without a cache."""
        dual = self.cached(window, "dual")
        return total([(dual, 1), (self.exact(window), share)])._replace(blocks=dual.blocks)

    def elbo(self, window: Layout, samples: int) -> Cost:
        """The Monte Carlo ELBO with `samples` draws of each span (the whole target, or each block)."""
        states = dict.fromkeys(self.blocks(window), samples)
        return self._states(window, states, 1)._replace(head=samples * sum((b.masked[0] + 1) / 2 for b in states))

    def noised(self, window: Layout, samples: int, passes: int) -> Cost:
        """The bound under random tokens: `samples` draws of the target, or of each canvas, with `passes` calls each."""
        canvas, rows = self.denoiser.block, samples * passes
        spans = list(blocks(window.context, window.target, canvas, "target"))
        lengths = [window.length if canvas is None else start + width for start, width in spans]
        tokens, pairs, head = rows * sum(lengths), rows * sum(n * n for n in lengths), rows * sum(w for _, w in spans)
        return Cost(len(spans), 0, rows * len(spans), tokens, pairs, head, tokens, passes)

    def lattice(self, window: Layout) -> Cost:
        """The estimators over all orders: every set of masked positions of a block once."""
        states = {block: 2 ** block.masked[0] - 1 for block in self.blocks(window)}
        head = sum(block.masked[0] * 2 ** (block.masked[0] - 1) for block in states)
        return self._states(window, states, 1)._replace(head=head)

    def _states(self, window: Layout, states: Mapping[BlockCount, int], longest: int, in_turn: bool = False) -> Cost:
        """The cost of `states` of each block in at least `longest` calls. `in_turn`: one state of a block in a call."""
        denoiser, count, length = self.denoiser, sum(states.values()), window.length
        if not denoiser.by_blocks:
            tokens = count * length
            return Cost(len(states), 0, count, tokens, tokens * length, weight=tokens, longest=longest)
        # the clean positions once, in pieces; then blocks of one stretch of columns share rows (`BlockCausalView`)
        width, group = denoiser.block or 1, clean_group(denoiser)
        zero = window.context if denoiser.anchor == "target" else 0
        clean = zero + (window.context + window.target - 1 - zero) // group * group
        piece, abreast = max(group, CLEAN // group * group), max(1, STRETCH // width)
        borders = sorted({0, *range(zero + piece, clean, piece), clean})
        rows, pairs = len(borders) - 1, sum((end - start) * end for start, end in itertools.pairwise(borders))
        for _, stretch in itertools.groupby(states, lambda block: block.start // max(width, STRETCH)):
            own = list(stretch)
            lanes = sum(states[block] for block in own)
            steps = max(states[block] for block in own) if in_turn else 1
            rows += max(steps, -(-lanes // abreast))
            pairs += lanes * width * (own[-1].start + width * min(-(-lanes // steps), abreast))
        weight = clean + count * max(width, -(-clean // len(states)))
        return Cost(len(states), 0, rows, clean + count * width, pairs, weight=weight, longest=longest + bool(clean))


def reveals(rule: Rule, positions: int, first: int) -> list[int]:
    """The number of positions that each step of a block reveals, of `positions` from `first` on; 1 if not known."""
    if isinstance(rule, SeedFirst):  # the first token of a block that begins inside the context is known
        return reveals(rule.rule, positions, first) if first else [1, *reveals(rule.rule, positions - 1, 1)]
    if isinstance(rule, SubBlock):
        parts = Counter(position // rule.sub_block for position in range(first, first + positions))
        return [count for part in parts.values() for count in reveals(rule.rule, part, 0)]
    if isinstance(rule, Scheduled):
        return even_counts(positions, rule.steps)  # type: ignore[attr-defined]
    k = rule.k if isinstance(rule, Counted) else 1
    return [min(k, positions - done) for done in range(0, positions, k)]


class Method(NamedTuple):
    """A way to score windows, and the cost of one. `kept`: numbers that a cache keeps per position."""

    name: str
    cost: Callable[[Layout], Cost]
    gives: str
    kept: int = 0
    self_conditioning: bool = False


def methods(setting: Setting, entry: Entry, own: Mapping[str, Any]) -> Iterator[Method]:
    """The ways to score windows with this network. `entry`, `own`: the run's estimator and its arguments."""
    denoiser, kept, arguments, bound = setting.denoiser, setting.kept, entry.own(**own), "a bound, with its error"
    if (trained := denoiser.noise_training) is not None:
        noise = arguments if isinstance(arguments, NoisedElboArguments) else NoisedElboArguments()
        inputs = trained.self_conditioning if noise.self_conditioning == "auto" else noise.self_conditioning
        steps = noise.steps or trained.steps or math.inf
        passes = {"none": 1, "twice": 2, "chain": int(steps) if steps < math.inf else 1}[inputs]
        draws = partial(setting.noised, samples=noise.mc_samples, passes=passes)
        yield Method(f"noised_elbo {noise.mc_samples}", draws, bound, self_conditioning=inputs != "none")
        return
    causal, clean = denoiser.attention == "causal", kept if denoiser.by_blocks else 0
    yield Method("chain rule" if causal else "exact", setting.exact, "the likelihood", clean)
    # the noise level of SEDD and GIDD changes every key
    if not (causal or denoiser.by_blocks or setting.rule.spans_blocks or denoiser.family in ("sedd", "gidd")):
        needs_seed = denoiser.shift and not isinstance(setting.rule, SeedFirst)
        under = setting._replace(rule=SeedFirst(setting.rule)) if needs_seed else setting
        for cache in ("prefix", "dual"):
            yield Method(cache, partial(under.cached, cache=cache), "another distribution, exactly", kept)
        share = own.get("sample", TwoPhaseArguments.sample)
        gives = "an estimate of exact, with its error"
        yield Method(f"two_phase {share:g}", partial(under.two_phase, share=share), gives, kept)
    if causal or denoiser.seeds_blocks:  # no ELBO: this sampler lacks the states that it needs
        return
    samples, spans = own.get("mc_samples", ElboArguments.mc_samples), setting._replace(block=denoiser.block)
    yield Method(f"elbo {samples}", partial(spans.elbo, samples=samples), bound, clean)
    if setting.block is None:
        return
    if entry.lattice or isinstance(arguments, ConfidenceArguments | OrderArguments):
        yield Method("lattice", setting.lattice, "the sum over all orders", clean)


def layouts_of_equal_documents(denoiser: Denoiser, tokens: int, documents: int) -> Counter[Layout]:
    """The number of windows of each layout, for documents of equal length that are cut one by one."""
    before = max(denoiser.shift, int(denoiser.bos in ("given", "official")))
    if (capacity := denoiser.max_length - before) < 1:
        raise DuelError(f"max_length={denoiser.max_length} leaves no position for text; raise it.")
    found: Counter[Layout] = Counter()
    short, longer = divmod(tokens, documents)
    for length, count in ((short + 1, longer), (short, documents - longer)):
        whole, rest = divmod(length, capacity)
        for target, windows in ((capacity, whole * count), (rest, count * bool(rest))):
            found[Layout(before, target, before + target)] += windows
    return +found


def layouts(windows: Iterable[Window]) -> Counter[Layout]:
    """The number of different windows of each layout."""
    different = dict.fromkeys(window for window in windows if window.target)
    return Counter(Layout(len(window.context), len(window.target), window.length) for window in different)


def sum_over(layouts: Mapping[Layout, int], cost: Callable[[Layout], Cost]) -> Cost:
    """The cost of all windows, given how many there are of each layout; with whole counts, rounded up."""
    found = total((cost(window), count) for window, count in layouts.items())
    return Cost._make([*(math.ceil(round(count, 6)) for count in found[:4]), *found[4:]])
