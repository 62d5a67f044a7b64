"""Denoisers: every checkpoint family behind one contract (`base.py`)."""

from __future__ import annotations

from lm_eval_duel.demo import resolve
from lm_eval_duel.denoisers import dit_load, huggingface
from lm_eval_duel.denoisers.base import Denoiser


def load(
    name: str = "demo-mdm",
    *,
    device: str | None = None,
    dtype: str = "auto",
    revision: str = "main",
    trust_remote_code: bool = False,
    mask_token_id: int | None = None,
    max_length: int | None = None,
    tokenizer: str | None = None,
) -> Denoiser:
    """The denoiser of a local folder, a hub name or a bundled name.

    `device`: None picks a GPU where there is one. `dtype`: "auto" is float32 on a CPU, else the checkpoint's.
    `mask_token_id` and `max_length`: where config and tokenizer do not say, or to shorten rows. `tokenizer`: where the
    tokenizer is not beside the weights.

    Raises DuelError when the checkpoint cannot be read, is no bidirectional masked model, or its mask is not known.
    """
    name, place = resolve(name), huggingface.pick_device(device)
    config = huggingface.raw_config(name, revision)
    if dit_load.reads(config):
        folder = huggingface.local_folder(name, revision, dit_load.FILES)
        return dit_load.load(folder, config, device=place, dtype=dtype, max_length=max_length)
    return huggingface.load(
        name,
        device=place,
        dtype=dtype,
        revision=revision,
        trust_remote_code=trust_remote_code,
        mask_token_id=mask_token_id,
        max_length=max_length,
        tokenizer=resolve(tokenizer) if tokenizer else None,
    )


def tokenizer_of(name: str, revision: str = "main") -> str:
    """Where the tokenizer of a checkpoint is: beside the weights, or the one its family is published with."""
    name = resolve(name)
    published_without = dit_load.reads(huggingface.raw_config(name, revision))
    return dit_load.TOKENIZER if published_without and not huggingface.has_tokenizer(name, revision) else name
