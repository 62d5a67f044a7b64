"""Samplers that select after sampling (LLaDA above temperature 0, SDAR, LLaDA2, Fast-dLLM, Dream's maskgit_plus).

At each step every masked position j samples a token, its *candidate*: v with probability q_j(v). The candidates with
the largest scores s_j(v) are kept; the others are thrown away, so their probabilities are summed.

    to sample   `CandidateTokens` are the candidates of a step, and the rule `BestCandidates` picks those to keep
    to score    `compare_with_targets` reads from the predictions what candidates may be, relative to the targets, and
                `SampledConfidence.moves` makes P(A | H) of order_sums.py from it

With c_i = s_i(x_i) for the text x, the positions A of H are kept with their tokens x, and no others, with probability

    n       |A| = min(n, |H|), a the member of A that ranks last (smallest c; of equals, the rightmost):
            P(A) = prod over i in A of q_i(x_i)  x  prod over j in H - A of q_j{v ranks after x_a}
    tau     all c_i > tau and |A| >= min(n, |H|):
            P(A) = prod over i in A of q_i(x_i)  x  prod over j in H - A of q_j{s_j(v) <= tau}
            fewer above tau: as n

n may depend on |H|. The score of a token grows with its probability p, and does not saturate near 1: log p up to
p = 1/2, and log p - log(1 - p) - log 2 above.

Shapes: N windows, R lanes (r in a part of them), W block width, u rows of logits, C masked positions, V tokens, X
states of one size (x of them that a step may leave), c products.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, cast

import torch

from lm_eval_duel import rules
from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.core.hashing import uniform
from lm_eval_duel.core.lanes import Lanes
from lm_eval_duel.core.logits import log_p1, log_p_of, top_of
from lm_eval_duel.core.predictions import Predictions
from lm_eval_duel.core.reveal import ArgmaxTokens, SampledTokens, Step, TokenSource
from lm_eval_duel.core.scores import Counts, Sample, Score
from lm_eval_duel.core.windows import Ids, Window
from lm_eval_duel.denoisers.filters import Warp
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.arguments import ConfidenceArguments
from lm_eval_duel.estimators.base import Estimator
from lm_eval_duel.estimators.duel import DuelEstimator
from lm_eval_duel.estimators.moves import Moves, Products, StateLevel, StepCounts, Tables, subsets
from lm_eval_duel.estimators.order_sums import OrderSum
from lm_eval_duel.rules.base import log_odds

LARGEST = 1e300  # the score of a token of probability 1: finite, so that the next larger float exists
SCORED_AT_ONCE = 64  # samples


# ---------------------------------------------------------------- the sampler, to sample and to score


class SampledConfidence(OrderSum, DuelEstimator):
    """A sampler that keeps the most probable of the tokens sampled: one distribution, to score and to sample.

    Args:
        denoiser: A network, with the sampler's temperature, top_k and top_p.
        block: At most 12 positions.
        arguments: n, tau, strict, steps, schedule and confidence, as in docs/estimators.md. Ties go to the lowest
            position. Of S `steps` of a block of m positions, step i keeps m // S + (i < m mod S) tokens ("even":
            LLaDA), or follows Dream's noise levels ("dream"). The `confidence` is "untempered" in LLaDA and Fast-dLLM,
            "tempered" in SDAR, LLaDA2 and Dream.
        layout: The other arguments of `Estimator`.

    Raises:
        DuelError: If an argument is wrong, or the network cannot evaluate every state of such a block.
    """

    name = "sampled_confidence"
    takes_known = False
    takes_noise = "no"
    rule: BestCandidates

    def __init__(
        self,
        denoiser: Denoiser,
        block: int | str | None,
        arguments: ConfidenceArguments | None = None,
        **layout: Any,
    ):
        self.arguments = arguments or ConfidenceArguments()
        rule = BestCandidates.from_arguments(denoiser, self.arguments)
        super().__init__(denoiser, block, rule=rule, **layout)

    def describe(self) -> dict[str, object]:
        return {**Estimator.describe(self), **self.arguments.describe()}

    def with_denoiser(self, denoiser: Denoiser) -> SampledConfidence:
        twin = cast(SampledConfidence, super().with_denoiser(denoiser))
        twin.rule = BestCandidates.from_arguments(denoiser, self.arguments)
        return twin

    def replay(self, windows: Sequence[Window], reveal_steps: Sequence[Ids]) -> list[Score]:
        """Raise DuelError: a text has many orders here. A Duel with estimator="duel" follows one."""
        raise DuelError("estimator=sampled_confidence sums over orders; to follow a recorded one, use Duel.replay.")

    # ------------------------------------------------------------ to sample

    def rule_and_tokens(self, keys: Sequence[int] | None, seed: int) -> tuple[rules.Rule, TokenSource]:
        candidates: TokenSource = ArgmaxTokens()
        if keys is not None:
            candidates = CandidateTokens(keys, seed, self.denoiser.device)
        # the rule judges the candidates, and the loop reveals those that it picks
        return dataclasses.replace(self.rule, candidates=candidates), candidates

    def stream_samples(
        self, contexts: Sequence[Ids], length: int, *, scored: bool = True, **settings: Any
    ) -> Iterator[tuple[int, Sample]]:
        """Like `DuelEstimator.stream_samples`; the log-probability of a sample sums over all orders of its text.

        The sum takes all states of each block, far more than sampling. With `scored=False`, log_prob is NaN.
        """
        samples = super().stream_samples(contexts, length, **settings)
        if not scored:
            for n, sample in samples:
                yield n, _unscored(sample)
            return
        suffixes = settings.get("suffixes") or [()] * len(contexts)
        waiting = []
        for n, sample in samples:
            waiting.append((n, sample))
            if len(waiting) == SCORED_AT_ONCE:
                yield from self._with_scores(contexts, suffixes, waiting)
                waiting = []
        yield from self._with_scores(contexts, suffixes, waiting)

    def _with_scores(
        self,
        contexts: Sequence[Ids],
        suffixes: Sequence[Ids],
        samples: list[tuple[int, Sample]],
    ) -> Iterator[tuple[int, Sample]]:
        """The samples with the log-probabilities of their texts. Scoring counts as work, not as more windows."""
        windows = []
        for n, sample in samples:
            windows.append(Window(contexts[n], sample.tokens, suffixes[n], sample.tail))
        scorer = self.with_counts(Counts(), self.row_checks)
        scores = scorer.log_prob(windows)
        self.counts.add_work(scorer.counts)
        for (n, sample), score in zip(samples, scores, strict=True):
            with_score = dataclasses.replace(
                _unscored(sample),
                log_prob=score.log_prob,
                is_greedy=score.is_greedy,
            )
            yield n, with_score

    # ------------------------------------------------------------ to score

    def step_count(self, m: int) -> int | None:
        if self.arguments.tau is not None:  # the number depends on the text
            return None
        return len(self.rule.counts.all_steps(m))

    def step_begins(self, lanes: Lanes) -> torch.Tensor:
        return self.rule.counts.next_steps_of_lanes(lanes) > 0

    def read(self, step: Step) -> Tables:
        compared = self.rule.compare_with_targets(step.predictions, step.tokens)
        pick = self.rule.pick(compared.top_score, step.lanes)  # (R, W)
        return {
            "log_probs": step.log_prob,
            "score": compared.score,
            "log_after": compared.log_after,
            "log_not_above": compared.log_not_above,
            "pick": pick,
            "missed": pick & (step.predictions.argmax != step.tokens),
        }

    def moves(self, level: StateLevel, tables: Tables) -> Moves:
        """The moves that keep the n best candidates, and those that keep all above `tau`."""
        count = self.rule.counts.next_steps(level.block_size, level.masked.sum(1))  # (X,) n of each state
        above = level.masked & self.rule.above_tau(tables["score"])  # (X, W)
        products = [self._keep_best(level, tables, count, above)]
        if self.arguments.tau is not None:
            products.append(self._keep_all_above(level, tables, count, above))
        return subsets(Products.joined(products))

    def _keep_best(self, level: StateLevel, tables: Tables, count: torch.Tensor, above: torch.Tensor) -> Products:
        """The `count` (X,) best candidates: a product for each position whose target may rank last among them."""
        masked = level.masked  # (X, W)
        score = tables["score"]  # (X, W)
        # if the candidate that ranks last is above `tau`, so are all others, and `_keep_all_above` counts them
        may_be_last = masked & ~above & (count > 0)[:, None]  # (X, W)
        state, last = may_be_last.nonzero().unbind(1)  # (c,) each
        position = torch.arange(masked.shape[1], device=last.device)  # (W,)
        is_last = position == last[:, None]  # (c, W)

        # members of the subset rank before its last one: a larger score, or an equal one further left
        own_score = score[state]  # (c, W)
        last_score = score[state, last][:, None]  # (c, 1)
        before = (own_score > last_score) | ((own_score == last_score) & (position <= last[:, None]))  # (c, W)
        log_in = tables["log_probs"][state].where(before & masked[state], -math.inf)

        # candidates that are not kept rank after it
        log_out = tables["log_after"][state, :, last].masked_fill(is_last, -math.inf)  # the last one is a member
        log_out = log_out.where(masked[state], 0.0)
        return Products(state, log_in, log_out, fewest=count[state], most=count[state])

    def _keep_all_above(self, level: StateLevel, tables: Tables, count: torch.Tensor, above: torch.Tensor) -> Products:
        """All candidates above `tau`, of which there are at least `count` (X,)."""
        masked = level.masked  # (X, W)
        state = (count > 0).nonzero()[:, 0]  # (x,)
        log_in = tables["log_probs"][state].where(above[state], -math.inf)  # (x, W)
        log_out = tables["log_not_above"][state].where(masked[state], 0.0)  # (x, W)
        width = torch.full_like(state, masked.shape[1])  # (x,)
        return Products(state, log_in, log_out, fewest=count[state], most=width)


def _unscored(sample: Sample) -> Sample:
    """The sample without a log-probability: the one along its order is not the one of its text."""
    return dataclasses.replace(sample, log_prob=math.nan, is_greedy=False, token_logprobs=())


# ---------------------------------------------------------------- candidates, and the rule that keeps the best


class CandidateTokens(SampledTokens):
    """The candidates: at every step a new token at each position, so that a random number depends on the step, too.

    The tokens sampled from the last predictions are kept, so that a pick reveals the tokens that decided it.
    """

    last: tuple[Predictions, torch.Tensor] | None = None

    def __call__(self, predictions: Predictions, lanes: Lanes, pick: torch.Tensor) -> torch.Tensor:
        if self.last is None or self.last[0] is not predictions:
            position = lanes.columns - lanes.origin[:, None]  # (R, W)
            u = uniform(self.keys[lanes.row][:, None], position, lanes.step[:, None], self.seed)  # (R, W)
            self.last = predictions, predictions.sample(torch.where(lanes.masked, u, math.nan))
        return torch.where(pick, self.last[1], -1)


@dataclasses.dataclass(frozen=True)
class BestCandidates(rules.Rule):
    """Samples a candidate at every masked position, and picks the n best, or all above `tau` if these are more."""

    name: ClassVar[str] = "sampled_confidence"
    counts: StepCounts  # n of each step
    tau: float | None = None
    strict: bool = True
    scale: float = 1.0  # of the logits, in the confidence
    candidates: TokenSource | None = None  # None: to score alone

    @classmethod
    def from_arguments(cls, denoiser: Denoiser, arguments: ConfidenceArguments) -> BestCandidates:
        """The rule without its `candidates`. Raises DuelError for truncated distributions, see `untempered`."""
        scale = untempered(denoiser) if arguments.confidence == "untempered" else 1.0
        return cls(StepCounts.from_arguments(arguments), arguments.tau, arguments.strict, scale)

    def __call__(self, predictions: Predictions, lanes: Lanes) -> rules.Decision:
        assert self.candidates is not None
        tokens = self.candidates(predictions, lanes, lanes.masked)  # (R, W)
        return rules.Decision(self.pick(scores_of_tokens(predictions, tokens, self.scale), lanes))

    def pick(self, score: torch.Tensor, lanes: Lanes) -> torch.Tensor:
        """The candidates to keep among those with these scores, (R, W) bool."""
        masked = lanes.masked  # (R, W)
        n = self.counts.next_steps_of_lanes(lanes)[:, None]  # (R, 1)
        # a masked position with a score of -inf still ranks before one that is not masked
        lowest = torch.finfo(score.dtype).min
        key = torch.where(masked, score.clamp(min=lowest), -math.inf)  # (R, W)
        best = masked & (rules.rank(-key) < n)  # (R, W)
        if self.tau is None:
            return best
        above = masked & self.above_tau(score)  # (R, W)
        enough = above.sum(1, keepdim=True) >= best.sum(1, keepdim=True)  # (R, 1)
        return torch.where(enough, above, best)

    @property
    def threshold(self) -> float:
        """The score of `tau`."""
        return math.inf if self.tau is None else score_of_probability(self.tau)

    def above_tau(self, score: torch.Tensor) -> torch.Tensor:
        """The scores (R, W) above the threshold, (R, W) bool; none without a `tau`."""
        above = score > self.threshold if self.strict else score >= self.threshold
        return above & (self.tau is not None)

    def compare_with_targets(self, predictions: Predictions, targets: torch.Tensor) -> TargetComparison:
        """The candidates of all positions, compared with the targets (R, W) and the threshold."""
        return compare_with_targets(predictions, targets, self.scale, self.threshold, self.strict)

    def log_selection(
        self,
        predictions: Predictions,
        lanes: Lanes,
        targets: torch.Tensor,
        pick: torch.Tensor,
    ) -> torch.Tensor:
        """log p that exactly the candidates at `pick` are kept, given that these are the targets, (R,)."""
        compared = self.compare_with_targets(predictions, targets)

        # the candidate at `pick` that ranks last: the smallest score, and of equals the rightmost
        kept = torch.where(pick, compared.score, math.inf)  # (R, W)
        is_least = kept == kept.amin(1, keepdim=True)  # (R, W)
        last = is_least.int().cumsum(1).argmax(1)  # (R,)
        every = torch.arange(len(last), device=last.device)  # (R,)
        log_after = compared.log_after[every, :, last]  # (R, W)
        all_above = (self.above_tau(compared.score) | ~pick).all(1) & (self.tau is not None)  # (R,)

        # not `next_steps`, whose table ends at the largest block of the lattice: here blocks have any size
        sizes = zip(lanes.in_target.sum(1).tolist(), lanes.masked.sum(1).tolist(), strict=True)
        counts = [self.counts.next_step(m, masked) for m, masked in sizes]
        wanted = torch.tensor(counts, device=pick.device)  # (R,)
        count = pick.sum(1)  # (R,)
        fits = torch.where(all_above, count >= wanted, count == wanted)  # (R,)
        possible = fits & (wanted > 0)  # (R,)

        # the candidates at all other positions are not kept
        log_not_kept = torch.where(all_above[:, None], compared.log_not_above, log_after)  # (R, W)
        others = torch.where(lanes.masked & ~pick, log_not_kept, 0.0)  # (R, W)
        return others.sum(1).where(possible, -math.inf)


def untempered(denoiser: Denoiser) -> float:
    """The factor of the logits of `denoiser` that undoes its temperature.

    Raises:
        DuelError: If its distributions are truncated as well, which cannot be undone.
    """
    scale = 1.0
    for warp in denoiser.filters:
        if not isinstance(warp, Warp):
            continue
        if warp.truncates:
            raise DuelError(
                "confidence=untempered is the probability before temperature, and no sampler that we know combines it "
                f"with top_k or top_p; got {warp}. Leave them out, or use confidence=tempered."
            )
        scale *= warp.temperature
    return scale


# ---------------------------------------------------------------- the scores of candidates


def score_of_probability(p: float) -> float:
    """The score of a token of probability p."""
    if p <= 0:
        return -math.inf
    if p <= 0.5:
        return math.log(p)
    return min(log_odds(p) - math.log(2), LARGEST)


def scores_of_vocabulary(logits: torch.Tensor, scale: float) -> torch.Tensor:
    """The score of every token under softmax(scale x logits), for logits (u, V), float64 (u, V)."""
    scaled = logits.double() * scale  # (u, V)
    top = top_of(scaled)
    score = log_p_of(scaled, top)  # (u, V)
    # only the top token may be more probable than 1/2
    top_score = torch.where(top.confidence > 0, top.confidence - math.log(2), log_p1(top.confidence))
    top_score = top_score.clamp(max=LARGEST)
    return score.scatter_(1, top.token[:, None], top_score[:, None])


def scores_of_tokens(predictions: Predictions, tokens: torch.Tensor, scale: float) -> torch.Tensor:
    """The scores of `tokens` (R, W) at the masked positions, float64 (R, W); NaN elsewhere."""
    masked = predictions.masked
    plane = torch.full_like(masked, math.nan, dtype=torch.float64)  # (R, W)
    for part, row, logits in predictions.by_lanes():
        masked_part = masked[part]  # (r, W)
        ids = tokens[part][masked_part]  # (C,)
        plane[part][masked_part] = scores_of_vocabulary(logits, scale)[row, ids]
    return plane


class TargetComparison(NamedTuple):
    """The candidate that each position may sample, compared with the targets of its lane and with `tau`."""

    score: torch.Tensor  # (R, W) of each position's target
    top_score: torch.Tensor  # (R, W) of each position's most probable token
    log_after: torch.Tensor  # (R, W, W) log p that the candidate of a position ranks after the target of another
    log_not_above: torch.Tensor  # (R, W) log p that the candidate of a position does not exceed `tau`


def compare_with_targets(
    predictions: Predictions,
    targets: torch.Tensor,
    scale: float,
    threshold: float,
    strict: bool,
) -> TargetComparison:
    """Compare the candidates of every position with the targets (R, W) of its lane, and with the score `threshold`.

    One candidate ranks after another if its score is smaller, or equal and its position stands further right. `strict`:
    a candidate exceeds the threshold only if its score is larger. Values are NaN where its position is not masked.
    """
    masked = predictions.masked
    width = masked.shape[1]
    score_of_target = torch.full(masked.shape, math.nan, dtype=torch.float64, device=masked.device)  # (R, W)
    score_of_top = torch.full_like(score_of_target, math.nan)  # (R, W)
    log_not_above = torch.full_like(score_of_target, math.nan)  # (R, W)
    log_after = score_of_target.new_full((*masked.shape, width), math.nan)  # (R, W, W)
    for part, row, logits in predictions.by_lanes():
        scores = scores_of_vocabulary(logits, scale)  # (u, V)
        score = scores[row]  # (C, V)
        p = logits.double().softmax(1)[row]  # (C, V)
        masked_part = masked[part]  # (r, W)
        lane, position = masked_part.nonzero().unbind(1)  # (C,) each
        token = targets[part][masked_part]  # (C,)
        target_score = score.gather(1, token[:, None])[:, 0]  # (C,)
        targets_of_lane = torch.full_like(masked_part, math.inf, dtype=torch.float64)  # (r, W)
        targets_of_lane[lane, position] = target_score

        # A candidate ranks after the target of another position if its score is less. Of equal scores the one further
        # right ranks after, so there the bound is the next larger float, below which an equal score lies.
        bound = targets_of_lane[lane]  # (C, W)
        further_right = position[:, None] > torch.arange(width, device=bound.device)  # (C, W)
        next_larger = bound.nextafter(bound.new_tensor(math.inf))  # (C, W)
        bound = bound.where(~further_right | bound.isinf(), next_larger)

        # one pass over the vocabulary for all bounds: the mass below each is a cumulative sum over sorted bounds
        bound, order = bound.sort(1)
        reached = torch.searchsorted(bound, score, right=True)  # (C, V) how many bounds each score reaches
        mass = p.new_zeros(len(p), width + 1)  # (C, W + 1) by this number
        mass = mass.scatter_add_(1, reached, p).cumsum(1)[:, :width]  # (C, W)
        log_after[part][lane, position] = torch.empty_like(mass).scatter_(1, order, mass.log())

        not_above = score <= threshold if strict else score < threshold  # (C, V)
        score_of_target[part][lane, position] = target_score
        score_of_top[part][lane, position] = scores.amax(1)[row]
        log_not_above[part][lane, position] = torch.where(not_above, p, 0.0).sum(1).log()
    return TargetComparison(score_of_target, score_of_top, log_after, log_not_above)
