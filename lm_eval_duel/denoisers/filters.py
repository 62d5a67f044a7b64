"""Functions of logits that make another distribution of the same network: temperature, top-k, top-p, excluded ids.

They are a list on the denoiser (`Network.filters`), applied in order to clean logits, and so after guidance, which
combines raw ones. Each is an entry of the spec.

Shapes: U rows of logits, V tokens.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence

import torch

from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.errors import DuelError
from lm_eval_duel.fingerprint import number
from lm_eval_duel.rules import Rule


@dataclasses.dataclass(frozen=True)
class Warp:
    """A distribution sharpened (temperature < 1), flattened (> 1) or truncated.

    logits / temperature, then the `top_k` largest of each position, then the fewest most probable tokens that together
    have at least probability `top_p`. Of equal logits the lowest id is kept first.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    before: tuple[Warp, ...] = ()  # those of the network that come before this one
    reads_step = False

    @property
    def truncates(self) -> bool:
        """True if some tokens get probability 0."""
        return self.top_k is not None or self.top_p < 1

    def __call__(self, logits: torch.Tensor, step: torch.Tensor | None) -> torch.Tensor:
        logits = logits / self.temperature  # (U, V)
        if not self.truncates:
            return logits
        ordered, ids = logits.sort(dim=1, descending=True, stable=True)  # (U, V)
        if self.top_k is not None:
            ordered[:, self.top_k :] = -math.inf
        if self.top_p < 1:
            up_to = ordered.double().softmax(1).cumsum(1)  # (U, V)
            before = up_to.roll(1, 1)  # the probability of the tokens before each
            before[:, 0] = 0
            ordered = ordered.masked_fill(before >= self.top_p, -math.inf)
        return torch.empty_like(logits).scatter_(1, ids, ordered)

    def __str__(self) -> str:
        parts = [f"temperature={number(self.temperature)}"]
        if self.top_k is not None:
            parts.append(f"top_k={self.top_k}")
        if self.top_p < 1:
            parts.append(f"top_p={number(self.top_p)}")
        return ", ".join(parts)

    def describe(self) -> dict[str, object]:
        """The entry of the spec, for this warp and those before it."""
        return {"warpers": ", then ".join(map(str, (*self.before, self)))}


@dataclasses.dataclass(frozen=True)
class Exclude:
    """Ids that are left out of the vocabulary before it normalises (LLaDA's `logits_eos_inf`, with EOS)."""

    ids: tuple[int, ...]
    reads_step = False
    truncates = False  # a text that holds one is refused, so float noise moves no token across a border

    def __call__(self, logits: torch.Tensor, step: torch.Tensor | None) -> torch.Tensor:
        return logits.index_fill(1, torch.tensor(self.ids, device=logits.device), -math.inf)

    def describe(self) -> dict[str, object]:
        """The entry of the spec."""
        return {"exclude_ids": "+".join(map(str, self.ids))}


def warped(
    denoiser: Denoiser,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Denoiser:
    """The same network with its distributions warped; None leaves one of these out."""
    if temperature is None:
        temperature = 1.0
    if top_p is None:
        top_p = 1.0
    before = tuple(each for each in denoiser.filters if isinstance(each, Warp))
    twin = copy.copy(denoiser)
    twin.filters = (*denoiser.filters, Warp(temperature, top_k, top_p, before))
    return twin


def excluding(denoiser: Denoiser, ids: Sequence[int]) -> Denoiser:
    """The same network without `ids` in its vocabulary: contexts may hold them, texts have probability 0.

    Raises:
        DuelError: An id is none of the network's, or [MASK], or no token is left; or the noise is random tokens, which
            are drawn from the whole vocabulary.
    """
    if denoiser.noise_training is not None:
        raise DuelError(f"exclude_ids leaves tokens out that the noise of a {denoiser.family} shows; leave it out.")
    for token in ids:
        if not 0 <= token < denoiser.vocab_size:
            raise DuelError(f"exclude_ids has id {token}; the network's ids are 0 to {denoiser.vocab_size - 1}.")
        if token == denoiser.mask_id:
            raise DuelError(f"exclude_ids has id {token}, which is [MASK] and excluded in any case: leave it out.")
    twin = copy.copy(denoiser)
    twin.excluded_ids = tuple(sorted({*denoiser.excluded_ids, *ids}))
    twin.excluded = denoiser.excluded.clone()
    twin.excluded[list(twin.excluded_ids)] = True
    if twin.excluded.all():
        raise DuelError("exclude_ids leaves no token of the vocabulary; name fewer ids.")
    twin.filters = (*denoiser.filters, Exclude(twin.excluded_ids))
    return twin


def tie_warning(denoiser: Denoiser, rule: Rule) -> str | None:
    """The reason that all positions tie under `rule`, as a sentence, if only one token is left at each; else None.

    The most probable of V tokens has at least 1/V, so a top_p of at most that keeps it alone.
    """
    left = denoiser.token_count
    for filter in denoiser.filters:
        if not isinstance(filter, Warp) or rule.fixed:
            continue
        if filter.top_k == 1 or filter.top_p * left <= 1:
            warper = "top_k=1" if filter.top_k == 1 else f"top_p={filter.top_p!r}"
            return (
                f"{warper} leaves one token at every position, so all positions tie and rule={rule} reveals from left "
                "to right (a rule with a bound on a probability or an entropy: the rest of a block at once). For the "
                "most probable tokens in the rule's own order, use do_sample: false"
            )
    return None
