"""Rules that are named as module:Class."""

import dataclasses

from lm_eval_duel import rules


@dataclasses.dataclass(frozen=True)
class Stalls(rules.Rule):
    """Negative control: a threshold without fallback."""

    mu: float = 0.99

    def __call__(self, predictions, lanes):
        return lanes.hidden & (predictions.confidence.sigmoid() >= self.mu)


@dataclasses.dataclass(frozen=True)
class Misspelt(rules.Rule):
    """Negative control: reads a statistic that does not exist."""

    def __call__(self, predictions, lanes):
        return predictions.confidnce > 0
