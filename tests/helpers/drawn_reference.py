"""Samplers that select after sampling, plainly: all draws of a state enumerated, and the authors' loops retyped."""

import itertools
import math

import torch


def distributions(toy, row, positions, temperature):
    """The network's distribution and the tempered one at each of these positions, as lists."""
    logits = toy.head(toy.features(torch.tensor([row]), None))[0].masked_fill(toy.excluded, -math.inf)
    plain, warm = logits.softmax(-1), (logits / temperature).softmax(-1)
    return [plain[p, : toy.tokens].tolist() for p in positions], [warm[p, : toy.tokens].tolist() for p in positions]


def kept(confidence, n, tau, strict):
    """Which draws are kept, by their confidences from left to right; ties go left."""
    above = [j for j, c in enumerate(confidence) if tau is not None and (c > tau if strict else c >= tau)]
    least = min(n, len(confidence))
    return above if len(above) >= least else sorted(range(len(confidence)), key=lambda j: (-confidence[j], j))[:least]


def probabilities(
    toy, length, blocks, context=(), suffix=(), n=1, tau=None, temperature=1.0, tempered=False, strict=True
):
    """The probability of every text, by enumerating every draw at every step.

    `blocks`: (first, last) target position of each block. The toy sees [MASK] at all hidden positions.
    """
    finished = {}
    start = len(context)
    empty = [*context, *[toy.mask_id] * length, *suffix]
    waiting = {(0, tuple(empty)): 1.0}
    while waiting:
        (number, row), mass = waiting.popitem()
        if number == len(blocks):
            text = row[start : start + length]
            finished[text] = finished.get(text, 0.0) + mass
            continue
        first, last = blocks[number]
        hidden = [p for p in range(start + first, start + last) if row[p] == toy.mask_id]
        if not hidden:
            waiting[number + 1, row] = waiting.get((number + 1, row), 0.0) + mass
            continue
        plain, warm = distributions(toy, row, hidden, temperature)
        for draw in itertools.product(range(toy.tokens), repeat=len(hidden)):
            judged = warm if tempered else plain
            confidence = [judged[j][v] for j, v in enumerate(draw)]
            after = list(row)
            for j in kept(confidence, n, tau, strict):
                after[hidden[j]] = draw[j]
            share = math.prod(warm[j][v] for j, v in enumerate(draw))
            waiting[number, tuple(after)] = waiting.get((number, tuple(after)), 0.0) + mass * share
    return finished
