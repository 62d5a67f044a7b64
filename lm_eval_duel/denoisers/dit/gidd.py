"""GIDD (von Rütte et al. 2025): MDLM's network, conditioned on the time t itself.

With p_uniform 0 its noise is masking alone: at time t a position is masked with probability t. Above 0 tokens are also
replaced by random ones, so that no rule applies, and `estimator=noised_elbo` is its bound.

Shapes: R rows or lanes.
"""

from __future__ import annotations

import os
import re
from typing import Any

import torch

from lm_eval_duel.arguments import COUNT, PROBABILITY, ArgumentType
from lm_eval_duel.core.noise import Hybrid, NoiseTraining
from lm_eval_duel.denoisers.dit.denoiser import Timed
from lm_eval_duel.denoisers.dit.network import DiTConfig
from lm_eval_duel.errors import DuelError

NOISED = "gidd-uniform"
FAMILIES = ("gidd", NOISED)
SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "timestep_cond_dim", "max_seq_len")
MASK = 50258  # the authors add [PAD] and [MASK] to GPT-2's tokenizer
UNIFORM = re.compile(r"p_unif-0*\.?0*[1-9]|gidd-unif")  # in the names of checkpoints with uniform noise


def entries(config: dict[str, Any], name: str, kind: ArgumentType, *keys: str) -> list[Any]:
    """Values that the config.json of `name` must have; raises DuelError that names all that are missing."""
    values = [kind(key, config.get(key), f" in the config.json of {name}") for key in keys]
    if missing := [key for key, value in zip(keys, values, strict=True) if value is None]:
        raise DuelError(f"The config.json of {name} has no {', '.join(missing)}, which its family needs.")
    return values


def read_shape(config: dict[str, Any], name: str) -> tuple[str, DiTConfig, int]:
    """The family, the network's shape and its row length; raises DuelError if name and config contradict each other."""
    *shape, length = entries(config, name, COUNT, *SIZES)
    uniform, margin = entries(config, name, PROBABILITY, "p_uniform", "t_eps")
    if not 0 < margin < 0.5:
        raise DuelError(f"'t_eps' is above 0 and below 0.5; got {margin:g} in the config.json of {name}.")
    if not uniform and UNIFORM.search(os.path.basename(name.rstrip("/"))):
        raise DuelError(f"By its name {name} was trained with uniform noise, and its config.json has p_uniform=0.")
    if uniform == 1:
        raise DuelError(f"{name} has p_uniform=1: noise without masks is not supported.")
    return NOISED if uniform else "gidd", DiTConfig(*shape, time=True), length


class GIDD(Timed):
    """GIDD, at the time t clamped to [t_eps, 1 - t_eps], the times of its training.

    Under masks alone, t is the masked share m of the row: of context, target, tail and suffix, without padding; under
    `bos="official"`, of target and tail. The authors have no deterministic order; this is the time at which training
    masks this share of positions on average.

    `uniform`: its p_uniform. Random tokens are all but [MASK] (and the table's padding).
    """

    def __init__(self, *network: Any, t_eps: float, uniform: float):
        super().__init__(*network)
        self.t_eps, self.uniform, self.published_block = t_eps, uniform, None
        if uniform:
            noise, self.relative_positions = Hybrid(int((~self.excluded).sum()), uniform), False
            self.noise_training = NoiseTraining(noise, "plugin", None, note=f"t in {self.times}")

    @property
    def times(self) -> str:
        return f"[{self.t_eps:g}, 1 - {self.t_eps:g}]"

    def noise_level(self, t: torch.Tensor) -> torch.Tensor:
        return t.clamp(self.t_eps, 1 - self.t_eps)

    def describe(self) -> dict[str, object]:
        if self.noise_training is not None:
            return super().describe()
        return {**super().describe(), "time": f"masked share of the {self.counted}, in {self.times}"}
