"""A function logits = f(ids, real) as a denoiser.

Shapes: R rows, L row length, V tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.denoisers.hf import auto_model
from lm_eval_duel.denoisers.hub import explained, find_mask_id, row_length
from lm_eval_duel.denoisers.load_options import LoadOptions
from lm_eval_duel.denoisers.vocabulary import excluded_columns
from lm_eval_duel.errors import DuelError


class Function(Denoiser):
    """logits = f(ids, real): logits (R, L, V) of ids (R, L); `real` (R, L) is False at padding, None: there is none."""

    splits_head = False

    def __init__(self, function: Callable[..., Any], options: LoadOptions, tokenizer: Any):
        self.function, self.path, self.device = function, options.name, options.device
        self.bos, self.shift = options.bos or self.bos, int(bool(options.shift_logits))
        self.mask_id = find_mask_id(options, {}, tokenizer, None, None)
        longest = tokenizer.model_max_length
        positions = longest if longest < auto_model.UNBOUNDED else None
        self.max_length = options.max_length or row_length(options.name, None, positions)
        self.vocab_size = self._first_call()
        tokens = set(tokenizer.get_vocab().values()) or set(range(self.vocab_size))
        self.excluded = excluded_columns(tokens, self.mask_id, self.vocab_size, self.path, self.device)

    def features(self, ids: torch.Tensor, real: torch.Tensor | None, **more: torch.Tensor) -> torch.Tensor:
        out = self.function(ids, real)
        if isinstance(out, dict):
            out = out["logits"]  # of transformers too
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
