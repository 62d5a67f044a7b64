"""The denoiser: a network that is opened on rows, as a function from lanes to predictions."""

from __future__ import annotations

from lm_eval_duel.core.block_causal import BlockCausalView
from lm_eval_duel.core.lanes import Rows
from lm_eval_duel.core.network import Network
from lm_eval_duel.core.noise_view import NoiseView
from lm_eval_duel.core.view import View


class Denoiser(Network):
    """A network, opened on windows: masked rows in, a distribution over tokens at each masked position out.

    To bring your own network, subclass it and implement the methods of `Network`: `head`, and `features` or `stream`.
    """

    def open(self, rows: Rows, generating: bool = False) -> View:
        """A view of one group of windows, for scoring or for generating."""
        if self.noise_training is not None:
            return NoiseView(self, rows)
        if self.by_blocks or (self.attention == "causal" and self.shift):
            return BlockCausalView(self, rows, generating)
        return View(self, rows)
