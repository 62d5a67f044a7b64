"""Networks through the forward of their own class: ids in, logits out.

The layers run over whole rows, the head at some positions only. A test at load finds where the class can be divided:

    BeforeHead     at the input of the output embedding, which learned planners read
    AfterLayers    at the output of the layers: head, soft cap, scale and bias run later (causal LMs)

If at neither, the whole network runs at every position.

Shapes: R rows, L row length, U positions, D features, V tokens.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from lm_eval_duel.denoisers import self_tests
from lm_eval_duel.denoisers.hf import auto_model
from lm_eval_duel.denoisers.hf.pretrained import Pretrained
from lm_eval_duel.errors import DuelError

log = logging.getLogger("lm_eval.duel_mdm")


class BeforeHead:
    """A network divided at the input of its output embedding, which is the last thing that it computes."""

    def __init__(self, model: Any, logits_of: Callable[..., torch.Tensor]):
        self.layers, self.head = model, model.get_output_embeddings()
        self._logits_of = logits_of

    def features(self, *call: Any, **more: Any) -> torch.Tensor:
        """The input of the embedding (R, L, D) in a call of the network."""
        caught = []

        def catch(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            caught.append(inputs[0])
            return (inputs[0][:, :0], *inputs[1:])  # no position: the embedding runs later

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
        self._model, self.layers = model, model.get_submodule(name)
        parent, _, self._name = name.rpartition(".")
        self._modules = model.get_submodule(parent)._modules  # in which others take the place of the layers

    def features(self, ids: torch.Tensor) -> torch.Tensor:
        """The output of the layers (R, L, D) for rows without padding."""
        out = self.layers(input_ids=ids)
        self.output_class = type(out)
        return out.last_hidden_state

    def head(self, features: torch.Tensor) -> torch.Tensor:
        """Logits (U, V) or (R, L, V) that the class computes from features (U, D) or (R, L, D)."""
        rows = features if features.dim() == 3 else features[None]
        ids = torch.zeros(rows.shape[:2], dtype=torch.long, device=features.device)  # ignored
        self._modules[self._name] = lambda *_, **__: self.output_class(last_hidden_state=rows)
        try:
            return logits_of(self._model, ids).view(*features.shape[:-1], -1)
        finally:
            self._modules[self._name] = self.layers


class OwnForward(Pretrained):
    """A network of transformers, or of a checkpoint's own code, through its own forward."""

    parts: BeforeHead | AfterLayers | None = None
    splits_head = False

    def take(self, model: Any) -> None:
        super().take(self.limited(model))
        with torch.no_grad():
            self.set_columns(self._first_call().shape[-1])
            if not self.by_blocks:
                self._divide()
            self_tests.run(self, self.path, self.refuses)

    def build(self) -> Any:
        return self.limited(self.kind.from_config(self.model_config))

    def limited(self, model: Any) -> Any:
        """`model`, which limits the length of rows to the positions that it can hold."""
        positions = auto_model.max_positions(model, self.tokenizer_length)
        if positions and self.attention == "causal":
            positions += 1  # the last token of a row is predicted but never an input
        self.set_row_length(min(filter(None, (self.layout.max_length, positions)), default=None))
        return model

    @property
    def layers(self) -> torch.nn.Module:
        return self.parts.layers if self.parts is not None else self.model

    def head(self, features: torch.Tensor) -> torch.Tensor:
        return self.parts.head(features).to(self.device) if self.splits_head else features  # (U, V)

    def _features(self, *call: Any, **more: Any) -> torch.Tensor:
        """The input of the head (R, L, D) in a call of the network; the logits (R, L, V) if it is not split off."""
        return self.parts.features(*call, **more).to(self.device) if self.splits_head else self._logits(*call, **more)

    def _logits(self, ids: torch.Tensor, mask: torch.Tensor | None = None, **more: torch.Tensor) -> torch.Tensor:
        return logits_of(self.model, ids, mask, **more).to(self.device)  # (R, L, V)

    # ------------------------------------------------------------ detection at load

    def _first_call(self) -> torch.Tensor:
        """Logits of a first small row."""
        ids = torch.full((1, min(2, self.max_length)), self.mask_id or 0, device=self.device)  # (1, L)
        if self.by_blocks:
            seen = torch.ones(1, ids.shape[1], ids.shape[1], dtype=torch.bool, device=self.device)
            return self.stream(ids, torch.arange(ids.shape[1], device=self.device)[None], seen, None)[0]
        logits = self._logits(ids)
        if logits.shape[:2] != ids.shape:
            shape = tuple(logits.shape)
            raise DuelError(
                f"{self.path} returns logits {shape} for {ids.shape[1]} positions; expected one row for each."
            )
        return logits

    def _divide(self) -> None:
        """Split the head off at the first place where both parts give the logits of a few rows bit for bit.

        The head runs on whole rows here, as in the network: on another shape the last bits may differ.
        """
        places: list[Callable[[], BeforeHead | AfterLayers]] = [partial(BeforeHead, self.model, self._logits)]
        if self.attention == "causal":
            places += [partial(AfterLayers, self.model, name) for name in layer_modules(self.model)]
        rows = self_tests.probe_rows(self)  # (R, L)
        logits = self._logits(rows)  # (R, L, V)
        for place in places:
            with contextlib.suppress(RuntimeError, IndexError, TypeError, ValueError, AttributeError, AssertionError):
                parts = place()
                if torch.equal(parts.head(parts.features(rows)).to(self.device), logits):
                    self.parts, self.splits_head = parts, True
                    return
        log.info("The head of %s cannot be split off: it runs at every position of a row", type(self.model).__name__)


def logits_of(
    model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor | None = None, **more: torch.Tensor
) -> torch.Tensor:
    """Logits (R, L, V) from a tensor, a tuple or an output class, whichever the network returns."""
    out = model(input_ids=ids, **more) if mask is None else model(input_ids=ids, attention_mask=mask, **more)
    return out if isinstance(out, torch.Tensor) else out[0] if isinstance(out, tuple) else out.logits


def layer_modules(model: Any) -> Iterator[str]:
    """Names of modules that may be a network without its head: transformers' base model and decoder."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    return (name for name, module in model.named_modules() if name and module in (model.base_model, decoder))
