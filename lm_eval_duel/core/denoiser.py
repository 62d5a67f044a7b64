"""The denoiser: a network that is opened on windows."""

from __future__ import annotations

from lm_eval_duel.core.block_causal import BlockCausalView
from lm_eval_duel.core.lanes import Rows
from lm_eval_duel.core.network import Network
from lm_eval_duel.core.view import NoiseView, View


class Denoiser(Network):
    """A network, opened on windows: masked rows in, a distribution over tokens at each masked position out.

    To bring your own network, subclass it and define four members:

        class Mine(Denoiser):
            vocab_size = 50258    # columns of the logits
            mask_id = 50257
            max_length = 1024

            def features(self, ids, real):
                return logits    # (R, L, V) of rows of ids (R, L)

    `Network` lists what else may be defined: `head`, so that logits are computed at masked positions only; `device`;
    `stream` in place of `features` for a network that works by blocks.
    """

    def open(self, rows: Rows, generating: bool = False) -> View:
        """A view of one group of windows, for scoring or for generating.

        Where the noise is random tokens, masked positions show noise, as in commit-once samplers.
        """
        if self.by_blocks or (self.attention == "causal" and self.shift):
            return BlockCausalView(self, rows, generating)
        return View(self, rows)

    def open_noised(self, rows: Rows) -> NoiseView:
        """A view of one group of windows whose targets are noised, for the bound of ancestral sampling."""
        return NoiseView(self, rows)
