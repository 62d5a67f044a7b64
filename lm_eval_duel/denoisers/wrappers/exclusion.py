"""Tokens that are left out of the vocabulary: a wrapper around a denoiser, with an entry of its own in the spec.

LLaDA's `logits_eos_inf` is this, with the id of EOS. It is another distribution, in which texts with such a token have
probability 0.
"""

from __future__ import annotations

from collections.abc import Sequence

from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.denoisers.wrappers.base import Wrapper
from lm_eval_duel.errors import DuelError


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
        self.excluded = plain.excluded.clone()
        self.excluded[list(self.excluded_ids)] = True
        if self.excluded.all():
            raise DuelError("exclude_ids leaves no token of the vocabulary; name fewer ids.")

    def describe(self) -> dict[str, object]:
        return {**self.plain.describe(), "exclude_ids": "+".join(map(str, self.excluded_ids))}
