"""Denoisers around a denoiser: classifier-free guidance. A cache is one, too (cached/denoiser.py).

A function of logits alone, such as a temperature, needs no denoiser of its own: it is a filter (filters.py).

Shapes: R lanes, C masked positions, U rows of features that the LM head runs on, D features, V tokens.
"""

from __future__ import annotations

import contextlib
import dataclasses

import torch

from lm_eval_duel.core.denoiser import Denoiser, Positions, View
from lm_eval_duel.core.lanes import Lanes, Rows
from lm_eval_duel.core.network import KeysValues
from lm_eval_duel.errors import DuelError
from lm_eval_duel.fingerprint import number


class Wrapper(Denoiser):
    """The base class of wrappers: every attribute of `plain`, with distributions that a subclass changes."""

    def __init__(self, plain: Denoiser):
        self.plain = plain
        self.resemble(plain)
        self.model = getattr(plain, "model", None) or getattr(plain, "network", None)

    @property
    def coarse(self) -> bool:
        return self.plain.coarse

    @property
    def layers(self) -> torch.nn.Module:
        return self.plain.layers

    def evaluating(self) -> contextlib.AbstractContextManager[None]:
        return self.plain.evaluating()

    def stream(
        self,
        *arguments: torch.Tensor,
        **keywords: torch.Tensor,
    ) -> tuple[torch.Tensor, list[KeysValues]]:
        return self.plain.stream(*arguments, **keywords)

    def head(self, features: torch.Tensor) -> torch.Tensor:
        return self.plain.head(features)


class Guided(Wrapper):
    """A bidirectional denoiser under classifier-free guidance, as in LLaDA's code; two forwards a step.

        logits = unconditional + (1 + scale) (conditional - unconditional)

    In the unconditional row, context and suffix are masked.
    """

    def __init__(self, plain: Denoiser, scale: float):
        if plain.attention != "bidirectional" or plain.shift:
            kind = f"a {plain.attention} network"
            if plain.shift:
                kind += " with shifted logits"
            raise DuelError(
                f"cfg_scale masks the whole context, and {kind} cannot predict without one; leave cfg_scale out."
            )
        if plain.needs_visible:
            raise DuelError(
                "cfg_scale masks the whole context, and without visible tokens this network divides 0 by 0. Leave "
                "cfg_scale out."
            )
        super().__init__(plain)
        self.hides_given = True
        self.scale = scale

    def head(self, features: torch.Tensor) -> torch.Tensor:
        conditional = self.plain.head(features[:, 0])  # (U, V)
        unconditional = self.plain.head(features[:, 1])  # (U, V)
        if conditional.dtype != torch.float64:
            conditional = conditional.float()
            unconditional = unconditional.float()
        return unconditional + (1 + self.scale) * (conditional - unconditional)

    def open(self, rows: Rows, generating: bool = False) -> View:
        return GuidedView(self, rows, generating)

    def describe(self) -> dict[str, object]:
        guidance = f"classifier-free, cfg_scale={number(self.scale)}"
        return {**self.plain.describe(), "guidance": guidance}


class GuidedView(View):
    """A guided denoiser opened on a group of rows: a view of the rows, and one with context and suffix masked."""

    def __init__(self, denoiser: Guided, rows: Rows, generating: bool):
        super().__init__(denoiser, rows)
        bare = dataclasses.replace(rows, visible=torch.zeros_like(rows.visible))
        self.conditional = denoiser.plain.open(rows, generating)
        self.unconditional = denoiser.plain.open(bare, generating)

    def cost(self, lanes: Lanes) -> torch.Tensor:
        return self.conditional.cost(lanes) + self.unconditional.cost(lanes)  # (R,)

    def commit(self, lanes: Lanes) -> None:
        self.conditional.commit(lanes)
        self.unconditional.commit(lanes)

    def positions(self, lanes: Lanes) -> Positions:
        # A block that is counted from the row may hold a part of the context, which is masked as well.
        tokens = lanes.tokens.masked_fill(lanes.columns < lanes.origin[:, None], -1)
        bare = dataclasses.replace(lanes, tokens=tokens)
        given = self.conditional.positions(lanes)
        masked = self.unconditional.positions(bare)
        self.forwards = self.conditional.forwards + self.unconditional.forwards
        self.evaluated = self.conditional.evaluated + self.unconditional.evaluated

        # Masked positions that share a row of features under the context share one without it, too: lanes that are
        # equal stay equal. So any of these positions finds the row in the other half.
        position = given.row.new_empty(len(given.features))  # (U,)
        position[given.row] = torch.arange(len(given.row), device=given.row.device)
        unconditional = masked.features[masked.row[position]]  # (U, D)
        both = torch.stack([given.features, unconditional], dim=1)  # (U, 2, D)
        return Positions(both, given.row, given.all_mask)
