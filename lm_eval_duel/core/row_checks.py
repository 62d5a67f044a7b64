"""Rows evaluated again alone: neither the other rows of a call nor earlier calls may change a row's predictions.

Throughout a run some lanes are drawn by a hash of (window, block, step), and each is evaluated again, alone:

    when the next lanes are drawn         finds what changes with the other rows of a call, and what changes with time
    right away, in memory                 finds the former: the caller may train the network before the next step
    at the end of `log_prob` and others   finds the latter in memory, too: nothing is trained before they return

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

from lm_eval_duel.core.hashing import hashed
from lm_eval_duel.core.lanes import Lanes, Rows
from lm_eval_duel.core.network import Network, View, without_autocast
from lm_eval_duel.core.predictions import Predictions
from lm_eval_duel.core.scores import Counts
from lm_eval_duel.errors import InconsistentOutput

log = logging.getLogger("lm_eval.duel_mdm")

FIRST = 8  # checks at the start of a run
EARLY = 4  # more each time that the run has become e times as long, until they are a constant share of it
SHARE = 0.005  # of the lanes of a long run
REPEATED = 2  # checks at the start of each later `log_prob` of a network in memory
# How far statistics may differ, in units of the largest one of their kind in the lane, or of 1.
FLOOR = 2e-5  # in float32: between 1 row and many, ordinary networks differ by 1e-6 to 4e-6, a few by 1e-5
NOISE_FACTOR = 30  # of the float noise that is measured, if that is larger
NOISE = 1e-3  # the most in float32, as between the batches of `self_tests`
NOISE_COARSE = 0.05  # in half precision
NOISE_ROUTED = 0.5  # of quantized weights, and of experts: noise may choose others
LOG_MARGIN, LOG_SUM, LOG_PROB = 1, 2, 3  # their numbers among the statistics
OFFSET = 0.01  # of what logits have in common, which cancels but for its float noise; in half precision all of it
KEPT = 64  # values of a position in memory: lanes that hold whole distributions are not kept
# A drift: how many checks it takes, and how many standard errors
FEWEST, ERRORS = 16, 6.0
PER_WINDOW, PER_TOKEN = 1e-4, 1e-6  # nats: float32 noise of a window's score


def checks_among(count: float, share: float = SHARE) -> float:
    """The number of checks due among the first `count` events of a run, besides the first `FIRST`."""
    rare = EARLY / share  # from here on a constant share
    return EARLY * math.log(max(1.0, min(count, rare) / FIRST)) + share * max(0.0, count - rare)


class LaneCheck(NamedTuple):
    """A lane to evaluate again, and its statistics the first time."""

    alone: Callable[[], torch.Tensor]  # evaluates it alone, (S, W)
    among: Callable[[], torch.Tensor] | None  # among the lanes of its call; None: these are not kept
    statistics: torch.Tensor  # (S, W)
    network: Network
    window: int  # its index among all that are scored
    target: int  # target positions of that window
    place: str  # in its window
    least: float  # the size in units of which statistics differ is at least this
    most: float  # the largest difference that may be float noise, whatever noise is measured

    @property
    def measured(self) -> bool:
        """True if small differences mean something: in float32, without experts."""
        return self.most <= NOISE

    def limit(self, again: torch.Tensor) -> float:
        """The largest difference that may be float noise; `again` (S, W): the statistics alone.

        The noise is measured now, at the row length and the number of rows of the run: alone, and among the lanes of
        the call in another order.
        """
        if self.among is None or not self.measured:
            return self.most
        try:
            noise = difference(again, self.among(), self.least)
        except torch.OutOfMemoryError:
            return self.most
        return min(self.most, max(FLOOR, NOISE_FACTOR * noise))


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
        return math.sqrt(self.squares / (self.count - 1) / self.count) if self.count > 1 else 0.0

    def beyond(self, errors: float) -> bool:
        """True if the mean of enough numbers is more than so many standard errors from 0, and its error is not 0."""
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
        known = change[LOG_MARGIN].isfinite()  # (W,)
        margin = before[LOG_MARGIN][known].mean()
        if len(tokens):
            self.totals.add(float(tokens.mean()) * target)
            self.allowed.add(max(PER_WINDOW, PER_TOKEN * target))
        if margin > 0 and change[LOG_MARGIN][known].any():  # a lane that is evaluated in the same call says nothing
            self.margins.add(float(change[LOG_MARGIN][known].mean() / margin))

    @property
    def significant(self) -> bool:
        """True if lanes changed to one side, and the total with them by more than float noise."""
        to_one_side = self.totals.beyond(ERRORS) or (self.margins.beyond(ERRORS) and self.totals.beyond(ERRORS / 2))
        return to_one_side and abs(self.totals.value) > self.allowed.value


class RowChecks:
    """The lanes that wait for their second evaluation. `Counts` has the number of lanes compared."""

    def __init__(self) -> None:
        self.waiting: list[LaneCheck] = []
        self.first: list[LaneCheck] | None = None  # to repeat at the end of a run; None: nothing is repeated
        self.drift = Drift()
        self._drifts = False  # it was reported

    def number_due(self, counts: Counts, lanes: int, lanes_per_row: float) -> int:
        """The number of the next `lanes` to check: at least `FIRST` of a run, and of a long one `SHARE` of its cost.

        `lanes_per_row`: the number of lanes that cost as much as one evaluated alone.
        """
        count, drawn = counts.lane_steps + lanes, counts.rows_checked + len(self.waiting)
        due = int(min(count, FIRST) + checks_among(count / lanes_per_row)) - drawn
        if self.first is not None:
            due = max(due, REPEATED - len(self.first))
        return min(lanes, max(0, due))

    def add(self, drawn: list[LaneCheck]) -> None:
        """Let these lanes wait."""
        self.waiting += drawn
        if self.first is not None:
            self.first += drawn[: FIRST - len(self.first)]

    def compare(self, counts: Counts, latest: int = 0) -> None:
        """Evaluate the waiting lanes alone, but for the `latest` ones, and count those that differ.

        Raises:
            InconsistentOutput: If one differs in float32; the message names it.
        """
        end = len(self.waiting) - latest
        due, self.waiting = self.waiting[:end], self.waiting[end:]
        for drawn in due:
            self._compare(drawn, counts, "alone")

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
                for drawn in self.first:
                    self._compare(drawn, counts, "at the end of the run")
        finally:
            self.first = None

    def _compare(self, drawn: LaneCheck, counts: Counts, when: str) -> None:
        """Evaluate a lane alone; raise InconsistentOutput if it differs, or if all do, or log it."""
        try:
            with without_autocast(drawn.network):
                again = drawn.alone()  # (S, W)
                deviation = difference(drawn.statistics, again, drawn.least)
                limit = FLOOR if deviation <= FLOOR else drawn.limit(again)
        except torch.OutOfMemoryError:  # so nothing is known of this one
            return
        counts.rows_checked += 1
        self.drift.add(drawn.statistics, again, drawn.target)
        drifts = self.drift.significant and not self._drifts
        if deviation <= limit and not drifts:
            return
        counts.rows_differing += 1
        what = f"Window {drawn.window}, {drawn.place}: evaluated again {when}, its predictions"
        differs = not deviation <= limit
        if differs:
            found = f"{what} differ by {deviation:.2g} of their size; float noise is below {limit:.2g}"
        else:
            self._drifts, total = True, self.drift.totals
            found = (
                f"{what} and those of the {total.count - 1} lanes before changed to one side: by "
                f"{total.value:.2g} nats of a window's total, with a standard error of {total.stderr:.1g}"
            )
        if is_coarse(drawn.network) or not (differs or drawn.measured):
            log.warning("%s. Such rows are counted (rows_differing in the results)", found)
            return
        raise InconsistentOutput(
            f"{found}. The other rows of a call, or the calls in between, change them, as a capacity of experts, "
            "statistics of the batch or a counter do. So every value of this spec is suspect, not this one alone. Make "
            "the network a function of each row.",
            window=drawn.window,
        )


def draw_lanes(lanes: Lanes, number: int, window_indices: Sequence[int]) -> list[int]:
    """`number` of the lanes, drawn by a hash of (window, block, step)."""
    window = torch.tensor(window_indices, device=lanes.row.device)[lanes.row]  # (R,)
    return hashed(window, lanes.start - lanes.origin, lanes.step).argsort()[:number].tolist()


def draw(
    number: int,
    opened: Callable[[Rows], View],
    view: View,
    lanes: Lanes,
    predictions: Predictions,
    tokens: torch.Tensor,
    window_indices: Sequence[int],
) -> list[LaneCheck]:
    """`number` of the lanes, with their statistics, among them the log-probs of `tokens` (R, W)."""
    network, drawn = view.denoiser, []
    offset = 1.0 if is_coarse(network) else OFFSET
    most = tolerance(network)
    kept = sum(plane.numel() for plane in lanes.memory) <= KEPT * lanes.tokens.numel()
    for lane in draw_lanes(lanes, number, window_indices):
        row, here = int(lanes.row[lane]), slice(lane, lane + 1)
        one, of_lane = lanes.select(here).in_row(0), tokens[here].clone()  # (1, W)
        values = statistics(predictions.of_lane(lane, tokens.shape[1]), network, of_lane)  # (S, W)
        size = float(values[LOG_SUM].nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs().max())
        place = f"block at target position {int(lanes.start[lane] - lanes.origin[lane])}, step {int(lanes.step[lane])}"
        drawn.append(
            LaneCheck(
                alone=partial(_again, opened, view.rows.alone(row), one, 0, of_lane),
                among=partial(_again, opened, view.rows, lanes, lane, of_lane) if kept else None,
                statistics=values,
                network=network,
                window=window_indices[row],
                target=int(view.rows.target[row]),
                place=place,
                least=size * offset,
                most=most,
            )
        )
    return drawn


def _again(opened: Callable[[Rows], View], rows: Rows, lanes: Lanes, number: int, tokens: torch.Tensor) -> torch.Tensor:
    """The statistics (S, W) of one of some lanes, which are evaluated together, each in the place before its own."""
    view = opened(rows)
    turned = torch.arange(len(lanes), device=lanes.row.device).roll(-1)  # (R,)
    place = (number - 1) % len(lanes)
    found = view(lanes.select(turned) if len(lanes) > 1 else lanes)
    return statistics(found if len(lanes) == 1 else found.of_lane(place, tokens.shape[1]), view.denoiser, tokens)


def statistics(predictions: Predictions, network: Network, tokens: torch.Tensor) -> torch.Tensor:
    """The statistics of one lane that rules and scores read, (S, W) float64: log-odds, margin, log of the sum, and the
    log-probs of `tokens` (1, W).

    Where distributions are truncated, by top-p say, float noise may move a token across the border and every statistic
    with it. So the statistics without filters are read.
    """
    predictions = predictions.unfiltered
    read = (predictions.confidence, predictions.log_margin, predictions.log_sum, predictions.log_prob(tokens))
    return torch.stack([plane[0].double() for plane in read])


def difference(one: torch.Tensor, other: torch.Tensor, least: float = 0.0) -> float:
    """The largest difference of statistics (S, W), each in units of its own largest value, of `least`, or of 1."""
    same = (one == other) | (one.isnan() & other.isnan())
    deviation = (one - other).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    largest = one.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs().amax(1).clamp(min=max(1.0, least))  # (S,)
    return float((torch.where(same, 0.0, deviation).amax(1) / largest).max())


def tolerance(network: Network) -> float:
    """The difference that batches of other rows may make, see `difference`."""
    if network.quantized or is_routed(network):
        return NOISE_ROUTED
    return NOISE_COARSE if is_coarse(network) else NOISE


def is_coarse(network: Network) -> bool:
    """True if a network's numbers are coarser than float32: by quantization, its dtype, or its products (TF32)."""
    return network.quantized or network.coarse or torch.get_float32_matmul_precision() != "highest"


def is_routed(network: Network) -> bool:
    """True if a network has experts and a position uses some of them."""
    for value in vars(network).values():
        names = (name for name, _ in value.named_modules()) if isinstance(value, torch.nn.Module) else ()
        if any("expert" in name for name in names) or (isinstance(value, Network) and is_routed(value)):
            return True
    return False
