"""Exact likelihood and sampling under a deterministic unmasking rule (the paper, Algorithms 1 and 2).

    log p(x) = sum over steps t, over positions l picked at t, of log P_l[x_l]

One reveal loop serves both (core/reveal.py). They differ in the choice of tokens (core/tokens.py) and in what
follows a finished block. With the targets known every block starts from a known state, so all blocks of all windows are
lanes of one queue. When sampling, a row's next lane enters when its last one finishes.

Shapes: N windows, L row length, R lanes, W block width.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch

from lm_eval_duel import rules
from lm_eval_duel.arguments import whole
from lm_eval_duel.core.accumulators import ScoreAccumulator
from lm_eval_duel.core.decision import EVALUATE_ALL, UnmaskingRule
from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.core.reveal import BlockSpan, WindowGroup
from lm_eval_duel.core.row_checks import is_coarse
from lm_eval_duel.core.scores import IndexedScores, Sample, Score
from lm_eval_duel.core.tokens import Argmax, Draw, Draws
from lm_eval_duel.core.windows import Ids, Window, as_ids, target_parts
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.base import Estimator
from lm_eval_duel.estimators.checks import check_rule, check_windows, rule_for
from lm_eval_duel.estimators.fixed_orders import Replay, fixed_states
from lm_eval_duel.estimators.sampling import SampleAccumulator, Stop


class DuelEstimator(Estimator):
    """A denoiser, an unmasking rule and a block: one distribution, to score (`log_prob`, Algorithm 2) and to sample.

    Args:
        denoiser, block: As in `Estimator`.
        rule: The unmasking rule, such as "greedy:k=2", or an instance of `Rule`.
        layout: The other arguments of `Estimator`.

    Raises:
        DuelError: If the network does not support the rule, block or grid.
    """

    name = "duel"
    decodes = True
    takes_known = True

    def __init__(
        self, denoiser: Denoiser, rule: str | rules.Rule = "greedy", block: int | str | None = "auto", **layout: Any
    ):
        self.rule = rule_for(denoiser, rules.parse(rule) if isinstance(rule, str) else rule)
        check_rule(denoiser, self.rule)
        super().__init__(denoiser, block, **layout)

    @property
    def followed(self) -> rules.Rule:
        """The rule that the loop calls: the given one with its checks."""
        rule = rules.blockwise(self.rule, self.block) if self.rule.spans_blocks else self.rule
        return rules.with_checks(rule, self.counts, is_coarse(self.denoiser))

    def blocks(self, window: Window) -> list[tuple[int, int]]:
        places = super().blocks(window)
        if not self.rule.spans_blocks or not places:
            return places
        (start, _), (last, width) = places[0], places[-1]  # one lane for a chain of blocks
        return [(start, last + width - start)]

    def describe(self) -> dict[str, object]:
        return {**super().describe(), **self.rule.describe()}

    def with_denoiser(self, denoiser: Denoiser) -> DuelEstimator:
        """The same rule and block on a wrapped network of the same kind, with shared counts."""
        twin = copy.copy(self)
        twin.denoiser = denoiser
        return twin

    @torch.inference_mode()
    def replay(self, windows: Sequence[Window], reveal_steps: Sequence[Ids]) -> list[Score]:
        """Score windows along recorded orders; see `Duel.replay`."""
        orders, scores = self.checked_orders(windows, reveal_steps), [self.empty_score] * len(windows)
        for group in self.groups(windows, range(len(windows))):
            replay = Replay(tuple(orders[n] for n in group.window_indices))
            for row, scored in self.score_blocks(group, self.block_spans(group), replay):
                self.counts.add(scored, len(group.windows[row].target) - len(group.windows[row].known))
                scores[group.window_indices[row]] = scored
        self.row_checks.compare(self.counts)
        return scores

    def orders(self, windows: Sequence[Window], steps: Sequence[Ids]) -> list[tuple[int, ...]]:
        """The recorded orders of windows that can be scored: a step for each target token."""
        self.check(windows)
        if len(windows) != len(steps):
            raise DuelError(f"Each window needs its order; got {len(windows)} windows and {len(steps)} orders.")
        orders = [as_ids(order) for order in steps]
        for n, (window, order) in enumerate(zip(windows, orders, strict=True)):
            if len(order) != len(window.target):
                raise DuelError(f"Window {n} has {len(window.target)} target tokens but {len(order)} steps.", n)
        return orders

    def checked_orders(self, windows: Sequence[Window], steps: Sequence[Ids]) -> list[tuple[int, ...]]:
        """The recorded orders of windows that can be scored, with steps that count from 0 in each block."""
        orders = self.orders(windows, steps)
        for n, (window, order) in enumerate(zip(windows, orders, strict=True)):
            for part in target_parts(window, self.blocks(window)):
                inside = {order[index] for index in set(range(part.start, part.stop)) - set(window.known)}
                if inside != set(range(len(inside))) and not self.rule.may_pick_none:
                    raise DuelError(
                        f"Window {n}: the steps of a block must be 0..n-1 without gaps, not {sorted(inside)}."
                    )
        return orders

    def sample(self, contexts: Sequence[Ids], length: int, **settings: Any) -> list[Sample]:
        """Draw `length` tokens after each context (Algorithm 1); see `Duel.sample`."""
        samples = dict(self.stream_samples(contexts, length, **settings))
        return [samples[n] for n in range(len(contexts))]

    def stream_samples(
        self,
        contexts: Sequence[Ids],
        length: int,
        *,
        suffixes: Sequence[Ids] | None = None,
        tail: int = 0,
        do_sample: bool = True,
        seed: int = 0,
        keys: Sequence[int] | None = None,
        stop: Stop | None = None,
        scored: bool = True,
    ) -> Iterator[tuple[int, Sample]]:
        """Yield (index, sample) of each context as it is finished; see `Duel.stream_samples`.

        `scored=False`: the log-probability is not needed. Here it costs nothing, so samples have it in any case.
        """
        for what, given in (("key", keys), ("suffix", suffixes)):
            if given is not None and len(given) != len(contexts):
                raise DuelError(
                    f"sample needs a {what} for each context; got {len(contexts)} contexts and {len(given)}."
                )
        whole(0, "a number of tokens")("length", length)
        placeholder, suffixes = (0,) * length, [()] * len(contexts) if suffixes is None else suffixes
        prompts = [Window(context, placeholder, after, tail) for context, after in zip(contexts, suffixes, strict=True)]
        check_windows(self.denoiser, self.block, self.grid, prompts, generating=True)
        keys = range(len(contexts)) if keys is None else keys
        return self._sampled(prompts, keys if do_sample else None, seed, stop)

    @torch.inference_mode()
    def _sampled(
        self, prompts: Sequence[Window], keys: Sequence[int] | None, seed: int, stop: Stop | None
    ) -> Iterator[tuple[int, Sample]]:
        for n, prompt in enumerate(prompts):
            if not prompt.target:
                yield n, Sample(**vars(Estimator.empty_score), tail=prompt.tail)
        for group in self.groups(prompts, range(len(prompts)), generating=True):
            samples = SampleAccumulator(group, self, stop)
            rule, draw = self.sampler(None if keys is None else [keys[n] for n in group.window_indices], seed)
            first = group.fresh([samples.next_block(row) for row in range(len(group.windows))])
            sampled = self.reveal(group, rule, [first], samples, draw=draw, following=samples.following)
            for row, sample in cast(Iterator[tuple[int, Sample]], sampled):
                self.counts.add(sample, len(sample.tokens))
                yield group.window_indices[row], sample
        self.row_checks.compare(self.counts)

    def sampler(self, keys: Sequence[int] | None, seed: int) -> tuple[UnmaskingRule, Draw]:
        """The rule and the tokens to sample in rows with these keys; None: the most probable tokens."""
        return self.followed, Argmax() if keys is None else Draws(keys, seed, self.denoiser.device)

    # ------------------------------------------------------------ which lanes

    def score_group(self, group: WindowGroup) -> IndexedScores:
        return self.score_blocks(group, self.block_spans(group), self.followed)

    def score_blocks(self, group: WindowGroup, spans: Sequence[BlockSpan], rule: rules.Rule) -> IndexedScores:
        """Each of these blocks is a lane; (row, score) of each window that has one, as its last one is finished.

        Positions outside these blocks have the log-probability NaN and the step -1.
        """
        fresh = group.fresh(spans)
        expected = torch.zeros_like(group.rows.target).index_add_(0, fresh.row, fresh.masked.sum(1))  # (N,)
        scores = ScoreAccumulator(group.rows, self.traced, expected)
        if rule.fixed:  # all states are known before any is evaluated
            return self.reveal(group, EVALUATE_ALL, fixed_states(self, group, rule, spans), scores)
        return self.reveal(group, rule, [fresh], scores)


class Autoregressive(DuelEstimator):
    """The chain rule of an autoregressive network: log p = sum over i of log p(x_i | x_<i), one forward a window.

    Args:
        denoiser: A network with `attention="causal"`.
        layout: The other arguments of `Estimator`.

    Raises:
        DuelError: If the network is not autoregressive.
    """

    name = "ar"
    takes_known = False

    def __init__(self, denoiser: Denoiser, **layout: Any):
        if denoiser.attention != "causal":
            raise DuelError(
                f"estimator=ar is the chain rule of an autoregressive network; this one is {denoiser.attention}. "
                "Use estimator=duel (or elbo, mixture, oracle)."
            )
        super().__init__(denoiser, rules.LeftToRight(), 1, **layout)
