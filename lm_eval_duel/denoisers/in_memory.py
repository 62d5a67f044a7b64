"""Networks in memory, such as those that are being trained.

    a Denoiser                                    itself
    transformers' masked LMs, and a user's        hf/own_forward.py
    class that takes input_ids (LLaDA, Dream)
    transformers' decoders                        hf/decoder.py, under an explicit mask
    a function logits = f(ids, real)              `Function`

The weights are not copied. Every call runs with dropout off and outside autocast, and leaves modules, gradient mode and
autocast as they were, also if it raises an error.

Shapes: R rows, L row length, V tokens.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import weakref
from collections.abc import Callable, Mapping
from functools import partialmethod
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.denoisers import loading, self_tests, user_module, vocabulary
from lm_eval_duel.denoisers.checkpoint import Checkpoint, find_family
from lm_eval_duel.denoisers.hf.decoder import Decoder
from lm_eval_duel.denoisers.hf.families import PLAIN
from lm_eval_duel.denoisers.hf.own_code import OWN_CODE
from lm_eval_duel.denoisers.hf.own_forward import MASKED_LM, MaskedLM
from lm_eval_duel.denoisers.hf.pretrained import UNBOUNDED, Pretrained, is_native, trained_positions
from lm_eval_duel.denoisers.hub import explained
from lm_eval_duel.denoisers.load_options import IN_MEMORY_ARGUMENTS, NETWORK_ARGUMENTS, LoadOptions
from lm_eval_duel.denoisers.recognition import has_random_tokens, require_supported
from lm_eval_duel.denoisers.self_tests import buffers_kept, module_of
from lm_eval_duel.denoisers.vocabulary import excluded_columns, find_mask_id, row_length
from lm_eval_duel.errors import DuelError, documentation, require_known

log = logging.getLogger("lm_eval.duel_mdm")
IN_MEMORY = "in memory"  # what the spec says of weights that may change
DIGEST = "digest"


def from_model(
    model: Any,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    module: torch.nn.Module | None = None,
    device: torch.device | str | None = None,
    self_tests: bool = True,
    weights: str | None = None,
    autocast: torch.dtype | None = None,
    **network: Any,
) -> Denoiser:
    """The denoiser of a network in memory. Arguments and errors: see `Duel.from_model`."""
    require_known("argument", network, IN_MEMORY_ARGUMENTS, "of from_model")
    if isinstance(model, type):
        raise DuelError(f"from_model takes a network; got the class {model.__name__}. Pass an instance of it.")
    require_dtype(autocast)
    bare = user_module.unwrapped(model)
    if module is not None and not isinstance(module, torch.nn.Module):
        raise DuelError(f"module is the torch.nn.Module that the network runs; got {module!r:.80}.")
    if weights is not None and not isinstance(weights, str):
        raise DuelError(f"weights is a text for the spec, or {DIGEST!r}; got {weights!r:.80}.")
    module = module_of(bare) if module is None else user_module.unwrapped(module)
    if module is not None:
        user_module.require_whole(module)
    name = getattr(bare, "__name__", type(bare).__name__)
    device = user_module.device_of(bare, module, device)
    options = LoadOptions(name, device, tokenizer, **network)
    tokenizer_or_any: Any = _AnyId(module) if tokenizer is None else tokenizer
    if weights == DIGEST and module is None:
        raise DuelError(f"weights={DIGEST!r} hashes a module, and {name} is a function: pass the module as module=.")

    restored = buffers_kept(bare if module is None else module)
    evaluating = user_module.evaluating(module, options.device, autocast)
    with explained(name, "run network"), torch.no_grad(), restored, evaluating:
        plain = _plain(bare, options, tokenizer_or_any, self_tests, module is not None)
    vocabulary.warn_of_another_mask(name, plain.mask_id, tokenizer)
    _warn_of_half_precision(module, name)

    denoiser = InMemory(plain, module, name, weights or IN_MEMORY, autocast)
    denoiser.special_tokens = vocabulary.expected(denoiser, tokenizer)
    return loading.wrapped(denoiser, options)


def require_dtype(autocast: torch.dtype | None) -> None:
    """Raise DuelError if `autocast` is not a floating point dtype."""
    if autocast is None:
        return
    if not isinstance(autocast, torch.dtype) or not autocast.is_floating_point:
        raise DuelError(f"'autocast' is a dtype, such as torch.bfloat16, or None; got {autocast!r}.")


_half: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # modules that were named in the warning


def _warn_of_half_precision(module: torch.nn.Module | None, name: str) -> None:
    """Warn once for each network whose weights are coarser than float32, as transformers loads them by default."""
    if module is None or module in _half:
        return
    dtypes = {parameter.dtype for parameter in module.parameters()}
    half = sorted(str(dtype).removeprefix("torch.") for dtype in dtypes & {torch.bfloat16, torch.float16})
    if not half:
        return
    _half.add(module)
    log.warning(
        "The weights of %s are in %s, so its numbers differ from those in float32 by tenths of a nat for a sentence. "
        "transformers keeps the dtype of a checkpoint; pass dtype=torch.float32 to its from_pretrained",
        name,
        " and ".join(half),
    )


class InMemory(Denoiser):
    """`plain`, a denoiser of a network in memory: each call leaves the network and torch as they were."""

    def __init__(
        self,
        plain: Denoiser,
        module: torch.nn.Module | None,
        name: str,
        weights: str,
        autocast: torch.dtype | None,
    ):
        self.resemble(plain)
        for attribute in ("model", "steers_attention"):  # a cache reads them
            if hasattr(plain, attribute):
                setattr(self, attribute, getattr(plain, attribute))
        self.plain = plain
        self.module = module
        self.path = name
        self.weights = weights
        self.autocast = autocast
        self.fixed_weights = False
        self.vocabulary = f"{self.token_count} of {self.vocab_size}"

    @property
    def coarse(self) -> bool:
        return self.autocast is not None or self._dtype.itemsize < 4

    @property
    def _dtype(self) -> torch.dtype:
        if self.module is not None:
            for parameter in self.module.parameters():
                return parameter.dtype
        return torch.get_default_dtype()

    @property
    def layers(self) -> torch.nn.Module:
        return self.plain.layers

    def _evaluated(self, name: str, *call: Any, **extra: Any) -> Any:
        """A call of `plain`, on copies of integer tensors that do not come from inference mode."""
        method = getattr(self.plain, name)
        copies = []
        with self.evaluating():
            for argument in call:
                # Autograd cannot save a tensor made in inference mode, and a network in training may need to.
                if getattr(argument, "dtype", None) == torch.long:
                    argument = argument.clone()
                copies.append(argument)
            return method(*copies, **extra)

    features = partialmethod(_evaluated, "features")
    features_at = partialmethod(_evaluated, "features_at")
    stream = partialmethod(_evaluated, "stream")
    stream_at = partialmethod(_evaluated, "stream_at")
    head = partialmethod(_evaluated, "head")

    def evaluating(self) -> contextlib.AbstractContextManager[None]:
        return user_module.evaluating(self.module, self.device, self.autocast)

    def describe(self) -> dict[str, object]:
        """The weights are "in memory", the text that the user passed, or a digest of their current values."""
        weights = self.weights
        if weights == DIGEST and self.module is not None:
            weights = user_module.digest(self.module)
        dtype = str(self._dtype).removeprefix("torch.")
        if self.autocast is not None:
            dtype += f", autocast to {self.autocast}".replace("torch.", "")

        described: dict[str, object] = {}
        is_ours = isinstance(self.plain, Function | MaskedLM | Decoder)
        if not is_ours:  # a user's denoiser has entries of its own
            described |= self.plain.describe()
        described |= {
            "denoiser": f"{self.path} in memory",
            "weights": weights,
            "dtype": dtype,
            "mask_token_id": self.mask_id,
            "vocabulary": self.vocabulary,
            "attention": self.attention,
            "shift": self.shift,
            "relative_positions": self.relative_positions,
        }
        if self.attention == "block_causal":
            described["last_block"] = self.last_block
        return described


class Function(Denoiser):
    """logits = f(ids, real): logits (R, L, V) of ids (R, L); `real` (R, L) is False at padding, None: there is none."""

    splits_head = False

    def __init__(
        self,
        function: Callable[..., Any],
        options: LoadOptions,
        tokenizer: Any,
        called_as: str,
    ):
        self.function = function
        self.called_as = called_as  # for errors
        self.path = options.name
        self.device = options.device
        self.bos = options.bos or self.bos
        self.shift = int(bool(options.shift_logits))
        self.mask_id = find_mask_id(options, {}, tokenizer, None, None)
        positions = tokenizer.model_max_length
        if positions >= UNBOUNDED:
            positions = None
        self.max_length = options.max_length or row_length(options.name, None, positions)

        self.vocab_size = self._first_call()
        tokens = set(tokenizer.get_vocab().values()) or set(range(self.vocab_size))
        self.excluded = excluded_columns(tokens, self.mask_id, self.vocab_size, self.path, self.device)

    def features(self, ids: torch.Tensor, real: torch.Tensor | None, **more: torch.Tensor) -> torch.Tensor:
        out = self.function(ids, real)
        if isinstance(out, dict):  # transformers' outputs are, too
            out = out["logits"]
        logits = out[0] if isinstance(out, tuple) else out
        if not isinstance(logits, torch.Tensor):
            raise DuelError(f"{self.path}(ids, real) must return logits, a tensor; got {type(logits).__name__}.")
        is_row_by_row = logits.dim() == 3 and logits.shape[:2] == ids.shape
        if not is_row_by_row or not logits.is_floating_point():
            rows, length = ids.shape
            raise DuelError(
                f"{self.path}(ids, real) must return logits of the shape (R, L, V), ({rows}, {length}, V) for this "
                f"call; got {logits.dtype} {tuple(logits.shape)}."
            )
        return logits

    def head(self, features: torch.Tensor) -> torch.Tensor:
        return features

    def _first_call(self) -> int:
        """The columns of the logits of a first small row; raises DuelError if they are not logits."""
        length = min(2, self.max_length)
        first = torch.full((1, length), self.mask_id, device=self.device)  # (1, L)
        remedy = f"It is called as logits = {self.called_as}, with ids {first.tolist()} here."
        with explained(self.path, "run network", remedy):
            logits = self.features(first, None)
        if logits.device.type != self.device.type:
            raise DuelError(
                f"{self.path} returns logits on {logits.device} for ids on {self.device}: pass the module that it runs "
                "as module=, or the device of its ids as device=."
            )
        sums = logits.float().sum(-1)
        if (logits >= 0).all() and torch.allclose(sums, torch.ones_like(sums), atol=0.02):
            raise DuelError(f"{self.path} returns probabilities; it must return logits, or log-probabilities.")
        return logits.shape[-1]

    def try_longest_row(self) -> None:
        """Raise DuelError if the network fails on a row of `max_length`, which it may never see in short texts."""
        longest = torch.full((1, self.max_length), self.mask_id, device=self.device)  # (1, L)
        remedy = "Its longest rows have max_length positions: lower max_length if it takes fewer."
        with explained(self.path, f"run a row of {self.max_length} positions through", remedy):
            self.features(longest, None)


def parameters(model: torch.nn.Module) -> Mapping[str, inspect.Parameter]:
    """The parameters of a module's `forward`, by name."""
    return inspect.signature(type(model).forward).parameters


def by_keyword(model: Callable[..., Any]) -> Callable[..., Any]:
    """f(ids, real) of a module whose arguments are named as in transformers; any other function unchanged."""
    if not isinstance(model, torch.nn.Module) or "input_ids" not in parameters(model):
        return model
    takes_mask = "attention_mask" in parameters(model)

    def function(ids: torch.Tensor, real: torch.Tensor | None) -> Any:
        if takes_mask and real is not None:
            return model(input_ids=ids, attention_mask=real.long())
        return model(input_ids=ids)

    return function


def _plain(
    model: Any,
    options: LoadOptions,
    tokenizer: Any,
    tested: bool,
    has_module: bool,
) -> Denoiser:
    """The denoiser of a network, by its kind. `has_module`: its module is known, so it was put in eval mode."""
    if not isinstance(model, Denoiser) and not callable(model):
        raise DuelError(
            "from_model takes a module of transformers, a function logits = f(ids, real), or a Denoiser; got "
            f"{type(model).__name__}. For a checkpoint on disk or on the hub use from_pretrained."
        )
    if not isinstance(model, Denoiser) and _takes_input_ids(model):
        return _of_transformers(model, options, tokenizer, tested)

    plain = _users_denoiser(model, options) if isinstance(model, Denoiser) else _function(model, options, tokenizer)
    if tested and options.max_length is not None and isinstance(plain, Function):
        plain.try_longest_row()
    self_tests.run(plain, options.name, tested)
    is_trusted = has_module and not tested  # its dropout is off, and the user wants no tests
    if not is_trusted and plain.attention == "bidirectional":
        try:
            self_tests.require_repeatable(plain, options.name, self_tests.LENGTH)
        except DuelError as error:
            hint = "" if has_module else " If that is dropout, pass the module that it runs as module=."
            raise DuelError(f"{error}{hint}") from None
    return plain


DEFINED_BY_A_DENOISER = {  # arguments of other networks, and the member in their place
    "mask_token_id": "mask_id",
    "max_length": "max_length",
    "shift_logits": "shift",
    "attention": "attention",
    "bos": "bos",
    "family": "family",
    "last_block": "last_block",
}


def _users_denoiser(model: Denoiser, options: LoadOptions) -> Denoiser:
    """`model` itself.

    Raises DuelError for an argument that would be ignored, since the class defines it, and for a class that opens rows
    in its own way, which `InMemory` would bypass.
    """
    for name, member in DEFINED_BY_A_DENOISER.items():
        given = getattr(options, name)
        own = getattr(model, member)
        if given not in (NETWORK_ARGUMENTS[name].default, own):
            raise DuelError(
                f"{type(model).__name__} is a Denoiser, which defines its own `{member}`, {own!r}: leave "
                f"{name}={given} out, and set it where the Denoiser is made."
            )
    if type(model).open is not Denoiser.open:
        raise DuelError(
            f"{type(model).__name__} opens rows in its own way (`open`), which from_model would leave out. Pass "
            "the network inside it, with cache=, cfg_scale=, ... as arguments; or use Duel(denoiser, ...)."
        )
    return model


def _function(model: Callable[..., Any], options: LoadOptions, tokenizer: Any) -> Function:
    """The denoiser of a function; raises DuelError for an attention that no function has."""
    if options.attention not in (None, "bidirectional"):
        raise DuelError(
            f"A function f(ids, real) is bidirectional; attention={options.attention} needs more: write a Denoiser "
            f"with `stream`, as in {documentation('python_api.md')}."
        )
    if options.family is not None:
        raise DuelError(
            f"A function f(ids, real) is of no family; family={options.family} would have no effect. Pass what it "
            "stands for, such as mask_token_id and shift_logits."
        )
    function = by_keyword(model)
    called_as = "f(ids, real)"
    if function is not model:
        mask = ", attention_mask=real" if "attention_mask" in parameters(model) else ""
        called_as = f"model(input_ids=ids{mask})"
    return Function(function, options, tokenizer, called_as)


def _of_transformers(
    model: Any,
    options: LoadOptions,
    tokenizer: Any,
    tested: bool,
) -> Denoiser:
    """The denoiser of a network that is called with input_ids and attention_mask."""
    if options.attention == "causal":
        raise DuelError(
            "Duel.from_model and training_metrics score masked diffusion models, and attention=causal is for "
            "autoregressive ones: save the network, and score its checkpoint with estimator=ar."
        )
    kind = type(model).__name__
    class_alone = {"architectures": [kind]}  # the config may be that of the network it was trained from
    require_supported(class_alone, options.name, options.family)
    if has_random_tokens(class_alone):
        raise DuelError(f"{kind} is scored from a checkpoint, with estimator=noised_elbo; not in memory.")
    if getattr(model.config, "attention_type", None) == "block_sparse":  # it depends on the length of earlier rows
        raise DuelError(f"{kind} has block-sparse attention: call its set_attention_type('original_full') first.")

    native = is_native(model)
    config = _entries_of(model.config)
    may_be_causal = native and kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    if may_be_causal and options.family is None and options.attention is None:
        if kind in PLAIN:
            raise _autoregressive(kind, "family=<its family>, or attention='bidirectional' with mask_token_id=<id>")
        masks = (options.mask_token_id, config.get("mask_token_id"), getattr(tokenizer, "mask_token_id", None))
        if masks == (None, None, None):
            raise _autoregressive(kind, "mask_token_id=<id>")
    diffusion = find_family(class_alone, options, None)
    if diffusion is not None:
        family = diffusion
    elif native and options.shift_logits is None:
        family = MASKED_LM
    else:
        family = OWN_CODE
    as_decoder = native and kind in PLAIN and diffusion is not None
    denoiser_class = _DecoderInMemory if as_decoder else _MaskedLMInMemory

    checkpoint = Checkpoint(options, config, family, tokenizer)
    denoiser: Pretrained = denoiser_class(checkpoint, config.get("vocab_size"))
    denoiser.refuses = tested
    if isinstance(denoiser, Decoder):
        positions = model.config.max_position_embeddings
        denoiser.set_row_length(trained_positions(family, positions, config))
    denoiser.take(model)

    # Without its mask a class of autoregressive networks is causal, so this one test is not left out.
    if may_be_causal and not tested and denoiser.attention == "bidirectional":
        rows = self_tests.probe_rows(denoiser)  # (R, L)
        logits = self_tests.logits_of(denoiser, rows)  # (R, L, V)
        self_tests.require_direction(denoiser, denoiser.path, rows, logits)
    return denoiser


def _autoregressive(kind: str, remedy: str) -> DuelError:
    """The error for a network whose class is an autoregressive one. `remedy`: the arguments if it is used otherwise."""
    return DuelError(
        f"Duel.from_model and training_metrics score masked diffusion models, and {kind} is autoregressive: save the "
        "network, and score its checkpoint with estimator=ar. If it was trained as a masked diffusion model, pass "
        f"{remedy}. Families: {documentation('checkpoints.md')}."
    )


def _entries_of(config: Any) -> dict[str, Any]:
    """The entries of a config of transformers, or of an object in its place."""
    if hasattr(config, "to_dict"):
        return dict(config.to_dict())
    return dict(vars(config))


class _MaskedLMInMemory(MaskedLM):
    """A masked LM without the self-tests on a float32 copy, since the weights are not copied."""

    def _retest_in_float32(self) -> None:
        pass


class _DecoderInMemory(Decoder):
    """A decoder that always gets an explicit mask: without one, its layers would need another `is_causal`."""

    def _is_bidirectional_without_mask(self) -> bool:
        return False

    def _features(self, *arguments: Any) -> torch.Tensor:
        config = self.model.config
        chosen = config._attn_implementation  # by the user
        if chosen is not None and chosen.startswith(("flash", "flex", "kernels-community")):
            config._attn_implementation = "sdpa"  # those do not take an additive mask
        try:
            return super()._features(*arguments)
        finally:
            if config._attn_implementation != chosen:
                config._attn_implementation = chosen


class _AnyId:
    """Stands in for a tokenizer where there is none: every id but [MASK] is a token."""

    model_max_length = UNBOUNDED
    mask_token_id = None

    def __init__(self, module: Any):
        config = getattr(module, "config", None)
        self.rows = getattr(config, "vocab_size", None) or 0

    def get_vocab(self) -> dict[str, int]:
        """The ids by name; empty until their number is known."""
        return {str(token): token for token in range(self.rows)}


def _takes_input_ids(model: Any) -> bool:
    """True if a network is called, and describes itself, like transformers' own."""
    if not isinstance(model, torch.nn.Module) or "input_ids" not in parameters(model):
        return False
    needed = ("config", "get_input_embeddings", "get_output_embeddings")
    return all(hasattr(model, name) for name in needed)
