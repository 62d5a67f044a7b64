"""Temperature, top-k and top-p: a wrapper around a denoiser, with an entry of its own in the spec.

    logits / temperature, then the k largest of each position, then the fewest tokens that have probability top_p

Shapes: U rows of features that the LM head runs on, D features, V tokens.
"""

from __future__ import annotations

import math

import torch

from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.denoisers.wrappers.base import Wrapper
from lm_eval_duel.fingerprint import number
from lm_eval_duel.rules import Rule


class Warped(Wrapper):
    """`plain` with its distributions sharpened (temperature < 1), flattened (> 1) or truncated.

    `top_k`: the number of tokens kept; None keeps all. `top_p`: keep the fewest most probable tokens that together have
    at least this probability. Of equal logits the lowest id is kept first.
    """

    def __init__(
        self,
        plain: Denoiser,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
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

    def describe(self) -> dict[str, object]:
        return {**self.plain.describe(), "warpers": self.words}

    def ties(self, rule: Rule) -> str | None:
        """A sentence if only one token is left in every position, so that `rule` cannot tell positions apart; otherwise
        None.

        The most probable of V tokens has at least 1/V, so a top_p of at most that keeps it alone.
        """
        warper = "top_k=1" if self.top_k == 1 else f"top_p={self.top_p!r}"
        if rule.fixed or (self.top_k != 1 and self.top_p * int((~self.excluded).sum()) > 1):
            return None
        return (
            f"{warper} leaves one token in every position, with probability 1, so all positions tie and "
            f"rule={rule} reveals from left to right (a rule with a bound on a probability or an entropy: the "
            "rest of a block at once). For the most probable tokens in the rule's own order, use do_sample: false"
        )

    @property
    def words(self) -> str:
        """The warpers as text, for the spec."""
        parts = [f"temperature={number(self.temperature)}"]
        parts += [f"top_k={self.top_k}"] if self.top_k is not None else []
        return ", ".join(parts + ([f"top_p={number(self.top_p)}"] if self.top_p < 1 else []))
