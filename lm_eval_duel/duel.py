"""Exact likelihood and sampling under a deterministic unmasking rule (the paper, Algorithms 1 and 2).

    log p(x) = sum over steps t, over positions l picked at t, of log P_l[x_l]

One reveal loop serves both: only what a token is (the truth, a draw, the argmax) and where a finished block leads
differ. With the truth known every block starts from a known state, so all blocks of all windows are lanes of one
queue; when sampling, a row's next lane enters as its last one finishes.

Shapes: N windows, L row length, R lanes, W block width.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch

from lm_eval_duel import rules
from lm_eval_duel.budget import free, plan
from lm_eval_duel.denoisers.base import Denoiser, View
from lm_eval_duel.denoisers.predictions import Predictions
from lm_eval_duel.errors import DuelError, NotFinite, RuleStalled
from lm_eval_duel.hashing import uniform
from lm_eval_duel.lanes import Lanes, Queue, Rows, blocks, groups
from lm_eval_duel.law import check_rule, check_windows, resolve_block, resolve_grid
from lm_eval_duel.ledger import Counts, Drawn, Ledger, Scored
from lm_eval_duel.windows import Window

log = logging.getLogger("lm_eval.duel_mdm")

Choose = Callable[[Predictions, Lanes, torch.Tensor], torch.Tensor]  # predictions, lanes, pick -> tokens (R, W)


class Duel:
    """A denoiser, an unmasking rule and a block: one law, to score and to sample.

    `block`: positions finished before the next ones; None: the whole target; "auto": the trained block, else the
    published one, else 32. `grid`: "target" (blocks count from the first target position), "row" (from the row's
    first), "auto" (row for block-causal networks). `batch_size`: rows of max_length in a network call (more where they
    are shorter); None: 2048 tokens on a CPU, on a GPU what fits, by trial; at most `max_batch_size`; halved where memory
    ends all the same. Neither changes a number beyond float noise.

    Raises DuelError for a combination that is no law of this network.
    """

    def __init__(
        self,
        denoiser: Denoiser,
        rule: str | rules.Rule = "greedy",
        block: int | str | None = "auto",
        grid: str = "auto",
        batch_size: int | None = None,
        max_batch_size: int | None = None,
    ):
        self.denoiser = denoiser
        self.rule = rules.parse(rule) if isinstance(rule, str) else rule
        self.block = resolve_block(denoiser, block)
        self.grid = resolve_grid(denoiser, grid)
        check_rule(denoiser, self.rule)
        self.budget = plan(denoiser, self.block, self.grid, batch_size, max_batch_size)
        self.counts = Counts()
        self._short = False  # memory has ended once

    def log_prob(self, windows: Sequence[Window], on_done: Callable[[int, Scored], None] | None = None) -> list[Scored]:
        """log p(target | context, suffix) of each window (Algorithm 2); `on_done(index, result)` as each finishes."""
        return self._score(windows, self.rule, on_done)

    def replay(self, windows: Sequence[Window], steps: Sequence[Sequence[int]]) -> list[Scored]:
        """The nats of a recorded order: `steps` as in `Scored`. A diagnostic; a likelihood only if a rule made them."""
        if len(windows) != len(steps):
            raise DuelError(f"replay wants the steps of each window: {len(windows)} windows, {len(steps)} orders.")
        results: list[Scored] = []
        for n, (window, order) in enumerate(zip(windows, steps, strict=True)):
            context = len(window.context)
            if len(order) != len(window.target):
                raise DuelError(f"Window {n} has {len(window.target)} target tokens but {len(order)} steps.")
            for start, width in self._blocks(window):
                inside = set(order[max(0, start - context) : start - context + width])
                if inside != set(range(len(inside))):
                    raise DuelError(
                        f"Window {n}: the steps of a block must be 0..n-1 without gaps, not {sorted(inside)}."
                    )
            results += self._score([window], _Replay(tuple(order)), None)
        return results

    def sample(
        self,
        contexts: Sequence[Sequence[int]],
        length: int,
        suffix: Sequence[int] = (),
        tail: int = 0,
        seed: int = 0,
        keys: Sequence[int] | None = None,
    ) -> list[Drawn]:
        """Draw `length` tokens after each context (Algorithm 1); a draw depends on (seed, key, position) only.

        `keys` defaults to the index of each context.
        """
        if keys is not None and len(keys) != len(contexts):
            raise DuelError(f"sample wants a key for each context: {len(contexts)} contexts, {len(keys)} keys.")
        key = torch.tensor(range(len(contexts)) if keys is None else keys, device=self.denoiser.device)

        def chooser(group: list[int]) -> Choose:
            of_row = key[torch.tensor(group, device=key.device)]  # (N,)

            def choose(predictions: Predictions, lanes: Lanes, pick: torch.Tensor) -> torch.Tensor:
                u = uniform(of_row[lanes.row][:, None], lanes.columns - lanes.origin[:, None], seed)  # (R, W)
                return predictions.draw(torch.where(pick, u, math.nan))

            return choose

        return self._generate(contexts, length, suffix, tail, chooser)

    def decode(
        self, contexts: Sequence[Sequence[int]], length: int, suffix: Sequence[int] = (), tail: int = 0
    ) -> list[Drawn]:
        """The most probable token at every pick: what `is_greedy` promises."""

        def choose(predictions: Predictions, lanes: Lanes, pick: torch.Tensor) -> torch.Tensor:
            return torch.where(pick, predictions.argmax, -1)

        return self._generate(contexts, length, suffix, tail, lambda group: choose)

    # ------------------------------------------------------------ which lanes, and what a token is

    def _score(
        self, windows: Sequence[Window], rule: rules.Rule, on_done: Callable[[int, Scored], None] | None
    ) -> list[Scored]:
        check_windows(self.denoiser, self.block, self.grid, windows)
        nothing = Scored(0.0, True, (), (), 0, 0, 0)
        results = [nothing] * len(windows)

        def emit(n: int, scored: Scored) -> None:
            results[n] = scored
            if on_done:
                on_done(n, scored)

        for n, window in enumerate(windows):
            if not window.target:
                emit(n, nothing)
        for group in self._groups(windows):
            self._score_group([windows[n] for n in group], group, rule, emit)
        return results

    def _score_group(
        self, windows: list[Window], group: list[int], rule: rules.Rule, emit: Callable[[int, Scored], None]
    ) -> None:
        """Every block of every window at once: with the truth known, each starts from a known state."""
        rows = Rows.of(windows, self.denoiser.device)
        view = self.denoiser.open(rows)
        places = [(n, *place) for n, window in enumerate(windows) for place in self._blocks(window)]

        def truth(lanes: Lanes) -> torch.Tensor:
            return rows.ids[lanes.row[:, None], lanes.columns.clamp(max=rows.ids.shape[1] - 1)]  # (R, W)

        def steps() -> Iterator[Lanes]:
            """Every state of a fixed order, a batch of blocks after the other; only its picks are hidden in a state,
            and cells that are neither hidden nor revealed show [MASK]."""
            done = 0
            while done < len(places):
                count = self._fits(view, rule, self._fresh(rows, places[done : done + 1]))
                lanes, done = self._fresh(rows, places[done : done + count]), done + count
                while len(lanes):
                    pick = self._decide(rule, None, lanes, group).pick  # (R, W)
                    yield dataclasses.replace(lanes, hidden=pick)
                    lanes = lanes.reveal(pick, truth(lanes), ())
                    lanes = lanes.select(lanes.hidden.any(1))

        def choose(predictions: Predictions, lanes: Lanes, pick: torch.Tensor) -> torch.Tensor:
            return torch.where(pick, truth(lanes), -1)

        def finish(n: int, result: dict[str, Any]) -> None:
            emit(group[n], Scored(**result))

        waiting = steps() if rule.fixed else [self._fresh(rows, places)]
        self._reveal(
            view,
            rows,
            _All() if rule.fixed else rule,
            waiting,
            choose,
            lambda lanes: None,
            finish,
            group,
            foreseen=True,
        )

    def _generate(
        self,
        contexts: Sequence[Sequence[int]],
        length: int,
        suffix: Sequence[int],
        tail: int,
        chooser: Callable[[list[int]], Choose],
    ) -> list[Drawn]:
        if length < 0:
            raise DuelError(f"length is a number of tokens to generate, not {length}.")
        prompts = [Window(tuple(context), (0,) * length, tuple(suffix), tail) for context in contexts]
        check_windows(self.denoiser, self.block, self.grid, prompts, generating=True)
        results = [Drawn(0.0, True, (), (), 0, 0, 0)] * len(prompts)
        for group in self._groups(prompts):
            drawn = self._generate_group([prompts[n] for n in group], group, chooser(group))
            for n, result in zip(group, drawn, strict=True):
                results[n] = result
        return results

    def _generate_group(self, prompts: list[Window], group: list[int], choose: Choose) -> list[Drawn]:
        """One lane a row: a finished block is committed, and the row's next block enters."""
        rows = Rows.of(prompts, self.denoiser.device)
        view = self.denoiser.open(rows, generating=True)
        places = [self._blocks(prompt) for prompt in prompts]
        first = [(n, *found.pop(0)) for n, found in enumerate(places)]
        results: dict[int, Drawn] = {}

        def advance(lanes: Lanes) -> Lanes | None:
            view.commit(lanes)
            following = [(n, *places[n].pop(0)) for n in lanes.row.tolist() if places[n]]
            return self._fresh(rows, following) if following else None

        def finish(n: int, result: dict[str, Any]) -> None:
            start = len(prompts[n].context)
            tokens = rows.ids[n, start : start + len(prompts[n].target)]  # (T,)
            results[n] = Drawn(**result, tokens=tuple(tokens.tolist()))

        self._reveal(view, rows, self.rule, [self._fresh(rows, first)], choose, advance, finish, group)
        return [results[n] for n in range(len(prompts))]

    def _groups(self, windows: Sequence[Window]) -> list[list[int]]:
        return groups(windows, same_length=not self.denoiser.honours_padding)

    def _blocks(self, window: Window) -> list[tuple[int, int]]:
        return blocks(len(window.context), len(window.target), self.block, self.grid)

    def _fresh(self, rows: Rows, places: list[tuple[int, int, int]]) -> Lanes:
        """Fresh lanes at (row, first column, width)."""
        return Lanes.fresh(rows, *torch.tensor(places, device=self.denoiser.device).unbind(1))

    # ------------------------------------------------------------ the loop

    @torch.inference_mode()
    def _reveal(
        self,
        view: View,
        rows: Rows,
        rule: rules.Rule,
        waiting: Iterable[Lanes],
        choose: Choose,
        advance: Callable[[Lanes], Lanes | None],
        finish: Callable[[int, dict[str, Any]], None],
        group: Sequence[int],
        foreseen: bool = False,
    ) -> None:
        """Reveal all lanes: predict, pick, choose tokens, add nats; finished lanes leave and waiting ones enter.

        `foreseen`: the tokens do not depend on the predictions.
        """
        ledger, queue = Ledger(rows), Queue(waiting)
        active: Lanes | None = None
        while active is not None or queue:
            active = self._refill(view, rule, active, queue)
            try:
                active = self._step(view, rule, active, choose, ledger, group, foreseen)
            except torch.OutOfMemoryError:
                if len(active) == 1:
                    raise
                half = len(active) // 2
                queue.put_first(active.select(slice(half, None)))
                active = active.select(slice(0, half))
                self._halve()
                continue
            finished = ~active.hidden.any(1)  # (R,)
            if finished.any():
                left, active = active.select(finished), active.select(~finished)
                active = active if len(active) else None
                if (following := advance(left)) is not None:
                    queue.put_first(following)
                for n, result in ledger.results(ledger.finished(left)):
                    self.counts.add(result)
                    finish(n, result)
        self.counts.forwards += view.forwards
        self.counts.rows += view.evaluated

    def _refill(self, view: View, rule: rules.Rule, active: Lanes | None, queue: Queue) -> Lanes:
        """The batch with waiting lanes added while the budget allows."""
        while queue:
            there = [] if active is None else [active]
            room = self._fits(view, rule, queue.first(), *there) - sum(map(len, there))
            if room <= 0:
                break
            entering = queue.take(room)
            try:
                active = entering if active is None else active.concat(entering)
            except torch.OutOfMemoryError:
                queue.put_first(entering)
                self._halve()
                break
        return active

    def _fits(self, view: View, rule: rules.Rule, *lanes: Lanes) -> int:
        """How many lanes like the dearest of `lanes` one network call holds."""
        cost = max(int(view.cost(each).max()) for each in lanes)
        values = 0
        if not self.denoiser.splits_head:
            values = cost * self.denoiser.vocab_size
        elif rule.dense_memory:
            values = 4 * max(each.hidden.shape[1] for each in lanes) * self.denoiser.vocab_size
        return self.budget.rows(cost, values)

    def _halve(self) -> None:
        """Go on with half the budget: memory has ended."""
        if not self._short:
            log.warning("memory ended at network calls of %d tokens: they are halved until they fit", self.budget.tokens)
        self._short = True
        self.budget = self.budget.halved()
        free(self.denoiser.device)

    def _step(
        self,
        view: View,
        rule: rules.Rule,
        lanes: Lanes,
        choose: Choose,
        ledger: Ledger,
        group: Sequence[int],
        foreseen: bool,
    ) -> Lanes:
        """One rule step of a batch, entered in the ledger; the lanes after it."""
        try:
            predictions = view(lanes)
            if foreseen:
                predictions.expect(choose(predictions, lanes, lanes.hidden))
            decision = self._decide(rule, predictions, lanes, group)
            tokens = choose(predictions, lanes, decision.pick)  # (R, W)
            log_prob = predictions.log_prob(tokens)  # (R, W)
        except NotFinite as error:
            window = group[int(lanes.row[error.lane])]
            raise NotFinite(f"{error} {_place(lanes, error.lane, group)}", window) from None
        after = lanes.reveal(decision.pick, tokens, decision.memory)  # before the ledger: it may run out of memory
        ledger.record(lanes, decision, predictions, tokens, log_prob)
        return after

    def _decide(
        self, rule: rules.Rule, predictions: Predictions | None, lanes: Lanes, group: Sequence[int]
    ) -> rules.Decision:
        decision = rule(predictions, lanes)
        if isinstance(decision, torch.Tensor):
            decision = rules.Decision(decision)
        if not isinstance(decision, rules.Decision):
            raise DuelError(f"Rule {rule} must return a Decision or a boolean plane; got {type(decision).__name__}.")
        pick, lead = decision.pick, decision.lead
        if pick.shape != lanes.hidden.shape or pick.dtype != torch.bool:
            raise DuelError(
                f"Rule {rule} must pick a boolean plane {tuple(lanes.hidden.shape)}; "
                f"got {pick.dtype} {tuple(pick.shape)}."
            )
        if lead is not None and lead.shape != lanes.row.shape:
            raise DuelError(f"The lead of rule {rule} is one number a lane, {len(lanes)}; got {tuple(lead.shape)}.")
        if any(plane.shape[:2] != pick.shape for plane in decision.memory):
            raise DuelError(f"The memory of rule {rule} is tensors with leading (R, W) = {tuple(pick.shape)}.")
        stalled = ~pick.any(1) | (pick & ~lanes.hidden).any(1)  # (R,)
        if stalled.any():
            lane = int(stalled.nonzero()[0])
            what = "picked a position that is not hidden" if pick[lane].any() else "picked nothing"
            window = group[int(lanes.row[lane])]
            raise RuleStalled(f"Rule {rule} {what}. {_place(lanes, lane, group)}", window)
        return decision


@dataclasses.dataclass(frozen=True)
class _All(rules.Rule):
    """Everything hidden: the picks of a fixed order, one of its states each."""

    name: ClassVar[str] = "all"

    def __call__(self, predictions: Predictions, lanes: Lanes) -> rules.Decision:
        return rules.certain(lanes.hidden)


@dataclasses.dataclass(frozen=True)
class _Replay(rules.Rule):
    """The recorded order of one window."""

    name: ClassVar[str] = "replay"
    fixed: ClassVar[bool] = True
    steps: tuple[int, ...]

    def __call__(self, predictions: Predictions, lanes: Lanes) -> rules.Decision:
        order = torch.tensor(self.steps, device=lanes.row.device)  # (T,)
        index = (lanes.columns - lanes.origin[:, None]).clamp(0, len(order) - 1)  # (R, W)
        return rules.certain(lanes.hidden & (order[index] == lanes.step[:, None]))


def _place(lanes: Lanes, lane: int, group: Sequence[int]) -> str:
    position = int(lanes.start[lane] - lanes.origin[lane])
    return f"(Window {group[int(lanes.row[lane])]}, block at target position {position}, step {int(lanes.step[lane])}.)"
