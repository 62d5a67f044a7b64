"""A network whose noise is random tokens, as `reference.log_likelihood_given_noise` calls it: one row at a time.

    rows (Duo, UDLM, GIDD)      the row with its noise, at the noise level of the masked share
    canvases (DiffusionGemma)   the class's own forward: clean tokens before the canvas, its own whole logits before

The noise is made here once more, from the same hash of (seed, block, step, position). It shares no code with the views.
A mean over seeds is recomputed seed by seed.

Shapes: L row length, V tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from lm_eval_duel import reference
from lm_eval_duel.audit.checked import Recomputed, unequal
from lm_eval_duel.audit.networks import NO_ID
from lm_eval_duel.audit.runs_rule import along_any_order
from lm_eval_duel.audit.wrapped_networks import OtherRow
from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.core.float_noise import nats_tolerance
from lm_eval_duel.core.hashing import uniform
from lm_eval_duel.core.scores import Score
from lm_eval_duel.core.windows import Window
from lm_eval_duel.denoisers.dit.denoiser import Timed
from lm_eval_duel.denoisers.hf.diffusion_gemma import Canvases
from lm_eval_duel.denoisers.wrappers import Wrapper
from lm_eval_duel.estimators.duel_seeds import DuelSeeds
from lm_eval_duel.estimators.registry import LOG_MEAN

# Keys of the random numbers
KIND = 7  # whether a masked position shows [MASK]
TOKEN = 8  # which token it shows


class GivenNoise(OtherRow):
    """A network of rows for one window, given the noise of `seed`."""

    def __init__(
        self,
        denoiser: Denoiser,
        window: Window,
        block: int | None,
        grid: str,
        seed: int,
    ):
        super().__init__(denoiser, window, block, grid)
        self.plain = without_wrappers(denoiser)
        self.seed = seed
        self.m = NO_ID  # marks masked positions: the noise may show [MASK]
        self.x = [*window.context, *window.target, *[self.m] * window.tail, *window.suffix]
        self.tokens = (~self.plain.excluded).nonzero()[:, 0]  # (K,)
        self.given = torch.zeros(0)  # (L,) the row in progress, with its masks

    def path(self, F: reference.Rule) -> reference.Path:
        return reference.log_likelihood_given_noise(
            self.x,
            self.blocks,
            self._given_noise,
            F,
            self.m,
            self.noise,
            self.relative_positions,
        )

    @torch.inference_mode()
    def _given_noise(
        self,
        z: torch.Tensor,
        y: torch.Tensor,
        before: torch.Tensor | None,
    ) -> torch.Tensor:
        """Logits (L, V) for the row z (L,), shown as y (L,)."""
        self.given = z
        logits = self.logits(self.denoiser, y.to(self.denoiser.device))
        return logits.masked_fill(self.denoiser.excluded, -torch.inf)

    def noise(self, z: torch.Tensor, block: int, step: int) -> torch.Tensor:
        """The tokens that positions show while they are masked in z (L,), at a step of the block at `block`."""
        begin, _ = self.span(block)
        key = torch.tensor(begin - self.origin)  # blocks and positions count from the target
        position = torch.arange(len(z)) - self.origin  # (L,)
        index = uniform(self.seed, TOKEN, key, step, position) * len(self.tokens)
        tokens = self.tokens.cpu()[index.long()]  # (L,)
        if self.plain.mask_id is None:
            return tokens

        # GIDD's noise has [MASK], too: with weight m, beside u for each token, at the time that masks this share.
        training = self.plain.noise_training
        assert training is not None
        t = self.share(z, block).reshape(1, 1)
        level = training.noise.level(t, 1 - t)
        chance_of_mask = float(level.m / (level.m + len(self.tokens) * level.u))
        shows_mask = uniform(self.seed, KIND, key, step, position) < chance_of_mask  # (L,)
        return torch.where(shows_mask, self.plain.mask_id, tokens)

    def share(self, z: torch.Tensor, block: int) -> torch.Tensor:
        """The share of the row that is masked, or under `bos="official"` of the scored positions, float64 ()."""
        counted = torch.ones_like(z, dtype=torch.bool)  # (L,)
        if self.plain.bos == "official":
            counted[: self.origin] = False
            counted[len(z) - self.suffix :] = False
            counted[self.known] = False
        return (z == self.m).sum().double() / counted.sum()

    def _before_filters(self, denoiser: Denoiser, z: torch.Tensor) -> torch.Tensor:
        if denoiser is not self.plain:
            return super()._before_filters(denoiser, z)
        share = self.share(self.given, 0)
        noise_level = denoiser.noise_inputs(share[None])
        [self.inputs] = denoiser.features(z[None], None, **noise_level)  # (L, D)
        return denoiser.head(self.inputs).double()


class CanvasGivenNoise(GivenNoise):
    """A network of canvases for one window, given the noise of `seed`."""

    def __init__(self, *arguments: object):
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.before: torch.Tensor | None = None  # the logits of the step before, of the network alone
        self.step = -1

    def share(self, z: torch.Tensor, block: int) -> torch.Tensor:
        begin, end = self.span(block)
        return (z[begin:end] == self.m).sum().double() / (end - begin)

    @torch.inference_mode()
    def _given_noise(
        self,
        z: torch.Tensor,
        y: torch.Tensor,
        before: torch.Tensor | None,
    ) -> torch.Tensor:
        sampler = self.plain.commit_once
        device = self.plain.device
        first_masked = int((z == self.m).nonzero()[0])
        begin, end = self.span(first_masked)
        self.step = 0 if before is None else self.step + 1

        conditioned = sampler.self_conditioning and before is not None
        out = self.plain.model(  # type: ignore[attr-defined]
            input_ids=z[None, :begin].to(device),
            decoder_input_ids=y[None, begin:end].to(device),
            self_conditioning_logits=self.before if conditioned else None,
        )
        logits: torch.Tensor = out.logits[0].double()  # (W, V)
        temperature = sampler.temperature(torch.tensor([self.step])).to(logits)
        self.before = (logits / temperature)[None].to(out.logits.dtype)

        if sampler.leave_one_out:
            # Divide by q(x_t = shown token | x_0): a token that stayed is likelier to be shown than any other.
            t = self.share(z, begin)
            shown = torch.arange(end - begin), y[begin:end].to(device)
            log_ratio = torch.log1p((1 - t) * len(self.tokens) / t)
            logits[shown] -= log_ratio.to(logits)
        row = logits.new_full((len(z), logits.shape[1]), torch.nan)  # (L, V)
        row[begin:end] = logits / temperature
        return row


def given_noise(denoiser: Denoiser, window: Window, block: int | None, grid: str, seed: int) -> GivenNoise | None:
    """The network of one window, given the noise of `seed`; None if it opens rows in its own way."""
    plain = without_wrappers(denoiser)
    if isinstance(plain, Canvases):
        return CanvasGivenNoise(denoiser, window, block, grid, seed)
    if type(plain).open in (Denoiser.open, Timed.open):
        return GivenNoise(denoiser, window, block, grid, seed)
    return None


def without_wrappers(denoiser: Denoiser) -> Denoiser:
    """The network under guidance."""
    while isinstance(denoiser, Wrapper):
        denoiser = denoiser.plain
    return denoiser


# ---------------------------------------------------------------- a mean over noise seeds


def over_seeds(estimator: DuelSeeds, window: Window, score: Score) -> Recomputed:
    """The path of each seed. A mean over seeds records no orders, so `duel` is run once more for each seed."""
    runs: list[Score] = []
    paths: list[Recomputed] = []
    problems: list[str] = []
    blocks: Sequence[Sequence[int]] = []
    for seed in estimator.seeds:
        network = given_noise(estimator.denoiser, window, estimator.block, estimator.grid, seed)
        assert network is not None  # there was one for the first seed
        [run] = estimator.with_seed(seed).log_prob([window])
        path = along_any_order(network, estimator.rule, run)
        # A rule that spans blocks has joined them to one chain by now: its history carries the noise of one block into
        # the next, so their probabilities are not independent, and the product of their means bounds nothing.
        blocks = network.blocks
        problems += [f"noise_seed {seed}: {problem}" for problem in path.problems]
        runs.append(run)
        paths.append(path)

    values = [path.log_prob for path in paths]
    mean = math.fsum(values) / len(values)
    pairs = {}
    for seed, run_value, value in zip(estimator.seeds, score.seeds, values, strict=True):
        pairs[f"noise_seed {seed}"] = (run_value, value)

    origin = len(window.context)
    log_means = []  # of the probability of each block
    for block in blocks:
        places = [ell - origin for ell in block]
        log_means.append(_log_mean(places, runs))
    pairs[LOG_MEAN] = (score.others[LOG_MEAN].log_prob, math.fsum(log_means))
    if len(values) > 1 and math.isfinite(mean):
        _, error = reference.mean_and_error(values, len(values))
        pairs["stderr"] = (math.nan if score.stderr is None else score.stderr, error)
    problems += unequal(pairs, nats_tolerance(len(window.target)))

    other_picks = 0
    ties = 0
    along_own_orders = []
    for path in paths:
        other_picks += path.other_picks or 0
        ties += path.ties or 0
        along_own_orders.append(path.log_prob if path.own_order is None else path.own_order)
    own_order = math.fsum(along_own_orders) / len(paths)
    return Recomputed(mean, paths[0].route, other_picks, ties, own_order, tuple(problems))


def _log_mean(places: Sequence[int], runs: Sequence[Score]) -> float:
    """The log of the mean over seeds of the probability of one block, the target positions `places`."""
    of_seeds = []
    for run in runs:
        of_block = [run.token_logprobs[place] for place in places]
        of_seeds.append(math.fsum(of_block))
    return reference.log_mean_exp(of_seeds)
