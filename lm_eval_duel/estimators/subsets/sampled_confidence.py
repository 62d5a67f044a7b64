"""The exact likelihood of samplers that select after sampling, and the sampler itself.

Every masked position draws a token, and the most probable draws are kept: LLaDA at a temperature above 0, SDAR, LLaDA2,
Fast-dLLM, Dream's maskgit_plus. The order then depends on tokens that are thrown away, so a text has many orders, and
its probability is a sum over them. It needs the states that the lattice evaluates, and no more.

While the positions H are masked, position j draws token v with probability q_j(v), and the draws with the largest
scores s_j(v) are kept. With c_i = s_i(x_i) for the text x, the positions A of H are kept with their tokens x, and no
others, with probability

    n       |A| = min(n, |H|), a the member of A that ranks last (smallest c; of equals, the rightmost):
            P(A) = prod over i in A of q_i(x_i)  x  prod over j in H - A of q_j{v ranks after x_a}
    tau     all c_i > tau and |A| >= min(n, |H|):
            P(A) = prod over i in A of q_i(x_i)  x  prod over j in H - A of q_j{s_j(v) <= tau}
            fewer above tau: as n

The draws at the positions of H - A are thrown away, so their probabilities are summed. n may depend on |H|.

Shapes: N windows, L row length, R lanes, W block width, B blocks of a chunk, m masked positions, S = 2^m states, x sets
of one size, h positions of a set, K = 2^h subsets of a set.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch

from lm_eval_duel import fingerprint, rules
from lm_eval_duel.core.decision import EVALUATE_ALL
from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.core.lanes import Lanes
from lm_eval_duel.core.predictions import Predictions
from lm_eval_duel.core.reveal import Reveal, WindowGroup
from lm_eval_duel.core.scores import Counts, IndexedScores, Sample, Step, WindowScore
from lm_eval_duel.core.tokens import Argmax, Draw
from lm_eval_duel.core.windows import Ids, Window
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.checks import check_every_order
from lm_eval_duel.estimators.duel import DuelEstimator
from lm_eval_duel.estimators.subsets.arguments import LATTICE_BLOCK, check_block, read_confidence
from lm_eval_duel.estimators.subsets.counts import StepCounts, table
from lm_eval_duel.estimators.subsets.drawn import compare, score_of, token_scores, untempered
from lm_eval_duel.estimators.subsets.sets import number_of, product, sum_over_subsets
from lm_eval_duel.estimators.subsets.states import Chunk, SubsetAccumulator
from lm_eval_duel.hashing import uniform

SCORED_AT_ONCE = 64  # samples


class SampledConfidence(DuelEstimator):
    """A sampler that keeps the most probable of the tokens drawn: one distribution, to score and to sample.

    `n`: how many draws are kept at a step, 1 if nothing is given; ties go to the lowest position. `steps`: instead of
    n, in how many steps a block is revealed; `schedule`: with m positions, m // S + (i < m mod S) at step i ("even":
    LLaDA), or Dream's noise levels ("dream", see `rules.scheduled.Dream`). `tau`: keep all draws whose confidence
    exceeds it, and at least the n best. `strict=False`: all that reach it. `confidence`: a draw's probability under
    the network's own distribution ("untempered": LLaDA, Fast-dLLM), or under that from which it is drawn, after
    temperature, top_k and top_p ("tempered": SDAR, LLaDA2, Dream). Temperature is the denoiser's. `block`: at most 12
    positions. Other arguments as in `Estimator`.

    Raises:
        DuelError: an argument is wrong, the block is too large, or this network cannot evaluate every state of a block.
    """

    name = "sampled_confidence"
    takes_known = False

    def __init__(
        self,
        denoiser: Denoiser,
        block: int | str | None = "auto",
        grid: str = "auto",
        batch_size: int | None = None,
        max_batch_size: int | None = None,
        traced: bool = False,
        n: int | None = None,
        tau: float | None = None,
        confidence: str = "untempered",
        strict: bool = True,
        steps: int | None = None,
        schedule: str = "even",
    ):
        given = {"n": n, "tau": tau, "confidence": confidence, "strict": strict, "steps": steps, "schedule": schedule}
        read = read_confidence(given)
        check_every_order(denoiser, self.name)
        self.tau, self.confidence, self.strict = read["tau"], read["confidence"], read["strict"]
        self.counted = StepCounts(read["n"] or 1, read["steps"], read["schedule"], or_more=self.tau is not None)
        rule = BestDrawn(self.counted, self.tau, self.strict)
        super().__init__(denoiser, rule, block, grid, batch_size, max_batch_size, traced)
        check_block(self.name, self.block, only=denoiser.block is not None)
        self.scale  # noqa: B018 - raises DuelError for a truncated distribution

    @property
    def scale(self) -> float:
        """By how much the logits are multiplied in the confidence."""
        return untempered(self.denoiser) if self.confidence == "untempered" else 1.0

    def describe(self) -> dict[str, object]:
        tau = {} if self.tau is None else {"tau": fingerprint.number(self.tau), "strict": str(self.strict).lower()}
        counts = self.counted
        steps: dict[str, object] = {"n": counts.n}
        if counts.steps is not None:
            steps = {"steps": counts.steps, "schedule": counts.schedule}
        return {
            "estimator": self.name,
            "block": self.block,
            "grid": self.grid,
            **steps,
            **tau,
            "confidence": self.confidence,
        }

    def with_denoiser(self, denoiser: Denoiser) -> SampledConfidence:
        twin = super().with_denoiser(denoiser)
        assert isinstance(twin, SampledConfidence)
        twin.scale  # noqa: B018 - raises DuelError for a truncated distribution
        return twin

    def replay(self, windows: Sequence[Window], steps: Sequence[Ids]) -> list[WindowScore]:
        """Not defined: a text has many orders here. `Duel.replay` follows one."""
        raise DuelError("estimator=sampled_confidence sums over orders; to follow a recorded one, use Duel.replay.")

    def stream_samples(
        self, contexts: Sequence[Ids], length: int, *, scored: bool = True, **settings: Any
    ) -> Iterator[tuple[int, Sample]]:
        """As `DuelEstimator.stream_samples`. The log-probability of a sample is that of its text, over all orders.

        It takes all states of each block, far more than sampling does. `scored=False` leaves it out: log_prob is NaN.
        """
        samples = super().stream_samples(contexts, length, **settings)
        if not scored:
            yield from ((n, _unscored(sample)) for n, sample in samples)
            return
        suffix, waiting = tuple(settings.get("suffix", ())), []
        for n, sample in samples:
            waiting.append((n, sample))
            if len(waiting) == SCORED_AT_ONCE:
                yield from self._with_scores(contexts, suffix, waiting)
                waiting = []
        yield from self._with_scores(contexts, suffix, waiting)

    def _with_scores(
        self, contexts: Sequence[Ids], suffix: tuple[int, ...], samples: list[tuple[int, Sample]]
    ) -> list[tuple[int, Sample]]:
        """The samples with the log-probability of their texts. They are counted once."""
        scorer = copy.copy(self)
        scorer.counts = Counts()
        scores = scorer.log_prob([Window(contexts[n], sample.tokens, suffix, sample.tail) for n, sample in samples])
        self.counts.forwards += scorer.counts.forwards
        self.counts.rows += scorer.counts.rows
        return [
            (n, dataclasses.replace(_unscored(sample), log_prob=score.log_prob, is_greedy=score.is_greedy))
            for (n, sample), score in zip(samples, scores, strict=True)
        ]

    def sampler(self, keys: Sequence[int] | None, seed: int) -> tuple[rules.Rule, Draw]:
        draw: Draw = Argmax() if keys is None else StepDraws(keys, seed, self.denoiser.device)
        return BestDrawn(self.counted, self.tau, self.strict, self.scale, draw), draw

    def score_group(self, group: WindowGroup) -> IndexedScores:
        tables = DrawnAccumulator(group, self)
        return iter(Reveal(group, EVALUATE_ALL, tables.states(), tables, self.budget, self.counts))


def _unscored(sample: Sample) -> Sample:
    """A sample whose log-probability is not known: that of its order is not that of its text."""
    return dataclasses.replace(sample, log_prob=math.nan, is_greedy=False, token_logprobs=())


@dataclasses.dataclass(frozen=True)
class BestDrawn(rules.Rule):
    """Draws a token at every masked position, and picks the n best, or all above `tau` and at least the n best."""

    name: ClassVar[str] = "sampled_confidence"
    counts: StepCounts  # n of each step
    tau: float | None = None
    strict: bool = True
    scale: float = 1.0
    draw: Draw | None = None

    def __call__(self, predictions: Predictions, lanes: Lanes) -> rules.Decision:
        assert self.draw is not None
        tokens = self.draw(predictions, lanes, lanes.masked)  # (R, W)
        return rules.Decision(self.pick(token_scores(predictions, tokens, self.scale), lanes))

    def pick(self, score: torch.Tensor, lanes: Lanes) -> torch.Tensor:
        """Which of the draws with these scores are kept, (R, W) bool."""
        masked, n = lanes.masked, self.counts.of_lanes(lanes)[:, None]  # (R, W), (R, 1)
        key = torch.where(masked, score.clamp(min=torch.finfo(score.dtype).min), -math.inf)  # (R, W)
        best = masked & (rules.rank(-key) < n)  # (R, W)
        if self.tau is None:
            return best
        threshold = score_of(self.tau)
        above = masked & (score > threshold if self.strict else score >= threshold)  # (R, W)
        return torch.where(above.sum(1, keepdim=True) >= best.sum(1, keepdim=True), above, best)


class StepDraws:
    """Samples: at every step a new draw at each position, a function of the row's key, the position, the step and the
    seed.

    The tokens drawn for one set of predictions are kept, so that a pick reveals the tokens it was decided by.
    """

    def __init__(self, keys: Sequence[int], seed: int, device: torch.device):
        self.keys, self.seed = torch.tensor(keys, device=device), seed  # (N,)
        self.last: tuple[Predictions, torch.Tensor] | None = None

    def __call__(self, predictions: Predictions, lanes: Lanes, pick: torch.Tensor) -> torch.Tensor:
        if self.last is None or self.last[0] is not predictions:
            position = lanes.columns - lanes.origin[:, None]  # (R, W)
            u = uniform(self.keys[lanes.row][:, None], position, lanes.step[:, None], self.seed)  # (R, W)
            self.last = predictions, predictions.draw(torch.where(lanes.masked, u, math.nan))
        return torch.where(pick, self.last[1], -1)


@dataclasses.dataclass
class DrawnChunk(Chunk):
    """The draws in all states of some blocks while they are entered."""

    log_probs: torch.Tensor  # (B, S, m) log q of each position's target
    score: torch.Tensor  # (B, S, m) of each position's target
    log_after: torch.Tensor  # (B, S, m, m) as in `drawn.Draws`
    log_quiet: torch.Tensor  # (B, S, m)
    after: torch.Tensor  # (B, S) the state that follows if every draw is the most probable token
    missed: torch.Tensor  # (B, S) bool: that step reveals a token which is not the target


class DrawnAccumulator(SubsetAccumulator):
    """The draws of one group of windows: entered call by call, and folded as each chunk is complete."""

    values = LATTICE_BLOCK + 4  # at most m + 4 of each position

    def __init__(self, group: WindowGroup, estimator: SampledConfidence):
        super().__init__(group, estimator)
        self.counts, self.scale = estimator.counted, estimator.scale
        self.rule = BestDrawn(self.counts, estimator.tau, estimator.strict)
        self.tau = None if estimator.tau is None else score_of(estimator.tau)
        self.log_prob = torch.zeros(len(group.windows), dtype=torch.float64, device=group.rows.ids.device)  # (N,)
        self.greedy = torch.ones_like(self.log_prob, dtype=torch.bool)  # (N,)
        self.steps = torch.zeros_like(self.log_prob, dtype=torch.int64)  # (N,)

    def reached(self, lanes: Lanes) -> torch.Tensor:
        return self.counts.of_lanes(lanes) > 0

    def new_chunk(self, lanes: Lanes, states: int, most: int) -> DrawnChunk:
        log_probs = self.log_prob.new_full((len(lanes), 1 << most, most), math.nan)  # (B, S, m)
        after = torch.zeros_like(log_probs[:, :, 0], dtype=torch.int64)  # (B, S)
        return DrawnChunk(
            lanes,
            states,
            log_probs=log_probs,
            score=log_probs.clone(),
            log_after=log_probs[..., None].repeat(1, 1, 1, most),
            log_quiet=log_probs.clone(),
            after=after,
            missed=torch.zeros_like(after, dtype=torch.bool),
        )

    def add(self, step: Step) -> None:
        """Enter the draws of these states, and what argmax decoding does."""
        lanes, predictions, _, tokens, log_prob = step
        located = self.locate(lanes)
        drawn = compare(predictions, tokens, self.scale, 0.0 if self.tau is None else self.tau, self.rule.strict)
        pick = self.rule.pick(drawn.top, lanes)  # (R, W)
        missed = (pick & (predictions.argmax != tokens)).any(1)  # (R,)
        after = number_of(lanes.masked & ~pick, located.position)  # (R,)
        r, w, other = (lanes.masked[:, :, None] & lanes.masked[:, None]).nonzero().unbind(1)  # (X,)
        for n in located.chunk.unique().tolist():
            mine = located.chunk[r] == n  # (X,)
            i, first, second = r[mine], located.position[r, w][mine], located.position[r, other][mine]
            values = drawn.log_after[i, w[mine], other[mine]]  # (x,)
            self.chunks[n].log_after[located.block[i], located.state[i], first, second] = values
        positions = {"log_probs": log_prob, "score": drawn.score, "log_quiet": drawn.log_quiet}
        self.enter(lanes, located, {"after": after, "missed": missed}, positions)

    def fold(self, chunk: DrawnChunk) -> None:
        row, positions = chunk.lanes.row, chunk.lanes.masked.sum(1)  # (B,)
        value = self._value(chunk).gather(1, chunk.full[:, None])[:, 0]  # (B,)
        self.log_prob.index_add_(0, row, value)
        self.steps.index_add_(0, row, torch.tensor([len(self.counts.of_block(m)) for m in positions.tolist()]).to(row))
        self.greedy[row[~decodes_to_targets(chunk)]] = False

    def _value(self, chunk: DrawnChunk) -> torch.Tensor:
        """log p of the targets in each state, (B, S)."""

        def log_step(
            state: torch.Tensor, position: torch.Tensor, chosen: torch.Tensor, count: torch.Tensor
        ) -> torch.Tensor:
            log_p, score, log_quiet = (
                plane[:, state[:, None], position] for plane in (chunk.log_probs, chunk.score, chunk.log_quiet)
            )  # (B, x, h) each
            log_after = chunk.log_after[:, state[:, None, None], position[:, :, None], position[:, None]]  # B, x, h, h
            above = torch.zeros_like(score, dtype=torch.bool)
            if self.tau is None:
                total = log_p.new_full((*log_p.shape[:2], len(chosen)), -math.inf)  # (B, x, K)
            else:
                above = score > self.tau if self.rule.strict else score >= self.tau  # (B, x, h)
                total = product(log_p.where(above, -math.inf), log_quiet).where(chosen >= count, -math.inf)
            for last in range(position.shape[1]):
                earlier = score > score[:, :, last, None]  # (B, x, h) ranks before `last`
                earlier[:, :, :last] |= score[:, :, :last] == score[:, :, last, None]
                earlier[:, :, last] = True
                log_out = log_after[:, :, :, last].clone()  # (B, x, h)
                log_out[:, :, last] = -math.inf
                weight = product(log_p.where(earlier, -math.inf), log_out)  # (B, x, K)
                possible = (chosen == count) & ~above[:, :, last, None]  # (B, x, K)
                total = total.maximum(weight.where(possible, -math.inf))  # others are -inf: a set has one last member
            return total

        counts = table(self.counts, chunk.full.device)[chunk.lanes.masked.sum(1)]  # (B, M + 1)
        return sum_over_subsets(counts, chunk.log_probs, log_step)

    def score(self, row: int) -> WindowScore:
        return WindowScore(
            float(self.log_prob[row]),
            is_greedy=bool(self.greedy[row]),
            nfe=int(self.steps[row]) if self.tau is None else None,
        )


def decodes_to_targets(chunk: DrawnChunk) -> torch.Tensor:
    """Whether each block's targets are what argmax decoding writes, (B,) bool."""
    state = chunk.full
    block = torch.arange(len(state), device=state.device)
    greedy = torch.ones_like(state, dtype=torch.bool)
    while (state > 0).any():
        greedy &= ~(chunk.missed[block, state] & (state > 0))
        state = chunk.after[block, state] * (state > 0)
    return greedy
