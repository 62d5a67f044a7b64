"""The pilot of a two-phase estimate: how many blocks a relative standard error of perplexity takes."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from lm_eval_duel.engine.windows import Window
from lm_eval_duel.estimators.block_sample import Design, rate_for, rounded

if TYPE_CHECKING:
    from lm_eval_duel.estimators.two_phase import TwoPhase

log = logging.getLogger("lm_eval.duel_mdm")

PILOT = 50  # sampled blocks of a task, on average

Gather = Callable[[torch.Tensor], torch.Tensor]  # a vector (X,) of each rank -> all of them, concatenated


def designs(
    estimator: TwoPhase, precision: float, tasks: Sequence[Sequence[Window]], gather: Gather, names: Sequence[str]
) -> dict[int, Design]:
    """The design of each window, by its key, with which each task (a list of windows) reaches `precision`.

    A window in two tasks gets the larger rate.
    """
    unique = [[window for window in dict.fromkeys(windows) if window.target] for windows in tasks]
    sizes = [
        (sum(len(estimator.blocks(window)) for window in own), sum(len(window.target) for window in windows))
        for own, windows in zip(unique, tasks, strict=True)
    ]
    totals = _summed(gather, sizes)  # of each task: blocks, tokens
    shares = [rounded(min(1.0, PILOT / max(blocks, 1))) for blocks, _ in totals]
    seen = _summed(gather, [_score(estimator, windows, share) for windows, share in zip(tasks, shares, strict=True)])
    result: dict[int, Design] = {}
    for n, (blocks, tokens) in enumerate(totals):
        sampled, squares = seen[n]
        rate = rate_for(blocks - sampled, squares / sampled, precision * tokens) if sampled else 1.0
        for window in unique[n]:
            result[window.key] = max(
                Design(shares[n], rate), result.get(window.key, Design(0, 0)), key=lambda d: d.rate
            )
        log.info(
            "two_phase%s: a pilot of %d of %d blocks; precision=%g takes %.3g %% of the others without the cache",
            f" {names[n]}" if names else "",
            sampled,
            blocks,
            precision,
            100 * rate,
        )
    return result


def _score(estimator: TwoPhase, windows: Sequence[Window], share: float) -> tuple[int, float]:
    """Score the blocks of a pilot in both ways: how many they are, and the sum of their squared differences.

    A window that comes c times has one sample, so its differences count c times, and their squares c^2 times.
    """
    times = Counter(window for window in windows if window.target)
    scored = estimator.score_pilot(list(times), Design(share, 0.0))
    return len(scored), math.fsum((times[window] * (f - g)) ** 2 for window, f, g in scored)


def _summed(gather: Gather, rows: Sequence[Sequence[float]]) -> list[list[float]]:
    """The rows of numbers, added up over ranks."""
    mine = torch.tensor(rows, dtype=torch.float64)  # (tasks, X)
    return gather(mine.flatten()).reshape(-1, *mine.shape).sum(0).tolist()
