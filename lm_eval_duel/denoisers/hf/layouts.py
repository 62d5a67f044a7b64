"""The configs and tensors of single families, translated to transformers' own classes."""

from __future__ import annotations

from typing import Any

import torch

from lm_eval_duel.arguments import COUNT
from lm_eval_duel.denoisers.hf import block_routing
from lm_eval_duel.errors import DuelError

Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]

# Required entries of a native config: without one, its class would silently use its own default.
SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
DENSE = (*SIZES, "intermediate_size", "rms_norm_eps", "rope_theta")
SPARSE = (
    *SIZES,
    "moe_intermediate_size",
    "num_experts_per_tok",
    "rms_norm_eps",
    "rope_theta",
    "norm_topk_prob",
)
NEEDED = {
    "GPT2": (*SIZES, "layer_norm_epsilon"),
    "Llama": DENSE,
    "Qwen2": DENSE,
    "Qwen3": DENSE,
    "Qwen3Moe": (*SPARSE, "num_experts"),
    "Glm4Moe": (
        *SPARSE,
        "n_group",
        "topk_group",
        "routed_scaling_factor",
        "first_k_dense_replace",
        "intermediate_size",
        "n_routed_experts",
        "n_shared_experts",
        "partial_rotary_factor",
    ),
}


def lookup(config: Config, key: str) -> Any:
    """An entry, which transformers 5 may have moved into `rope_parameters`; None if absent."""
    value = config.get(key)
    if value is None:
        value = (config.get("rope_parameters") or {}).get(key)
    return value


def unscaled_rotary(section: Any) -> bool:
    """True if a config's rope_scaling or rope_parameters leaves the frequencies unchanged."""
    if not isinstance(section, dict):
        return True
    kind = section.get("rope_type") or section.get("type")
    return kind in (None, "", "default")


def scale_embedding(model: Any, config: Config) -> None:
    """Scale the input of a LLaDA by the square root of its width, if its config says so (input_emb_norm).

    The scale is not folded into the table, whose weights may be the head's, too.
    """
    if not config.get("input_emb_norm"):
        return
    scale = config["d_model"] ** 0.5

    def scaled(module: Any, ids: Any, embedded: torch.Tensor) -> torch.Tensor:
        return embedded * scale

    model.get_input_embeddings().register_forward_hook(scaled)


MMADA_IMAGES = "MMaDA's images"
LLADA: dict[str, Any] = {
    "finish": scale_embedding,
    "entries": {
        "hidden_size": "d_model",
        "intermediate_size": "mlp_hidden_size",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "num_key_value_heads": "n_kv_heads",
        "max_position_embeddings": "max_sequence_length",
        "tie_word_embeddings": "weight_tying",
    },
    "values": {"rms_norm_eps": 1e-5},
    "reads": ("embedding_size", "new_vocab_size", "input_emb_norm"),
    "released": {
        "include_bias": False,
        "include_qkv_bias": False,
        "alibi": False,
        "scale_logits": False,
        "attention_layer_norm": False,
        "bias_for_layer_norm": False,
        "multi_query_attention": False,
        "block_type": "llama",
        "layer_norm_type": "rms",
        "activation_type": "silu",
        "hidden_act": "silu",
        "rope": True,
        "layer_norm_with_affine": True,
        "block_group_size": 1,
        "rope_scaling": unscaled_rotary,
        "rope_parameters": unscaled_rotary,
    },
    "harmless": {
        "vocab_size": "embedding_size counts the rows, where it is given",
        "mlp_ratio": "mlp_hidden_size is required",
        "alibi_bias_max": "alibi is refused",
        "attention_layer_norm_with_affine": "attention_layer_norm is refused",
        "rope_full_precision": "rotations round as little in transformers",
        "llm_vocab_size": MMADA_IMAGES,
        "codebook_size": MMADA_IMAGES,
        "num_vq_tokens": MMADA_IMAGES,
        "num_new_special_tokens": MMADA_IMAGES,
        "w_clip_vit": MMADA_IMAGES,
    },
    "rename": (
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
    ),
}


def llada(config: Config) -> Config:
    """The number of rows of LLaDA's embedding, some of which are padding."""
    return {"vocab_size": config.get("embedding_size") or config["vocab_size"]}


def mmada(config: Config) -> Config:
    """The number of rows of LLaDA's embedding, with those that MMaDA added for the codes of images."""
    counts = [config.get(key) or 0 for key in ("vocab_size", "embedding_size", "new_vocab_size")]
    return {"vocab_size": max(counts)}


SMDM_ENTRIES = {  # of lit_gpt
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "num_key_value_heads": "n_query_groups",
    "rms_norm_eps": "norm_eps",
    "max_position_embeddings": "block_size",
}
SMDM_RELEASED = {
    "rotary_percentage": 1.0,
    "condense_ratio": 1,
    "parallel_residual": False,
    "bias": False,
    "shared_attention_norm": False,
    "_norm_class": ("RMSNorm", "FusedRMSNorm"),
    "_mlp_class": "LLaMAMLP",
}
SMDM_HARMLESS = {
    "name": "a name",
    "org": "a name",
    "padding_multiple": "the tables of the file decide",
    "padded_vocab_size": "the tables of the file decide",
}
SMDM_KEYS = (
    (r"^transformer\.wte\.", "model.embed_tokens."),
    (r"^transformer\.ln_f\.", "model.norm."),
    (r"^transformer\.h\.(\d+)\.attn\.([qkv])_proj\.", r"model.layers.\1.self_attn.\2_proj."),
    (r"^transformer\.h\.(\d+)\.attn\.proj\.", r"model.layers.\1.self_attn.o_proj."),
    (r"^transformer\.h\.(\d+)\.norm_1\.", r"model.layers.\1.input_layernorm."),
    (r"^transformer\.h\.(\d+)\.norm_2\.", r"model.layers.\1.post_attention_layernorm."),
    (r"^transformer\.h\.(\d+)\.mlp\.swiglu\.w1\.", r"model.layers.\1.mlp.gate_proj."),
    (r"^transformer\.h\.(\d+)\.mlp\.swiglu\.w2\.", r"model.layers.\1.mlp.up_proj."),
    (r"^transformer\.h\.(\d+)\.mlp\.swiglu\.w3\.", r"model.layers.\1.mlp.down_proj."),
)


def smdm_tensors(tensors: Tensors, config: Config) -> Tensors:
    """Split attn.attn (in each group its q heads, its k, its v) into projections; give the head a row for [MASK]."""
    heads = config["n_head"]
    groups = config.get("n_query_groups") or heads
    queries = heads // groups  # heads of a group, which share a key and a value
    split = {}
    for key, value in tensors.items():
        if key == "lm_head.weight" and value.shape[:1] == (config["vocab_size"],):
            of_mask = value.new_zeros(1, *value.shape[1:])  # its column is never a token
            value = torch.cat([value, of_mask])
        if ".attn.attn." not in key:
            split[key] = value
            continue
        grouped = value.unflatten(0, (groups, queries + 2, -1))  # (groups, queries + 2, H, D)
        parts = grouped.split((queries, 1, 1), 1)
        for letter, part in zip("qkv", parts, strict=True):
            name = key.replace(".attn.attn.", f".attn.{letter}_proj.")
            split[name] = part.flatten(0, 2)
    return split


NEMOTRON_KEYS = ((r"^encoder\.", "model."), (r"^diffusion_head\.", "lm_head."))
NEMOTRON_HARMLESS = {"dlm_paradigm": "training", "prefix_ratio": "training"}
YARN_NEEDS = ("factor", "original_max_position_embeddings")
YARN = (*YARN_NEEDS, "beta_fast", "beta_slow", "mscale", "mscale_all_dim")


def nemotron(config: Config) -> Config:
    """Nemotron-Labs-Diffusion's entries for Llama, whose rotary positions are YaRN's with the checkpoint's own factor.

    Its queries are scaled by 1 + b ln(1 + floor(position / original_max_position_embeddings)), which is 1 up to that
    length, and rows are not longer. A factor below 1 is used as given. Raises DuelError for a config without these.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type")
    is_complete = all(rope.get(key) for key in YARN_NEEDS)
    if kind != "yarn" or not is_complete:
        raise DuelError(
            "This Nemotron-Labs-Diffusion is not the released network: its rope_parameters should be YaRN's (rope_type "
            f"yarn, factor, original_max_position_embeddings); got {rope!r}."
        )
    theta = lookup(config, "rope_theta")
    parameters = {"rope_type": "yarn", "rope_theta": theta}
    for key in YARN:
        if rope.get(key) is not None:
            parameters[key] = rope[key]
    return {"rope_theta": theta, "rope_scaling": None, "rope_parameters": parameters}


CODA_HARMLESS = {
    "block_masking_probability": "training",
    "mask_block_sizes": "training",
    "prefix_probability": "training",
    "truncate_probability": "training",
    "sampling_eps": "training",
    "attention_kernel": "how products are computed",
}


def nemotron_research_fields(config: Config) -> dict[str, Any]:
    """The shifted logits and the BOS of Dream (dlm_type "dream"), or neither, as in LLaDA (dlm_type "llada")."""
    kind = config.get("dlm_type")
    if kind not in (None, "llada", "dream"):
        raise DuelError(f"The config.json is wrong: 'dlm_type' must be llada or dream; got {kind!r}.")
    return {"shift": 1, "bos": "given"} if kind == "dream" else {}


DIFFUGPT_TRUNK = "denoise_model."  # the beginning of its tensors' names, which no GPT-2 has
DIFFUGPT: dict[str, Any] = {
    "entries": {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
    },
    "values": {"activation_function": "gelu_new", "tie_word_embeddings": True},  # the head is not stored
    "released": {  # transformers' fast attention ignores them
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "add_cross_attention": False,
    },
    "harmless": {"n_ctx": "n_positions is required"},
    "rename": ((r"^embed_tokens\.", "transformer.wte."), (r"^denoise_model\.", "transformer.")),
}
DIFFUGPT_MASKS = {50257: 10541, 50258: 50257}  # by vocab_size: diffugpt-s made a token of GPT-2 its [MASK]


def diffugpt_fields(config: Config) -> dict[str, Any]:
    """[MASK] of the two published sizes."""
    return {"mask_id": DIFFUGPT_MASKS.get(config.get("vocab_size"))}


def llada_moe(config: Config) -> Config:
    """LLaDA-MoE's entries for Qwen3-MoE."""
    return {
        "intermediate_size": config.get("dense_intermediate_size") or config["expert_intermediate_size"],
        "head_dim": config["hidden_size"] // config["num_attention_heads"],
        "norm_topk_prob": False,  # the authors' code ignores this entry and never normalises
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def llada2(config: Config) -> Config:
    """LLaDA2's entries for GLM-4-MoE."""
    part = lookup(config, "partial_rotary_factor") or 0.5
    theta = lookup(config, "rope_theta")
    rotary = {
        "rope_type": "default",
        "rope_theta": theta,
        "partial_rotary_factor": part,
    }
    return {
        "use_qk_norm": True,
        "attention_bias": False,
        "norm_topk_prob": config["num_experts_per_tok"] > 1,
        "partial_rotary_factor": part,
        "rope_scaling": None,
        "rope_parameters": rotary,
    }


def llada2_fields(config: Config) -> dict[str, Any]:
    """Routing by block (LLaDA2.2), if the config has it; raises DuelError for a strategy that is not known."""
    strategy = config.get("routing_strategy")
    capacity = COUNT("expert_capacity", config.get("expert_capacity"), " of config.json")
    if strategy is not None and (capacity is None or "block" not in str(strategy).lower()):
        raise DuelError(
            f"The config.json has routing_strategy={strategy!r} with expert_capacity={capacity!r}. Known are routing "
            "by block with an expert_capacity, and routing by token with neither entry."
        )
    if capacity is None:
        return {}

    def install_routing(model: Any, config: Config) -> None:
        block_routing.install(model, capacity)

    return {"block_routes": True, "finish": install_routing}


INSERTING = ("delete_token_id", "split_token_id")  # entries of a LLaDA2 that inserts and deletes tokens
LLADA_MOE_RELEASED = {
    "clip_qkv": None,
    "shared_expert_intermediate_size": None,
    "router_num_group": None,
    "router_topk_group": None,
    "qk_layernorm": True,
    "moe_router_score_function": "softmax",
    "moe_router_enable_expert_bias": False,
    "routed_scaling_factor": 1,
    "partial_rotary_factor": 1,
    "moe_layer_freq": lambda layers: set(layers) == {1},
}
NEVER_DENSE = "no layer is dense"
QWEN3_MOE_HARMLESS = {"intermediate_size": NEVER_DENSE}
LLADA_MOE_HARMLESS = {
    "norm_topk_prob": "the authors' code never normalises",
    "dense_intermediate_size": NEVER_DENSE,
    "intermediate_size": NEVER_DENSE,
    "decoder_sparse_step": "the authors' code has no such entry",
    "mlp_only_layers": "the authors' code has no such entry",
}
LLADA2_RELEASED = {
    "use_bias": False,
    "use_qkv_bias": False,
    "norm_head": False,
    "norm_softmax": False,
    "use_qk_norm": True,
    "use_rmsnorm": True,
    "moe_router_enable_expert_bias": True,
    "score_function": "sigmoid",
    "router_dtype": ("fp32", "float32"),
    "rope_scaling": unscaled_rotary,
    "rope_parameters": unscaled_rotary,
    "quantization_config": None,  # its query_key_value could not be split
}
LLADA2_HARMLESS = {
    "norm_topk_prob": "the authors' code normalises wherever it chooses several experts",
    "rotary_dim": "the authors' code reads partial_rotary_factor",
    "attention_bias": "the authors' code reads use_qkv_bias",
    "moe_shared_expert_intermediate_size": "the shapes of the shared expert's tensors tell",
    "image_token_offset": "LLaDA2.0-Uni: only text is scored, and ids that the tokenizer lacks are no tokens",
    **dict.fromkeys(INSERTING, "the sampler inserts and deletes tokens; family=llada2 scores without"),
}
LLADA2_KEYS = (
    (r"^model\.word_embeddings\.", "model.embed_tokens."),
    (r"\.attention\.dense\.", ".self_attn.o_proj."),
    (r"\.attention\.query_layernorm\.", ".self_attn.q_norm."),
    (r"\.attention\.key_layernorm\.", ".self_attn.k_norm."),
    (r"\.attention\.([qkv])_proj\.", r".self_attn.\1_proj."),
    (r"\.mlp\.gate\.expert_bias$", ".mlp.gate.e_score_correction_bias"),
)


def llada2_tensors(tensors: Tensors, config: Config) -> Tensors:
    """Split query_key_value (heads of q, then of k, then of v) into projections; shift expert biases above 0.

    Only the order of biased scores matters, and transformers 4 gives experts outside the chosen groups a score of 0.
    """
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head = config.get("head_dim") or config["hidden_size"] // heads  # features of a head
    first_key = heads * head  # rows of query_key_value
    first_value = first_key + kv_heads * head
    split = {}
    for key, value in tensors.items():
        if key.endswith(".expert_bias"):
            bias = value.float()
            value = bias - bias.min().clamp(max=0)
        if ".query_key_value." not in key:
            split[key] = value
            continue
        split[key.replace("query_key_value", "q_proj")] = value[:first_key]
        split[key.replace("query_key_value", "k_proj")] = value[first_key:first_value]
        split[key.replace("query_key_value", "v_proj")] = value[first_value:]  # shapes are checked later
    return split
