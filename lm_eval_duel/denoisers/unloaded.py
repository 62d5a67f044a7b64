"""The size of a network whose weights are not read: its parameters and matrix products, on the meta device.

Shapes: V tokens, D features.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import CONFIG_MAPPING

from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.demo import resolve
from lm_eval_duel.denoisers import hub, identity, loading
from lm_eval_duel.denoisers.dit import gidd
from lm_eval_duel.denoisers.dit.network import DiT
from lm_eval_duel.denoisers.hf import diffusion_gemma, families
from lm_eval_duel.denoisers.load_options import LoadOptions
from lm_eval_duel.errors import DuelError

# the entries of published config.json files that a plan needs, so that it works without the hub
CONFIGS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8"))
UNREAD = ("cache", "compile", "backend", "trust_remote_code")  # arguments that do not change the size
ROUTED = ".experts."  # in the names of weights of which a position uses `num_experts_per_tok`


@dataclasses.dataclass(frozen=True)
class Size:
    """The size of a network. Products are multiply-adds; one is two floating point operations.

    `products`: the matrix products of all layers at one position, without the head. `head`: the products of the LM head
    at one position. `pair`: one query with one key in all layers, scores and mixing together.
    """

    parameters: int
    products: int
    head: int
    pair: int
    kept: int  # numbers kept per position: the keys and values of all layers
    dtype: str

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return getattr(torch, self.dtype).itemsize

    @property
    def weight_bytes(self) -> int:
        return self.parameters * self.itemsize


class Unloaded(NamedTuple):
    """A denoiser that cannot predict, and the size of its network."""

    denoiser: Denoiser
    size: Size


def read(name: str, network: dict[str, Any], tokenizer: Any = None) -> Unloaded:
    """The network of a folder, a hub name, a bundled name, or a config.json file; arguments as for `denoisers.load`."""
    known = CONFIGS.get(name) if not os.path.isdir(name) else None
    network = {key: value for key, value in network.items() if key not in UNREAD}
    options = LoadOptions(resolve(name), torch.device("cpu"), tokenizer, **network)
    config = known or hub.read_config(options.name, options.revision)
    identity.require_supported(config, options.name, options.family)
    if identity.GIDD in map(str.lower, identity.model_names(config)) and options.mask_token_id is None:
        options = dataclasses.replace(options, mask_token_id=min(gidd.MASK, config["vocab_size"] - 1))
    with hub.explained(options.name):
        alone = loading.is_alone(config, options)
        family = None if alone else families.find(config, options, None)
        own_code = config.get("auto_map") and config.get("model_type") not in CONFIG_MAPPING
        if own_code and family is None and not alone:
            raise DuelError(
                f"{options.name} has its own code, which a plan does not run. If its network is of a known family, "
                f"pass family={'|'.join(families.NAMED)}."
            )
        denoiser = loading.unfilled(family, config, options, lambda: options, tokenizer)
        with torch.device("meta"):
            model = denoiser.build()
    if isinstance(model, DiT):
        return Unloaded(denoiser, _of_dit(model))
    dtype = options.dtype if options.dtype != "auto" else config.get("dtype") or config.get("torch_dtype")
    size = _of_transformers(model, denoiser.attention == "causal", str(dtype or "float32").removeprefix("torch."))
    denoiser.vocab_size = len(model.get_output_embeddings().weight)
    return Unloaded(denoiser, size)


def _of_dit(network: DiT) -> Size:
    """The size of our own DiT. Its products with the time condition are made once a row, so they do not count."""
    shape, blocks = network.config, network.blocks.named_parameters()
    products = sum(weight.numel() for key, weight in blocks if weight.dim() == 2 and "adaLN_modulation" not in key)
    kept = 2 * shape.layers * shape.width
    return Size(_parameters(network), products, shape.width * shape.vocab_size, kept, kept, "float32")


def _of_transformers(model: Any, causal: bool, dtype: str) -> Size:
    """The size of a network of transformers; of DiffusionGemma the encoder if `causal`, else the decoder."""
    config, layers, output = model.config, model, model.get_output_embeddings().weight  # (V, D)
    if type(model).__name__ == diffusion_gemma.CLASS:
        config, layers = config.text_config, model.model.encoder.language_model if causal else model.model.decoder
    used = getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k_experts", 1)
    experts = next((n for key in ("num_experts", "n_routed_experts") if (n := getattr(config, key, None))), used)
    tables = {id(module.weight) for module in layers.modules() if isinstance(module, torch.nn.Embedding)}
    products = sum(
        weight.numel() * (used / experts if ROUTED in key else 1)
        for key, weight in layers.named_parameters()
        if weight.dim() > 1 and weight is not output and id(weight) not in tables
    )
    heads = config.num_attention_heads
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    kept = getattr(config, "num_key_value_heads", None) or heads
    pair, kept = (2 * config.num_hidden_layers * count * head for count in (heads, kept))
    return Size(_parameters(model), round(products), output.numel(), pair, kept, dtype)


def _parameters(network: torch.nn.Module) -> int:
    return sum(weight.numel() for weight in network.parameters())
