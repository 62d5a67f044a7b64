"""Load a checkpoint: its reader, its tokenizer, and the wrappers around its network.

config.json -> our own DiT (MDLM, BD3-LM, SEDD, GIDD, AR)    dit/checkpoint.py
            -> transformers' decoders, explicit mask         hf/decoder_checkpoint.py, hf/families.py
            -> transformers' masked LMs                      hf/masked_lm.py
            -> transformers' causal LMs                      hf/causal_lm.py
            -> DiffusionGemma of transformers                hf/diffusion_gemma.py
            -> the checkpoint's own code, if trusted         hf/remote_code.py
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from lm_eval_duel.arguments import CHECKPOINT, TRUTH
from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.demo import BUNDLED, resolve
from lm_eval_duel.denoisers import hub, identity, weights
from lm_eval_duel.denoisers import vocabulary as special_tokens
from lm_eval_duel.denoisers.cached.denoiser import Cached
from lm_eval_duel.denoisers.dit import checkpoint as dit_checkpoint
from lm_eval_duel.denoisers.dit.denoiser import DiTDenoiser
from lm_eval_duel.denoisers.hf import (
    causal_lm,
    families,
    masked_lm,
)
from lm_eval_duel.denoisers.hf import (
    causal_lm as diffusion_gemma,
)
from lm_eval_duel.denoisers.hf import (
    decoder as decoder_checkpoint,
)
from lm_eval_duel.denoisers.hf import (
    masked_lm as remote_code,
)
from lm_eval_duel.denoisers.hf.pretrained import Pretrained
from lm_eval_duel.denoisers.load_options import NETWORK_ARGUMENTS, LoadOptions, tokenizer_source
from lm_eval_duel.denoisers.wrappers import Excluding, Guided, Warped
from lm_eval_duel.errors import DuelError, random_tokens, require_known

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load(name: str = BUNDLED, *, device: str | None = None, **network: Any) -> Denoiser:
    """Load the denoiser of a checkpoint.

    Args:
        name: A local folder, a hub name, or a bundled name ("demo-mdm", "demo-bd", "demo-ar").
        device: "cpu", "cuda", "cuda:0", ... None: a GPU if there is one.
        network: `tokenizer` (a folder, a hub name, or a loaded tokenizer), and the model args of the network in
            docs/model_args.md, such as `dtype`, `family` or `cache`. The others are detected.

    Raises:
        DuelError: If an argument is wrong, or the checkpoint cannot be read, does not fill its network exactly, or
            contradicts its config.
    """
    options, config = _options(name, device, network)
    with hub.explained(options.name):
        tokenizer = _tokenizer(config, options)
        denoiser = _load_network(config, options, tokenizer)
    denoiser.special_tokens = special_tokens.expected(denoiser, tokenizer)
    if options.compile:
        denoiser.compile()
    return wrapped(denoiser, options)


def _options(name: str, device: str | None, network: dict[str, Any]) -> tuple[LoadOptions, dict[str, Any]]:
    """The checked options of a checkpoint, and its config.json."""
    require_known("network argument", network, [*NETWORK_ARGUMENTS, "tokenizer"])
    name = resolve(CHECKPOINT("name", name) or BUNDLED)
    options = hub.pin_revision(LoadOptions(name, hub.pick_device(device), **network))
    config = hub.read_config(options.name, options.revision)
    identity.require_supported(config, options.name, options.family)
    return options, config


def wrapped(denoiser: Denoiser, options: LoadOptions) -> Denoiser:
    """A denoiser under the cache, the guidance and the warpers of the options."""
    denoiser = Cached(denoiser, options.cache) if options.cache else denoiser
    denoiser = Guided(denoiser, options.cfg_scale) if options.cfg_scale else denoiser
    denoiser = Excluding(denoiser, options.exclude_ids) if options.exclude_ids else denoiser
    warpers = options.temperature, options.top_k, options.top_p
    return denoiser if warpers == (None, None, None) else Warped(denoiser, *warpers)


def require_estimator(name: str, estimator: str, takes_noise: bool, **network: Any) -> None:
    """Raise DuelError if an estimator is not for the noise of a checkpoint, by its config.json alone."""
    options, config = _options(name, "cpu", network)
    causal = identity.is_diffusion_gemma(config)
    if identity.noise(config) and not takes_noise and not (causal and options.attention == "causal"):
        raise random_tokens(options.name, estimator, causal)
    if takes_noise and not identity.noise(config):
        raise DuelError(
            f"estimator={estimator} is for networks whose noise is random tokens; by its config {options.name} is not "
            "one. Use estimator=elbo, or leave estimator out."
        )


def find_family(name: str, **network: Any) -> str | None:
    """The decoder family of a checkpoint by its config.json, before any weight is read; None for all other networks.

    Raises DuelError, as `load`, for what the config shows.
    """
    options, config = _options(name, "cpu", network)
    if dit_checkpoint.is_dit(config, options.name):
        dit_checkpoint.require_float32(options)
        return None
    if identity.is_diffusion_gemma(config) or options.attention == "causal" or options.backend == "remote":
        return None
    family = _family(config, options)
    return None if family is None else family.name


def _family(config: dict[str, Any], options: LoadOptions) -> families.Family | None:
    """The decoder family of a config.json, whose code, if it has any, is read as text."""
    code = hub.local_folder(options.name, options.revision, code_only=True) if config.get("auto_map") else None
    return families.find(config, options, code)


def unfilled(
    family: families.Family | None,
    config: dict[str, Any],
    options: LoadOptions,
    local: Callable[[], LoadOptions],
    tokenizer: PreTrainedTokenizerBase | None,
) -> DiTDenoiser | Pretrained:
    """The network that a config.json describes, before any weight is read. A checkpoint's own code is not run.

    `family`: of decoders. `local`: the options with a local folder, for readers that do not know the hub.
    """
    if dit_checkpoint.is_dit(config, options.name):
        return dit_checkpoint.unfilled(config, local(), tokenizer)
    if identity.is_diffusion_gemma(config):
        return diffusion_gemma.diffusion_gemma_unfilled(config, local(), tokenizer)
    if options.attention == "causal" and (family is None or family.attention != "causal_prefix"):
        return causal_lm.unfilled(family, config, options, tokenizer)
    if family is not None:
        return decoder_checkpoint.unfilled(family, config, local(), tokenizer)
    return masked_lm.unfilled(config, options, tokenizer)


def is_alone(config: dict[str, Any], options: LoadOptions) -> bool:
    """True for networks that only one reader takes: our own DiT and DiffusionGemma."""
    return dit_checkpoint.is_dit(config, options.name) or identity.is_diffusion_gemma(config)


def _load_network(config: dict[str, Any], options: LoadOptions, tokenizer: PreTrainedTokenizerBase | None) -> Denoiser:
    """The denoiser of a config.json, by its family."""

    def local() -> LoadOptions:
        return dataclasses.replace(options, name=hub.local_folder(options.name, options.revision))

    if is_alone(config, options):
        return unfilled(None, config, options, local, tokenizer).fill()
    family = _family(config, options)
    causal = options.attention == "causal"
    if family is None and config.get("model_type") == "gpt2" and (os.path.isdir(options.name) or not causal):
        family = families.by_tensors(config, weights.names(local().name))
    own = config.get("auto_map") and (options.trust_remote_code or not masked_lm.is_native(config))
    if options.backend == "remote" or (family is None and not causal and own):
        return remote_code.load(family, config, local(), tokenizer)
    return unfilled(family, config, options, local, tokenizer).fill()


def _tokenizer(config: dict[str, Any], options: LoadOptions) -> PreTrainedTokenizerBase | None:
    """The tokenizer of the options, else the one in the checkpoint; None for a DiT checkpoint without one."""
    if options.tokenizer is not None and not isinstance(options.tokenizer, str):
        return options.tokenizer
    if options.tokenizer is not None:
        return hub.load_tokenizer(resolve(options.tokenizer), options.trust_remote_code, "main")
    if dit_checkpoint.is_dit(config, options.name) and not hub.has_tokenizer(options.name, options.revision):
        return None
    return hub.load_tokenizer(options.name, options.trust_remote_code, options.revision)


def load_tokenizer(arguments: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a checkpoint.

    Args:
        arguments: Model args, such as {"pretrained": "demo-mdm"}: `tokenizer` if it is given, else the tokenizer next
            to the weights of `pretrained`, or of its family.

    Raises:
        DuelError: If there is none.
    """
    name, revision = tokenizer_source(arguments)
    name = resolve(name)
    trust_remote_code = TRUTH("trust_remote_code", arguments.get("trust_remote_code")) or False
    tokenizer_only = bool(arguments.get("tokenizer")) or (os.path.isdir(name) and hub.has_tokenizer(name, revision))
    config = hub.read_config(name, revision, needed=not tokenizer_only)
    if dit_checkpoint.is_dit(config, name) and not hub.has_tokenizer(name, revision):
        return hub.load_tokenizer(dit_checkpoint.TOKENIZER, trust_remote_code, "main")
    return hub.load_tokenizer(name, trust_remote_code, revision)
