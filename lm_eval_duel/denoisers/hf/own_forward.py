"""transformers' own networks through their own forward: ids in, logits out.

    MaskedLM    BERT, RoBERTa, ModernBERT, ESM, ...: an any-order model; also a checkpoint's own code (own_code.py)
    CausalLM    GPT-2, Llama, Gemma, ...: a token is predicted from those before it, so one pass scores a whole row

The layers run over whole rows, the head at some positions only. A test at load finds where the class can be divided:

    BeforeHead     at the input of the output embedding, which learned planners read
    AfterLayers    at the output of the layers: head, soft cap, scale and bias run later (causal LMs)

If at neither, the whole network runs at every position.

Shapes: R rows, L row length, N rows of a call, Q queries, K clean columns, U positions, D features, V tokens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import transformers
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
)

from lm_eval_duel.core.network import KeysValues
from lm_eval_duel.denoisers import self_tests
from lm_eval_duel.denoisers.checkpoint import Checkpoint, autoregressive, name_unread, unread_entries
from lm_eval_duel.denoisers.hf import weights
from lm_eval_duel.denoisers.hf.families import Family
from lm_eval_duel.denoisers.hf.pretrained import Pretrained, configured_positions, held_positions, is_native, load_model
from lm_eval_duel.errors import DuelError

log = logging.getLogger("lm_eval.duel_mdm")

MASKED_LM = Family("masked-lm", "", bos="auto")
CAUSAL_LM = Family("causal-lm", "", attention="causal", shift=1)
SAME_NETWORK = ("EsmForDPLM", "AntiBERTy")  # classes of others that are a class of transformers under another name
READ_ELSEWHERE = ("mask_token_id", "rope_theta", "rope_scaling", "hidden_act", "dplm_type")
COPIED_PARAMETERS = 2_000_000_000  # up to this size a network's tensors are copied into float32 for self-tests
# What may be raised when a class is divided where it cannot be
NOT_DIVIDED = (RuntimeError, IndexError, TypeError, ValueError, AttributeError, AssertionError)


def masked_lm(checkpoint: Checkpoint) -> MaskedLM:
    """A masked LM of transformers, without its weights; raises DuelError for any other network."""
    options = checkpoint.options
    config = checkpoint.config
    model_config = checkpoint.native_config()
    config_class = type(model_config)
    architectures = config.get("architectures") or [config_class.__name__]
    classes = ", ".join(architectures)
    if getattr(model_config, "is_encoder_decoder", False):
        raise DuelError(f"{options.name} ({classes}) is an encoder-decoder network, which this package does not score.")
    if config_class not in MODEL_FOR_MASKED_LM_MAPPING:
        if config_class in MODEL_FOR_CAUSAL_LM_MAPPING:
            native_causal = MODEL_FOR_CAUSAL_LM_MAPPING[config_class].__name__
            require_known(checkpoint, native_causal)
            if not config.get("architectures"):
                raise checkpoint.unknown("so what it was trained as is not known", native_causal)
            raise autoregressive(options.name, classes)
        raise checkpoint.unknown("which is neither a masked LM nor of a known diffusion family")
    native = MODEL_FOR_MASKED_LM_MAPPING[config_class]
    require_known(checkpoint, native.__name__, SAME_NETWORK)
    options.refuse("masked LM", "shift_logits", "backend", "sigma", "first_token", "peft")
    if options.attention not in (None, "bidirectional"):
        raise DuelError(f"{options.name} is a masked LM of transformers, so bidirectional; leave attention out.")
    log.info("%s is a masked LM (%s), scored as an any-order model", options.name, classes)

    checkpoint = dataclasses.replace(checkpoint, family=MASKED_LM)
    rows = getattr(model_config, "vocab_size", None)
    denoiser = MaskedLM(checkpoint, rows)
    denoiser.kind = AutoModelForMaskedLM
    denoiser.model_config = model_config
    # A config of transformers' own class holds what that class reads. One of another class may hold more.
    is_of_another_class = bool(config.get("auto_map")) or not {*SAME_NETWORK}.isdisjoint(architectures)
    if is_of_another_class:
        parameters = inspect.signature(config_class).parameters
        read = {*parameters, *model_config.attribute_map, *READ_ELSEWHERE}
        denoiser.unread_entries = unread_entries(config, read)
        name_unread(config, denoiser.unread_entries, options.name, classes)
    limit_by_config(denoiser)
    return denoiser


def causal_lm(checkpoint: Checkpoint) -> CausalLM:
    """A causal LM of transformers, without its weights; raises DuelError for others, such as one of a family."""
    options = checkpoint.options
    if checkpoint.family is not None:
        raise DuelError(
            f"{options.name} is a masked diffusion model ({checkpoint.family.name}), not autoregressive: leave "
            "estimator=ar and attention=causal out."
        )
    options.refuse("causal LM", "sigma", "first_token", "shift_logits", "mask_token_id")
    if options.shift_logits is False:  # `refuse` takes False for an argument that was left out
        raise DuelError(f"{options.name} is a causal LM, whose logits are always shifted; leave shift_logits out.")
    if options.trust_remote_code:
        model_config = AutoConfig.from_pretrained(
            options.name,
            revision=options.revision,
            trust_remote_code=True,
        )
        rows = None  # the embedding may have more rows than the config says
    else:
        model_config = checkpoint.native_config()
        _require_causal(model_config, checkpoint)
        rows = getattr(model_config, "vocab_size", None)
    model_config.use_cache = False

    checkpoint = dataclasses.replace(checkpoint, family=CAUSAL_LM)
    denoiser = CausalLM(checkpoint, rows)
    denoiser.kind = AutoModelForCausalLM
    denoiser.model_config = model_config
    limit_by_config(denoiser)
    return denoiser


def limit_by_config(denoiser: OwnForward) -> None:
    """Set the length of rows before the network is made, which may hold fewer positions."""
    positions = configured_positions(denoiser.model_config, denoiser.tokenizer_length)
    if positions is not None:
        denoiser.limit_rows(positions)


def _require_causal(model_config: Any, checkpoint: Checkpoint) -> None:
    """Raise DuelError if transformers has no causal LM for this config, or if the config names another class."""
    name = checkpoint.name
    architectures = checkpoint.config.get("architectures") or []
    classes = ", ".join(architectures)
    # An architecture that config.json names must be the class that runs: networks built on Llama, say, keep its
    # model_type and are other networks.
    native = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(model_config), None)
    named = [kind.lower() for kind in architectures]
    if native is not None and native.__name__.lower() in named:
        return
    if checkpoint.config.get("auto_map"):
        raise DuelError(
            f"By its config {name} is a {classes} with its own code. If it is autoregressive and you trust its code, "
            "pass trust_remote_code=true."
        )
    if native is None:
        raise DuelError(
            f"Cannot read '{name}' with estimator=ar or attention=causal: its network is not autoregressive."
        )
    require_known(checkpoint, native.__name__)
    if classes:
        log.warning("By its config %s is a %s; scoring it as transformers' %s", name, classes, native.__name__)


@functools.cache
def _class_names() -> frozenset[str]:
    """The names of transformers in lower case; listing them takes 0.15 s."""
    return frozenset(name.lower() for name in dir(transformers))


def require_known(checkpoint: Checkpoint, native: str, also: tuple[str, ...] = ()) -> None:
    """Raise DuelError if a config names a class that is neither in transformers nor one of `also`.

    Its model type alone does not make it transformers' class `native`: it may be a diffusion model built on it.
    """
    names = _class_names() | {name.lower() for name in also}
    for kind in checkpoint.config.get("architectures") or []:
        if str(kind).lower() not in names:
            raise checkpoint.unknown(same_as=native)


class OwnForward(Pretrained):
    """A network of transformers, or of a checkpoint's own code, through its own forward."""

    parts: BeforeHead | AfterLayers | None = None
    splits_head = False

    def take(self, model: Any) -> None:
        self.limit_rows(held_positions(model, self.tokenizer_length))
        super().take(model)
        with torch.no_grad():
            logits = self._first_call()
            self.set_columns(logits.shape[-1])
            if not self.by_blocks:
                self._divide()
            self_tests.run(self, self.path, self.refuses)

    def limit_rows(self, positions: int | None) -> None:
        """Set the length of rows to at most the `positions` that the network can hold."""
        if positions and self.attention == "causal":
            positions += 1  # the last token of a row is predicted but never an input
        bounds = filter(None, (self.family_entry.max_length, positions))
        self.set_row_length(min(bounds, default=None))

    @property
    def layers(self) -> torch.nn.Module:
        return self.parts.layers if self.parts is not None else self.model

    def head(self, features: torch.Tensor) -> torch.Tensor:
        if not self.splits_head:  # the features are the logits
            return features  # (U, V)
        return self.parts.head(features).to(self.device)  # (U, V)

    def _features(self, *call: Any, **more: Any) -> torch.Tensor:
        """The input of the head (R, L, D) in a call of the network; the logits (R, L, V) if it is not split off."""
        if not self.splits_head:
            return self._logits(*call, **more)
        return self.parts.features(*call, **more).to(self.device)

    def _logits(self, ids: torch.Tensor, mask: torch.Tensor | None = None, **more: torch.Tensor) -> torch.Tensor:
        return logits_of(self.model, ids, mask, **more).to(self.device)  # (R, L, V)

    def _first_call(self) -> torch.Tensor:
        """Logits of a first small row."""
        length = min(2, self.max_length)
        ids = torch.full((1, length), self.mask_id or 0, device=self.device)  # (1, L)
        if self.by_blocks:
            positions = torch.arange(length, device=self.device)[None]  # (1, L)
            seen = torch.ones(1, length, length, dtype=torch.bool, device=self.device)
            logits, _ = self.stream(ids, positions, seen, None)
            return logits
        logits = self._logits(ids)
        if logits.shape[:2] != ids.shape:
            shape = tuple(logits.shape)
            raise DuelError(f"{self.path} returns logits {shape} for {length} positions; expected one row for each.")
        return logits

    def _divide(self) -> None:
        """Split the head off at the first place where both parts give the logits of a few rows bit for bit.

        The head runs on whole rows here, as in the network: on another shape the last bits may differ.
        """
        divisions: list[Callable[[], BeforeHead | AfterLayers]] = [partial(BeforeHead, self.model, self._logits)]
        if self.attention == "causal":
            divisions += [partial(AfterLayers, self.model, name) for name in layer_modules(self.model)]
        rows = self_tests.probe_rows(self)  # (R, L)
        expected = self._logits(rows)  # (R, L, V)
        for divide in divisions:
            with contextlib.suppress(*NOT_DIVIDED):
                parts = divide()
                features = parts.features(rows)  # (R, L, D)
                logits = parts.head(features).to(self.device)
                if torch.equal(logits, expected):
                    self.parts = parts
                    self.splits_head = True
                    return
        log.info("The head of %s cannot be split off: it runs at every position of a row", type(self.model).__name__)


class MaskedLM(OwnForward):
    """A masked LM of transformers, or a network of a checkpoint's own code."""

    appends_sep = True
    steers_attention = True  # a cache is inserted at its attention calls (cached/kept_keys.py): `stream` keeps no keys

    def take(self, model: Any) -> None:
        self.pad_id = padding_id(model.config, self.tokens, self.mask_id)
        self.sparse_from = without_block_sparse(model)
        super().take(model)
        if self.sparse_from is not None and self.max_length >= self.sparse_from:
            log.warning(
                "By its config %s has block-sparse attention from %d positions on; it is scored with full attention at "
                "every length, as its own code does after the first shorter row",
                self.path,
                self.sparse_from,
            )
        if self.attention == "bidirectional" and self.refuses:
            length = self_tests.REPEATED if is_native(model) else self_tests.LENGTH
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
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        seen: torch.Tensor,
        past: list[KeysValues] | None,
    ) -> tuple[torch.Tensor, list[KeysValues]]:
        """Own code may not accept our cache, so clean positions are evaluated again; their "keys" are their ids."""
        rows, queries = ids.shape
        clean = ids[:, :0]  # (N, K)
        if past:
            keys, _ = past[0]
            clean = keys[:, 0, :, 0]  # rows with fewer clean positions end in padding
        kept = clean.shape[1]
        places = torch.arange(kept, device=ids.device)  # (K,)

        # clean positions see their own block and those before it, and none of the queries
        block_of = places // self.block  # (K,)
        before = (block_of[:, None] >= block_of).expand(rows, -1, -1)  # (N, K, K)
        none = torch.zeros(rows, kept, queries, dtype=torch.bool, device=ids.device)  # (N, K, Q)
        seen_by_clean = torch.cat([before, none], 2)  # (N, K, K + Q)
        allowed = torch.cat([seen_by_clean, seen], 1)  # (N, K + Q, K + Q)

        whole = torch.cat([clean, ids], 1)  # (N, K + Q)
        position_ids = torch.cat([places.expand_as(clean), positions.expand_as(ids)], 1)
        mask = self.additive_mask(allowed)
        logits = self._logits(whole, mask, position_ids=position_ids)  # (N, K + Q, V)
        as_keys = ids[:, None, :, None]  # (N, 1, Q, 1)
        return logits[:, kept:], [(as_keys, as_keys)]

    def describe(self) -> dict[str, object]:
        described = super().describe()
        if self.sparse_from is not None and self.max_length >= self.sparse_from:
            described["attention_type"] = "original_full, not block_sparse as in its config"
        return described

    def _retest_in_float32(self) -> None:
        """Repeat self-tests in float32, if the network is small enough: rounding could hide weak effects."""
        count = sum(parameter.numel() for parameter in self.model.parameters())
        if count > COPIED_PARAMETERS:
            return
        dtype = self.dtype
        splits_head = self.splits_head
        self.dtype = torch.float32
        self.splits_head = False
        with _in_float32(self.model):
            self.relative_positions = self_tests.ties_when_all_mask(self)
            self.honours_padding = self.honours_padding and self_tests.honours_padding(self)
            self_tests.require_separate_rows(self, self.path)
        self.dtype = dtype
        self.splits_head = splits_head


class CausalLM(OwnForward):
    """A causal LM of transformers."""

    def read(self) -> Any:
        options = weights.fetch_adapter(self.options)
        self.options = options
        if options.dtype == "float64":
            self.model_config._experts_implementation = "eager"  # grouped products stop at float32 in transformers 5
        model_kwargs: dict[str, Any] = {"trust_remote_code": options.trust_remote_code}
        # other attention kernels drop the soft cap of Gemma-2, silently in transformers 4
        if getattr(self.model_config, "attn_logit_softcapping", None):
            model_kwargs["attn_implementation"] = "eager"
        model = load_model(self.kind, self.model_config, self.config, options, **model_kwargs)
        model = weights.merge_adapter(model, options.peft)
        if not is_native(model):  # transformers 5 leaves the frequencies of own code uninitialised
            self_tests.rotary_frequencies(model, self.model_config, options.name)
        return model

    def features(self, ids: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
        """Padding is on the right, where a causal network does not see it."""
        return self._features(ids)

    def stream(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        seen: torch.Tensor,
        past: list[KeysValues] | None,
    ) -> tuple[torch.Tensor, list[KeysValues]]:
        """When sampling, clean columns are evaluated again (caches differ by class); their "keys" are their ids."""
        as_keys = ids[:, None, :, None]  # (N, 1, Q, 1)
        if past is None:
            return self.features(ids, None), [(as_keys, as_keys)]
        keys, _ = past[0]
        clean = keys[:, 0, :, 0]  # (N, K)
        whole = torch.nn.functional.pad(clean, (0, ids.shape[1]))  # (N, K + Q)
        # a row may have fewer than K clean columns; columns after its own are not seen
        whole.scatter_(1, positions, ids)
        features = self.features(whole, None)  # (N, K + Q, D)
        at = positions[:, :, None].expand(-1, -1, features.shape[2])  # (N, Q, D)
        return features.gather(1, at), [(as_keys, as_keys)]


class BeforeHead:
    """A network divided at the input of its output embedding, which is the last thing that it computes."""

    def __init__(self, model: Any, logits_of: Callable[..., torch.Tensor]):
        self.layers = model
        self.head = model.get_output_embeddings()
        self._logits_of = logits_of

    def features(self, *call: Any, **more: Any) -> torch.Tensor:
        """The input of the embedding (R, L, D) in a call of the network."""
        caught = []

        # The class runs to its end, but its head gets no position: it runs later, where positions are masked.
        def catch(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            caught.append(inputs[0])
            return (inputs[0][:, :0], *inputs[1:])

        hook = self.head.register_forward_pre_hook(catch)
        try:
            self._logits_of(*call, **more)
        finally:
            hook.remove()
        return caught[-1]


class AfterLayers:
    """A network divided at the output of its layers, the module `name`."""

    output_class: type  # of the layers

    def __init__(self, model: Any, name: str):
        self._model = model
        self.layers = model.get_submodule(name)
        parent, _, self._name = name.rpartition(".")
        self._modules = model.get_submodule(parent)._modules  # where `head` puts a function in the place of the layers

    def features(self, ids: torch.Tensor) -> torch.Tensor:
        """The output of the layers (R, L, D) for rows without padding."""
        out = self.layers(input_ids=ids)
        self.output_class = type(out)
        return out.last_hidden_state

    def head(self, features: torch.Tensor) -> torch.Tensor:
        """Logits (U, V) or (R, L, V) that the class computes from features (U, D) or (R, L, D)."""
        rows = features if features.dim() == 3 else features[None]

        def return_features(*_: Any, **__: Any) -> Any:
            return self.output_class(last_hidden_state=rows)

        # The class runs once more, with a function in the place of its layers that returns these features.
        ids = torch.zeros(rows.shape[:2], dtype=torch.long, device=features.device)  # ignored
        self._modules[self._name] = return_features
        try:
            logits = logits_of(self._model, ids)
        finally:
            self._modules[self._name] = self.layers
        return logits.view(*features.shape[:-1], -1)


def logits_of(
    model: torch.nn.Module,
    ids: torch.Tensor,
    mask: torch.Tensor | None = None,
    **more: torch.Tensor,
) -> torch.Tensor:
    """Logits (R, L, V) from a tensor, a tuple or an output class, whichever the network returns."""
    if mask is not None:
        more["attention_mask"] = mask
    out = model(input_ids=ids, **more)
    if isinstance(out, torch.Tensor):
        return out
    return out[0] if isinstance(out, tuple) else out.logits


def layer_modules(model: Any) -> Iterator[str]:
    """Names of modules that may be a network without its head: transformers' base model and decoder."""
    without_head = [model.base_model]
    if hasattr(model, "get_decoder"):
        without_head.append(model.get_decoder())
    for name, module in model.named_modules():
        if name and module in without_head:
            yield name


@contextlib.contextmanager
def _in_float32(model: torch.nn.Module) -> Iterator[None]:
    """Copies of a network's tensors in float32 take their place; at the end the originals return."""
    tensors = []
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensors.append(tensor)
    originals = [tensor.data for tensor in tensors]
    try:
        for tensor in tensors:
            tensor.data = tensor.data.float()
        yield
    finally:
        for tensor, original in zip(tensors, originals, strict=True):
            tensor.data = original


def padding_id(config: Any, tokens: set[int], mask_id: int) -> int:
    """The id for padding: that of the config, if it is a token other than [MASK]; otherwise the lowest token."""
    pad_id = getattr(config, "pad_token_id", None)
    is_token = isinstance(pad_id, int) and pad_id in tokens and pad_id != mask_id
    return pad_id if is_token else min(tokens - {mask_id})


def without_block_sparse(model: Any) -> int | None:
    """Give a BigBird full attention; returns the row length from which its config has block-sparse attention, or None.

    Its own code switches for good at the first shorter row, so numbers would depend on earlier rows.
    """
    config = model.config
    if getattr(config, "attention_type", None) != "block_sparse" or not hasattr(model, "base_model"):
        return None
    model.base_model.set_attention_type("original_full")
    return (5 + 2 * config.num_random_blocks) * config.block_size + 1  # shorter rows have full attention in any case
