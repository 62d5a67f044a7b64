"""Decoders that became diffusion models (LLaDA, Dream, SDAR, ...) in transformers' own classes, with an explicit mask.

They have the networks of Llama, Qwen2, Qwen3, Qwen3-MoE, GLM-4-MoE and GPT-2, with another attention pattern. The
weights are loaded strictly into those classes, and every call passes a 4-D additive mask. None of a checkpoint's
code is run, and the same network can be bidirectional, block-causal or causal.

Shapes: R rows, L row length, N rows of a call, Q queries, K keys, D features, V tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

from lm_eval_duel.core.float_noise import random_rows
from lm_eval_duel.core.network import KeysValues, joined
from lm_eval_duel.denoisers import hub, self_tests
from lm_eval_duel.denoisers.checkpoint import Checkpoint, name_unread, unread_entries
from lm_eval_duel.denoisers.hf import weights
from lm_eval_duel.denoisers.hf.families import Family
from lm_eval_duel.denoisers.hf.layouts import NEEDED, Config, Tensors, lookup
from lm_eval_duel.denoisers.hf.pretrained import (
    Pretrained,
    cache_name,
    misshapen,
    quiet_transformers,
    special_kwargs,
    trained_positions,
)
from lm_eval_duel.denoisers.hub import pick_dtype
from lm_eval_duel.denoisers.load_options import LoadOptions
from lm_eval_duel.errors import DuelError

IGNORED = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")  # endings of keys that are recomputed
HEAD = "lm_head.weight"
TABLES = {"GPT2": "transformer.wte.weight"}  # the embedding, by native class
TABLE = "model.embed_tokens.weight"  # of all others
FOREIGN = ("architectures", "auto_map", "model_type", "transformers_version", "dtype", "torch_dtype")
UNQUANTIZED = ("llm_int8_skip_modules", "modules_to_not_convert", "ignore")  # lists of modules that stay unquantized
CLASSES = {"GPT2": "GPT2LMHeadModel"}  # the network, by native class; of all others <native>ForCausalLM


class Decoder(Pretrained):
    """A decoder of transformers under the attention mask of its diffusion family."""

    maskless = False  # whole rows are evaluated without a mask
    cache_name: str  # of the argument for kept keys

    def take(self, model: Any) -> None:
        super().take(model)
        self.cache_name = cache_name(model.base_model)
        self.set_columns(model.config.vocab_size)
        if self.attention == "bidirectional":
            self.maskless = self._is_bidirectional_without_mask()
        self_tests.run(self, self.path, self.refuses)

    def _is_bidirectional_without_mask(self) -> bool:
        """True if layers with is_causal=False see whole rows without a mask: flash kernels do not accept one."""
        layers = [module for module in self.model.modules() if hasattr(module, "is_causal")]
        for layer in layers:
            layer.is_causal = False  # read only in calls without a mask
        rows = random_rows(self, self_tests.LENGTH)  # (2, L)
        with torch.inference_mode():
            masked = self.features(rows, None)  # (2, L, D)
            self.maskless = True
            unmasked = self.features(rows, None)
        self.maskless = False

        difference = self_tests.difference_of(masked, unmasked)
        noise = self_tests.noise_alone(self, unmasked)
        return bool(layers) and difference <= noise

    @property
    def layers(self) -> torch.nn.Module:
        return self.model.base_model

    def compile(self) -> None:
        self.maskless = False  # when traced, transformers creates a causal mask if none is given
        super().compile()

    def features(self, ids: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
        length = ids.shape[1]
        position = torch.arange(length, device=ids.device)[None]  # (1, L)
        if real is None and self.maskless:  # without a mask, fast kernels run
            return self._features(ids, position, None, None)

        seen = torch.ones(1, length, length, dtype=torch.bool, device=ids.device)  # (1, L, L)
        if self.attention == "causal":
            seen = seen.tril()
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
        return self._features(ids, positions, seen, clean), clean.new

    def head(self, features: torch.Tensor) -> torch.Tensor:
        # accelerate moves the input to the head's device, which may be another one
        return self.model.lm_head(features).to(self.device)  # (U, V)

    def _features(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        seen: torch.Tensor | None,
        clean: CleanKeys | None,
    ) -> torch.Tensor:
        """The input of the LM head (N, Q, D); `seen` (N or 1, Q, K + Q), None: all of it."""
        mask = None if seen is None else self.additive_mask(seen)  # (N or 1, 1, Q, K + Q)
        out = self.model.base_model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=False,
            **{self.cache_name: clean},
        )
        return out.last_hidden_state.to(self.device)

    def describe(self) -> dict[str, object]:
        described = super().describe()
        described["denoiser"] = f"{self.family} as {type(self.model).__name__}"
        return described


class CleanKeys:
    """A cache of transformers that puts clean keys and values before a call's own, and collects these."""

    def __init__(self, past: list[KeysValues] | None):
        self.past = past
        self.new: list[KeysValues] = []

    def update(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        layer: int,
        *ignored: Any,
        **also_ignored: Any,
    ) -> KeysValues:
        """Keys and values (N, H, K + Q, D / H) that the layer attends to."""
        self.new.append((keys, values))
        past = None if self.past is None else self.past[layer]
        return joined(past, keys, values)

    def get_seq_length(self, *ignored: Any) -> int:
        """0: every call passes its positions."""
        return 0


def unfilled(checkpoint: Checkpoint) -> StoredDecoder:
    """The network of a local folder. `fill` raises DuelError if the weights do not fit exactly."""
    family = checkpoint.family_entry
    config = checkpoint.config
    options = checkpoint.options
    model_config = make_config(family, config, options)
    denoiser = StoredDecoder(checkpoint, model_config.vocab_size)
    options.refuse(family.name, "sigma")
    if denoiser.attention != "causal_prefix":
        options.refuse(family.name, "first_token")
    positions = trained_positions(family, model_config.max_position_embeddings, config)
    denoiser.set_row_length(positions)
    class_name = CLASSES.get(family.native, f"{family.native}ForCausalLM")
    denoiser.kind = getattr(transformers, class_name)
    denoiser.model_config = model_config

    denoiser.unread_entries = unread_entries(config, family.known_entries())
    refuse = family.closed and options.family is None
    name_unread(config, denoiser.unread_entries, options.name, family.name, refuse)
    return denoiser


def make_config(
    family: Family,
    config: dict[str, Any],
    options: LoadOptions,
) -> Any:
    """The native config, with full attention in every layer and the checkpoint's rotary positions."""
    entries = native_config(family, config, options.name)
    entries |= {
        "use_sliding_window": False,
        "sliding_window": None,
        "layer_types": None,
        "use_cache": False,
    }

    rope = entries.get("rope_parameters") or {}
    if "rope_theta" in rope:
        entries.setdefault("rope_theta", rope["rope_theta"])
    if not isinstance(entries.get("rope_scaling"), dict):
        entries["rope_scaling"] = None
        is_scaled = rope.get("rope_type", "default") != "default"
        if is_scaled and transformers.__version__.startswith("4."):
            # transformers 4 reads them under this name, and theta beside it
            scaling = dict(rope)
            scaling.pop("rope_theta", None)
            entries["rope_scaling"] = scaling

    config_class = getattr(transformers, f"{family.native}Config")
    model_config = config_class(**entries)
    model_config._attn_implementation = "sdpa"
    return model_config


def native_config(family: Family, config: Config, name: str) -> Config:
    """The entries of the native config: config.json, with the family's translations.

    Raises DuelError for an entry that would be left to a default, or makes the native class another network.
    """
    if changed := family.unreleased(config):
        raise DuelError(
            f"{name} is not the released network of the family {family.name} ({', '.join(changed)}). To run its own "
            "code: backend=remote,trust_remote_code=true."
        )
    entries = {key: value for key, value in config.items() if key not in FOREIGN}
    for native, in_file in family.entries.items():
        if config.get(in_file) is not None:
            entries[native] = config[in_file]
    defaults = {"hidden_act": "silu", "tie_word_embeddings": False, **family.values}
    for key, value in defaults.items():
        if entries.get(key) is None:
            entries[key] = value

    missing = []
    for key in (*NEEDED[family.native], *family.needs):
        in_file = family.entries.get(key)  # the family's name of this entry, if it has another one
        value = config.get(in_file) if in_file else lookup(entries, key)
        if value is None:
            missing.append(in_file or key)
    if missing:
        raise DuelError(
            f"The config.json of {name} has no {', '.join(missing)}, which the family {family.name} "
            f"({family.native} of transformers) needs. Use another family=, or add the values of its training."
        )

    entries |= family.translate_config(config)
    heads = entries["num_attention_heads"]
    if not entries.get("num_key_value_heads"):
        entries["num_key_value_heads"] = heads
    if not entries.get("head_dim"):
        entries["head_dim"] = entries["hidden_size"] // heads
    scheme = entries.get(weights.CONFIG_KEY)
    if scheme:
        entries[weights.CONFIG_KEY] = native_scheme(family, scheme)
    return entries


def native_scheme(family: Family, scheme: dict[str, Any]) -> dict[str, Any]:
    """A quantization whose lists of modules that stay unquantized have the native names."""
    native = dict(scheme)
    for key in UNQUANTIZED:
        modules = scheme.get(key)
        if not isinstance(modules, list):
            continue
        native[key] = []
        for module in modules:
            # with a dot at its end, as the patterns are for the names of tensors
            name = family.native_name(f"{module}.")
            native[key].append(name.removesuffix("."))
    return native


def native_tensors(family: Family, tensors: Tensors, config: Config) -> tuple[Tensors, dict[str, str]]:
    """The tensors by native name, and the name of each in the file; raises DuelError if two get the same name."""
    renamed: Tensors = {}
    origin: dict[str, str] = {}
    for key, value in tensors.items():
        parts = family.translate_tensors({key: value}, config)
        for part, content in parts.items():
            native = family.native_name(part)
            if native in renamed:
                raise DuelError(
                    f"The weights hold both {origin[native]} and {key}, which are the same tensor of the family "
                    f"{family.name}."
                )
            renamed[native] = content
            origin[native] = key
    return renamed, origin


class StoredDecoder(Decoder):
    """A decoder whose weights are in a folder, in the layout of its family."""

    def read(self) -> Any:
        """The network with every tensor of its folder; raises DuelError that names all tensors that do not fit."""
        family = self.family_entry
        config = self.config
        model_config = self.model_config
        options = weights.fetch_adapter(self.options)
        self.options = options
        model_kwargs = special_kwargs(config, options)  # raises its errors before a weight is read

        stored = {}
        for key, value in hub.read_tensors(options.name).items():
            if not key.endswith(IGNORED):
                stored[key] = value
        tensors, origin = native_tensors(family, stored, config)

        table = tensors.get(TABLES.get(family.native, TABLE))
        if model_config.tie_word_embeddings and HEAD in tensors:  # the file may have a separate head
            model_config.tie_word_embeddings = table is None or torch.equal(tensors[HEAD], table)
        dtype = pick_dtype(options.dtype, options.device)
        if dtype == "auto":
            dtype = torch.float32 if table is None else table.dtype
        if dtype == torch.float64:
            model_config._experts_implementation = "eager"  # grouped products stop at float32 in transformers 5

        what = f"The weights in {options.name} do not fill {self.kind.__name__}"
        packed = hasattr(model_config, weights.CONFIG_KEY)
        if not packed:  # packed weights have other shapes, and transformers compares them
            self._require_equal(what, tensors, origin)

        # Quantized files may hold more than tensors (torchao's metadata), which only transformers can read.
        from_files = packed and not family.rename
        if not from_files:
            model_kwargs["state_dict"] = tensors
        with quiet_transformers():
            model, report = self.kind.from_pretrained(
                options.name if from_files else None,
                config=model_config,
                dtype=dtype,
                ignore_mismatched_sizes=True,  # reported, and raised below
                output_loading_info=True,
                **model_kwargs,
            )
        missing = set(report["missing_keys"])
        if model_config.tie_word_embeddings:
            missing.discard(HEAD)
        unknown = [key for key in report["unexpected_keys"] if not key.endswith(IGNORED)]
        hub.require_none(what, missing, unknown, misshapen(report))

        if "device_map" not in model_kwargs:
            model = model.to(options.device)
        model = weights.merge_adapter(model, options.peft, family)
        family.finish(model, config)  # after the adapter, which knows nothing of hooks
        self_tests.rotary_frequencies(model, model_config, options.name)
        return model

    def _require_equal(self, what: str, tensors: Tensors, origin: dict[str, str]) -> None:
        """Raise DuelError, starting with `what`, unless these are the tensors of the network, by name and shape.

        Every tensor is compared before anything is loaded: transformers would fuse experts that are not numbered from
        0 without an error. `origin`: the name of each tensor in the file.
        """
        with torch.device("meta"):
            empty = self.kind(self.model_config)
            expected = _unfused_shapes(empty)
        if self.model_config.tie_word_embeddings and HEAD not in tensors:
            expected.pop(HEAD, None)
        actual = {key: tuple(value.shape) for key, value in tensors.items()}
        hub.require_equal(what, expected, actual, lambda key: origin.get(key, key))


def _unfused_shapes(network: torch.nn.Module) -> dict[str, hub.Shape]:
    """Shapes of a network's tensors with one entry per expert, as in files.

    transformers 5 fuses the experts in the order of their numbers, and takes 0, 1, 77 as 0, 1, 2 without an error.
    """
    shapes: dict[str, hub.Shape] = {}
    for key, value in network.state_dict().items():
        before, _, part = key.rpartition(".experts.")
        if part not in ("gate_up_proj", "down_proj"):
            shapes[key] = tuple(value.shape)
            continue
        experts, rows, width = value.shape  # (E, 2 F, D) or (E, D, F)
        names = ["down_proj"]
        if part == "gate_up_proj":
            names = ["gate_proj", "up_proj"]
        shape = (rows // len(names), width)
        for expert in range(experts):
            for name in names:
                shapes[f"{before}.experts.{expert}.{name}.weight"] = shape
    return shapes
