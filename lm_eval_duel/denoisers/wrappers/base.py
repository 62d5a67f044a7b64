"""A denoiser that wraps a denoiser: the same network, vocabulary and blocks, with other distributions."""

from __future__ import annotations

import contextlib

import torch

from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.core.lanes import Lanes, Rows
from lm_eval_duel.core.network import KeysValues, Network
from lm_eval_duel.core.view import Positions, View
from lm_eval_duel.rules import Rule


class Wrapper(Denoiser):
    """Has every attribute of `plain`, the wrapped denoiser; a subclass changes its distributions."""

    def __init__(self, plain: Denoiser):
        self.plain = plain
        for name in Network.__annotations__:
            setattr(self, name, getattr(plain, name))
        self.model = getattr(plain, "model", None) or getattr(plain, "network", None)

    @property
    def coarse(self) -> bool:
        return self.plain.coarse

    @property
    def layers(self) -> torch.nn.Module:
        return self.plain.layers

    def evaluating(self) -> contextlib.AbstractContextManager[None]:
        return self.plain.evaluating()

    def stream(self, *arguments: torch.Tensor, **keywords: torch.Tensor) -> tuple[torch.Tensor, list[KeysValues]]:
        return self.plain.stream(*arguments, **keywords)

    def head(self, features: torch.Tensor) -> torch.Tensor:
        return self.plain.head(features)

    def open(self, rows: Rows, generating: bool = False) -> View:
        return WrappedView(self, self.plain.open(rows, generating))

    def ties(self, rule: Rule) -> str | None:
        return self.plain.ties(rule)


class WrappedView(View):
    """A view of the plain denoiser whose predictions are those of the wrapper around it."""

    def __init__(self, denoiser: Wrapper, plain: View):
        super().__init__(denoiser, plain.rows)
        self.plain = plain

    def cost(self, lanes: Lanes) -> torch.Tensor:
        return self.plain.cost(lanes)

    def commit(self, lanes: Lanes) -> None:
        self.plain.commit(lanes)

    def positions(self, lanes: Lanes) -> Positions:
        positions = self.plain.positions(lanes)
        self.forwards, self.evaluated = self.plain.forwards, self.plain.evaluated
        return positions
