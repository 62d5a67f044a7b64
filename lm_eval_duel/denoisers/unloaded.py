"""A network without its weights: what its config.json says about its kind and its size, for plans.

The network is built on the meta device, where tensors have shapes and take no memory. Its matrix products and its
parameters are counted there, so every class that the package can load is counted in the same way.

Shapes: V tokens, D features.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import torch
import transformers

from lm_eval_duel.core.denoiser import Denoiser
from lm_eval_duel.demo import resolve
from lm_eval_duel.denoisers import hub, identity
from lm_eval_duel.denoisers.dit import checkpoint as dit_checkpoint
from lm_eval_duel.denoisers.dit import gidd
from lm_eval_duel.denoisers.hf import auto_model, decoder_checkpoint, diffusion_gemma, families
from lm_eval_duel.denoisers.hf.causal_lm import CAUSAL_LM
from lm_eval_duel.denoisers.hf.masked_lm import MASKED_LM
from lm_eval_duel.denoisers.hf.pretrained import max_positions, settle
from lm_eval_duel.denoisers.load_options import LoadOptions
from lm_eval_duel.errors import DuelError

# the entries of published config.json files that a plan needs, so that it works without the hub
CONFIGS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8"))
ROUTED = ".experts."  # in the names of weights of which a position uses `num_experts_per_tok`
OF_ROWS = ("sigma_map", "adaLN_modulation")  # products of our DiT with the time condition: once a row
AUTO_CLASSES = {  # by whether attention is causal
    False: (transformers.AutoModelForMaskedLM, MASKED_LM),
    True: (transformers.AutoModelForCausalLM, CAUSAL_LM),
}


@dataclasses.dataclass(frozen=True)
class Size:
    """The size of a network. Products are multiply-adds; one is two floating point operations.

    `products`: the matrix products of all layers at one position, without the head. `head`: the product of the LM head
    at one position. `pair`: one query with one key in all layers, scores and mixing together.
    """

    parameters: int
    products: int
    head: int
    pair: int
    kept: int  # numbers kept per position: the keys and values of all layers
    itemsize: int  # bytes of a number

    @property
    def weight_bytes(self) -> int:
        return self.parameters * self.itemsize


class Unloaded(Denoiser):
    """A denoiser that cannot predict: its kind, its limits and its `size`."""

    size: Size
    dtype: str
    device = torch.device("cpu")
    mask_id = None

    def head(self, features: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("A network without weights predicts nothing.")


def read(name: str, network: dict[str, Any], tokenizer: Any = None) -> Unloaded:
    """The network of a folder, a hub name, a bundled name, or a config.json file; `network`: as for `denoisers.load`.

    Raises DuelError if the config cannot be read, or belongs to a network whose size only its own code knows.
    """
    known = CONFIGS.get(name) if not os.path.isdir(name) else None
    options = LoadOptions(resolve(name), torch.device("cpu"), tokenizer, **network)
    config = known or hub.read_config(options.name, options.revision)
    identity.require_supported(config, options.name, options.family)
    with hub.explained(options.name):
        if identity.is_diffusion_gemma(config):
            return _gemma(config, options)
        if dit_checkpoint.is_dit(config, options.name):
            return _dit(config, options)
        family = families.find(config, options, None)
        if family is not None and (options.attention != "causal" or family.attention == "causal_prefix"):
            return _decoder(family, config, options, tokenizer)
        return _transformers_lm(config, options, tokenizer)


def _dit(config: dict[str, Any], options: LoadOptions) -> Unloaded:
    """MDLM, BD3-LM, SEDD, GIDD or AR."""
    if (
        gidd.MODEL_TYPE in map(str.lower, identity.model_names(config)) and options.mask_token_id is None
    ):  # a plan needs no tokenizer
        options = dataclasses.replace(options, mask_token_id=min(gidd.MASK, config["vocab_size"] - 1))
    denoiser, unloaded = dit_checkpoint.make(config, options, None), Unloaded()
    unloaded.resemble(denoiser)
    unloaded.device = Unloaded.device
    shape, network = denoiser.network.config, dict(denoiser.network.named_parameters())
    unloaded.dtype, kept = "float32", 2 * shape.layers * shape.width
    products = sum(
        weight.numel()
        for key, weight in network.items()
        if key.startswith("blocks.") and weight.dim() == 2 and not any(part in key for part in OF_ROWS)
    )
    parameters = sum(weight.numel() for weight in network.values())
    unloaded.size = Size(parameters, products, shape.width * shape.vocab_size, kept, kept, 4)
    return unloaded


def _gemma(config: dict[str, Any], options: LoadOptions) -> Unloaded:
    """DiffusionGemma: its encoder under attention=causal, else its decoder."""
    kind, model_config = diffusion_gemma.find(options)
    text, causal = model_config.text_config, options.attention == "causal"
    text.num_experts_per_tok = text.top_k_experts
    with torch.device("meta"):
        model = kind(model_config)
    part = model.model.encoder.language_model if causal else model.model.decoder
    unloaded = _measured(_Part(part, model.lm_head), text, config, options)
    parameters = sum(weight.numel() for weight in model.parameters())
    unloaded.size = dataclasses.replace(unloaded.size, parameters=parameters)
    settle(unloaded, diffusion_gemma.ENCODER if causal else diffusion_gemma.CANVAS, config, options)
    unloaded.max_length = hub.row_length(options.name, options.max_length, text.max_position_embeddings + causal)
    if not causal:
        unloaded.block, unloaded.noised = diffusion_gemma.canvas(model_config, options)
    return unloaded


class _Part(torch.nn.Module):
    """A part of a network, and its head."""

    def __init__(self, part: torch.nn.Module, lm_head: torch.nn.Module):
        super().__init__()
        self.part, self.lm_head = part, lm_head

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.lm_head


def _decoder(family: families.Family, config: dict[str, Any], options: LoadOptions, tokenizer: Any) -> Unloaded:
    """A family of families.py, as `decoder_checkpoint` reads it."""
    model_config = decoder_checkpoint.make_config(family, config, options)
    unloaded = _measured(_build(transformers.AutoModelForCausalLM, model_config), model_config, config, options)
    settle(unloaded, family, config, options)
    positions = max_positions(family, model_config.max_position_embeddings, config)
    unloaded.max_length = hub.row_length(options.name, options.max_length, positions)
    if unloaded.attention != "causal":
        known = family.mask_id or 0
        unloaded.mask_id = hub.find_mask_id(options, config, tokenizer, known, unloaded.vocab_size)
    return unloaded


def _transformers_lm(config: dict[str, Any], options: LoadOptions, tokenizer: Any) -> Unloaded:
    """A masked or causal LM of transformers."""
    if config.get("auto_map") and config.get("model_type") not in transformers.CONFIG_MAPPING:
        raise DuelError(
            f"{options.name} has its own code, which a plan does not run. If its network is of a known family, pass "
            f"family={'|'.join(families.NAMED)}."
        )
    model_config = transformers.AutoConfig.from_pretrained(options.name, revision=options.revision)
    auto_class, family = AUTO_CLASSES[options.attention == "causal"]
    model = _build(auto_class, model_config)
    unloaded = _measured(model, model_config, config, options)
    settle(unloaded, family, config, options)
    unloaded.appends_sep = unloaded.attention != "causal"
    positions = auto_model.max_positions(model, getattr(tokenizer, "model_max_length", auto_model.UNBOUNDED))
    unloaded.max_length = hub.row_length(options.name, options.max_length, positions and positions + unloaded.shift)
    unloaded.mask_id = getattr(tokenizer, "mask_token_id", None)
    return unloaded


def _build(auto_class: Any, model_config: Any) -> torch.nn.Module:
    """The network on the meta device."""
    with torch.device("meta"):
        return auto_class.from_config(model_config)


def _measured(model: Any, model_config: Any, config: dict[str, Any], options: LoadOptions) -> Unloaded:
    """Count what a network holds and multiplies. A config without a dtype means float32, as in transformers."""
    unloaded = Unloaded()
    output = model.get_output_embeddings().weight  # (V, D)
    tables = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    experts = next((n for key in ("num_experts", "n_routed_experts") if (n := getattr(model_config, key, None))), 1)
    share = getattr(model_config, "num_experts_per_tok", 1) / experts if experts > 1 else 1.0
    products = sum(
        weight.numel() * (share if ROUTED in key else 1.0)
        for key, weight in model.named_parameters()
        if weight.dim() > 1 and weight is not output and id(weight) not in tables
    )
    heads = model_config.num_attention_heads
    head = getattr(model_config, "head_dim", None) or model_config.hidden_size // heads
    kept = getattr(model_config, "num_key_value_heads", None) or heads
    dtype = options.dtype if options.dtype != "auto" else config.get("dtype") or config.get("torch_dtype")
    unloaded.dtype = str(dtype or "float32").removeprefix("torch.")
    unloaded.vocab_size = output.shape[0]
    unloaded.excluded = torch.zeros(unloaded.vocab_size, dtype=torch.bool)
    unloaded.size = Size(
        sum(weight.numel() for weight in model.parameters()),
        round(products),
        output.numel(),
        2 * model_config.num_hidden_layers * heads * head,
        2 * model_config.num_hidden_layers * kept * head,
        getattr(torch, unloaded.dtype).itemsize,
    )
    return unloaded
