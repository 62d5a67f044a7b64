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
from lm_eval_duel.denoisers.checkpoint import Checkpoint, find_family, has_random_tokens, require_supported
from lm_eval_duel.denoisers.hf.decoder import Decoder
from lm_eval_duel.denoisers.hf.families import PLAIN
from lm_eval_duel.denoisers.hf.own_code import OWN_CODE
from lm_eval_duel.denoisers.hf.own_forward import MASKED_LM, MaskedLM
from lm_eval_duel.denoisers.hf.pretrained import UNBOUNDED, Pretrained, is_native, trained_positions
from lm_eval_duel.denoisers.hub import explained
from lm_eval_duel.denoisers.load_options import LoadOptions
from lm_eval_duel.denoisers.self_tests import buffers_kept, module_of
from lm_eval_duel.denoisers.vocabulary import excluded_columns, find_mask_id, row_length
from lm_eval_duel.errors import DuelError, documentation, require_known

log = logging.getLogger("lm_eval.duel_mdm")

ARGUMENTS = (  # the `load_options.NetworkArguments` that concern a network which is loaded already
    *("attention", "block", "bos", "cache", "cfg_scale", "exclude_ids", "family", "last_block", "mask_token_id"),
    *("max_length", "shift_logits", "temperature", "top_k", "top_p"),
)
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
    require_known("argument", network, ARGUMENTS, "of from_model")
    require_dtype(autocast)
    bare = user_module.unwrapped(model)
    module = user_module.unwrapped(module) if module is not None else module_of(bare)
    if module is not None:
        user_module.require_whole(module)
    name = getattr(bare, "__name__", type(bare).__name__)
    options = LoadOptions(name, user_module.device_of(bare, module, device), tokenizer, **network)
    ids: Any = tokenizer if tokenizer is not None else _AnyId(module)
    if weights == DIGEST and module is None:
        raise DuelError(f"weights={DIGEST!r} hashes a module, and {name} is a function: pass the module as module=.")
    tests = buffers_kept(bare if module is None else module)
    evaluating = user_module.evaluating(module, options.device, autocast)
    with explained(name, "run network"), torch.no_grad(), tests, evaluating:
        plain = _plain(bare, options, ids, self_tests, module is not None)
    vocabulary.warn_of_another_mask(name, plain.mask_id, tokenizer)
    _warn_of_half_precision(module, name)
    denoiser = InMemory(plain, module, name, weights or IN_MEMORY, autocast)
    denoiser.special_tokens = vocabulary.expected(denoiser, tokenizer)
    return loading.wrapped(denoiser, options)


def require_dtype(autocast: torch.dtype | None) -> None:
    """Raise DuelError if `autocast` is not a floating point dtype."""
    if autocast is not None and not (isinstance(autocast, torch.dtype) and autocast.is_floating_point):
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
        self, plain: Denoiser, module: torch.nn.Module | None, name: str, weights: str, autocast: torch.dtype | None
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
        self.vocabulary = f"{int((~self.excluded).sum())} of {self.vocab_size}"

    @property
    def coarse(self) -> bool:
        return self.autocast is not None or self._dtype.itemsize < 4

    @property
    def _dtype(self) -> torch.dtype:
        parameter = next(self.module.parameters(), None) if self.module is not None else None
        return parameter.dtype if parameter is not None else torch.get_default_dtype()

    @property
    def layers(self) -> torch.nn.Module:
        return self.plain.layers

    def _evaluated(self, name: str, *call: Any, **extra: Any) -> Any:
        """A call of `plain`, on copies of integer tensors that do not come from inference mode."""
        with self.evaluating():
            # autograd cannot save a tensor made in inference mode, and a network in training may need to
            copies = [part.clone() if getattr(part, "dtype", None) == torch.long else part for part in call]
            return getattr(self.plain, name)(*copies, **extra)

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
        if not isinstance(self.plain, Function | MaskedLM | Decoder):  # a user's denoiser has entries of its own
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

    def __init__(self, function: Callable[..., Any], options: LoadOptions, tokenizer: Any):
        self.function = function
        self.path = options.name
        self.device = options.device
        self.bos = options.bos or self.bos
        self.shift = int(bool(options.shift_logits))
        self.mask_id = find_mask_id(options, {}, tokenizer, None, None)
        longest = tokenizer.model_max_length
        positions = longest if longest < UNBOUNDED else None
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
        if logits.dim() != 3 or logits.shape[:2] != ids.shape or not logits.is_floating_point():
            raise DuelError(
                f"{self.path}(ids, real) must return logits of the shape (R, L, V), ({', '.join(map(str, ids.shape))}, "
                f"V) for this call; got {logits.dtype} {tuple(logits.shape)}."
            )
        return logits

    def head(self, features: torch.Tensor) -> torch.Tensor:
        return features

    def _first_call(self) -> int:
        """The columns of the logits of a first small row; raises DuelError if they are not logits."""
        first = torch.full((1, min(2, self.max_length)), self.mask_id, device=self.device)  # (1, L)
        remedy = f"It is called as logits = f(ids, real), with ids {first.tolist()} here."
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


def parameters(model: torch.nn.Module) -> Mapping[str, inspect.Parameter]:
    """The parameters of a module's `forward`, by name."""
    return inspect.signature(type(model).forward).parameters


def by_keyword(model: Callable[..., Any]) -> Callable[..., Any]:
    """f(ids, real) of a module whose arguments are named as in transformers; any other function unchanged."""
    if not isinstance(model, torch.nn.Module) or "input_ids" not in parameters(model):
        return model
    takes_mask = "attention_mask" in parameters(model)

    def function(ids: torch.Tensor, real: torch.Tensor | None) -> Any:
        mask = {"attention_mask": real.long()} if takes_mask and real is not None else {}
        return model(input_ids=ids, **mask)

    return function


def _plain(model: Any, options: LoadOptions, tokenizer: Any, tested: bool, has_module: bool) -> Denoiser:
    """The denoiser of a network, by its kind. `has_module`: its module is known, so it was put in eval mode."""
    plain: Denoiser
    if isinstance(model, Denoiser):
        if type(model).open is not Denoiser.open:
            raise DuelError(
                f"{type(model).__name__} opens rows in its own way (`open`), which from_model would leave out. Pass "
                "the network inside it, with cache=, cfg_scale=, ... as arguments; or use Duel(denoiser, ...)."
            )
        plain = model
    elif not callable(model):
        raise DuelError(
            "from_model takes a module of transformers, a function logits = f(ids, real), or a Denoiser; got "
            f"{type(model).__name__}. For a checkpoint on disk or on the hub use from_pretrained."
        )
    elif _takes_input_ids(model):
        return _of_transformers(model, options, tokenizer, tested)
    else:
        if options.attention not in (None, "bidirectional"):
            raise DuelError(
                f"A function f(ids, real) is bidirectional; attention={options.attention} needs more: write a Denoiser "
                f"with `stream`, as in {documentation('python_api.md')}."
            )
        plain = Function(by_keyword(model), options, tokenizer)
    self_tests.run(plain, options.name, tested)
    if (tested or not has_module) and plain.attention == "bidirectional":
        try:
            self_tests.require_repeatable(plain, options.name, self_tests.LENGTH)
        except DuelError as error:
            hint = "" if has_module else " If that is dropout, pass the module that it runs as module=."
            raise DuelError(f"{error}{hint}") from None
    return plain


def _of_transformers(model: Any, options: LoadOptions, tokenizer: Any, tested: bool) -> Denoiser:
    """The denoiser of a network that is called with input_ids and attention_mask."""
    kind = type(model).__name__
    config = model.config.to_dict() if hasattr(model.config, "to_dict") else dict(vars(model.config))
    native = is_native(model)
    if options.attention == "causal":
        raise DuelError(
            "from_model scores masked diffusion models, and attention=causal is for autoregressive ones: save a "
            "checkpoint and score it with estimator=ar."
        )
    require_supported({"architectures": [kind]}, options.name, options.family)
    if has_random_tokens({"architectures": [kind]}):
        raise DuelError(f"{kind} is scored from a checkpoint, with estimator=noised_elbo; not in memory.")
    diffusion = find_family({"architectures": [kind]}, options, None)
    family = diffusion or (MASKED_LM if native and options.shift_logits is None else OWN_CODE)
    if getattr(model.config, "attention_type", None) == "block_sparse":  # it depends on the length of earlier rows
        raise DuelError(f"{kind} has block-sparse attention: call its set_attention_type('original_full') first.")
    as_decoder = native and kind in PLAIN and diffusion is not None
    denoiser_class = _DecoderInMemory if as_decoder else _MaskedLMInMemory
    checkpoint = Checkpoint(options, config, family, tokenizer)
    denoiser: Pretrained = denoiser_class(checkpoint, config.get("vocab_size"))
    denoiser.refuses = tested
    if isinstance(denoiser, Decoder):
        denoiser.set_row_length(trained_positions(family, model.config.max_position_embeddings, config))
    denoiser.take(model)
    may_be_causal = native and kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    if may_be_causal and not tested and denoiser.attention == "bidirectional":  # this test is not left out
        rows = self_tests.probe_rows(denoiser)  # (R, L)
        self_tests.require_direction(denoiser, denoiser.path, rows, self_tests.logits_of(denoiser, rows))
    return denoiser


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
        self.rows = getattr(getattr(module, "config", None), "vocab_size", None) or 0

    def get_vocab(self) -> dict[str, int]:
        """The ids by name; empty until their number is known."""
        return {str(token): token for token in range(self.rows)}


def _takes_input_ids(model: Any) -> bool:
    """True if a network is called, and describes itself, like transformers' own."""
    if isinstance(model, torch.nn.Module) and "input_ids" in parameters(model):
        return all(hasattr(model, name) for name in ("config", "get_input_embeddings", "get_output_embeddings"))
    return False
