"""A network described by its config and its tokenizer, before any weight is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from lm_eval_duel.core.denoiser import Denoiser


@dataclasses.dataclass(frozen=True)
class Unfilled:
    """A network without its weights, to load, to plan, or to fill with random weights.

    `denoiser`: its kind and its limits. `build`: the network without its weights, on torch's default device and in its
    default dtype. `fill`: reads the weights, tests the network, and returns the denoiser.
    """

    denoiser: Denoiser
    build: Callable[[], Any]
    fill: Callable[[], Denoiser]
