"""Samplers that select after sampling, plainly: every draw of a state enumerated, and the authors' loops retyped."""

import itertools
import math

import torch

DIGITS = 9  # confidences that agree to so many digits are equal


def logits_of(toy, rows):
    """Logits (R, L, V) of rows (R, L), [MASK] excluded."""
    logits = toy.head(toy.features(rows, None).flatten(0, 1))  # (R L, V)
    return logits.masked_fill(toy.excluded, -math.inf).unflatten(0, rows.shape)


def kept(confidence, n, tau, strict):
    """Which draws are kept, by their confidences from left to right; ties go left."""
    above = [j for j, c in enumerate(confidence) if tau is not None and (c > tau if strict else c >= tau)]
    least = min(n, len(confidence))
    return above if len(above) >= least else sorted(range(len(confidence)), key=lambda j: (-confidence[j], j))[:least]


def probabilities(
    toy, context, length, suffix, blocks, n=1, tau=None, temperature=1.0, tempered=False, strict=True, digits=DIGITS
):
    """The probability of every text, by enumerating all draws of every step. `blocks`: (first column, width)."""
    finished, start = {}, len(context)
    waiting = {(0, (*context, *[toy.mask_id] * length, *suffix)): 1.0}
    while waiting:
        (number, row), mass = waiting.popitem()
        if number == len(blocks):
            text = row[start : start + length]
            finished[text] = finished.get(text, 0.0) + mass
            continue
        first, width = blocks[number]
        hidden = [p for p in range(first, first + width) if row[p] == toy.mask_id]
        logits = logits_of(toy, torch.tensor([row]))[0].double()
        plain, warm = logits.softmax(-1).tolist(), (logits / temperature).softmax(-1).tolist()
        for draw in itertools.product(range(toy.tokens), repeat=len(hidden)):
            judged = warm if tempered else plain
            confidence = [round(judged[p][v], digits) for p, v in zip(hidden, draw, strict=True)]
            after = list(row)
            for j in kept(confidence, n, tau, strict):
                after[hidden[j]] = draw[j]
            share = math.prod(warm[p][v] for p, v in zip(hidden, draw, strict=True))
            following = number + (len(kept(confidence, n, tau, strict)) == len(hidden)), tuple(after)
            waiting[following] = waiting.get(following, 0.0) + mass * share
    return finished


# ---------------------------------------------------------------- the authors' loops


def llada(toy, count, length, block, steps, temperature, generator):
    """LLaDA's `generate` (ML-GSAI/LLaDA@b7e6c35, generate.py L44-121), retyped: Gumbel noise in float64, untempered
    confidence, an equal quota at each of `steps` steps of a block."""
    x = torch.full((count, length), toy.mask_id)
    for begin in range(0, length, block):
        for _ in range(steps):
            mask = x == toy.mask_id
            logits = logits_of(toy, x)
            noise = (-torch.rand(logits.shape, dtype=torch.float64, generator=generator).log()) ** temperature
            x0 = (logits.double().exp() / noise).argmax(-1)
            confidence = logits.softmax(-1).gather(-1, x0[..., None])[..., 0]
            confidence[:, begin + block :] = -math.inf
            confidence = confidence.where(mask, -math.inf)
            for row in range(count):
                at = confidence[row].topk(block // steps).indices
                x[row, at] = x0[row, at]
    return x.tolist()


def sdar(toy, count, length, block, n, threshold, temperature, generator):
    """SDAR's `block_diffusion_generate` (JetAstra/SDAR@c2041a8, generate.py L57-202), retyped: tempered confidence, and
    low_confidence_dynamic; without a threshold low_confidence_static."""
    x = torch.full((count, length), toy.mask_id)
    for begin in range(0, length, block):
        while (left := (x[:, begin : begin + block] == toy.mask_id)).any():
            logits = logits_of(toy, x)[:, begin : begin + block]
            p = (logits / temperature).softmax(-1)
            x0 = torch.multinomial(p.flatten(0, 1), 1, generator=generator).view(count, block)
            confidence = p.gather(-1, x0[..., None])[..., 0].where(left, -math.inf)
            for row in range(count):
                if not left[row].any():
                    continue
                transfer = torch.zeros(block, dtype=torch.bool)
                transfer[confidence[row].topk(min(n, int(left[row].sum()))).indices] = True
                if threshold is not None and (high := confidence[row] > threshold).sum() >= n:
                    transfer = high
                x[row, begin : begin + block][transfer] = x0[row][transfer]
    return x.tolist()


def chi_square(seen, expected):
    """The p-value of counts against expected counts, small ones pooled."""
    small = expected < 5
    if small.any():
        seen, expected = (torch.cat([part[~small], part[small].sum()[None]]) for part in (seen, expected))
    statistic = float(((seen - expected) ** 2 / expected.clamp(min=1e-9)).sum())
    return 1 - float(torch.special.gammainc(torch.tensor((len(expected) - 1) / 2), torch.tensor(statistic / 2)))
