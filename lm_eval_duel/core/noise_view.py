"""The view of windows whose targets are noised, for the bound of ancestral sampling (estimators/noised_elbo.py).

Shapes: R lanes, L row length, W span width, C positions, D features, V tokens.
"""

from __future__ import annotations

import torch

from lm_eval_duel.core.lanes import Lanes
from lm_eval_duel.core.network import Evaluator
from lm_eval_duel.core.predictions import Predictions


class NoiseView(Evaluator):
    """A network opened on a group of rows: noisy tokens in, a distribution at every position of a span out.

    A lane sees the context, its span as given, and the suffix. A network with canvases (`block`) sees the targets
    before its span, and nothing after it.
    """

    def predictions(
        self, lanes: Lanes, noisy: torch.Tensor, t: torch.Tensor, before: torch.Tensor | None = None
    ) -> Predictions:
        """The predictions at all positions of `lanes`; the arguments are those of `features`."""
        features = self.features(lanes, noisy, t, before)[lanes.masked_at]  # (C, D)
        every = torch.arange(len(features), device=features.device)  # (C,)
        no_ties = torch.zeros_like(lanes.row, dtype=torch.bool)  # (R,)
        network = self.denoiser
        return Predictions(
            lanes.masked, no_ties, features, every, network.head, network.excluded, filters=network.filters
        )

    def features(
        self, lanes: Lanes, noisy: torch.Tensor, t: torch.Tensor, before: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The input of the LM head (R, W, D) at all columns of `lanes`, which show `noisy` (R, W) at times t (R,).

        `before`: the logits (R, W, V) of the pass before. Only the views of networks with self-conditioning read them.
        """
        rows = self.rows
        row = lanes.row
        columns = lanes.columns  # (R, W)
        end = rows.length[row] if self.denoiser.block is None else lanes.start + lanes.width  # (R,)
        length = int(end.max())
        real = torch.arange(length, device=row.device) < end[:, None]  # (R, L)

        at = torch.where(lanes.masked, columns, length)  # (R, W) other positions go into an extra column
        ids = rows.ids.new_zeros(len(row), length + 1)  # (R, L + 1)
        ids[:, :length] = rows.ids[row, :length]
        ids = ids.scatter_(1, at, noisy)[:, :length]  # (R, L)

        columns = columns.clamp(max=length - 1)
        padding = None if real.all() else real
        self.forwards += 1
        self.evaluated += len(row)
        return self.denoiser.features_at(columns, ids, padding, **self.denoiser.noise_inputs(t))
