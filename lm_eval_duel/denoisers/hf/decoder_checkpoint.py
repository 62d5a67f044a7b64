"""Checkpoints of decoders that became diffusion models, read into transformers' own classes, strictly.

A tensor that is missing, left over or of another shape is an error; none of a checkpoint's code is run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers import PreTrainedTokenizerBase

from lm_eval_duel.denoisers import self_tests as probes
from lm_eval_duel.denoisers import weights
from lm_eval_duel.denoisers.hf import device_map as placement
from lm_eval_duel.denoisers.hf import quantization as quantized
from lm_eval_duel.denoisers.hf import strict_load as filling
from lm_eval_duel.denoisers.hf.decoder import Backbone, held_length, trained_block
from lm_eval_duel.denoisers.hf.families import Family
from lm_eval_duel.denoisers.hf.native import file_name, native_config, native_tensors
from lm_eval_duel.denoisers.hub import mask_of, pick_dtype, row_length, said
from lm_eval_duel.denoisers.load_options import LoadOptions
from lm_eval_duel.denoisers.predictions import require_fit
from lm_eval_duel.errors import DuelError

IGNORED = ("rotary_emb.inv_freq",)  # endings of keys: computed anew
COUNTED = ("num_hidden_layers", "num_experts", "n_routed_experts")  # entries that modules are made by
HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"


def load(
    family: Family, folder: str, raw: dict[str, Any], asked: LoadOptions, tokenizer: PreTrainedTokenizerBase
) -> Backbone:
    """The denoiser of a local folder; raises DuelError for weights that do not fill the network exactly."""
    asked.refuse(family.name, "sigma")
    options = quantized.options(raw, asked) | placement.options(asked)
    entries = _entries(family, raw, asked)
    mask_id = mask_of(asked, raw, tokenizer, family.mask_id, entries["vocab_size"])
    require_fit(set(tokenizer.get_vocab().values()), mask_id, entries["vocab_size"], folder)
    row_length(folder, asked.max_length, held_length(family, entries["max_position_embeddings"]))
    if (asked.attention or family.attention) == "block_causal":
        asked.require_block(trained_block(family, raw, asked))
    stored = {key: value for key, value in weights.read(folder).items() if not key.endswith(IGNORED)}
    filling.require_counts(folder, {key: entries.get(key) for key in COUNTED}, stored)
    config = _config(family, entries, asked)
    tensors, origin = native_tensors(family, stored, raw)
    if config.tie_word_embeddings and HEAD in tensors:
        # the file may have a head of its own
        config.tie_word_embeddings = torch.equal(tensors[HEAD], tensors.get(TABLE, tensors[HEAD]))
    model = _Files(family, folder, asked, stored, tensors, origin).fill(config, options)
    if asked.peft:
        from lm_eval_duel.denoisers.hf.lora import fetched, merge

        asked = fetched(asked)
        model = merge(model, asked.peft, family)
    probes.rotary_frequencies(model, config, folder)
    with quantized.first_calls(model, folder):
        denoiser = Backbone(model, family, raw, folder, asked, mask_id, tokenizer)
        probes.probe(denoiser, folder)
    return denoiser


def _entries(family: Family, raw: dict[str, Any], asked: LoadOptions) -> dict[str, Any]:
    """The entries of the native config: full attention everywhere, positions as the checkpoint has them."""
    try:
        entries = native_config(family, raw, asked.name)
    except DuelError:
        raise
    except (TypeError, ValueError, KeyError) as error:
        raise _wrong_config(family, asked, error) from error
    entries |= {"use_sliding_window": False, "sliding_window": None, "layer_types": None, "use_cache": False}
    rope = entries.get("rope_parameters") or {}
    if "rope_theta" in rope:
        entries.setdefault("rope_theta", rope["rope_theta"])
    scaled = rope.get("rope_type", "default") != "default" and not isinstance(entries.get("rope_scaling"), dict)
    if scaled and transformers.__version__.startswith("4."):  # which calls it so
        entries["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    if not isinstance(entries.get("rope_scaling"), dict):
        entries["rope_scaling"] = None
    return entries


def _config(family: Family, entries: dict[str, Any], asked: LoadOptions) -> Any:
    """The native config."""
    try:
        config = getattr(transformers, f"{family.native}Config")(**entries)
    except Exception as error:  # transformers checks some types, by a class of its own
        raise _wrong_config(family, asked, error) from error
    config._attn_implementation = "sdpa"
    return config


def _wrong_config(family: Family, asked: LoadOptions, error: Exception) -> DuelError:
    return DuelError(f"The config.json of {asked.name} does not fit {family.native}: {said(error)}")


@dataclasses.dataclass(frozen=True)
class _Files:
    """The tensors of a folder, and the native network that they are to fill."""

    family: Family
    folder: str
    asked: LoadOptions
    stored: dict[str, torch.Tensor]  # by the names of the files
    tensors: dict[str, torch.Tensor]  # by native names
    origin: dict[str, str]  # native name -> that of the file

    def fill(self, config: Any, options: dict[str, Any]) -> Any:
        """The native model with every tensor in its place; raises DuelError for all that are not."""
        dtype = pick_dtype(self.asked.dtype, self.asked.device)
        if dtype == "auto":
            dtype = self.tensors[TABLE].dtype if TABLE in self.tensors else torch.float32
        if dtype == torch.float64:
            config._experts_implementation = "eager"  # the grouped products of transformers 5 end at float32
        self._require_fit(config)
        # quantised files may hold more than tensors (torchao's metadata), which only transformers reads
        whole = hasattr(config, quantized.SAID) and not self.family.rename
        options = options | ({} if whole else {"state_dict": self.tensors})
        options |= {"ignore_mismatched_sizes": True, "output_loading_info": True}  # reported, and an error below
        try:
            with filling.quiet():
                model, report = self._class.from_pretrained(
                    self.folder if whole else None, config=config, dtype=dtype, **options
                )
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of a wrong config, or of the package that quantises
            if "offload" in str(error):
                raise DuelError(
                    f"{self.folder} does not fit into the memory that device_map={self.asked.device_map} may use: "
                    "start fewer processes on a machine, or take a smaller dtype."
                ) from error
            raise DuelError(f"{self._do_not_fill}: {said(error)}") from error
        shapes = {key: tuple(value.shape) for key, value in self.tensors.items()}
        faults = filling.reported(report, model, shapes)
        tied = {HEAD} if config.tie_word_embeddings else set()
        unknown = {key for key in faults.unknown if not key.endswith(IGNORED)}
        self._require(faults._replace(missing=set(faults.missing) - tied, unknown=unknown))
        return model.eval() if "device_map" in options else model.to(self.asked.device).eval()

    @property
    def _class(self) -> Any:
        return getattr(transformers, f"{self.family.native}ForCausalLM")

    @property
    def _do_not_fill(self) -> str:
        return f"The weights in {self.folder} do not fill {self._class.__name__}"

    def _require(self, faults: filling.Faults) -> None:
        filling.require(self._do_not_fill, faults, lambda key: self.origin.get(key) or file_name(self.family, key))

    def _require_fit(self, config: Any) -> None:
        """Compare with the network without memory for its weights, so that a wrong config takes none."""
        try:
            with torch.device("meta"):
                network = self._class(config)
        except Exception as error:  # sizes that do not go together
            raise _wrong_config(self.family, self.asked, error) from error
        if hasattr(config, quantized.SAID):
            filling.require_room(self.folder, network, self.stored.values(), coarse=True)
            return
        wanted = _names_in_files(network)
        if config.tie_word_embeddings and HEAD not in self.tensors:
            wanted.pop(HEAD, None)
        faults = filling.compare(wanted, {key: tuple(value.shape) for key, value in self.tensors.items()})
        self._require(faults._replace(shapes=self._whole_shapes(faults.shapes, wanted)))

    def _whole_shapes(
        self, shapes: Mapping[str, tuple[filling.Shape | None, filling.Shape]], wanted: dict[str, filling.Shape]
    ) -> dict[str, tuple[filling.Shape, filling.Shape]]:
        """Shapes of tensors as the files hold them, which may be several of the network's one upon another."""
        found = {}
        for key in shapes:
            parts = [wanted[other] for other in wanted if self.origin.get(other) == self.origin[key]]
            rows = sum(part[0] for part in parts if part)
            found[key] = tuple(self.stored[self.origin[key]].shape), (rows, *wanted[key][1:]) if wanted[key] else ()
        return found


def _names_in_files(network: torch.nn.Module) -> dict[str, filling.Shape]:
    """Shapes of a network's tensors, each expert by itself: transformers 5 fuses them, and files hold them apart."""
    found: dict[str, filling.Shape] = {}
    for key, value in network.state_dict().items():
        before, _, part = key.rpartition(".experts.")
        if part not in ("gate_up_proj", "down_proj"):
            found[key] = tuple(value.shape)
            continue
        experts, rows, width = value.shape  # (E, 2 F, D) or (E, D, F)
        names = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
        found |= {
            f"{before}.experts.{e}.{name}.weight": (rows // len(names), width) for e in range(experts) for name in names
        }
    return found
