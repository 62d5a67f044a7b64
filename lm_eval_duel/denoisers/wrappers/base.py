"""A denoiser that wraps a denoiser: the same network, vocabulary and blocks, with other distributions."""

from __future__ import annotations

import torch

from lm_eval_duel.denoisers.base import Denoiser


class Wrapper(Denoiser):
    """Has every attribute of `plain`, the wrapped denoiser; a subclass changes its distributions."""

    def __init__(self, plain: Denoiser):
        self.plain = plain
        for name in Denoiser.__annotations__:
            setattr(self, name, getattr(plain, name))
        self.model = getattr(plain, "model", None) or getattr(plain, "network", None)

    @property
    def layers(self) -> torch.nn.Module:
        return self.plain.layers

    @property
    def excluded(self) -> torch.Tensor:
        return self.plain.excluded
