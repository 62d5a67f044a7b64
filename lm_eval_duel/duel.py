"""Exact likelihood and sampling under a deterministic unmasking rule (the paper, Algorithms 1 and 2).

    log p(x) = sum over steps t, over positions l picked at t, of log P_l[x_l]

One reveal loop serves both: only what a token is (the truth, a draw, the argmax) and where a finished block leads
differ. With the truth known every block starts from a known state, so all blocks of all windows are lanes of one
queue; when sampling, a row's next lane enters as its last one finishes.

Shapes: N windows, L row length, R lanes, W block width.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lm_eval_duel import rules
from lm_eval_duel.denoisers.base import Denoiser, View
from lm_eval_duel.denoisers.predictions import Predictions
from lm_eval_duel.errors import DuelError, NotFinite, RuleStalled
from lm_eval_duel.hashing import uniform
from lm_eval_duel.lanes import Budget, Lanes, Queue, Rows, blocks, groups
from lm_eval_duel.law import check_rule, check_windows, resolve_block, resolve_grid
from lm_eval_duel.ledger import Counts, Drawn, Ledger, Scored
from lm_eval_duel.windows import Window

CPU_TOKENS, GPU_TOKENS = 4096, 65536  # network tokens a call when no batch size is given

Choose = Callable[[Predictions, Lanes, torch.Tensor], torch.Tensor]  # predictions, lanes, pick -> tokens (R, W)


class Duel:
    """A denoiser, an unmasking rule and a block: one law, to score and to sample.

    `block`: positions finished before the next ones; None: the whole target; "auto": the trained block, else the
    published one, else 32. `grid`: "target" (blocks count from the first target position), "row" (from the row's
    first), "auto" (row for block-causal networks). `batch_size`: rows of max_length in a network call (more where they
    are shorter); None: 4096 tokens on a CPU, 65536 on a GPU, halved when the GPU's memory is short; at most
    `max_batch_size`. Neither changes a number beyond float noise.

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
        for rows in (batch_size, max_batch_size):
            if rows is not None and rows < 1:
                raise DuelError(f"batch_size and max_batch_size are numbers of rows, at least 1; got {rows}.")
        tokens = max(CPU_TOKENS if denoiser.device.type == "cpu" else GPU_TOKENS, denoiser.max_length)
        asked = batch_size * denoiser.max_length if batch_size else tokens
        self.budget = Budget(min(asked, max_batch_size * denoiser.max_length) if max_batch_size else asked)
        self.counts = Counts()

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

        def choose(predictions: Predictions, lanes: Lanes, pick: torch.Tensor) -> torch.Tensor:
            columns = lanes.columns.clamp(max=rows.ids.shape[1] - 1)  # (R, W)
            return torch.where(pick, rows.ids[lanes.row[:, None], columns], -1)

        def finish(n: int, result: dict[str, Any]) -> None:
            emit(group[n], Scored(**result))

        places = [self._blocks(window) for window in windows]
        waiting = self._fresh(rows, [(n, *place) for n, found in enumerate(places) for place in found])
        self._reveal(self.denoiser.open(rows), rows, rule, waiting, choose, lambda lanes: None, finish, group)

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

        self._reveal(view, rows, self.rule, self._fresh(rows, first), choose, advance, finish, group)
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
        waiting: Lanes,
        choose: Choose,
        advance: Callable[[Lanes], Lanes | None],
        finish: Callable[[int, dict[str, Any]], None],
        group: Sequence[int],
    ) -> None:
        """Reveal all lanes: predict, pick, choose tokens, add nats; finished lanes leave and waiting ones enter."""
        ledger = Ledger(rows)
        queue, active = Queue(waiting), waiting.select(slice(0, 0))
        while queue or len(active):
            active = self._refill(view, rule, active, queue)
            try:
                active = self._step(view, rule, active, choose, ledger, group)
            except torch.OutOfMemoryError:
                if len(active) == 1:
                    raise
                self.budget = self.budget.halved()
                half = len(active) // 2
                queue.put_first(active.select(slice(half, None)))
                active = active.select(slice(0, half))
                continue
            finished = ~active.hidden.any(1)  # (R,)
            if finished.any():
                left, active = active.select(finished), active.select(~finished)
                if (following := advance(left)) is not None:
                    queue.put_first(following)
                for n in ledger.finished(left):
                    result = ledger.result(n)
                    self.counts.add(result)
                    finish(n, result)
        assert not ledger.left.any(), "every window is finished when no lane is left"
        self.counts.forwards += view.forwards
        self.counts.rows += view.evaluated

    def _refill(self, view: View, rule: rules.Rule, active: Lanes, queue: Queue) -> Lanes:
        """The batch with waiting lanes added while the budget allows."""
        while queue:
            following = queue.first()
            cost = int(torch.cat([view.cost(active), view.cost(following)]).max())
            width = max(active.hidden.shape[1], following.hidden.shape[1]) if self.denoiser.splits_head else cost
            copies = 4 if rule.dense_memory else 1
            fits = self.budget.rows(cost, width, self.denoiser.vocab_size, copies)
            if fits <= len(active):
                break
            entering = queue.take(fits - len(active))
            try:
                active = active.concat(entering)
            except torch.OutOfMemoryError:
                queue.put_first(entering)
                if not len(active):
                    raise
                self.budget = self.budget.halved()
                break
        return active

    def _step(
        self, view: View, rule: rules.Rule, lanes: Lanes, choose: Choose, ledger: Ledger, group: Sequence[int]
    ) -> Lanes:
        """One rule step of a batch, entered in the ledger; the lanes after it."""
        try:
            predictions = view(lanes)
            decision = self._decide(rule, predictions, lanes, group)
            tokens = choose(predictions, lanes, decision.pick)  # (R, W)
            log_prob = predictions.log_prob(tokens)  # (R, W)
        except NotFinite as error:
            window = group[int(lanes.row[error.lane])]
            raise NotFinite(f"{error} {_place(lanes, error.lane, group)}", window) from None
        after = lanes.reveal(decision.pick, tokens, decision.memory)  # before the ledger: it may run out of memory
        ledger.record(lanes, decision, predictions, tokens, log_prob)
        return after

    def _decide(self, rule: rules.Rule, predictions: Predictions, lanes: Lanes, group: Sequence[int]) -> rules.Decision:
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
class _Replay(rules.Rule):
    """The recorded order of one window."""

    name = "replay"
    steps: tuple[int, ...]

    def __call__(self, predictions: Predictions, lanes: Lanes) -> rules.Decision:
        order = torch.tensor(self.steps, device=lanes.row.device)  # (T,)
        index = (lanes.columns - lanes.origin[:, None]).clamp(0, len(order) - 1)  # (R, W)
        return rules.certain(lanes.hidden & (order[index] == lanes.step[:, None]))


def _place(lanes: Lanes, lane: int, group: Sequence[int]) -> str:
    position = int(lanes.start[lane] - lanes.origin[lane])
    return f"(Window {group[int(lanes.row[lane])]}, block at target position {position}, step {int(lanes.step[lane])}.)"
