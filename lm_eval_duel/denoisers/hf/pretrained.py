"""The common part of transformers' networks and of a checkpoint's own code: from config to denoiser.

    config.json, options -> family: what kind of network it is           set_attributes
    tokenizer            -> [MASK], and which columns are tokens         Pretrained.__init__
    files                -> the network, by the `load` of its module     Pretrained.take

Shapes: V tokens.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from lm_eval_duel import fingerprint
from lm_eval_duel.arguments import TRUTH
from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.denoisers import self_tests
from lm_eval_duel.denoisers.hf import auto_model, device_map, quantization
from lm_eval_duel.denoisers.hf.families import Family
from lm_eval_duel.denoisers.hub import find_mask_id, row_length
from lm_eval_duel.denoisers.load_options import LoadOptions
from lm_eval_duel.denoisers.vocabulary import excluded_columns, require_fit
from lm_eval_duel.errors import DuelError

log = logging.getLogger("lm_eval.duel_mdm")


def set_attributes(denoiser: Denoiser, family: Family, config: dict[str, Any], options: LoadOptions) -> None:
    """Set the attributes of a network, from its options, else its config, else its family."""
    denoiser.family, denoiser.last_block = family.name, options.last_block
    denoiser.attention = options.attention or family.attention
    shifts = [options.shift_logits, family.shift]
    if family.native:  # a decoder's config may say it; another network's entry of this name means nothing here
        shifts.insert(1, TRUTH("right_shift_logits", config.get("right_shift_logits")))
    denoiser.shift = int(next(shift for shift in shifts if shift is not None))
    if denoiser.attention == "causal":
        denoiser.shift = 1
    denoiser.seeds_blocks = denoiser.attention == "causal_prefix" and options.first_token != "block"
    denoiser.bos = options.bos or ("given" if denoiser.shift else family.bos)  # shifted: predicted from the one before
    denoiser.published_block = family.published_block if denoiser.attention == "bidirectional" else None
    denoiser.anchor = family.anchor if denoiser.attention == "block_causal" else "row"
    if denoiser.by_blocks:
        denoiser.block = trained_block(family, config, options)
        options.require_block(denoiser.block)


def trained_block(family: Family, config: dict[str, Any], options: LoadOptions) -> int:
    """The trained block, from the config, else from the options, else from the family."""
    if in_config := family.block_in(config):
        return in_config
    if isinstance(options.block, int) and family.expert_capacity(config) is None:  # else the block routes its experts
        if family.block is not None and options.block not in (family.block, family.published_block):
            log.warning(
                "%s networks are trained on blocks of %d; using block=%d", family.name, family.block, options.block
            )
        return options.block
    if family.block is None:
        raise DuelError(f"{options.name} is block-causal and its config has no block; pass block=<the trained one>.")
    return family.published_block or family.block


def max_positions(family: Family, positions: int | None, config: dict[str, Any]) -> int | None:
    """The positions that a network of a family was trained on, at most the `positions` of its config.

    If queries are scaled from some position on (`Family.unscaled`), a last block that is filled up ends before it.
    """
    if family.unscaled:
        original = (config.get("rope_parameters") or config["rope_scaling"])["original_max_position_embeddings"]
        positions = min(positions, int(original) - (family.block_in(config) or family.block or 0))
    return min((length for length in (positions, family.max_length) if length), default=None)


class Pretrained(Denoiser):
    """A network of transformers, or of a checkpoint's own code.

    A subclass is made from what config and tokenizer say, before any weight is read; `fill` gives it its network.
    """

    model: Any
    kind: Any  # the class of its network, or an Auto class
    model_config: Any  # of transformers
    refuses = True  # after the self-tests; otherwise they only detect what numbers depend on

    def __init__(
        self,
        family: Family,
        config: dict[str, Any],
        options: LoadOptions,
        tokenizer: PreTrainedTokenizerBase | None,
        rows: int | None,
    ):
        """`tokenizer`: None for a plan, which needs no token. `rows`: of the embedding, if the config has them."""
        set_attributes(self, family, config, options)
        self.layout, self.config, self.options = family, config, options
        self.tokenizer_length = getattr(tokenizer, "model_max_length", None)
        self.path, self.mask_id = options.name, None
        if tokenizer is None:
            return
        if self.attention != "causal":
            self.mask_id = find_mask_id(options, config, tokenizer, family.mask_id, rows)
        self.tokens = set(tokenizer.get_vocab().values())
        if rows is not None:
            require_fit(self.tokens, self.mask_id, rows, self.path)

    def set_row_length(self, positions: int | None) -> None:
        """Set the length of rows: the one in the options, at most the `positions` that the network holds."""
        if self.by_blocks and positions is not None and positions < self.block:
            raise DuelError(f"{self.path} takes {positions} positions, so its trained block cannot be {self.block}.")
        self.max_length = row_length(self.path, self.options.max_length, positions)

    def build(self) -> Any:
        """The network without its weights, on torch's default device and in its default dtype."""
        return self.kind(self.model_config)

    def read(self) -> Any:
        """The network with its weights."""
        return auto_model.load_model(self.kind, self.model_config, self.config, self.options)

    def fill(self) -> Pretrained:
        """Read the weights, and test the network."""
        self.take(self.read().eval())
        return self

    def take(self, model: Any) -> None:
        """Give it its network, in eval mode."""
        self.model = model
        self.device, self.quantized = device_map.device_of(model), quantization.is_quantized(model)
        self.dtype = next(model.parameters()).dtype
        if self.quantized:  # some packages unpack weights only when the whole network is called
            with torch.no_grad():
                model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=self.device))

    def set_columns(self, columns: int) -> None:
        """Set the number of columns of the logits; the columns of the tokenizer's ids, except [MASK], are tokens."""
        self.vocab_size = columns
        self.excluded = excluded_columns(self.tokens, self.mask_id, columns, self.path, self.device)

    @property
    def coarse(self) -> bool:
        return self.dtype.itemsize < 4

    @property
    def layers(self) -> torch.nn.Module:
        return self.model

    def describe(self) -> dict[str, object]:
        native = type(self.model).__module__.startswith("transformers.")
        weights = f"{self.path} at commit {self.options.revision}"
        if os.path.isdir(self.path):
            weights = fingerprint.weights_of(self.path, not native)
        described = {
            "denoiser": type(self.model).__name__,
            "weights": weights,
            "dtype": str(self.dtype).removeprefix("torch."),
            "mask_token_id": self.mask_id,
            "vocabulary": f"{int((~self.excluded).sum())} of {self.vocab_size}",
            "relative_positions": self.relative_positions,
            **quantization.spec_entries(self.model),
        }
        if self.family != "masked-lm" or self.shift or self.attention != "bidirectional":
            described |= {"attention": self.attention, "shift": self.shift}
        if self.by_blocks:
            described["last_block"] = self.last_block
        if self.anchor == "target":
            described["context"] = "one block"
        if self.attention == "causal_prefix":
            described["first_token"] = "causal" if self.seeds_blocks else "block"
        if not native:  # also if code and weights come from different repositories
            described["code"] = fingerprint.code_of(type(self.model))
        if self.options.peft:
            described["peft"] = fingerprint.adapter_of(self.options.peft)
        return described


# ---------------------------------------------------------------- own_forward
# Networks through the forward of their own class: ids in, logits out.
#
# The layers run over whole rows, the head at some positions only. A test at load finds where the class can be divided:
#
#     BeforeHead     at the input of the output embedding, which learned planners read
#     AfterLayers    at the output of the layers: head, soft cap, scale and bias run later (causal LMs)
#
# If at neither, the whole network runs at every position.
#
# Shapes: R rows, L row length, U positions, D features, V tokens.


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
