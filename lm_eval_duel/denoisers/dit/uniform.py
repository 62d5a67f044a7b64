"""Duo (Sahoo et al. 2025) and UDLM (Schiff et al. 2024): MDLM's network under uniform noise, given the noise level.

Both replace tokens by random ones, over all columns of the network, and both put the network's output in place of the
clean token in the posterior (a plug-in). So no rule applies: `estimator=noised_elbo` is their bound.

Shapes: R rows.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

from lm_eval_duel.arguments import TRUTH
from lm_eval_duel.core.noise import NoiseTraining, Uniform
from lm_eval_duel.denoisers.dit.denoiser import NOISE_EPS, Timed
from lm_eval_duel.errors import DuelError

log = logging.getLogger("lm_eval.duel_mdm")

DISTILLED = "distilled"  # in the name of a checkpoint


class NoisedDiT(Timed):
    """A DiT under uniform noise, whose levels go from t = 1e-3 to alpha = 1e-3 in its training."""

    def __init__(self, *network: Any):
        super().__init__(*network)
        note = f"sigma = -log alpha, alpha in [{NOISE_EPS:g}, 1 - {NOISE_EPS:g}]"
        self.noise_training = NoiseTraining(Uniform(int((~self.excluded).sum())), "plugin", None, note=note)
        self.published_block, self.relative_positions = None, False

    def noise_level(self, t: torch.Tensor) -> torch.Tensor:
        return -(1 - t).clamp(NOISE_EPS, 1 - NOISE_EPS).log()


def require_known(config: dict[str, Any], name: str, family: str) -> None:
    """Raise DuelError for entries with which these are other networks; warn of one that was distilled."""
    timed = TRUTH("time_conditioning", config.get("time_conditioning"))
    if timed is False or (family == "udlm" and not timed):
        raise DuelError(f"The config.json of {name} has no time_conditioning=true, which a {family} has.")
    for key in ("causal", "cross_attn", "cfg"):
        if TRUTH(key, config.get(key)):
            raise DuelError(f"{name} is a {family} with {key}=true, which is not supported.")
    if DISTILLED in os.path.basename(name.rstrip("/")).lower():
        log.warning("By its name %s was distilled for sampling in few steps: its bound says little about it", name)
