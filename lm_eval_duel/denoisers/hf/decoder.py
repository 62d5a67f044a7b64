"""Decoders that became diffusion models (LLaDA, Dream, SDAR, ...) in transformers' own classes, with an explicit mask.

They have the networks of Llama, Qwen2, Qwen3, Qwen3-MoE, GLM-4-MoE and GPT-2, with another attention pattern. The
weights are loaded into those classes (decoder_checkpoint.py), and every call passes a 4-D additive mask. So none of a
checkpoint's code is run, and the same network can be bidirectional, block-causal or causal.

Shapes: R rows, L row length, N rows of a call, Q queries, K keys, D features, V tokens.
"""

from __future__ import annotations

from typing import Any

import torch

from lm_eval_duel.core.network import KeysValues, joined
from lm_eval_duel.denoisers import self_tests
from lm_eval_duel.denoisers.hf.pretrained import Pretrained


class Decoder(Pretrained):
    """A decoder of transformers under the attention mask of its diffusion family."""

    maskless = False  # whole rows are evaluated without a mask

    def take(self, model: Any) -> None:
        super().take(model)
        self.set_columns(model.config.vocab_size)
        if self.attention == "bidirectional":
            self.maskless = self._is_bidirectional_without_mask()
        self_tests.run(self, self.path, self.refuses)

    def _is_bidirectional_without_mask(self) -> bool:
        """True if layers with is_causal=False see whole rows without a mask: flash kernels do not accept one."""
        layers = [module for module in self.model.modules() if hasattr(module, "is_causal")]
        for layer in layers:
            layer.is_causal = False  # read only in calls without a mask
        rows = self_tests.random_rows(self)  # (2, L)
        with torch.inference_mode():
            masked = self.features(rows, None)  # (2, L, D)
            self.maskless = True
            unmasked = self.features(rows, None)
        self.maskless = False
        return bool(layers) and self_tests.relative_difference(masked, unmasked) <= self_tests.tolerance(self, unmasked)

    @property
    def layers(self) -> torch.nn.Module:
        return self.model.base_model

    def compile(self) -> None:
        self.maskless = False  # when traced, transformers creates a causal mask if none is given
        super().compile()

    def features(self, ids: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
        length = ids.shape[1]
        position = torch.arange(length, device=ids.device)[None]  # (1, L)
        if real is None and self.maskless:
            return self._features(ids, position, None, None)
        seen = torch.ones(1, length, length, dtype=torch.bool, device=ids.device)  # (1, L, L)
        seen = seen.tril() if self.attention == "causal" else seen
        if real is not None:
            seen = seen & real[:, None]  # (R, L, L)
            seen |= torch.eye(length, dtype=torch.bool, device=ids.device)  # padding sees itself: no empty softmax
        return self._features(ids, position, seen, None)

    def stream(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        seen: torch.Tensor | None,
        past: list[KeysValues] | None,
    ) -> tuple[torch.Tensor, list[KeysValues]]:
        clean = CleanKeys(past)
        if seen is None:  # without a mask, transformers would make one
            kept = past[0][0].shape[2] if past else 0
            seen = torch.ones(1, 1, kept + ids.shape[1], dtype=torch.bool, device=ids.device)
        return self._features(ids, positions, seen, clean), clean.own

    def head(self, features: torch.Tensor) -> torch.Tensor:
        return self.model.lm_head(features).to(self.device)  # (U, V); accelerate moves the input to the head's device

    def _features(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        seen: torch.Tensor | None,
        clean: CleanKeys | None,
    ) -> torch.Tensor:
        """The input of the LM head (N, Q, D); `seen` (N or 1, Q, K + Q), None: all of it."""
        mask = None
        if seen is not None:
            lowest = torch.finfo(self.dtype).min  # with -inf, a query that sees nothing would give NaN
            mask = torch.zeros(seen.shape, dtype=self.dtype, device=seen.device).masked_fill(~seen, lowest)[:, None]
        out = self.model.base_model(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=clean, use_cache=False
        )
        return out.last_hidden_state.to(self.device)

    def describe(self) -> dict[str, object]:
        return {**super().describe(), "denoiser": f"{self.family} as {type(self.model).__name__}"}


class CleanKeys:
    """A cache of transformers that puts clean keys and values before a call's own, and collects these."""

    def __init__(self, past: list[KeysValues] | None):
        self.past = past
        self.own: list[KeysValues] = []

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *ignored: Any, **also_ignored: Any
    ) -> KeysValues:
        """Keys and values (N, H, K + Q, D / H) that the layer attends to."""
        self.own.append((keys, values))
        return joined(None if self.past is None else self.past[layer], keys, values)

    def get_seq_length(self, *ignored: Any) -> int:
        """0: every call passes its positions."""
        return 0
