"""The k best positions by one score."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from lm_eval_duel.rules.base import LOG_ODDS_SLOPE, Counted, Decision, best

if TYPE_CHECKING:
    import torch

    from lm_eval_duel.core.lanes import Lanes
    from lm_eval_duel.core.predictions import Predictions

    Score = tuple[torch.Tensor, torch.Tensor | float]  # of each position (R, W), and its steepest slope in logits


@dataclasses.dataclass(frozen=True)
class Scored(Counted, state_only=True):
    """The base class of rules that reveal the k masked positions with the largest `score`."""

    @staticmethod
    def score(predictions: Predictions) -> Score:
        raise NotImplementedError

    def __call__(self, predictions: Predictions, lanes: Lanes) -> Decision:
        score, slope = self.score(predictions)
        return Decision(*best(predictions, lanes, score, self.k, slope))


@dataclasses.dataclass(frozen=True)
class Greedy(Scored, name="greedy", label="Greedy Conf."):
    """The k largest P1 (the top token's probability), compared as log-odds, which do not saturate."""

    @staticmethod
    def score(predictions: Predictions) -> Score:
        return predictions.confidence, LOG_ODDS_SLOPE


@dataclasses.dataclass(frozen=True)
class Margin(Scored, name="margin", label="Prob. Margin"):
    """The k largest P1 - P2, a difference of probabilities, as in the paper."""

    @staticmethod
    def score(predictions: Predictions) -> Score:
        rest = predictions.confidence.double().neg().sigmoid()  # (R, W) 1 - P1
        p1 = 1 - rest  # (R, W)
        p2 = p1 * predictions.log_margin.double().neg().exp()  # (R, W)
        below = rest + p2  # (R, W) in float64 it does not round to 0 where the margin rounds to 1
        return -below, p1 * below + p2 * (1 - p2 + p1) + (1 - below) * (rest - p2).clamp(min=0)


@dataclasses.dataclass(frozen=True)
class LogMargin(Scored, name="log_margin", label="Log-Prob. Margin"):
    """The k largest log P1 - log P2, which the authors' code for 8B models calls margin."""

    @staticmethod
    def score(predictions: Predictions) -> Score:
        return predictions.log_margin, LOG_ODDS_SLOPE


@dataclasses.dataclass(frozen=True)
class Entropy(Scored, name="entropy", label="Entropy"):
    """The k smallest entropies."""

    @staticmethod
    def score(predictions: Predictions) -> Score:
        entropy = predictions.entropy  # (R, W)
        return -entropy, 2 * entropy
