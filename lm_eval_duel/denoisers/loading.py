"""Load a checkpoint, step by step.

    1  config.json and the options say what the checkpoint is         Checkpoint.open
    2  a network that nothing here reads is refused                   Checkpoint.require_known_network
    3  its tokenizer is read, and its tensors' names if need be       Checkpoint.with_tokenizer, with_family_by_tensors
    4  its reader makes the network, without weights                  reader_of
    5  the network reads its weights, strictly, and is tested         fill
    6  a cache, guidance and filters are put around it                wrapped

The readers:

    config.json -> our own DiT (MDLM, BD3-LM, SEDD, GIDD, AR)    dit/checkpoint.py
                -> transformers' decoders, explicit mask         hf/decoder.py, hf/families.py
                -> transformers' masked LMs and causal LMs       hf/own_forward.py
                -> DiffusionGemma of transformers                hf/diffusion_gemma.py
                -> the checkpoint's own code, if trusted         hf/own_code.py
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from lm_eval_duel.arguments import TRUTH
from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.demo import BUNDLED, resolve
from lm_eval_duel.denoisers import hub, vocabulary
from lm_eval_duel.denoisers.cached.denoiser import Cached
from lm_eval_duel.denoisers.checkpoint import DIT_TOKENIZER, Checkpoint
from lm_eval_duel.denoisers.dit import checkpoint as dit
from lm_eval_duel.denoisers.dit.denoiser import DiTDenoiser
from lm_eval_duel.denoisers.filters import excluding, warped
from lm_eval_duel.denoisers.hf import decoder, diffusion_gemma, own_code, own_forward
from lm_eval_duel.denoisers.hf.pretrained import Pretrained
from lm_eval_duel.denoisers.load_options import NETWORK_ARGUMENTS, LoadOptions, NetworkArguments, tokenizer_source
from lm_eval_duel.denoisers.recognition import is_diffusion_gemma, is_dit
from lm_eval_duel.denoisers.wrappers import Guided
from lm_eval_duel.errors import DuelError
from lm_eval_duel.keywords import keywords_of, listing, shows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@shows(keywords_of(NetworkArguments), listing("Model args of the network, with their defaults:", NETWORK_ARGUMENTS))
def load(name: str = BUNDLED, *, device: str | None = None, **network: Any) -> Denoiser:
    """Load the denoiser of a checkpoint.

    Args:
        name: A local folder, a hub name, or a bundled name ("demo-mdm", "demo-bd", "demo-duo", "demo-ar").
        device: "cpu", "cuda", "cuda:0", ... None: a GPU if there is one.
        network: `tokenizer` (a folder, a hub name, or a loaded tokenizer), and model args of the network, listed
            below, such as `dtype`, `family` or `cache`. The others are detected.

    Raises:
        DuelError: If an argument is wrong, or the checkpoint cannot be read, does not fill its network exactly, or
            contradicts its config.
    """
    return load_network(Checkpoint.open(name, device, **network))


def load_network(checkpoint: Checkpoint, tokenizer: PreTrainedTokenizerBase | None = None) -> Denoiser:
    """The denoiser of a checkpoint; `tokenizer`: in place of the checkpoint's own. Raises DuelError, as `load`."""
    options = checkpoint.options
    checkpoint.require_known_network()
    with hub.explained(checkpoint.name):
        checkpoint = checkpoint.with_tokenizer(tokenizer)
        checkpoint = checkpoint.with_family_by_tensors()
        if checkpoint.runs_own_code:
            denoiser: Denoiser = own_code.load(checkpoint.local())
        else:
            denoiser = without_weights(checkpoint).fill()

    tokenizer = checkpoint.tokenizer
    denoiser.special_tokens = vocabulary.expected(denoiser, tokenizer)
    # Only the user's own choice is questioned: a checkpoint's entry may differ from its tokenizer for a reason.
    if options.mask_token_id is not None:
        vocabulary.warn_of_another_mask(checkpoint.name, denoiser.mask_id, tokenizer)
    if options.compile:
        denoiser.compile()
    return wrapped(denoiser, options)


def without_weights(checkpoint: Checkpoint) -> DiTDenoiser | Pretrained:
    """The network that a checkpoint describes, before any weight is read; its files on the hub are downloaded."""
    reader = reader_of(checkpoint)
    transformers_reads_files = reader in (own_forward.masked_lm, own_forward.causal_lm)
    if not transformers_reads_files:
        checkpoint = checkpoint.local()
    return reader(checkpoint)


def reader_of(checkpoint: Checkpoint) -> Callable[[Checkpoint], DiTDenoiser | Pretrained]:
    """The function that makes the network which a checkpoint describes, before any weight is read.

    A checkpoint's own code is not run.
    """
    family = checkpoint.family
    is_causal = checkpoint.options.attention == "causal"
    if checkpoint.is_dit:
        return dit.unfilled
    if is_diffusion_gemma(checkpoint.config):
        return diffusion_gemma.unfilled
    if family is None:
        return own_forward.causal_lm if is_causal else own_forward.masked_lm
    # A network with a causal prefix can be scored as an autoregressive one. Other families are refused by `causal_lm`.
    if is_causal and family.attention != "causal_prefix":
        return own_forward.causal_lm
    return decoder.unfilled


def wrapped(denoiser: Denoiser, options: LoadOptions) -> Denoiser:
    """A denoiser under the cache, the guidance and the filters of the options."""
    if options.cache:
        denoiser = Cached(denoiser, options.cache)
    if options.cfg_scale:
        denoiser = Guided(denoiser, options.cfg_scale)
    if options.exclude_ids:
        denoiser = excluding(denoiser, options.exclude_ids)
    warpers = (options.temperature, options.top_k, options.top_p)
    if any(value is not None for value in warpers):
        denoiser = warped(denoiser, *warpers)
    return denoiser


def load_tokenizer(
    arguments: str | os.PathLike[str] | Mapping[str, Any], setting: str = "tokenizer="
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a checkpoint.

    Args:
        arguments: The checkpoint, such as "demo-mdm", or model args: `tokenizer` if it is given, else the tokenizer
            next to the weights of `pretrained`, or of its family.
        setting: What the user sets to name another one, for the error.

    Raises:
        DuelError: If there is none.
    """
    if isinstance(arguments, str | os.PathLike):
        arguments = {"pretrained": os.fspath(arguments)}
    if not isinstance(arguments, Mapping):
        raise DuelError(f"load_tokenizer takes the folder or the name of a checkpoint; got {arguments!r}.")
    name, revision = tokenizer_source(arguments)
    name = resolve(name)
    trusted = TRUTH("trust_remote_code", arguments.get("trust_remote_code")) or False
    is_named = bool(arguments.get("tokenizer"))
    if not is_named and _is_dit_without_tokenizer(name, revision):
        return vocabulary.load_tokenizer(DIT_TOKENIZER, trusted, "main", setting)
    return vocabulary.load_tokenizer(name, trusted, revision, setting)


def _is_dit_without_tokenizer(name: str, revision: str) -> bool:
    """True for a checkpoint of our own DiT that has no tokenizer, as most published ones."""
    # A folder with a tokenizer needs no config.json here, so that is asked first.
    if os.path.isdir(name) and vocabulary.has_tokenizer(name, revision):
        return False
    config = hub.read_config(name, revision)
    return is_dit(config, name) and not vocabulary.has_tokenizer(name, revision)
