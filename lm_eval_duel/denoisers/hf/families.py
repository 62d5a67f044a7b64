"""The families of masked diffusion models that transformers' own decoder classes can run, and those that no one can.

A family is found by the class names in config.json (`architectures`, `auto_map`), never by `model_type`, which lies for
some. Each entry says which native class has the same network, what its keys and config are called there, and what
its authors left out of the config.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from collections.abc import Callable
from typing import Any

import torch

from lm_eval_duel.denoisers import config_entries as entries
from lm_eval_duel.denoisers.load_options import LoadOptions
from lm_eval_duel.errors import DuelError, unknown

log = logging.getLogger("lm_eval.duel_mdm")

# entries of config.json without which a native class would fall back on its own defaults, unseen in any tensor's shape
SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
DENSE = (*SIZES, "intermediate_size", "rms_norm_eps", "rope_theta")
SPARSE = (*SIZES, "moe_intermediate_size", "num_experts_per_tok", "rms_norm_eps", "rope_theta")
GROUPED = ("n_group", "topk_group", "routed_scaling_factor", "first_k_dense_replace", "intermediate_size")
NEEDED = {
    "Llama": DENSE,
    "Qwen2": DENSE,
    "Qwen3": DENSE,
    "Qwen3Moe": (*SPARSE, "num_experts", "norm_topk_prob"),
    "Glm4Moe": (*SPARSE, *GROUPED, "n_routed_experts", "n_shared_experts", "norm_topk_prob", "partial_rotary_factor"),
}

Tensors = dict[str, torch.Tensor]
Raw = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Family:
    """One way of publishing a masked diffusion model. What a config says goes before what is said here."""

    name: str
    native: str  # the class of transformers: <native>ForCausalLM, <native>Config
    architectures: tuple[str, ...] = ()  # class names in config.json
    attention: str = "bidirectional"
    shift: int = 0
    block: int | None = None  # trained, of block-causal networks
    block_keys: tuple[str, ...] = ("block_size", "bd_size", "block_length")  # where a config says it
    published_block: int | None = None
    mask_id: int | None = None
    max_length: int | None = None  # where the config promises more than was trained
    bos: str = "none"
    needs: tuple[str, ...] = ()  # entries of its config.json; none: those of the native class
    rename: tuple[tuple[str, str], ...] = ()  # regular expressions, the first that fits
    fused: tuple[tuple[str, str], ...] = ()  # the same, from parts of a tensor to its name
    config: Callable[[Raw], Raw] = lambda raw: {}  # entries of the native config
    tensors: Callable[[Tensors, Raw], Tensors] = lambda tensors, raw: tensors  # where a rename is not enough


# ---------------------------------------------------------------- configs and keys that differ from the native ones


def _llada(raw: Raw) -> Raw:
    wrong = [key for key in ("include_bias", "include_qkv_bias", "alibi", "scale_logits") if raw.get(key)]
    others = {"block_type": "llama", "layer_norm_type": "rms", "activation_type": "silu"}
    if wrong or any((raw.get(key) or usual) != usual for key, usual in others.items()):
        raise DuelError(
            f"This LLaDA is not the released network ({', '.join(wrong) or 'other layers'}): it does not fit "
            "transformers' Llama. Use backend=remote,trust_remote_code=true."
        )
    return {
        "vocab_size": raw.get("embedding_size") or raw["vocab_size"],
        "hidden_size": raw["d_model"],
        "intermediate_size": raw["mlp_hidden_size"],
        "num_hidden_layers": raw["n_layers"],
        "num_attention_heads": raw["n_heads"],
        "num_key_value_heads": raw.get("n_kv_heads") or raw["n_heads"],
        "rms_norm_eps": raw.get("rms_norm_eps") or 1e-5,
        "max_position_embeddings": raw["max_sequence_length"],
        "tie_word_embeddings": bool(raw.get("weight_tying", False)),
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
    }


LLADA_NEEDS = ("vocab_size", "d_model", "mlp_hidden_size", "n_layers", "n_heads", "max_sequence_length", "rope_theta")
LLADA_KEYS = (
    (r"^model\.transformer\.wte\.", "model.embed_tokens."),
    (r"^model\.transformer\.ln_f\.", "model.norm."),
    (r"^model\.transformer\.ff_out\.", "lm_head."),
    (r"^model\.transformer\.blocks\.(\d+)\.([qkv])_proj\.", r"model.layers.\1.self_attn.\2_proj."),
    (r"^model\.transformer\.blocks\.(\d+)\.attn_out\.", r"model.layers.\1.self_attn.o_proj."),
    (r"^model\.transformer\.blocks\.(\d+)\.ff_proj\.", r"model.layers.\1.mlp.gate_proj."),
    (r"^model\.transformer\.blocks\.(\d+)\.up_proj\.", r"model.layers.\1.mlp.up_proj."),
    (r"^model\.transformer\.blocks\.(\d+)\.ff_out\.", r"model.layers.\1.mlp.down_proj."),
    (r"^model\.transformer\.blocks\.(\d+)\.attn_norm\.", r"model.layers.\1.input_layernorm."),
    (r"^model\.transformer\.blocks\.(\d+)\.ff_norm\.", r"model.layers.\1.post_attention_layernorm."),
)


LLADA_MOE_NEEDS = (*SIZES, "expert_intermediate_size", "num_experts", "num_experts_per_tok", "rope_theta")


def _illada(raw: Raw) -> Raw:
    if raw.get("layer_norm_eps") is not None:
        raise DuelError("This iLLaDA has LayerNorm (layer_norm_eps): it does not fit transformers' Llama.")
    return {}


def _llada_moe(raw: Raw) -> Raw:
    return {
        "moe_intermediate_size": raw["expert_intermediate_size"],
        "intermediate_size": raw.get("dense_intermediate_size") or raw["expert_intermediate_size"],
        "head_dim": raw["hidden_size"] // raw["num_attention_heads"],
        "rms_norm_eps": raw.get("rms_norm_eps") or 1e-5,
        "norm_topk_prob": False,  # whatever the config says: the authors' code never does
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _llada2(raw: Raw) -> Raw:
    if raw.get("use_bias") or raw.get("use_qkv_bias") or raw.get("norm_head") or not raw.get("use_qk_norm", True):
        raise DuelError("This LLaDA2 is not the released network: it does not fit transformers' Glm4Moe.")
    if raw.get("quantization_config"):
        raise DuelError(
            "This LLaDA2 is quantised, and its query_key_value cannot be taken apart so. Take the checkpoint that is "
            "not, and quantise it at load (load_in_8bit=true or load_in_4bit=true)."
        )
    head = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    part, theta = entries.said(raw, "partial_rotary_factor") or 0.5, entries.said(raw, "rope_theta")
    return {
        "head_dim": head,
        "use_qk_norm": True,
        "attention_bias": False,
        "norm_topk_prob": raw["num_experts_per_tok"] > 1,
        "n_routed_experts": raw["num_experts"],
        "n_shared_experts": raw["num_shared_experts"],
        "partial_rotary_factor": part,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": part},
    }


LLADA2_NEEDS = (*SPARSE, *GROUPED, "num_experts", "num_shared_experts")
LLADA2_KEYS = (
    (r"^model\.word_embeddings\.", "model.embed_tokens."),
    (r"\.attention\.dense\.", ".self_attn.o_proj."),
    (r"\.attention\.query_layernorm\.", ".self_attn.q_norm."),
    (r"\.attention\.key_layernorm\.", ".self_attn.k_norm."),
    (r"\.attention\.([qkv])_proj\.", r".self_attn.\1_proj."),
    (r"\.mlp\.gate\.expert_bias$", ".mlp.gate.e_score_correction_bias"),
)
LLADA2_FUSED = ((r"\.attention\.[qkv]_proj\.", ".attention.query_key_value."),)


def _llada2_tensors(tensors: Tensors, raw: Raw) -> Tensors:
    """query_key_value (heads of q, then of k, then of v) as three projections; expert biases that are not negative.

    Only the order of biased scores counts, and transformers 4 takes experts outside the chosen groups for scores of 0.
    """
    heads, kept = raw["num_attention_heads"], raw.get("num_key_value_heads") or raw["num_attention_heads"]
    head = raw.get("head_dim") or raw["hidden_size"] // heads
    split = {}
    for key, value in tensors.items():
        if key.endswith(".expert_bias"):
            value = value.float() - value.float().min().clamp(max=0)
        if ".query_key_value." not in key or not value.dim():
            split[key] = value
            continue
        ends = heads * head, (heads + kept) * head
        parts = value[: ends[0]], value[ends[0] : ends[1]], value[ends[1] :]  # of any shape: it is compared later
        split |= {key.replace("query_key_value", f"{x}_proj"): part for x, part in zip("qkv", parts, strict=True)}
    return split


# ---------------------------------------------------------------- the table

FAMILIES = (
    Family(
        "llada",
        "Llama",
        ("LLaDAModelLM",),
        published_block=32,
        mask_id=126336,
        needs=LLADA_NEEDS,
        rename=LLADA_KEYS,
        config=_llada,
    ),
    Family("illada", "Llama", ("ILLaDAForCausalLM",), mask_id=5, config=_illada),
    Family("dream", "Qwen2", ("DreamModel",), shift=1, mask_id=151666, max_length=2048, bos="given"),
    Family(
        "llada-moe",
        "Qwen3Moe",
        ("LLaDAMoEModelLM", "LLaDAMoEModel"),
        published_block=32,
        mask_id=156895,
        needs=LLADA_MOE_NEEDS,
        config=_llada_moe,
    ),
    Family("rnd1", "Qwen3Moe", ("RND1LM", "RND1"), mask_id=151669),
    Family("a2d-qwen3", "Qwen3", ("A2DQwen3LMHeadModel",), max_length=1024),
    Family("a2d-qwen2", "Qwen2", ("A2DQwen2LMHeadModel",), max_length=1024),
    Family("a2d-llama", "Llama", ("A2DLlamaLMHeadModel",), max_length=1024),
    Family("a2d-qwen3-bd3lm", "Qwen3", attention="block_causal", block=32, max_length=1024),
    Family("a2d-qwen2-bd3lm", "Qwen2", attention="block_causal", block=32, max_length=1024),
    Family("a2d-llama-bd3lm", "Llama", attention="block_causal", block=32, max_length=1024),
    Family("open-dllm", "Qwen2", shift=1, bos="given"),
    Family("sdar", "Qwen3", ("SDARForCausalLM",), attention="block_causal", block=4, mask_id=151669),
    Family("sdar-moe", "Qwen3Moe", ("SDARMoeForCausalLM",), attention="block_causal", block=4, mask_id=151669),
    Family(
        "fast-dllm-v2",
        "Qwen2",
        ("Fast_dLLM_QwenForCausalLM",),
        attention="block_causal",
        block=32,
        block_keys=(),  # its forward takes 32 whatever config.bd_size says
        shift=1,
        mask_id=151665,
        bos="given",
    ),
    Family(
        "llada2",
        "Glm4Moe",
        ("LLaDA2MoeModelLM",),
        attention="block_causal",
        block=32,
        mask_id=156895,
        needs=LLADA2_NEEDS,
        rename=LLADA2_KEYS,
        fused=LLADA2_FUSED,
        config=_llada2,
        tensors=_llada2_tensors,
    ),
    Family("stable-diffcoder", "Llama", ("StableDiffcoderForCausalLM",), attention="block_causal", block=4, mask_id=5),
    Family("dream-reasoner", "Qwen2", ("DreamForCausalLM",), attention="block_causal", block=32, mask_id=151669),
)

NAMED = {family.name: family for family in FAMILIES}
PLAIN = {f"{native}ForCausalLM": native for native in ("Llama", "Qwen2", "Qwen3", "Qwen3Moe", "Glm4Moe")}

NO_LAW = "so no deterministic order of unmasking explains a text, and the theorem does not cover it"
REFUSED = {
    "DiffusionGemmaForBlockDiffusion": f"it has no mask state: it starts from random tokens and noises again, {NO_LAW}",
    "WeDLMForCausalLM": f"it reorders tokens under causal attention and revises what it has shown, {NO_LAW}",
    "LLaDA21MoeModelLM": f"it edits revealed tokens, {NO_LAW}",
    "E2D2": "it is an encoder-decoder with a wrapper of its own, which is not supported",
    "NemotronLabsDiffusionModel": "its prefix is causal and its block bidirectional, which is not supported yet",
    "NemotronLabsDiffusionVLMModel": "it needs images, which are not supported",
}
EDITS = re.compile(r"editing_threshold|edit_threshold")


def find(raw: Raw, asked: LoadOptions, folder: str | None) -> Family | None:
    """The family of a raw config, or the one asked for; None: none of these. `folder`: where its code lies, as text.

    Raises DuelError for an unknown name, for an autoregressive network that nothing says is more, and for networks that
    the theorem does not cover.
    """
    classes = classes_of(raw)
    for given in classes:
        if given in REFUSED and asked.family is None:
            raise DuelError(f"{asked.name} is a {given}: {REFUSED[given]}.")
    if asked.family is not None:
        if asked.family not in NAMED:
            raise unknown("family", asked.family, NAMED)
        return NAMED[asked.family]
    for given in classes:
        for family in FAMILIES:
            if given in family.architectures:
                return _told_apart(family, asked, folder)
        if given in PLAIN and asked.attention != "causal":
            if asked.attention is None:
                raise DuelError(
                    f"{asked.name} is a {given}, by its config an autoregressive network. To score it as it is: "
                    "estimator=ar. If it is a masked diffusion model, say which: "
                    f"family={'|'.join(name for name in NAMED)}, or attention=bidirectional with mask_token_id=<id>."
                )
            return Family("decoder", PLAIN[given])
    return None


def _told_apart(family: Family, asked: LoadOptions, folder: str | None) -> Family:
    """The family, where one class name stands for two."""
    if family.name == "llada2" and _edits(folder):
        raise DuelError(
            f"{asked.name} edits revealed tokens when it generates (LLaDA2.1 and later), {NO_LAW}. Its policy from "
            "mask to token alone is covered: pass family=llada2 to score that."
        )
    blocks = f"{family.name}-bd3lm"
    if blocks in NAMED and asked.attention is None and "bd3lm" in os.path.basename(asked.name.rstrip("/")).lower():
        log.warning("taking %s as %s by its name: its config does not say; family= decides", asked.name, blocks)
        return NAMED[blocks]
    return family


def classes_of(raw: Raw) -> list[str]:
    """Class names in `architectures` and in `auto_map`, whose values are module.Class or lists of them."""
    auto_map = (raw.get("auto_map") or {}).values()
    values = [value for entry in auto_map for value in (entry if isinstance(entry, list) else [entry])]
    return [*(raw.get("architectures") or []), *(str(value).rsplit(".", 1)[-1] for value in values if value)]


def _edits(folder: str | None) -> bool:
    """Whether a checkpoint's own code, read as text, has an editing threshold."""
    files = [os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(".py")] if folder else []
    return any(EDITS.search(open(file, encoding="utf-8", errors="replace").read()) for file in files)
