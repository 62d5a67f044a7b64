"""Denoisers: every checkpoint family behind one contract (`base.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lm_eval_duel.demo import resolve
from lm_eval_duel.denoisers import dit_load, hub, huggingface
from lm_eval_duel.denoisers.base import Denoiser
from lm_eval_duel.options import tokenizer_source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load(
    name: str = "demo-mdm",
    *,
    device: str | None = None,
    dtype: str = "auto",
    revision: str = "main",
    trust_remote_code: bool = False,
    mask_token_id: int | None = None,
    max_length: int | None = None,
    tokenizer: str | PreTrainedTokenizerBase | None = None,
) -> Denoiser:
    """The denoiser of a local folder, a hub name or a bundled name.

    `device`: None picks a GPU where there is one. `dtype`: "auto" is float32 on a CPU, else the checkpoint's.
    `mask_token_id` and `max_length`: where config and tokenizer do not say, or to shorten rows. `tokenizer`: a folder
    or hub name where it is not beside the weights, or the loaded one.

    Raises DuelError when the checkpoint cannot be read, is no bidirectional masked model, or its mask is not known.
    """
    name, place = resolve(name), hub.pick_device(device)
    config = hub.raw_config(name, revision)
    if dit_load.reads(config):
        folder = hub.local_folder(name, revision, dit_load.FILES)
        if isinstance(tokenizer, str):
            tokenizer = hub.load_tokenizer(resolve(tokenizer), trust_remote_code, "main")
        return dit_load.load(
            folder,
            config,
            device=place,
            dtype=dtype,
            max_length=max_length,
            mask_token_id=mask_token_id,
            tokens=set(tokenizer.get_vocab().values()) if tokenizer is not None else None,
        )
    return huggingface.load(
        name,
        device=place,
        dtype=dtype,
        revision=revision,
        trust_remote_code=trust_remote_code,
        mask_token_id=mask_token_id,
        max_length=max_length,
        tokenizer=resolve(tokenizer) if isinstance(tokenizer, str) else tokenizer,
    )


def load_tokenizer(arguments: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    """The tokenizer that model args ask for: `tokenizer`, else the one beside the weights or of the family.

    Raises DuelError when there is none.
    """
    name, revision = tokenizer_source(arguments)
    name = resolve(name)
    if dit_load.reads(hub.raw_config(name, revision)) and not hub.has_tokenizer(name, revision):
        name, revision = dit_load.TOKENIZER, "main"
    trusted = str(arguments.get("trust_remote_code", False)).lower() in ("true", "1")
    return hub.load_tokenizer(name, trusted, revision)
