"""Networks with our own DiT as denoisers.

    DiTDenoiser    MDLM, BD3-LM and the AR baseline, which get no noise level
    Timed          networks that get one: that of the time, or under an unmasking rule that of the masked share
        SEDD       sigma of the masked share
        GIDD       the time itself; its noise is masks, or masks and random tokens
        NoisedDiT  Duo and UDLM, whose noise is random tokens alone

Where the noise is random tokens, `estimator=noised_elbo` is the bound of ancestral sampling, with the network's output
in place of the clean token in the posterior (a plug-in). Under a rule, positions show random tokens until they are
revealed, and the network gets the level at which this share of the positions is noise.

Shapes: N windows, R rows or lanes, L row length, M columns asked for, Q queries, K keys, D width, V tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lm_eval_duel import fingerprint
from lm_eval_duel.core.denoiser import Denoiser, Positions, View
from lm_eval_duel.core.lanes import Lanes, Rows
from lm_eval_duel.core.network import KeysValues, take
from lm_eval_duel.core.noise import Hybrid, NoiseTraining, Uniform
from lm_eval_duel.denoisers import hub
from lm_eval_duel.denoisers.dit.network import DiT
from lm_eval_duel.denoisers.vocabulary import excluded_columns
from lm_eval_duel.errors import DuelError

PUBLISHED_BLOCK = 4  # of MDLM and SEDD in the paper's tables
CLAMP = (0.1, 0.9)  # of the masked share, in the authors' evaluation of SEDD
ATTENTION = {"ar": "causal", "bd3lm": "block_causal"}  # of families that are not bidirectional
NOISED = "gidd-uniform"  # GIDD with random tokens
FAMILIES = ("gidd", NOISED)
IGNORED = ("rotary_emb.", "sampling_eps_min", "sampling_eps_max", "noise.")  # recomputed, or for sampling
PREFIX = "backbone."  # of tensor names in some files
NOISE_EPS = 1e-3  # SEDD's schedule: sigma(t) = -log(1 - (1 - eps) t)


class DiTDenoiser(Denoiser):
    """MDLM, BD3-LM, SEDD or the AR baseline in float32.

    SEDD's scores are renormalised over the tokens (DUEL's official code; justified by Ou et al. 2024, Theorem 1).
    """

    honours_padding = True
    bos = "given"
    placed_on: torch.device  # where its weights go

    def __init__(
        self,
        network: DiT,
        family: str,
        max_length: int,
        path: str,
        tokens: set[int],
        mask_id: int | None,
        block: int | None = None,
    ):
        self.family = family
        self.path = path
        self.max_length = max_length
        self.vocab_size = network.config.vocab_size
        self.attention = ATTENTION.get(family, "bidirectional")
        self.block = block
        self.published_block = PUBLISHED_BLOCK if self.attention == "bidirectional" else None
        self.mask_id = None if family == "ar" else mask_id
        self.shift = 1 if family == "ar" else 0
        self.relative_positions = family != "ar"
        self.excluded = excluded_columns(
            tokens - {mask_id},
            mask_id,
            self.vocab_size,
            path,
            torch.device("cpu"),
        )
        self.vocabulary = f"{self.token_count} of {self.vocab_size}"
        self.take(network)

    def build(self) -> DiT:
        """The network without its weights, on torch's default device."""
        return DiT(self.network.config).eval()

    def fill(self) -> DiTDenoiser:
        """Read the weights of its folder."""
        tensors = hub.read_tensors(self.path)
        names = {key.removeprefix(PREFIX) for key in tensors}
        if len(names) < len(tensors):
            raise DuelError(f"The weights in {self.path} hold a tensor both with and without {PREFIX} in its name.")
        named = {}
        for key, value in tensors.items():
            name = key.removeprefix(PREFIX)
            if not name.startswith(IGNORED):
                named[name] = value.to(torch.float32, copy=True)  # a copy, as the file may change later
        self.network.load_state_dict(named, assign=True)
        self.take(self.network.to(self.placed_on))
        return self

    def take(self, network: DiT) -> None:
        """Take a network, in eval mode; on the meta device it has no weights yet."""
        self.network = network
        self.device = network.vocab_embed.embedding.device
        if self.device.type != "meta":
            self.excluded = self.excluded.to(self.device)
        if self.device.type == "cpu":
            # Column-major, the head is a third faster on a CPU for dozens of rows and a large vocabulary.
            head = network.output_layer.linear
            with torch.no_grad():
                transposed = head.weight.detach().t().contiguous()
                head.weight = torch.nn.Parameter(transposed.t())

    @property
    def layers(self) -> torch.nn.Module:
        return self.network

    @property
    def coarse(self) -> bool:
        return self.network.vocab_embed.embedding.dtype.itemsize < 4

    def features(self, ids: torch.Tensor, real: torch.Tensor | None, **extra: torch.Tensor) -> torch.Tensor:
        return self.features_at(None, ids, real, **extra)

    def features_at(
        self,
        columns: torch.Tensor | None,
        ids: torch.Tensor,
        real: torch.Tensor | None,
        sigma: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The last layer runs at `columns` (R, M) only; None: at all."""
        if sigma is None:
            sigma = self._level(ids)
        if self.attention == "causal":
            whole, _ = self.network(ids, sigma, causal=True)  # (R, L, D)
            return whole if columns is None else take(whole, columns)
        mask = None if real is None else real[:, None, None]  # (R, 1, 1, L)
        features, _ = self.network(ids, sigma, mask, columns=columns)
        return features

    def stream(self, *call: Any) -> tuple[torch.Tensor, list[KeysValues]]:
        return self.stream_at(None, *call, keys=True)

    def stream_at(
        self,
        columns: torch.Tensor | None,
        ids: torch.Tensor,
        positions: torch.Tensor,
        seen: torch.Tensor | None,
        past: list[KeysValues] | None,
        keys: bool = False,
    ) -> tuple[torch.Tensor, list[KeysValues]]:
        """The last layer runs at `columns` (N, M) only; None: at all. Without `keys`, the list of keys is empty."""
        mask = None if seen is None else seen[:, None]  # (N, 1, Q, K + Q)
        return self.network(
            ids,
            self._level(ids),
            mask,
            positions=positions,
            past=past,
            columns=columns,
            keys=keys,
        )

    def head(self, features: torch.Tensor) -> torch.Tensor:
        return self.network.output_layer.linear(features)

    def _level(self, ids: torch.Tensor) -> torch.Tensor:
        """The noise level for a network that ignores it, the same for all rows, (1,)."""
        return torch.zeros(1, device=ids.device)

    def describe(self) -> dict[str, object]:
        described = {
            "denoiser": f"DiT {self.family}",
            "weights": fingerprint.weights_of(self.path),
            "dtype": str(self.network.vocab_embed.embedding.dtype).removeprefix("torch."),
            "mask_token_id": self.mask_id,
            "vocabulary": self.vocabulary,
            "relative_positions": self.relative_positions and self.noise_training is None,  # no bound depends on it
        }
        if self.attention == "block_causal":
            described["last_block"] = self.last_block
        return described


class Timed(DiTDenoiser):
    """A network that gets a noise level: that of the time, or under an unmasking rule that of the masked share."""

    def open(
        self,
        rows: Rows,
        generating: bool = False,
        level: Callable[[Lanes], torch.Tensor] | None = None,
    ) -> View:
        """`level(lanes)` (R,): the noise level of each lane, in place of that of the masked share."""
        return TimedView(self, rows, level)

    def noise_level(self, t: torch.Tensor) -> torch.Tensor:
        """The noise level (R,) at times or masked shares (R,), which are float64."""
        raise NotImplementedError

    def noise_inputs(self, t: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"sigma": self.noise_level(t).float()}

    @property
    def counted(self) -> str:
        """The positions of which the masked share is taken, as the spec names them."""
        return "scored positions" if self.bos == "official" else "row"


class SEDD(Timed):
    """SEDD, conditioned at every step on the noise level of the row's masked share m.

    sigma="clamped": -log(1 - m) with m in [0.1, 0.9], as in the authors' evaluation; "schedule": -log(1 - (1 - eps) m)
    with eps = 1e-3, the training schedule. m is a share of the row (context, target, tail and suffix, without padding);
    under `bos="official"`, a share of target and tail, as in the authors' code.
    """

    sigma = "clamped"

    def noise_level(self, t: torch.Tensor) -> torch.Tensor:
        if self.sigma == "schedule":
            return self.schedule(t)
        return -torch.log1p(-t.clamp(*CLAMP))

    def schedule(self, t: torch.Tensor) -> torch.Tensor:
        """sigma(t) of the training schedule; it cancels near t = 1, so t is float64."""
        return -torch.log1p(-t * (1 - NOISE_EPS))

    def describe(self) -> dict[str, object]:
        sigma = f"{self.sigma}, of the masked share of the {self.counted}"
        return {**super().describe(), "sigma": sigma}


class TimedView(View):
    """A network that gets its noise level, opened on a group of rows."""

    def __init__(self, denoiser: Timed, rows: Rows, level: Callable[[Lanes], torch.Tensor] | None):
        super().__init__(denoiser, rows)
        self._level = level

    def positions(self, lanes: Lanes) -> Positions:
        if self._level is None:
            return super().positions(lanes)
        return self._evaluate(lanes, *self._input(lanes))  # equal rows may have different levels

    def _extra_inputs(
        self,
        lanes: Lanes,
        shown: torch.Tensor,
        real: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        """The noise level of each row."""
        if self._level is not None:
            return {"sigma": self._level(lanes).float()}
        return self.denoiser.noise_inputs(self.masked_share(lanes, shown, real))

    def masked_share(
        self,
        lanes: Lanes,
        shown: torch.Tensor,
        real: torch.Tensor,
    ) -> torch.Tensor:
        """The masked share of the row, or under `bos="official"` that of the scored positions, float64 (R,)."""
        masked = (real & ~shown).sum(1)  # (R,)
        counted = self.rows.length[lanes.row]  # (R,)
        if self.denoiser.bos == "official":
            counted = counted - self.rows.visible[lanes.row].sum(1)
        return masked.double() / counted


class GIDD(Timed):
    """GIDD (von Rütte et al. 2025), at the time t clamped to [t_eps, 1 - t_eps], the times of its training.

    With p_uniform 0 its noise is masking alone: at time t a position is masked with probability t. Above 0 tokens are
    also replaced by random ones.

    Under masks alone, t is the masked share m of the row: of context, target, tail and suffix, without padding; under
    `bos="official"`, of target and tail. The authors have no deterministic order; this is the time at which training
    masks this share of positions on average.

    `uniform`: its p_uniform. Random tokens are all but [MASK] (and the table's padding).
    """

    def __init__(self, *network: Any, t_eps: float, uniform: float):
        super().__init__(*network)
        self.t_eps = t_eps
        self.uniform = uniform
        self.published_block = None
        if uniform:
            noise = Hybrid(self.token_count, uniform)
            self.noise_training = NoiseTraining(noise, "plugin", None, note=f"t in {self.times}")

    @property
    def times(self) -> str:
        return f"[{self.t_eps:g}, 1 - {self.t_eps:g}]"

    def noise_level(self, t: torch.Tensor) -> torch.Tensor:
        return t.clamp(self.t_eps, 1 - self.t_eps)

    def describe(self) -> dict[str, object]:
        if self.noise_training is not None:
            return super().describe()
        time = f"masked share of the {self.counted}, in {self.times}"
        return {**super().describe(), "time": time}


class NoisedDiT(Timed):
    """Duo (Sahoo et al. 2025) and UDLM (Schiff et al. 2024): noise over all columns of the network.

    In training its levels go from t = 1e-3 to alpha = 1e-3.
    """

    def __init__(self, *network: Any):
        super().__init__(*network)
        note = f"sigma = -log alpha, alpha in [{NOISE_EPS:g}, 1 - {NOISE_EPS:g}]"
        noise = Uniform(self.token_count)
        self.noise_training = NoiseTraining(noise, "plugin", None, note=note)
        self.published_block = None

    def noise_level(self, t: torch.Tensor) -> torch.Tensor:
        return -(1 - t).clamp(NOISE_EPS, 1 - NOISE_EPS).log()
