"""The bound of networks whose noise is random tokens: ancestral sampling in T steps, with its standard error.

    -log p(x_0) <= KL(q(x_T | x_0) || p(x_T)) + sum_i E_{q(x_i | x_0)} KL(q(x_{i-1} | x_i, x_0) || k(x_{i-1} | x_i))

The generative process starts from noise and samples all positions of x_{i-1} from k, given the network's output for
x_i. Nothing of x_0 is left at t = 1, so the first term is 0. A draw is one step i and its noisy text x_i. Its value is
the exact KL (core/noise.py) divided by the probability of i. Small i are taken more often: few positions are noisy
there, but these carry most of the bound. Draws are stratified in i, see elbo.py. `steps=inf` is the integral over t.
With self_conditioning=chain a draw is a whole path x_T, ..., x_1 with all T terms.

Shapes: L row length, R lanes, W span width, S replicates, V tokens, C positions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, cast

import torch

from lm_eval_duel.core import noise as noises
from lm_eval_duel.core.decision import EvaluateAll, UnmaskingRule
from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.core.hashing import uniform
from lm_eval_duel.core.lanes import Lanes, Rows
from lm_eval_duel.core.network import Evaluator
from lm_eval_duel.core.predictions import Predictions
from lm_eval_duel.core.reveal import Step, WindowGroup
from lm_eval_duel.core.scores import IndexedScores
from lm_eval_duel.core.windows import Window
from lm_eval_duel.errors import DuelError, NotFinite
from lm_eval_duel.estimators.arguments import NoisedElboArguments
from lm_eval_duel.estimators.elbo import MonteCarloBound

# keys of the random numbers
CHANGE = 5  # whether a position keeps its token, or shows [MASK] or a random one
TOKEN = 6  # which random token it shows
COMPARED = 4  # statistics of predictions that row checks compare (`Predictions.compared`)


class KeepLogits(EvaluateAll):
    """Evaluates draws and keeps all of their logits, which the network reads in its next pass."""

    dense_memory: ClassVar[bool] = True


class NoisedElbo(MonteCarloBound):
    """A Monte Carlo estimate of the lower bound of log p under ancestral sampling, in nats.

    Args:
        denoiser: A network whose noise is random tokens.
        arguments: `steps`: the number of steps T, or math.inf; None: as the network was trained. `prediction`: the
            meaning of the network's output, "denoiser" or "plugin"; "auto": as in training. `self_conditioning`: the
            network's own output as an input: "none", "twice" (for the same x_i) or "chain" (for x_{i+1}); "auto": as
            in training. `mc_samples`: draws of each window; fewer than 16 have no standard error.
        draw_seed: The seed of the draws.
        layout: The other arguments of `Estimator`.

    Raises:
        DuelError: If the network has no such bound, or an argument is out of range.
    """

    name = "noised_elbo"
    takes_noise = "only"

    def __init__(
        self,
        denoiser: Denoiser,
        arguments: NoisedElboArguments | None = None,
        *,
        draw_seed: int = 0,
        **layout: Any,
    ):
        if (trained := denoiser.noise_training) is None:
            raise DuelError("estimator=noised_elbo is for networks whose noise is random tokens; use estimator=elbo.")
        self.trained = trained
        self.noise = trained.noise
        self.arguments = as_trained(arguments or NoisedElboArguments(), trained)
        self.steps = cast(float, self.arguments.steps)
        self.conditioning = self.arguments.self_conditioning
        if self.conditioning != "none" and trained.self_conditioning == "none":
            raise DuelError(
                f"self_conditioning={self.conditioning}: this network does not read its own output. Leave it out."
            )
        if self.conditioning != "none" and denoiser.filters:
            raise DuelError(
                f"self_conditioning={self.conditioning} feeds the network its own output, and a temperature, top_k or "
                "top_p would change that, too. Leave them out, or pass self_conditioning=none."
            )
        if self.steps == math.inf and self.conditioning == "chain":
            raise DuelError("self_conditioning=chain follows a path of finitely many steps: pass steps=<number>.")
        if self.steps == math.inf and self.arguments.prediction == "denoiser" and not trained.timed:
            raise DuelError(
                "A denoiser that is not given the time has no limit of infinitely many steps: its bound grows with the "
                "logarithm of their number. Pass steps=<number>, such as 48."
            )
        super().__init__(denoiser, denoiser.block, self.arguments.mc_samples, draw_seed, **layout)
        if self.steps != math.inf and self.conditioning != "chain":  # a chain takes all steps
            self.step_shares = step_shares(int(self.steps)).to(denoiser.device)  # (T,)
            self.step_below = self.step_shares.cumsum(0)  # (T,) the probability of a step up to i
        # The noise knows a token by its index among the K ids that are tokens, and [MASK] by -1.
        tokens = (~denoiser.excluded).nonzero()[:, 0]  # (K,)
        self.tokens = tokens
        self.token_index = torch.full_like(denoiser.excluded, -1, dtype=torch.int64)  # (V,) -1 for ids of no token
        self.token_index[tokens] = torch.arange(len(tokens), device=tokens.device)

    def describe(self) -> dict[str, object]:
        spec = {"estimator": self.name, "noise": self.noise.name, **self.arguments.describe()}
        if self.trained.self_conditioning == "none":
            del spec["self_conditioning"]
        if self.block:
            spec |= {"canvas": self.block, "last_canvas": "short"}
        if self.trained.note:
            spec["time"] = self.trained.note
        return {**spec, "draw_seed": self.draw_seed}

    def check(self, windows: Sequence[Window]) -> None:
        for n, window in enumerate(windows):
            # before the checks that all estimators share, whose message on tails speaks of blocks: here may be none
            if getattr(window, "tail", 0):
                raise DuelError(
                    f"Window {n} has a tail of [MASK], but this network's noise is {self.noise.name}. Leave the tail "
                    "out.",
                    n,
                )
        super().check(windows)

    def step_from_uniform(self, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Map uniform numbers u to steps from 1 to T, and their weights 1 / p(step); both are shaped like u."""
        last = len(self.step_shares) - 1  # u may exceed the last sum, which rounds to a little less than 1
        step = torch.searchsorted(self.step_below, u.contiguous(), right=True).clamp(max=last)  # counted from 0
        return step.double() + 1, 1 / self.step_shares[step]

    @property
    def rule_of_draws(self) -> UnmaskingRule:
        if self.conditioning == "none":
            return EvaluateAll()
        return KeepLogits()

    def score_group(self, group: WindowGroup) -> IndexedScores:
        return super().score_group(dataclasses.replace(group, opened=partial(NoisedView, self)))

    def make_draws(self, group: WindowGroup, lanes: Lanes, draw_index: torch.Tensor) -> Lanes:
        """Each draw as a lane. Its memory is all that its random numbers depend on, the same at every position."""
        stratum = self.strata(group, lanes, draw_index)  # (R,)
        window_key = group.keys[lanes.row]  # (R,)
        memory = []
        for plane in (stratum, window_key, draw_index):
            memory.append(plane[:, None].expand_as(lanes.masked))  # (R, W)
        return dataclasses.replace(lanes, memory=tuple(memory))

    def terms(self, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        nats = cast(NoisedTerms, step.evaluated).nats  # (R, W)
        values = torch.where(step.lanes.masked, nats, 0.0)  # (R, W)
        _, _, draw_index = step.lanes.memory  # (R, W)
        replicate = draw_index[:, :1] % self.replicates  # (R, 1)
        sums = values.new_zeros(len(values), self.replicates)  # (R, S)
        return values, sums.scatter_(1, replicate, values.sum(1, keepdim=True))

    def draws(self, window: Window) -> list[tuple[torch.Tensor, torch.Tensor, float, list[int]]]:
        """The draws of a window without canvases: s, t, the weight, and the row with noisy targets."""
        group = self.open([window], [0])
        draw_index = torch.arange(self.samples, device=self.denoiser.device)  # (R,)
        fresh = group.fresh(self.block_spans(group))
        span = torch.zeros_like(draw_index)  # (R,) the only one
        lanes = self.make_draws(group, fresh.select(span), draw_index)
        view = NoisedView(self, group.rows)
        s, t, rest, weight = view.times(lanes)
        clean = self.token_index[group.rows.targets(lanes)]  # (R, W)
        noisy = view.add_noise(lanes, clean, self.noise.level(t, rest))
        rows = group.rows.ids[0].repeat(len(draw_index), 1)  # (R, L)
        rows = rows.scatter(1, lanes.columns, view.ids(noisy))
        return list(zip(s[:, 0], t[:, 0], weight[:, 0].tolist(), rows.tolist(), strict=True))


def as_trained(arguments: NoisedElboArguments, trained: noises.NoiseTraining) -> NoisedElboArguments:
    """The arguments, with the network's own training in place of "auto" and None."""
    steps = arguments.steps
    if steps is None:
        steps = math.inf if trained.steps is None else trained.steps
    prediction = arguments.prediction
    if prediction == "auto":
        prediction = trained.prediction
    conditioning = arguments.self_conditioning
    if conditioning == "auto":
        conditioning = trained.self_conditioning
    return dataclasses.replace(arguments, steps=steps, prediction=prediction, self_conditioning=conditioning)


def step_shares(steps: int) -> torch.Tensor:
    """The probability with which a draw takes step i, for i = 1, ..., T, (T,).

    Half of the probability is uniform, half in proportion to 1 / i. With uniform steps alone the standard error would
    come out too small: most of the bound lies in the first few steps, which too few draws would take.
    """
    early = 1 / torch.arange(1, steps + 1, dtype=torch.float64)  # (T,)
    return (1 / steps + early / early.sum()) / 2


@dataclasses.dataclass(frozen=True)
class NoisedTerms:
    """The terms of the bound at the positions of some draws; NaN where a position belongs to no draw."""

    nats: torch.Tensor  # (R, W) weighted, with the sign of a log-probability
    carried: ClassVar[tuple[torch.Tensor, ...]] = ()  # a draw has one step

    def compared(self, lane: int, tokens: torch.Tensor) -> torch.Tensor:
        """The terms of one lane, in place of each of the statistics that predictions have, (S, W)."""
        return self.nats[lane].expand(COMPARED, -1)


@dataclasses.dataclass(frozen=True)
class NoisyStep:
    """One step of some draws from t to s < t: the noisy text at t, and the levels at both times."""

    noisy: torch.Tensor  # (R, W) x_t, as token indices; -1 for [MASK]
    t: torch.Tensor  # (R, 1)
    now: noises.Level  # at t
    before: noises.Level  # at s


class NoisedView(Evaluator):
    """A network opened on a group of rows, as a function from drawn lanes to the terms of the bound.

    A term is made in three steps: noise (`times`, `add_noise`), the network's output for it (`predict`), and the
    statistics of that output which the KL needs (`statistics`, core/noise.py).
    """

    def __init__(self, bound: NoisedElbo, rows: Rows):
        super().__init__(bound.denoiser, rows)
        self.bound = bound
        self.noise = bound.noise
        self.steps = bound.steps
        self.network = bound.denoiser.open_noised(rows)

    def cost(self, lanes: Lanes) -> torch.Tensor:
        return self.network.cost(lanes)

    def __call__(self, lanes: Lanes, targets: torch.Tensor | None = None) -> NoisedTerms:
        """The weighted terms of draws: each draw's sum is an unbiased estimate of the bound."""
        clean = self.bound.token_index[self.rows.targets(lanes)]  # (R, W)
        follows_path = self.bound.conditioning == "chain"
        try:
            value = self._terms_of_path(lanes, clean) if follows_path else self._term_of_step(lanes, clean)
        finally:  # a pass that runs out of memory is counted, too
            self.forwards = self.network.forwards
            self.evaluated = self.network.evaluated
        return NoisedTerms(-value.masked_fill(~lanes.masked, math.nan))

    def _term_of_step(self, lanes: Lanes, clean: torch.Tensor) -> torch.Tensor:
        """The term of the step that each draw takes, over its probability, nats (R, W)."""
        s, t, rest, weight = self.times(lanes)
        now = self.noise.level(t, rest)
        before = now if self.steps == math.inf else self.noise.level(s, 1 - s)
        step = NoisyStep(self.add_noise(lanes, clean, now), t, now, before)
        own_output = None
        if self.bound.conditioning == "twice":  # a first pass over the same x_t, without any
            log_probs = self.predict(lanes, step).dense()  # (C, V)
            own_output = log_probs.new_zeros(*clean.shape, self.denoiser.vocab_size)  # (R, W, V)
            own_output[lanes.masked] = log_probs

        predictions = self.predict(lanes, step, own_output)
        statistics, _ = self.statistics(lanes, clean, step, predictions)
        observed = noises.Observed.from_tokens(step.noisy, clean)
        if self.steps == math.inf:
            return weight * noises.limit_rate(now, self.noise.rates(t, rest), statistics, observed)
        return weight * noises.step_kl(before, now, statistics, observed)

    def _terms_of_path(self, lanes: Lanes, clean: torch.Tensor) -> torch.Tensor:
        """All T terms on one path of each draw, nats (R, W): the network reads its own output of the noisier step."""
        steps = torch.arange(int(self.steps) + 1, device=clean.device).double()  # (T + 1,)
        steps = steps[:, None, None]  # (T + 1, 1, 1)
        levels = []
        for i in steps:
            rest = (self.steps - i) / self.steps  # (1, 1)
            levels.append(self.noise.level(i / self.steps, rest))

        # forwards: x_0, x_1, ..., x_T, each from the one before
        path = [clean]
        for i in range(1, len(levels)):
            level = noises.between(levels[i - 1], levels[i])
            path.append(self.add_noise(lanes, path[-1], level, i))

        # backwards, as the generative process runs
        total = torch.zeros(clean.shape, dtype=torch.float64, device=clean.device)
        own_output = None  # for x_{i+1}, (R, W, V)
        for i in range(len(path) - 1, 0, -1):
            t = (steps[i] / self.steps).expand(len(lanes), 1)  # (R, 1)
            step = NoisyStep(path[i], t, levels[i], levels[i - 1])
            predictions = self.predict(lanes, step, own_output)
            statistics, own_output = self.statistics(lanes, clean, step, predictions, keeps_logits=True)
            observed = noises.Observed.from_tokens(step.noisy, clean)
            total += noises.step_kl(step.before, step.now, statistics, observed)
        return total

    # ------------------------------------------------------------ noise

    def times(self, lanes: Lanes) -> tuple[torch.Tensor, ...]:
        """s, t, 1 - t and the weight of draws, (R, 1) each; s = t for infinitely many steps."""
        stratum, _, _ = lanes.memory  # (R, W)
        u = stratum[:, :1]  # (R, 1)
        if self.steps == math.inf:
            t, rest, weight = self.noise.time_from_uniform(u)
            return t, t, rest, weight
        step, weight = self.bound.step_from_uniform(u)
        t = step / self.steps
        rest = (self.steps - step) / self.steps  # not 1 - t, which loses digits near t = 1
        return (step - 1) / self.steps, t, rest, weight

    def add_noise(
        self,
        lanes: Lanes,
        tokens: torch.Tensor,
        level: noises.Level,
        path_step: int = 0,
    ) -> torch.Tensor:
        """Noisy token indices (R, W) from token indices (R, W) that are less so, under the noise of a `level`.

        `path_step`: the number of the step on a path, which has other random numbers; 0 without a path.
        """
        _, key, draw_index = lanes.memory  # (R, W) each
        position = lanes.columns - lanes.origin[:, None]  # (R, W)
        seed = self.bound.draw_seed
        u = uniform(key, seed, CHANGE, draw_index, path_step, position)  # (R, W)
        v = uniform(key, seed, TOKEN, draw_index, path_step, position)  # (R, W)
        return noises.noisy_tokens(self.noise, level, tokens, u, v)

    def ids(self, noisy: torch.Tensor) -> torch.Tensor:
        """The ids of noisy token indices (R, W)."""
        return torch.where(noisy < 0, self.denoiser.mask_id or 0, self.bound.tokens[noisy.clamp(min=0)])

    # ------------------------------------------------------------ the network, and what the KL reads of its output

    def predict(self, lanes: Lanes, step: NoisyStep, own_output: torch.Tensor | None = None) -> Predictions:
        """The network's output for x_t; `own_output` (R, W, V): its logits of an earlier pass, which it reads."""
        return self.network.predictions(lanes, self.ids(step.noisy), step.t[:, 0], own_output)

    def statistics(
        self,
        lanes: Lanes,
        clean: torch.Tensor,
        step: NoisyStep,
        predictions: Predictions,
        keeps_logits: bool = False,
    ) -> tuple[noises.Statistics, torch.Tensor | None]:
        """`Statistics` of the model's r at all positions, and the logits (R, W, V) that they come from, or None."""
        is_mask = step.noisy < 0  # (R, W)
        # the columns of the logits that hold x_0 and x_t; r(x_t) plays no part where x_t is [MASK], so any will do
        clean_column = self.bound.tokens[clean]  # (R, W)
        noisy_column = self.bound.tokens[torch.where(is_mask, clean, step.noisy)]  # (R, W)
        # what makes r of the network's output
        shift = torch.zeros_like(clean, dtype=torch.float64)  # (R, W)
        if self.bound.arguments.prediction == "denoiser":
            shift = noises.as_plugin(step.now, is_mask)
        ratio = torch.where(step.before.u > 0, step.before.a / step.before.u, 0.0)  # (R, 1) a / u at s
        ratio = ratio.expand(clean.shape)  # (R, W)

        kept_logits = None
        values_of_parts = []
        for part, row, logits in predictions.by_lanes():
            logits_of_part = logits[row]  # (c, V)
            masked = lanes.masked[part]  # (r, W)
            if keeps_logits:
                if kept_logits is None:
                    kept_logits = logits_of_part.new_zeros(*clean.shape, logits_of_part.shape[1])
                kept_logits[part][masked] = logits_of_part  # now, since `noises.statistics` overwrites them
            inputs = [plane[part][masked] for plane in (clean_column, noisy_column, shift, ratio)]  # (c,) each
            values_of_parts.append(noises.statistics(logits_of_part, *inputs))

        values = [torch.cat(parts) for parts in zip(*values_of_parts, strict=True)]  # (C,) each
        broken = torch.stack(values).isnan().any(0)  # (C,)
        if bool(broken.any()):
            message = "The weights are broken or the dtype is too narrow: the network returned NaN."
            raise NotFinite(message, lane=int(lanes.masked_at[0][broken][0]))
        blank = torch.zeros(clean.shape, dtype=torch.float64, device=clean.device)
        planes = [blank.masked_scatter(lanes.masked, value) for value in values]  # (R, W) each
        return noises.Statistics(*planes), kept_logits
