"""Autoregressive networks: any causal LM of transformers (GPT-2, Llama, Gemma, ...), through its own forward.

A token is predicted from those before it, so one forward pass over a window's row scores all of it (block_causal.py).
The layers run over whole rows. The rest of the class's own code (head, soft cap, scale, bias) runs at the predicted
positions only. A test at load checks that both parts together give the network's logits bit for bit; if not, the whole
network runs at every position.

Shapes: R rows, L row length, N rows of a call, Q queries, K clean columns, U positions, D features, V tokens.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase

from lm_eval_duel.core.network import KeysValues
from lm_eval_duel.denoisers import self_tests
from lm_eval_duel.denoisers.hf import auto_model, lora
from lm_eval_duel.denoisers.hf.families import Family
from lm_eval_duel.denoisers.hf.pretrained import Pretrained
from lm_eval_duel.denoisers.load_options import LoadOptions
from lm_eval_duel.errors import DuelError

log = logging.getLogger("lm_eval.duel_mdm")
CAUSAL_LM = Family("causal-lm", "", attention="causal", shift=1)


def load(
    family: Family | None, config: dict[str, Any], options: LoadOptions, tokenizer: PreTrainedTokenizerBase
) -> CausalLM:
    """The denoiser of one of transformers' causal LMs; raises DuelError for any other network.

    `family`: the masked diffusion family that was detected, if any.
    """
    if family is not None:
        raise DuelError(
            f"{options.name} is a masked diffusion model ({family.name}), so it has no autoregressive likelihood; "
            "leave estimator=ar and attention=causal out."
        )
    options.refuse("causal LM", "sigma", "first_token", "shift_logits", "mask_token_id")
    trust = {"trust_remote_code": options.trust_remote_code}
    model_config = AutoConfig.from_pretrained(options.name, revision=options.revision, **trust)
    _require_causal(model_config, config, options)
    model_config.use_cache = False
    rows = None if options.trust_remote_code else getattr(model_config, "vocab_size", None)  # own code may have more
    denoiser = CausalLM(CAUSAL_LM, config, options, tokenizer, rows)
    if options.dtype == "float64":
        model_config._experts_implementation = "eager"  # grouped products stop at float32 in transformers 5
    # other attention kernels drop the soft cap of Gemma-2, silently in transformers 4
    model_kwargs = {"attn_implementation": "eager"} if getattr(model_config, "attn_logit_softcapping", None) else {}
    model = auto_model.load_model(AutoModelForCausalLM, model_config, config, options, **trust, **model_kwargs)
    if options.peft:
        model = lora.merge(model, denoiser.options.peft, None)
    if not auto_model.is_native(model):  # transformers 5 leaves the frequencies of own code uninitialised
        self_tests.rotary_frequencies(model, model_config, options.name)
    positions = auto_model.max_positions(model, tokenizer.model_max_length)
    denoiser.set_row_length(positions and positions + 1)  # the last token of a row is predicted but never an input
    denoiser.take(model.eval())
    return denoiser


def _require_causal(model_config: Any, config: dict[str, Any], options: LoadOptions) -> None:
    """Raise DuelError if transformers has no causal LM of this config, or if it names another class, with its code."""
    architectures = config.get("architectures") or []
    native = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(model_config), None)
    if options.trust_remote_code or (native is None and config.get("auto_map")):  # the loader asks for trust
        return
    if native is None:
        raise DuelError(
            f"Cannot read checkpoint '{options.name}': its network is not autoregressive. estimator=ar needs one that "
            "is: leave estimator out for the exact likelihood."
        )
    if native.__name__.lower() in map(str.lower, architectures):
        return
    classes = ", ".join(architectures)
    if config.get("auto_map"):
        raise DuelError(
            f"By its config {options.name} is a {classes} with its own code, and transformers' {native.__name__} "
            "may be another network. If it is autoregressive and you trust its code, pass trust_remote_code=true."
        )
    auto_model.require_known(config, options.name, native.__name__)
    if classes:
        log.warning("By its config %s is a %s; scoring it as transformers' %s", options.name, classes, native.__name__)


class StandIn(torch.nn.Module):
    """Replaces the layers of a network and returns features that were computed before."""

    features: torch.Tensor

    def __init__(self, output_class: type):
        super().__init__()
        self.output_class = output_class  # of the layers

    def forward(self, *ignored: Any, **also_ignored: Any) -> Any:
        return self.output_class(last_hidden_state=self.features)


class CausalLM(Pretrained):
    """A causal LM of transformers."""

    splits_head = False

    def take(self, model: Any) -> None:
        super().take(model)
        with torch.inference_mode():
            first = torch.zeros(1, min(2, self.max_length), dtype=torch.long, device=self.device)  # (1, L)
            self.set_columns(self._logits(first).shape[-1])
            rows = self_tests.random_rows(self)  # (2, L)
            logits = self._logits(rows)  # (2, L, V)
            self.splits_head = any(self._can_split_at(name, rows, logits) for name in _layer_modules(model))
        if not self.splits_head:
            log.info("The head of %s cannot be split off: it runs at every position of a row", type(model).__name__)
        self_tests.run(self, self.path)

    @property
    def layers(self) -> torch.nn.Module:
        return self._layers if self.splits_head else self.model

    def features(self, ids: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
        """Padding is on the right, where a causal network does not see it."""
        if not self.splits_head:
            return self._logits(ids)  # (R, L, V)
        return self._layers(input_ids=ids).last_hidden_state.to(self.device)  # (R, L, D)

    def stream(
        self, ids: torch.Tensor, positions: torch.Tensor, seen: torch.Tensor, past: list[KeysValues] | None
    ) -> tuple[torch.Tensor, list[KeysValues]]:
        """When sampling, clean columns are evaluated again (caches differ by class); their "keys" are their ids."""
        own = [(ids[:, None, :, None],) * 2]  # (N, 1, Q, 1) each
        if past is None:
            return self.features(ids, None), own
        whole = torch.nn.functional.pad(past[0][0][:, 0, :, 0], (0, ids.shape[1]))  # (N, K + Q)
        whole.scatter_(
            1, positions, ids
        )  # a row may have fewer than K clean columns; columns after its own are not seen
        features = self.features(whole, None)  # (N, K + Q, D)
        return features.gather(1, positions[:, :, None].expand(-1, -1, features.shape[2])), own

    def head(self, features: torch.Tensor) -> torch.Tensor:
        return self._after_layers(features[None])[0] if self.splits_head else features  # (U, V)

    def _logits(self, ids: torch.Tensor) -> torch.Tensor:
        return auto_model.logits_of(self.model, ids).to(self.device)  # (R, L, V)

    # ------------------------------------------------------------ the two parts of the network

    def _after_layers(self, features: torch.Tensor) -> torch.Tensor:
        """Logits (R, L, V) that the class computes from its layers' output (R, L, D)."""
        self._stand_in.features = features
        ids = torch.zeros(features.shape[:2], dtype=torch.long, device=self.device)  # (R, L) ignored
        return auto_model.logits_of(self._rest, ids).to(self.device)

    def _can_split_at(self, name: str, rows: torch.Tensor, logits: torch.Tensor) -> bool:
        """True if the output of the module `name` alone determines the logits, bit for bit."""
        self._layers = self.model.get_submodule(name)
        try:
            out = self._layers(input_ids=rows)
            self._stand_in = StandIn(type(out))
            self._rest = _replaced(self.model, name, self._stand_in)
            return torch.equal(self._after_layers(out.last_hidden_state), logits)
        except (RuntimeError, IndexError, TypeError, ValueError, AttributeError, AssertionError):
            return False


def _layer_modules(model: Any) -> Iterator[str]:
    """Names of modules that may be a network without its head: transformers' base model and decoder."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    return (name for name, module in model.named_modules() if name and module in (model.base_model, decoder))


def _replaced(module: torch.nn.Module, name: str, part: torch.nn.Module) -> torch.nn.Module:
    """A copy of a network that shares everything except the module `name`, which becomes `part`."""
    copied = copy.copy(module)
    copied._modules = dict(module._modules)
    copied.__dict__.pop("forward", None)  # accelerate's wrapper belongs to the original
    child, _, rest = name.partition(".")
    copied._modules[child] = _replaced(module._modules[child], rest, part) if rest else part
    return copied
