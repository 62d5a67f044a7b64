"""The exact likelihood of samplers whose texts have many orders: the sum over the sets of masked positions of a block.

    alpha(H) = p that a sampler comes to mask exactly the positions H, with the targets elsewhere
    alpha(H - A) = sum over H of alpha(H) P(A | H), larger sets first; alpha(no position) = p of the block

One network row at H gives P(A | H) for every A. Two kinds of samplers have such a P:

**They select after sampling** (`SampledConfidence`: LLaDA at a temperature above 0, SDAR, LLaDA2, Fast-dLLM, Dream's
maskgit_plus). Position j draws token v with probability q_j(v), and the draws with the largest scores s_j(v) are kept.
With c_i = s_i(x_i) for the text x, the positions A of H are kept with their tokens x, and no others, with probability

    n       |A| = min(n, |H|), a the member of A that ranks last (smallest c; of equals, the rightmost):
            P(A) = prod over i in A of q_i(x_i)  x  prod over j in H - A of q_j{v ranks after x_a}
    tau     all c_i > tau and |A| >= min(n, |H|):
            P(A) = prod over i in A of q_i(x_i)  x  prod over j in H - A of q_j{s_j(v) <= tau}
            fewer above tau: as n

The draws at the positions of H - A are thrown away, so their probabilities are summed. n may depend on |H|.

**They draw the positions** (`SampledOrder`: Dream; LLaDA's random remasking), a set A of the positions H at each step:

    origin      each position independently, with the step's share r_i
                P(A) = r_i^|A| (1 - r_i)^|H - A|
    random      n_i positions, all sets of this size alike
    entropy,    n_i positions, one after the other without replacement, by weights w = exp(s / alg_temp) of the scores
    topk_margin s = -entropy or s = P1 - P2 (Plackett and Luce):
                P(A) = sum over i in A of P(A - i) w_i / (sum of w over H - A + i), P(empty set) = 1

times p_i(x_i) at the positions i of A.

Shapes: N windows, R lanes, W block width, B blocks of a chunk, S = 2^W sets (by number: the sum of 2^position), X sets
of a level, I moves, c products, T steps of a schedule of which a set must know its own (else 1).
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch

from lm_eval_duel import rules
from lm_eval_duel.core.decision import EVALUATE_ALL
from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.core.lanes import Lanes
from lm_eval_duel.core.reveal import Argmax, Draw, Step, WindowGroup
from lm_eval_duel.core.scores import Counts, IndexedScores, Sample, Score, known_sum
from lm_eval_duel.core.windows import Ids, Window
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.arguments import ConfidenceArguments, OrderArguments, check_block
from lm_eval_duel.estimators.base import Estimator
from lm_eval_duel.estimators.checks import check_every_order
from lm_eval_duel.estimators.drawn import BestDrawn, StepDraws
from lm_eval_duel.estimators.duel import DuelEstimator
from lm_eval_duel.estimators.lattice import belonging, every_set
from lm_eval_duel.estimators.moves import (
    Moves,
    Planes,
    StateLevel,
    StepCounts,
    arrivals,
    from_bitmask,
    in_turn,
    independent,
    leaving,
    log_chance,
    to_bitmask,
)
from lm_eval_duel.rules.scheduled import dream_shares

SCORED_AT_ONCE = 64  # samples
STATES = 4096  # sets of a chunk of blocks, if a network call holds fewer
TABLE = 1 << 24  # values of a chunk's tables: 128 MiB


class SetSampler(Estimator):
    """A sampler whose texts have many orders, and whose next step depends only on the set of masked positions."""

    def __init__(self, denoiser: Denoiser, block: int | str | None, **layout: Any):
        check_every_order(denoiser, self.name)
        super().__init__(denoiser, block=block, **layout)
        check_block(self.name, self.block, only=denoiser.block is not None)

    @property
    def shares(self) -> torch.Tensor | None:
        """The probability with which each step reveals a masked position, (T,), if steps have no other parameter."""
        return None

    @abc.abstractmethod
    def begins(self, lanes: Lanes) -> torch.Tensor:
        """True for lanes whose number of masked positions is one at which a step may begin, (R,) bool."""

    @abc.abstractmethod
    def planes(self, step: Step) -> Planes:
        """The planes that `moves` reads of the predictions in some states, (R, W, ...) each.

        "log_probs" of the targets is one of them. Optional are "pick" (R, W), the positions that argmax decoding
        reveals next, and "missed" (R, W), where a token there is not the target.
        """

    @abc.abstractmethod
    def moves(self, level: StateLevel, planes: Planes) -> Moves:
        """The subsets that the next step of each state of a level can reveal."""

    def steps(self, m: int) -> int | None:
        """The number of steps that a block of m positions takes; None: not known."""
        return None

    def score_group(self, group: WindowGroup) -> IndexedScores:
        sums = SetAccumulator(group, self)
        return self.reveal(group, EVALUATE_ALL, sums.states(), sums)


@dataclasses.dataclass
class SetChunk:
    """Some blocks, and what was read of the predictions at their sets of masked positions."""

    lanes: Lanes  # (B,) as their blocks begin
    missing: int  # sets that have not been evaluated
    planes: Planes = dataclasses.field(default_factory=dict)  # (B, S, ...) each


class SetAccumulator:
    """The blocks of one group of windows: tables that are filled call by call, and the sums of finished blocks."""

    def __init__(self, group: WindowGroup, sampler: SetSampler):
        self.group = group
        self.sampler = sampler
        self.chunks: dict[int, SetChunk] = {}
        # of each window: the number of blocks that are missing, and the sums over those that are finished
        self.waiting = [len(sampler.blocks(window)) for window in group.windows]
        count = len(group.windows)
        self.log_prob = [0.0] * count
        self.is_greedy = [True] * count
        self.nfe: list[int | None] = [0] * count

    def states(self) -> Iterator[Lanes]:
        """Every set of every block with which a step may begin, one chunk of blocks after the other."""
        spans = self.sampler.block_spans(self.group)
        wide = max(width for _, _, width in spans)
        shares = self.sampler.shares
        steps = 1 if shares is None else len(shares)
        values_of_block = (wide * wide + steps) << wide  # for each set (W, W) of draws, and an entry for each step
        most_blocks = TABLE // values_of_block

        def blocks_of_chunk(room: int) -> int:
            sets = max(4 * room, STATES)  # a chunk fills several calls
            return min(sets >> wide, most_blocks)

        chunks = self.sampler.batches(self.group, spans, blocks_of_chunk, EVALUATE_ALL)
        for n, (fresh, _) in enumerate(chunks):
            lanes = every_set(self.group, fresh, n)
            lanes = lanes.select(self.sampler.begins(lanes))
            self.chunks[n] = SetChunk(fresh, len(lanes))
            yield lanes

    def add(self, step: Step) -> None:
        """Enter what was read at some sets."""
        planes = self.sampler.planes(step)
        lanes_of_chunk, block = belonging(step.lanes)  # (R,) each
        state = to_bitmask(step.lanes.masked)  # (R,)
        for n, members in lanes_of_chunk.items():
            chunk = self.chunks[n]
            count, wide = chunk.lanes.masked.shape
            for name, plane in planes.items():
                # a chunk may be narrower than the call, whose lanes come from several chunks
                index: tuple[torch.Tensor | slice, ...] = (members, *[slice(wide)] * (plane.dim() - 1))
                part = plane[index]
                if name not in chunk.planes:
                    chunk.planes[name] = part.new_zeros(count, 1 << wide, *part.shape[1:])
                chunk.planes[name][block[members], state[members]] = part

        # only now that everything is entered: a step that runs out of memory is taken again
        for n, members in lanes_of_chunk.items():
            self.chunks[n].missing -= int(members.sum())

    def take(self, finished: Lanes) -> IndexedScores:
        """(row, score) of the windows that have all their blocks. Complete chunks are summed up."""
        complete = [n for n, chunk in self.chunks.items() if not chunk.missing]
        for n in complete:
            chunk = self.chunks.pop(n)
            log_prob = sum_over_orders(chunk, self.sampler).tolist()
            is_greedy = decoded(chunk).tolist()
            sizes = chunk.lanes.masked.sum(1).tolist()
            for block, row in enumerate(chunk.lanes.row.tolist()):
                steps = self.sampler.steps(sizes[block])
                self.log_prob[row] += log_prob[block]
                self.is_greedy[row] &= is_greedy[block]
                self.nfe[row] = known_sum(self.nfe[row], steps)
                self.waiting[row] -= 1
                if not self.waiting[row]:
                    yield row, Score(self.log_prob[row], self.is_greedy[row], nfe=self.nfe[row])


def sum_over_orders(chunk: SetChunk, sampler: SetSampler) -> torch.Tensor:
    """log p of each block, (B,): sums over its sets, from all positions masked to none, larger sets first.

    The key of set S of block b is b 2^W + S.
    """
    masked = chunk.lanes.masked  # (B, W)
    count, wide = masked.shape
    shares = sampler.shares
    steps = 1
    if shares is not None:
        shares = shares.to(masked.device)  # (T,)
        steps = len(shares)
    arrived = chunk.planes["log_probs"].new_full((count << wide, steps), -math.inf)  # (B S, T) log alpha
    empty_set = torch.arange(count, device=masked.device) << wide  # (B,) its key
    arrived[empty_set + to_bitmask(masked), 0] = 0
    planes = {name: plane.flatten(0, 1) for name, plane in chunk.planes.items()}  # (B S, ...) each
    every_key = torch.arange(len(arrived), device=masked.device)  # (B S,)
    sizes = from_bitmask(every_key, wide).sum(1)  # (B S,)
    value = arrived.new_full((count,), -math.inf)  # (B,)
    for size in range(wide, 0, -1):
        is_reached = (arrived > -math.inf).any(1)  # (B S,)
        key = ((sizes == size) & is_reached).nonzero()[:, 0]  # (X,)
        if not len(key):
            continue
        block = key >> wide  # (X,)
        level = StateLevel(block, masked.sum(1)[block], from_bitmask(key, wide))
        planes_of_level = {name: plane[key] for name, plane in planes.items()}
        moves = sampler.moves(level, planes_of_level)
        key_after = key[moves.state] & ~moves.chosen  # (I,)
        reached, new = key_after.unique(return_inverse=True)  # (x,), (I,)
        log_leave = arrived[key]  # (X, T)
        if shares is not None:
            log_leave = leaving(log_leave, shares, size)
        sums = arrivals(log_leave, moves, new, len(reached))  # (x, T)
        if shares is not None:
            sums = sums + log_chance(shares, size, sizes[reached])

        is_finished = sizes[reached] == 0  # (x,)
        finished = reached[is_finished] >> wide  # blocks
        value[finished] = value[finished].logaddexp(sums[is_finished].logsumexp(1))
        if shares is not None:  # a set is left at a later step than that at which it was reached
            never = torch.full_like(sums[:, :1], -math.inf)
            sums = torch.cat([never, sums[:, :-1]], 1)
        arrived[reached] = arrived[reached].logaddexp(sums)
    return value


def decoded(chunk: SetChunk) -> torch.Tensor:
    """True for the blocks that argmax decoding writes, (B,) bool; False if the sampler has no such decoding."""
    state = to_bitmask(chunk.lanes.masked)  # (B,)
    if "pick" not in chunk.planes:
        return torch.zeros_like(state, dtype=torch.bool)
    block = torch.arange(len(state), device=state.device)  # (B,)
    written = torch.ones_like(state, dtype=torch.bool)  # (B,)
    while ((state > 0) & written).any():
        written &= ~(chunk.planes["missed"][block, state].any(1) & (state > 0))
        pick = to_bitmask(chunk.planes["pick"][block, state])  # (B,)
        state = torch.where(written, state & ~pick, 0)
    return written


class SampledConfidence(SetSampler, DuelEstimator):
    """A sampler that keeps the most probable of the tokens drawn: one distribution, to score and to sample.

    Args:
        denoiser: A network, with the sampler's temperature, top_k and top_p.
        block: At most 12 positions.
        arguments: n, tau, strict, steps, schedule and confidence, as in docs/estimators.md. Ties go to the lowest
            position. Of S `steps` of a block of m positions, step i keeps m // S + (i < m mod S) draws ("even":
            LLaDA), or follows Dream's noise levels ("dream"). The `confidence` is "untempered" in LLaDA and Fast-dLLM,
            "tempered" in SDAR, LLaDA2 and Dream.
        layout: The other arguments of `Estimator`.

    Raises:
        DuelError: If an argument is wrong, or the network cannot evaluate every state of such a block.
    """

    name = "sampled_confidence"
    takes_known = False
    takes_noise = "no"
    rule: BestDrawn

    def __init__(
        self,
        denoiser: Denoiser,
        block: int | str | None,
        arguments: ConfidenceArguments | None = None,
        **layout: Any,
    ):
        self.arguments = arguments or ConfidenceArguments()
        rule = BestDrawn.from_arguments(denoiser, self.arguments)
        super().__init__(denoiser, block, rule=rule, **layout)

    def describe(self) -> dict[str, object]:
        return {**Estimator.describe(self), **self.arguments.describe()}

    def with_denoiser(self, denoiser: Denoiser) -> SampledConfidence:
        twin = cast(SampledConfidence, super().with_denoiser(denoiser))
        twin.rule = BestDrawn.from_arguments(denoiser, self.arguments)
        return twin

    def replay(self, windows: Sequence[Window], reveal_steps: Sequence[Ids]) -> list[Score]:
        """Raise DuelError: a text has many orders here. A Duel with estimator="duel" follows one."""
        raise DuelError("estimator=sampled_confidence sums over orders; to follow a recorded one, use Duel.replay.")

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

    def sampler(self, keys: Sequence[int] | None, seed: int) -> tuple[rules.Rule, Draw]:
        draw: Draw = Argmax() if keys is None else StepDraws(keys, seed, self.denoiser.device)
        return dataclasses.replace(self.rule, draw=draw), draw

    # ------------------------------------------------------------ steps

    def steps(self, m: int) -> int | None:
        if self.arguments.tau is not None:  # the number depends on the text
            return None
        return len(self.rule.counts.of_block(m))

    def planes(self, step: Step) -> Planes:
        drawn = self.rule.against(step.predictions, step.tokens)
        pick = self.rule.pick(drawn.top, step.lanes)  # (R, W)
        return {
            "log_probs": step.log_prob,
            "score": drawn.score,
            "log_after": drawn.log_after,
            "log_quiet": drawn.log_quiet,
            "pick": pick,
            "missed": pick & (step.predictions.argmax != step.tokens),
        }

    def begins(self, lanes: Lanes) -> torch.Tensor:
        return self.rule.counts.of_lanes(lanes) > 0

    def moves(self, level: StateLevel, planes: Planes) -> Moves:
        """The moves of n draws, by the position that ranks last among them, and of all draws above `tau`."""
        count = self.rule.counts.of_sizes(level.first, level.masked.sum(1))  # (X,)
        above = level.masked & self.rule.above(planes["score"])  # (X, W)
        products = [self._best(level, planes, count, above)]
        if self.arguments.tau is not None:
            products.append(self._above(level, planes, count, above))
        state, log_in, log_out, least, most = (torch.cat(parts) for parts in zip(*products, strict=True))
        return independent(state, log_in, log_out, torch.stack([least, most]))

    def _best(
        self, level: StateLevel, planes: Planes, count: torch.Tensor, above: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """The products of the `count` (X,) best draws, one for each position that may rank last among them.

        Returns state (c,), log_in and log_out (c, W), and the least and the most members (c,), as `independent` takes
        them.
        """
        masked = level.masked  # (X, W)
        score = planes["score"]  # (X, W)
        # if the draw that ranks last is above `tau`, so are all others, and `_above` counts them
        may_be_last = masked & ~above & (count > 0)[:, None]  # (X, W)
        state, last = may_be_last.nonzero().unbind(1)  # (c,) each
        position = torch.arange(masked.shape[1], device=last.device)  # (W,)
        is_last = position == last[:, None]  # (c, W)

        # members of the subset rank before its last one: a larger score, or an equal one further left
        of_state = score[state]  # (c, W)
        of_last = score[state, last][:, None]  # (c, 1)
        before = (of_state > of_last) | ((of_state == of_last) & (position <= last[:, None]))  # (c, W)

        log_in = planes["log_probs"][state].where(before & masked[state], -math.inf)
        log_out = planes["log_after"][state, :, last].masked_fill(is_last, -math.inf)  # the last one is a member
        log_out = log_out.where(masked[state], 0.0)
        return state, log_in, log_out, count[state], count[state]

    def _above(
        self, level: StateLevel, planes: Planes, count: torch.Tensor, above: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """The products of all draws above `tau`, of which there are at least `count` (X,); returns as `_best`."""
        masked = level.masked  # (X, W)
        state = (count > 0).nonzero()[:, 0]  # (x,)
        log_in = planes["log_probs"][state].where(above[state], -math.inf)  # (x, W)
        log_out = planes["log_quiet"][state].where(masked[state], 0.0)  # (x, W)
        return state, log_in, log_out, count[state], torch.full_like(state, masked.shape[1])


def _unscored(sample: Sample) -> Sample:
    """The sample without a log-probability: the one along its order is not the one of its text."""
    return dataclasses.replace(sample, log_prob=math.nan, is_greedy=False, token_logprobs=())


class SampledOrder(SetSampler):
    """A sampler that draws the positions to reveal, too.

    Args:
        denoiser: A network.
        block: At most 12 positions.
        arguments: alg, steps and alg_temp, as in docs/estimators.md. With S `steps` of a block and alg="origin",
            r_i = 1 - t_(i+1) / t_i for noise levels t from 1 to 0.001 in equal steps, and 1 at the last step. With
            "entropy" and "topk_margin", n_i = int(m r_i) of the m positions that are left. With "random",
            n_i = M // S + (i < M mod S) of M positions.
        layout: The other arguments of `Estimator`.

    Raises:
        DuelError: If an argument is wrong, or the network cannot evaluate every state of such a block.
    """

    name = "sampled_order"

    def __init__(
        self,
        denoiser: Denoiser,
        block: int | str | None,
        arguments: OrderArguments | None = None,
        **layout: Any,
    ):
        super().__init__(denoiser, block, **layout)
        self.arguments = arguments or OrderArguments()

    @property
    def counted(self) -> StepCounts | None:
        """The number of positions that a step reveals; None: it is drawn."""
        if self.arguments.alg == "origin":
            return None
        schedule = "even" if self.arguments.alg == "random" else "dream"
        return StepCounts(steps=self.arguments.steps, schedule=schedule)

    def describe(self) -> dict[str, object]:
        return {**super().describe(), **self.arguments.describe()}

    @property
    def shares(self) -> torch.Tensor | None:
        if self.arguments.alg != "origin":
            return None
        return dream_shares(self.arguments.steps).double()

    def planes(self, step: Step) -> Planes:
        score = torch.zeros_like(step.log_prob)  # (R, W)
        if self.arguments.alg == "entropy":
            score = -step.predictions.entropy.double()
        elif self.arguments.alg == "topk_margin":
            score = step.predictions.margin.double()
        return {"log_probs": step.log_prob, "score": score / (self.arguments.alg_temp or 1.0)}

    def begins(self, lanes: Lanes) -> torch.Tensor:
        if self.counted is None:
            return lanes.masked.any(1)
        return self.counted.of_lanes(lanes) > 0

    def moves(self, level: StateLevel, planes: Planes) -> Moves:
        """The moves of positions drawn one after the other; as a product if all sets of a size are alike."""
        masked = level.masked  # (X, W)
        log_p = planes["log_probs"]  # (X, W)
        size = masked.sum(1)  # (X,)
        every = torch.arange(len(masked), device=masked.device)  # (X,)
        log_in = log_p.where(masked, -math.inf)
        log_out = torch.zeros_like(log_in)  # positions that stay masked have no factor here
        if self.counted is None:  # any number of positions; `log_chance` has the shares
            members = torch.stack([torch.ones_like(size), size])  # (2, X) the least and the most
            return independent(every, log_in, log_out, members)

        count = self.counted.of_sizes(level.first, size)  # (X,)
        if self.arguments.alg != "random":
            return in_turn(level, log_p, planes["score"], count)
        moves = independent(every, log_in, log_out, torch.stack([count, count]))
        n = size.double()
        k = count.double()
        log_ways = (n + 1).lgamma() - (k + 1).lgamma() - (n - k + 1).lgamma()  # (X,) log of n over k
        return moves._replace(log_p=moves.log_p - log_ways[moves.state])
