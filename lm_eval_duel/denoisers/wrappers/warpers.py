"""Temperature, top-k and top-p: a denoiser wrapped around a denoiser, another spec with its own name in the results.

    logits / temperature, then the k largest of each cell, then the fewest tokens whose probabilities add up to top_p

Shapes: U cells the head is run at, D features, V tokens.
"""

from __future__ import annotations

import math

import torch

from lm_eval_duel.arguments import require_finite
from lm_eval_duel.denoisers.base import Cells, Denoiser, KeysValues, View
from lm_eval_duel.denoisers.wrappers.base import Wrapper
from lm_eval_duel.engine.lanes import Lanes, Rows
from lm_eval_duel.errors import DuelError
from lm_eval_duel.fingerprint import number
from lm_eval_duel.rules import Rule


class Tempered(Wrapper):
    """`plain` with its distributions sharpened (temperature < 1), flattened or cut.

    `top_k`: tokens kept; None: all. `top_p`: kept are the fewest most probable tokens that hold at least this much.
    Of equal logits the lowest id is kept first. Raises DuelError for values that are none of these.
    """

    def __init__(
        self,
        plain: Denoiser,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
    ):
        temperature, top_p = (1.0 if value is None else value for value in (temperature, top_p))
        if not 0 < temperature < math.inf:
            raise DuelError(f"temperature is a number above 0 (0 is decoding, not a distribution); got {temperature}.")
        require_finite("temperature", temperature, 1 / temperature)
        if top_k is not None and top_k < 1:
            raise DuelError(f"top_k is a number of tokens, at least 1; got {top_k}.")
        if not 0 < top_p <= 1:
            raise DuelError(f"top_p is a probability above 0, at most 1; got {top_p}.")
        super().__init__(plain)
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p

    def stream(self, *arguments: torch.Tensor, **options: torch.Tensor) -> tuple[torch.Tensor, list[KeysValues]]:
        return self.plain.stream(*arguments, **options)

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
            before = ordered.double().softmax(1).cumsum(1).roll(1, 1)  # (U, V) held by the tokens before each
            before[:, 0] = 0
            ordered = ordered.masked_fill(before >= self.top_p, -math.inf)
        return torch.empty_like(logits).scatter_(1, ids, ordered)

    def open(self, rows: Rows, generating: bool = False) -> View:
        view = self.plain.open(rows, generating)
        return TemperedView(self, view)

    def describe(self) -> dict[str, object]:
        return {**self.plain.describe(), "tempered": self.words}

    def ties(self, rule: Rule) -> str | None:
        """A sentence where one token is left in every cell, so that `rule` cannot tell cells apart; else None.

        The most probable of V tokens has at least 1/V, so a top_p of at most that keeps it alone.
        """
        left = "top_k=1" if self.top_k == 1 else f"top_p={self.top_p!r}"
        if rule.fixed or (self.top_k != 1 and self.top_p * int((~self.excluded).sum()) > 1):
            return None
        return (
            f"{left} leaves one token in every cell, with probability 1, so all cells tie and rule={rule} reveals from "
            "left to right (a rule that bounds a probability or an entropy: all that is left of a block at once). For "
            "the most probable tokens in the rule's own order, decode instead (do_sample: false)"
        )

    @property
    def words(self) -> str:
        """What is done to the distributions, as in the results."""
        parts = [f"temperature={number(self.temperature)}"]
        parts += [f"top_k={self.top_k}"] if self.top_k is not None else []
        return ", ".join(parts + ([f"top_p={number(self.top_p)}"] if self.top_p < 1 else []))


class TemperedView(View):
    """A view of the plain denoiser whose predictions are those of the tempered one."""

    def __init__(self, denoiser: Tempered, plain: View):
        super().__init__(denoiser, plain.rows)
        self.plain = plain

    def cost(self, lanes: Lanes) -> torch.Tensor:
        return self.plain.cost(lanes)

    def commit(self, lanes: Lanes) -> None:
        self.plain.commit(lanes)

    def cells(self, lanes: Lanes) -> Cells:
        found = self.plain.cells(lanes)
        self.forwards, self.evaluated = self.plain.forwards, self.plain.evaluated
        return found
