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

from lm_eval_duel.denoisers import config_entries
from lm_eval_duel.denoisers.dit.denoiser import Timed
from lm_eval_duel.denoisers.dit.network import DiTConfig
from lm_eval_duel.errors import DuelError

MODEL_TYPE = "dit"  # in config.json
SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "timestep_cond_dim", "max_seq_len")
MASK = 50258  # the authors add [PAD] and [MASK] to GPT-2's tokenizer
UNIFORM = re.compile(r"p_unif-0*\.?0*[1-9]|gidd-unif")  # in the names of checkpoints with uniform noise


def read_shape(config: dict[str, Any], name: str) -> tuple[DiTConfig, int]:
    """The network's shape and its row length.

    Raises:
        KeyError: entries are missing, which its message quotes.
        ValueError: an entry has another type.
        DuelError: the checkpoint `name` was trained with uniform noise.
    """
    counts = {key: config_entries.count(config, key) for key in SIZES}
    missing = [key for key, value in counts.items() if value is None]
    missing += [key for key in ("p_uniform", "t_eps") if config.get(key) is None]
    if missing:
        raise KeyError(", ".join(f"'{key}'" for key in missing))
    uniform = config["p_uniform"]
    if isinstance(uniform, bool) or not isinstance(uniform, int | float) or not 0 <= uniform <= 1:
        raise ValueError(f"'p_uniform' must be a probability; got {uniform!r}")
    if not (config_entries.number(config, "t_eps") or 1) < 0.5:
        raise ValueError(f"'t_eps' must be below 0.5; got {config['t_eps']!r}")
    if uniform > 0 or UNIFORM.search(os.path.basename(name.rstrip("/"))):
        raise DuelError(
            f"{name} is a GIDD trained with uniform noise (p_uniform {uniform:g}): its sampler replaces "
            "revealed tokens, so no order of unmasking explains a text, and the theorem does not cover it. Those with "
            "p_uniform 0 (gidd-small-p_unif-0.0) are covered."
        )
    *shape, length = counts.values()
    return DiTConfig(*shape, time=True), length


class GIDD(Timed):
    """GIDD with masking noise alone: it is given t, the masked share m of the row, in [t_eps, 1 - t_eps].

    m counts context, target, tail and suffix, without padding; under `bos="official"`, target and tail. The authors
    have no deterministic order; this is the time at which training masks so many positions on average.
    """

    t_eps: float  # the margin of the times of its training

    def noise_level(self, share: torch.Tensor) -> torch.Tensor:
        return share.clamp(self.t_eps, 1 - self.t_eps).float()

    def describe(self) -> dict[str, object]:
        return {
            **super().describe(),
            "time": f"masked share of the {self.counted}, in [{self.t_eps:g}, 1 - {self.t_eps:g}]",
        }
