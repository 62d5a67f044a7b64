"""What a user says about a checkpoint; everything left out is detected."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from lm_eval_duel.errors import DuelError, another_block, unknown
from lm_eval_duel.options import CHOICES

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase


@dataclasses.dataclass(frozen=True)
class LoadOptions:
    """The network args of `denoisers.load`, which are model args of the harness's model too."""

    name: str
    device: torch.device
    dtype: str = "auto"
    revision: str = "main"
    trust_remote_code: bool = False
    tokenizer: str | PreTrainedTokenizerBase | None = None
    mask_token_id: int | None = None
    max_length: int | None = None
    bos: str | None = None  # given, scored, official, none
    family: str | None = None
    attention: str | None = None  # bidirectional, block_causal, causal
    block: int | str | None = None  # the trained block, where config and family do not say
    shift_logits: bool | None = None
    last_block: str = "fill"
    sigma: str | None = None  # SEDD: clamped, schedule
    backend: str | None = None  # native, remote
    cfg_scale: float | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    peft: str | None = None
    device_map: str | dict[str, int | str | torch.device] | None = None
    load_in_8bit: bool = False
    load_in_4bit: bool = False
    compile: bool = False

    def __post_init__(self) -> None:
        for name, known in CHOICES.items():
            value = getattr(self, name)
            if value is not None and value not in known:
                raise unknown(f"value of {name}", str(value), known)
        if self.load_in_8bit and self.load_in_4bit:
            raise DuelError("load_in_8bit and load_in_4bit are both given; leave one out.")

    def require_block(self, trained: int) -> None:
        """Raise DuelError where another block than the trained one was asked for."""
        if isinstance(self.block, int) and self.block != trained:
            raise another_block(trained, self.block)

    def refuse(self, family: str, *names: str) -> None:
        """Raise DuelError where one of these was asked for and `family` cannot follow."""
        for name in names:
            if getattr(self, name) not in (None, False):
                raise DuelError(
                    f"{self.name} is of the family {family}, which has no choice of '{name}'; leave it out."
                )
