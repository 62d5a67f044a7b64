"""Commit-once sampling of networks whose noise is random tokens: what the estimators say and check about it.

A masked position shows a noise token n(seed, block, step, position) in place of [MASK], and a token that is revealed
stays. So given the seed a text has one path, and Algorithm 2 gives its exact likelihood (core/noise.py, core/view).
"""

from __future__ import annotations

import copy

from lm_eval_duel.arguments import declared
from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.core.noise import CommitOnce
from lm_eval_duel.errors import DuelError
from lm_eval_duel.estimators.arguments import CommitOnceArguments

OF_CANVASES = ("prediction", "temperatures")  # arguments that only networks with canvases read


def commit_once(denoiser: Denoiser, own: CommitOnceArguments, name: str) -> Denoiser:
    """The network under a commit-once sampler with these arguments; one whose noise is masks, unchanged.

    Raises:
        DuelError: If an argument has no meaning for this network.
    """
    trained = denoiser.noise_training
    default = CommitOnceArguments()
    given = [key for key in declared(default) if getattr(own, key) != getattr(default, key)]
    if trained is None:
        if given:
            raise DuelError(
                f"'{given[0]}' is for networks whose noise is random tokens, and this one ({denoiser.family}) shows "
                "[MASK]. Leave it out."
            )
        return denoiser
    if denoiser.cache:
        raise DuelError(
            f"cache={denoiser.cache} keeps keys of the block's start, and what masked positions show changes at every "
            "step. Leave cache out."
        )
    if denoiser.hides_given:
        raise DuelError(f"cfg_scale has no sampler for noise of random tokens: leave it out of estimator={name}.")
    if denoiser.block is None:
        for key in OF_CANVASES:
            if key in given:
                raise DuelError(
                    f"'{key}' is for networks with canvases (DiffusionGemma), and this one is {denoiser.family}. Leave "
                    f"it out{', or pass temperature' if key == 'temperatures' else ''}."
                )
    reads_itself = trained.self_conditioning != "none"
    if own.self_conditioning == "chain" and not reads_itself:
        raise DuelError("self_conditioning=chain: this network's output is not among its inputs. Leave it out.")
    if not given and not reads_itself:
        return denoiser
    twin = copy.copy(denoiser)
    twin.commit_once = CommitOnce(
        own.prediction == "leave_one_out", reads_itself and own.self_conditioning != "none", own.temperatures
    )
    return twin


def noise_spec(denoiser: Denoiser, seed: int | None) -> dict[str, object]:
    """The entries of the spec about what masked positions show; none if it is [MASK]."""
    trained, how = denoiser.noise_training, denoiser.commit_once
    if trained is None:
        return {}
    spec: dict[str, object] = {"noise": trained.noise.name}
    if seed is not None:
        spec["noise_seed"] = seed
    if denoiser.block is None:
        spec["masked_share"] = "of the row" if denoiser.bos != "official" else "of the scored positions"
        spec["time"] = trained.note
        spec["ties"] = "rows of one token" if denoiser.relative_positions else "none"
        return spec
    spec["prediction"] = "leave_one_out" if how.leave_one_out else "denoiser"
    spec["self_conditioning"] = "chain" if how.self_conditioning else "none"
    if how.leave_one_out:
        spec["masked_share"] = "of the canvas"
    if how.temperatures is not None:
        spec["temperatures"] = ":".join(f"{value:g}" for value in how.temperatures)
    return {**spec, "canvas": denoiser.block, "last_canvas": "short"}
