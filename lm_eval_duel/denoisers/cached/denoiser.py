"""The cached samplers of Fast-dLLM, with a prefix or a dual cache: a denoiser around a denoiser.

At a block's start the whole row is evaluated once. Later steps evaluate some of its positions, which attend to the
kept keys and values of the others:

    cache=dual      evaluates the block's positions
    cache=prefix    evaluates the positions from the block's start on

With the targets known, what is kept depends only on the targets before the block and on the row's layout, never on the
order in which the block is revealed. So the theorem holds, and all blocks are evaluated side by side. It is another
distribution than without a cache, so the cache is part of the spec.

Shapes: L row length, P rows of a call, Q positions of a call, K keys, V tokens.
"""

from __future__ import annotations

import copy

import torch

from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.core.lanes import Rows
from lm_eval_duel.core.network import KeysValues
from lm_eval_duel.core.view import View
from lm_eval_duel.denoisers import self_tests
from lm_eval_duel.denoisers.cached.kept_keys import CachedStep
from lm_eval_duel.denoisers.cached.steering import Attentions, NotSteered, Streams
from lm_eval_duel.denoisers.cached.view import CachedView
from lm_eval_duel.denoisers.load_options import CACHES
from lm_eval_duel.denoisers.wrappers import Wrapper
from lm_eval_duel.errors import DuelError, require_known


class Cached(Wrapper):
    """A bidirectional denoiser under a prefix or dual cache.

    Raises DuelError, with the reason, for a network that does not support it.
    """

    calls = ("begin", "step", "head")  # network calls that a view makes

    def __init__(self, plain: Denoiser, cache: str):
        require_known("value of cache", [cache], CACHES)
        _require_cacheable(plain, cache)
        super().__init__(plain)
        self.cache = cache
        try:
            self._steering = _steering(plain)
            with torch.inference_mode():
                self.kept = self._try_out()  # numbers kept per position of a row
        except (NotSteered, TypeError, RuntimeError, ValueError, IndexError, AttributeError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
            raise DuelError(
                f"cache={cache} is not possible with this network ({type(_inside(plain)).__name__}): {reason}. "
                "Use cache=none (leave cache out)."
            ) from error

    def features(self, ids: torch.Tensor, real: torch.Tensor | None, **more: torch.Tensor) -> torch.Tensor:
        return self.plain.features(ids, real, **more)

    @torch.inference_mode()
    def begin(
        self, ids: torch.Tensor, real: torch.Tensor | None, columns: torch.Tensor
    ) -> tuple[torch.Tensor, list[KeysValues]]:
        """Evaluate whole rows at a block's start; see `Streams.begin`."""
        return self._steering.begin(ids, real, columns)

    @torch.inference_mode()
    def step(self, ids: torch.Tensor, step: CachedStep) -> torch.Tensor:
        """Evaluate some positions against the kept keys and values; see `Streams.step`."""
        return self._steering.step(ids, step)

    @torch.inference_mode()
    def head(self, features: torch.Tensor) -> torch.Tensor:
        return self.plain.head(features)

    def open(self, rows: Rows, generating: bool = False) -> View:
        return CachedView(self, rows)

    def describe(self) -> dict[str, object]:
        return {**self.plain.describe(), "cache": self.cache}

    def _try_out(self) -> int:
        """The number of values kept per position; raises NotSteered if a step without a reveal differs from the row."""
        row = self_tests.random_rows(self)[:1]  # (1, L)
        length = row.shape[1]
        first, last = length // 3, max(length // 3 + 1, length - 2)
        row[:, first:last] = self.mask_id
        columns = torch.arange(length, device=row.device)[None]  # (1, L)
        whole, layers = self.begin(row, None, columns)
        outside = torch.cat([columns[:, :first], columns[:, last:]], 1)  # (1, K)
        past = [tuple(plane[:, :, outside[0].to(plane.device)] for plane in layer) for layer in layers]
        own = columns[:, first:last]  # (1, Q)
        step = CachedStep(own, None, past, torch.cat([outside, own], 1), own - first)
        again = self.step(row[:, first:last], step)
        logits = [self.head(features).masked_fill(self.excluded, 0) for features in (whole[0, first:last], again[0])]
        fine = self_tests.BATCH_TOLERANCE
        if not self_tests.relative_difference(*logits) <= self_tests.tolerance(self, logits[0], fine):
            raise NotSteered("a step of a block in which nothing is revealed differs from the evaluation of the row")
        return sum(plane.shape[1] * plane.shape[3] for layer in layers for plane in layer)


def under_cache(denoiser: Denoiser, cache: str) -> Denoiser:
    """`denoiser` with its network under a cache; guidance and temperature stay around it."""
    if not isinstance(denoiser, Wrapper):
        return Cached(denoiser, cache)
    twin = copy.copy(denoiser)
    twin.plain, twin.cache = under_cache(denoiser.plain, cache), cache
    return twin


def _require_cacheable(plain: Denoiser, cache: str) -> None:
    """Raise DuelError, with the reason, for a kind of network that does not support a cache."""
    if isinstance(plain, Wrapper):
        raise DuelError(
            f"cache={cache} wraps the plain network; guidance and temperature wrap the cached one: "
            f"{type(plain).__name__}(Cached(network, ...), ...)."
        )
    if plain.attention != "bidirectional":
        reason = (
            f"is for bidirectional networks; this one is {plain.attention} and keeps its clean keys and values anyway"
        )
    elif plain.needs_visible:
        reason = (
            "does not go with a network that scales its input by the masked share of the row (token_dropout of ESM)"
        )
    elif type(plain).open is not Denoiser.open:
        reason = f"does not go with a {plain.family} network: its noise level, and so every key, changes at each step"
    else:
        return
    raise DuelError(f"cache={cache} {reason}. Leave cache out.")


def _steering(plain: Denoiser) -> Streams | Attentions:
    """A driver for the way in which this network takes kept keys and values; raises NotSteered if it takes none."""
    if getattr(plain, "steers_attention", False):
        return Attentions(plain)
    if type(_inside(plain)).stream is Denoiser.stream:
        raise NotSteered("it takes no keys and values from outside")
    return Streams(plain)


def _inside(plain: Denoiser) -> Denoiser:
    """The denoiser that a network in memory wraps; any other unchanged."""
    inside: Denoiser = getattr(plain, "plain", plain)
    return inside
