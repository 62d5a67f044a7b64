"""Checkpoints of decoders that became diffusion models, read into transformers' own classes, strictly.

A tensor that is missing, left over or of another shape is an error; none of a checkpoint's code is run.
"""

from __future__ import annotations

import collections
import re
from typing import Any

import torch
import transformers
from transformers import PreTrainedTokenizerBase

from lm_eval_duel.denoisers import placement, probes, quantized, weights
from lm_eval_duel.denoisers.asked import Asked
from lm_eval_duel.denoisers.backbone import Backbone, held_length, trained_block
from lm_eval_duel.denoisers.families import Family, native_config, native_tensors
from lm_eval_duel.denoisers.hub import mask_of, pick_dtype, row_length, said
from lm_eval_duel.denoisers.predictions import require_fit
from lm_eval_duel.errors import DuelError

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
    require_fit(set(tokenizer.get_vocab().values()), mask_id, config.vocab_size, folder)
    row_length(folder, asked.max_length, held_length(family, config))
    if (asked.attention or family.attention) == "block_causal":
        asked.require_block(trained_block(family, raw, asked))
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
        from lm_eval_duel.denoisers.adapters import fetched, merge

        asked = fetched(asked)
        model = merge(model, asked.peft, family)
    probes.rotary_frequencies(model, config, folder)
    with quantized.first_calls(model, folder):
        denoiser = Backbone(model, family, raw, folder, asked, mask_id, tokenizer)
        probes.probe(denoiser, folder)
    return denoiser


def _config(family: Family, raw: dict[str, Any], asked: Asked) -> Any:
    """The native config: full attention everywhere, positions as the checkpoint has them."""
    try:
        entries = native_config(family, raw)
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
    try:
        config = getattr(transformers, f"{family.native}Config")(**entries)
    except Exception as error:  # transformers checks some types, by a class of its own
        raise _wrong_config(family, asked, error) from error
    config._attn_implementation = "sdpa"
    return config


def _wrong_config(family: Family, asked: Asked, error: Exception) -> DuelError:
    return DuelError(f"The config.json of {asked.name} does not fit {family.native}: {said(error)}")


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
    except Exception as error:  # of a wrong config, or of the package that quantises
        if "offload" in str(error):
            raise DuelError(
                f"{folder} does not fit into the memory that device_map={asked.device_map} may use: start fewer "
                "processes on a machine, or take a smaller dtype."
            ) from error
        raise DuelError(f"The weights in {folder} do not fill {model_class.__name__}: {said(error)}") from error
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
