"""The lattice: every set of masked positions of a block, evaluated once. All orders of a block are paths through it.

w(H, j) is the log-prob of the target token at position j while the positions in H are masked and the others show their
targets. A block of m positions has 2^m - 1 such states, but m! orders. From V(empty set) = 0, in ascending size of H:

    elbo_exact  V(H) = mean over j in H of  w(H, j) + V(H - j)      what the ELBO with elbo_block = block estimates
    mixture     V(H) = log of the mean of   exp(w(H, j) + V(H - j)) the exact likelihood of a uniformly random order
    oracle      V(H) = max                  w(H, j) + V(H - j)      it sees the targets: NOT a likelihood
    a rule      the path that it picks, for every state-only rule, without further network calls

Summed over blocks, elbo_exact <= mixture <= oracle, and oracle >= every one-at-a-time rule. Blocks are taken in chunks:
the tables of a chunk are filled call by call, and folded once all of its states are there.

Shapes: N windows, L row length, R lanes, W block width, B blocks of a chunk, S = 2^W states (a set of masked positions
is numbered by its bit mask, the sum of 2^position), F rules, T statistics of a trace.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from itertools import combinations
from typing import Any

import torch

from lm_eval_duel import rules
from lm_eval_duel.core.decision import EVALUATE_ALL, require_pick
from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.core.lanes import Lanes
from lm_eval_duel.core.reveal import ScoreAccumulator, Step, WindowGroup
from lm_eval_duel.core.scores import STATISTICS, IndexedScores, Score
from lm_eval_duel.estimators.arguments import LatticeArguments, check_block
from lm_eval_duel.estimators.base import Estimator
from lm_eval_duel.estimators.checks import check_every_order
from lm_eval_duel.estimators.moves import from_bitmask, to_bitmask
from lm_eval_duel.estimators.registry import ESTIMATORS, LATTICE

TABLE = 1 << 22  # the most values (blocks, states and positions) in a table of a chunk: 32 MiB
KINDS = {name: ESTIMATORS[name].kind for name in LATTICE}


class Lattice(Estimator):
    """All orders inside the blocks of each window: the mean of log p, the log of the mean of p, and the best order.

    Args:
        denoiser: A network that is not autoregressive.
        block: At most 12 positions.
        arguments: The state-only rules whose paths are scored as well, such as "greedy:k=2". None: `rule`, if it is
            state-only.
        estimator: The value that is the `log_prob` of the scores: "elbo_exact", "mixture" or "oracle". Scores hold all
            three.
        rule: The rule of the run.
        layout: The other arguments of `Estimator`.

    Raises:
        DuelError: If the block is too large, a rule is not state-only, or the network is autoregressive.
    """

    def __init__(
        self,
        denoiser: Denoiser,
        block: int | str | None,
        arguments: LatticeArguments | None = None,
        *,
        estimator: str = "mixture",
        rule: rules.Rule | None = None,
        **layout: Any,
    ):
        check_every_order(denoiser, estimator)
        self.name = estimator
        followed = (arguments or LatticeArguments()).lattice_rules
        if followed is None:
            followed = (rule,) if rule is not None and rule.state_only else ()
        self.rules = list(followed)
        self.reads_rule = rule in self.rules
        super().__init__(denoiser, block, **layout)
        check_block(estimator, self.block, only=denoiser.block is not None)
        values = dict.fromkeys(LATTICE, 0.0)
        paths = {str(rule): Score(0.0, nfe=0, near_ties=0) for rule in self.rules}
        self.empty_score = self.score(values, paths)

    def ignored_args(self, given: Collection[str]) -> list[str]:
        """The model args given that change nothing; a rule is read if it is one of those that are followed."""
        ignored = {*super().ignored_args(given)}
        if not self.reads_rule:
            ignored |= {"rule", *rules.PARAMETERS}
        return [key for key in given if key in ignored]

    def score(
        self,
        values: Mapping[str, float],
        paths: Mapping[str, Score],
        **order: Any,
    ) -> Score:
        """The score of a window, from its values over all orders and the scores of rules.

        `order`: what the score says of an order, or of single tokens.
        """
        others = {}
        for name, value in values.items():
            if name != self.name:  # that one is the score itself
                others[name] = Score(value, kind=KINDS[name])
        return Score(
            values[self.name],
            kind=KINDS[self.name],
            others={**others, **paths},
            **order,
        )

    def score_group(self, group: WindowGroup) -> IndexedScores:
        sums = LatticeAccumulator(group, self)
        yield from self.reveal(group, EVALUATE_ALL, sums.states(), sums)
        for rule in sums.followed:
            rules.repeat_last(rule)


class LatticeAccumulator:
    """The lattices of one group of windows, and the sums of finished blocks."""

    def __init__(self, group: WindowGroup, lattice: Lattice):
        self.group = group
        self.lattice = lattice
        self.followed = []  # the rules, as they are called
        for rule in lattice.rules:
            checked = rules.with_checks(rule, lattice.counts, lattice.denoiser)
            self.followed.append(checked)
        count, self.length = group.rows.ids.shape
        like = torch.zeros(count, self.length, dtype=torch.float64, device=group.rows.ids.device)  # (N, L)
        self.totals = like.new_zeros(count, len(LATTICE))  # (N, 3)
        # each column's share of elbo_exact; one column more than the rows takes what is not scored
        self.shares = like.new_zeros(count, self.length + 1)  # (N, L + 1)
        self.best = Orders(group.rows, lattice.traced)  # the oracle's orders
        self.paths = [Orders(group.rows, lattice.traced) for _ in lattice.rules]
        self.chunks: dict[int, OrderChunk] = {}
        # the number of blocks of each window that are missing
        self.waiting = [len(lattice.blocks(window)) for window in group.windows]

    def states(self) -> Iterator[Lanes]:
        """Every state of every block, one chunk of blocks after the other. Their memory says where they belong."""
        group = self.group
        spans = self.lattice.block_spans(group)
        widest = max(width for _, _, width in spans)
        most_blocks = TABLE // (widest << widest)  # (S, W) values each

        def blocks_of_chunk(room: int) -> int:
            blocks_of_call = -(-room // (1 << widest))  # rounded up
            return min(most_blocks, 4 * blocks_of_call)  # a chunk fills several calls, of which the last is not full

        chunks = self.lattice.batches(group, spans, blocks_of_chunk, EVALUATE_ALL)
        for n, (fresh, _) in enumerate(chunks):
            lanes = every_set(group, fresh, n)
            self.chunks[n] = self._empty_chunk(fresh, len(lanes))
            yield lanes

    def _empty_chunk(self, lanes: Lanes, states: int) -> OrderChunk:
        """Empty tables of these fresh blocks, of which `states` states will be evaluated."""
        blocks, width = lanes.masked.shape
        log_probs = self.totals.new_full((blocks, 1 << width, width), math.nan)  # (B, S, W)
        statistic_count = len(STATISTICS) if self.lattice.traced else 0  # T
        statistics = log_probs.new_full((*log_probs.shape, statistic_count), math.nan)  # (B, S, W, T)
        after = lanes.row.new_full((blocks, 1 << width, len(self.paths)), -1)  # (B, S, F)
        return OrderChunk(
            lanes=lanes,
            missing=states,
            log_probs=log_probs,
            statistics=statistics,
            after=after,
            near_tie=torch.zeros_like(after, dtype=torch.bool),
        )

    def add(self, step: Step) -> None:
        """Enter the log-probs of these states, and what each rule would pick."""
        predictions = step.predictions
        log_prob = step.log_prob  # (R, W)
        lanes_of_chunk, block = belonging(step.lanes)  # (R,) each
        lanes = dataclasses.replace(step.lanes, memory=())  # the rules have none
        state = to_bitmask(lanes.masked)  # (R,)
        statistics = []
        if self.lattice.traced:
            statistics = [getattr(predictions, name).double() for name in STATISTICS]
        decisions = [rule(predictions, lanes) for rule in self.followed]
        for rule, decision in zip(self.lattice.rules, decisions, strict=True):
            require_pick(rule, decision)

        for n, members in lanes_of_chunk.items():
            chunk = self.chunks[n]
            at = block[members], state[members]
            in_chunk = slice(chunk.log_probs.shape[2])  # positions: a call may hold wider blocks of another chunk
            chunk.log_probs[at] = log_prob[members, in_chunk]
            for t, plane in enumerate(statistics):
                chunk.statistics[..., t][at] = plane[members, in_chunk]
            for f, decision in enumerate(decisions):
                after = to_bitmask(lanes.masked & ~decision.pick)  # (R,)
                chunk.after[..., f][at] = after[members]
                chunk.near_tie[..., f][at] = decision.near_tie[members]

        # only now that everything is entered: a step that runs out of memory is taken again
        for n, members in lanes_of_chunk.items():
            self.chunks[n].missing -= int(members.sum())
        for path, decision in zip(self.paths, decisions, strict=True):
            path.has_margins &= decision.decision_margin is not None

    def take(self, finished: Lanes) -> IndexedScores:
        """(row, score) of the windows that have all their blocks. Complete chunks are folded."""
        complete = [n for n, chunk in self.chunks.items() if not chunk.missing]
        for n in complete:
            chunk = self.chunks.pop(n)
            self._fold(chunk)
            for row in chunk.lanes.row.tolist():
                self.waiting[row] -= 1
                if not self.waiting[row]:
                    yield row, self._score(row)

    def _fold(self, chunk: OrderChunk) -> None:
        """Sum the orders of a finished chunk, and add them to the totals of windows."""
        lanes = chunk.lanes
        values, share, best = fold(chunk.log_probs, lanes.masked)  # (B, 3), (B, W), (B, S)
        self.totals.index_put_((lanes.row,), values, accumulate=True)
        column = torch.where(lanes.masked, lanes.columns, self.length)  # (B, W)
        self.shares[lanes.row[:, None], column] = share
        no_ties = torch.zeros_like(best, dtype=torch.bool)  # (B, S) a maximum is no rule's decision
        self.best.follow(chunk, best, no_ties)
        for f, path in enumerate(self.paths):
            path.follow(chunk, chunk.after[..., f], chunk.near_tie[..., f])

    def _score(self, row: int) -> Score:
        """The score of a window that has all its blocks."""
        totals = dict(zip(LATTICE, self.totals[row].tolist(), strict=True))
        rows = self.totals.new_tensor([row]).long()  # (1,)
        paths: dict[str, Score] = {}
        for rule, path in zip(self.lattice.rules, self.paths, strict=True):
            _, paths[str(rule)] = next(path.scores(rows))
        order: dict[str, Any] = {}
        if self.lattice.name == "oracle":
            _, best = next(self.best.scores(rows))
            for key in ("reveal_steps", "token_logprobs", *STATISTICS):
                order[key] = getattr(best, key)
        elif self.lattice.name == "elbo_exact":
            window = self.group.windows[row]
            begin = len(window.context)
            target = slice(begin, begin + len(window.target))
            order["token_logprobs"] = tuple(self.shares[row, target].tolist())
        return self.lattice.score(totals, paths, **order)


@dataclasses.dataclass
class OrderChunk:
    """The tables of some blocks and their states, which are filled call by call."""

    lanes: Lanes  # (B,) as their blocks begin
    missing: int  # states that have not been evaluated
    log_probs: torch.Tensor  # (B, S, W) w
    statistics: torch.Tensor  # (B, S, W, T) of `STATISTICS` if traced, else T = 0
    after: torch.Tensor  # (B, S, F) the state after a rule's pick
    near_tie: torch.Tensor  # (B, S, F) bool

    @property
    def full(self) -> torch.Tensor:
        """The state in which all positions of a block are masked, (B,)."""
        return to_bitmask(self.lanes.masked)


class Orders(ScoreAccumulator):
    """A path through the blocks of each window. It says nothing about decoding, so none of its scores is greedy."""

    def follow(self, chunk: OrderChunk, after: torch.Tensor, near_tie: torch.Tensor) -> None:
        """Enter the path of each block, from the state in which all its positions are masked until none is.

        `after` (B, S): the state that follows each state; `near_tie` (B, S): the states whose pick is a near tie.
        """
        row = chunk.lanes.row  # (B,)
        columns = chunk.lanes.columns  # (B, W)
        state = chunk.full  # (B,)
        step = 0
        block = torch.arange(len(row), device=row.device)  # (B,)
        while (unfinished := state > 0).any():
            following = after[block, state] * unfinished  # (B,) finished blocks stay at 0, the empty set
            picked = from_bitmask(state & ~following, columns.shape[1])  # (B, W)
            b, position = picked.nonzero().unbind(1)  # (c,) each
            in_rows = (row[b], columns[b, position])
            in_chunk = (b, state[b], position)
            self.reveal_steps[in_rows] = step
            self.log_probs[in_rows] = chunk.log_probs[in_chunk]
            for t, plane in enumerate(self.statistics.values()):
                plane[in_rows] = chunk.statistics[..., t][in_chunk]
            tied = unfinished & near_tie[block, state]  # (B,)
            # As in `ScoreAccumulator.add`. Every step counts as one that argmax decoding would miss, and starts from
            # masks alone are not counted on a path.
            missed = unfinished
            all_mask = torch.zeros_like(unfinished)  # (B,)
            counted = [picked.sum(1), unfinished, missed, tied, all_mask]
            self.sums.index_add_(0, row, torch.stack(counted, 1).long())  # (B, 5)
            state = following
            step += 1


def every_set(group: WindowGroup, fresh: Lanes, chunk_number: int) -> Lanes:
    """Every set of masked positions of fresh blocks (B,), as a lane.

    Its memory says where it belongs: the number of the chunk, and the number of its block there.
    """
    states = (1 << fresh.masked.sum(1)) - 1  # (B,)
    block = torch.arange(len(fresh), device=states.device).repeat_interleave(states)  # (R,)
    before = (states.cumsum(0) - states).repeat_interleave(states)  # (R,) lanes of earlier blocks
    subset = torch.arange(len(block), device=states.device) - before + 1  # (R,) 1..2^m - 1
    lanes = fresh.select(block)
    # Bit n of a subset is the n-th masked position of the block, not its n-th column: a context or known targets may
    # take the first ones.
    nth = lanes.masked.cumsum(1) - lanes.masked.long()  # (R, W)
    in_subset = (subset[:, None] >> nth & 1).bool()  # (R, W)
    masked = lanes.masked & in_subset  # (R, W)
    shown = lanes.show(group.rows.targets(lanes), masked)
    chunk = torch.full_like(block, chunk_number)  # (R,)
    memory = (chunk[:, None].expand_as(masked), block[:, None].expand_as(masked))
    return dataclasses.replace(shown, memory=memory)


def belonging(lanes: Lanes) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
    """The lanes of each chunk (R,) bool, by its number, and the number of each lane's block in its chunk (R,).

    Read from the memory that `every_set` gives to lanes; a call may hold lanes of several chunks.
    """
    chunk_plane, block_plane = lanes.memory  # (R, W) each: the same at every position
    chunk = chunk_plane[:, 0]  # (R,)
    block = block_plane[:, 0]  # (R,)
    lanes_of_chunk = {n: chunk == n for n in chunk.unique().tolist()}
    return lanes_of_chunk, block


def fold(table: torch.Tensor, masked: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Combine all orders of some blocks, whose `masked` (B, W) positions are to be revealed.

    `table` (B, S, W): w of each state and position. Returns elbo_exact, mixture and oracle (B, 3), each position's
    share of elbo_exact (B, W), and the state that follows each state on its best order (B, S).
    """
    blocks, states, width = table.shape
    mean = table.new_zeros(blocks, states)
    mixture = table.new_zeros(blocks, states)
    oracle = table.new_zeros(blocks, states)
    best = torch.zeros(blocks, states, dtype=torch.int64, device=table.device)
    share = table.new_zeros(blocks, width)
    full = to_bitmask(masked)  # (B,)
    counts = masked.sum(1).tolist()  # (B,)
    for size in range(1, width + 1):
        # every set of this size (n,), its positions, and the sets that revealing each of them leaves (n, size)
        state, position, rest = (indices.to(table.device) for indices in sets(width, size))
        w = table[:, state[:, None], position]  # (B, n, size) NaN for sets that are no state of the block
        mean[:, state] = (w + mean[:, rest]).mean(2)
        mixture[:, state] = (w + mixture[:, rest]).logsumexp(2) - math.log(size)
        oracle[:, state], choice = (w + oracle[:, rest]).max(2)
        after = rest.expand(blocks, -1, -1)  # (B, n, size)
        best[:, state] = after.gather(2, choice[:, :, None])[:, :, 0]

        # an order passes a given set of `size` of m masked positions with probability 1 / C(m, size)
        chances = [1 / max(1, math.comb(m, size)) for m in counts]
        chance = table.new_tensor(chances)  # (B,)
        outside = state & ~full[:, None]  # (B, n) positions that are not masked in the block
        is_state = (outside == 0)[:, :, None]  # (B, n, 1)
        part = torch.where(is_state, w, 0.0) * chance[:, None, None] / size  # (B, n, size)
        share.scatter_add_(1, position.flatten().expand(blocks, -1), part.flatten(1))
    block = torch.arange(blocks, device=table.device)
    values = [by_state[block, full] for by_state in (mean, mixture, oracle)]  # (B,) each
    return torch.stack(values, 1), share, best


@lru_cache(maxsize=128)
def sets(m: int, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The sets of `size` of m positions (n,), as bit masks; their positions, and the set without each (n, size)."""
    position = torch.tensor(list(combinations(range(m), size)))  # (n, size)
    state = (1 << position).sum(1)  # (n,)
    return state, position, state[:, None] - (1 << position)
