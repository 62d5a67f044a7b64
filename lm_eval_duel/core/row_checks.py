"""Rows evaluated again alone: neither the other rows of a call nor earlier calls may change a row's predictions.

Throughout a run some lanes are drawn by a hash of (window, block, step). Each is evaluated again, alone, when the next
ones are drawn: this finds what changes with the other rows of a call, and what changes with time.

Shapes: R lanes, W block width, S statistics.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
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
# How far statistics may differ, in units of the largest one of their kind in the lane, or of 1.
NOISE = 1e-3  # in float32, as between the batches of `self_tests`
NOISE_COARSE = 0.05  # in half precision
NOISE_ROUTED = 0.5  # of quantized weights, and of experts: noise may choose others
LOG_SUM = 2  # its number among the statistics
OFFSET = 0.01  # of what logits have in common, which cancels but for its float noise; in half precision all of it


def checks_among(count: float, share: float = SHARE) -> float:
    """The number of checks due among the first `count` events of a run, besides the first `FIRST`."""
    rare = EARLY / share  # from here on a constant share
    return EARLY * math.log(max(1.0, min(count, rare) / FIRST)) + share * max(0.0, count - rare)


class LaneCheck(NamedTuple):
    """A lane to evaluate again, and its statistics the first time."""

    again: Callable[[], torch.Tensor]  # evaluates it alone, (S, W)
    statistics: torch.Tensor  # (S, W)
    network: Network
    window: int  # its index among all that are scored
    place: str  # in its window
    logits: float = 0.0  # their size, by the log of the sum


class RowChecks:
    """The lanes that wait for their second evaluation. `Counts` has the number of lanes compared."""

    def __init__(self) -> None:
        self.waiting: list[LaneCheck] = []

    def number_due(self, counts: Counts, lanes: int, lanes_per_row: float) -> int:
        """The number of the next `lanes` to check: at least `FIRST` of a run, and of a long one `SHARE` of its cost.

        `lanes_per_row`: the number of lanes that cost as much as one evaluated alone.
        """
        count, drawn = counts.lane_steps + lanes, counts.rows_checked + len(self.waiting)
        return min(lanes, max(0, int(min(count, FIRST) + checks_among(count / lanes_per_row)) - drawn))

    def compare(self, counts: Counts) -> None:
        """Evaluate the waiting lanes alone, and count those that differ.

        Raises:
            InconsistentOutput: If one differs in float32; the message names it.
        """
        waiting, self.waiting = self.waiting, []
        for drawn in waiting:
            try:
                with without_autocast(drawn.network):
                    least = drawn.logits * (1.0 if is_coarse(drawn.network) else OFFSET)
                    deviation = difference(drawn.statistics, drawn.again(), least)
            except torch.OutOfMemoryError:  # so nothing is known of this one
                continue
            counts.rows_checked += 1
            if not deviation <= NOISE and not deviation <= (noise := tolerance(drawn.network)):
                counts.rows_differing += 1
                _report(drawn, deviation, noise)


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
    drawn = []
    for lane in draw_lanes(lanes, number, window_indices):
        row, here = int(lanes.row[lane]), slice(lane, lane + 1)
        alone, of_lane = lanes.select(here).in_row(0), tokens[here].clone()  # (1, W)
        again = partial(_alone, opened, view.rows.alone(row), alone, of_lane)
        values = statistics(predictions.of_lane(lane, tokens.shape[1]), view.denoiser, of_lane)  # (S, W)
        size = float(values[LOG_SUM].nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs().max())
        place = f"block at target position {int(lanes.start[lane] - lanes.origin[lane])}, step {int(lanes.step[lane])}"
        drawn.append(LaneCheck(again, values, view.denoiser, window_indices[row], place, size))
    return drawn


def _alone(opened: Callable[[Rows], View], rows: Rows, lane: Lanes, tokens: torch.Tensor) -> torch.Tensor:
    """The statistics (S, W) of one lane of one window."""
    view = opened(rows)
    return statistics(view(lane), view.denoiser, tokens)


def statistics(predictions: Predictions, network: Network, tokens: torch.Tensor) -> torch.Tensor:
    """The statistics of one lane that rules and scores read, (S, W) float64: log-odds, margin, log of the sum, and the
    log-probs of `tokens` (1, W).

    Where distributions are truncated, by top-p say, float noise may move a token across the border and every statistic
    with it. So the statistics of the smooth head are read.
    """
    if type(network).smooth_head is not Network.smooth_head:
        predictions = predictions.under(network.smooth_head)
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


def _report(drawn: LaneCheck, deviation: float, noise: float) -> None:
    """Raise InconsistentOutput for a lane that differs; with coarse numbers log it."""
    if is_coarse(drawn.network):
        log.warning(
            "Window %d, %s: evaluated again alone, its predictions differ by %.2g of their size. Such rows are counted "
            "(rows_differing in the results)",
            *(drawn.window, drawn.place, deviation),
        )
        return
    raise InconsistentOutput(
        f"Window {drawn.window}, {drawn.place}: evaluated again alone, its predictions differ by {deviation:.2g} of "
        f"their size; float noise is below {noise:g}. Other rows of a call, or earlier calls, change them, as a "
        "capacity of experts, statistics of the batch or a counter do. So every value of this spec is suspect, not "
        "this one alone. Make the network a function of each row.",
        window=drawn.window,
    )
