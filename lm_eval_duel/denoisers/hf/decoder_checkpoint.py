"""Checkpoints of decoders that became diffusion models, loaded strictly into transformers' own classes.

A tensor that is missing, unknown or of another shape is an error. None of a checkpoint's code is run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
import transformers
from transformers import PreTrainedTokenizerBase

from lm_eval_duel.core.network import BY_BLOCKS
from lm_eval_duel.denoisers import self_tests, weights
from lm_eval_duel.denoisers.hf import device_map, quantization, strict_load
from lm_eval_duel.denoisers.hf.decoder import Decoder, max_positions, trained_block
from lm_eval_duel.denoisers.hf.families import Family
from lm_eval_duel.denoisers.hf.native import file_name, native_config, native_tensors
from lm_eval_duel.denoisers.hub import find_mask_id, pick_dtype, row_length, short_reason
from lm_eval_duel.denoisers.load_options import LoadOptions
from lm_eval_duel.denoisers.vocabulary import require_fit
from lm_eval_duel.errors import DuelError

IGNORED = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")  # endings of keys that are recomputed
COUNTED = ("num_hidden_layers", "num_experts", "n_routed_experts")  # entries that determine the number of modules
HEAD = "lm_head.weight"
TABLES = {"GPT2": "transformer.wte.weight"}  # the embedding, by native class
TABLE = "model.embed_tokens.weight"  # of all others
CLASSES = {"GPT2": "GPT2LMHeadModel"}  # the network, by native class; of all others <native>ForCausalLM


def load(
    family: Family, folder: str, config: dict[str, Any], options: LoadOptions, tokenizer: PreTrainedTokenizerBase
) -> Decoder:
    """The denoiser of a local folder; raises DuelError for weights that do not fill the network exactly."""
    attention = options.attention or family.attention
    options.refuse(family.name, "sigma", *(() if attention == "causal_prefix" else ("first_token",)))
    options.require_cacheable(attention)
    model_kwargs = quantization.model_kwargs(config, options) | device_map.model_kwargs(options)
    entries = native_entries(family, config, options)
    mask_id = find_mask_id(options, config, tokenizer, family.mask_id, entries["vocab_size"])
    require_fit(set(tokenizer.get_vocab().values()), mask_id, entries["vocab_size"], folder)
    row_length(folder, options.max_length, max_positions(family, entries["max_position_embeddings"], config))
    if attention in BY_BLOCKS:
        options.require_block(trained_block(family, config, options))
    stored = {key: value for key, value in weights.read(folder).items() if not key.endswith(IGNORED)}
    strict_load.require_counts(folder, {key: entries.get(key) for key in COUNTED}, stored)
    model_config = make_config(family, entries, options)
    tensors, origin = native_tensors(family, stored, config)
    if model_config.tie_word_embeddings and HEAD in tensors:
        # the file may have a head of its own
        table = TABLES.get(family.native, TABLE)
        model_config.tie_word_embeddings = torch.equal(tensors[HEAD], tensors.get(table, tensors[HEAD]))
    model = _Files(family, folder, options, stored, tensors, origin).fill(model_config, model_kwargs)
    if options.peft:
        from lm_eval_duel.denoisers.hf.lora import fetch, merge

        options = fetch(options)
        model = merge(model, options.peft, family)
    self_tests.rotary_frequencies(model, model_config, folder)
    with quantization.first_calls(model, folder):
        denoiser = Decoder(model, family, config, folder, options, mask_id, tokenizer)
        self_tests.run(denoiser, folder)
    return denoiser


def native_entries(family: Family, config: dict[str, Any], options: LoadOptions) -> dict[str, Any]:
    """The entries of the native config, with full attention in every layer and the checkpoint's rotary positions."""
    try:
        entries = native_config(family, config, options.name)
    except DuelError:
        raise
    except (TypeError, ValueError, KeyError) as error:
        raise _wrong_config(family, options, error) from error
    entries |= {"use_sliding_window": False, "sliding_window": None, "layer_types": None, "use_cache": False}
    rope = entries.get("rope_parameters") or {}
    if "rope_theta" in rope:
        entries.setdefault("rope_theta", rope["rope_theta"])
    scaled = rope.get("rope_type", "default") != "default" and not isinstance(entries.get("rope_scaling"), dict)
    if scaled and transformers.__version__.startswith("4."):  # its name for the same entry
        entries["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    if not isinstance(entries.get("rope_scaling"), dict):
        entries["rope_scaling"] = None
    return entries


def make_config(family: Family, entries: dict[str, Any], options: LoadOptions) -> Any:
    """The native config."""
    try:
        model_config = getattr(transformers, f"{family.native}Config")(**entries)
    except Exception as error:  # transformers raises classes of its own for wrong types
        raise _wrong_config(family, options, error) from error
    model_config._attn_implementation = "sdpa"
    return model_config


def _wrong_config(family: Family, options: LoadOptions, error: Exception) -> DuelError:
    return DuelError(f"The config.json of {options.name} does not fit {family.native}: {short_reason(error)}")


@dataclasses.dataclass(frozen=True)
class _Files:
    """The tensors of a folder, to be loaded into a native network."""

    family: Family
    folder: str
    options: LoadOptions
    stored: dict[str, torch.Tensor]  # by their names in the files
    tensors: dict[str, torch.Tensor]  # by native names
    origin: dict[str, str]  # native name -> name in the files

    def fill(self, model_config: Any, model_kwargs: dict[str, Any]) -> Any:
        """The native model with every tensor loaded; raises DuelError that names all tensors that do not fit."""
        dtype = pick_dtype(self.options.dtype, self.options.device)
        if dtype == "auto":
            table = self.tensors.get(TABLES.get(self.family.native, TABLE))
            dtype = torch.float32 if table is None else table.dtype
        if dtype == torch.float64:
            model_config._experts_implementation = "eager"  # grouped products stop at float32 in transformers 5
        self._require_fit(model_config)
        # quantised files may hold more than tensors (torchao's metadata), which only transformers can read
        from_files = hasattr(model_config, quantization.CONFIG_KEY) and not self.family.rename
        model_kwargs = model_kwargs | ({} if from_files else {"state_dict": self.tensors})
        model_kwargs |= {"ignore_mismatched_sizes": True, "output_loading_info": True}  # reported, and raised below
        try:
            with strict_load.quiet_transformers():
                model, report = self._class.from_pretrained(
                    self.folder if from_files else None, config=model_config, dtype=dtype, **model_kwargs
                )
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a wrong config, or the quantisation package
            if "offload" in str(error):
                raise DuelError(
                    f"{self.folder} does not fit into the memory that device_map={self.options.device_map} may use: "
                    "start fewer processes per machine, or use a smaller dtype."
                ) from error
            raise DuelError(f"{self._do_not_fill}: {short_reason(error)}") from error
        shapes = {key: tuple(value.shape) for key, value in self.tensors.items()}
        faults = strict_load.reported(report, model, shapes)
        tied = {HEAD} if model_config.tie_word_embeddings else set()
        unknown = {key for key in faults.unknown if not key.endswith(IGNORED)}
        self._require(faults._replace(missing=set(faults.missing) - tied, unknown=unknown))
        placed = "device_map" in model_kwargs
        return model.eval() if placed else model.to(self.options.device).eval()

    @property
    def _class(self) -> Any:
        return getattr(transformers, CLASSES.get(self.family.native, f"{self.family.native}ForCausalLM"))

    @property
    def _do_not_fill(self) -> str:
        return f"The weights in {self.folder} do not fill {self._class.__name__}"

    def _require(self, faults: strict_load.Faults) -> None:
        strict_load.require_no_faults(
            self._do_not_fill, faults, lambda key: self.origin.get(key) or file_name(self.family, key)
        )

    def _require_fit(self, model_config: Any) -> None:
        """Compare with the network on the meta device, so that a wrong config takes no memory."""
        try:
            with torch.device("meta"):
                network = self._class(model_config)
        except Exception as error:  # inconsistent sizes
            raise _wrong_config(self.family, self.options, error) from error
        if hasattr(model_config, quantization.CONFIG_KEY):
            strict_load.require_plausible_size(self.folder, network, self.stored.values(), packed=True)
            return
        expected = _unfused_shapes(network)
        if model_config.tie_word_embeddings and HEAD not in self.tensors:
            expected.pop(HEAD, None)
        faults = strict_load.compare(expected, {key: tuple(value.shape) for key, value in self.tensors.items()})
        self._require(faults._replace(shapes=self._shapes_in_files(faults.shapes, expected)))

    def _shapes_in_files(
        self, misshapen: Iterable[str], expected: dict[str, strict_load.Shape]
    ) -> dict[str, tuple[strict_load.Shape, strict_load.Shape]]:
        """Actual and expected shapes of tensors in the files, where one may hold several of the network, stacked."""
        shapes = {}
        for key in misshapen:
            parts = [expected[other] for other in expected if self.origin.get(other) == self.origin[key]]
            rows = sum(part[0] for part in parts if part)
            whole = (rows, *expected[key][1:]) if expected[key] else ()
            shapes[key] = tuple(self.stored[self.origin[key]].shape), whole
        return shapes


def _unfused_shapes(network: torch.nn.Module) -> dict[str, strict_load.Shape]:
    """Shapes of a network's tensors with one entry per expert, as in files: transformers 5 fuses the experts."""
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
