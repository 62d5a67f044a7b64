"""The bound of networks whose noise is random tokens: ancestral sampling in T steps, with its standard error.

    -log p(x_0) <= KL(q(x_T | x_0) || p(x_T)) + sum_i E_{q(x_i | x_0)} KL(q(x_{i-1} | x_i, x_0) || k(x_{i-1} | x_i))

The generative process starts from noise and draws all positions of x_{i-1} from k, given the network's output for x_i.
Nothing of x_0 is left at t = 1, so the first term is 0. A draw is one step i, its noisy text x_i and T times the exact
KL of core/noise.py; draws are stratified in i. `steps=inf` is the integral over t. With self_conditioning=chain a draw
is a whole path x_T, ..., x_1 and all T terms. Replicates with independent shifts give the standard error, as in
elbo.py. Random numbers are functions of the seed and the window's ids.

Shapes: N windows, L row length, R lanes, W span width, S replicates, V tokens, P positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch

from lm_eval_duel.core import noise as noises
from lm_eval_duel.core import signals
from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.core.hashing import uniform
from lm_eval_duel.core.lanes import Lanes
from lm_eval_duel.core.noise_view import NoiseView
from lm_eval_duel.core.predictions import CPU_ROWS, CPU_VALUES, GPU_VALUES
from lm_eval_duel.core.reveal import WindowGroup, naming_window, without_autocast
from lm_eval_duel.core.row_checks import LaneCheck, draw_lanes, place_of
from lm_eval_duel.core.scores import IndexedScores
from lm_eval_duel.core.windows import Window
from lm_eval_duel.errors import DuelError, NotFinite
from lm_eval_duel.estimators.arguments import NoisedElboArguments
from lm_eval_duel.estimators.base import Estimator
from lm_eval_duel.estimators.elbo import GOLDEN, SHIFT, BoundAccumulator, Elbo, replicates, warn_if_few

KIND, TOKEN = 5, 6  # keys of the random numbers: whether a position becomes noise, and which token


class NoisedElbo(Estimator):
    """A Monte Carlo estimate of the lower bound of log p under ancestral sampling, in nats.

    Args:
        denoiser: A network whose noise is random tokens.
        samples: Draws of each window. Fewer than 8 have no standard error.
        steps: The number of steps T, or math.inf. None: as the network was trained.
        prediction: The meaning of the network's output, "denoiser" or "plugin". "auto": as in training.
        self_conditioning: The network's own output as an input: "none", "twice" (for the same x_i) or "chain" (for
            x_{i+1}). "auto": as in training.
        seed: The seed of the draws.
        layout: The other arguments of `Estimator`.

    Raises:
        DuelError: If the network has no such bound, or an argument is out of range.
    """

    name = "noised_elbo"
    takes_noise = True
    empty_score = Elbo.empty_score

    def __init__(
        self,
        denoiser: Denoiser,
        *,
        samples: int = 128,
        steps: float | None = None,
        prediction: str = "auto",
        self_conditioning: str = "auto",
        seed: int = 0,
        **layout: Any,
    ):
        if (trained := denoiser.noise_training) is None:
            raise DuelError("estimator=noised_elbo is for networks whose noise is random tokens; use estimator=elbo.")
        own = NoisedElboArguments(samples, steps, prediction, self_conditioning)
        self.trained, self.noise, self.samples, self.seed = trained, trained.noise, own.mc_samples, seed
        self.steps = own.steps if own.steps is not None else math.inf if trained.steps is None else trained.steps
        self.prediction = trained.prediction if own.prediction == "auto" else own.prediction
        asked = own.self_conditioning
        self.conditioning = trained.self_conditioning if asked == "auto" else asked
        if asked in ("twice", "chain") and trained.self_conditioning == "none":
            raise DuelError(f"self_conditioning={asked}: this network's output is not among its inputs. Leave it out.")
        if self.steps == math.inf and self.conditioning == "chain":
            raise DuelError("self_conditioning=chain is a path of a number of steps: pass steps=<number>.")
        if self.steps == math.inf and self.prediction == "denoiser" and not trained.timed:
            raise DuelError(
                "A denoiser that is not given the time has no limit of infinitely many steps: its bound grows with the "
                "logarithm of their number. Pass steps=<number>, such as 48."
            )
        self.replicates = replicates(samples)
        warn_if_few(samples)
        super().__init__(denoiser, denoiser.block, **layout)
        tokens = (~denoiser.excluded).nonzero()[:, 0]  # (K,)
        self.tokens, self.number = tokens, torch.full_like(denoiser.excluded, -1, dtype=torch.int64)  # (V,)
        self.number[tokens] = torch.arange(len(tokens), device=tokens.device)

    def describe(self) -> dict[str, object]:
        return {
            "estimator": self.name,
            "noise": self.noise.name,
            "steps": "inf" if self.steps == math.inf else int(self.steps),
            "prediction": self.prediction,
            **({"self_conditioning": self.conditioning} if self.trained.self_conditioning != "none" else {}),
            **({"canvas": self.block, "last_canvas": "short"} if self.block else {}),
            **({"time": self.trained.note} if self.trained.note else {}),
            "mc_samples": self.samples,
            "draw_seed": self.seed,
        }

    def check(self, windows: Sequence[Window]) -> None:
        super().check(windows)
        for n, window in enumerate(windows):
            if window.tail:
                raise DuelError(f"Window {n} has a tail of [MASK], and the noise here is {self.noise.name}.", n)
            if window.target and self.block and not window.context:
                raise DuelError(
                    f"Window {n} needs a context: its first canvas has no clean token to read. Keep BOS.", n
                )
            if window.suffix and self.block:
                raise DuelError(f"Window {n} has a suffix, which a canvas never sees. Leave it out.", n)

    def lanes(self, window: Window) -> int:
        return self.samples * len(self.blocks(window))

    def score_group(self, group: WindowGroup) -> IndexedScores:
        spans, sums = self.block_spans(group), NoisedAccumulator(group, self, self.samples)
        key = torch.tensor([window.key for window in group.windows], device=group.rows.ids.device)  # (N,)
        nth = torch.tensor([n for window in group.windows for n in range(len(self.blocks(window)))], device=key.device)
        view, done = cast(NoiseView, group.view), 0
        before = view.forwards, view.evaluated
        try:
            while done < len(spans) * self.samples:
                done += self._draw(group, spans, key, nth, done, sums)
                yield from sums.finished()
                signals.check()
        finally:
            self.counts.forwards += view.forwards - before[0]
            self.counts.rows += view.evaluated - before[1]

    def _draw(
        self,
        group: WindowGroup,
        spans: list[Any],
        key: torch.Tensor,
        nth: torch.Tensor,
        first: int,
        sums: NoisedAccumulator,
    ) -> int:
        """Evaluate as many draws from number `first` on as one call holds; their number. Draws count within spans."""
        place = first // self.samples
        while True:
            cost = int(group.view.cost(group.fresh(spans[place : place + 1]))[0])
            dense = self.conditioning != "none" or not self.denoiser.splits_head
            width = max(width for _, _, width in spans[place:])
            room = self.budget.rows(cost, (3 * width if dense else 0) * self.denoiser.vocab_size)
            number = torch.arange(first, min(first + room, len(spans) * self.samples), device=key.device)  # (R,)
            lanes = group.fresh(spans[place : int(number[-1]) // self.samples + 1])
            lanes, draw = lanes.select(number // self.samples - place), number % self.samples
            what = key[lanes.row], nth[number // self.samples], draw  # (R,) each
            if due := self.row_checks.number_due(self.counts, len(number), 1.0):
                self.row_checks.compare(self.counts)
            try:
                with naming_window(lanes, group.window_indices), without_autocast(self.denoiser):
                    value = self._values(group, lanes, *what)  # (R, W)
                checked = draw_lanes(lanes, due, group.window_indices, draw)
                drawn = [self._to_check(group, lanes, lane, value, *what) for lane in checked]
                sums.add(lanes, draw % self.replicates, value)
                self.counts.lane_steps += len(number)
                self.row_checks.waiting += drawn
                return len(number)
            except torch.OutOfMemoryError:
                if len(number) == 1:
                    raise
            self.budget.halve(self.denoiser.device)

    def _to_check(
        self, group: WindowGroup, lanes: Lanes, lane: int, value: torch.Tensor, *what: torch.Tensor
    ) -> LaneCheck:
        """A draw to evaluate again alone."""
        here, row = slice(lane, lane + 1), int(lanes.row[lane])
        window = group.window_indices[row]
        alone = WindowGroup([group.windows[row]], [window], group.rows.alone(row), group.opened)
        one, of_lane = lanes.select(here), [plane[here] for plane in what]

        def again() -> torch.Tensor:
            return self._values(alone, one.in_row(0), *of_lane).masked_fill(~one.masked, 0.0)  # (1, W)

        return LaneCheck(again, value[here].masked_fill(~one.masked, 0.0), self.denoiser, window, place_of(lanes, lane))

    # ------------------------------------------------------------ draws

    def _values(
        self, group: WindowGroup, lanes: Lanes, key: torch.Tensor, span: torch.Tensor, draw: torch.Tensor
    ) -> torch.Tensor:
        """The weighted terms of draws, nats (R, W): each draw's sum is an unbiased estimate of the negative bound."""
        clean = self.number[group.rows.targets(lanes)]  # (R, W)
        if self.conditioning == "chain":
            return self._chain(group, lanes, key, clean, draw)
        s, t, rest, weight = self._times(key, span, draw)
        now = self.noise.level(t, rest)
        before = now if self.steps == math.inf else self.noise.level(s, 1 - s)
        noisy = self._noisy(key, clean, now, draw, lanes, 0)
        past = self._logits(group, lanes, noisy, t, None) if self.conditioning == "twice" else None
        stats, observed, _ = self._predict(group, lanes, clean, noisy, now, before, t, past)
        if self.steps == math.inf:
            return weight * noises.limit_rate(now, self.noise.rates(t, rest), stats, observed)
        return weight * noises.step_kl(before, now, stats, observed)

    def _times(self, key: torch.Tensor, span: torch.Tensor, draw: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """s, t, 1 - t and the weight of draws, (R, 1) each; s = t for infinitely many steps."""
        strata = self.samples // self.replicates
        shift = uniform(key, self.seed, SHIFT, draw % self.replicates)  # (R,)
        v = ((shift + (draw // self.replicates).double() / strata + span.double() * GOLDEN) % 1)[:, None]  # (R, 1)
        if self.steps == math.inf:
            t, rest, weight = self.noise.time_from_uniform(v)
            return t, t, rest, weight
        step = 1 + (v * self.steps).floor()  # (R, 1) from 1 to T
        t, rest = step / self.steps, (self.steps - step) / self.steps
        return (step - 1) / self.steps, t, rest, torch.full_like(t, self.steps)

    def draws(self, window: Window) -> list[tuple[torch.Tensor, torch.Tensor, float, list[int]]]:
        """The draws of a window without canvases: s, t, the weight, and its row with noisy targets."""
        group, number = self.open([window], [0]), torch.arange(self.samples, device=self.denoiser.device)  # (R,)
        lanes = group.fresh(self.block_spans(group)).select(torch.zeros_like(number))
        key, clean = torch.full_like(number, window.key), self.number[group.rows.targets(lanes)]
        s, t, rest, weight = self._times(key, torch.zeros_like(number), number)
        noisy = self._noisy(key, clean, self.noise.level(t, rest), number, lanes, 0)
        row = group.rows.ids[0].repeat(len(number), 1).scatter(1, lanes.columns, self._ids(noisy))  # (R, L)
        return list(zip(s[:, 0], t[:, 0], weight[:, 0].tolist(), row.tolist(), strict=True))

    def _chain(
        self, group: WindowGroup, lanes: Lanes, key: torch.Tensor, clean: torch.Tensor, draw: torch.Tensor
    ) -> torch.Tensor:
        """All T terms on one path of each draw, (R, W): the network reads its own output of the noisier step."""
        steps = torch.arange(int(self.steps) + 1, device=key.device).double()[:, None, None]  # (T + 1, 1, 1)
        levels = [self.noise.level(step / self.steps, (self.steps - step) / self.steps) for step in steps]
        path = [clean]
        for i in range(1, len(levels)):
            kernel = noises.between(levels[i - 1], levels[i])
            path.append(self._noisy(key, path[-1], kernel, draw, lanes, i))
        total, past = torch.zeros(clean.shape, dtype=torch.float64, device=key.device), None
        for i in range(len(path) - 1, 0, -1):
            t = (steps[i] / self.steps).expand(len(lanes), 1)  # (R, 1)
            stats, observed, past = self._predict(group, lanes, clean, path[i], levels[i], levels[i - 1], t, past)
            total += noises.step_kl(levels[i - 1], levels[i], stats, observed)
        return total

    def _noisy(
        self, key: torch.Tensor, clean: torch.Tensor, level: noises.Level, draw: torch.Tensor, lanes: Lanes, step: int
    ) -> torch.Tensor:
        """Noisy tokens (R, W) by number, from `clean` (R, W)."""
        at = draw[:, None], step, lanes.columns - lanes.origin[:, None]  # (R, W)
        u, v = (uniform(key[:, None], self.seed, kind, *at) for kind in (KIND, TOKEN))
        return noises.draw(self.noise, level, clean, u, v)

    # ------------------------------------------------------------ the network

    def _predict(
        self,
        group: WindowGroup,
        lanes: Lanes,
        clean: torch.Tensor,
        noisy: torch.Tensor,
        now: noises.Level,
        before: noises.Level,
        t: torch.Tensor,
        past: torch.Tensor | None,
    ) -> tuple[noises.Statistics, noises.Observed, torch.Tensor | None]:
        """The statistics of r at all positions, what the noise did there, and the logits for the next step's input."""
        observed = noises.Observed(noisy == clean, noisy < 0)
        shift = torch.zeros_like(clean, dtype=torch.float64)  # (R, W)
        if self.prediction == "denoiser":
            shift = noises.as_plugin(now, observed.masked)
        ratio = torch.where(before.u > 0, before.a / before.u, 0.0).expand(clean.shape)  # (R, W)
        columns = self.tokens[clean], self.tokens[torch.where(observed.masked, clean, noisy)]  # (R, W) each
        logits = None
        if self.conditioning == "chain":
            logits = self._logits(group, lanes, noisy, t, past)
            inputs = logits.flatten(0, 1)  # (P, V)
        else:
            inputs = self._features(group, lanes, noisy, t, past).flatten(0, 1)  # (P, D)
        wanted = lanes.masked.flatten().nonzero()[:, 0]  # (P,)
        planes = [plane.flatten()[wanted] for plane in (*columns, shift, ratio)]
        vocabulary = self.denoiser.vocab_size
        chunk = max(CPU_ROWS, CPU_VALUES // vocabulary) if inputs.device.type == "cpu" else GPU_VALUES // vocabulary
        parts = []
        for part in torch.arange(len(wanted), device=wanted.device).split(max(1, chunk)):
            here = inputs[wanted[part]]
            own = self._head(here) if logits is None else here
            parts.append(noises.statistics(own, *(plane[part] for plane in planes)))
        values = [torch.cat(column) for column in zip(*parts, strict=True)]  # (P,) each
        if bool((broken := torch.stack(values).isnan().any(0)).any()):  # (P,)
            lane = int(wanted[broken][0]) // lanes.masked.shape[1]
            message = "The weights are broken or the dtype is too narrow: the network returned NaN."
            raise NotFinite(message, lane=lane)
        blank = torch.zeros(clean.shape, dtype=torch.float64, device=clean.device)
        full = (blank.masked_scatter(lanes.masked, value) for value in values)
        return noises.Statistics(*full), observed, logits

    def _features(
        self, group: WindowGroup, lanes: Lanes, noisy: torch.Tensor, t: torch.Tensor, past: torch.Tensor | None
    ) -> torch.Tensor:
        return cast(NoiseView, group.view).features(lanes, self._ids(noisy), t[:, 0], past)

    def _ids(self, noisy: torch.Tensor) -> torch.Tensor:
        """The ids of noisy tokens (R, W) that are given by number."""
        return torch.where(noisy < 0, self.denoiser.mask_id or 0, self.tokens[noisy.clamp(min=0)])

    def _logits(
        self, group: WindowGroup, lanes: Lanes, noisy: torch.Tensor, t: torch.Tensor, past: torch.Tensor | None
    ) -> torch.Tensor:
        """All logits of a pass (R, W, V), for self-conditioning."""
        features = self._features(group, lanes, noisy, t, past)  # (R, W, D)
        return self._head(features.flatten(0, 1)).view(*features.shape[:2], -1)

    def _head(self, features: torch.Tensor) -> torch.Tensor:
        """Logits (P, V) in float32 or better, -inf at columns that are no token."""
        logits: torch.Tensor = self.denoiser.head(features)
        own = logits.data_ptr() == features.data_ptr()  # a head that is not split off returns what it gets
        wide = logits.float() if logits.dtype.itemsize < 4 else logits.clone() if own else logits
        wide[:, self.denoiser.excluded] = -math.inf
        return wide


class NoisedAccumulator(BoundAccumulator):
    """The sums over draws of noisy texts."""

    def add(self, lanes: Lanes, replicate: torch.Tensor, terms: torch.Tensor) -> None:
        """Add the terms (R, W) of the negative bound, of draws of `replicate` (R,)."""
        values = -torch.where(lanes.masked, terms, 0.0)  # (R, W)
        self.put(lanes, values, replicate[:, None], values.sum(1, keepdim=True))
