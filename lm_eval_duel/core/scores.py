"""Results: the score of one window, the counts of a run, and the accumulator that is filled while lanes are revealed.

Shapes: N windows, L row length, R lanes, W block width, P picked positions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import torch

from lm_eval_duel.core.decision import Decision
from lm_eval_duel.core.lanes import Lanes, Rows

if TYPE_CHECKING:
    from lm_eval_duel.core.predictions import Predictions

WORK = (  # of Counts
    *("forwards", "rows", "lane_steps", "rows_checked", "rows_differing"),
    *("decisions", "decisions_checked", "decisions_differing"),
)
STATISTICS = ("confidence", "margin", "entropy")  # of Predictions, in a trace


@dataclasses.dataclass(frozen=True)
class WindowScore:
    """The score of one window.

    `reveal_steps` and `token_logprobs` have an entry for each target token: the step that revealed it, counted from 0
    in every block, and its log-probability at that step, in nats. They are -1 and 0 at known positions.
    """

    log_prob: float  # nats, the sum over the target
    is_greedy: bool = False  # every token was the argmax when it was revealed
    reveal_steps: tuple[int, ...] = ()
    token_logprobs: tuple[float, ...] = ()
    nfe: int | None = None  # rule steps, summed over blocks; None: more than one order
    near_ties: int | None = None  # steps whose pick float noise could change; None: the rule does not know
    all_mask_starts: int = 0  # steps at which the row showed only [MASK], so that all masked positions tied exactly
    # if `traced`, per target token when it was revealed: the log-odds of P1, P1 - P2, and the entropy in nats
    confidence: tuple[float, ...] = ()
    margin: tuple[float, ...] = ()
    entropy: tuple[float, ...] = ()

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> WindowScore:
        """The score whose `dataclasses.asdict` these fields are."""
        return cls(**fields)


@dataclasses.dataclass(frozen=True)
class Sample(WindowScore):
    """A sample, or an argmax decoding, with its own score: `log_prob` is the log-probability of `tokens`."""

    tokens: tuple[int, ...] = ()
    tail: int = 0  # positions never revealed: generation stopped early, or the prompt had a tail

    @classmethod
    def from_score(cls, scored: WindowScore, tokens: tuple[int, ...], tail: int) -> Sample:
        """A sample from its score and its tokens."""
        return cls(**vars(scored), tokens=tokens, tail=tail)


@dataclasses.dataclass
class PhaseCounts:
    """The cost of one phase of an estimate."""

    forwards: int = 0
    rows: int = 0
    seconds: float = 0.0


@dataclasses.dataclass
class Counts:
    """The counts of what has been computed, over all calls."""

    windows: int = 0
    tokens: int = 0  # of targets
    nfe: int | None = 0  # None: more than one order
    forwards: int = 0  # network calls
    rows: int = 0  # rows evaluated
    lane_steps: int = 0  # steps of lanes
    rows_checked: int = 0  # lanes that were evaluated again alone
    rows_differing: int = 0  # those whose predictions differed by more than noise
    decisions: int = 0  # calls of a user's rule with a real choice
    decisions_checked: int = 0  # those that were asked again
    decisions_differing: int = 0  # those that differed
    near_ties: int | None = 0  # None: the rule does not know
    near_tie_windows: int | None = 0  # windows that have any
    all_mask_starts: int = 0
    phases: dict[str, PhaseCounts] = dataclasses.field(default_factory=dict)  # of a two-phase estimate

    def add_work(self, other: Counts) -> None:
        """Add what another count has of calls and checks, and none of its windows."""
        for name in WORK:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def add(self, scored: WindowScore, tokens: int) -> None:
        """Add one finished window of `tokens` target tokens."""
        self.windows += 1
        self.tokens += tokens
        self.all_mask_starts += scored.all_mask_starts
        near_ties = scored.near_ties
        self.nfe = known_sum(self.nfe, scored.nfe)
        self.near_ties = known_sum(self.near_ties, near_ties)
        self.near_tie_windows = known_sum(self.near_tie_windows, None if near_ties is None else int(near_ties > 0))


def known_sum(a: int | None, b: int | None) -> int | None:
    """The sum, or None if one of the numbers is not known."""
    return None if a is None or b is None else a + b


class Step(NamedTuple):
    """One step of some lanes."""

    lanes: Lanes  # before it
    predictions: Predictions
    decision: Decision
    tokens: torch.Tensor  # (R, W) revealed at the picks; -1 elsewhere
    log_prob: torch.Tensor  # (R, W) of the tokens, float64


IndexedScores: TypeAlias = Iterator[tuple[int, WindowScore]]  # (index, score) of each window as it is finished


class Scores(Protocol):
    """An accumulator of the steps of one group of windows."""

    def add(self, step: Step) -> None:
        """Add one step. After an out-of-memory error in here, the same step is added again."""

    def take(self, finished: Lanes) -> IndexedScores:
        """(row, score) of each window that these finished lanes complete."""


class WindowScores:
    """The scores of one group of windows, on the network's device, in float64."""

    def __init__(self, rows: Rows, traced: bool = False, expected: torch.Tensor | None = None):
        count, length = rows.ids.shape
        device = rows.ids.device
        self.origin, self.target = rows.origin.tolist(), rows.target.tolist()
        self.length = length  # the column of positions that are not picked
        self.log_probs = torch.full((count, length + 1), math.nan, dtype=torch.float64, device=device)  # (N, L + 1)
        self.reveal_steps = torch.full((count, length + 1), -1, dtype=torch.int32, device=device)  # (N, L + 1)
        self.sums = torch.zeros(count, 5, dtype=torch.int64, device=device)  # (N, 5) as in `add`
        column = torch.arange(length, device=device)  # (L,)
        known = rows.visible & (column >= rows.origin[:, None]) & (column < (rows.origin + rows.target)[:, None])
        # (N,) target positions to reveal
        self.expected = rows.target - known.sum(1) if expected is None else expected
        self.has_margins = True
        # (N, L + 1) each
        self.statistics = {name: torch.full_like(self.log_probs, math.nan) for name in STATISTICS if traced}
        for plane in (self.log_probs, *self.statistics.values()):
            plane[:, :length].masked_fill_(known, 0.0)

    def add(self, step: Step) -> None:
        """Add one step: log-probs and steps at the picks; NFE, near ties, all-mask starts."""
        lanes, predictions, decision, tokens, log_prob = step
        pick = decision.pick
        missed = ((tokens != predictions.argmax) & pick).any(1)  # (R,)
        one = torch.ones_like(missed)  # (R,)
        sums = torch.stack([pick.sum(1), one, missed, decision.near_tie, predictions.all_mask], 1).long()  # (R, 5)
        row, column = lanes.row[:, None].expand_as(pick), torch.where(pick, lanes.columns, self.length)  # (R, W)
        self.log_probs.index_put_((row, column), log_prob)
        self.reveal_steps.index_put_((row, column), lanes.step[:, None].int().expand_as(pick))
        for name, plane in self.statistics.items():
            plane.index_put_((row, column), getattr(predictions, name).double())
        # on out-of-memory before this line, the step is taken again and writes the same values
        self.sums.index_add_(0, lanes.row, sums)
        self.has_margins &= decision.decision_margin is not None

    def take(self, finished: Lanes) -> IndexedScores:
        """(row, score) of each window that has no lane left."""
        rows = finished.row.unique()  # (n,)
        rows = rows[self.sums[rows, 0] == self.expected[rows]]
        if not len(rows):
            return
        log_probs, steps, sums = (plane[rows].cpu() for plane in (self.log_probs, self.reveal_steps, self.sums))
        planes = {name: plane[rows].cpu() for name, plane in self.statistics.items()}
        for n, row in enumerate(rows.tolist()):
            span = slice(self.origin[row], self.origin[row] + self.target[row])
            statistics = [tuple(planes[name][n, span].tolist()) if planes else () for name in STATISTICS]
            confidence, margin, entropy = statistics
            _, nfe, missed, near_ties, all_mask = sums[n].tolist()
            scored = WindowScore(
                log_prob=float(log_probs[n, span].sum()),
                is_greedy=not missed,
                reveal_steps=tuple(steps[n, span].tolist()),
                token_logprobs=tuple(log_probs[n, span].tolist()),
                nfe=nfe,
                near_ties=near_ties if self.has_margins else None,
                all_mask_starts=all_mask,
                confidence=confidence,
                margin=margin,
                entropy=entropy,
            )
            yield row, scored
