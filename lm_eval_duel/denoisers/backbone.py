"""Decoders that became diffusion models (LLaDA, Dream, SDAR, ...) in transformers' own classes, with an explicit mask.

Their networks are those of Llama, Qwen2, Qwen3, Qwen3-MoE and GLM-4-MoE; what differs is who sees whom. So the weights
are loaded into those classes, strictly, and every call says with a 4-D additive mask what is seen: none of a
checkpoint's code is run, and the same network is bidirectional or block-causal.

Shapes: R rows, L row length, N rows of a call, Q queries, K keys, D features, V tokens.
"""

from __future__ import annotations

import collections
import logging
import os
import re
from typing import Any

import torch
import transformers
from transformers import PreTrainedTokenizerBase

from lm_eval_duel import fingerprint
from lm_eval_duel.denoisers import placement, probes, quantized, weights
from lm_eval_duel.denoisers.asked import Asked
from lm_eval_duel.denoisers.base import Denoiser, KeysValues
from lm_eval_duel.denoisers.families import Family, native_config, native_tensors
from lm_eval_duel.denoisers.hub import mask_of, pick_dtype, row_length
from lm_eval_duel.denoisers.predictions import excluded_columns
from lm_eval_duel.errors import DuelError

log = logging.getLogger("lm_eval.duel_mdm")

IGNORED = ("rotary_emb.inv_freq",)  # endings of keys: computed anew
EXPERT = re.compile(r"(.*\.experts\.)(\d+)(\..*)")
HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"


def load(
    family: Family, folder: str, raw: dict[str, Any], asked: Asked, tokenizer: PreTrainedTokenizerBase
) -> Backbone:
    """The denoiser of a local folder; raises DuelError for weights that do not fill the network exactly."""
    asked.refuse(family.name, "sigma")
    options = quantized.options(raw, asked) | placement.options(asked)
    config = _config(family, raw, asked)
    mask_id = mask_of(asked, raw, tokenizer, family.mask_id, config.vocab_size)
    tensors = native_tensors(family, weights.read(folder), raw)
    tensors = {key: value for key, value in tensors.items() if not key.endswith(IGNORED)}
    if (
        HEAD in tensors
        and config.tie_word_embeddings
        and not torch.equal(tensors[HEAD], tensors.get(TABLE, tensors[HEAD]))
    ):
        config.tie_word_embeddings = False  # the file has a head of its own
    model = _fill(family, config, tensors, folder, asked, options)
    if asked.peft:
        from lm_eval_duel.denoisers.adapters import merge

        model = merge(model, asked.peft, family)
    probes.rotary_frequencies(model, config, folder)
    with quantized.first_calls(model, folder):
        denoiser = Backbone(model, family, raw, folder, asked, mask_id, tokenizer)
        probes.probe(denoiser, folder)
    return denoiser


def _config(family: Family, raw: dict[str, Any], asked: Asked) -> Any:
    """The native config: full attention everywhere, positions as the checkpoint has them."""
    entries = native_config(family, raw)
    entries |= {"use_sliding_window": False, "sliding_window": None, "layer_types": None, "use_cache": False}
    rope = entries.get("rope_parameters") or {}
    if "rope_theta" in rope:
        entries.setdefault("rope_theta", rope["rope_theta"])
    scaled = rope.get("rope_type", "default") != "default" and not isinstance(entries.get("rope_scaling"), dict)
    if scaled and transformers.__version__.startswith("4."):  # which calls it so
        entries["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    if not isinstance(entries.get("rope_scaling"), dict):
        entries["rope_scaling"] = None
    try:
        config = getattr(transformers, f"{family.native}Config")(**entries)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise DuelError(f"The config.json of {asked.name} does not fit {family.native}: {error}") from error
    config._attn_implementation = "sdpa"
    return config


def _fill(
    family: Family, config: Any, tensors: dict[str, torch.Tensor], folder: str, asked: Asked, options: dict[str, Any]
) -> Any:
    """The native model with every tensor in its place; what is left over or missing is an error naming ten."""
    dtype = pick_dtype(asked.dtype, asked.device)
    if dtype == "auto":
        dtype = tensors[TABLE].dtype if TABLE in tensors else torch.float32
    if dtype == torch.float64:
        config._experts_implementation = "eager"  # the grouped products of transformers 5 end at float32
    model_class = getattr(transformers, f"{family.native}ForCausalLM")

    def require(wrong: dict[str, set[str]]) -> None:
        for kind, keys in wrong.items():
            if keys:
                names = ", ".join(sorted(keys)[:10])
                raise DuelError(
                    f"The weights in {folder} do not fill {model_class.__name__}: {len(keys)} {kind}: {names}."
                )

    require(_wrong_experts(tensors, getattr(config, "n_routed_experts", None) or getattr(config, "num_experts", 0)))
    # quantised files may hold more than tensors (torchao's metadata), which only transformers reads
    whole = hasattr(config, quantized.SAID) and not family.rename
    options = options | ({} if whole else {"state_dict": tensors})
    options |= {"ignore_mismatched_sizes": True, "output_loading_info": True}  # reported, and an error below
    try:
        model, report = model_class.from_pretrained(folder if whole else None, config=config, dtype=dtype, **options)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # those of the package that quantises, too
        if "offload" in str(error):
            raise DuelError(
                f"{folder} does not fit into the memory that device_map={asked.device_map} may use: start fewer "
                "processes on a machine, or take a smaller dtype."
            ) from error
        raise DuelError(f"The weights in {folder} do not fill {model_class.__name__}: {error}") from error
    tied = {HEAD} if config.tie_word_embeddings else set()
    shapes = {key if isinstance(key, str) else key[0] for key in report["mismatched_keys"]}  # names, or with shapes
    require(
        {
            "missing": set(report["missing_keys"]) - tied,
            "not known": {key for key in report["unexpected_keys"] if not key.endswith(IGNORED)},
            "of another shape": shapes,
        }
    )
    return model.eval() if "device_map" in options else model.to(asked.device).eval()


def _wrong_experts(tensors: dict[str, torch.Tensor], count: int) -> dict[str, set[str]]:
    """Names of experts' tensors that are wrong: transformers 5 fuses them in order, whatever their numbers are."""
    found: dict[tuple[str, str], dict[int, torch.Size]] = {}  # before and after the number
    for key, value in tensors.items():
        if parts := EXPERT.fullmatch(key):
            found.setdefault((parts[1], parts[3]), {})[int(parts[2])] = value.shape
    wrong: dict[str, set[str]] = {"missing": set(), "not known": set(), "of another shape": set()}
    for (before, after), shapes in found.items():
        usual = collections.Counter(shapes.values()).most_common(1)[0][0]
        odd = {number for number, shape in shapes.items() if shape != usual}
        kinds = (set(range(count)) - set(shapes), set(shapes) - set(range(count)), odd)
        for names, numbers in zip(wrong.values(), kinds, strict=True):
            names |= {f"{before}{number}{after}" for number in numbers}
    return wrong


class Backbone(Denoiser):
    """A decoder of transformers, seen through the mask of its diffusion family."""

    maskless = False  # whole rows go without a mask

    def __init__(
        self,
        model: Any,
        family: Family,
        raw: dict[str, Any],
        path: str,
        asked: Asked,
        mask_id: int,
        tokenizer: PreTrainedTokenizerBase,
    ):
        self.model, self.family, self.path = model, family.name, path
        self.device, self.coarse = placement.device_of(model), quantized.is_quantized(model)
        self.dtype = model.get_input_embeddings().weight.dtype
        self.attention = asked.attention or family.attention
        said = raw.get("right_shift_logits", family.shift) if asked.shift_logits is None else asked.shift_logits
        self.shift = int(said)
        self.bos = asked.bos or ("given" if self.shift else family.bos)  # the first token is predicted from one before
        self.last_block = asked.last_block
        self.adapter = asked.peft
        self.mask_id = mask_id
        self.published_block = family.published_block if self.attention == "bidirectional" else None
        self.block = trained_block(family, raw, asked) if self.attention == "block_causal" else None
        held = min(model.config.max_position_embeddings, family.max_length or model.config.max_position_embeddings)
        self.max_length = row_length(path, asked.max_length, held)
        self.vocab_size = model.config.vocab_size
        self._excluded = excluded_columns(
            set(tokenizer.get_vocab().values()), mask_id, self.vocab_size, path, self.device
        )
        if self.attention == "bidirectional":
            self.maskless = self._sees_all_without_a_mask()

    @property
    def excluded(self) -> torch.Tensor:
        return self._excluded

    def _sees_all_without_a_mask(self) -> bool:
        """Whether layers told not to be causal see whole rows without a mask: flash kernels take none."""
        layers = [module for module in self.model.modules() if hasattr(module, "is_causal")]
        for layer in layers:
            layer.is_causal = False  # it is asked for where no mask is given, and nowhere else
        rows = probes.tokens(self)  # (2, L)
        with torch.inference_mode():
            masked = self.features(rows, None)  # (2, L, D)
            self.maskless = True
            free = self.features(rows, None)
        self.maskless = False
        return bool(layers) and probes.differ(masked, free) <= probes.tolerance(self, free)

    @property
    def layers(self) -> torch.nn.Module:
        return self.model.model

    def compile(self) -> None:
        self.maskless = False  # traced, transformers makes a causal mask where none is given
        super().compile()

    @torch.inference_mode()
    def features(self, ids: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
        length = ids.shape[1]
        position = torch.arange(length, device=ids.device)[None]  # (1, L)
        if real is None and self.maskless:
            return self._hidden(ids, position, None, None)
        seen = torch.ones(1, length, length, dtype=torch.bool, device=ids.device)  # (1, L, L)
        if real is not None:
            seen = seen & real[:, None]  # (R, L, L)
            seen |= torch.eye(length, dtype=torch.bool, device=ids.device)  # padding sees itself, never nothing
        return self._hidden(ids, position, seen, None)

    @torch.inference_mode()
    def stream(
        self, ids: torch.Tensor, positions: torch.Tensor, seen: torch.Tensor, past: list[KeysValues] | None
    ) -> tuple[torch.Tensor, list[KeysValues]]:
        clean = CleanKeys(past)
        return self._hidden(ids, positions, seen, clean), clean.own

    @torch.inference_mode()
    def head(self, features: torch.Tensor) -> torch.Tensor:
        return self.model.lm_head(features).to(self.device)  # (U, V) wherever it lies: accelerate takes its input there

    def _hidden(
        self, ids: torch.Tensor, positions: torch.Tensor, seen: torch.Tensor | None, clean: CleanKeys | None
    ) -> torch.Tensor:
        """The input of the LM head (N, Q, D); `seen` (N or 1, Q, K + Q), None: all of it."""
        mask = None
        if seen is not None:
            lowest = torch.finfo(self.dtype).min  # -inf would make a row that sees nothing NaN
            mask = torch.zeros(seen.shape, dtype=self.dtype, device=seen.device).masked_fill(~seen, lowest)[:, None]
        out = self.model.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=clean,
            use_cache=False,
        )
        return out.last_hidden_state.to(self.device)

    def describe(self) -> dict[str, object]:
        described = {
            "denoiser": f"{self.family} as {type(self.model).__name__}",
            "weights": fingerprint.weights_of(self.path),
            "dtype": str(self.dtype).removeprefix("torch."),
            "mask_token_id": self.mask_id,
            "vocabulary": f"{int((~self._excluded).sum())} of {self.vocab_size}",
            "attention": self.attention,
            "shift": self.shift,
            "relative_positions": self.relative_positions,
            **quantized.described(self.model),
        }
        if self.attention == "block_causal":
            described["last_block"] = self.last_block
        if self.adapter:
            local = os.path.isdir(self.adapter)
            described["peft"] = fingerprint.weights_of(self.adapter) if local else self.adapter
        return described


class CleanKeys:
    """What transformers takes for a cache: keys and values of clean cells go before a call's own, kept apart."""

    def __init__(self, past: list[KeysValues] | None):
        self.past = past
        self.own: list[KeysValues] = []

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *ignored: Any, **also_ignored: Any
    ) -> KeysValues:
        """Keys and values (N, H, K + Q, D / H) that the layer attends to."""
        self.own.append((keys, values))
        if self.past is None:
            return keys, values
        before = self.past[layer]
        return torch.cat([before[0], keys], 2), torch.cat([before[1], values], 2)

    def get_seq_length(self, *ignored: Any) -> int:
        """Positions are said in every call."""
        return 0


def trained_block(family: Family | None, raw: dict[str, Any], asked: Asked) -> int:
    """The trained block: what the config says, else what the user says, else what the family is known for."""
    for key in family.block_keys if family else ():
        if raw.get(key):
            return int(raw[key])
    known = family.block if family else None
    if isinstance(asked.block, int):
        if known not in (None, asked.block):
            log.warning("%s is known for blocks of %d; taking block=%d", family.name, known, asked.block)
        return asked.block
    if known is None:
        raise DuelError(f"{asked.name} is block-causal and its config names no block; pass block=<the trained one>.")
    return known
