"""Exact likelihood and sampling under a deterministic unmasking rule (the paper, Algorithms 1 and 2).

    log p(x) = sum over steps t, over positions l picked at t, of log P_l[x_l]

One reveal loop serves both (core/reveal.py). They differ in the choice of tokens and in what follows a finished block.
With the targets known every block starts from a known state, so all blocks of all windows are lanes of one queue. When
sampling, a finished block is committed, so that later blocks see it, and then the row's next block enters. Orders that
are known before any network call, recorded ones for example, are evaluated in all their states at once. Where the noise
is random tokens instead of masks, `commit_once` says what masked positions show.

Shapes: N windows or prompts, T target positions, L row length, R lanes, W block width.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, ClassVar, TypeAlias, cast

import torch

from lm_eval_duel import rules
from lm_eval_duel.arguments import declared, has_index, has_order, whole
from lm_eval_duel.core.decision import EVALUATE_ALL, UnmaskingRule, require_pick
from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.core.lanes import Lanes
from lm_eval_duel.core.noise import CommitOnce
from lm_eval_duel.core.predictions import Predictions
from lm_eval_duel.core.reveal import (
    ArgmaxTokens,
    BlockSpan,
    SampledTokens,
    ScoreAccumulator,
    TokenSource,
    WindowGroup,
    naming_window,
)
from lm_eval_duel.core.scores import IndexedScores, Kind, Sample, Score
from lm_eval_duel.core.windows import Ids, Window, as_ids, target_parts
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.arguments import CommitOnceArguments
from lm_eval_duel.estimators.base import Estimator
from lm_eval_duel.estimators.checks import check_rule, check_windows, rule_for, warn_of_blocks

Stop: TypeAlias = Callable[[int, tuple[int, ...]], bool]  # (index, tokens so far) -> whether to stop here
KEY = dataclasses.replace(whole(None), nothing=())  # of a draw
OF_AN_ORDER = "along the given order: a likelihood only if a rule made that order"
CANVAS_ARGUMENTS = ("prediction", "temperatures")  # arguments that only networks with canvases read


class DuelEstimator(Estimator):
    """A denoiser, an unmasking rule and a block: one distribution, to score (`log_prob`, Algorithm 2) and to sample.

    Args:
        denoiser, block: As in `Estimator`.
        rule: The unmasking rule, such as "greedy:k=2", or an instance of `Rule`.
        arguments: For a network whose noise is random tokens.
        layout: The other arguments of `Estimator`.

    Raises:
        DuelError: If the network does not support the rule, block or grid.
    """

    name = "duel"
    decodes = True
    takes_known = True
    takes_noise = "both"

    def __init__(
        self,
        denoiser: Denoiser,
        rule: str | rules.Rule,
        block: int | str | None,
        arguments: CommitOnceArguments | None = None,
        **layout: Any,
    ):
        arguments = arguments or CommitOnceArguments()
        denoiser = commit_once(denoiser, arguments, self.name)
        self.noise_seed = arguments.noise_seed or 0
        if isinstance(rule, str):
            rule = rules.parse(rule)
        self.rule = rule_for(denoiser, rule)
        check_rule(denoiser, self.rule)
        super().__init__(denoiser, block, **layout)
        warn_of_blocks(self.rule, self.block)

    @cached_property
    def empty_score(self) -> Score:  # type: ignore[override]
        return dataclasses.replace(Estimator.empty_score, note=self.value_template.note)

    @property
    def followed(self) -> rules.Rule:
        """The rule that the loop calls: the given one with its checks."""
        rule = rules.blockwise(self.rule, self.block) if self.rule.spans_blocks else self.rule
        return rules.with_checks(rule, self.counts, self.denoiser)

    def blocks(self, window: Window) -> list[tuple[int, int]]:
        spans = super().blocks(window)
        if not self.rule.spans_blocks or not spans:
            return spans
        # one lane for the chain of all blocks
        first, _ = spans[0]
        last, width = spans[-1]
        end = last + width
        return [(first, end - first)]

    def describe(self) -> dict[str, object]:
        return {
            **super().describe(),
            **self.rule.describe(),
            **noise_spec(self.denoiser, self.noise_seed),
        }

    def with_denoiser(self, denoiser: Denoiser) -> DuelEstimator:
        """The same rule and block on a wrapped network of the same kind, with shared counts."""
        twin = copy.copy(self)
        twin.denoiser = denoiser
        return twin

    @torch.inference_mode()
    def replay(self, windows: Sequence[Window], reveal_steps: Sequence[Ids]) -> list[Score]:
        """Score windows along recorded orders; see `Duel.replay`."""
        orders = self.checked_orders(windows, reveal_steps)
        scores = [self.empty_score] * len(windows)
        with self.one_run():
            for group in self.groups(windows, range(len(windows))):
                replay = Replay(tuple(orders[n] for n in group.window_indices))
                for row, scored in self.score_blocks(group, self.block_spans(group), replay):
                    self.counts.add(scored, group.windows[row].scored_tokens)
                    note = " ".join(filter(None, [scored.note, OF_AN_ORDER]))
                    replayed = dataclasses.replace(scored, kind=Kind.NOT_A_LIKELIHOOD, note=note)
                    scores[group.window_indices[row]] = replayed
            self.row_checks.compare(self.counts)
        return scores

    def orders(self, windows: Sequence[Window], steps: Sequence[Ids]) -> list[tuple[int, ...]]:
        """The recorded orders of windows that can be scored: a step for each target token."""
        self.check(windows)
        if not has_index(steps):
            raise DuelError(f"reveal_steps is a list with an order for each window; got {steps!r:.80}.")
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
                scored = set(range(part.start, part.stop)) - set(window.known)
                steps_of_block = {order[index] for index in scored}
                has_gaps = steps_of_block != set(range(len(steps_of_block)))
                if has_gaps and not self.rule.may_pick_none:
                    raise DuelError(
                        f"Window {n}: the steps of a block must be 0..n-1 without gaps, not {sorted(steps_of_block)}."
                    )
        return orders

    def sample(self, contexts: Sequence[Ids], length: int, **settings: Any) -> list[Sample]:
        """Draw `length` tokens after each context (Algorithm 1); see `Duel.sample`."""
        with self.one_run():
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
        keys = range(len(contexts)) if keys is None else _whole_numbers(keys)
        for what, given in (("key", keys), ("suffix", suffixes)):
            if given is not None and len(given) != len(contexts):
                raise DuelError(f"Each context or prompt needs one {what}; got {len(given)} for {len(contexts)}.")
        whole(0, "a number of tokens")("length", length)
        if suffixes is None:
            suffixes = [()] * len(contexts)
        placeholder = (0,) * length  # the tokens to sample
        prompts = []
        for context, suffix in zip(contexts, suffixes, strict=True):
            prompts.append(Window(context, placeholder, suffix, tail))
        check_windows(self.denoiser, self.block, self.grid, prompts, generating=True)
        return self._sampled(prompts, keys if do_sample else None, seed, stop)

    @torch.inference_mode()
    def _sampled(
        self,
        prompts: Sequence[Window],
        keys: Sequence[int] | None,
        seed: int,
        stop: Stop | None,
    ) -> Iterator[tuple[int, Sample]]:
        """(index, sample) of each prompt; `keys` None: the most probable tokens instead of sampled ones."""
        for n, prompt in enumerate(prompts):
            if not prompt.target:
                yield n, Sample(**vars(Estimator.empty_score), tail=prompt.tail)
        for group in self.groups(prompts, range(len(prompts)), generating=True):
            samples = SampleAccumulator(group, self, stop)
            keys_of_rows = None
            if keys is not None:
                keys_of_rows = [keys[n] for n in group.window_indices]
            rule, token_source = self.rule_and_tokens(keys_of_rows, seed)
            first = group.fresh([samples.next_block(row) for row in range(len(group.windows))])
            sampled = self.reveal(
                group,
                rule,
                [first],
                samples,
                token_source=token_source,
                following=samples.following,
            )
            for row, sample in cast(Iterator[tuple[int, Sample]], sampled):
                self.counts.add(sample, len(sample.tokens))
                yield group.window_indices[row], sample
        self.row_checks.compare(self.counts)

    def rule_and_tokens(self, keys: Sequence[int] | None, seed: int) -> tuple[UnmaskingRule, TokenSource]:
        """The rule, and the source of the tokens of rows with these keys; None: the most probable tokens."""
        if keys is None:
            return self.followed, ArgmaxTokens()
        return self.followed, SampledTokens(keys, seed, self.denoiser.device)

    # ------------------------------------------------------------ which lanes

    def score_group(self, group: WindowGroup) -> IndexedScores:
        return self.score_blocks(group, self.block_spans(group), self.followed)

    def score_blocks(self, group: WindowGroup, spans: Sequence[BlockSpan], rule: rules.Rule) -> IndexedScores:
        """Score some of the blocks of a group: (row, score) of each window, as the last of its blocks is finished.

        Positions outside these blocks have the log-probability NaN and the step -1.
        """
        fresh = group.fresh(spans)
        expected = torch.zeros_like(group.rows.target)  # (N,) positions to reveal
        expected.index_add_(0, fresh.row, fresh.masked.sum(1))
        scores = ScoreAccumulator(group.rows, self.traced, expected, self.value_template.note)
        # Without random tokens (which show other noise at each step, and may feed a network its own output), all states
        # of a fixed order are known before any is evaluated.
        if rule.fixed and self.denoiser.noise_training is None:
            states = fixed_states(self, group, rule, spans)
            return self.reveal(group, EVALUATE_ALL, states, scores)
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
    takes_noise = "no"

    def __init__(self, denoiser: Denoiser, **layout: Any):
        if denoiser.attention != "causal":
            raise DuelError(
                f"estimator=ar is the chain rule of an autoregressive network; this one is {denoiser.attention}. "
                "Use estimator=duel (or elbo, mixture, oracle)."
            )
        super().__init__(denoiser, rules.LeftToRight(), 1, **layout)


class SampleAccumulator(ScoreAccumulator):
    """The samples of one group of prompts: their scores, their tokens, and the blocks that are not begun."""

    def __init__(self, group: WindowGroup, estimator: Estimator, stop: Stop | None):
        super().__init__(group.rows, estimator.traced, note=estimator.empty_score.note)
        self.group = group
        self.stop = stop
        # (first column, width) of the blocks of each row that have not begun
        self.blocks = [deque(estimator.blocks(prompt)) for prompt in group.windows]

    def next_block(self, row: int) -> BlockSpan:
        """The next block of a row."""
        return (row, *self.blocks[row].popleft())

    def following(self, finished: Lanes) -> Lanes | None:
        """Commit finished blocks, and begin the next block of each of their rows, unless it is complete or stops."""
        self.group.view.commit(finished)
        spans = []
        for row in finished.row.tolist():
            if not self.blocks[row]:
                continue
            if self._stops(row):
                self.blocks[row].clear()
                self.expected[row] = self.sums[row, 0]  # the sample is what has been revealed
                self.target[row] = int(self.expected[row])
            else:
                spans.append(self.next_block(row))
        return self.group.fresh(spans) if spans else None

    def _stops(self, row: int) -> bool:
        """True if the caller wants no further block in this row."""
        if self.stop is None:
            return False
        return self.stop(self.group.window_indices[row], self.tokens(row))

    def tokens(self, row: int) -> tuple[int, ...]:
        """The tokens of a row, up to the first block that has not begun."""
        origin = self.origin[row]
        end = origin + self.target[row]
        if self.blocks[row]:
            end, _ = self.blocks[row][0]
        return tuple(self.group.rows.ids[row, origin:end].tolist())

    def take(self, finished: Lanes) -> Iterator[tuple[int, Sample]]:
        """(row, sample) of each text that is complete."""
        for row, scored in super().take(finished):
            tokens = self.tokens(row)
            prompt = self.group.windows[row]
            tail = prompt.tail + len(prompt.target) - len(tokens)
            yield row, Sample(**vars(scored), tokens=tokens, tail=tail)


@dataclasses.dataclass(frozen=True)
class Replay(rules.Rule):
    """The recorded orders of a group of windows, as in `Score.reveal_steps`."""

    name: ClassVar[str] = "replay"
    fixed: ClassVar[bool] = True
    reads_step: ClassVar[bool] = True
    may_pick_none: ClassVar[bool] = True
    reveal_steps: tuple[tuple[int, ...], ...]  # of each row of the group

    @cached_property
    def _plane(self) -> torch.Tensor:
        """The step of each target position, -1 beyond the end of a target, (N, T)."""
        orders = [torch.tensor(order) for order in self.reveal_steps]
        return torch.nn.utils.rnn.pad_sequence(orders, batch_first=True, padding_value=-1)

    def __call__(self, predictions: Predictions, lanes: Lanes) -> rules.Decision:
        steps = self._plane.to(lanes.row.device)  # (N, T)
        index = lanes.columns - lanes.origin[:, None]  # (R, W) in the target
        index = index.clamp(0, steps.shape[1] - 1)
        recorded = steps[lanes.row[:, None], index]  # (R, W)
        return rules.Decision.certain(lanes.masked & (recorded == lanes.step[:, None]))


def fixed_states(
    estimator: Estimator,
    group: WindowGroup,
    rule: rules.Rule,
    spans: Sequence[BlockSpan],
) -> Iterator[Lanes]:
    """Every state of a fixed order, one batch of blocks after the other.

    Only the picks are masked in a state; positions that are neither masked nor revealed show [MASK].
    """

    def size(room: int) -> int:
        # Under cache=prefix a row is evaluated from its block on, and the rows of a call have one length. The states of
        # a single block waste nothing.
        return 1 if estimator.denoiser.cache == "prefix" else room

    for lanes, _ in estimator.batches(group, spans, size, rule):
        while len(lanes):
            with naming_window(lanes, group.window_indices):
                decision = rule(None, lanes)  # type: ignore[arg-type]  # it reads no predictions
                require_pick(rule, decision)
            pick = decision.pick  # (R, W)
            states = dataclasses.replace(lanes, masked=pick, memory=())
            if rule.may_pick_none:
                states = states.select(pick.any(1))
            if len(states):
                yield states
            lanes = lanes.reveal(pick, group.rows.targets(lanes), decision.memory)
            lanes = lanes.select(lanes.masked.any(1))


def _whole_numbers(keys: Any) -> list[int]:
    """The keys of draws; raises DuelError for any that is no whole number."""
    if not has_order(keys):
        raise DuelError(f"'keys' is a list of whole numbers; got {keys!r}.")
    return [KEY("keys", key) for key in keys]


# ---------------------------------------------------------------- noise of random tokens
# A masked position shows a noise token n(seed, block, step, position) in place of [MASK], and a token that is revealed
# stays. So given the seed a text has one path, and Algorithm 2 gives its exact likelihood (core/noise.py).


def commit_once(denoiser: Denoiser, arguments: CommitOnceArguments, name: str) -> Denoiser:
    """The network under a commit-once sampler with these arguments; one whose noise is masks, unchanged.

    Raises:
        DuelError: If an argument has no meaning for this network.
    """
    trained = denoiser.noise_training
    default = CommitOnceArguments()
    given = [key for key in declared(default) if getattr(arguments, key) != getattr(default, key)]
    if trained is None:
        if given:
            raise DuelError(
                f"'{given[0]}' is for networks whose noise is random tokens, and this one ({denoiser.family}) shows "
                "[MASK]. Leave it out."
            )
        return denoiser
    if denoiser.cache:
        raise DuelError(
            f"cache={denoiser.cache} keeps keys of the block's start, and what masked positions show changes at every "
            "step. Leave cache out."
        )
    if denoiser.hides_given:
        raise DuelError(f"cfg_scale has no sampler for noise of random tokens: leave it out of estimator={name}.")
    if denoiser.block is None:
        for key in CANVAS_ARGUMENTS:
            if key in given:
                instead = ", or pass temperature" if key == "temperatures" else ""
                raise DuelError(
                    f"'{key}' is for networks with canvases (DiffusionGemma), and this one is {denoiser.family}. Leave "
                    f"it out{instead}."
                )
    reads_itself = trained.self_conditioning != "none"
    if arguments.self_conditioning == "chain" and not reads_itself:
        raise DuelError("self_conditioning=chain: this network does not read its own output. Leave it out.")
    if not given and not reads_itself:
        return denoiser
    twin = copy.copy(denoiser)
    twin.commit_once = CommitOnce(
        leave_one_out=arguments.prediction == "leave_one_out",
        self_conditioning=reads_itself and arguments.self_conditioning != "none",
        temperatures=arguments.temperatures,
    )
    return twin


def noise_spec(denoiser: Denoiser, seed: int | None) -> dict[str, object]:
    """The entries of the spec about what masked positions show; none if it is [MASK]."""
    trained = denoiser.noise_training
    if trained is None:
        return {}
    spec: dict[str, object] = {"noise": trained.noise.name}
    if seed is not None:
        spec["noise_seed"] = seed
    if denoiser.block is None:
        spec["masked_share"] = "of the row" if denoiser.bos != "official" else "of the scored positions"
        spec["time"] = trained.note
        spec["ties"] = "rows of one token" if denoiser.relative_positions else "none"
        return spec
    predicts = denoiser.commit_once
    spec["prediction"] = "leave_one_out" if predicts.leave_one_out else "denoiser"
    spec["self_conditioning"] = "chain" if predicts.self_conditioning else "none"
    if predicts.leave_one_out:
        spec["masked_share"] = "of the canvas"
    if predicts.temperatures is not None:
        spec["temperatures"] = ":".join(f"{value:g}" for value in predicts.temperatures)
    spec["canvas"] = denoiser.block
    spec["last_canvas"] = "short"
    return spec
