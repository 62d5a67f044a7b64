"""Autoregressive networks: any causal LM of transformers (GPT-2, Llama, Gemma, ...), through its own forward.

A token is predicted from those before it, so one forward pass over a window's row scores all of it (block_causal.py).

Shapes: R rows, L row length, N rows of a call, Q queries, K clean columns, D features, V tokens.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase

from lm_eval_duel.core.network import KeysValues
from lm_eval_duel.denoisers import self_tests
from lm_eval_duel.denoisers.hf import auto_model, lora
from lm_eval_duel.denoisers.hf.families import Family
from lm_eval_duel.denoisers.hf.own_forward import OwnForward
from lm_eval_duel.denoisers.load_options import LoadOptions
from lm_eval_duel.errors import DuelError

log = logging.getLogger("lm_eval.duel_mdm")
CAUSAL_LM = Family("causal-lm", "", attention="causal", shift=1)


def unfilled(
    family: Family | None, config: dict[str, Any], options: LoadOptions, tokenizer: PreTrainedTokenizerBase | None
) -> CausalLM:
    """A causal LM of transformers, without its weights; raises DuelError for others, such as one of a `family`."""
    if family is not None:
        raise DuelError(
            f"{options.name} is a masked diffusion model ({family.name}), not autoregressive: leave estimator=ar and "
            "attention=causal out."
        )
    options.refuse("causal LM", "sigma", "first_token", "shift_logits", "mask_token_id")
    model_config = AutoConfig.from_pretrained(
        options.name, revision=options.revision, trust_remote_code=options.trust_remote_code
    )
    _require_causal(model_config, config, options)
    model_config.use_cache = False
    rows = None if options.trust_remote_code else getattr(model_config, "vocab_size", None)  # own code may have more
    denoiser = CausalLM(CAUSAL_LM, config, options, tokenizer, rows)
    denoiser.kind, denoiser.model_config = AutoModelForCausalLM, model_config
    return denoiser


def _require_causal(model_config: Any, config: dict[str, Any], options: LoadOptions) -> None:
    """Raise DuelError if transformers has no causal LM for this config, or if the config names another class."""
    architectures = config.get("architectures") or []
    native = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(model_config), None)
    if options.trust_remote_code or (native is None and config.get("auto_map")):  # the loader asks for trust
        return
    if native is None:
        raise DuelError(
            f"Cannot read checkpoint '{options.name}': its network is not autoregressive; leave estimator=ar out."
        )
    if native.__name__.lower() in map(str.lower, architectures):
        return
    classes = ", ".join(architectures)
    if config.get("auto_map"):
        raise DuelError(
            f"By its config {options.name} is a {classes} with its own code. If it is autoregressive and you trust its "
            "code, pass trust_remote_code=true."
        )
    auto_model.require_known(config, options.name, native.__name__)
    if classes:
        log.warning("By its config %s is a %s; scoring it as transformers' %s", options.name, classes, native.__name__)


class CausalLM(OwnForward):
    """A causal LM of transformers."""

    def read(self) -> Any:
        options = self.options = lora.fetch(self.options)
        if options.dtype == "float64":
            self.model_config._experts_implementation = "eager"  # grouped products stop at float32 in transformers 5
        # other attention kernels drop the soft cap of Gemma-2, silently in transformers 4
        softcap = getattr(self.model_config, "attn_logit_softcapping", None)
        model_kwargs: dict[str, Any] = {"attn_implementation": "eager"} if softcap else {}
        model_kwargs["trust_remote_code"] = options.trust_remote_code
        model = auto_model.load_model(self.kind, self.model_config, self.config, options, **model_kwargs)
        model = lora.merge(model, options.peft)
        if not auto_model.is_native(model):  # transformers 5 leaves the frequencies of own code uninitialised
            self_tests.rotary_frequencies(model, self.model_config, options.name)
        return model

    def features(self, ids: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
        """Padding is on the right, where a causal network does not see it."""
        return self._features(ids)

    def stream(
        self, ids: torch.Tensor, positions: torch.Tensor, seen: torch.Tensor, past: list[KeysValues] | None
    ) -> tuple[torch.Tensor, list[KeysValues]]:
        """When sampling, clean columns are evaluated again (caches differ by class); their "keys" are their ids."""
        own = [(ids[:, None, :, None],) * 2]  # (N, 1, Q, 1) each
        if past is None:
            return self.features(ids, None), own
        whole = torch.nn.functional.pad(past[0][0][:, 0, :, 0], (0, ids.shape[1]))  # (N, K + Q)
        # a row may have fewer than K clean columns; columns after its own are not seen
        whole.scatter_(1, positions, ids)
        features = self.features(whole, None)  # (N, K + Q, D)
        return features.gather(1, positions[:, :, None].expand(-1, -1, features.shape[2])), own
