"""Tokens that are left out of the vocabulary: a wrapper around a denoiser, with an entry of its own in the spec.

LLaDA's `logits_eos_inf` is this, with the id of EOS. It is another distribution, in which texts with such a token have
probability 0.

Shapes: U rows of features that the LM head runs on, D features, V tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.core.lanes import Rows
from lm_eval_duel.core.network import KeysValues
from lm_eval_duel.core.view import View
from lm_eval_duel.denoisers.wrappers.base import WrappedView, Wrapper
from lm_eval_duel.errors import DuelError
from lm_eval_duel.rules import Rule


class Excluding(Wrapper):
    """`plain` with `ids` out of the vocabulary before it normalises. They may stand in a context.

    Raises:
        DuelError: an id is not a token of the network, or no token is left.
    """

    def __init__(self, plain: Denoiser, ids: Sequence[int]):
        super().__init__(plain)
        self.excluded_ids = tuple(sorted({*plain.excluded_ids, *ids}))
        for token in ids:
            if not 0 <= token < plain.vocab_size:
                raise DuelError(f"exclude_ids has id {token}; the network's ids are 0 to {plain.vocab_size - 1}.")
            if token == plain.mask_id:
                raise DuelError(
                    f"exclude_ids has id {token}, which is [MASK]: it is excluded in any case. Leave it out."
                )
        self._excluded = plain.excluded.clone()  # (V,)
        self._excluded[list(self.excluded_ids)] = True
        if self._excluded.all():
            raise DuelError("exclude_ids leaves no token of the vocabulary; name fewer ids.")

    @property
    def excluded(self) -> torch.Tensor:
        return self._excluded

    def stream(self, *arguments: torch.Tensor, **keywords: torch.Tensor) -> tuple[torch.Tensor, list[KeysValues]]:
        return self.plain.stream(*arguments, **keywords)

    def head(self, features: torch.Tensor) -> torch.Tensor:
        return self.plain.head(features)

    def open(self, rows: Rows, generating: bool = False) -> View:
        return WrappedView(self, self.plain.open(rows, generating))

    def describe(self) -> dict[str, object]:
        return {**self.plain.describe(), "exclude_ids": "+".join(map(str, self.excluded_ids))}

    def ties(self, rule: Rule) -> str | None:
        return self.plain.ties(rule)
