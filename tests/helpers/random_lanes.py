"""Random predictions on random lanes, and what a rule decides there."""

import torch

from lm_eval_duel import rules
from lm_eval_duel.core.lanes import Lanes
from lm_eval_duel.core.predictions import Predictions

WIDTH, TOKENS = 7, 5


def random_case(seed, lanes):
    """Logits (R, W, V) at several scales, with equal positions in many lanes, and which positions are masked (R, W)."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.rand(lanes, 1, 1, generator=generator, dtype=torch.float64) * 6
    logits = torch.randn(lanes, WIDTH, TOKENS, generator=generator, dtype=torch.float64) * scale
    source = torch.randint(WIDTH, (lanes, WIDTH), generator=generator)  # a third of the positions copies another
    copies = torch.rand(lanes, WIDTH, generator=generator) < 1 / 3
    source = torch.where(copies, source, torch.arange(WIDTH))
    logits = logits.gather(1, source[:, :, None].expand_as(logits))
    masked = torch.rand(lanes, WIDTH, generator=generator) < 0.7
    masked[:, 0] |= ~masked.any(1)
    return logits, masked


def decided(rule, logits, masked, step=0, memory=()):
    """The decision of a rule on lanes whose masked positions have these logits, at this step."""
    count, width, tokens = logits.shape
    predictions = Predictions(
        masked,
        torch.zeros(count, dtype=torch.bool),
        logits[masked],
        torch.arange(int(masked.sum())),
        lambda features: features.clone(),
        torch.zeros(tokens, dtype=torch.bool),
    )
    zero = torch.zeros(count, dtype=torch.int64)
    lanes = Lanes(zero, zero, zero, zero + width, torch.where(masked, -1, 0), masked, zero + step, memory)
    return (rules.parse(rule) if isinstance(rule, str) else rule)(predictions, lanes)
