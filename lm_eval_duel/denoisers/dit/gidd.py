"""GIDD trained with p_uniform 0 (von Rütte et al. 2025): MDLM's network, conditioned on the time t itself.

At p_uniform 0 its noise is masking alone: at time t a position is masked with probability t. Under an unmasking rule, t
is the masked share of the row, clamped to the times of its training. With p_uniform above 0 its sampler also replaces
revealed tokens, so such checkpoints are refused.

Shapes: R rows or lanes.
"""

from __future__ import annotations

import os
import re
from typing import Any

import torch

from lm_eval_duel.arguments import COUNT, PROBABILITY, Kind
from lm_eval_duel.denoisers.dit.denoiser import Timed
from lm_eval_duel.denoisers.dit.network import DiTConfig
from lm_eval_duel.errors import DuelError

MODEL_TYPE = "dit"  # in config.json
SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "timestep_cond_dim", "max_seq_len")
MASK = 50258  # the authors add [PAD] and [MASK] to GPT-2's tokenizer
UNIFORM = re.compile(r"p_unif-0*\.?0*[1-9]|gidd-unif")  # in the names of checkpoints with uniform noise


def entries(config: dict[str, Any], name: str, kind: Kind, *keys: str) -> list[Any]:
    """Values that the config.json of `name` must have; raises DuelError that names all that are missing."""
    values = [kind(key, config.get(key), f" in the config.json of {name}") for key in keys]
    if missing := [key for key, value in zip(keys, values, strict=True) if value is None]:
        raise DuelError(f"The config.json of {name} has no {', '.join(missing)}, which its family needs.")
    return values


def read_shape(config: dict[str, Any], name: str) -> tuple[DiTConfig, int]:
    """The network's shape and its row length; raises DuelError if it was trained with uniform noise."""
    *shape, length = entries(config, name, COUNT, *SIZES)
    uniform, margin = entries(config, name, PROBABILITY, "p_uniform", "t_eps")
    if not 0 < margin < 0.5:
        raise DuelError(f"'t_eps' is above 0 and below 0.5; got {margin:g} in the config.json of {name}.")
    if uniform or UNIFORM.search(os.path.basename(name.rstrip("/"))):
        raise DuelError(
            f"{name} is a GIDD trained with uniform noise (p_uniform {uniform:g}): its sampler replaces "
            "revealed tokens, so no order of unmasking explains a text, and the theorem does not cover it. Those with "
            "p_uniform 0 (gidd-small-p_unif-0.0) are covered."
        )
    return DiTConfig(*shape, time=True), length


class GIDD(Timed):
    """GIDD with masking noise alone: it is given t, the masked share m of the row, in [t_eps, 1 - t_eps].

    m counts context, target, tail and suffix, without padding; under `bos="official"`, target and tail. The authors
    have no deterministic order; this is the time at which training masks this share of positions on average.
    """

    t_eps: float  # the margin of the times of its training

    def noise_level(self, share: torch.Tensor) -> torch.Tensor:
        return share.clamp(self.t_eps, 1 - self.t_eps).float()

    def describe(self) -> dict[str, object]:
        return {
            **super().describe(),
            "time": f"masked share of the {self.counted}, in [{self.t_eps:g}, 1 - {self.t_eps:g}]",
        }
