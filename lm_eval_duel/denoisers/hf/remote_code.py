"""A checkpoint's own code (`backend=remote`, `trust_remote_code=true`), repaired for today's transformers.

The class is constructed on the CPU and filled key by key: transformers 5 builds such classes without memory first, and
leaves rotary frequencies that they compute themselves uninitialised. Every repair is undone once the class is built.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedTokenizerBase
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lm_eval_duel.denoisers import self_tests as probes
from lm_eval_duel.denoisers import weights
from lm_eval_duel.denoisers.hf import device_map as placement
from lm_eval_duel.denoisers.hf import masked_lm as huggingface
from lm_eval_duel.denoisers.hf import quantization as quantized
from lm_eval_duel.denoisers.hf import strict_load as filling
from lm_eval_duel.denoisers.hf.decoder import trained_block
from lm_eval_duel.denoisers.hf.families import Family
from lm_eval_duel.denoisers.hub import mask_of, pick_dtype, unreadable
from lm_eval_duel.denoisers.load_options import LoadOptions
from lm_eval_duel.errors import DuelError

COUNTED = ("num_hidden_layers", "n_layers", "num_experts")
HEADED = ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModel")  # AutoModel may lack the head


def load(
    family: Family | None, folder: str, raw: dict[str, Any], asked: LoadOptions, tokenizer: PreTrainedTokenizerBase
) -> huggingface.HuggingFace:
    """The denoiser of a checkpoint's own code; raises DuelError where it does not load strictly or is nonsense."""
    names = raw.get("auto_map") or {}
    reference = next((names[key] for key in HEADED if key in names), None)
    if reference is None:
        raise DuelError(f"{asked.name} has no code of its own (no auto_map with a model in config.json).")
    asked.refuse("own code", "sigma", "load_in_8bit", "load_in_4bit")
    if said := raw.get(quantized.SAID):
        raise DuelError(
            f"{asked.name} is quantised ({quantized.method_of(said)}), which its own code is not loaded as: leave "
            "backend=remote out where it has a family of ours, or take the checkpoint that is not quantised."
        )
    if asked.attention == "causal":
        raise DuelError(
            f"backend=remote with attention=causal is not for {asked.name}: leave backend out; an autoregressive "
            "network whose class transformers does not have needs trust_remote_code=true alone."
        )
    if not asked.trust_remote_code:
        raise DuelError(f"{asked.name} runs code of its own: pass trust_remote_code=true if you trust it.")
    rows = max((raw[key] for key in ("embedding_size", "vocab_size") if isinstance(raw.get(key), int)), default=None)
    mask_id = mask_of(asked, raw, tokenizer, family and family.mask_id, rows)
    attention = asked.attention or (family.attention if family else "bidirectional")
    block = trained_block(family, raw, asked) if attention == "block_causal" else None
    if block is not None:
        asked.require_block(block)
    dtype = pick_dtype(asked.dtype, asked.device)
    tensors = weights.read(folder)
    filling.require_counts(asked.name, {key: raw.get(key) for key in COUNTED}, tensors)
    if dtype == "auto":
        dtype = next(value.dtype for value in tensors.values() if value.is_floating_point())
    try:
        with repairs(), _default_dtype(dtype):
            config = AutoConfig.from_pretrained(asked.name, revision=asked.revision, trust_remote_code=True)
            _complete(config, raw)
            model = get_class_from_dynamic_module(reference, asked.name, revision=asked.revision)(config)
    except Exception as error:  # whatever the code raises
        raise unreadable(asked.name, error) from error
    cast = {key: value.to(dtype) if value.is_floating_point() else value for key, value in tensors.items()}
    _fill(model, cast, config, asked.name)
    probes.rotary_frequencies(model, config, asked.name)
    if asked.peft:
        from lm_eval_duel.denoisers.hf.lora import fetched, merge

        asked = fetched(asked)
        model = merge(model, asked.peft, None)
    quirks: dict[str, Any] = {"family": "own code", "block": block}
    if family is not None or asked.attention or asked.shift_logits is not None:
        shift = (family.shift if family else 0) if asked.shift_logits is None else int(asked.shift_logits)
        quirks |= {"family": family.name if family else "own code", "attention": attention, "shift": shift}
    if family is not None:
        quirks |= {
            "bos": "given" if quirks["shift"] else family.bos,
            "published_block": family.published_block,
            "max_length": family.max_length,
        }
    return huggingface.finish(placement.spread(model, asked), asked, tokenizer, mask_id, **quirks)


def _complete(config: Any, raw: dict[str, Any]) -> None:
    """Entries that older code expects and transformers 5 no longer sets."""
    for name, value in (("use_cache", False), ("pad_token_id", None), ("rope_theta", raw.get("rope_theta"))):
        if getattr(config, name, None) is None:
            setattr(config, name, value)
    config.use_cache = False
    if getattr(config, "rope_scaling", None) is False:
        config.rope_scaling = None
        if hasattr(config, "rope_parameters"):  # transformers 5: None, the same thing, does not say theta
            config.rope_parameters = {"rope_type": "default", "rope_theta": config.rope_theta}


def _fill(model: Any, tensors: dict[str, torch.Tensor], config: Any, name: str) -> None:
    """Put every tensor in its place; raises DuelError for all that are missing, left over or of another shape."""
    tensors = {key: value for key, value in tensors.items() if not key.endswith("rotary_emb.inv_freq")}
    own = {key: tuple(value.shape) for key, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    shapes = filling.compare(own, {key: tuple(value.shape) for key, value in tensors.items()}).shapes
    what = f"The weights of {name} do not fill its own code"
    try:
        fitting = {key: value for key, value in tensors.items() if key not in shapes}
        lacking, unknown = model.load_state_dict(fitting, strict=False, assign=True)
    except RuntimeError as error:  # its own way to read them
        raise DuelError(f"{what}: {' '.join(str(error).split())[:500]}") from error
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    tied: set[str] = set()
    if head is not None and getattr(config, "tie_word_embeddings", False):
        tied = {key for key, value in model.named_parameters(remove_duplicate=False) if value is head.weight}
    filling.require(what, filling.Faults(set(lacking) - tied - set(shapes), unknown, shapes))
    if tied & set(lacking):
        head.weight = model.get_input_embeddings().weight


@contextlib.contextmanager
def repairs() -> Iterator[None]:
    """Names that older code imports and transformers no longer has; there while a class is built, and no longer."""

    class Nothing:
        """Stands for a type that is only annotated with."""

    stand_ins = (
        (transformers.utils, "LossKwargs", Nothing),
        (transformers.utils.import_utils, "is_torch_fx_available", lambda: False),
    )
    added = [(place, name) for place, name, value in stand_ins if not hasattr(place, name)]
    for place, name, value in stand_ins:
        if (place, name) in added:
            setattr(place, name, value)
    lacks_default = "default" not in ROPE_INIT_FUNCTIONS
    if lacks_default:
        ROPE_INIT_FUNCTIONS["default"] = plain_rope
    try:
        yield
    finally:
        for place, name in added:
            delattr(place, name)
        if lacks_default:
            ROPE_INIT_FUNCTIONS.pop("default", None)


def plain_rope(config: Any, device: Any = None, **ignored: Any) -> tuple[torch.Tensor, float]:
    """Unscaled rotary frequencies theta^(-2i/d), (d / 2,), and the factor 1 on the attention."""
    parameters = getattr(config, "rope_parameters", None) or {}
    theta = parameters.get("rope_theta") or config.rope_theta
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = int(head * (getattr(config, "partial_rotary_factor", None) or 1.0))
    return 1.0 / theta ** (torch.arange(0, width, 2, device=device, dtype=torch.float32) / width), 1.0


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
