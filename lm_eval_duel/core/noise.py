"""Noise that replaces tokens by random tokens or by [MASK], and the terms of the bound under it.

    q(x_t | x_0) = a_t 1[x_t = x_0] + u_t 1[x_t is a token] + m_t 1[x_t = MASK],    positions independent

The network gives r, a distribution over tokens at each position, and the model's step from t to s < t is

    k(x_s | x_t) = q(x_t | x_s) [a_s r(x_s) + b_s(x_s)] / [a_t r(x_t) + b_t(x_t)],    b = u at a token, m at [MASK]

Both terms below need three numbers of r at a position: r(x_0), r(x_t) and sum_v log(1 + r(v) a / u).

Shapes: R lanes, W span width, P positions, V tokens.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import NamedTuple

import torch

from lm_eval_duel.core.hashing import uniform

RUN = 4096  # columns that are summed in the dtype of the logits
# Keys of the random numbers of masked positions
MASKED_KIND = 7  # whether one shows [MASK]
MASKED_TOKEN = 8  # or which token


class Level(NamedTuple):
    """q(x_t | x_0) at times (R, 1): the mass that stays (`a`), at each token (`u`), at [MASK] (`m`), (R, 1) each."""

    a: torch.Tensor
    u: torch.Tensor
    m: torch.Tensor


class Observed(NamedTuple):
    """The effect of the noise on positions, (R, W) bool each."""

    same: torch.Tensor  # the clean token stands there
    masked: torch.Tensor  # [MASK] stands there

    @classmethod
    def from_tokens(cls, noisy: torch.Tensor, clean: torch.Tensor) -> Observed:
        """The effect seen in token indices (R, W), of which -1 is [MASK]."""
        return cls(noisy == clean, noisy < 0)


class Statistics(NamedTuple):
    """Three numbers of r at positions (R, W), float64: log r(x_0), log r(x_t), and sum_v log(1 + r(v) a / u)."""

    clean: torch.Tensor
    noisy: torch.Tensor
    total: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Noise(abc.ABC):
    """A forward process over `tokens` tokens, and [MASK] if it uses one; times from 0 (clean) to 1."""

    tokens: int
    name = ""
    depth = 30.0  # times with a uniform logarithm are above exp(-depth)

    @abc.abstractmethod
    def level(self, t: torch.Tensor, rest: torch.Tensor) -> Level:
        """The level at times t (R, 1); `rest`: 1 - t, without cancellation."""

    @abc.abstractmethod
    def rates(self, t: torch.Tensor, rest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The rates b' - (a' / a) b at which a token (u) and [MASK] (m) enter, at times t (R, 1), (R, 1) each."""

    def time_from_uniform(self, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Map uniform numbers v (R, 1) to times: (t, 1 - t, 1 / density of t), (R, 1) each.

        Half of the times come from `spread`, and half have a uniform logarithm. With times that are uniform in t alone,
        the variance is not finite: at a small t a position is noisy with probability t and has the weight 1 / t, and a
        network that is sure of a wrong token costs another 1 / t there.
        """
        is_logarithmic = v < 0.5  # (R, 1)
        w = torch.where(is_logarithmic, 2 * v, 2 * v - 1)  # (R, 1) uniform again
        w = w.clamp(min=2.0**-53)  # above 0
        log_t = -self.depth * w  # (R, 1)
        spread_t, spread_rest = self.spread(w)  # (R, 1) each
        t = torch.where(is_logarithmic, log_t.exp(), spread_t)
        rest = torch.where(is_logarithmic, -torch.expm1(log_t), spread_rest)

        # whichever half it came from, a time has the mean of the two densities
        logarithmic_density = torch.where(t > math.exp(-self.depth), 1 / (self.depth * t), 0.0)
        density = (self.spread_density(t, rest) + logarithmic_density) / 2
        return t, rest, 1 / density

    def spread(self, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """t and 1 - t of uniform numbers w (R, 1), denser near 0, where most of the bound is."""
        return w**2, (1 - w) * (1 + w)

    def spread_density(self, t: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
        """The density of the times of `spread`, (R, 1)."""
        return 1 / (2 * t.sqrt())


@dataclasses.dataclass(frozen=True)
class Uniform(Noise):
    """A token is replaced by a uniformly random one with probability t: a = 1 - t (Duo, UDLM, DiffusionGemma)."""

    name = "uniform"

    def level(self, t: torch.Tensor, rest: torch.Tensor) -> Level:
        return Level(rest, t / self.tokens, torch.zeros_like(t))

    def rates(self, t: torch.Tensor, rest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return 1 / (rest * self.tokens), torch.zeros_like(t)


@dataclasses.dataclass(frozen=True)
class Hybrid(Noise):
    """GIDD's noise (von Rütte et al. 2025): masks and uniform tokens.

    `uniform_share`: p, the share of uniform tokens at t = 1/2.

    With c = B sqrt(t (1 - t)) and B = 2 p / (1 - p): a = (1 - t) / (1 + c), m = t / (1 + c), and c / (1 + c) is uniform
    over the tokens. p = 0 is masking.
    """

    uniform_share: float = 0.0

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"masks and {self.uniform_share:g} uniform" if self.uniform_share else "masks"

    @property
    def depth(self) -> float:  # type: ignore[override]
        """Twice that of uniform noise: at a small t a token is replaced with a probability like the root of t."""
        return 60.0 if self.uniform_share else super().depth

    @property
    def scale(self) -> float:
        """B."""
        return 2 * self.uniform_share / (1 - self.uniform_share)

    def level(self, t: torch.Tensor, rest: torch.Tensor) -> Level:
        c = self.scale * (t * rest).sqrt()  # (R, 1)
        stays = rest / (1 + c)
        at_each_token = c / (1 + c) / self.tokens
        at_mask = t / (1 + c)
        return Level(stays, at_each_token, at_mask)

    def rates(self, t: torch.Tensor, rest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        root = (t * rest).sqrt()  # (R, 1)
        c = self.scale * root
        token_rate = self.scale / (2 * root * (1 + c) * self.tokens)
        mask_rate = 1 / (rest * (1 + c))
        return token_rate, mask_rate

    def spread(self, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Denser near 1, too, where the rate of uniform tokens is infinite."""
        if not self.uniform_share:
            return super().spread(w)
        low = w**3
        high = (1 - w) ** 3
        total = low + high
        return low / total, high / total

    def spread_density(self, t: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
        if not self.uniform_share:
            return super().spread_density(t, rest)
        low = t.pow(1 / 3)  # in proportion to w
        high = rest.pow(1 / 3)  # in proportion to 1 - w
        return 1 / (3 * (low * high * (low + high)) ** 2)


class NoiseTraining(NamedTuple):
    """The training of a network with random tokens: its noise, and the meaning of its output and inputs."""

    noise: Noise
    # "denoiser": p(x_0 | x_t); "plugin": r, which is put into the posterior in place of x_0
    prediction: str
    steps: int | None  # the default number of steps; None: infinitely many
    self_conditioning: str = "none"  # the default; "none": the network has no such input
    timed: bool = True  # the time is an input
    note: str = ""  # what the spec says about the time


# ---------------------------------------------------------------- the terms of the bound


def step_kl(before: Level, now: Level, stats: Statistics, observed: Observed) -> torch.Tensor:
    """KL(q(x_s | x_t, x_0) || k(x_s | x_t)) in nats, float64 (R, W); at s = 0 it is -log k(x_0 | x_t).

    `before`: the level at s; `now`: the level at t > s. `stats.total` takes the ratio a / u from s. The posterior of
    the data over that of the model is u / (a r(y) + u) at a token y that is neither x_0 nor x_t, and 1 at [MASK].
    """
    same, masked = observed
    replaced = ~(same | masked)  # (R, W) x_t is a token, and not x_0
    # q(x_t | x_s): x_s stays with this probability, and x_t enters from any other state with that one
    stays = now.a / before.a  # (R, 1)
    token_enters = now.u - stays * before.u  # (R, 1)
    mask_enters = now.m - stays * before.m  # (R, 1)
    enters = torch.where(masked, mask_enters, token_enters)  # (R, W)
    reached = _reached(now, observed)  # (R, W)
    at_clean, clean, noisy = _log_ratios(before, stats)  # (R, W) each

    # the posterior q(x_s | x_t, x_0) at x_0, at x_t, and at each other token
    weight_clean = (enters + torch.where(same, stays, 0.0)) * (before.a + before.u) / reached
    weight_noisy = torch.where(replaced, (enters + stays) * before.u / reached, 0.0)
    weight_other = enters * before.u / reached

    # the log-ratios of all other tokens, summed
    others = stats.total - clean - torch.where(replaced, noisy, 0.0)  # (R, W)
    value = -weight_other * others - weight_clean * at_clean - _log_evidence(now, stats, observed)
    # where x_t is [MASK] or x_0, `noisy` plays no part, whatever it is
    return value - torch.where(weight_noisy > 0, weight_noisy * noisy, 0.0)


def limit_rate(
    now: Level,
    rates: tuple[torch.Tensor, torch.Tensor],
    stats: Statistics,
    observed: Observed,
) -> torch.Tensor:
    """The integrand of the bound with infinitely many steps at time t, in nats, float64 (R, W).

    g / q(x_t | x_0) [KL(q_t(. | x_0) || q_t(. | r)) + y - log y - 1],  y = q(x_t | x_0) / q(x_t | r)

    g is the rate at which x_t enters, of `rates`: that of a token, or that of [MASK].
    """
    at_clean, clean, _ = _log_ratios(now, stats)
    divergence = -(now.a + now.u) * at_clean - now.u * (stats.total - clean)  # (R, W)
    log_y = _log_evidence(now, stats, observed)
    token_rate, mask_rate = rates  # (R, 1) each
    rate = torch.where(observed.masked, mask_rate, token_rate) / _reached(now, observed)
    return rate * (divergence + torch.expm1(log_y) - log_y)


def _reached(now: Level, observed: Observed) -> torch.Tensor:
    """q(x_t | x_0), (R, W)."""
    return torch.where(observed.masked, now.m, now.u + torch.where(observed.same, now.a, 0.0))


def _log_ratios(level: Level, stats: Statistics) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """log (a r + u) / (a + u) at x_0, and log (a r + u) / u at x_0 and at x_t, 0 if u is 0; (R, W) each."""
    a, u, _ = level
    ratio = torch.where(u > 0, a / u, 0.0)  # (R, 1)
    clean = torch.log1p(ratio * stats.clean.exp())  # (R, W)
    noisy = torch.log1p(ratio * stats.noisy.exp())  # (R, W)
    return _log_share(level, stats.clean), clean, noisy


def _log_share(level: Level, log_r: torch.Tensor) -> torch.Tensor:
    """log (a r + u) / (a + u), (R, W), exact for r near 1 and for r near 0."""
    a, u, _ = level
    # for r near 1
    likely = torch.log1p(a / (a + u) * torch.expm1(log_r))  # (R, W)
    # for r near 0
    log_numerator = torch.logaddexp(a.log() + log_r, u.log())  # (R, W)
    unlikely = log_numerator - (a + u).log()  # (R, W)
    return torch.where(log_r > -1, likely, unlikely)


def _log_evidence(now: Level, stats: Statistics, observed: Observed) -> torch.Tensor:
    """log q(x_t | x_0) / (a r(x_t) + b(x_t)), (R, W)."""
    same, masked = observed
    kept = _log_share(now, stats.noisy)  # (R, W)
    changed = torch.log1p(now.a / now.u * stats.noisy.exp())  # (R, W)
    at_token = torch.where(same, kept, changed)  # (R, W)
    return -torch.where(masked, 0.0, at_token)


# ---------------------------------------------------------------- commit-once: what a masked position shows


class CommitOnce(NamedTuple):
    """The way in which a network with canvases predicts under a commit-once sampler."""

    leave_one_out: bool = False  # a position's own noise token is known to be noise
    self_conditioning: bool = False  # it reads its own output of the step before
    # the first, the last, and the number of steps between them; None: 1 at every step
    temperatures: tuple[float, float, int] | None = None

    def temperature(self, step: torch.Tensor) -> torch.Tensor:
        """The temperature at each step (R,), float64 (R,)."""
        if self.temperatures is None:
            return torch.ones_like(step, dtype=torch.float64)
        first, last, steps = self.temperatures
        return last + (first - last) * (steps - step.clamp(max=steps)).double() / steps


class NoiseKeys(NamedTuple):
    """All that the noise at masked positions depends on, (R, 1) each but for the position.

    None of it may depend on the target, or the probabilities of texts would not sum to 1. So the key of a window, which
    hashes the target, is not among them.
    """

    seed: torch.Tensor
    block: torch.Tensor  # first column of the block (the canvas), counted from the target
    step: torch.Tensor
    position: torch.Tensor  # (R, L) column, counted from the target


def masked_tokens(
    noise: Noise,
    tokens: torch.Tensor,
    mask_id: int | None,
    share: torch.Tensor,
    keys: NoiseKeys,
) -> torch.Tensor:
    """The ids (R, L) that positions show while they are masked, under a commit-once sampler.

    n(seed, block, step, position), drawn from the noise of time t = `share` (R,), which is the share of positions that
    are masked: [MASK] with probability m / (m + K u), else one of the K `tokens` (K,).
    """
    seed, *others = keys
    index = (uniform(seed, MASKED_TOKEN, *others) * noise.tokens).long()  # (R, L)
    shown = tokens[index.clamp(max=noise.tokens - 1)]  # (R, L)
    if mask_id is None:
        return shown
    t = share.double()[:, None]  # (R, 1)
    level = noise.level(t, 1 - t)
    mask_share = level.m / (level.m + noise.tokens * level.u)  # (R, 1)
    is_mask = uniform(seed, MASKED_KIND, *others) < mask_share  # (R, L)
    return torch.where(is_mask, mask_id, shown)


# ---------------------------------------------------------------- noisy tokens, and the statistics of a network


def noisy_tokens(
    noise: Noise,
    level: Level,
    clean: torch.Tensor,
    u: torch.Tensor,
    v: torch.Tensor,
) -> torch.Tensor:
    """x_t (R, W) as token indices, -1 for [MASK], from x_0 `clean` (R, W) and uniform numbers u, v (R, W)."""
    # u below a: the token stays; from there to a + m: [MASK]; above: a random token
    random = (v * noise.tokens).long().clamp(max=noise.tokens - 1)  # (R, W)
    noisy = torch.where(u < level.a + level.m, -1, random)  # (R, W)
    return torch.where(u < level.a, clean, noisy)


def between(before: Level, now: Level) -> Level:
    """q(x_t | x_s) as a level."""
    stays = now.a / before.a  # (R, 1)
    return Level(stays, now.u - stays * before.u, now.m - stays * before.m)


def as_plugin(level: Level, masked: torch.Tensor) -> torch.Tensor:
    """The term to add to the logit of x_t, so that a denoiser's distribution becomes r: log u / (a + u), (R, W).

    A denoiser gives p(x_0 | x_t), and r(v) is proportional to p(v) / q(x_t | v). The term is 0 at [MASK], and
    everywhere without uniform noise.
    """
    shift = torch.where(level.u > 0, -torch.log1p(level.a / level.u), 0.0)  # (R, 1)
    return torch.where(masked, 0.0, shift)


def statistics(
    logits: torch.Tensor,
    clean: torch.Tensor,
    noisy: torch.Tensor,
    shift: torch.Tensor,
    ratio: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`Statistics` of some positions (P,) from their logits (P, V), which are overwritten.

    `clean`, `noisy`: the columns of x_0 and x_t; `shift`: what is added to the logit of x_t; `ratio`: a / u; (P,) each.
    """
    logits.scatter_add_(1, noisy[:, None], shift[:, None].to(logits.dtype))
    top = logits.amax(1, keepdim=True)  # (P, 1)
    columns = torch.stack([clean, noisy], 1)  # (P, 2)
    both = logits.gather(1, columns).double() - top.double()  # (P, 2) before `logits` is overwritten

    # in place, since a plane of logits may be large
    mass = logits.sub_(top).exp_()  # (P, V) in proportion to r
    whole = _sum(mass)  # (P,)
    factor = (ratio / whole)[:, None].to(mass.dtype)  # (P, 1)
    total = _sum(mass.mul_(factor).log1p_())  # (P,)
    log_r = both - whole.log()[:, None]  # (P, 2)
    return log_r[:, 0], log_r[:, 1], total


def _sum(plane: torch.Tensor) -> torch.Tensor:
    """The sum of each row of `plane` (P, V), float64 (P,), without a copy of the plane in float64."""
    total = plane.new_zeros(len(plane)).double()  # (P,)
    for part in plane.split(RUN, 1):
        total = total + part.sum(1).double()
    return total
