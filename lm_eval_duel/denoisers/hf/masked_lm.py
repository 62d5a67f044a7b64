"""transformers' masked LMs (BERT, RoBERTa, ...), and the networks of a checkpoint's own code.

Shapes: R rows, L row length, N rows of a call, Q queries, K keys, D features, V tokens.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoModelForMaskedLM,
    PreTrainedTokenizerBase,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lm_eval_duel.core.network import KeysValues
from lm_eval_duel.demo import resolve
from lm_eval_duel.denoisers import hub, identity, self_tests, weights
from lm_eval_duel.denoisers.hf import auto_model, device_map, lora
from lm_eval_duel.denoisers.hf.families import Family
from lm_eval_duel.denoisers.hf.pretrained import OwnForward
from lm_eval_duel.denoisers.hub import default_dtype, pick_dtype
from lm_eval_duel.denoisers.load_options import LoadOptions
from lm_eval_duel.errors import DuelError

log = logging.getLogger("lm_eval.duel_mdm")

MASKED_LM = Family("masked-lm", "", bos="auto")
OWN_CODE = Family("own code", "", bos="auto")  # of no family that is known
SAME = ("EsmForDPLM", "AntiBERTy")  # classes of others that are transformers' own network
MOVED = ("eurobert",)  # model types that were published with their own code, which is now in transformers
READ_ELSEWHERE = ("mask_token_id", "rope_theta", "rope_scaling", "hidden_act", "dplm_type")
COPIED_PARAMETERS = 2_000_000_000  # up to this size a network's tensors are copied into float32 for self-tests


def is_native(config: dict[str, Any]) -> bool:
    """True if transformers has the network of a checkpoint that still carries it as code."""
    return config.get("model_type") in MOVED and config["model_type"] in CONFIG_MAPPING


def unfilled(config: dict[str, Any], options: LoadOptions, tokenizer: PreTrainedTokenizerBase | None) -> MaskedLM:
    """A masked LM of transformers, without its weights; raises DuelError for any other network."""
    model_config = AutoConfig.from_pretrained(options.name, revision=options.revision)
    classes = ", ".join(config.get("architectures") or [type(model_config).__name__])
    if getattr(model_config, "is_encoder_decoder", False):
        raise DuelError(f"{options.name} ({classes}) is an encoder-decoder network, which this package does not score.")
    if type(model_config) not in MODEL_FOR_MASKED_LM_MAPPING:
        causal = type(model_config) in MODEL_FOR_CAUSAL_LM_MAPPING
        kind = "autoregressive: add estimator=ar" if causal else "neither a masked LM nor of a known diffusion family"
        raise DuelError(
            f"{options.name} ({classes}) is {kind}. If it is a masked diffusion model whose network belongs to a known "
            "family, pass family=; to run its own code, backend=remote,trust_remote_code=true."
        )
    auto_model.require_known(config, options.name, MODEL_FOR_MASKED_LM_MAPPING[type(model_config)].__name__, SAME)
    options.refuse("masked LM", "shift_logits", "backend", "sigma", "first_token", "peft")
    if options.attention not in (None, "bidirectional"):
        raise DuelError(f"{options.name} is a masked LM of transformers, so bidirectional; leave attention out.")
    log.info("%s is a masked LM (%s), scored as an any-order model", options.name, classes)
    denoiser = MaskedLM(MASKED_LM, config, options, tokenizer, getattr(model_config, "vocab_size", None))
    denoiser.kind, denoiser.model_config = AutoModelForMaskedLM, model_config
    if not {*SAME}.isdisjoint(config.get("architectures") or ()) or is_native(config):
        denoiser.unread_entries = _unread(config, model_config)
        identity.name_unread(config, denoiser.unread_entries, options.name, classes)
    return denoiser


def _unread(config: dict[str, Any], model_config: Any) -> tuple[str, ...]:
    """The entries of another class's config.json that the config class of transformers does not read."""
    read = inspect.signature(type(model_config)).parameters
    return identity.unread_entries(config, {*read, *model_config.attribute_map, *READ_ELSEWHERE})


class MaskedLM(OwnForward):
    """A masked LM of transformers, or a network of a checkpoint's own code."""

    appends_sep = True
    steers_attention = True  # a cache is inserted at its attention calls (cached/steering.py): `stream` keeps no keys

    def take(self, model: Any) -> None:
        self.pad_id, self.sparse_from = padding_id(model.config, self.tokens, self.mask_id), without_block_sparse(model)
        super().take(model)
        if self.sparse_from is not None and self.max_length >= self.sparse_from:
            log.warning(
                "By its config %s has block-sparse attention from %d positions on; it is scored with full attention at "
                "every length, as its own code does after the first shorter row",
                self.path,
                self.sparse_from,
            )
        if self.attention == "bidirectional" and self.refuses:
            length = self_tests.REPEATED if auto_model.is_native(model) else self_tests.LENGTH
            with torch.no_grad():
                self_tests.require_repeatable(self, self.path, length)
                if self.dtype.itemsize < 4 and not self.quantized:
                    self._retest_in_float32()

    def features(self, ids: torch.Tensor, real: torch.Tensor | None, **more: torch.Tensor) -> torch.Tensor:
        mask = None
        if real is not None:
            mask = real.long()  # (R, L)
            ids = ids.masked_fill(~real, self.pad_id)  # not [MASK]: ESM counts the masked positions of a row
        return self._features(ids, mask, **more)

    def stream(
        self, ids: torch.Tensor, positions: torch.Tensor, seen: torch.Tensor, past: list[KeysValues] | None
    ) -> tuple[torch.Tensor, list[KeysValues]]:
        """Own code may not accept our cache, so clean positions are evaluated again; their "keys" are their ids."""
        own = ids[:, None, :, None]  # (N, 1, Q, 1)
        clean = past[0][0][:, 0, :, 0] if past else ids[:, :0]  # (N, K); rows with fewer clean positions end in padding
        places = torch.arange(clean.shape[1], device=ids.device)  # (K,)
        known = (places[:, None] // self.block >= places // self.block).expand(len(ids), -1, -1)  # (N, K, K)
        none = torch.zeros(len(ids), clean.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device)  # (N, K, Q)
        allowed = torch.cat([torch.cat([known, none], 2), seen], 1)  # (N, K + Q, K + Q)
        lowest = torch.finfo(self.dtype).min
        mask = torch.zeros(allowed.shape, dtype=self.dtype, device=ids.device).masked_fill(~allowed, lowest)
        whole = torch.cat([clean, ids], 1)  # (N, K + Q)
        position_ids = torch.cat([places.expand_as(clean), positions.expand_as(ids)], 1)
        logits = self._logits(whole, mask[:, None], position_ids=position_ids)  # (N, K + Q, V)
        return logits[:, clean.shape[1] :], [(own, own)]

    def describe(self) -> dict[str, object]:
        if self.sparse_from is None or self.max_length < self.sparse_from:
            return super().describe()
        return {**super().describe(), "attention_type": "original_full, not block_sparse as in its config"}

    def _retest_in_float32(self) -> None:
        """Repeat self-tests in float32, if the network is small enough: rounding could hide weak effects."""
        if sum(parameter.numel() for parameter in self.model.parameters()) <= COPIED_PARAMETERS:
            splits, self.splits_head = self.splits_head, False
            with _in_float32(self.model):
                self.relative_positions = self_tests.ties_when_all_mask(self)
                self.honours_padding = self.honours_padding and self_tests.honours_padding(self)
                self_tests.require_separate_rows(self, self.path)
            self.splits_head = splits


@contextlib.contextmanager
def _in_float32(model: torch.nn.Module) -> Iterator[None]:
    """Copies of a network's tensors in float32 take their place; a part of a tensor stays that part."""
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()]
    own = [tensor.data for tensor in tensors]
    try:
        for tensor in tensors:
            tensor.data = tensor.data.float()
        yield
    finally:
        for tensor, data in zip(tensors, own, strict=True):
            tensor.data = data


def padding_id(config: Any, tokens: set[int], mask_id: int) -> int:
    """The id for padding: that of the config, if it is a token other than [MASK]; otherwise the lowest token."""
    pad_id = getattr(config, "pad_token_id", None)
    known = isinstance(pad_id, int) and pad_id in tokens and pad_id != mask_id
    return pad_id if known else min(tokens - {mask_id})


def without_block_sparse(model: Any) -> int | None:
    """Give a BigBird full attention; returns the row length from which its config has block-sparse attention, or None.

    Its own code switches for good at the first shorter row, so numbers would depend on earlier rows.
    """
    config = model.config
    if getattr(config, "attention_type", None) != "block_sparse" or not hasattr(model, "base_model"):
        return None
    model.base_model.set_attention_type("original_full")
    return (5 + 2 * config.num_random_blocks) * config.block_size + 1


# ---------------------------------------------------------------- remote_code
# A checkpoint's own code (`backend=remote`, `trust_remote_code=true`), repaired for current transformers.
#
# The class is built on the CPU and filled key by key: transformers 5 would leave rotary frequencies that it computes
# itself uninitialised. Every repair is undone once the class is built.


COMPUTED = "rotary_emb.inv_freq"  # the ending of keys that are recomputed
ROWS = ("embedding_size", "vocab_size", "new_vocab_size")
HEADED = ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModel")  # AutoModel may lack the head


def load(
    family: Family | None, config: dict[str, Any], options: LoadOptions, tokenizer: PreTrainedTokenizerBase
) -> MaskedLM:
    """The denoiser of a checkpoint's own code; raises DuelError if it does not load strictly or fails a self-test."""
    _class_reference(config, options)
    family = family or OWN_CODE
    rows = max((config[key] for key in ROWS if isinstance(config.get(key), int)), default=None)
    denoiser = MaskedLM(family, config, options, tokenizer, rows)
    if denoiser.attention == "causal_prefix" or family.anchor == "target":
        raise DuelError(f"backend=remote does not support the family {family.name}; leave backend out.")
    denoiser.options = lora.fetch(options)
    model = lora.merge(own_network(config, options), denoiser.options.peft)
    denoiser.take(device_map.place(model, options).eval())
    return denoiser


def own_network(config: dict[str, Any], options: LoadOptions) -> Any:
    """The network of a checkpoint's own code, on the CPU; raises DuelError if it does not load strictly."""
    reference = _class_reference(config, options)
    dtype = pick_dtype(options.dtype, options.device)
    tensors = {key: value for key, value in weights.read(options.name).items() if not key.endswith(COMPUTED)}
    if dtype == "auto":
        dtype = next(value.dtype for value in tensors.values() if value.is_floating_point())
    with repairs(), default_dtype(dtype):
        model_config = AutoConfig.from_pretrained(options.name, trust_remote_code=True)
        _complete(model_config, config)
        model = get_class_from_dynamic_module(reference, options.name)(model_config)
    cast = {key: value.to(dtype) if value.is_floating_point() else value for key, value in tensors.items()}
    _fill(model, cast, model_config)
    self_tests.rotary_frequencies(model, model_config, options.name)
    return model


def _class_reference(config: dict[str, Any], options: LoadOptions) -> str:
    """The model class in `auto_map`; raises DuelError if there is none, or for options that exclude own code."""
    names = config.get("auto_map") or {}
    reference = next((names[key] for key in HEADED if key in names), None)
    if reference is None:
        raise DuelError(f"{options.name} has no code (no auto_map with a model in config.json).")
    options.refuse("own code", "cache", "sigma", "first_token", "load_in_8bit", "load_in_4bit")
    if options.attention == "causal":
        raise DuelError(
            f"backend=remote does not go with attention=causal for {options.name}: leave backend out, and pass "
            "trust_remote_code=true alone."
        )
    if not options.trust_remote_code:
        raise DuelError(f"{options.name} runs its own code: pass trust_remote_code=true if you trust it.")
    return reference


def _complete(model_config: Any, config: dict[str, Any]) -> None:
    """Add entries that older code expects and transformers 5 no longer sets."""
    for name, value in (("use_cache", False), ("pad_token_id", None), ("rope_theta", config.get("rope_theta"))):
        if getattr(model_config, name, None) is None:
            setattr(model_config, name, value)
    model_config.use_cache = False
    if getattr(model_config, "rope_scaling", None) is False:
        model_config.rope_scaling = None
        if hasattr(model_config, "rope_parameters"):  # transformers 5; None would lose theta
            model_config.rope_parameters = {"rope_type": "default", "rope_theta": model_config.rope_theta}


def _fill(model: Any, tensors: dict[str, torch.Tensor], model_config: Any) -> None:
    """Load every tensor; torch raises an error that names all tensors missing, unknown or of another shape."""
    own = dict(model.named_parameters(remove_duplicate=False))
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    tied = set()
    if head is not None and getattr(model_config, "tie_word_embeddings", False):
        tied = {key for key in own if own[key] is head.weight} - set(tensors)
    model.load_state_dict({**tensors, **{key: own[key] for key in tied}}, assign=True)
    if tied:
        head.weight = model.get_input_embeddings().weight


@contextlib.contextmanager
def repairs() -> Iterator[None]:
    """Names that older code imports and transformers no longer has, restored while a class is built."""

    class Placeholder:
        """Replaces a type that is used in annotations only."""

    removed = (
        (transformers.utils, "LossKwargs", Placeholder),
        (transformers.utils.import_utils, "is_torch_fx_available", lambda: False),
    )
    added = [(module, name) for module, name, value in removed if not hasattr(module, name)]
    for module, name, value in removed:
        if (module, name) in added:
            setattr(module, name, value)
    lacks_default = "default" not in ROPE_INIT_FUNCTIONS
    if lacks_default:
        ROPE_INIT_FUNCTIONS["default"] = plain_rope
    try:
        yield
    finally:
        for module, name in added:
            delattr(module, name)
        if lacks_default:
            ROPE_INIT_FUNCTIONS.pop("default", None)


def plain_rope(model_config: Any, device: Any = None, **ignored: Any) -> tuple[torch.Tensor, float]:
    """Unscaled rotary frequencies theta^(-2i/d), (d / 2,), and an attention factor of 1."""
    parameters = getattr(model_config, "rope_parameters", None) or {}
    theta = parameters.get("rope_theta") or model_config.rope_theta
    head = getattr(model_config, "head_dim", None) or model_config.hidden_size // model_config.num_attention_heads
    width = int(head * (getattr(model_config, "partial_rotary_factor", None) or 1.0))
    return 1.0 / theta ** (torch.arange(0, width, 2, device=device, dtype=torch.float32) / width), 1.0


# ---------------------------------------------------------------- own_class
# A checkpoint's network in the class that its authors name, to compare with the one that runs here.


READ = ("dtype", "revision", "trust_remote_code")  # network arguments that concern this class, too


def own_class_load(name: str, device: str | None, network: Mapping[str, Any]) -> torch.nn.Module:
    """The network of a checkpoint, from its own code, if that is trusted, or from a class of transformers."""
    for argument in ("peft", "load_in_8bit", "load_in_4bit", "device_map"):
        if network.get(argument):
            raise DuelError(f"{argument} changes the network or where it is.")
    arguments = {key: network[key] for key in READ if key in network}
    options = hub.pin_revision(LoadOptions(resolve(name), hub.pick_device(device), **arguments))
    config = hub.read_config(options.name, options.revision)
    if any(name in (config.get("auto_map") or {}) for name in HEADED):
        if not options.trust_remote_code:
            raise DuelError("its own code is run only where it is trusted; pass trust_remote_code=true.")
        folder = hub.local_folder(options.name, options.revision)
        model = own_network(config, LoadOptions(folder, options.device, **arguments))
        return model.to(options.device).eval()
    kind = next((getattr(transformers, each, None) for each in config.get("architectures") or ()), None)
    if kind is None:
        raise DuelError("it has no code, and transformers has no class for it.")
    dtype = hub.pick_dtype(options.dtype, options.device)
    model = kind.from_pretrained(options.name, dtype=dtype, revision=options.revision)
    return model.to(options.device).eval()
