"""Exact likelihood and sampling under a deterministic unmasking rule (the paper, Algorithms 1 and 2).

    log p(x) = sum over steps t, over positions l picked at t, of log P_l[x_l]

One reveal loop serves both (reveal.py): only what a token is (the truth, a draw, the argmax) and where a finished block
leads differ. With the truth known every block starts from a known state, so all blocks of all windows are lanes of one
queue; when sampling, a row's next lane enters as its last one finishes.

Shapes: N windows, L row length, R lanes, W block width.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch

from lm_eval_duel import fingerprint, rules
from lm_eval_duel.denoisers.base import Denoiser
from lm_eval_duel.denoisers.predictions import Predictions
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimator import Estimator, OnDone, Opened, Value, fresh
from lm_eval_duel.hashing import uniform
from lm_eval_duel.lanes import Lanes, Rows
from lm_eval_duel.law import check_rule, check_windows
from lm_eval_duel.ledger import Drawn, Ledger, Scored
from lm_eval_duel.reveal import Choose, RevealLoop, decide
from lm_eval_duel.windows import Window

Stop = Callable[[int, tuple[int, ...]], bool]  # (index, tokens so far) -> draw no further block


class Duel(Estimator):
    """A denoiser, an unmasking rule and a block: one law, to score (`log_prob`, Algorithm 2) and to sample.

    `block`: positions finished before the next ones; None: the whole target; "auto": the trained block, else the
    published one, else 32. `grid`: "target" (blocks count from the first target position), "row" (from the row's
    first), "auto" (row for block-causal networks). `batch_size`, `max_batch_size`, `traced`: see `Estimator`.

    Raises DuelError for a combination that is no law of this network.
    """

    name, decodes = "duel", True

    def __init__(
        self,
        denoiser: Denoiser,
        rule: str | rules.Rule = "greedy",
        block: int | str | None = "auto",
        grid: str = "auto",
        batch_size: int | None = None,
        max_batch_size: int | None = None,
        traced: bool = False,
    ):
        self.rule = rules.parse(rule) if isinstance(rule, str) else rule
        check_rule(denoiser, self.rule)
        super().__init__(denoiser, block, grid, batch_size, max_batch_size, traced)

    def describe(self) -> dict[str, object]:
        law = {"estimator": self.name, "rule": self.rule, "block": self.block, "grid": self.grid}
        return law | code_of([self.rule])

    def values(self, scored: Scored) -> dict[str, Value]:
        return {self.name: Value(scored.log_prob, nfe=scored.nfe)}

    def under(self, denoiser: Denoiser) -> Duel:
        """The same rule and block on a wrapped network of the same kind; what is computed is counted here."""
        twin = copy.copy(self)
        twin.denoiser, twin._loop = denoiser, RevealLoop(denoiser, self.budget)
        twin.counts = self.counts
        return twin

    def replay(self, windows: Sequence[Window], steps: Sequence[Sequence[int]]) -> list[Scored]:
        """The nats of a recorded order: `steps` as in `Scored`. A diagnostic; a likelihood only if a rule made them."""
        if len(windows) != len(steps):
            raise DuelError(f"replay wants the steps of each window: {len(windows)} windows, {len(steps)} orders.")
        results: list[Scored] = []
        for n, (window, order) in enumerate(zip(windows, steps, strict=True)):
            context = len(window.context)
            if len(order) != len(window.target):
                raise DuelError(f"Window {n} has {len(window.target)} target tokens but {len(order)} steps.")
            for start, width in self.blocks(window):
                inside = set(order[max(0, start - context) : start - context + width])
                if inside != set(range(len(inside))):
                    raise DuelError(
                        f"Window {n}: the steps of a block must be 0..n-1 without gaps, not {sorted(inside)}."
                    )
            rule = _Replay(tuple(order))
            results += self._score([window], lambda opened, emit, rule=rule: self._follow(opened, emit, rule))
        return results

    def sample(
        self,
        contexts: Sequence[Sequence[int]],
        length: int,
        suffix: Sequence[int] = (),
        tail: int = 0,
        seed: int = 0,
        keys: Sequence[int] | None = None,
        stop: Stop | None = None,
        on_done: Callable[[int, Drawn], None] | None = None,
    ) -> list[Drawn]:
        """Draw `length` tokens after each context (Algorithm 1); a draw depends on (seed, key, position) only.

        `keys` defaults to the index of each context. `stop(index, tokens)` is asked after each finished block: where it
        is true no further block is drawn, and the result's `tail` is what is left. `on_done(index, result)` as each
        finishes.
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

        return self._generate(prompts(contexts, length, suffix, tail), chooser, stop, on_done)

    def decode(
        self,
        contexts: Sequence[Sequence[int]],
        length: int,
        suffix: Sequence[int] = (),
        tail: int = 0,
        stop: Stop | None = None,
        on_done: Callable[[int, Drawn], None] | None = None,
    ) -> list[Drawn]:
        """The most probable token at every pick: what `is_greedy` promises. `stop`, `on_done`: as in `sample`."""

        def choose(predictions: Predictions, lanes: Lanes, pick: torch.Tensor) -> torch.Tensor:
            return torch.where(pick, predictions.argmax, -1)

        return self._generate(prompts(contexts, length, suffix, tail), lambda group: choose, stop, on_done)

    # ------------------------------------------------------------ which lanes, and what a token is

    def _score_group(self, opened: Opened, emit: OnDone) -> None:
        self._follow(opened, emit, self.rule)

    def _follow(self, opened: Opened, emit: OnDone, rule: rules.Rule) -> None:
        """Every block of every window at once, under `rule`."""
        ledger = Ledger(opened.rows, self.traced)

        def finish(row: int, result: dict[str, Any]) -> None:
            emit(row, Scored(**result))

        if rule.fixed:
            self._evaluate(opened, self._steps(opened, rule), ledger, finish)
            return
        waiting = [opened.fresh(self._places(opened))]
        self._loop(
            opened.view,
            ledger,
            rule,
            waiting,
            opened.true_tokens,
            lambda lanes: None,
            finish,
            opened.numbers,
            foreseen=True,
        )

    def _steps(self, opened: Opened, rule: rules.Rule) -> Iterator[Lanes]:
        """Every state of a fixed order, a batch of blocks after the other; only its picks are hidden in a state,
        and cells that are neither hidden nor revealed show [MASK]."""
        places, done = self._places(opened), 0
        while done < len(places):
            count = self._loop.fits(opened.view, rule, opened.fresh(places[done : done + 1]))
            lanes, done = opened.fresh(places[done : done + count]), done + count
            while len(lanes):
                decision = decide(rule, None, lanes, opened.numbers)
                pick = decision.pick  # (R, W)
                yield dataclasses.replace(lanes, hidden=pick, memory=())
                lanes = lanes.reveal(pick, opened.truth(lanes), decision.memory)
                lanes = lanes.select(lanes.hidden.any(1))

    def _generate(
        self,
        asked: list[Window],
        chooser: Callable[[list[int]], Choose],
        stop: Stop | None,
        on_done: Callable[[int, Drawn], None] | None,
    ) -> list[Drawn]:
        check_windows(self.denoiser, self.block, self.grid, asked, generating=True)
        results = [Drawn(0.0, True, (), (), 0, 0, 0)] * len(asked)

        def emit(n: int, drawn: Drawn) -> None:
            results[n] = drawn
            if on_done:
                on_done(n, drawn)

        for n, prompt in enumerate(asked):
            if not prompt.target:
                emit(n, results[n])
        for group in self._groups(asked):
            self._generate_group([asked[n] for n in group], group, chooser(group), stop, emit)
        return results

    def _generate_group(
        self,
        asked: list[Window],
        group: list[int],
        choose: Choose,
        stop: Stop | None,
        emit: Callable[[int, Drawn], None],
    ) -> None:
        """One lane a row: a finished block is committed, and the row's next block enters."""
        rows = Rows.of(asked, self.denoiser.device)
        view, ledger = self.denoiser.open(rows, generating=True), Ledger(rows, self.traced)
        places = [self.blocks(prompt) for prompt in asked]
        first = [(n, *found.pop(0)) for n, found in enumerate(places)]

        def tokens(n: int, count: int) -> tuple[int, ...]:
            start = len(asked[n].context)
            return tuple(rows.ids[n, start : start + count].tolist())

        def advance(lanes: Lanes) -> Lanes | None:
            view.commit(lanes)
            following = []
            for n in lanes.row.tolist():
                if not places[n]:
                    continue
                if stop and stop(group[n], tokens(n, places[n][0][0] - len(asked[n].context))):
                    ledger.stop(n)
                    continue
                following.append((n, *places[n].pop(0)))
            return fresh(rows, following) if following else None

        def finish(n: int, result: dict[str, Any]) -> None:
            drawn, left = tokens(n, len(result["nats"])), len(asked[n].target) - len(result["nats"])
            scored = Drawn(**result, tokens=drawn, tail=asked[n].tail + left)
            self.counts.add(scored, len(drawn))
            emit(group[n], scored)

        self._loop(view, ledger, self.rule, [fresh(rows, first)], choose, advance, finish, group)


def prompts(contexts: Sequence[Sequence[int]], length: int, suffix: Sequence[int], tail: int) -> list[Window]:
    """What is to be generated, as windows."""
    if length < 0:
        raise DuelError(f"length is a number of tokens to generate, not {length}.")
    return [Window(tuple(context), (0,) * length, tuple(suffix), tail) for context in contexts]


class Exact(Duel):
    """The chain rule of an autoregressive network: the same windows, one forward each.

    Raises DuelError for a network that is not autoregressive.
    """

    name = "exact"

    def __init__(
        self,
        denoiser: Denoiser,
        grid: str = "auto",
        batch_size: int | None = None,
        max_batch_size: int | None = None,
        traced: bool = False,
    ):
        if denoiser.attention != "causal":
            raise DuelError(
                f"estimator=exact is the chain rule of an autoregressive network; this one is {denoiser.attention}. "
                "Use estimator=duel (or elbo, mixture, oracle)."
            )
        super().__init__(denoiser, rules.LeftToRight(), 1, grid, batch_size, max_batch_size, traced)


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


def code_of(used: Iterable[rules.Rule]) -> dict[str, str]:
    """What a law says of rules that are not of this package: the hash of their code."""
    files = {inspect.getfile(type(rule)) for rule in used if type(rule) not in rules.RULES.values()}
    return {"rule_code": fingerprint.hash_files(files)} if files else {}
