"""The pilot of a two-phase estimate: how many blocks a relative standard error of perplexity takes.

All ranks learn which windows each task has, whoever holds them. So a window that several ranks hold counts as it does
in one process, its pilot is scored on one of them, and every rank gives it the same design.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from lm_eval_duel.core.windows import Window
from lm_eval_duel.estimators.base import Ranks
from lm_eval_duel.estimators.block_sample import Design, rate_for, rounded

if TYPE_CHECKING:
    from lm_eval_duel.estimators.two_phase import TwoPhase

log = logging.getLogger("lm_eval.duel_mdm")

PILOT = 50  # sampled blocks of a task, on average


class Alone:
    """The only process of a run."""

    rank = 0

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


class PilotBlock(NamedTuple):
    """A block that was scored in both ways."""

    key: int  # of its window
    u: float  # its uniform number: it is in the pilot of every share above
    f: float  # its log-prob without the cache, nats
    g: float  # and with it


@dataclasses.dataclass
class Census:
    """The windows of all ranks, by their keys."""

    times: list[dict[int, int]]  # of each task: how often it has a window
    blocks: dict[int, int] = dataclasses.field(default_factory=dict)
    tokens: dict[int, int] = dataclasses.field(default_factory=dict)
    holder: dict[int, int] = dataclasses.field(default_factory=dict)  # the first rank that holds it, in any task

    @classmethod
    def from_tasks(cls, estimator: TwoPhase, tasks: Sequence[Sequence[Window]], ranks: Ranks) -> Census:
        """Of the tasks, each a list of windows: those of this rank. Every rank calls this with the same tasks."""
        mine = [
            (task, window.key, times, len(estimator.blocks(window)), len(window.target))
            for task, windows in enumerate(tasks)
            for window, times in Counter(windows).items()
            if window.target
        ]
        census = cls([{} for _ in tasks])
        for rank, rows in enumerate(_gather_rows(ranks, mine)):
            for task, key, times, blocks, tokens in rows:
                census.times[task][key] = census.times[task].get(key, 0) + times
                census.blocks[key], census.tokens[key] = blocks, tokens
                census.holder.setdefault(key, rank)
        return census


def designs(
    estimator: TwoPhase, precision: float, tasks: Sequence[Sequence[Window]], ranks: Ranks, names: Sequence[str]
) -> dict[int, Design]:
    """The design of each window, by its key, with which each task (a list of windows) reaches `precision`.

    A window of several tasks has the largest of their pilots and of their rates: so every block that any rate was
    computed from counts once, and the estimate stays unbiased.
    """
    census = Census.from_tasks(estimator, tasks, ranks)
    blocks = [sum(census.blocks[key] for key in times) for times in census.times]
    tokens = [sum(count * census.tokens[key] for key, count in times.items()) for times in census.times]
    shares = [rounded(min(1.0, PILOT / max(count, 1))) for count in blocks]

    own = {window.key: window for windows in tasks for window in windows if window.target}
    share_of = {
        key: max(share for share, times in zip(shares, census.times, strict=True) if key in times) for key in own
    }
    here = [window for key, window in own.items() if census.holder[key] == ranks.rank]
    scored = estimator.score_pilot(here, [share_of[window.key] for window in here])
    sums = [_sums(scored, times, share) for times, share in zip(census.times, shares, strict=True)]
    seen = ranks.all_gather(torch.tensor(sums, dtype=torch.float64).flatten()).reshape(-1, len(tasks), 2).sum(0)

    rates = []
    for n, (sampled, squares) in enumerate(seen.tolist()):
        rates.append(rate_for(blocks[n] - sampled, squares / sampled, precision * tokens[n]) if sampled else 1.0)
        log.info(
            "two_phase%s: a pilot of %d of %d blocks; precision=%g takes %.3g %% of the others without the cache",
            f" {names[n]}" if names else "",
            sampled,
            blocks[n],
            precision,
            100 * rates[n],
        )
    return {
        key: Design(share_of[key], max(rate for rate, times in zip(rates, census.times, strict=True) if key in times))
        for key in own
    }


def _sums(scored: Sequence[PilotBlock], times: dict[int, int], share: float) -> tuple[int, float]:
    """A task's own pilot: how many of these blocks it has, and the sum of their squared differences.

    A window that comes c times has one sample, so its differences count c times, and their squares c^2 times.
    """
    own = [(times[block.key], block.f - block.g) for block in scored if block.key in times and block.u < share]
    return len(own), math.fsum((count * difference) ** 2 for count, difference in own)


def _gather_rows(ranks: Ranks, rows: Sequence[tuple[int, ...]]) -> list[list[list[int]]]:
    """The rows of five whole numbers of each rank, which may have different numbers of rows."""
    counts = ranks.all_gather(torch.tensor([len(rows)])).tolist()
    mine = torch.zeros(max(1, *counts), 5, dtype=torch.int64)  # (rows, 5)
    if rows:
        mine[: len(rows)] = torch.tensor(rows)
    every = ranks.all_gather(mine.flatten()).reshape(len(counts), -1, 5)  # (ranks, rows, 5)
    return [part[:count].tolist() for part, count in zip(every, counts, strict=True)]
