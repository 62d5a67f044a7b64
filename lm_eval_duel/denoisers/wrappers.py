"""Denoisers around a denoiser: the same network and blocks with other distributions, each an entry of the spec.

    Excluding    tokens are left out of the vocabulary
    Guided       classifier-free guidance
    Warped       temperature, top-k, top-p

Shapes: R lanes, C masked positions, U rows of features that the LM head runs on, D features, V tokens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Sequence

import torch

from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.core.lanes import Lanes, Rows
from lm_eval_duel.core.network import KeysValues, Positions, View
from lm_eval_duel.errors import DuelError
from lm_eval_duel.fingerprint import number
from lm_eval_duel.rules import Rule


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

    def stream(self, *arguments: torch.Tensor, **keywords: torch.Tensor) -> tuple[torch.Tensor, list[KeysValues]]:
        return self.plain.stream(*arguments, **keywords)

    def head(self, features: torch.Tensor) -> torch.Tensor:
        return self.plain.head(features)

    def open(self, rows: Rows, generating: bool = False) -> View:
        return WrappedView(self, self.plain.open(rows, generating))

    def ties(self, rule: Rule) -> str | None:
        return self.plain.ties(rule)


class WrappedView(View):
    """A view of the plain denoiser, with the predictions of the wrapper around it."""

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


class Excluding(Wrapper):
    """`plain` with `ids` excluded from the vocabulary before it normalises (LLaDA's `logits_eos_inf`, with EOS).

    Contexts may hold them. Texts with such a token have probability 0.
    """

    def __init__(self, plain: Denoiser, ids: Sequence[int]):
        super().__init__(plain)
        self.excluded_ids = tuple(sorted({*plain.excluded_ids, *ids}))
        for token in ids:
            if not 0 <= token < plain.vocab_size:
                raise DuelError(f"exclude_ids has id {token}; the network's ids are 0 to {plain.vocab_size - 1}.")
            if token == plain.mask_id:
                raise DuelError(f"exclude_ids has id {token}, which is [MASK] and excluded in any case: leave it out.")
        self.excluded = plain.excluded.clone()
        self.excluded[list(self.excluded_ids)] = True
        if self.excluded.all():
            raise DuelError("exclude_ids leaves no token of the vocabulary; name fewer ids.")

    def describe(self) -> dict[str, object]:
        return {**self.plain.describe(), "exclude_ids": "+".join(map(str, self.excluded_ids))}


class Guided(Wrapper):
    """A bidirectional denoiser under classifier-free guidance, as in LLaDA's code; two forwards a step.

        logits = unconditional + (1 + scale) (conditional - unconditional)

    In the unconditional row, context and suffix are masked.
    """

    def __init__(self, plain: Denoiser, scale: float):
        if plain.attention != "bidirectional" or plain.shift:
            raise DuelError(
                f"cfg_scale masks the whole context, and a {plain.attention} network"
                f"{' with shifted logits' if plain.shift else ''} cannot predict without one; leave cfg_scale out."
            )
        if plain.needs_visible:
            raise DuelError(
                "cfg_scale masks the whole context, and without visible tokens this network divides 0 by 0. Leave "
                "cfg_scale out."
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
        tokens = lanes.tokens.masked_fill(lanes.columns < lanes.origin[:, None], -1)  # context inside a block, too
        bare = dataclasses.replace(lanes, tokens=tokens)
        halves = [view.positions(part) for view, part in zip(self.views, (lanes, bare), strict=True)]
        self.forwards = sum(view.forwards for view in self.views)
        self.evaluated = sum(view.evaluated for view in self.views)
        conditional, index, all_mask, _ = halves[0]  # (U, D), (C,), (R,)
        # a masked position of each: equal lanes stay equal without context
        position = index.new_empty(len(conditional))  # (U,)
        position[index] = torch.arange(len(index), device=index.device)
        unconditional = halves[1].features[halves[1].row[position]]  # (U, D)
        return Positions(torch.stack([conditional, unconditional], dim=1), index, all_mask)


class Warped(Wrapper):
    """`plain` with its distributions sharpened (temperature < 1), flattened (> 1) or truncated.

    logits / temperature, then the `top_k` largest of each position, then the fewest most probable tokens that together
    have at least probability `top_p`. Of equal logits the lowest id is kept first.
    """

    def __init__(
        self, plain: Denoiser, temperature: float | None = None, top_k: int | None = None, top_p: float | None = None
    ):
        super().__init__(plain)
        self.top_k = top_k
        self.temperature, self.top_p = (1.0 if value is None else value for value in (temperature, top_p))

    def head(self, features: torch.Tensor) -> torch.Tensor:
        logits = self.plain.head(features)  # (U, V)
        if logits.dtype != torch.float64:
            logits = logits.float()
        logits = logits.masked_fill(self.excluded, -math.inf) / self.temperature
        if self.top_k is None and self.top_p == 1:
            return logits
        ordered, ids = logits.sort(dim=1, descending=True, stable=True)  # (U, V)
        if self.top_k is not None:
            ordered[:, self.top_k :] = -math.inf
        if self.top_p < 1:
            before = ordered.double().softmax(1).cumsum(1).roll(1, 1)  # (U, V) probability of the tokens before each
            before[:, 0] = 0
            ordered = ordered.masked_fill(before >= self.top_p, -math.inf)
        return torch.empty_like(logits).scatter_(1, ids, ordered)

    def smooth_head(self, features: torch.Tensor) -> torch.Tensor:
        return self.plain.smooth_head(features)

    @property
    def warping(self) -> str:
        """The warpers as text, for the spec."""
        parts = [f"temperature={number(self.temperature)}"]
        parts += [f"top_k={self.top_k}"] if self.top_k is not None else []
        return ", ".join(parts + ([f"top_p={number(self.top_p)}"] if self.top_p < 1 else []))

    def describe(self) -> dict[str, object]:
        return {**self.plain.describe(), "warpers": self.warping}

    def ties(self, rule: Rule) -> str | None:
        """The reason that all positions tie under `rule`, as a sentence, if only one token is left in each; else None.

        The most probable of V tokens has at least 1/V, so a top_p of at most that keeps it alone.
        """
        warper = "top_k=1" if self.top_k == 1 else f"top_p={self.top_p!r}"
        if rule.fixed or (self.top_k != 1 and self.top_p * int((~self.excluded).sum()) > 1):
            return None
        return (
            f"{warper} leaves one token in every position, so all positions tie and rule={rule} reveals from left to "
            "right (a rule with a bound on a probability or an entropy: the rest of a block at once). For the most "
            "probable tokens in the rule's own order, use do_sample: false"
        )


def is_guided(denoiser: Denoiser) -> bool:
    """True for classifier-free guidance, perhaps inside other wrappers."""
    return isinstance(denoiser, Guided) or (isinstance(denoiser, Wrapper) and is_guided(denoiser.plain))
