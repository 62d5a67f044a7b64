"""Classifier-free guidance: a wrapper around a denoiser, with an entry of its own in the spec.

    logits = unconditional + (1 + scale) (conditional - unconditional)

as in LLaDA's code. In the unconditional row, context and suffix are masked.

Shapes: R lanes, C masked positions, U rows of features that the LM head runs on, D features, V tokens.
"""

from __future__ import annotations

import dataclasses

import torch

from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.core.lanes import Lanes, Rows
from lm_eval_duel.core.view import Positions, View
from lm_eval_duel.denoisers.wrappers.base import Wrapper
from lm_eval_duel.errors import DuelError
from lm_eval_duel.fingerprint import number


class Guided(Wrapper):
    """A bidirectional denoiser under classifier-free guidance; two forwards a step."""

    def __init__(self, plain: Denoiser, scale: float):
        if plain.attention != "bidirectional" or plain.shift:
            raise DuelError(
                f"cfg_scale masks the whole context, and a {plain.attention} network"
                f"{' with shifted logits' if plain.shift else ''} cannot predict without one; leave cfg_scale out."
            )
        if plain.needs_visible:
            raise DuelError(
                "cfg_scale masks the whole context, and this network scales its input by the share of visible tokens: "
                "without any it divides 0 by 0. Leave cfg_scale out."
            )
        super().__init__(plain)
        self.scale = scale

    def head(self, features: torch.Tensor) -> torch.Tensor:
        conditional, unconditional = (self.plain.head(half) for half in features.unbind(1))  # (U, V) each
        if conditional.dtype != torch.float64:
            conditional, unconditional = conditional.float(), unconditional.float()
        return unconditional + (1 + self.scale) * (conditional - unconditional)

    def open(self, rows: Rows, generating: bool = False) -> View:
        return GuidedView(self, rows, generating)

    def describe(self) -> dict[str, object]:
        return {**self.plain.describe(), "guidance": f"classifier-free, cfg_scale={number(self.scale)}"}


class GuidedView(View):
    """A guided denoiser opened on a group of rows: a view of the rows, and one with context and suffix masked."""

    def __init__(self, denoiser: Guided, rows: Rows, generating: bool):
        super().__init__(denoiser, rows)
        bare = dataclasses.replace(rows, visible=torch.zeros_like(rows.visible))
        self.views = [denoiser.plain.open(part, generating) for part in (rows, bare)]

    def cost(self, lanes: Lanes) -> torch.Tensor:
        return sum(view.cost(lanes) for view in self.views)  # (R,)

    def commit(self, lanes: Lanes) -> None:
        for view in self.views:
            view.commit(lanes)

    def positions(self, lanes: Lanes) -> Positions:
        bare = dataclasses.replace(
            lanes, tokens=lanes.tokens.masked_fill(lanes.columns < lanes.origin[:, None], -1)
        )  # context inside a block is masked too
        halves = [view.positions(part) for view, part in zip(self.views, (lanes, bare), strict=True)]
        self.forwards = sum(view.forwards for view in self.views)
        self.evaluated = sum(view.evaluated for view in self.views)
        conditional, index, all_mask = halves[0]  # (U, D), (C,), (R,)
        position = index.new_empty(
            len(conditional)
        )  # (U,) a masked position of each: equal lanes stay equal without context
        position[index] = torch.arange(len(index), device=index.device)
        unconditional = halves[1].features[halves[1].row[position]]  # (U, D)
        return Positions(torch.stack([conditional, unconditional], dim=1), index, all_mask)
