"""Rows evaluated again alone: neither the other rows of a call nor earlier calls may change a row's predictions.

Throughout a run some lanes are chosen by a hash of (window, block, step), and each is evaluated again, alone:

    when the next lanes are chosen        finds what changes with the other rows of a call, and what changes with time
    right away, for a network in memory   finds the former only: the caller may train it before the next step
    at the end of `log_prob` and others   finds the latter for such a network, too: it is not trained before they return

One lane that differs by more than float noise ends the run. So does a small change that all lanes have in common.

Shapes: R lanes, W block width, S statistics.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch

from lm_eval_duel.core.float_noise import (
    CAUSES,
    FLOAT32,
    FLOOR,
    choose_by_hash,
    differ,
    difference,
    is_coarse,
    magnitude,
    nats_tolerance,
    tolerance,
)
from lm_eval_duel.core.lanes import Lanes, Rows
from lm_eval_duel.core.network import Evaluated, Evaluator, Network, without_autocast
from lm_eval_duel.core.scores import Counts
from lm_eval_duel.errors import InconsistentOutput

log = logging.getLogger("lm_eval.duel_mdm")

# How many lanes are evaluated again
FIRST = 8  # at the start of a run
EARLY = 4  # more each time that the run has become e times as long, until they are a constant share of it
SHARE = 0.005  # of the lanes of a long run
REPEATED = 2  # at the start of each later `log_prob` of a network in memory

# How far statistics may differ
NOISE_FACTOR = 30  # times the float noise that is measured
LOG_MARGIN, LOG_SUM, LOG_PROB = 1, 2, 3  # rows of `Predictions.compared`
# Logits may be large all together. That cancels in a softmax, but its float noise does not, so differences are measured
# in units of at least this share of the log of the sum; in half precision of all of it.
OFFSET = 0.01
# The most values of a position in a rule's memory, if the lanes of a call are to be kept. Whole distributions are more.
KEPT = 64

# A drift
FEWEST = 16  # checks that it takes
ERRORS = 6.0  # standard errors of the mean change from 0


def checks_among(count: float, share: float = SHARE) -> float:
    """The number of checks due among the first `count` events of a run, besides the first `FIRST`."""
    rare = EARLY / share  # from here on a constant share
    early = EARLY * math.log(max(1.0, min(count, rare) / FIRST))
    later = share * max(0.0, count - rare)
    return early + later


class LaneCheck(NamedTuple):
    """A lane to evaluate again, and its statistics the first time."""

    alone: Callable[[], torch.Tensor]  # evaluates it alone, (S, W)
    in_call: Callable[[], torch.Tensor] | None  # among the lanes of its call; None: these are not kept
    statistics: torch.Tensor  # (S, W) of the first time
    size: torch.Tensor  # (S, 1) the units in which statistics differ
    network: Network
    window: int  # its index among all that are scored
    target: int  # target positions of that window
    place: str  # in its window
    ceiling: float  # a larger difference is no float noise, whatever noise is measured

    @property
    def measured(self) -> bool:
        """True if small differences mean something: in float32, without experts."""
        return self.ceiling <= FLOAT32

    def limit(self, again: torch.Tensor) -> float:
        """The largest difference that may be float noise; `again` (S, W): the statistics alone.

        The noise is measured now, at the row length and the number of rows of the run: alone, and among the lanes of
        the call in another order.
        """
        if self.in_call is None or not self.measured:
            return self.ceiling
        try:
            noise = difference(again, self.in_call(), self.size)
        except torch.OutOfMemoryError:
            return self.ceiling
        return min(self.ceiling, max(FLOOR, NOISE_FACTOR * noise))


class Mean:
    """The mean of numbers, with its standard error (Welford 1962)."""

    def __init__(self) -> None:
        self.count = 0
        self.value = 0.0
        self.squares = 0.0  # the sum of squared differences from the mean

    def add(self, number: float) -> None:
        """Add one number."""
        self.count += 1
        step = number - self.value
        self.value += step / self.count
        self.squares += step * (number - self.value)

    @property
    def stderr(self) -> float:
        """The standard error of the mean; 0 for fewer than two numbers."""
        if self.count < 2:
            return 0.0
        return math.sqrt(self.squares / (self.count - 1) / self.count)

    def beyond(self, errors: float) -> bool:
        """True if the mean of enough numbers is more than `errors` standard errors from 0, and its error is not 0."""
        return self.count >= FEWEST and self.stderr > 0 and abs(self.value) > errors * self.stderr


class Drift:
    """Signed changes of lanes that are evaluated again. Float noise has either sign, so that their mean is near 0."""

    def __init__(self) -> None:
        self.totals = Mean()  # of the total of a window, nats, if all of its tokens changed as those of the lane
        self.margins = Mean()  # of log-margins, as a share of them: if logits are scaled, all move to one side
        self.allowed = Mean()  # the change of the total that float noise may make

    def add(self, before: torch.Tensor, after: torch.Tensor, target: int) -> None:
        """Add a lane of a window of `target` tokens, from its statistics before and after, (S, W) each."""
        change = after - before  # (S, W)
        tokens = change[LOG_PROB][change[LOG_PROB].isfinite()]
        if len(tokens):
            self.totals.add(float(tokens.mean()) * target)
            self.allowed.add(nats_tolerance(target))

        has_margin = change[LOG_MARGIN].isfinite()  # (W,)
        margin = before[LOG_MARGIN][has_margin].mean()
        margin_change = change[LOG_MARGIN][has_margin]
        # if not one bit has changed, the lane was alone in its call the first time, too, and shows nothing
        if margin > 0 and margin_change.any():
            self.margins.add(float(margin_change.mean() / margin))

    @property
    def significant(self) -> bool:
        """True if lanes changed to one side, and the total with them by more than float noise."""
        # scaled logits move every margin to one side, and totals to both
        scaled = self.margins.beyond(ERRORS) and self.totals.beyond(ERRORS / 2)
        to_one_side = self.totals.beyond(ERRORS) or scaled
        return to_one_side and abs(self.totals.value) > self.allowed.value

    @property
    def summary(self) -> str:
        """The end of a sentence about the predictions of the lane that was added last."""
        return (
            f"and those of the {self.totals.count - 1} lanes before changed to one side: by {self.totals.value:.2g} "
            f"nats of a window's total, with a standard error of {self.totals.stderr:.1g}"
        )


class RowChecks:
    """The lanes that wait for their second evaluation. `Counts` has the number of lanes compared."""

    def __init__(self) -> None:
        self.waiting: list[LaneCheck] = []
        # those to repeat at the end of a run of a network in memory; None: nothing is repeated
        self.first: list[LaneCheck] | None = None
        self.drift = Drift()
        self._drift_reported = False

    def number_due(self, counts: Counts, lanes: int, lanes_per_row: float) -> int:
        """The number of the next `lanes` to check: at least `FIRST` of a run, and of a long one `SHARE` of its cost.

        `lanes_per_row`: the number of lanes that cost as much as one evaluated alone.
        """
        lane_steps = counts.lane_steps + lanes  # of the run, with these
        in_rows = lane_steps / lanes_per_row  # what they cost
        wanted = min(lane_steps, FIRST) + checks_among(in_rows)
        chosen_before = counts.rows_checked + len(self.waiting)
        due = int(wanted) - chosen_before
        if self.first is not None:
            due = max(due, REPEATED - len(self.first))
        return min(lanes, max(0, due))

    def add(self, checks: list[LaneCheck]) -> None:
        """Let these lanes wait."""
        self.waiting += checks
        if self.first is not None:
            self.first += checks[: FIRST - len(self.first)]

    def compare(self, counts: Counts, latest: int = 0) -> None:
        """Evaluate the waiting lanes alone, but for the last `latest`, and count those that differ.

        Raises:
            InconsistentOutput: If one differs in float32; the message names it.
        """
        end = len(self.waiting) - latest
        due = self.waiting[:end]
        self.waiting = self.waiting[end:]
        for check in due:
            self._compare(check, counts, "alone")

    @contextlib.contextmanager
    def repeating(self, network: Network, counts: Counts) -> Iterator[None]:
        """A run that returns when all is done: the first lanes of a network in memory are evaluated again at its end.

        Other networks need no such end: each check waits for the next one, so nothing changes between two.
        """
        if network.fixed_weights or self.first is not None:  # or inside another such run
            yield
            return
        self.first = []
        try:
            yield
            with torch.inference_mode():
                for check in self.first:
                    self._compare(check, counts, "at the end of the run")
        finally:
            self.first = None

    def _compare(self, check: LaneCheck, counts: Counts, when: str) -> None:
        """Evaluate a lane alone, and report it if it differs, or if all lanes have changed to one side."""
        try:
            with without_autocast(check.network):
                again = check.alone()  # (S, W)
                deviation = difference(check.statistics, again, check.size)
                limit = FLOOR
                if deviation > FLOOR:
                    limit = check.limit(again)  # measures float noise, which takes another call
        except torch.OutOfMemoryError:  # nothing is known of this lane
            return
        counts.rows_checked += 1
        self.drift.add(check.statistics, again, check.target)
        may_be_noise = is_coarse(check.network)
        if deviation > limit:
            self._report(check, counts, when, differ(deviation, limit), may_be_noise)
        elif self.drift.significant and not self._drift_reported:
            self._drift_reported = True
            self._report(check, counts, when, self.drift.summary, may_be_noise or not check.measured)

    def _report(
        self,
        check: LaneCheck,
        counts: Counts,
        when: str,
        problem: str,
        may_be_noise: bool,
    ) -> None:
        """Count a lane that differs and raise InconsistentOutput, or only log it if it may be float noise.

        `problem`: the end of a sentence about its predictions.
        """
        counts.rows_differing += 1
        text = f"Window {check.window}, {check.place}: evaluated again {when}, its predictions {problem}"
        if may_be_noise:
            log.warning("%s. Such rows are counted (rows_differing in the results)", text)
            return
        raise InconsistentOutput(
            f"{text}. The other rows of a call, or the calls in between, change them, as {CAUSES} do. So every "
            "value of this spec is suspect, not this one alone. Make the network a function of each row.",
            window=check.window,
        )


def choose_lanes(lanes: Lanes, number: int, window_indices: Sequence[int]) -> list[int]:
    """`number` of the lanes, chosen by a hash of (window, block, step)."""
    window = torch.tensor(window_indices, device=lanes.row.device)[lanes.row]  # (R,)
    block = lanes.start - lanes.origin  # (R,)
    indices: list[int] = choose_by_hash(number, window, block, lanes.step).tolist()
    return indices


def make_checks(
    number: int,
    opened: Callable[[Rows], Evaluator],
    view: Evaluator,
    lanes: Lanes,
    evaluated: Evaluated,
    tokens: torch.Tensor,
    window_indices: Sequence[int],
) -> list[LaneCheck]:
    """Checks of `number` of the lanes, with the statistics that were `evaluated`.

    Among these are the log-probs of `tokens` (R, W).
    """
    network = view.denoiser
    offset = 1.0 if is_coarse(network) else OFFSET
    values_in_memory = sum(plane.numel() for plane in lanes.memory)
    keeps_call = values_in_memory <= KEPT * lanes.tokens.numel()

    checks = []
    for lane in choose_lanes(lanes, number, window_indices):
        row = int(lanes.row[lane])
        only = slice(lane, lane + 1)
        one_lane = lanes.select(only).in_row(0)
        lane_tokens = tokens[only].clone()  # (1, W)
        values = evaluated.compared(lane, lane_tokens)  # (S, W)
        size = magnitude(values)  # (S, 1)
        size = size.clamp(min=float(size[LOG_SUM]) * offset)  # see OFFSET
        position = int(lanes.start[lane] - lanes.origin[lane])
        in_call = partial(_evaluate_again, opened, view.rows, lanes, lane, lane_tokens)
        check = LaneCheck(
            alone=partial(_evaluate_again, opened, view.rows.alone(row), one_lane, 0, lane_tokens),
            in_call=in_call if keeps_call else None,
            statistics=values,
            size=size,
            network=network,
            window=window_indices[row],
            target=int(view.rows.target[row]),
            place=f"block at target position {position}, step {int(lanes.step[lane])}",
            ceiling=tolerance(network),
        )
        checks.append(check)
    return checks


def _evaluate_again(
    opened: Callable[[Rows], Evaluator],
    rows: Rows,
    lanes: Lanes,
    lane: int,
    tokens: torch.Tensor,
) -> torch.Tensor:
    """The statistics (S, W) of one lane with `tokens` (1, W), evaluated together with the others of `lanes`.

    All lanes move up by one place, so that among several a lane stands elsewhere in the call than the first time.
    """
    view = opened(rows)
    order = torch.arange(len(lanes), device=lanes.row.device).roll(-1)  # (R,)
    evaluated = view(lanes.select(order))
    place = (lane - 1) % len(lanes)
    return evaluated.compared(place, tokens)
