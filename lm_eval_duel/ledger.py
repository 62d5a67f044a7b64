"""Results: what one window got, what a run cost, and the ledger they are kept in while lanes are revealed.

Shapes: N windows, L row length, R lanes, W block width, P picked cells.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from lm_eval_duel.denoisers.predictions import Predictions
from lm_eval_duel.lanes import Lanes, Rows
from lm_eval_duel.rules import Decision

CLOSE = 1e-4  # a lead below this many logits is a close pick: float noise could change the order


@dataclasses.dataclass(frozen=True)
class Scored:
    """One window's result. `steps` and `nats` are per target token; steps count from 0 in every block."""

    log_prob: float  # nats
    is_greedy: bool  # every token was the argmax when it was revealed
    steps: tuple[int, ...]
    nats: tuple[float, ...]
    nfe: int  # rule steps summed over blocks
    close_picks: int | None  # steps whose order float noise could change; None: the rule does not say
    blank_starts: int  # steps at which the row showed nothing, so that all hidden cells tied exactly


@dataclasses.dataclass(frozen=True)
class Drawn(Scored):
    """A sample (or the argmax decoding) and its own log-probability."""

    tokens: tuple[int, ...] = ()


@dataclasses.dataclass
class Counts:
    """What has been computed so far, over all calls."""

    windows: int = 0
    tokens: int = 0  # revealed
    nfe: int = 0
    forwards: int = 0  # network calls
    rows: int = 0  # rows evaluated
    close_picks: int | None = 0  # None: the rule does not say
    blank_starts: int = 0

    def add(self, result: dict[str, Any]) -> None:
        """One finished window's result."""
        self.windows += 1
        self.tokens += len(result["nats"])
        self.nfe += result["nfe"]
        self.blank_starts += result["blank_starts"]
        if self.close_picks is not None:
            known = result["close_picks"] is not None
            self.close_picks = self.close_picks + result["close_picks"] if known else None


class Ledger:
    """The running results of one group of windows, on the CPU in float64."""

    def __init__(self, rows: Rows):
        count, length = rows.ids.shape
        self.origin, self.target = rows.origin.tolist(), rows.target.tolist()
        self.nats = torch.full((count, length), math.nan, dtype=torch.float64)  # (N, L)
        self.steps = torch.full((count, length), -1)  # (N, L)
        self.left = rows.target.cpu().clone()  # (N,) target positions still hidden
        self.greedy = torch.ones(count, dtype=torch.bool)  # (N,)
        self.nfe = torch.zeros(count, dtype=torch.int64)  # (N,)
        self.close = torch.zeros(count, dtype=torch.int64)  # (N,)
        self.blank = torch.zeros(count, dtype=torch.int64)  # (N,)
        self.knows_leads = True

    def record(
        self,
        lanes: Lanes,
        decision: Decision,
        predictions: Predictions,
        tokens: torch.Tensor,
        log_prob: torch.Tensor,
    ) -> None:
        """Add one step of `lanes`: nats (R, W) and steps at the picks; NFE, close picks and blank starts per window."""
        pick = decision.pick
        lane = pick.nonzero()[:, 0].cpu()  # (P,)
        row, step = lanes.row.cpu(), lanes.step.cpu()  # (R,)
        columns, nats = lanes.columns[pick].cpu(), log_prob[pick].cpu()  # (P,)
        missed = ((tokens != predictions.argmax) & pick).any(1).cpu()  # (R,)
        revealed, blank = pick.sum(1).cpu(), predictions.blank.long().cpu()  # (R,)
        lead = None if decision.lead is None else decision.lead.cpu()  # (R,)
        # all of it is here: from now on nothing can fail half way
        self.nats[row[lane], columns] = nats
        self.steps[row[lane], columns] = step[lane]
        self.greedy[row[missed]] = False
        self.left.index_add_(0, row, -revealed)
        self.nfe.index_add_(0, row, torch.ones_like(row))
        self.blank.index_add_(0, row, blank)
        if lead is None:
            self.knows_leads = False
        else:
            self.close.index_add_(0, row, (~(lead >= CLOSE)).long())

    def finished(self, lanes: Lanes) -> list[int]:
        """The windows of these finished lanes that have no lane left."""
        return [n for n in sorted(set(lanes.row.tolist())) if self.left[n] == 0]

    def result(self, n: int) -> dict[str, Any]:
        """The fields of `Scored` for window `n`."""
        span = slice(self.origin[n], self.origin[n] + self.target[n])
        nats = self.nats[n, span]
        return {
            "log_prob": float(nats.sum()),
            "is_greedy": bool(self.greedy[n]),
            "steps": tuple(self.steps[n, span].tolist()),
            "nats": tuple(nats.tolist()),
            "nfe": int(self.nfe[n]),
            "close_picks": int(self.close[n]) if self.knows_leads else None,
            "blank_starts": int(self.blank[n]),
        }
