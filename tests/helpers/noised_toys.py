"""Toy networks that see noisy tokens, in float64, and exact bounds by enumeration."""

import itertools
import math

import torch
from toys import Toy

from lm_eval_duel import reference
from lm_eval_duel.core.denoiser import NoiseView, Positions, View
from lm_eval_duel.core.noise import Hybrid, NoiseTraining, Uniform


class ConditionedView(NoiseView):
    """Adds a function of the logits of the pass before to the features; without any, they count as zero signal."""

    def features(self, lanes, noisy, t, own_output=None):
        plain = super().features(lanes, noisy, t)
        return plain if own_output is None else plain + own_output.softmax(2).flip(2) * 6


class CommitOnceView(View):
    """Adds the same function of the logits of the step before, which the lane carries; at the first step zero."""

    def positions(self, lanes):
        all_mask = super().positions(lanes).all_mask  # its features are those of masked positions
        ids, shown, real = self._input(lanes)
        of_rows = self.denoiser.features(ids, real, **self._extra_inputs(lanes, shown, real))  # (R, L, V)
        columns = lanes.columns.clamp(max=ids.shape[1] - 1)
        logits = of_rows.gather(1, columns[..., None].expand(-1, -1, of_rows.shape[2]))  # (R, W, V)
        if lanes.carried:
            signal = lanes.carried[0].softmax(2).flip(2) * 6
            logits = logits + torch.where(lanes.step[:, None, None] > 0, signal, 0.0)
        lane, position = lanes.masked_at
        rows = torch.arange(len(lane))
        return Positions(logits[lane, position], rows, torch.zeros_like(all_mask), (logits,))


class NoisyToy(Toy):
    """A random smooth function of the whole row and, if `timed`, of the time; a few tokens, and [MASK] if hybrid."""

    relative_positions = False

    def __init__(self, tokens=3, length=3, share=None, prediction="plugin", timed=True, scale=2.0):
        super().__init__(tokens=tokens, length=length, scale=scale)
        self.masks = share is not None
        self.timed = timed
        noise = Uniform(tokens) if share is None else Hybrid(tokens, share)
        self.noise_training = NoiseTraining(noise, prediction, 4, timed=timed)
        if not self.masks:
            self.vocab_size = tokens
            self.mask_id = None
            self.embed = self.embed[:, :tokens]
            self.out = self.out[:, :, :tokens]

    @property
    def excluded(self):
        return torch.arange(self.vocab_size) >= self.tokens

    def noise_inputs(self, t):
        return {"t": t} if self.timed else {}

    def features(self, ids, real, t=None):
        plain = super().features(ids, real)  # (R, L, V)
        return plain if t is None else plain * (1 + t.double()[:, None, None])

    def logits(self, z, t, before=None):
        """Logits (L, V) of a row z (L,), for the reference."""
        inputs = self.noise_inputs(torch.tensor([t], dtype=torch.float64))
        logits = self.features(z[None], None, **inputs)[0]
        if before is not None:
            logits = logits + before.softmax(1).flip(1) * 6
        return logits.masked_fill(self.excluded, -math.inf)

    def level(self, t):
        """a_t and b_t (V,) of the reference."""
        t = torch.as_tensor(t, dtype=torch.float64)
        a, u, m = self.noise_training.noise.level(t, 1 - t)
        b = u.repeat(self.vocab_size)
        if self.masks:
            b[self.mask_id] = m
        return a, b


class Conditioned(NoisyToy):
    """A toy that reads its own output."""

    def __init__(self, **options):
        super().__init__(**options)
        self.noise_training = self.noise_training._replace(self_conditioning="twice")

    def open(self, rows, generating=False):
        return CommitOnceView(self, rows)

    def open_noised(self, rows):
        return ConditionedView(self, rows)


def kernel(a, b):
    """q(x_t | x_0), a list of a list for each token x_0."""
    return (a * torch.eye(len(b), dtype=torch.float64) + b).tolist()


def chance(q, x, z):
    """The probability of the noisy row z given the row x, whose positions are independent."""
    return math.prod(q[before][after] for before, after in zip(x, z, strict=True))


def states(toy, length):
    """All rows of noisy tokens."""
    return [torch.tensor(row) for row in itertools.product(range(toy.vocab_size), repeat=length)]


def row_term(x, z, P, t, s, denoiser):
    """The term of a step from t to s, summed over all positions."""
    terms = []
    for clean, noisy, p in zip(x, z.tolist(), P, strict=True):
        r = reference.plug_in(p, noisy, t) if denoiser else p
        terms.append(reference.noised_term(clean, noisy, r, t, s))
    return math.fsum(terms)


def bound(toy, x, steps, conditioning="none"):
    """The exact bound of -log p(x), summed over all noisy rows of each step, or over all paths (chain)."""
    denoiser = toy.noise_training.prediction == "denoiser"
    levels = [toy.level(i / steps) for i in range(steps + 1)]

    def term(z, i, logits):
        return row_term(x, z, reference.log_softmax(logits).exp(), levels[i], levels[i - 1], denoiser)

    def twice(z, t):
        return toy.logits(z, t, toy.logits(z, t) if conditioning == "twice" else None)

    rows = states(toy, len(x))
    if conditioning != "chain":
        terms = []
        for i in range(1, steps + 1):
            q = kernel(*levels[i])
            for z in rows:
                weight = chance(q, x, z.tolist())
                if weight:
                    terms.append(weight * term(z, i, twice(z, i / steps)))
        return math.fsum(terms)

    one_step = []  # q(x_t | x_s) of each step
    for (a_s, b_s), (a_t, b_t) in itertools.pairwise(levels):
        one_step.append(kernel(a_t / a_s, b_t - a_t / a_s * b_s))
    total = 0.0
    known = {}  # logits by the part of the path that the network has seen
    for path in itertools.product(rows, repeat=steps):  # x_1 .. x_T
        tokens = [tuple(z.tolist()) for z in path]
        weight = 1.0
        for q, before, after in zip(one_step, [x, *tokens], tokens, strict=False):
            weight *= chance(q, before, after)
        if not weight:
            continue
        before = None
        for i in range(steps, 0, -1):
            seen = tuple(tokens[i - 1 :])
            if seen not in known:
                known[seen] = toy.logits(path[i - 1], i / steps, before)
            before = known[seen]
            total += weight * term(path[i - 1], i, before)
    return total


def of_position(r, token, s, t, denoiser):
    """k(x_s | x_t = token) at one position, (V,), from the network's distribution r (V,), by Bayes' rule."""
    a_s, b_s = s
    a_t, b_t = t
    one_hot = torch.eye(len(r), dtype=torch.float64)
    step = a_t / a_s * one_hot[token] + b_t[token] - a_t / a_s * b_s[token]

    def posterior(x_0):
        return step * (a_s * x_0 + b_s) / (a_t * x_0[token] + b_t[token])

    if not denoiser:
        return posterior(r)
    return sum(r[v] * posterior(one_hot[v]) for v in r.nonzero()[:, 0])


def sampled(toy, length, steps, conditioning="none"):
    """p of every text, by the ancestral sampler: all positions of x_s are drawn from k, given the output for x_t.

    Equal rows of a step become one, but under chain, where every path is followed.
    """
    denoiser = toy.noise_training.prediction == "denoiser"
    rows = states(toy, length)
    _, prior = toy.level(1.0)
    carried = []  # (row, its probability, logits of the step before under chain)
    for z in rows:
        weight = float(prior[z].prod())
        if weight:
            carried.append((tuple(z.tolist()), weight, None))

    for i in range(steps, 0, -1):
        s = toy.level((i - 1) / steps)
        t = toy.level(i / steps)
        arriving = []
        for z, weight, before in carried:
            row = torch.tensor(z)
            logits = toy.logits(row, i / steps, before)
            if conditioning == "twice":
                logits = toy.logits(row, i / steps, logits)
            P = reference.log_softmax(logits).exp()
            kernel = [of_position(P[ell], token, s, t, denoiser) for ell, token in enumerate(z)]
            for y in rows:
                p = math.prod(float(k[token]) for k, token in zip(kernel, y, strict=True))
                if p:
                    arriving.append((tuple(y.tolist()), weight * p, logits if conditioning == "chain" else None))
        if conditioning != "chain":
            arriving = [(z, weight, None) for z, weight in sums_of(arriving).items()]
        carried = arriving
    return sums_of(carried)


def sums_of(carried):
    """The probability of each row, whatever the step before."""
    sums = {}
    for z, weight, _ in carried:
        sums[z] = sums.get(z, 0.0) + weight
    return sums
