"""Published decoder checkpoints in small: real configs and file layouts, random weights."""

import dataclasses
import json
import re

import plain
import tiny
import torch
from safetensors.torch import save_file

D, MASK = 16, 4


def remote(model, config=None, **others):
    """`architectures` and `auto_map` as authors with code of their own write them."""
    auto = {"AutoConfig": f"configuration_x.{config or 'XConfig'}", "AutoModel": f"modeling_x.{model}", **others}
    return {"architectures": [model], "auto_map": auto}


COMMON = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": D,
    "initializer_range": 0.02,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.52.3",
    "use_cache": True,
    "vocab_size": tiny.ROWS,
}
LLAMA = {**COMMON, "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1, "rms_norm_eps": 1e-5}
QWEN2 = {**COMMON, "max_window_layers": 2, "sliding_window": None, "use_sliding_window": False}
QWEN3 = {**QWEN2, "attention_bias": False, "head_dim": 8}
QWEN3_MOE = {
    **QWEN3,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}
STRETCH = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 16,
    "rope_type": "llama3",
}
YARN = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 0.25,  # below 1, as in the 3B
    "llama_4_scaling_beta": 0.1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 256,
    "rope_theta": 10_000.0,
    "rope_type": "yarn",
}
PLAIN_LLAMA = plain.Net(head=4, theta=1e6, eps=1e-5)
PLAIN_QWEN2 = plain.Net(head=4, theta=1e6)
PLAIN_QWEN3 = plain.Net(head=8, theta=1e6)
PLAIN_MOE = plain.Net(head=8, theta=1e6, experts=6, chosen=2)


@dataclasses.dataclass(frozen=True)
class Case:
    """A published checkpoint in small; `options` are what a user must say to load it."""

    config: dict
    net: plain.Net | plain.GPT2
    parts: tuple = ()  # "bias" of q, k and v; "norm" of q and k
    options: dict = dataclasses.field(default_factory=dict)
    tokenizer: dict = dataclasses.field(default_factory=dict)
    folder: str = "checkpoint"
    rows: int = tiny.ROWS  # of the embedding
    masks: int = 0  # rows of the embedding that the head does not have
    store: str = "whole"  # "sharded", "bfloat16", "tied": no head in the file, "tied and stored"
    metadata: dict = dataclasses.field(default_factory=lambda: {"format": "pt"})  # of the file
    relative: bool = True  # no positions but rotary ones
    seed: int = 3
    mask: int = MASK
    attention: str = "bidirectional"
    shift: int = 0
    bos: str = "none"
    block: int | None = None
    anchor: str = "row"
    published: int | None = None
    length: int = 64


LLADA = {
    **remote("LLaDAModelLM", AutoModelForCausalLM="modeling_llada.LLaDAModelLM"),
    "activation_type": "silu",
    "alibi": False,
    "alibi_bias_max": 8.0,
    "attention_dropout": 0.0,
    "attention_layer_norm": False,
    "bias_for_layer_norm": False,
    "block_group_size": 1,
    "block_type": "llama",
    "d_model": D,
    "embedding_size": 48,
    "eos_token_id": 3,
    "flash_attention": False,
    "include_bias": False,
    "include_qkv_bias": False,
    "init_device": "meta",
    "input_emb_norm": False,
    "layer_norm_type": "rms",
    "layer_norm_with_affine": True,
    "mask_token_id": 45,
    "max_sequence_length": 64,
    "mlp_hidden_size": 24,
    "mlp_ratio": 4,
    "model_type": "llada",
    "multi_query_attention": None,
    "n_heads": 4,
    "n_kv_heads": 2,
    "n_layers": 2,
    "pad_token_id": 3,
    "precision": "amp_bf16",
    "rms_norm_eps": 1e-5,
    "rope": True,
    "rope_full_precision": True,
    "rope_theta": 500_000.0,
    "scale_logits": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.46.3",
    "use_cache": False,
    "vocab_size": 34,
    "weight_tying": False,
}
PLAIN_LLADA = plain.Net(head=4, keys=plain.LLADA, theta=500_000.0, eps=1e-5)
DREAM = {
    **remote("DreamModel"),
    **QWEN2,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "mask_token_id": 35,
    "max_position_embeddings": 4096,
    "model_type": "Dream",
    "pad_token_id": 2,
}

CASES = {
    "llada": Case(
        LLADA,
        PLAIN_LLADA,
        tokenizer={"mask": False},
        rows=48,
        store="sharded",
        mask=45,
        published=32,
    ),
    "mmada": Case(
        {
            **LLADA,
            **remote("MMadaModelLM", AutoModelForCausalLM="modeling_mmada.MMadaModelLM"),
            "codebook_size": 8,
            "embedding_size": 40,
            "llm_vocab_size": 40,
            "model_type": "mmada",
            "new_vocab_size": 48,
            "num_new_special_tokens": 0,
            "num_vq_tokens": 4,
            "vocab_size": 48,
            "w_clip_vit": False,
        },
        PLAIN_LLADA,
        tokenizer={"mask": False},
        rows=48,
        mask=45,
        published=128,
    ),
    "smdm": Case(
        {
            "architectures": ["TransEncoder"],
            "block_size": 64,
            "intermediate_size": 24,
            "model_type": "smdm",
            "n_embd": D,
            "n_head": 4,
            "n_layer": 2,
            "n_query_groups": 2,
            "norm_eps": 1e-5,
            "vocab_size": 39,
        },
        plain.Net(head=4, keys=plain.SMDM, grouped=True, eps=1e-5),
        options={"mask_token_id": 39},
        tokenizer={"mask": False},
        masks=1,
        mask=39,
        bos="given",
    ),
    "illada": Case(
        {
            **remote("ILLaDAForCausalLM", AutoModelForCausalLM="modeling_illada.ILLaDAForCausalLM"),
            **LLAMA,
            "bos_token_id": 2,
            "eos_token_id": 3,
            "layer_norm_eps": None,
            "model_type": "illada",
            "pad_token_id": 0,
            "resid_pdrop": 0.0,
            "tie_word_embeddings": True,
        },
        PLAIN_LLAMA,
        tokenizer={"mask": False},
        store="tied and stored",
        mask=5,
    ),
    "dream": Case(
        DREAM,
        PLAIN_QWEN2,
        ("bias",),
        tokenizer={"mask": False},
        mask=35,
        shift=1,
        bos="given",
        length=2048,
    ),
    "llada-moe": Case(
        {
            **remote("LLaDAMoEModelLM", AutoModelForCausalLM="modeling_lladamoe.LLaDAMoEModelLM"),
            **{key: value for key, value in COMMON.items() if key not in ("intermediate_size", "rms_norm_eps")},
            "attention_bias": False,
            "clip_qkv": None,
            "dense_intermediate_size": 24,
            "expert_intermediate_size": 16,
            "eos_token_id": 3,
            "model_type": "llada",  # the dense network's
            "moe_layer_freq": [1, 1],
            "moe_router_enable_expert_bias": False,
            "norm_topk_prob": True,  # its code never does
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "pad_token_id": 3,
            "qk_layernorm": True,
            "rope_theta": 50_000,
            "shared_expert_intermediate_size": None,
        },
        plain.Net(head=4, theta=50_000.0, eps=1e-5, experts=6, chosen=2, normalised=False),
        ("norm",),
        published=32,
    ),
    "rnd1": Case(
        {
            **remote("RND1LM", AutoModelForMaskedLM="modeling_rnd.RND1LM"),
            **QWEN3_MOE,
            "eos_token_id": 3,
            "mask_token_id": MASK,
            "model_type": "rnd1",
            "moe_backend": "hf",
            "rope_scaling": False,
            "sliding_window": False,
        },
        PLAIN_MOE,
        ("norm",),
    ),
    "a2d-qwen3": Case(
        {
            "architectures": ["A2DQwen3LMHeadModel"],
            **QWEN3,
            "dtype": "bfloat16",
            "layer_types": ["full_attention"] * 2,
            "model_type": "a2d-qwen3",
            "tie_word_embeddings": True,
        },
        PLAIN_QWEN3,
        ("norm",),
        store="tied",
    ),
    "a2d-qwen2": Case(
        {
            "architectures": ["A2DQwen2LMHeadModel"],
            **{key: value for key, value in QWEN2.items() if key not in ("rope_scaling", "rope_theta")},
            "model_type": "a2d-qwen2",
            "rope_parameters": {"rope_theta": 1_000_000.0, "rope_type": "default"},  # as transformers 5 writes it
        },
        PLAIN_QWEN2,
        ("bias",),
    ),
    "a2d-llama": Case(
        {
            "architectures": ["A2DLlamaLMHeadModel"],
            **{key: value for key, value in LLAMA.items() if key not in ("rope_scaling", "rope_theta")},
            "model_type": "a2d-llama",
            "rope_parameters": {**STRETCH, "rope_theta": LLAMA.get("rope_theta", 1e6)},  # as transformers 5 writes it
        },
        plain.Net(head=4, theta=1e6, eps=1e-5, stretch=STRETCH),
    ),
    "a2d-qwen3-bd3lm": Case(
        {
            "architectures": ["A2DQwen3LMHeadModel"],
            **QWEN3,
            "model_type": "a2d-qwen3",
            "tie_word_embeddings": True,
        },
        PLAIN_QWEN3,
        ("norm",),
        {"block": 4},
        folder="Qwen3-0.6B-diffusion-bd3lm-v0.1",
        store="tied",
        attention="block_causal",
        block=4,
    ),
    "a2d-qwen2-bd3lm": Case(
        {
            "architectures": ["A2DQwen2LMHeadModel"],
            **QWEN2,
            "model_type": "a2d-qwen2",
            "tie_word_embeddings": True,  # but the file has a head of its own
        },
        PLAIN_QWEN2,
        ("bias",),
        {"block": 4},
        folder="Qwen2.5-Coder-0.5B-Instruct-diffusion-BD3LM-v0.1",
        attention="block_causal",
        block=4,
    ),
    "a2d-llama-bd3lm": Case(
        {"architectures": ["A2DLlamaLMHeadModel"], **LLAMA, "model_type": "a2d-llama"},
        PLAIN_LLAMA,
        options={"family": "a2d-llama-bd3lm", "block": 4},
        attention="block_causal",
        block=4,
    ),
    "open-dllm": Case(
        {"architectures": ["Qwen2ForCausalLM"], **QWEN2, "model_type": "qwen2", "eos_token_id": 3},
        PLAIN_QWEN2,
        ("bias",),
        {"family": "open-dllm", "tokenizer": tiny.tokenizer()},  # beside a qwen2, transformers 5 reads Qwen's alone
        shift=1,
        bos="given",
    ),
    "sdar": Case(
        {
            **remote("SDARForCausalLM", AutoModelForCausalLM="modeling_sdar.SDARForCausalLM"),
            **QWEN3,
            "block_size": 4,
            "bos_token_id": 3,
            "debug": False,
            "ep_size": 1,
            "eos_token_id": 3,
            "fuse_cross_entropy": True,
            "mask_token_id": 36,
            "model_type": "sdar",
        },
        PLAIN_QWEN3,
        ("norm",),
        tokenizer={"mask": False},
        store="sharded",
        mask=36,
        attention="block_causal",
        block=4,
    ),
    "sdar-moe": Case(
        {
            **remote("SDARMoeForCausalLM", AutoModelForCausalLM="modeling_sdar_moe.SDARMoeForCausalLM"),
            **QWEN3_MOE,
            "block_size": 8,
            "model_type": "sdar_moe",
        },
        PLAIN_MOE,
        ("norm",),
        attention="block_causal",
        block=8,
    ),
    "fast-dllm-v2": Case(
        {
            **remote("Fast_dLLM_QwenForCausalLM", AutoModelForCausalLM="modeling.Fast_dLLM_QwenForCausalLM"),
            **QWEN2,
            "bd_size": 8,  # its forward takes 32 nevertheless
            "eos_token_id": 3,
            "model_type": "Fast_dLLM_Qwen",
            "pad_token_id": 3,
        },
        PLAIN_QWEN2,
        ("bias",),
        {"block": 4},
        store="bfloat16",
        attention="block_causal",
        shift=1,
        bos="given",
        block=4,
    ),
    "llada2": Case(
        {
            **remote("LLaDA2MoeModelLM", AutoModelForCausalLM="modeling_llada2_moe.LLaDA2MoeModelLM"),
            **COMMON,
            "embedding_dropout": 0.0,
            "eos_token_id": 3,
            "first_k_dense_replace": 1,
            "head_dim": 8,
            "max_window_layers": 28,
            "model_type": "llada2_moe",
            "moe_intermediate_size": 16,
            "moe_router_enable_expert_bias": True,
            "n_group": 4,
            "norm_topk_prob": True,
            "num_experts": 12,
            "num_experts_per_tok": 3,
            "num_hidden_layers": 3,
            "num_shared_experts": 1,
            "output_dropout": 0.0,
            "output_router_logits": False,
            "pad_token_id": 3,
            "partial_rotary_factor": 0.5,
            "rope_theta": 600_000,
            "rotary_dim": 4,
            "routed_scaling_factor": 2.5,
            "router_dtype": "fp32",
            "score_function": "sigmoid",
            "sliding_window": 4096,
            "topk_group": 2,
            "use_bias": False,
            "use_qk_norm": True,
            "use_qkv_bias": False,
            "use_rmsnorm": True,
            "use_sliding_window": False,
        },
        plain.Net(
            head=8,
            layers=3,
            keys=plain.LLADA2,
            theta=600_000.0,
            turned=0.5,
            experts=12,
            chosen=3,
            groups=4,
            groups_kept=2,
            scale=2.5,
            dense=1,
        ),
        ("norm",),
        {"block": 4},
        attention="block_causal",
        block=4,
    ),
    "stable-diffcoder": Case(
        {
            **remote("StableDiffcoderForCausalLM", AutoModelForCausalLM="modeling_sd.StableDiffcoderForCausalLM"),
            **LLAMA,
            "bos_token_id": 0,
            "eos_token_id": 2,
            "model_type": "llama",
            "pad_token_id": 1,
        },
        PLAIN_LLAMA,
        tokenizer={"mask": False},
        mask=5,
        attention="block_causal",
        block=4,
    ),
    "d2f-llada": Case(
        LLADA,
        PLAIN_LLADA,
        options={"family": "d2f-llada", "block": 4},
        tokenizer={"mask": False},
        rows=48,
        mask=45,
        attention="block_causal",
        block=4,
        anchor="target",
    ),
    "d2f-dream": Case(
        DREAM,
        PLAIN_QWEN2,
        ("bias",),
        {"family": "d2f-dream", "block": 4},
        tokenizer={"mask": False},
        mask=35,
        attention="block_causal",
        shift=1,
        bos="given",
        block=4,
        anchor="target",
        length=2048,
    ),
    "dream-reasoner": Case(
        {
            **remote("DreamForCausalLM", AutoModelForCausalLM="modeling_dream.DreamForCausalLM"),
            **QWEN2,
            "mask_token_id": 37,
            "model_type": "Dream",  # which would be another network
        },
        PLAIN_QWEN2,
        ("bias",),
        {"block": 4},
        tokenizer={"mask": False},
        mask=37,
        attention="block_causal",
        block=4,
    ),
    "nemotron-labs-diffusion": Case(
        {
            **remote("NemotronLabsDiffusionModel", "NemotronLabsDiffusionConfig"),
            **{key: value for key, value in LLAMA.items() if key not in ("rope_scaling", "rope_theta")},
            "ar_loss_weight": 1.0,
            "attn_implementation": "sdpa",
            "block_size": 4,
            "bos_token_id": 2,
            "dlm_loss_weight": 1.0,
            "dlm_paradigm": "bidirectional",
            "dp_varying_mask_ratio": False,
            "eos_token_id": 3,
            "head_dim": 8,
            "mask_token_id": 36,
            "model_type": "nemotron_labs_diffusion",
            "rope_parameters": YARN,
            "sliding_window": None,
        },
        plain.Net(head=8, keys=plain.NEMOTRON, eps=1e-5, stretch=YARN),
        tokenizer={"mask": False},
        mask=36,
        attention="causal_prefix",
        bos="given",
        block=4,
    ),
    "nemotron-diffusion-research": Case(
        {
            **remote("DiffEncoderModel", "NVRDiffConfig"),
            **QWEN3,
            "block_size": 4,
            "dlm_paradigm": "block_diff",
            "dlm_type": "dream",
            "mask_token_id": 37,
            "model_type": "nvrdiff",
            "prefix_ratio": 0.8,
            "seq_length": 64,
        },
        dataclasses.replace(PLAIN_QWEN3, keys=plain.NEMOTRON),
        ("norm",),
        tokenizer={"mask": False},
        mask=37,
        attention="block_causal",
        shift=1,
        bos="given",
        block=4,
    ),
    "diffugpt": Case(
        {
            "activation_function": "gelu_new",
            "architectures": ["GPT2LMHeadModel"],
            "attn_pdrop": 0.1,
            "bos_token_id": 2,
            "embd_pdrop": 0.1,
            "eos_token_id": 2,
            "initializer_range": 0.02,
            "layer_norm_epsilon": 1e-5,
            "model_type": "gpt2",
            "n_ctx": 64,
            "n_embd": D,
            "n_head": 4,
            "n_layer": 2,
            "n_positions": 64,
            "resid_pdrop": 0.1,
            "summary_type": "cls_index",
            "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
            "vocab_size": tiny.ROWS,
        },
        plain.GPT2(),
        options={"tokenizer": tiny.tokenizer()},  # beside a gpt2, transformers 5 reads GPT-2's alone
        metadata={"lm_head.weight": "embed_tokens.weight"},
        shift=1,
        bos="given",
        relative=False,
        seed=4,
    ),
    "diffullama": Case(
        {"architectures": ["LlamaForCausalLM"], **LLAMA, "max_position_embeddings": 4096, "model_type": "llama"},
        PLAIN_LLAMA,
        options={"family": "diffullama"},
        store="sharded",
        shift=1,
        bos="given",
        length=2048,
    ),
    "plain bidirectional": Case(
        {"architectures": ["LlamaForCausalLM"], **LLAMA, "model_type": "llama"},
        PLAIN_LLAMA,
        options={"attention": "bidirectional", "mask_token_id": 38},
        mask=38,
    ),
    "plain block_causal": Case(
        {"architectures": ["Qwen3ForCausalLM"], **QWEN3, "model_type": "qwen3"},
        PLAIN_QWEN3,
        ("norm",),
        {"attention": "block_causal", "block": 2, "shift_logits": True},
        attention="block_causal",
        shift=1,
        block=2,
    ),
}


def weights(case):
    """Random tensors under the names of the family's files."""
    net, generator = case.net, torch.Generator().manual_seed(case.seed)
    if isinstance(net, plain.GPT2):
        shapes = net.shapes(case.rows, D)
        draws = {key: torch.randn(shape, generator=generator) * 0.4 for key, shape in shapes.items()}
        return {key: draw + 1 if re.search(r"ln_\w+\.weight", key) else draw for key, draw in draws.items()}
    q, kept = net.heads * net.head, net.kept * net.head
    dense, expert = 24, 16
    outside = {"table": (case.rows, D), "last": (D,)} | (
        {} if case.store == "tied" else {"head": (case.rows - case.masks, D)}
    )
    made = {}

    def add(name, shape, n=None, e=None):
        draw = torch.randn(shape, generator=generator)
        if len(shape) == 1:
            draw = draw * 0.2 + {"router bias": -2}.get(name, 0 if "bias" in name else 1)
        else:
            draw = draw * {"table": 0.5 if case.store.startswith("tied") else 1.0, "router": 0.5}.get(name, 0.3)
        made[net.keys[name].format(n=n, e=e)] = draw

    for name, shape in outside.items():
        add(name, shape)
    for n in range(net.layers):
        layer = {"before mix": (D,), "before feed": (D,), "out": (D, q)}
        if "qkv" in net.keys:
            layer["qkv"] = (q + 2 * kept, D)
        else:
            layer |= {"q": (q, D), "k": (kept, D), "v": (kept, D)}
        if "bias" in case.parts:
            layer |= {"q bias": (q,), "k bias": (kept,), "v bias": (kept,)}
        if "norm" in case.parts:
            layer |= {"q norm": (net.head,), "k norm": (net.head,)}
        if not net.experts or n < net.dense:
            layer |= {"gate": (dense, D), "up": (dense, D), "down": (D, dense)}
        else:
            layer["router"] = (net.experts, D)
            if net.groups:
                layer["router bias"] = (net.experts,)
                layer |= {"shared gate": (expert, D), "shared up": (expert, D), "shared down": (D, expert)}
            for e in range(net.experts):
                for name, shape in (("gate", (expert, D)), ("up", (expert, D)), ("down", (D, expert))):
                    add(f"expert {name}", shape, n, e)
        for name, shape in layer.items():
            add(name, shape, n)
    if case.store == "tied and stored":
        made[net.keys["head"]] = made[net.keys["table"]].clone()
    return made


def write(folder, case):
    """The checkpoint of a case below `folder`; its path and its tensors in float64."""
    folder = folder / case.folder
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(case.config))
    tiny.tokenizer(**case.tokenizer).save_pretrained(folder)
    tensors = weights(case)
    if case.store == "bfloat16":
        tensors = {key: value.bfloat16() for key, value in tensors.items()}
    right = {key: value.double() for key, value in tensors.items()}
    if case.config["model_type"] == "llama":  # old files hold what is computed anew
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    shards = [list(tensors)[::2], list(tensors)[1::2]] if case.store == "sharded" else [list(tensors)]
    names = [f"model-{n:05}-of-00002.safetensors" for n in (1, 2)] if len(shards) == 2 else ["model.safetensors"]
    for name, keys in zip(names, shards, strict=True):
        save_file({key: tensors[key] for key in keys}, folder / name, metadata=case.metadata)
    if len(shards) == 2:
        places = {key: name for name, keys in zip(names, shards, strict=True) for key in keys}
        index = {"metadata": {"total_size": 0}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return str(folder), right
