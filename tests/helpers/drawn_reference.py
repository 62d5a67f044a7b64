"""Samplers with many orders, plainly: all that a step may draw enumerated, and the authors' loops retyped."""

import collections
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


def amount(m, left, step, n=1, steps=None, schedule="even"):
    """How many of the `left` hidden positions of a block of m are revealed at a step, as the authors' loops count."""
    if steps is None:
        return n
    if schedule == "dream":
        t = torch.linspace(1, 1e-3, steps + 1)
        return int(torch.tensor(float(left)) * (1 - t[step + 1] / t[step])) if step < steps - 1 else left
    counts = [m // steps] * steps  # get_num_transfer_tokens of LLaDA
    for i in range(m % steps):
        counts[i] += 1
    return counts[step]


def enumerate_texts(toy, context, length, suffix, blocks, temperature, outcomes):
    """The probability of every text. `blocks`: (first column, width).

    `outcomes(hidden, m, step, plain, warm)`: (probability, tokens by position) of everything that one step may reveal,
    for the distributions of a row without and with temperature.
    """
    start, step = len(context), 0
    rows = {(*context, *[toy.mask_id] * length, *suffix): 1.0}  # after so many steps of this block, with probabilities
    for first, width in blocks:
        finished, step = {}, 0
        m = first + width - max(first, start)
        while rows:
            following = {}
            for row, mass in rows.items():
                hidden = [p for p in range(first, first + width) if row[p] == toy.mask_id]
                logits = logits_of(toy, torch.tensor([row]))[0].double()
                plain, warm = logits.softmax(-1).tolist(), (logits / temperature).softmax(-1).tolist()
                for share, revealed in outcomes(hidden, m, step, plain, warm):
                    after = tuple(revealed.get(p, token) for p, token in enumerate(row))
                    into = finished if len(revealed) == len(hidden) else following
                    if share:
                        into[after] = into.get(after, 0.0) + mass * share
            rows, step = following, step + 1
        rows = finished
    return {row[start : start + length]: mass for row, mass in rows.items()}


def probabilities(toy, *place, temperature=1.0, tau=None, tempered=False, strict=True, digits=DIGITS, **counts):
    """The probability of every text if the most probable draws are kept, by enumerating all draws of every step."""

    def outcomes(hidden, m, step, plain, warm):
        n = amount(m, len(hidden), step, **counts)
        for draw in itertools.product(range(toy.tokens), repeat=len(hidden)):
            judged = warm if tempered else plain
            confidence = [round(judged[p][v], digits) for p, v in zip(hidden, draw, strict=True)]
            share = math.prod(warm[p][v] for p, v in zip(hidden, draw, strict=True))
            yield share, {hidden[j]: draw[j] for j in kept(confidence, n, tau, strict)}

    return enumerate_texts(toy, *place, temperature, outcomes)


def order_probabilities(toy, *place, alg, steps, alg_temp=None, temperature=1.0):
    """The probability of every text if positions are drawn, by enumerating all sequences of positions of every step."""

    def weight(p):
        if alg == "entropy":
            return math.exp(sum(x * math.log(x) for x in p if x) / alg_temp)
        if alg == "topk_margin":
            first, second = sorted(p)[-1:-3:-1]
            return math.exp((first - second) / alg_temp)
        return 1.0

    def choices(hidden, m, step, weights):
        """(probability, positions), the same positions once for each order in which they can be drawn."""
        if alg == "origin":
            t = torch.linspace(1, 1e-3, steps + 1)
            r = float(1 - t[step + 1] / t[step]) if step < steps - 1 else 1.0
            for flags in itertools.product((True, False), repeat=len(hidden)):
                yield math.prod(r if flag else 1 - r for flag in flags), list(itertools.compress(hidden, flags))
            return
        n = amount(m, len(hidden), step, steps=steps, schedule="even" if alg == "random" else "dream")
        for sequence in itertools.permutations(hidden, n):
            left, share = sum(weights.values()), 1.0
            for p in sequence:
                share *= weights[p] / left
                left -= weights[p]
            yield share, list(sequence)

    def outcomes(hidden, m, step, plain, warm):
        for chance, positions in choices(hidden, m, step, {p: weight(warm[p]) for p in hidden}):
            for draw in itertools.product(range(toy.tokens), repeat=len(positions)):
                share = chance * math.prod(warm[p][v] for p, v in zip(positions, draw, strict=True))
                yield share, dict(zip(positions, draw, strict=True))

    return enumerate_texts(toy, *place, temperature, outcomes)


# ---------------------------------------------------------------- the authors' loops


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
                at = confidence[row].topk(amount(block, None, step, steps=steps)).indices
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
        t, s = timesteps[i], timesteps[i + 1]
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


def chi_square(seen, expected):
    """The p-value of counts against expected counts, small ones pooled."""
    small = expected < 5
    if small.any():
        seen, expected = (torch.cat([part[~small], part[small].sum()[None]]) for part in (seen, expected))
    statistic = float(((seen - expected) ** 2 / expected.clamp(min=1e-9)).sum())
    return 1 - float(torch.special.gammainc(torch.tensor((len(expected) - 1) / 2), torch.tensor(statistic / 2)))


def p_value(texts, expected):
    """The p-value of texts against the probabilities `expected` of all texts."""
    tally = collections.Counter(map(tuple, texts))
    assert set(tally) <= set(expected)
    seen = torch.tensor([float(tally[text]) for text in expected])
    return chi_square(seen, len(texts) * torch.tensor(list(expected.values())))
