"""Rules that are named as module:Class."""

import dataclasses
import sys

import torch
from pages import ROOT

from lm_eval_duel import rules

LEARNED = sys.modules[rules.find(f"{ROOT}/examples/rules/learned.py:Learned").__module__]


@dataclasses.dataclass(frozen=True)
class Stalls(rules.Rule):
    """Negative control: a threshold without fallback."""

    mu: float = 0.99

    def __call__(self, predictions, lanes):
        return lanes.masked & (predictions.confidence.sigmoid() >= self.mu)


@dataclasses.dataclass(frozen=True)
class Misspelt(rules.Rule):
    """Negative control: reads a statistic that does not exist."""

    def __call__(self, predictions, lanes):
        return predictions.confidnce > 0


@dataclasses.dataclass(frozen=True)
class Turns(rules.Rule):
    """The first masked position and the last one in turns; its memory says whose turn it is."""

    def __call__(self, predictions, lanes):
        last = lanes.memory[0] if lanes.memory else torch.zeros_like(lanes.masked)  # (R, W)
        count = lanes.masked.cumsum(1)
        ends = torch.where(last, count == count[:, -1:], count == 1) & lanes.masked
        return rules.Decision(ends, memory=(~last,))


@dataclasses.dataclass(frozen=True)
class Looks(LEARNED.ModuleRule):
    """A module that looks at several positions: a position's score depends on the mean features of its lane."""

    state_only = True
    k: int = 1

    @classmethod
    def build(cls, tensors, metadata):
        module = torch.nn.Bilinear(*tensors["weight"].shape[1:], 1, bias=False)
        module.load_state_dict(tensors)
        return module

    def __call__(self, predictions, lanes):
        features = predictions.features  # (C, D)
        lane = lanes.masked.nonzero()[:, 0]  # (C,)
        count = lanes.masked.sum(1)[:, None]  # (R, 1)
        mean = features.new_zeros(len(lanes), features.shape[1]).index_add(0, lane, features) / count
        scores = self.module(features)(features, mean[lane])[:, 0]  # (C,)
        key = scores.new_full(lanes.masked.shape, torch.inf).masked_scatter(lanes.masked, -scores)
        return rules.Decision(lanes.masked & (rules.rank(key) < self.k))
