"""Many rules over the same windows: every state that any of them meets is evaluated once.

With the truth known, a state-only rule's pick is a function of which cells of the block are hidden, so rules that meet
in a state share its network call, however they came there. A walker is one rule in one block. The walkers with most
cells hidden go first: each moves to a state with fewer, so none can come to a state that has been left behind. Blocks
do not wait for each other.

Shapes: N windows, R lanes, W block width, B blocks, F rules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from lm_eval_duel import rules
from lm_eval_duel.denoisers.base import Denoiser
from lm_eval_duel.denoisers.predictions import Predictions
from lm_eval_duel.engine.lanes import Lanes, Queue
from lm_eval_duel.engine.results import NEAR_TIE, WindowScore
from lm_eval_duel.engine.reveal import decide
from lm_eval_duel.estimators.base import Estimator, EvaluateAll, IndexedScores, Value, WindowGroup
from lm_eval_duel.estimators.checks import check_rule


@dataclasses.dataclass(frozen=True)
class RuleScore:
    """What one rule got in one window."""

    log_prob: float  # nats
    nfe: int
    near_ties: int | None


@dataclasses.dataclass(frozen=True)
class SharedScore(WindowScore):
    """One window under several rules, by the rule's text. `log_prob` is that of the first."""

    rules: dict[str, RuleScore] = dataclasses.field(default_factory=dict)
    states: int = 0  # that were evaluated


class Shared(Estimator):
    """The exact likelihood under each of several state-only rules, as `Duel` has it for one. Arguments as there.

    Raises DuelError for a rule that is not state-only, or that this network cannot follow.
    """

    name = "several rules"

    def __init__(
        self,
        denoiser: Denoiser,
        follow: Sequence[rules.Rule],
        block: int | str | None = "auto",
        grid: str = "auto",
        batch_size: int | None = None,
        max_batch_size: int | None = None,
    ):
        for rule in follow:
            check_rule(denoiser, rule)
            rules.check_state_only(rule)
        self.rules = list(follow)
        super().__init__(denoiser, block, grid, batch_size, max_batch_size)

    def describe(self) -> dict[str, object]:
        return {"block": self.block, "grid": self.grid}

    def values(self, scored: SharedScore) -> dict[str, Value]:
        return {text: Value(found.log_prob, nfe=found.nfe) for text, found in scored.rules.items()}

    @property
    def empty_score(self) -> SharedScore:
        empty = {str(rule): RuleScore(0.0, 0, 0) for rule in self.rules}
        return SharedScore(0.0, rules=empty)

    def _score_group(self, opened: WindowGroup) -> IndexedScores:
        walks = SharedAccumulator(opened, self.rules, self._places(opened))
        queue = Queue([walks.fresh])
        for finished in self._loop.run(opened.view, EvaluateAll(), queue, opened.targets, walks, opened.numbers):
            if (following := walks.next_states(finished)) is not None:
                queue.put_first(following)
            yield from walks.take(finished)


class SharedAccumulator:
    """Where each rule stands in each block of a group of windows, and what it got, in float64."""

    def __init__(self, opened: WindowGroup, follow: Sequence[rules.Rule], places: list[tuple[int, int, int]]):
        self.opened, self.rules = opened, follow
        self.fresh = opened.fresh(places)  # (B,) as the blocks begin
        count, length = opened.rows.ids.shape
        device = self.fresh.row.device
        self.block = torch.full((count, length), -1, device=device)  # (N, L) a block's number by its first column
        self.block[self.fresh.row, self.fresh.start] = torch.arange(len(places), device=device)
        self.hidden = self.fresh.hidden[:, None].repeat(1, len(follow), 1)  # (B, F, W)
        self.states = torch.ones(len(places), dtype=torch.int64, device=device)  # (B,) in work
        self.blocks = torch.bincount(self.fresh.row, minlength=count)  # (N,) to come
        self.seen = self.blocks.clone()  # (N,) states
        self.nats = torch.zeros(count, len(follow), dtype=torch.float64, device=device)  # (N, F)
        self.sums = torch.zeros(count, len(follow), 2, dtype=torch.int64, device=device)  # (N, F, 2) NFE, close picks
        self.has_margins = [True] * len(follow)

    def add(
        self,
        lanes: Lanes,
        decision: rules.Decision,
        predictions: Predictions,
        tokens: torch.Tensor,
        log_prob: torch.Tensor,
    ) -> None:
        """Move the walkers that stand in these states."""
        block = self.block[lanes.row, lanes.start]  # (R,)
        here = (self.hidden[block] == lanes.hidden[:, None]).all(2)  # (R, F)
        nats, sums, after, known = [], [], [], []
        for f, rule in enumerate(self.rules):
            found = decide(rule, predictions, lanes, self.opened.numbers)
            mine = here[:, f]  # (R,)
            nats.append(torch.where(found.pick & mine[:, None], log_prob, 0.0).sum(1))
            close = torch.zeros_like(mine) if found.lead is None else ~(found.lead >= NEAR_TIE)  # (R,)
            sums.append(torch.stack([mine, mine & close], 1))  # (R, 2)
            after.append((block[mine], (lanes.hidden & ~found.pick)[mine]))
            known.append(found.lead is not None)
        nats, sums, less = torch.stack(nats, 1), torch.stack(sums, 1).long(), -torch.ones_like(block)
        # if memory ends before here, the states are evaluated again; from here on nothing fails half way
        for f, (of_block, hidden) in enumerate(after):
            self.hidden[of_block, f] = hidden
            self.has_margins[f] &= known[f]
        self.nats.index_add_(0, lanes.row, nats)
        self.sums.index_add_(0, lanes.row, sums)
        self.states.index_add_(0, block, less)

    def next_states(self, left: Lanes) -> Lanes | None:
        """The next states of the blocks that have none in work: those with most cells hidden, equal ones once."""
        block = self.block[left.row, left.start].unique()
        block = block[self.states[block] == 0]  # (b,)
        count = self.hidden[block].sum(2)  # (b, F)
        most = count.amax(1)  # (b,)
        done = self.fresh.row[block[most == 0]]
        self.blocks.index_add_(0, done, -torch.ones_like(done))
        at, rule = ((count == most[:, None]) & (most > 0)[:, None]).nonzero().unbind(1)
        if not len(at):
            return None
        block = block[at]
        found = torch.cat([block[:, None], self.hidden[block, rule].long()], 1).unique(dim=0)  # (r, 1 + W)
        block, hidden = found[:, 0], found[:, 1:].bool()
        self.states.index_add_(0, block, torch.ones_like(block))
        lanes = self.fresh.select(block)
        self.seen.index_add_(0, lanes.row, torch.ones_like(block))
        return self.opened.targets.hide(lanes, hidden)

    def take(self, finished: Lanes) -> IndexedScores:
        """(row, score) of the windows that have no block left."""
        rows = finished.row.unique()
        for row in rows[self.blocks[rows] == 0].tolist():
            followed = {}
            for rule, nats, (nfe, close), known in zip(
                self.rules, self.nats[row].tolist(), self.sums[row].tolist(), self.has_margins, strict=True
            ):
                followed[str(rule)] = RuleScore(nats, nfe, close if known else None)
            yield row, SharedScore(self.nats[row, 0].item(), rules=followed, states=self.seen[row].item())
