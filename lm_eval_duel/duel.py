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
from lm_eval_duel.denoisers.base import Denoiser, Predictions, View
from lm_eval_duel.errors import DuelError, NotFinite, RuleStalled
from lm_eval_duel.hashing import uniform
from lm_eval_duel.lanes import Budget, Lanes, Rows, blocks, groups
from lm_eval_duel.ledger import Counts, Drawn, Ledger, Scored
from lm_eval_duel.windows import Window

DEFAULT_BLOCK = 32
CPU_TOKENS, GPU_TOKENS = 4096, 65536  # network tokens a call when no batch size is given

Choose = Callable[[Predictions, Lanes, torch.Tensor], torch.Tensor]  # predictions, lanes, pick -> tokens (R, W)


class Duel:
    """A denoiser, an unmasking rule and a block: one law, to score and to sample.

    `block`: positions finished before the next ones; None: the whole target; "auto": the trained block, else the
    published one, else 32. `grid`: "target" (blocks count from the first target position), "row" (from the row's
    first), "auto" (row for block-causal networks). `batch_size`: rows of max_length in a network call; None: 4096
    tokens on a CPU, 65536 on a GPU, halved when the GPU's memory is short. None of it changes a number beyond float
    noise.

    Raises DuelError for a combination that is no law of this network.
    """

    def __init__(
        self,
        denoiser: Denoiser,
        rule: str | rules.Rule = "greedy",
        block: int | str | None = "auto",
        grid: str = "auto",
        batch_size: int | None = None,
    ):
        self.denoiser = denoiser
        self.rule = rules.parse(rule) if isinstance(rule, str) else rule
        self.block = _block(denoiser, block)
        self.grid = _grid(denoiser, grid)
        if denoiser.attention == "causal" and not isinstance(self.rule, rules.LeftToRight):
            raise DuelError(f"A causal network reveals left to right only; use rule=left_to_right, not {self.rule}.")
        if batch_size is not None and batch_size < 1:
            raise DuelError(f"batch_size is a number of rows, at least 1; got {batch_size}.")
        tokens = CPU_TOKENS if denoiser.device.type == "cpu" else GPU_TOKENS
        self.budget = Budget(batch_size * denoiser.max_length if batch_size else max(tokens, denoiser.max_length))
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
        self._check(windows)
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
        self._check(prompts, generating=True)
        results = [Drawn(0.0, True, (), (), 0, 0, 0)] * len(prompts)
        for group in self._groups(prompts):
            drawn = self._generate_group([prompts[n] for n in group], group, chooser(group))
            for n, result in zip(group, drawn, strict=True):
                results[n] = result
        return results

    def _generate_group(self, prompts: list[Window], group: list[int], choose: Choose) -> list[Drawn]:
        """One lane a row: a finished block is committed, and the row's next block enters."""
        rows = Rows.of(prompts, self.denoiser.device)
        view = self.denoiser.open(rows)
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
        active = waiting.select(slice(0, 0))
        while len(active) or len(waiting):
            active, waiting = self._refill(view, rule, active, waiting)
            try:
                predictions = view(active)
                decision = self._decide(rule, predictions, active, group)
                tokens = choose(predictions, active, decision.pick)  # (R, W)
                log_prob = predictions.log_prob(tokens)  # (R, W)
            except NotFinite as error:
                raise NotFinite(f"{error} {_place(active, error.lane, group)}") from None
            except torch.OutOfMemoryError:
                if len(active) == 1:
                    raise
                self.budget = dataclasses.replace(self.budget, tokens=int(view.cost(active).sum()) // 2)
                half = torch.arange(len(active), device=active.row.device) < len(active) // 2
                waiting, active = active.select(~half).concat(waiting), active.select(half)
                continue
            ledger.record(active, decision, predictions, tokens, log_prob)
            active = active.reveal(decision.pick, tokens, decision.memory)
            finished = ~active.hidden.any(1)  # (R,)
            if finished.any():
                left = active.select(finished)
                active = active.select(~finished)
                following = advance(left)
                if following is not None:
                    waiting = following.concat(waiting)
                for n in ledger.finished(left):
                    result = ledger.result(n)
                    self.counts.add(result)
                    finish(n, result)
        self.counts.forwards += view.forwards
        self.counts.rows += view.evaluated

    def _refill(self, view: View, rule: rules.Rule, active: Lanes, waiting: Lanes) -> tuple[Lanes, Lanes]:
        """Waiting lanes move into the batch while the budget allows."""
        if not len(waiting):
            return active, waiting
        longest = torch.cat([view.cost(active), view.cost(waiting)[:1]]).max()
        copies = 4 if rule.dense_memory else 1
        width = max(active.hidden.shape[1], waiting.hidden.shape[1])
        fits = self.budget.rows(int(longest), width, self.denoiser.vocab_size, copies)
        entering = max(0, fits - len(active))
        if not entering:
            return active, waiting
        return active.concat(waiting.select(slice(0, entering))), waiting.select(slice(entering, None))

    def _decide(self, rule: rules.Rule, predictions: Predictions, lanes: Lanes, group: Sequence[int]) -> rules.Decision:
        decision = rule(predictions, lanes)
        if isinstance(decision, torch.Tensor):
            decision = rules.Decision(decision)
        pick = decision.pick
        if pick.shape != lanes.hidden.shape or pick.dtype != torch.bool:
            raise RuleStalled(
                f"Rule {rule} must pick a boolean plane {tuple(lanes.hidden.shape)}; "
                f"got {pick.dtype} {tuple(pick.shape)}."
            )
        stalled = ~pick.any(1) | (pick & ~lanes.hidden).any(1)  # (R,)
        if stalled.any():
            lane = int(stalled.nonzero()[0])
            what = "picked a position that is not hidden" if pick[lane].any() else "picked nothing"
            raise RuleStalled(f"Rule {rule} {what}. {_place(lanes, lane, group)}")
        return decision

    def _check(self, windows: Sequence[Window], generating: bool = False) -> None:
        """Raise DuelError, naming the window, for one that this law cannot score."""
        denoiser = self.denoiser
        unscorable = set(denoiser.excluded.nonzero()[:, 0].tolist()) - {denoiser.mask_id}
        for n, window in enumerate(windows):
            if window.length > denoiser.max_length:
                raise DuelError(
                    f"Window {n} has {window.length} positions but the network holds {denoiser.max_length}; "
                    "cut it (lm_eval_duel.windows.independent) or shorten the context."
                )
            if window.target and len(window.context) < denoiser.shift:
                raise DuelError(
                    f"Window {n} needs a given first token: this network predicts a token from the one before."
                )
            ids = window.context + window.suffix + (() if generating else window.target)
            if ids and not (min(ids) >= 0 and max(ids) < denoiser.vocab_size):
                wrong = next(token for token in ids if not 0 <= token < denoiser.vocab_size)
                raise DuelError(f"Window {n} holds id {wrong}; the network's ids are 0 to {denoiser.vocab_size - 1}.")
            if denoiser.mask_id in ids:
                raise DuelError(
                    f"Window {n} holds the mask token (id {denoiser.mask_id}), which cannot be given or scored."
                )
            if not generating and not unscorable.isdisjoint(window.target):
                wrong = next(token for token in window.target if token in unscorable)
                raise DuelError(f"Window {n} holds id {wrong}, which is not a token of the vocabulary (padding).")
            if window.tail:
                end = len(window.target) + (len(window.context) if self.grid == "row" else 0)
                if self.block is None or end % self.block:
                    raise DuelError(
                        f"Window {n} has a tail, so its target must end on a block border: {len(window.target)} target "
                        f"positions with block {self.block} do not. Off a border the value is no probability."
                    )


@dataclasses.dataclass(frozen=True)
class _Replay(rules.Rule):
    """The recorded order of one window."""

    name = "replay"
    steps: tuple[int, ...]

    def __call__(self, predictions: Predictions, lanes: Lanes) -> rules.Decision:
        order = torch.tensor(self.steps, device=lanes.row.device)  # (T,)
        index = (lanes.columns - lanes.origin[:, None]).clamp(0, len(order) - 1)  # (R, W)
        pick = lanes.hidden & (order[index] == lanes.step[:, None])
        return rules.Decision(pick, torch.full((len(lanes),), math.inf, dtype=torch.float64, device=pick.device))


def _place(lanes: Lanes, lane: int, group: Sequence[int]) -> str:
    position = int(lanes.start[lane] - lanes.origin[lane])
    return f"(Window {group[int(lanes.row[lane])]}, block at target position {position}, step {int(lanes.step[lane])}.)"


def _block(denoiser: Denoiser, block: int | str | None) -> int | None:
    """The block in force for `block`: an int, None, or "auto"."""
    if block == "auto":
        return denoiser.block or denoiser.published_block or (1 if denoiser.attention == "causal" else DEFAULT_BLOCK)
    if block is not None and (isinstance(block, (str, bool)) or int(block) != block or block < 1):
        raise DuelError(f"block is a number of positions, None (the whole target) or 'auto'; got {block!r}.")
    if denoiser.attention == "causal" and block != 1:
        raise DuelError(f"A causal network has blocks of one; use block=1 or block=auto, not {block}.")
    if denoiser.block is not None and block != denoiser.block:
        raise DuelError(
            f"This network was trained on blocks of {denoiser.block}; block={block} is another model. "
            f"Use block={denoiser.block} or block=auto."
        )
    return block


def _grid(denoiser: Denoiser, grid: str) -> str:
    if grid not in ("auto", "target", "row"):
        raise DuelError(f"grid is 'target', 'row' or 'auto'; got {grid!r}.")
    causal = denoiser.attention == "block_causal"
    if causal and grid == "target":
        raise DuelError("A block-causal network counts its blocks from the row's first position; use grid=row or auto.")
    return grid if grid != "auto" else "row" if causal else "target"
