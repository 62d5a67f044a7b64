"""Exact likelihood and sampling under a deterministic unmasking rule (the paper, Algorithms 1 and 2).

    log p(x) = sum over steps t, over positions l picked at t, of log P_l[x_l]

One reveal loop serves both (core/reveal.py). They differ in the choice of tokens (core/tokens.py) and in what
follows a finished block. With the targets known every block starts from a known state, so all blocks of all windows are
lanes of one queue. When sampling, a row's next lane enters when its last one finishes.

Shapes: N windows, L row length, R lanes, W block width.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch

from lm_eval_duel import fingerprint, rules
from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.core.lanes import Lanes, Queue, Rows
from lm_eval_duel.core.reveal import RevealLoop, decide
from lm_eval_duel.core.scores import Accumulator, Sample, SampleAccumulator, ScoreAccumulator, WindowScore
from lm_eval_duel.core.tokens import Argmax, Choose, Draws
from lm_eval_duel.core.windows import Ids, Window, as_ids
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators import gradients
from lm_eval_duel.estimators.base import BlockSpan, Estimator, IndexedScores, Value, WindowGroup, fresh
from lm_eval_duel.estimators.checks import check_rule, check_windows, rule_for
from lm_eval_duel.estimators.replay import Replay

Stop: TypeAlias = Callable[[int, tuple[int, ...]], bool]  # (index, tokens so far) -> whether to stop here


class DuelEstimator(Estimator):
    """A denoiser, an unmasking rule and a block: one distribution, to score (`log_prob`, Algorithm 2) and to sample.

    `block`: how many positions are finished before the next ones; None: the whole target; "auto": the trained block,
    else the published one, else 32. `grid`: "target" (blocks count from the first target position), "row" (from the
    row's first position), or "auto" (row for block-causal networks). `batch_size`, `max_batch_size`, `traced`: see
    `Estimator`.

    Raises:
        DuelError: this network does not support the rule, block or grid.
    """

    name = "duel"

    def __init__(
        self,
        denoiser: Denoiser,
        rule: str | rules.Rule = "greedy",
        block: int | str | None = "auto",
        grid: str = "auto",
        batch_size: int | None = None,
        max_batch_size: int | None = None,
        traced: bool = False,
    ):
        self.rule = rule_for(denoiser, rules.parse(rule) if isinstance(rule, str) else rule)
        check_rule(denoiser, self.rule)
        super().__init__(denoiser, block, grid, batch_size, max_batch_size, traced)
        self._followed = rules.with_checks(
            rules.blockwise(self.rule, self.block) if self.rule.spans_blocks else self.rule
        )

    def blocks(self, window: Window) -> list[tuple[int, int]]:
        places = super().blocks(window)
        if not self.rule.spans_blocks or not places:
            return places
        (start, _), (last, width) = places[0], places[-1]  # one lane for a chain of blocks
        return [(start, last + width - start)]

    def describe(self) -> dict[str, object]:
        return {"estimator": self.name, "block": self.block, "grid": self.grid, **fingerprint.of_rule(self.rule)}

    def values(self, scored: WindowScore) -> dict[str, Value]:
        return {self.name: Value(scored.log_prob, nfe=scored.nfe)}

    def with_denoiser(self, denoiser: Denoiser) -> DuelEstimator:
        """The same rule and block on a wrapped network of the same kind, with shared counts."""
        twin = copy.copy(self)
        twin.denoiser, twin._loop = denoiser, RevealLoop(denoiser, self.budget)
        twin.counts = self.counts
        return twin

    def replay(self, windows: Sequence[Window], steps: Sequence[Ids]) -> list[WindowScore]:
        """The score of recorded orders, given as `WindowScore.reveal_steps`.

        A diagnostic: the result is a likelihood only if a rule produced the order.
        """
        if len(windows) != len(steps):
            raise DuelError(f"replay needs the steps of each window; got {len(windows)} windows, {len(steps)} orders.")
        results: list[WindowScore] = []
        for window, order in zip(windows, self._orders(windows, steps), strict=True):
            follow = functools.partial(self._follow, rule=Replay((order,)))
            results += [scored for _, scored in self._stream([window], follow)]
        return results

    def backward(
        self,
        windows: Sequence[Window],
        weights: Sequence[float],
        reveal_steps: Sequence[Ids] | None = None,
        batch_size: int = 1,
    ) -> list[float]:
        """See `Duel.backward` (library/duel.py)."""
        if len(weights) != len(windows):
            raise DuelError(
                f"backward needs a weight for each window; got {len(windows)} windows and {len(weights)} weights."
            )
        if not torch.as_tensor(weights, dtype=torch.float64).isfinite().all():
            raise DuelError(f"The weights of backward are finite numbers; got {list(weights)}.")
        self.check(windows)
        if reveal_steps is not None and len(reveal_steps) != len(windows):
            raise DuelError(f"backward needs the order of each window; got {len(windows)}, {len(reveal_steps)} orders.")
        if reveal_steps is None:
            reveal_steps = [scored.reveal_steps for scored in self.log_prob(windows)]
        return gradients.accumulate(self, windows, weights, self._orders(windows, reveal_steps), batch_size)

    def _orders(self, windows: Sequence[Window], steps: Sequence[Ids]) -> list[tuple[int, ...]]:
        """The recorded orders, checked."""
        orders = [as_ids(order) for order in steps]
        for n, (window, order) in enumerate(zip(windows, orders, strict=True)):
            context = len(window.context)
            if len(order) != len(window.target):
                raise DuelError(f"Window {n} has {len(window.target)} target tokens but {len(order)} steps.")
            for start, width in self.blocks(window):
                inside = set(order[max(0, start - context) : start - context + width])
                if inside != set(range(len(inside))) and not self.rule.may_pick_none:
                    raise DuelError(
                        f"Window {n}: the steps of a block must be 0..n-1 without gaps, not {sorted(inside)}."
                    )
        return orders

    def sample(self, contexts: Sequence[Ids], length: int, **settings: Any) -> list[Sample]:
        """`length` tokens after each context (Algorithm 1), each with its own score. Settings: see `stream_samples`."""
        samples = dict(self.stream_samples(contexts, length, **settings))
        return [samples[n] for n in range(len(contexts))]

    def stream_samples(
        self,
        contexts: Sequence[Ids],
        length: int,
        *,
        suffix: Ids = (),
        tail: int = 0,
        do_sample: bool = True,
        seed: int = 0,
        keys: Sequence[int] | None = None,
        stop: Stop | None = None,
        scored: bool = True,
    ) -> Iterator[tuple[int, Sample]]:
        """(index, sample) of each context as it is finished.

        A draw depends on (`seed`, key, position) only; `keys` defaults to the index of each context.
        `do_sample=False`: the most probable token at every pick. `stop(index, tokens)` is called after each finished
        block: if it returns true, no further block is drawn, and the sample's `tail` counts the positions left.
        `scored=False`: the log-probability is not needed. Here it costs nothing, so samples have it in any case.
        """
        if keys is not None and len(keys) != len(contexts):
            raise DuelError(f"sample needs a key for each context; got {len(contexts)} contexts, {len(keys)} keys.")
        prompts = as_windows(contexts, length, suffix, tail)
        check_windows(self.denoiser, self.block, self.grid, prompts, generating=True)
        keys = range(len(contexts)) if keys is None else keys

        def choose(numbers: list[int]) -> Choose:
            return self._draws([keys[n] for n in numbers], seed) if do_sample else Argmax()

        return self._samples(prompts, choose, stop)

    def _draws(self, keys: Sequence[int], seed: int) -> Choose:
        """The tokens to sample in rows with these keys."""
        return Draws(keys, seed, self.denoiser.device)

    def _rule(self, choose: Choose) -> rules.Rule:
        """The rule to sample under, where `choose` gives the tokens."""
        return self._followed

    # ------------------------------------------------------------ which lanes

    def score_blocks(self, group: WindowGroup, places: list[BlockSpan]) -> IndexedScores:
        """The scores of some blocks alone, and of nothing for windows that have none among `places`.

        Positions outside these blocks have the log-probability NaN and the step -1.
        """
        lanes = group.fresh(places)
        results = ScoreAccumulator(group.rows, self.traced)
        results.expected = torch.zeros_like(results.expected).index_add_(0, lanes.row, lanes.masked.sum(1))  # (N,)
        yield from self._run(group, self._followed, places, results)

    def _score_group(self, group: WindowGroup) -> IndexedScores:
        return self._follow(group, self._followed)

    def _follow(self, group: WindowGroup, rule: rules.Rule) -> IndexedScores:
        """Every block of every window at once, under `rule`."""
        return self._run(group, rule, self._places(group), ScoreAccumulator(group.rows, self.traced))

    def _run(
        self, group: WindowGroup, rule: rules.Rule, places: list[BlockSpan], results: Accumulator
    ) -> IndexedScores:
        if rule.fixed:
            yield from self._evaluate(group, self._steps(group, rule, places), results)
            return
        queue = Queue([group.fresh(places)])
        for finished in self._loop.run(group.view, rule, queue, group.targets, results, group.numbers):
            yield from results.take(finished)

    def _steps(self, group: WindowGroup, rule: rules.Rule, places: list[BlockSpan]) -> Iterator[Lanes]:
        """Every state of a fixed order, one batch of blocks after the other.

        Only the picks are masked in a state; positions that are neither masked nor revealed show [MASK]. Under
        cache=prefix a batch is one block: its states are evaluated from the same position on, so a call of them wastes
        none.
        """
        done, by_block = 0, self.denoiser.cache == "prefix"
        while done < len(places):
            count = 1 if by_block else self._loop.fits(group.view, rule, group.fresh(places[done : done + 1]))
            lanes, done = group.fresh(places[done : done + count]), done + count
            while len(lanes):
                decision = decide(rule, None, lanes, group.numbers)
                pick = decision.pick  # (R, W)
                states = dataclasses.replace(lanes, masked=pick, memory=())
                if rule.may_pick_none:
                    states = states.select(pick.any(1))
                if len(states):
                    yield states
                lanes = lanes.reveal(pick, group.targets.of(lanes), decision.memory)
                lanes = lanes.select(lanes.masked.any(1))

    @torch.inference_mode()
    def _samples(
        self, prompts: list[Window], choose: Callable[[list[int]], Choose], stop: Stop | None
    ) -> Iterator[tuple[int, Sample]]:
        for n, prompt in enumerate(prompts):
            if not prompt.target:
                yield n, Sample.from_score(self.empty_score, (), prompt.tail)
        for numbers in self._groups(prompts):
            yield from self._sample_group([prompts[n] for n in numbers], numbers, choose(numbers), stop)

    def _sample_group(
        self, prompts: list[Window], numbers: list[int], choose: Choose, stop: Stop | None
    ) -> Iterator[tuple[int, Sample]]:
        """One lane for each row: a finished block is committed, and the row's next block enters."""
        rows = Rows.from_windows(prompts, self.denoiser.device)
        view, results = self.denoiser.open(rows, generating=True), SampleAccumulator(rows, prompts, self.traced)
        blocks = [deque(self.blocks(prompt)) for prompt in prompts]  # of each row, those not started
        queue = Queue([fresh(rows, [(n, *left.popleft()) for n, left in enumerate(blocks)])])
        for finished in self._loop.run(view, self._rule(choose), queue, choose, results, numbers):
            view.commit(finished)
            following = []
            for n in finished.row.tolist():
                if not blocks[n]:
                    continue
                if stop and stop(numbers[n], results.tokens(n, end=blocks[n][0][0])):
                    results.stop(n)
                else:
                    following.append((n, *blocks[n].popleft()))
            if following:
                queue.put_first(fresh(rows, following))
            for n, sample in results.take(finished):
                self.counts.add(sample, len(sample.tokens))
                yield numbers[n], sample


def as_windows(contexts: Sequence[Ids], length: int, suffix: Ids, tail: int) -> list[Window]:
    """The rows to generate, as windows whose targets are placeholders."""
    if length < 0:
        raise DuelError(f"length is the number of tokens to generate, at least 0; got {length}.")
    return [Window(context, (0,) * length, suffix, tail) for context in contexts]


class Autoregressive(DuelEstimator):
    """The chain rule of an autoregressive network: the same windows, with one forward for each.

    Raises:
        DuelError: the network is not autoregressive.
    """

    name = "ar"

    def __init__(
        self,
        denoiser: Denoiser,
        grid: str = "auto",
        batch_size: int | None = None,
        max_batch_size: int | None = None,
        traced: bool = False,
    ):
        if denoiser.attention != "causal":
            raise DuelError(
                f"estimator=ar is the chain rule of an autoregressive network; this one is {denoiser.attention}. "
                "Use estimator=duel (or elbo, mixture, oracle)."
            )
        super().__init__(denoiser, rules.LeftToRight(), 1, grid, batch_size, max_batch_size, traced)
