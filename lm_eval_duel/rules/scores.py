"""The k best positions by one score."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from lm_eval_duel.rules.base import Counted, Decision, best

if TYPE_CHECKING:
    import torch

    from lm_eval_duel.denoisers.predictions import Predictions
    from lm_eval_duel.engine.lanes import Lanes


@dataclasses.dataclass(frozen=True)
class Greedy(Counted):
    """The k largest P1 (the top token's probability), compared as log-odds, which do not saturate."""

    name: ClassVar[str] = "greedy"
    label: ClassVar[str] = "Greedy Conf."
    state_only: ClassVar[bool] = True

    def __call__(self, predictions: Predictions, lanes: Lanes) -> Decision:
        return Decision(*best(predictions, lanes, predictions.confidence, self.k))


@dataclasses.dataclass(frozen=True)
class Margin(Counted):
    """The k largest P1 - P2, a difference of probabilities, as in the paper."""

    name: ClassVar[str] = "margin"
    label: ClassVar[str] = "Prob. Margin"
    state_only: ClassVar[bool] = True

    def __call__(self, predictions: Predictions, lanes: Lanes) -> Decision:
        rest, slope = doubt(predictions)
        return Decision(*best(predictions, lanes, -rest, self.k, slope))


def doubt(predictions: Predictions) -> tuple[torch.Tensor, torch.Tensor]:
    """1 - (P1 - P2) and how fast it can move, the L1 norm of its derivative by the logits; (R, W) each.

    In float64 it does not round to 0 where the margin rounds to 1.
    """
    rest = predictions.confidence.double().neg().sigmoid()  # (R, W) 1 - P1
    p1 = 1 - rest  # (R, W)
    p2 = p1 * predictions.log_margin.double().neg().exp()  # (R, W)
    below = rest + p2  # (R, W)
    return below, p1 * below + p2 * (1 - p2 + p1) + (1 - below) * (rest - p2).clamp(min=0)


@dataclasses.dataclass(frozen=True)
class LogMargin(Counted):
    """The k largest log P1 - log P2, which the authors' code for 8B models calls margin."""

    name: ClassVar[str] = "log_margin"
    label: ClassVar[str] = "Log-Prob. Margin"
    state_only: ClassVar[bool] = True

    def __call__(self, predictions: Predictions, lanes: Lanes) -> Decision:
        return Decision(*best(predictions, lanes, predictions.log_margin, self.k))


@dataclasses.dataclass(frozen=True)
class Entropy(Counted):
    """The k smallest entropies."""

    name: ClassVar[str] = "entropy"
    label: ClassVar[str] = "Entropy"
    state_only: ClassVar[bool] = True

    def __call__(self, predictions: Predictions, lanes: Lanes) -> Decision:
        entropy = predictions.entropy
        return Decision(*best(predictions, lanes, -entropy, self.k, 2 * entropy))
