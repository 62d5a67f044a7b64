"""How a checkpoint is read: which reader takes it, its tokenizer, and the wrappers around its network.

config.json -> our own DiT (MDLM, BD3-LM, SEDD, AR)          dit_load.py
            -> transformers' decoders, explicit mask         backbone_load.py, by families.py
            -> transformers' masked LMs                      huggingface.py
            -> transformers' causal LMs, as they are         causal.py
            -> the checkpoint's own code, where trusted      remote.py
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lm_eval_duel.arguments import checkpoint_name
from lm_eval_duel.demo import BUNDLED, resolve
from lm_eval_duel.denoisers import hub, special_tokens
from lm_eval_duel.denoisers.base import Denoiser
from lm_eval_duel.denoisers.dit import checkpoint as dit_load
from lm_eval_duel.denoisers.hf import causal_lm as causal
from lm_eval_duel.denoisers.hf import decoder_checkpoint as backbone_load
from lm_eval_duel.denoisers.hf import families
from lm_eval_duel.denoisers.hf import masked_lm as huggingface
from lm_eval_duel.denoisers.hf import remote_code as remote
from lm_eval_duel.denoisers.load_options import NETWORK_READERS, LoadOptions, tokenizer_source
from lm_eval_duel.denoisers.wrappers.guidance import Guided
from lm_eval_duel.denoisers.wrappers.warpers import Tempered
from lm_eval_duel.errors import DuelError, unknown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load(name: str, *, device: str | None = None, **network: Any) -> Denoiser:
    """See `denoisers.load`."""
    for key in network:
        if key not in (*NETWORK_READERS, "tokenizer"):
            raise unknown("network argument", key, (*NETWORK_READERS, "tokenizer"))
    name = resolve(checkpoint_name("name", name) or BUNDLED)
    asked = hub.pinned(LoadOptions(name, hub.pick_device(device), **network))
    raw = hub.raw_config(asked.name, asked.revision)
    tokenizer = _tokenizer(raw, asked)
    denoiser = _read(raw, asked, tokenizer)
    denoiser.special_tokens = _special_tokens(denoiser, tokenizer)
    if asked.compile:
        denoiser.compile()
    denoiser = Guided(denoiser, asked.cfg_scale) if asked.cfg_scale else denoiser
    tempered = asked.temperature, asked.top_k, asked.top_p
    return denoiser if tempered == (None, None, None) else Tempered(denoiser, *tempered)


def _read(raw: dict[str, Any], asked: LoadOptions, tokenizer: PreTrainedTokenizerBase | None) -> Denoiser:
    if dit_load.reads(raw):
        return dit_load.load(hub.local_folder(asked.name, asked.revision), raw, asked, tokenizer)
    own = bool(raw.get("auto_map"))
    code = hub.local_folder(asked.name, asked.revision, code_only=True) if own else None
    family = families.find(raw, asked, code)
    if asked.attention == "causal" and asked.backend != "remote":
        return causal.load(family, raw, asked, tokenizer)
    if family is not None and asked.backend != "remote":
        return backbone_load.load(family, hub.local_folder(asked.name, asked.revision), raw, asked, tokenizer)
    if own or asked.backend == "remote":
        return remote.load(family, hub.local_folder(asked.name, asked.revision), raw, asked, tokenizer)
    return huggingface.load(raw, asked, tokenizer)


def _tokenizer(raw: dict[str, Any], asked: LoadOptions) -> PreTrainedTokenizerBase | None:
    """The tokenizer asked for, else the one beside the weights; None where a DiT has none."""
    if asked.tokenizer is not None and not isinstance(asked.tokenizer, str):
        return asked.tokenizer
    if asked.tokenizer is not None:
        return hub.load_tokenizer(resolve(asked.tokenizer), asked.trust_remote_code, "main")
    if dit_load.reads(raw) and not hub.has_tokenizer(asked.name, asked.revision):
        return None
    return hub.load_tokenizer(asked.name, asked.trust_remote_code, asked.revision)


def _special_tokens(
    denoiser: Denoiser, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The ids that a text is given between, as the harness gives them; None if it is scored without.

    Empty if the network expects them and no tokenizer says which.
    """
    if tokenizer is None:
        return ((), ()) if denoiser.bos == "given" else None
    try:
        bos, prefix, suffix = special_tokens.convention(tokenizer, denoiser)
    except DuelError:  # said when a text is scored; ids can be scored all the same
        return None
    return (tuple(prefix), tuple(suffix)) if bos == "given" and prefix else None


def load_tokenizer(arguments: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    """See `denoisers.load_tokenizer`."""
    name, revision = tokenizer_source(arguments)
    name = resolve(name)
    trusted = str(arguments.get("trust_remote_code", False)).lower() in ("true", "1")
    alone = bool(arguments.get("tokenizer")) or (os.path.isdir(name) and hub.has_tokenizer(name, revision))
    if dit_load.reads(hub.raw_config(name, revision, needed=not alone)) and not hub.has_tokenizer(name, revision):
        try:
            return hub.load_tokenizer(dit_load.TOKENIZER, trusted, "main")
        except DuelError as error:
            raise DuelError(f"{name} holds no tokenizer, and that of its family is not to be had. {error}") from error
    return hub.load_tokenizer(name, trusted, revision)
