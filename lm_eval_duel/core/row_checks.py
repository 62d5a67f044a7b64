"""Rows evaluated again alone: neither the other rows of a call nor earlier calls may change a row's predictions.

Throughout a run some lanes are drawn by a hash of (window, block, step). Each is evaluated again, alone, when the next
ones are drawn: this finds what changes with the other rows of a call, and what changes with time.

Shapes: R lanes, W block width, S statistics.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from lm_eval_duel.core.hashing import hashed
from lm_eval_duel.core.lanes import Lanes, Rows
from lm_eval_duel.core.network import Network, without_autocast
from lm_eval_duel.core.predictions import Predictions
from lm_eval_duel.core.scores import Counts
from lm_eval_duel.core.view import View
from lm_eval_duel.errors import Suspect

log = logging.getLogger("lm_eval.duel_mdm")

FIRST = 8  # checks at the start of a run
EARLY = 4  # more each time that the run has become e times as long, until they are a constant share of it
SHARE = 0.005  # of the lanes of a long run
# How far statistics may differ, in units of the largest one of the lane, or of 1.
NOISE = 1e-3  # in float32, as between the batches of `self_tests`
NOISE_COARSE = 0.05  # in half precision
NOISE_ROUTED = 0.5  # of quantized weights, and of experts: noise may choose others


def wanted(count: float, share: float = SHARE) -> float:
    """How many of the first `count` events of a run are checked besides the first `FIRST`."""
    rare = EARLY / share  # from here on a constant share
    return EARLY * math.log(max(1.0, min(count, rare) / FIRST)) + share * max(0.0, count - rare)


class Drawn(NamedTuple):
    """A lane to evaluate again, and what was read of it."""

    opened: Callable[[Rows], View]  # as the view in which it was evaluated
    rows: Rows  # its window alone
    lane: Lanes  # (1, W)
    tokens: torch.Tensor  # (1, W)
    statistics: torch.Tensor  # (S, W)
    window: int  # its index among all that are scored


class RowChecks:
    """The lanes that wait for their second evaluation. The numbers of lanes drawn and compared are in `Counts`."""

    def __init__(self) -> None:
        self.waiting: list[Drawn] = []

    def due(self, counts: Counts, lanes: int, price: float) -> int:
        """How many of the next `lanes` are drawn; `price`: how many lanes cost as much as one that is evaluated alone.

        At least `FIRST` of a run, and of a long one `SHARE` of its cost.
        """
        count, drawn = counts.lane_steps + lanes, counts.rows_checked + len(self.waiting)
        return min(lanes, max(0, int(min(count, FIRST) + wanted(count / price)) - drawn))

    def compare(self, counts: Counts) -> None:
        """Evaluate the waiting lanes alone, and count those that differ.

        Raises:
            Suspect: One differs in float32; the message names it.
        """
        waiting, self.waiting = self.waiting, []
        for drawn in waiting:
            view = drawn.opened(drawn.rows)
            try:
                with without_autocast(view.denoiser):
                    predictions = view(drawn.lane)
                    again = statistics(predictions, predictions.log_prob(drawn.tokens))[:, 0]  # (S, W)
            except torch.OutOfMemoryError:  # so nothing is known of this one
                continue
            counts.rows_checked += 1
            apart = difference(drawn.statistics, again)
            if not apart <= NOISE and not apart <= (noise := tolerance(view.denoiser)):
                counts.rows_differing += 1
                _report(drawn, apart, noise, is_coarse(view.denoiser))


def draw(
    number: int,
    opened: Callable[[Rows], View],
    rows: Rows,
    lanes: Lanes,
    predictions: Predictions,
    tokens: torch.Tensor,
    log_prob: torch.Tensor,
    window_indices: Sequence[int],
) -> list[Drawn]:
    """`number` of the lanes, with their predictions and the log-probs (R, W) of `tokens` (R, W)."""
    chosen = hashed(lanes.row, lanes.start - lanes.origin, lanes.step).argsort()[:number]  # (n,)
    read = statistics(predictions, log_prob)  # (S, R, W)
    drawn = []
    for lane in chosen.tolist():
        one = lanes.select(slice(lane, lane + 1))
        row = int(one.row)
        of_lane = tokens[lane : lane + 1].clone(), read[:, lane].clone()
        drawn.append(Drawn(opened, rows.alone(row), one.in_row(0), *of_lane, window_indices[row]))
    return drawn


def statistics(predictions: Predictions, log_prob: torch.Tensor) -> torch.Tensor:
    """What rules and scores read of predictions, (S, R, W) float64: log-odds, margin, log of the sum, log-probs."""
    read = (predictions.confidence, predictions.log_margin, predictions.log_sum, log_prob)
    return torch.stack([plane.double() for plane in read])


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference of statistics (S, W), in units of the largest one, or of 1."""
    same = (one == other) | (one.isnan() & other.isnan())
    apart = (one - other).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    largest = one.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs().max().clamp(min=1.0)
    return float(torch.where(same, 0.0, apart).max() / largest)


def tolerance(network: Network) -> float:
    """The difference that batches of other rows may make, see `difference`."""
    if network.quantized or is_routed(network):
        return NOISE_ROUTED
    return NOISE_COARSE if network.coarse else NOISE


def is_coarse(network: Network) -> bool:
    """Whether a network is quantized or runs in a dtype below float32."""
    return network.quantized or network.coarse


def is_routed(network: Network) -> bool:
    """Whether a network has experts, of which a position uses some."""
    for value in vars(network).values():
        names = (name for name, _ in value.named_modules()) if isinstance(value, torch.nn.Module) else ()
        if any("expert" in name for name in names) or (isinstance(value, Network) and is_routed(value)):
            return True
    return False


def _report(drawn: Drawn, apart: float, noise: float, coarse: bool) -> None:
    """Raise Suspect for a lane that differs; with coarse numbers log it."""
    lane = drawn.lane
    place = f"block at target position {int(lane.start - lane.origin)}, step {int(lane.step)}"
    if coarse:
        log.warning(
            "Window %d, %s: evaluated again alone, its predictions differ by %.2g of their size. Such rows are counted "
            "(rows_differing in the results)",
            *(drawn.window, place, apart),
        )
        return
    raise Suspect(
        f"Window {drawn.window}, {place}: evaluated again alone, its predictions differ by {apart:.2g} of their size; "
        f"float noise is below {noise:g}. Other rows of a call, or earlier calls, change them, as a capacity of "
        "experts, statistics of the batch or a counter do. So every value of this spec is suspect, not this one alone. "
        "Make the network a function of each row.",
        window=drawn.window,
    )
