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

Shapes: N windows, R lanes, W block width, X sets of a level, x of them that a step begins with, c products.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, cast

import torch

from lm_eval_duel import fingerprint, rules
from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.core.hashing import uniform
from lm_eval_duel.core.lanes import Lanes
from lm_eval_duel.core.predictions import Argmax, Draw, Draws, Predictions
from lm_eval_duel.core.reveal import Step
from lm_eval_duel.core.scores import Counts, Sample, Score
from lm_eval_duel.core.windows import Ids, Window
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.arguments import ConfidenceArguments, OrderArguments
from lm_eval_duel.estimators.base import Estimator
from lm_eval_duel.estimators.duel import DuelEstimator
from lm_eval_duel.estimators.subsets.moves import (
    DrawnScores,
    Moves,
    Planes,
    StateLevel,
    StepCounts,
    Thin,
    against_targets,
    in_turn,
    independent,
    score_of,
    token_scores,
    untempered,
)
from lm_eval_duel.estimators.subsets.set_sampler import SetSampler
from lm_eval_duel.rules.deployed import dream_shares

SCORED_AT_ONCE = 64  # samples


class SampledConfidence(SetSampler, DuelEstimator):
    """A sampler that keeps the most probable of the tokens drawn: one distribution, to score and to sample.

    Args:
        denoiser: A network, with the sampler's temperature, top_k and top_p.
        block: At most 12 positions, 48 with a beam.
        seed: The seed of a beam.
        arguments: n, tau, strict, steps, schedule, confidence, beam, tolerance and repetitions, as in
            docs/estimators.md, and the other arguments of `Estimator`. Ties go to the lowest position. Of S `steps` of
            a block of m positions, step i keeps m // S + (i < m mod S) draws ("even": LLaDA), or follows Dream's noise
            levels ("dream"). The `confidence` is "untempered" in LLaDA and Fast-dLLM, "tempered" in SDAR, LLaDA2 and
            Dream.

    Raises:
        DuelError: If an argument is wrong, or the network cannot evaluate every state of such a block.
    """

    name = "sampled_confidence"
    takes_known = False
    reads = ConfidenceArguments
    own: ConfidenceArguments
    rule: BestDrawn

    def __init__(self, denoiser: Denoiser, block: int | str | None = "auto", *, seed: int = 0, **arguments: Any):
        super().__init__(denoiser, block, seed=seed, **arguments)
        self.rule = BestDrawn.from_arguments(denoiser, self.own)

    def describe(self) -> dict[str, object]:
        own, counts = self.own, self.rule.counts
        tau = {} if own.tau is None else {"tau": fingerprint.number(own.tau), "strict": str(own.strict).lower()}
        scheduled = {"steps": counts.steps, "schedule": counts.schedule}
        steps = {"n": counts.n} if counts.steps is None else scheduled
        sampler = {**steps, **tau, "confidence": own.confidence, **own.describe(self.seed)}
        return {**Estimator.describe(self), **sampler}

    def with_denoiser(self, denoiser: Denoiser) -> SampledConfidence:
        twin = cast(SampledConfidence, super().with_denoiser(denoiser))
        twin.rule = BestDrawn.from_arguments(denoiser, self.own)
        return twin

    def replay(self, windows: Sequence[Window], reveal_steps: Sequence[Ids]) -> list[Score]:
        """Raise DuelError: a text has many orders here. A Duel with estimator="duel" follows one."""
        raise DuelError("estimator=sampled_confidence sums over orders; to follow a recorded one, use Duel.replay.")

    def stream_samples(
        self, contexts: Sequence[Ids], length: int, *, scored: bool = True, **settings: Any
    ) -> Iterator[tuple[int, Sample]]:
        """Like `DuelEstimator.stream_samples`; the log-probability of a sample sums over all orders of its text.

        The sum takes all states of each block, or a beam, far more than sampling. With `scored=False`, log_prob is NaN.
        """
        samples = super().stream_samples(contexts, length, **settings)
        if not scored:
            yield from ((n, _unscored(sample)) for n, sample in samples)
            return
        suffixes, waiting = settings.get("suffixes") or [()] * len(contexts), []
        for n, sample in samples:
            waiting.append((n, sample))
            if len(waiting) == SCORED_AT_ONCE:
                yield from self._with_scores(contexts, suffixes, waiting)
                waiting = []
        yield from self._with_scores(contexts, suffixes, waiting)

    def _with_scores(
        self, contexts: Sequence[Ids], suffixes: Sequence[Ids], samples: list[tuple[int, Sample]]
    ) -> list[tuple[int, Sample]]:
        """The samples with the log-probabilities of their texts, counted as samples only."""
        scorer = copy.copy(self)
        scorer.counts = Counts()
        windows = [Window(contexts[n], sample.tokens, suffixes[n], sample.tail) for n, sample in samples]
        scores = scorer.log_prob(windows)
        self.counts.add_work(scorer.counts)
        names = ("log_prob", "is_greedy", "kind", "stderr", "blocks")
        return [
            (n, dataclasses.replace(_unscored(sample), **{name: getattr(score, name) for name in names}))
            for (n, sample), score in zip(samples, scores, strict=True)
        ]

    def sampler(self, keys: Sequence[int] | None, seed: int) -> tuple[rules.Rule, Draw]:
        draw: Draw = Argmax() if keys is None else StepDraws(keys, seed, self.denoiser.device)
        return dataclasses.replace(self.rule, draw=draw), draw

    # ------------------------------------------------------------ steps

    def steps(self, m: int) -> int | None:
        return len(self.rule.counts.of_block(m)) if self.own.tau is None else None

    def planes(self, step: Step) -> Planes:
        lanes, predictions, _, tokens, log_prob = step
        drawn = self.rule.against(predictions, tokens)
        pick = self.rule.pick(drawn.top, lanes)  # (R, W)
        missed = (pick & (predictions.argmax != tokens)).any(1)  # (R,)
        read = {"log_after": drawn.log_after, "log_quiet": drawn.log_quiet, "pick": pick, "missed": missed}
        return {"log_probs": log_prob, "score": drawn.score, **read}

    def moves(self, level: StateLevel, planes: Planes, thin: Thin) -> Moves:
        """The moves of n draws, by the position that ranks last among them, and of all draws above `tau`."""
        masked, log_p, score = level.masked, planes["log_probs"], planes["score"]  # (X, W) each
        count = self.rule.counts.of_sizes(level.first, masked.sum(1))  # (X,)
        above = masked & self.rule.above(score)  # (X, W)
        state, last = (masked & ~above & (count > 0)[:, None]).nonzero().unbind(1)  # (c,)
        position = torch.arange(masked.shape[1], device=last.device)  # (W,)
        of, of_last = score[state], score[state, last][:, None]  # (c, W), (c, 1)
        before = (of > of_last) | ((of == of_last) & (position <= last[:, None]))  # (c, W)
        log_out = planes["log_after"][state, :, last].masked_fill(position == last[:, None], -math.inf)
        log_in, most = log_p[state].where(before & masked[state], -math.inf), count[state]
        least = most
        log_out = log_out.where(masked[state], 0.0)
        if self.own.tau is not None:
            every = torch.arange(len(masked), device=last.device)[count > 0]  # (x,)
            state = torch.cat([state, every])
            log_in = torch.cat([log_in, log_p[every].where(above[every], -math.inf)])
            log_out = torch.cat([log_out, planes["log_quiet"][every].where(masked[every], 0.0)])
            least = torch.cat([least, count[every]])
            most = torch.cat([most, torch.full_like(every, masked.shape[1])])
        return independent(level, state, log_in, log_out, torch.stack([least, most]), thin)


def _unscored(sample: Sample) -> Sample:
    """The sample without a log-probability: the one along its order is not the one of its text."""
    return dataclasses.replace(sample, log_prob=math.nan, is_greedy=False, token_logprobs=())


@dataclasses.dataclass(frozen=True)
class BestDrawn(rules.Rule):
    """Draws a token at every masked position, and picks the n best, or all above `tau` and at least the n best."""

    name: ClassVar[str] = "sampled_confidence"
    counts: StepCounts  # n of each step
    tau: float | None = None
    strict: bool = True
    scale: float = 1.0  # of the logits, in the confidence
    draw: Draw | None = None

    @classmethod
    def from_arguments(cls, denoiser: Denoiser, own: ConfidenceArguments) -> BestDrawn:
        """Without draws. Raises DuelError for truncated distributions, see `untempered`."""
        scale = untempered(denoiser) if own.confidence == "untempered" else 1.0
        return cls(StepCounts.from_arguments(own), own.tau, own.strict, scale)

    def __call__(self, predictions: Predictions, lanes: Lanes) -> rules.Decision:
        assert self.draw is not None
        tokens = self.draw(predictions, lanes, lanes.masked)  # (R, W)
        return rules.Decision(self.pick(token_scores(predictions, tokens, self.scale), lanes))

    def pick(self, score: torch.Tensor, lanes: Lanes) -> torch.Tensor:
        """The draws to keep among those with these scores, (R, W) bool."""
        masked, n = lanes.masked, self.counts.of_lanes(lanes)[:, None]  # (R, W), (R, 1)
        key = torch.where(masked, score.clamp(min=torch.finfo(score.dtype).min), -math.inf)  # (R, W)
        best = masked & (rules.rank(-key) < n)  # (R, W)
        if self.tau is None:
            return best
        above = masked & self.above(score)  # (R, W)
        return torch.where(above.sum(1, keepdim=True) >= best.sum(1, keepdim=True), above, best)

    @property
    def threshold(self) -> float:
        """The score of `tau`."""
        return math.inf if self.tau is None else score_of(self.tau)

    def above(self, score: torch.Tensor) -> torch.Tensor:
        """The scores (R, W) above the threshold, (R, W) bool."""
        above = score > self.threshold if self.strict else score >= self.threshold
        return above & (self.tau is not None)

    def against(self, predictions: Predictions, targets: torch.Tensor) -> DrawnScores:
        """The draws at all positions against the targets (R, W)."""
        return against_targets(predictions, targets, self.scale, self.threshold, self.strict)

    def log_selection(
        self, predictions: Predictions, lanes: Lanes, targets: torch.Tensor, pick: torch.Tensor
    ) -> torch.Tensor:
        """log p that the draws at other positions are not kept where those at `pick` are the targets, (R,)."""
        drawn = self.against(predictions, targets)
        kept = torch.where(pick, drawn.score, math.inf)  # (R, W)
        # of equals, the rightmost ranks last
        last = (kept == kept.amin(1, keepdim=True)).int().cumsum(1).argmax(1)  # (R,)
        log_after = drawn.log_after[torch.arange(len(last), device=last.device), :, last]  # (R, W)
        all_above = (self.above(drawn.score) | ~pick).all(1) & (self.tau is not None)  # (R,)
        sizes = zip(lanes.in_target.sum(1).tolist(), lanes.masked.sum(1).tolist(), strict=True)
        wanted = torch.tensor([self.counts.of_state(*pair) for pair in sizes], device=pick.device)  # (R,)
        count = pick.sum(1)  # (R,)
        possible = torch.where(all_above, count >= wanted, count == wanted) & (wanted > 0)  # (R,)
        others = torch.where(lanes.masked & ~pick, torch.where(all_above[:, None], drawn.log_quiet, log_after), 0.0)
        return others.sum(1).where(possible, -math.inf)


class StepDraws(Draws):
    """Samples: a new draw at each position at every step, on which it depends, too.

    The tokens drawn for one set of predictions are kept, so that a pick reveals the tokens it was decided by.
    """

    last: tuple[Predictions, torch.Tensor] | None = None

    def __call__(self, predictions: Predictions, lanes: Lanes, pick: torch.Tensor) -> torch.Tensor:
        if self.last is None or self.last[0] is not predictions:
            position = lanes.columns - lanes.origin[:, None]  # (R, W)
            u = uniform(self.keys[lanes.row][:, None], position, lanes.step[:, None], self.seed)  # (R, W)
            self.last = predictions, predictions.draw(torch.where(lanes.masked, u, math.nan))
        return torch.where(pick, self.last[1], -1)


# ---------------------------------------------------------------- sampled_order
# The exact likelihood of samplers that draw which positions to reveal (Dream; LLaDA's random remasking).
#
# At each step of a block, while the positions H are masked, a set A of them is drawn and their tokens with it:
#
#     origin      each position independently, with the step's share r_i
#                 P(A) = r_i^|A| (1 - r_i)^|H - A|
#     random      n_i positions, all sets of this size alike
#     entropy,    n_i positions, one after the other without replacement, by weights w = exp(s / alg_temp) of the scores
#     topk_margin s = -entropy or s = P1 - P2 (Plackett and Luce):
#                 P(A) = sum over i in A of P(A - i) w_i / (sum of w over H - A + i), P(empty set) = 1
#
# A text has many orders, and its probability is the sum over them, of products of P(A) and of p_i(x_i) at the positions
# i of A: see chunk.py.
#
# Shapes: R lanes, W block width, X sets of a level, T steps.


class SampledOrder(SetSampler):
    """A sampler that draws the positions to reveal, too.

    Args:
        denoiser: A network.
        block: At most 12 positions, 48 with a beam.
        seed: The seed of a beam.
        arguments: alg, steps, alg_temp, beam, tolerance and repetitions, as in docs/estimators.md, and the other
            arguments of `Estimator`. With S `steps` of a block and
            alg="origin", r_i = 1 - t_(i+1) / t_i for noise levels t from 1 to 0.001 in equal steps, and 1 at the last
            step. With "entropy" and "topk_margin", n_i = int(m r_i) of the m positions that are left. With "random",
            n_i = M // S + (i < M mod S) of M positions.

    Raises:
        DuelError: If an argument is wrong, or the network cannot evaluate every state of such a block.
    """

    name = "sampled_order"
    reads = OrderArguments
    own: OrderArguments

    @property
    def counted(self) -> StepCounts | None:
        """The number of positions that a step reveals; None: it is drawn."""
        if self.own.alg == "origin":
            return None
        return StepCounts(steps=self.own.steps, schedule="even" if self.own.alg == "random" else "dream")

    def describe(self) -> dict[str, object]:
        alg_temp = {} if self.own.alg_temp is None else {"alg_temp": fingerprint.number(self.own.alg_temp)}
        of_sampler = {"alg": self.own.alg, "steps": self.own.steps, **alg_temp, **self.own.describe(self.seed)}
        return {**super().describe(), **of_sampler}

    @property
    def shares(self) -> torch.Tensor | None:
        return dream_shares(self.own.steps).double() if self.own.alg == "origin" else None

    def planes(self, step: Step) -> Planes:
        _, predictions, _, _, log_prob = step
        score = torch.zeros_like(log_prob)  # (R, W)
        if self.own.alg == "entropy":
            score = -predictions.entropy.double()
        elif self.own.alg == "topk_margin":
            score = predictions.margin.double()
        return {"log_probs": log_prob, "score": score / (self.own.alg_temp or 1.0)}

    def moves(self, level: StateLevel, planes: Planes, thin: Thin) -> Moves:
        """The moves of positions drawn one after the other; as a product if all sets of a size are alike."""
        masked, log_p = level.masked, planes["log_probs"]  # (X, W) each
        size, every = masked.sum(1), torch.arange(len(masked), device=masked.device)  # (X,) each
        least, most, log_in = torch.ones_like(size), size, log_p.where(masked, -math.inf)
        if self.counted is not None:
            least = most = count = self.counted.of_sizes(level.first, size)  # (X,)
            if self.own.alg != "random":
                return in_turn(level, log_p, planes["score"], count, thin)
        moves = independent(level, every, log_in, torch.zeros_like(log_in), torch.stack([least, most]), thin)
        if self.counted is not None:
            n, k = size.double(), most.double()
            ways = (n + 1).lgamma() - (k + 1).lgamma() - (n - k + 1).lgamma()  # (X,)
            moves = moves._replace(log_p=moves.log_p - ways[moves.state, None])
        return moves
