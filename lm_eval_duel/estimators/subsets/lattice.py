"""The lattice: every set of revealed positions of a block, evaluated once. All orders of a block are paths through it.

For a block with m masked positions, w(H, j) is log p of the target token at position j while the positions H are masked
and the targets show elsewhere: 2^m - 1 states instead of m! orders of m steps. Summed over blocks:

    oracle      max over orders of sum w       it sees the targets: NOT a likelihood, and no sampler attains it
    mixture     log of the mean over orders    the exact likelihood of a uniformly random order inside blocks
    elbo_exact  mean over orders of sum w      what the Monte Carlo ELBO with elbo_block = block estimates
    a rule      the path that it picks         for every state-only rule, without further network calls

elbo_exact <= mixture <= oracle, and oracle >= every one-at-a-time rule.

Shapes: N windows, L row length, R lanes, W block width, B blocks of a chunk, m masked positions, S = 2^m states
(number: the sum of 2^q over masked positions q), F rules.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch

from lm_eval_duel import rules
from lm_eval_duel.core.decision import EVALUATE_ALL, require_pick
from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.core.lanes import Lanes
from lm_eval_duel.core.reveal import Reveal, WindowGroup
from lm_eval_duel.core.scores import STATISTICS, IndexedScores, Step, WindowScore
from lm_eval_duel.estimators.base import Estimator, Value
from lm_eval_duel.estimators.checks import check_every_order
from lm_eval_duel.estimators.registry import LATTICE
from lm_eval_duel.estimators.subsets.arguments import check_block
from lm_eval_duel.estimators.subsets.orders import LatticeChunk, Orders, OrderScore, fold, follow
from lm_eval_duel.estimators.subsets.sets import fresh_positions, number_of, numbered

TABLE = 1 << 22  # the most values of a table of a chunk


@dataclasses.dataclass(frozen=True)
class LatticeScore(WindowScore):
    """One window over all orders. `log_prob` is the value that the estimator names.

    `reveal_steps` and `token_logprobs` are those of the best order for the oracle; elbo_exact has each position's mean
    share, and the mixture neither. `rules`: the score of each rule, by its text.
    """

    elbo_exact: float = 0.0
    mixture: float = 0.0
    oracle: float = 0.0  # NOT a likelihood
    rules: dict[str, OrderScore] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> LatticeScore:
        orders = {rule: OrderScore(**order) for rule, order in fields["rules"].items()}
        return cls(**{**fields, "rules": orders})


class Lattice(Estimator):
    """All orders inside the blocks of each window.

    `value`: which of elbo_exact, mixture and oracle is the score's `log_prob`. `follow`: state-only rules whose paths
    are scored as well. `block`: at most 12 positions. Other arguments as in `Estimator`.

    Raises:
        DuelError: the block is too large, a rule is not state-only, or the network is autoregressive.
    """

    def __init__(
        self,
        denoiser: Denoiser,
        block: int | str | None = "auto",
        grid: str = "auto",
        batch_size: int | None = None,
        max_batch_size: int | None = None,
        traced: bool = False,
        value: str = "mixture",
        follow: Sequence[str | rules.Rule] = (),
    ):
        check_every_order(denoiser, value)
        self.name = value
        self.rules = [rules.with_checks(rules.parse(rule) if isinstance(rule, str) else rule) for rule in follow]
        for rule in self.rules:
            rules.check_state_only(rule)
        super().__init__(denoiser, block, grid, batch_size, max_batch_size, traced)
        check_block(value, self.block, only=denoiser.block is not None)
        self.empty_score = LatticeScore(0.0, rules={str(rule): OrderScore(0.0, (), (), 0, 0) for rule in self.rules})

    def describe(self) -> dict[str, object]:
        return {"estimator": self.name, "block": self.block, "grid": self.grid}

    def values(self, scored: WindowScore) -> dict[str, Value]:
        scored = cast(LatticeScore, scored)
        values = {name: Value(getattr(scored, name)) for name in sorted(LATTICE, key=lambda name: name != self.name)}
        return values | {text: Value(path.log_prob, nfe=path.nfe) for text, path in scored.rules.items()}

    def score_group(self, group: WindowGroup) -> IndexedScores:
        tables = LatticeAccumulator(group, self)
        return iter(Reveal(group, EVALUATE_ALL, tables.states(), tables, self.budget, self.counts))


class LatticeAccumulator:
    """The lattices of one group of windows: filled chunk by chunk, and folded as each chunk is complete."""

    def __init__(self, group: WindowGroup, lattice: Lattice):
        self.group, self.lattice = group, lattice
        self.rules, self.value, self.traced = lattice.rules, lattice.name, lattice.traced
        count, length = group.rows.ids.shape
        self.place = group.rows.ids.new_full((2, count, length + 1), -1)  # of each block: chunk, and number in it
        self.chunks: dict[int, LatticeChunk] = {}
        self.begun = 0  # how many chunks
        self.waiting = [len(lattice.blocks(window)) for window in group.windows]  # blocks that are missing
        like = torch.zeros(count, length + 1, dtype=torch.float64, device=group.rows.ids.device)  # (N, L + 1)
        self.dump = length  # the column of positions that do not exist
        self.totals = like.new_zeros(count, len(LATTICE))  # (N, 3)
        self.mean = torch.zeros_like(like)  # (N, L + 1) each column's share of elbo_exact
        self.best = Orders(like, self.traced)
        self.paths = [Orders(like, self.traced) for _ in self.rules]
        self.has_margins = [True] * len(self.rules)

    def states(self) -> Iterator[Lanes]:
        """Every state of every block that is reached, one chunk of blocks after the other."""
        group, spans, done = self.group, self.lattice.block_spans(self.group), 0
        block = max(width for _, _, width in spans)
        while done < len(spans):
            room = self.lattice.budget.room(group.view, EVALUATE_ALL, group.fresh(spans[done : done + 1]))
            most = TABLE // (block << block)
            count = max(1, min(most, 4 * -(-room // (1 << block))))  # a chunk fills several calls
            lanes, done = group.fresh(spans[done : done + count]), done + count
            states = (1 << lanes.masked.sum(1)) - 1  # (B,)
            of_block = torch.arange(len(lanes), device=states.device).repeat_interleave(states)  # (R,)
            before = (states.cumsum(0) - states).repeat_interleave(states)  # (R,)
            number = torch.arange(len(of_block), device=states.device) - before + 1  # (R,) 1..2^m - 1
            states_of = lanes.select(of_block)
            position = numbered(states_of.masked).clamp(min=0)  # (R, W)
            masked = states_of.masked & (number[:, None] >> position & 1).bool()  # (R, W)
            states_of = states_of.show(group.rows.targets(states_of), masked)
            self._begin(lanes, len(states_of))
            yield states_of

    def _begin(self, lanes: Lanes, states: int) -> None:
        """Make the tables of these fresh blocks (B,), which have `states` states."""
        most = int(lanes.masked.sum(1).max())
        log_probs = self.totals.new_full((len(lanes), 1 << most, most), math.nan)  # (B, S, m)
        statistics = log_probs.new_full((*log_probs.shape, len(STATISTICS) * self.traced), math.nan)  # (B, S, m, T)
        after = self.place.new_zeros(*log_probs.shape[:2], len(self.rules))  # (B, S, F)
        near_tie = torch.zeros_like(after, dtype=torch.bool)
        self.place[0, lanes.row, lanes.start] = self.begun
        self.place[1, lanes.row, lanes.start] = torch.arange(len(lanes), device=lanes.row.device)
        self.chunks[self.begun] = LatticeChunk(lanes, states, log_probs, statistics, after, near_tie)
        self.begun += 1

    def add(self, step: Step) -> None:
        """Enter the log-probs of these states, and what each rule would pick."""
        lanes, predictions, _, _, log_prob = step
        chunk, block = self.place[:, lanes.row, lanes.start]  # (R,) each
        position = numbered(fresh_positions(lanes))  # (R, W)
        state = number_of(lanes.masked, position)  # (R,)
        statistics = [getattr(predictions, name).double() for name in STATISTICS if self.traced]  # (R, W) each
        decided = [rule(predictions, lanes) for rule in self.rules]
        for rule, choice in zip(self.rules, decided, strict=True):
            require_pick(rule, choice)
        after = [number_of(lanes.masked & ~choice.pick, position) for choice in decided]  # (R,) each
        near_tie = [choice.near_tie for choice in decided]  # (R,) each
        lane, at = lanes.masked_at  # (C,)
        numbers, counts = (part.tolist() for part in chunk.unique(return_counts=True))
        for n in numbers:
            tables, mine = self.chunks[n], chunk == n  # (R,)
            r, w = lane[mine[lane]], at[mine[lane]]  # (c,)
            where = block[r], state[r], position[r, w]
            tables.log_probs[where] = log_prob[r, w]
            for t, plane in enumerate(statistics):
                tables.statistics[(*where, t)] = plane[r, w]
            for f in range(len(decided)):
                tables.after[block[mine], state[mine], f] = after[f][mine]
                tables.near_tie[block[mine], state[mine], f] = near_tie[f][mine]
        for n, count in zip(numbers, counts, strict=True):  # once everything is entered: a step may come again
            self.chunks[n].waiting -= count
        for f, choice in enumerate(decided):
            self.has_margins[f] &= choice.decision_margin is not None

    def take(self, finished: Lanes) -> IndexedScores:
        """(row, score) of the windows that have all their blocks. Complete chunks are folded."""
        for n in [n for n, chunk in self.chunks.items() if not chunk.waiting]:
            chunk = self.chunks.pop(n)
            self._fold(chunk)
            for row in chunk.lanes.row.tolist():
                self.waiting[row] -= 1
                if not self.waiting[row]:
                    yield row, self._score(row)

    def _fold(self, chunk: LatticeChunk) -> None:
        """From the states of some blocks to the log-probs of their orders."""
        lanes = chunk.lanes
        values, share, best = fold(chunk.log_probs, chunk.full)  # (B, 3), (B, m), (B, S)
        column = torch.full(share.shape, self.dump, device=share.device)  # (B, m)
        b, w = lanes.masked.nonzero().unbind(1)  # (X,)
        column[b, numbered(lanes.masked)[b, w]] = lanes.columns[b, w]
        self.totals.index_put_((lanes.row,), values, accumulate=True)
        self.mean[lanes.row[:, None], column] = share
        follow(chunk, column, best, torch.zeros_like(best, dtype=torch.bool), self.best)
        for after, near_tie, orders in zip(chunk.after.unbind(2), chunk.near_tie.unbind(2), self.paths, strict=True):
            follow(chunk, column, after, near_tie, orders)

    def _score(self, row: int) -> LatticeScore:
        window = self.group.windows[row]
        span = slice(len(window.context), len(window.context) + len(window.target))
        totals = dict(zip(LATTICE, self.totals[row].tolist(), strict=True))
        paths = {
            str(rule): orders.path(row, span, has_margins)
            for rule, orders, has_margins in zip(self.rules, self.paths, self.has_margins, strict=True)
        }
        best = self.best.path(row, span, False) if self.value == "oracle" else None
        shares = tuple(self.mean[row, span].tolist()) if self.value == "elbo_exact" else ()
        return LatticeScore(
            log_prob=totals[self.value],
            reveal_steps=best.reveal_steps if best else (),
            token_logprobs=best.token_logprobs if best else shares,
            confidence=best.confidence if best else (),
            margin=best.margin if best else (),
            entropy=best.entropy if best else (),
            elbo_exact=totals["elbo_exact"],
            mixture=totals["mixture"],
            oracle=totals["oracle"],
            rules=paths,
        )
