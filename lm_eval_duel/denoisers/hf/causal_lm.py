"""Autoregressive networks: any causal LM of transformers (GPT-2, Llama, Gemma, ...), through its own forward.

A token is predicted from those before it, so one forward of a window's row gives all of its nats (block_causal.py). The
layers run over whole rows, and what comes after them, the class's own code with its head, soft cap, scale or bias, runs
at the predicted positions only. That both together are the network is tested at load, to the bit; where they are not,
the whole network runs at once.

Shapes: R rows, L row length, N rows of a call, Q queries, K known columns, U cells, D features, V tokens.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedTokenizerBase

from lm_eval_duel.denoisers import self_tests as probes
from lm_eval_duel.denoisers.base import Denoiser, KeysValues
from lm_eval_duel.denoisers.hf import device_map as placement
from lm_eval_duel.denoisers.hf import masked_lm as huggingface
from lm_eval_duel.denoisers.hf import quantization as quantized
from lm_eval_duel.denoisers.hf.families import Family
from lm_eval_duel.denoisers.hub import row_length, unreadable
from lm_eval_duel.denoisers.load_options import LoadOptions
from lm_eval_duel.denoisers.predictions import excluded_columns, require_fit
from lm_eval_duel.errors import DuelError

log = logging.getLogger("lm_eval.duel_mdm")


def load(family: Family | None, raw: dict[str, Any], asked: LoadOptions, tokenizer: PreTrainedTokenizerBase) -> Causal:
    """The denoiser of one of transformers' causal LMs; raises DuelError for any other network.

    `family`: the masked diffusion family that it was found to be, if any.
    """
    if family is not None:
        raise DuelError(
            f"{asked.name} is a masked diffusion model ({family.name}), so it has no autoregressive likelihood; leave "
            "estimator=ar and attention=causal out."
        )
    asked.refuse("causal LM", "sigma", "shift_logits", "mask_token_id")
    trusted = {"trust_remote_code": asked.trust_remote_code}
    config = huggingface.config_of(asked, **trusted)
    _require_causal(config, raw, asked)
    config.use_cache = False
    rows = getattr(config, "vocab_size", None)
    if rows is not None and not asked.trust_remote_code:  # own code may have more
        require_fit(set(tokenizer.get_vocab().values()), None, rows, asked.name)
    if asked.dtype == "float64":
        config._experts_implementation = "eager"  # the grouped products of transformers 5 end at float32
    # other attention kernels leave out the soft cap of Gemma-2, in transformers 4 without a word
    options = {"attn_implementation": "eager"} if getattr(config, "attn_logit_softcapping", None) else {}
    model = huggingface.filled(AutoModelForCausalLM, config, raw, asked, **trusted, **options)
    if asked.peft:
        from lm_eval_duel.denoisers.hf.lora import fetched, merge

        asked = fetched(asked)
        model = merge(model, asked.peft, None)
    if not huggingface.is_native(model):
        probes.rotary_frequencies(model, config, asked.name)  # transformers 5 leaves those of others uninitialised
    held = huggingface.held_length(model, tokenizer)
    if not (asked.max_length or held):
        raise DuelError(
            f"Neither config nor tokenizer of {asked.name} says how many positions it holds; pass max_length=."
        )
    # a row's last token is predicted and never fed, so a row has one position more than the network
    row = row_length(asked.name, asked.max_length, held and held + 1)
    denoiser = Causal(model.eval(), set(tokenizer.get_vocab().values()), row, asked.name)
    denoiser.adapter, denoiser.bos, denoiser.revision = asked.peft, asked.bos or denoiser.bos, asked.revision
    return denoiser


def _require_causal(config: Any, raw: dict[str, Any], asked: LoadOptions) -> None:
    """Raise DuelError where a config is of no causal LM, or names a class of its own that is another network."""
    named = raw.get("architectures") or []
    classes = ", ".join(named or [type(config).__name__])
    own = (raw.get("auto_map") or {}).get("AutoModelForCausalLM")
    native = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if native is None and not (own and asked.trust_remote_code):
        raise DuelError(
            f"{asked.name} ({classes}) is no causal LM of transformers, so it has no autoregressive likelihood; "
            "leave estimator=ar and attention=causal out if it is a masked diffusion model."
        )
    if asked.trust_remote_code or not named or native.__name__.lower() in [name.lower() for name in named]:
        return
    if raw.get("auto_map"):
        raise DuelError(
            f"{asked.name} is a {classes} by its config, with code of its own; transformers' {native.__name__} may be "
            "another network. If it is autoregressive and you trust its code, pass trust_remote_code=true."
        )
    log.warning("%s is a %s by its config; scoring it as transformers' %s", asked.name, classes, native.__name__)


class Given(torch.nn.Module):
    """Stands where a network's layers are, and says that they made the features it was given."""

    features: torch.Tensor

    def __init__(self, kind: type):
        super().__init__()
        self.kind = kind  # of the layers' output

    def forward(self, *ignored: Any, **also_ignored: Any) -> Any:
        return self.kind(last_hidden_state=self.features)


class Causal(Denoiser):
    """A causal LM of transformers."""

    family = "causal-lm"
    attention = "causal"
    mask_id = None
    shift = 1
    bos = "given"  # the first token is predicted from one before

    def __init__(self, model: torch.nn.Module, tokens: set[int], max_length: int, path: str):
        self.model, self.path, self.max_length = model, path, max_length
        self.device, self.quantized = placement.device_of(model), quantized.is_quantized(model)
        self.dtype = next(model.parameters()).dtype
        self.adapter: str | None = None
        self.revision: str | None = None  # the commit, of a hub name
        self.splits_head = False
        with torch.inference_mode():
            try:
                first = torch.zeros(1, min(2, max_length), dtype=torch.long, device=self.device)  # (1, L)
                self.vocab_size = self._whole(first).shape[-1]
            except (TypeError, AttributeError, RuntimeError, ValueError, AssertionError) as error:
                raise unreadable(path, error) from error
            self._excluded = excluded_columns(tokens, None, self.vocab_size, path, self.device)
            rows = probes.tokens(self)  # (2, L)
            whole = self._whole(rows)  # (2, L, V)
            self.splits_head = any(self._splits(name, rows, whole) for name in _layers_of(model))
        if not self.splits_head:
            log.info("the head of %s cannot be split off: it runs at every position of a row", type(model).__name__)
        probes.probe(self, path)

    @property
    def excluded(self) -> torch.Tensor:
        return self._excluded

    @property
    def layers(self) -> torch.nn.Module:
        return self._layers if self.splits_head else self.model

    @torch.inference_mode()
    def features(self, ids: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
        """Padding is on the right, where it is not seen."""
        if not self.splits_head:
            return self._whole(ids)  # (R, L, V)
        return self._layers(input_ids=ids).last_hidden_state.to(self.device)  # (R, L, D)

    @torch.inference_mode()
    def stream(
        self, ids: torch.Tensor, positions: torch.Tensor, seen: torch.Tensor, past: list[KeysValues] | None
    ) -> tuple[torch.Tensor, list[KeysValues]]:
        """When sampling, known columns are evaluated anew (caches differ by class): their ids stand for their keys."""
        own = [(ids[:, None, :, None],) * 2]  # (N, 1, Q, 1) each
        if past is None:
            return self.features(ids, None), own
        whole = torch.nn.functional.pad(past[0][0][:, 0, :, 0], (0, ids.shape[1]))  # (N, K + Q)
        whole.scatter_(1, positions, ids)  # a row may know fewer than K; what stands after its own is not seen
        features = self.features(whole, None)  # (N, K + Q, D)
        return features.gather(1, positions[:, :, None].expand(-1, -1, features.shape[2])), own

    @torch.inference_mode()
    def head(self, features: torch.Tensor) -> torch.Tensor:
        return self._after_layers(features[None])[0] if self.splits_head else features  # (U, V)

    def describe(self) -> dict[str, object]:
        return {**huggingface.described_by(self), "attention": self.attention, "shift": self.shift}

    def _whole(self, ids: torch.Tensor) -> torch.Tensor:
        return huggingface.logits_of(self.model, ids).to(self.device)  # (R, L, V)

    # ------------------------------------------------------------ the two halves of the network

    def _after_layers(self, features: torch.Tensor) -> torch.Tensor:
        """What the class makes of its layers' output (R, L, D): logits (R, L, V)."""
        self._given.features = features
        ids = torch.zeros(features.shape[:2], dtype=torch.long, device=self.device)  # (R, L) nothing looks at them
        return huggingface.logits_of(self._rest, ids).to(self.device)

    def _splits(self, name: str, rows: torch.Tensor, whole: torch.Tensor) -> bool:
        """Whether the module `name` is all that comes before the head: its output makes the logits, to the bit."""
        self._layers = self.model.get_submodule(name)
        try:
            out = self._layers(input_ids=rows)
            self._given = Given(type(out))
            self._rest = _replaced(self.model, name, self._given)
            return torch.equal(self._after_layers(out.last_hidden_state), whole)
        except (RuntimeError, IndexError, TypeError, ValueError, AttributeError, AssertionError):
            return False


def _layers_of(model: Any) -> Iterator[str]:
    """Names of the modules that may be all of a network but its head: what transformers calls base model, decoder."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    return (name for name, module in model.named_modules() if name and module in (model.base_model, decoder))


def _replaced(module: torch.nn.Module, name: str, part: torch.nn.Module) -> torch.nn.Module:
    """A copy of a network that shares all of it but the module `name`, which is `part`."""
    found = copy.copy(module)
    found._modules = dict(module._modules)
    found.__dict__.pop("forward", None)  # where accelerate wraps it: it belongs to the original
    child, _, rest = name.partition(".")
    found._modules[child] = _replaced(module._modules[child], rest, part) if rest else part
    return found
