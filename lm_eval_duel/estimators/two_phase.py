"""The two-phase estimate: every block under a cache, a random sample of blocks also without it.

    estimate = sum over blocks of g_b + sum over sampled blocks of w_b (f_b - g_b)

f_b and g_b are the log-probs of a block under the rule without and with the cache. f is what is estimated; g is cheap
and nearly equal, so the differences are small and few of them suffice. The sample, the weights w_b and the variance:
block_sample.py. Both phases are a `DuelEstimator`, the second one with fewer lanes.

Shapes: N windows, B blocks of a window.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar, NamedTuple, cast

import torch

from lm_eval_duel import fingerprint, rules
from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.core.scores import Counts, WindowScore, known_sum
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.cached.denoiser import under_cache
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators import block_sample, pilot
from lm_eval_duel.estimators.base import BlockSpan, Estimator, IndexedScores, Ranks, Value, WindowGroup
from lm_eval_duel.estimators.block_sample import Design
from lm_eval_duel.estimators.checks import check_two_phase
from lm_eval_duel.estimators.metered import Metered
from lm_eval_duel.estimators.phases import Cost, Phases
from lm_eval_duel.estimators.pilot import PilotBlock
from lm_eval_duel.estimators.registry import SAMPLE, check_amount

BATCHES = 4  # network calls' worth of sampled blocks that are evaluated before their windows' cached phase


@dataclasses.dataclass(frozen=True)
class TwoPhaseScore(WindowScore):
    """One window's estimate. It has no single order, so there are no steps and no log-probs of tokens."""

    other_lengths: ClassVar[tuple[str, ...]] = ("cached", "weights", "uncached", "phases")
    stderr: float | None = None  # sampling standard error of `log_prob`, nats; None: too few blocks were drawn
    cached: tuple[float, ...] = ()  # log-prob of each block under the cache
    weights: tuple[float, ...] = ()  # of each block; 0: not in the sample
    uncached: tuple[float, ...] = ()  # log-prob of each sampled block without the cache
    phases: tuple[float, ...] = tuple(Phases())  # the sums of `Phases`


class UncachedBlock(NamedTuple):
    """One block without the cache."""

    log_prob: float
    steps: int

    @classmethod
    def from_score(cls, window: Window, score: WindowScore, place: tuple[int, ...]) -> UncachedBlock:
        """The block at (..., first column, width)."""
        return cls(_log_prob(window, score, place), _steps(window, score, place))


class TwoPhase(Estimator):
    """An unbiased estimate of the log-likelihood that `Duel(denoiser, rule, block)` gives, with its standard error.

    Perplexity is a convex function of it, so that of an estimate is too high by about half its squared relative error:
    by 0.00125 % at a standard error of 0.5 %.

    `cache`: the cached sampler of the first phase, "dual" or "prefix". `sample`: the share of blocks that are scored
    without it, too (default 0.05). `precision` instead: the relative standard error of perplexity, which a pilot turns
    into a share (about: the pilot's own variance is uncertain). `seed`: of the sample. Other arguments as in `Duel`.

    Raises:
        DuelError: this network supports no cache, or none with this rule; sample or precision is out of range.
    """

    name = "two_phase"
    empty_score = TwoPhaseScore(0.0, near_ties=0, stderr=0.0)

    def __init__(
        self,
        denoiser: Denoiser,
        rule: str | rules.Rule = "greedy",
        block: int | str | None = "auto",
        grid: str = "auto",
        batch_size: int | None = None,
        max_batch_size: int | None = None,
        traced: bool = False,
        cache: str = "dual",
        sample: float | None = None,
        precision: float | None = None,
        seed: int = 0,
    ):
        check_amount(sample, precision)
        rule = rules.parse(rule) if isinstance(rule, str) else rule
        check_two_phase(denoiser, rule, cache)
        super().__init__(denoiser, block, grid, batch_size, max_batch_size, traced)
        settings = (rule, block, grid, batch_size, max_batch_size)
        self.uncached = Metered(denoiser, *settings)
        self.cached = Metered(_under_cache(denoiser, cache), *settings)
        self.cache, self.rule, self.seed, self.precision = cache, rule, seed, precision
        self.sample = SAMPLE if sample is None and precision is None else sample
        self._designs: dict[int, Design] = {}  # by the window's key: found by a pilot
        self._pilot: dict[int, dict[int, UncachedBlock]] = {}  # by the window's key and the number of the block
        self.counts = Counts()

    # ------------------------------------------------------------ what it is

    @property
    def counts(self) -> Counts:
        """What both phases have computed so far; `costs` has them apart."""
        return self._loop.counts

    @counts.setter
    def counts(self, counts: Counts) -> None:
        self._loop.counts = counts
        for phase in self._phases.values():
            phase.counts = counts
            phase.reset()

    @property
    def costs(self) -> dict[str, dict[str, float]]:
        """Forwards, rows and seconds of each phase."""
        return {name: dict(phase.cost) for name, phase in self._phases.items()}

    def take_costs(self) -> dict[str, dict[Window, Cost]]:
        return {name: phase.take_window_costs() for name, phase in self._phases.items()}

    @property
    def _phases(self) -> dict[str, Metered]:
        return {"cached": self.cached, "uncached": self.uncached}

    def use_single_rows(self) -> None:
        super().use_single_rows()
        self.uncached.use_single_rows()
        self.cached.use_single_rows()

    def describe(self) -> dict[str, object]:
        amount = {"sample": self.sample, "precision": self.precision}
        return {
            "estimator": self.name,
            "block": self.block,
            "grid": self.grid,
            **fingerprint.of_rule(self.rule),
            "cheap_cache": self.cache,
            **{name: fingerprint.number(value) for name, value in amount.items() if value is not None},
            "draw_seed": self.seed,
        }

    def values(self, scored: WindowScore) -> dict[str, Value]:
        scored = cast(TwoPhaseScore, scored)
        return {self.name: Value(scored.log_prob, scored.stderr, phases=scored.phases)}

    # ------------------------------------------------------------ the sample

    def weights(self, windows: Sequence[Window]) -> torch.Tensor:
        """The weight of each block of each window, (N, B) float64; 0: not in the sample, or no block."""
        keys, default = [window.key for window in windows], Design(0.0, self.sample or 0.0)
        blocks = [len(self.blocks(window)) for window in windows]
        return block_sample.weights(keys, blocks, [self._designs.get(key, default) for key in keys], self.seed)

    @property
    def plans(self) -> bool:
        return self.precision is not None

    def plan(self, tasks: Sequence[Sequence[Window]], ranks: Ranks | None = None, names: Sequence[str] = ()) -> None:
        """Find the shares of blocks that `precision` takes for each task; without it do nothing.

        `stream` does this itself for windows that were in no plan, as one task.
        """
        if self.precision is not None:
            self._designs |= pilot.designs(self, self.precision, tasks, ranks or pilot.Alone(), names)

    def adopt(self, other: Estimator) -> None:
        self._designs = cast(TwoPhase, other)._designs

    @torch.inference_mode()
    def score_pilot(self, windows: Sequence[Window], shares: Sequence[float]) -> list[PilotBlock]:
        """The blocks in a pilot of this share of each window, in both ways; f is remembered, not computed again."""
        scored = []
        for numbers in super()._groups(windows):
            group = self._open([windows[n] for n in numbers], list(numbers))
            keys, blocks = zip(*((window.key, len(self.blocks(window))) for window in group.windows), strict=True)
            pilots = [Design(shares[n], 0.0) for n in numbers]
            chosen = self._sampled(group, block_sample.weights(keys, blocks, pilots, self.seed))
            u = block_sample.numbers(keys, max(blocks), self.seed)  # (N, B)
            uncached, cached = (self._score_blocks(phase, group, chosen) for phase in ("uncached", "cached"))
            for row, n, place in chosen:
                block = UncachedBlock.from_score(group.windows[row], uncached[row], place)
                self._pilot.setdefault(keys[row], {})[n] = block
                g = _log_prob(group.windows[row], cached[row], place)
                scored.append(PilotBlock(keys[row], float(u[row, n]), block.log_prob, g))
        return scored

    # ------------------------------------------------------------ scoring

    def stream(self, windows: Sequence[Window]) -> IndexedScores:
        self.check(windows)
        if self.precision is not None and any(window.target and window.key not in self._designs for window in windows):
            self.plan([windows])
        return super().stream(windows)

    def _groups(self, windows: Sequence[Window]) -> list[list[int]]:
        """Smaller groups: the sampled blocks of a group are evaluated before any of its windows is finished."""
        groups = []
        for numbers in super()._groups(windows):
            per_window = float((self.weights([windows[n] for n in numbers]) > 0).sum()) / len(numbers)
            lanes = BATCHES * self.uncached.budget.rows(windows[numbers[0]].length)
            size = math.ceil(lanes / max(per_window, 1e-3))
            groups += [numbers[start : start + size] for start in range(0, len(numbers), size)]
        return groups

    def _score_group(self, group: WindowGroup) -> IndexedScores:
        weights = self.weights(group.windows)  # (N, B)
        chosen = self._sampled(group, weights)
        left = [(row, n, place) for row, n, place in chosen if n not in self._pilot.get(group.windows[row].key, {})]
        uncached = self._score_blocks("uncached", group, left)
        for row, cached in self.cached._score_group(self._under_cache(group)):
            yield row, self._estimate(group, row, weights[row], cached, uncached.get(row))

    def _sampled(self, group: WindowGroup, weights: torch.Tensor) -> list[tuple[int, int, BlockSpan]]:
        """(row, number, place) of each sampled block."""
        return [
            (row, n, (row, *place))
            for row, window in enumerate(group.windows)
            for n, place in enumerate(self.blocks(window))
            if weights[row, n]
        ]

    def _score_blocks(
        self, phase: str, group: WindowGroup, chosen: list[tuple[int, int, BlockSpan]]
    ) -> dict[int, WindowScore]:
        """The scores of the chosen blocks, by row."""
        if not chosen:
            return {}
        group = self._under_cache(group) if phase == "cached" else group
        return dict(self._phases[phase].score_blocks(group, [place for _, _, place in chosen]))

    def _under_cache(self, group: WindowGroup) -> WindowGroup:
        return dataclasses.replace(group, view=self.cached.denoiser.open(group.rows))

    def _estimate(
        self, group: WindowGroup, row: int, weights: torch.Tensor, cached: WindowScore, uncached: WindowScore | None
    ) -> TwoPhaseScore:
        """The estimate of a row's window. `weights`: (B,)."""
        window = group.windows[row]
        places = self.blocks(window)
        weight = weights[: len(places)]  # (B,)
        known = self._pilot.get(window.key, {})
        g = torch.tensor([_log_prob(window, cached, place) for place in places], dtype=torch.float64)  # (B,)
        f = g.clone()  # (B,) where it is not sampled, its weight is 0
        steps = [_steps(window, cached, place) for place in places]
        full_steps = list(steps)  # without the cache, where they are known
        for n, place in enumerate(places):
            if weight[n]:
                block = known.get(n) or UncachedBlock.from_score(window, cast(WindowScore, uncached), place)
                f[n], full_steps[n] = block
        estimate, variance = block_sample.combine(g, f, weight)
        if not (math.isfinite(estimate) and math.isfinite(variance)):
            number = group.numbers[row]
            raise DuelError(
                f"Window {number} has a block of probability 0 with or without the cache, so its difference in "
                "log-probability is not finite. Use estimator=duel.",
                number,
            )
        phases = Phases.from_blocks(
            window.length, places, (g, f, weight), float(variance), (steps, full_steps), self.cache
        )
        return TwoPhaseScore(
            log_prob=float(estimate),
            near_ties=known_sum(cached.near_ties, uncached.near_ties if uncached else 0),
            all_mask_starts=cached.all_mask_starts + (uncached.all_mask_starts if uncached else 0),
            stderr=phases.stderr,
            cached=tuple(g.tolist()),
            weights=tuple(weight.tolist()),
            uncached=tuple(f[weight > 0].tolist()),
            phases=tuple(phases),
        )


def _under_cache(denoiser: Denoiser, cache: str) -> Denoiser:
    try:
        return under_cache(denoiser, cache)
    except DuelError as error:
        raise DuelError(f"estimator=two_phase needs a cached first phase: {error} Use estimator=duel.") from error


def _log_prob(window: Window, score: WindowScore, place: tuple[int, ...]) -> float:
    """The log-prob of the block at (..., first column, width)."""
    return math.fsum(score.token_logprobs[_span(window, place)])


def _steps(window: Window, score: WindowScore, place: tuple[int, ...]) -> int:
    """How many steps a block took."""
    return 1 + max(score.reveal_steps[_span(window, place)])


def _span(window: Window, place: tuple[int, ...]) -> slice:
    """The target positions of the block at (..., first column, width)."""
    *_, start, width = place
    first = len(window.context)
    return slice(max(0, start - first), start - first + width)
