"""MDLM, BD3-LM, SEDD and the AR baseline as denoisers: our own DiT and what its families do with it.

Shapes: R rows, L row length, Q queries, K keys, D width, V tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from lm_eval_duel import fingerprint
from lm_eval_duel.denoisers.base import Cells, Denoiser, KeysValues, View, take
from lm_eval_duel.denoisers.dit.network import DiT
from lm_eval_duel.denoisers.predictions import excluded_columns
from lm_eval_duel.engine.lanes import Lanes, Rows

PUBLISHED_BLOCK = 4  # of MDLM and SEDD in the paper's tables
CLAMP = (0.1, 0.9)  # of the masked share, in the authors' evaluation of SEDD
ATTENTION = {"ar": "causal", "bd3lm": "block_causal"}  # of families that are not bidirectional
NOISE_EPS = 1e-3  # SEDD's schedule: sigma(t) = -log(1 - (1 - eps) t)


class DiTDenoiser(Denoiser):
    """MDLM, BD3-LM, SEDD or the AR baseline in float32.

    All but SEDD ignore time. SEDD's scores are renormalised over the tokens (DUEL's official code; justified by
    Ou et al. 2024, Theorem 1).
    """

    honours_padding = True
    supports_columns = True
    bos = "given"

    def __init__(
        self,
        network: DiT,
        family: str,
        max_length: int,
        path: str,
        tokens: set[int],
        mask_id: int,
        block: int | None = None,
    ):
        self.network, self.family, self.max_length, self.path = network, family, max_length, path
        self.vocab_size = network.config.vocab_size
        self.device = network.vocab_embed.embedding.device
        self.attention = ATTENTION.get(family, "bidirectional")
        self.block = block
        self.published_block = PUBLISHED_BLOCK if self.attention == "bidirectional" else None
        self.mask_id = None if family == "ar" else mask_id
        self.shift = 1 if family == "ar" else 0
        self.relative_positions = family != "ar"
        self._excluded = excluded_columns(tokens - {mask_id}, mask_id, self.vocab_size, path, self.device)

    @property
    def excluded(self) -> torch.Tensor:
        return self._excluded

    @property
    def layers(self) -> torch.nn.Module:
        return self.network

    @torch.inference_mode()
    def features(
        self,
        ids: torch.Tensor,
        real: torch.Tensor | None,
        sigma: torch.Tensor | None = None,
        columns: torch.Tensor | None = None,
    ) -> torch.Tensor:
        sigma = self._level(ids) if sigma is None else sigma
        if self.attention == "causal":
            whole = self.network(ids, sigma, causal=True)[0]  # (R, L, D)
            return whole if columns is None else take(whole, columns)
        mask = None if real is None else real[:, None, None]  # (R, 1, 1, L)
        return self.network(ids, sigma, mask, columns=columns)[0]

    @torch.inference_mode()
    def stream(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        seen: torch.Tensor,
        past: list[KeysValues] | None,
        columns: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, list[KeysValues]]:
        keys = columns is None  # where columns are asked for, so are features alone
        level = self._level(ids)
        return self.network(ids, level, seen[:, None], positions=positions, past=past, columns=columns, keys=keys)

    @torch.inference_mode()
    def head(self, features: torch.Tensor) -> torch.Tensor:
        return self.network.output_layer.linear(features)

    def _level(self, ids: torch.Tensor) -> torch.Tensor:
        """The noise level of a network that ignores it, the same for all rows, (1,)."""
        return torch.zeros(1, device=ids.device)

    def describe(self) -> dict[str, object]:
        described = {
            "denoiser": f"DiT {self.family}",
            "weights": fingerprint.weights_of(self.path),
            "dtype": "float32",
            "mask_token_id": self.mask_id,
            "vocabulary": f"{int((~self._excluded).sum())} of {self.vocab_size}",
            "relative_positions": self.relative_positions,
        }
        if self.attention == "block_causal":
            described["last_block"] = self.last_block
        return described


class SEDD(DiTDenoiser):
    """SEDD, told the noise level of the masked share m of the row, anew at every step.

    sigma="clamped": -log(1 - m) with m in [0.1, 0.9], as in the authors' evaluation; "schedule": -log(1 - (1 - eps) m)
    with eps = 1e-3, the schedule it was trained on. m counts context, tail and suffix, not padding; under
    `bos="official"` it is the share of the positions that are not given (those scored, and a tail), as in the authors'
    code.
    """

    sigma = "clamped"

    def open(self, rows: Rows, generating: bool = False) -> View:
        return SEDDView(self, rows)

    def open_at(self, rows: Rows, level: Callable[[Lanes], torch.Tensor]) -> View:
        """A view whose noise level is not that of the masked share but `level(lanes)` (R,), for SEDD's own bound."""
        return LevelView(self, rows, level)

    def noise_level(self, share: torch.Tensor) -> torch.Tensor:
        """sigma (R,) of masked shares (R,), in float64: near a share of 1 the schedule cancels."""
        return (-torch.log1p(-share.clamp(*CLAMP)) if self.sigma == "clamped" else self.schedule(share)).float()

    def schedule(self, t: torch.Tensor) -> torch.Tensor:
        """sigma(t) of the schedule it was trained on."""
        return -torch.log1p(-t * (1 - NOISE_EPS))

    def describe(self) -> dict[str, object]:
        over = "scored positions" if self.bos == "official" else "row"
        return {**super().describe(), "sigma": f"{self.sigma}, of the masked share of the {over}"}


class SEDDView(View):
    """A SEDD denoiser opened on a group of rows."""

    def _told(self, lanes: Lanes, shown: torch.Tensor, real: torch.Tensor) -> dict[str, torch.Tensor]:
        """The noise level of each row."""
        masked, counted = (real & ~shown).sum(1), self.rows.length[lanes.row]  # (R,) each
        if self.denoiser.bos == "official":
            counted = counted - self.rows.given[lanes.row].sum(1)
        return {"sigma": self.denoiser.noise_level(masked.double() / counted)}


class LevelView(View):
    """A SEDD denoiser that is told the noise level of each lane; equal rows of different levels are kept apart."""

    def __init__(self, denoiser: SEDD, rows: Rows, level: Callable[[Lanes], torch.Tensor]):
        super().__init__(denoiser, rows)
        self._level = level

    def cells(self, lanes: Lanes) -> Cells:
        return self._evaluate(lanes, *self._input(lanes))

    def _told(self, lanes: Lanes, shown: torch.Tensor, real: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"sigma": self._level(lanes).float()}
