"""Checkpoints of decoders that became diffusion models, loaded strictly into transformers' own classes.

A tensor that is missing, unknown or of another shape is an error. None of a checkpoint's code is run.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import PreTrainedTokenizerBase

from lm_eval_duel.denoisers import self_tests, weights
from lm_eval_duel.denoisers.hf import device_map, lora, quantization, strict_load
from lm_eval_duel.denoisers.hf.decoder import Decoder
from lm_eval_duel.denoisers.hf.families import Family
from lm_eval_duel.denoisers.hf.native import native_config, native_tensors
from lm_eval_duel.denoisers.hf.pretrained import max_positions
from lm_eval_duel.denoisers.hub import pick_dtype
from lm_eval_duel.denoisers.load_options import LoadOptions

IGNORED = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")  # endings of keys that are recomputed
HEAD = "lm_head.weight"
TABLES = {"GPT2": "transformer.wte.weight"}  # the embedding, by native class
TABLE = "model.embed_tokens.weight"  # of all others
CLASSES = {"GPT2": "GPT2LMHeadModel"}  # the network, by native class; of all others <native>ForCausalLM


def unfilled(
    family: Family, config: dict[str, Any], options: LoadOptions, tokenizer: PreTrainedTokenizerBase | None
) -> StoredDecoder:
    """The network of a local folder. `fill` raises DuelError if the weights do not fit exactly."""
    model_config = make_config(family, config, options)
    denoiser = StoredDecoder(family, config, options, tokenizer, model_config.vocab_size)
    options.refuse(family.name, "sigma", *(() if denoiser.attention == "causal_prefix" else ("first_token",)))
    denoiser.set_row_length(max_positions(family, model_config.max_position_embeddings, config))
    denoiser.kind = getattr(transformers, CLASSES.get(family.native, f"{family.native}ForCausalLM"))
    denoiser.model_config = model_config
    return denoiser


def make_config(family: Family, config: dict[str, Any], options: LoadOptions) -> Any:
    """The native config, with full attention in every layer and the checkpoint's rotary positions."""
    entries = native_config(family, config, options.name)
    entries |= {"use_sliding_window": False, "sliding_window": None, "layer_types": None, "use_cache": False}
    rope = entries.get("rope_parameters") or {}
    if "rope_theta" in rope:
        entries.setdefault("rope_theta", rope["rope_theta"])
    if not isinstance(entries.get("rope_scaling"), dict):
        entries["rope_scaling"] = None
        if rope.get("rope_type", "default") != "default" and transformers.__version__.startswith("4."):
            entries["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}  # its name
    model_config = getattr(transformers, f"{family.native}Config")(**entries)
    model_config._attn_implementation = "sdpa"
    return model_config


class StoredDecoder(Decoder):
    """A decoder whose weights are in a folder, in the layout of its family."""

    def read(self) -> Any:
        """The network with every tensor of its folder; raises DuelError that names all tensors that do not fit."""
        family, config, kind, model_config = self.layout, self.config, self.kind, self.model_config
        options = self.options = lora.fetch(self.options)
        model_kwargs = quantization.model_kwargs(config, options) | device_map.model_kwargs(options)
        stored = {key: value for key, value in weights.read(options.name).items() if not key.endswith(IGNORED)}
        tensors, origin = native_tensors(family, stored, config)
        table = tensors.get(TABLES.get(family.native, TABLE))
        if model_config.tie_word_embeddings and HEAD in tensors:  # the file may have a separate head
            model_config.tie_word_embeddings = table is None or torch.equal(tensors[HEAD], table)
        dtype = pick_dtype(options.dtype, options.device)
        if dtype == "auto":
            dtype = torch.float32 if table is None else table.dtype
        if dtype == torch.float64:
            model_config._experts_implementation = "eager"  # grouped products stop at float32 in transformers 5
        what = f"The weights in {options.name} do not fill {kind.__name__}"
        packed = hasattr(model_config, quantization.CONFIG_KEY)
        if not packed:
            with torch.device("meta"):
                expected = _unfused_shapes(kind(model_config))
            if model_config.tie_word_embeddings and HEAD not in tensors:
                expected.pop(HEAD, None)
            actual = {key: tuple(value.shape) for key, value in tensors.items()}
            strict_load.require_equal(what, expected, actual, lambda key: origin.get(key, key))
        # quantized files may hold more than tensors (torchao's metadata), which only transformers can read
        from_files = packed and not family.rename
        with strict_load.quiet_transformers():
            model, report = kind.from_pretrained(
                options.name if from_files else None,
                config=model_config,
                dtype=dtype,
                ignore_mismatched_sizes=True,  # reported, and raised below
                output_loading_info=True,
                **model_kwargs,
                **({} if from_files else {"state_dict": tensors}),
            )
        tied = {HEAD} if model_config.tie_word_embeddings else set()
        unknown = [key for key in report["unexpected_keys"] if not key.endswith(IGNORED)]
        strict_load.require_none(what, set(report["missing_keys"]) - tied, unknown, strict_load.misshapen(report))
        model = model if "device_map" in model_kwargs else model.to(options.device)
        model = lora.merge(model, options.peft, family)
        self_tests.rotary_frequencies(model, model_config, options.name)
        return model


def _unfused_shapes(network: torch.nn.Module) -> dict[str, strict_load.Shape]:
    """Shapes of a network's tensors with one entry per expert, as in files.

    transformers 5 fuses the experts in the order of their numbers, and takes 0, 1, 77 as 0, 1, 2 without an error.
    """
    shapes: dict[str, strict_load.Shape] = {}
    for key, value in network.state_dict().items():
        before, _, part = key.rpartition(".experts.")
        if part not in ("gate_up_proj", "down_proj"):
            shapes[key] = tuple(value.shape)
            continue
        experts, rows, width = value.shape  # (E, 2 F, D) or (E, D, F)
        names = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
        shapes |= {
            f"{before}.experts.{e}.{name}.weight": (rows // len(names), width) for e in range(experts) for name in names
        }
    return shapes
