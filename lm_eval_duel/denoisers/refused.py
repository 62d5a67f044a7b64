"""Checkpoints that no likelihood of this package covers, with the reason and what works instead. No torch.

A checkpoint is known by the class names or the model type of its config.json, or by its own name where the config is
that of another network. `lm-eval-duel list refused` prints the table.
"""

from __future__ import annotations

import dataclasses

from lm_eval_duel.errors import DuelError

NO_ORDER = "so no deterministic order of unmasking explains a text, and the theorem does not cover it"
NOT_READ = "its code could not be read (November 2026), so nothing here could be compared with it"
NOTHING = "nothing"


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A kind of checkpoint that is refused. `classes`: names in config.json; `named`: a pattern of the checkpoint's."""

    checkpoint: str  # for example
    why: str
    instead: str
    classes: tuple[str, ...] = ()
    named: str = ""

    def error(self, name: str, known: str) -> DuelError:
        """The error for a checkpoint `name` that is known as `known`."""
        works = "" if self.instead == NOTHING else f" What works: {self.instead}."
        return DuelError(f"{name} is a {known}: {self.why}.{works}")


ENTRIES = (
    Refusal(
        "WeDLM",
        f"it reorders tokens under causal attention and revises revealed tokens, {NO_ORDER}",
        NOTHING,
        ("WeDLMForCausalLM",),
    ),
    Refusal(
        "LLaDA2.1 under a class of its own",
        f"it edits revealed tokens, {NO_ORDER}",
        "family=llada2 scores it without these edits",
        ("LLaDA21MoeModelLM",),
    ),
    Refusal("E2D2", "it is an encoder-decoder inside a wrapper, which is not supported", NOTHING, ("E2D2",)),
    Refusal(
        "DPLM-2, DPLM-2 Bit",
        "it has a second track of structure tokens, which is not supported",
        "DPLM",
        ("EsmForDPLM2", "EsmForDPLM2Bit"),
    ),
    Refusal(
        "Nemotron-Labs-Diffusion-VLM",
        "it needs images, which are not supported",
        "the text checkpoints of Nemotron-Labs-Diffusion",
        ("NemotronLabsDiffusionVLMModel",),
    ),
    Refusal(
        "nvidia/Nemotron-Labs-TwoTower-30B-A3B",
        "its denoiser attends to a second, frozen network, and its layers are Mamba-2, which is not supported",
        "estimator=ar on the context tower's own checkpoint (Nemotron-3-Nano)",
        ("NemotronHTwoTowerForCausalLM",),
    ),
    Refusal(
        "Diffuspace/Clover-35B-A3B",
        "most of its layers are recurrent (Gated DeltaNet), which is not supported, and its sampler was not published",
        NOTHING,
        ("clover_moe", "CloverMoeForCausalLM"),
    ),
    Refusal(
        "OpenGVLab/SDLM",
        "its window slides by as many tokens as were accepted, so a text has no fixed blocks",
        "estimator=ar, the distribution of sampling one token at a time",
        named=r"^SDLM\b|^SDLM-",
    ),
    Refusal(
        "I-DLM-8B, -32B",
        "it drafts with masks under causal attention and accepts what the autoregressive pass confirms",
        "estimator=ar, the distribution of its texts at temperature 0",
        named=r"^I-DLM-",
    ),
    Refusal(
        "tohoku-nlp/sumi-7b",
        "it is a Llama-like network under uniform noise that gets the log signal-to-noise ratio as an input, which no "
        "supported network does",
        "Duo, UDLM and GIDD, which are other networks under uniform noise",
        ("SumiForMaskGeneration", "sumi"),
    ),
    Refusal(
        "z-lab DFlash drafters",
        "it drafts from the hidden states of another network, which decides on every token",
        "estimator=ar on that network, whose distribution its texts have",
        ("DFlashDraftModel",),
    ),
    Refusal(
        "openPangu-R-7B-Diffusion, openPangu-7B-Diffusion-Base",
        NOT_READ,
        "estimator=ar on openPangu-Embedded, which it was trained from",
        named=r"^openPangu.*Diffusion",
    ),
    Refusal(
        "nvidia/SDLLM-AR, -MDLM, -Duo, -EsoLM (1.7B)",
        NOT_READ,
        "MDLM and Duo of their authors",
        named=r"^SDLLM-",
    ),
)
