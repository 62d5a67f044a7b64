"""Samplers with many orders: the authors' loops retyped, and a test of frequencies."""

import collections
import math

import numpy
import torch
from scipy.special import chdtrc


def logits_of(toy, rows):
    """Logits (R, L, V) of rows (R, L), [MASK] excluded."""
    logits = toy.head(toy.features(rows, None).flatten(0, 1))  # (R L, V)
    return logits.masked_fill(toy.excluded, -math.inf).unflatten(0, rows.shape)


def quota(block, steps, step):
    """How many positions of a block a step reveals: get_num_transfer_tokens of LLaDA."""
    return block // steps + (step < block % steps)


def llada(toy, count, length, block, steps, temperature, generator, remasking="low_confidence"):
    """LLaDA's `generate` (ML-GSAI/LLaDA@b7e6c35, generate.py L44-121), retyped: Gumbel noise in float64, untempered
    confidence, its quota at each of `steps` steps of a block."""
    x = torch.full((count, length), toy.mask_id)
    for begin in range(0, length, block):
        for step in range(steps):
            mask = x == toy.mask_id
            logits = logits_of(toy, x)
            noise = (-torch.rand(logits.shape, dtype=torch.float64, generator=generator).log()) ** temperature
            x0 = (logits.double().exp() / noise).argmax(-1)
            confidence = logits.softmax(-1).gather(-1, x0[..., None])[..., 0]
            confidence[:, begin + block :] = -math.inf
            confidence = confidence.where(mask, -math.inf)
            if remasking == "random":
                confidence = torch.rand(confidence.shape, generator=generator).where(confidence > -math.inf, -math.inf)
            for row in range(count):
                at = confidence[row].topk(quota(block, steps, step)).indices
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


def dream(toy, count, length, steps, alg, temperature, alg_temp, generator):
    """Dream's `diffusion_generate` (NVlabs/Fast-dLLM@24cc59e, dream/model/generation_utils.py L369-508), retyped."""
    x = torch.full((count, length), toy.mask_id)
    timesteps = torch.linspace(1, 1e-3, steps + 1)
    for i in range(steps):
        mask = x == toy.mask_id
        p = (logits_of(toy, x) / temperature).softmax(-1)  # (R, L, V)
        t = timesteps[i]
        s = timesteps[i + 1]
        x0 = torch.multinomial(p.flatten(0, 1), 1, generator=generator).view(count, length)
        if alg == "origin":
            p_transfer = 1 - s / t if i < steps - 1 else 1
            transfer = torch.rand(x.shape, generator=generator) < p_transfer
            x = torch.where(mask & transfer, x0, x)
            continue
        if alg == "maskgit_plus":
            confidence = p.gather(-1, x0[..., None])[..., 0]
        elif alg == "topk_margin":
            ordered = p.sort(-1, descending=True).values
            confidence = ordered[..., 0] - ordered[..., 1]
        else:
            confidence = (p * (p + 1e-10).log()).sum(-1)
        num_mask_token = mask.sum() / mask.shape[0]
        number = int(num_mask_token * (1 - s / t)) if i < steps - 1 else int(num_mask_token)
        full = confidence.where(mask, -math.inf)
        if number == 0:
            continue
        if alg_temp is None:
            at = full.topk(number).indices
        else:
            at = torch.multinomial((full / alg_temp).softmax(-1), number, generator=generator)
        x.scatter_(1, at, x0.gather(1, at))
    return x.tolist()


def p_value(texts, probabilities):
    """Pearson's p-value of texts against the probabilities of all texts; those with small counts are pooled."""
    tally = collections.Counter(map(tuple, texts))
    assert set(tally) <= set(probabilities)
    seen = numpy.array([float(tally[text]) for text in probabilities])
    expected = len(texts) * numpy.array([*probabilities.values()])
    small = expected < 5
    if small.any():
        seen, expected = (numpy.append(part[~small], part[small].sum()) for part in (seen, expected))
    expected *= seen.sum() / expected.sum()
    statistic = ((seen - expected) ** 2 / expected).sum()
    return chdtrc(len(seen) - 1, statistic)  # the upper tail of chi-squared
